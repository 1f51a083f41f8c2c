/* Root-mean-square norms of rows. */
#include "norm.h"
#include "team.h"

void NAME(norm_team)(struct team *team, const struct norm *norm, const element *x, float *wide, long rows,
                     long width) {
    for (long r; (r = next_task(team, rows)) >= 0;)
        norm_row(x + r * width, norm->weight, NULL, wide + r * width, width, norm->epsilon,
                 (enum norm_style)norm->style);
}

/* x, y [rows, width], weight [width]. */
void NAME(norm)(const element *x, const element *weight, element *y, long rows, long width, float epsilon, int style,
                int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > 16384)
    for (long r = 0; r < rows; r++)
        norm_row(x + r * width, weight, y + r * width, NULL, width, epsilon, (enum norm_style)style);
}
