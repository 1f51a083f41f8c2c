/* The middle of a gated MLP: activation(gate) * up, rounded where the modules round. */
#include "activation.h"
#include "team.h"
#include "tile.h"

static inline floats gate(floats gate, floats up, int kind) {
    return rounded(activated(gate, (enum activation)kind)) * up;
}

static floats bias_at(const float *bias, long first) {
    floats value = {0};
    if (bias) memcpy(&value, bias + first, sizeof value);
    return value;
}

void NAME(gated_team)(struct team *team, const struct linear *l, const float *x, float *wide, long rows, int kind) {
    const long width = l->outputs / 2;
    for (long n; (n = next_task(team, width / COLUMNS)) >= 0;) {
        const element *gates = l->weight + n * l->inputs * COLUMNS, *ups = gates + width * l->inputs;
        floats g[2][GROUP], u[2][GROUP];
        for (long r = 0; r < rows; r += GROUP) {
            const long some = rows - r < GROUP ? rows - r : GROUP;
            block_product(x + r * l->inputs, some, l->inputs, gates, g[0], g[1]);
            block_product(x + r * l->inputs, some, l->inputs, ups, u[0], u[1]);
            for (int half = 0; half < 2; half++) {
                const long first = n * COLUMNS + half * LANES;
                const floats gate_bias = bias_at(l->bias, first), up_bias = bias_at(l->bias, width + first);
                for (long i = 0; i < some; i++)
                    put_wide(wide + (r + i) * width + first,
                             gate(rounded(g[half][i] + gate_bias), rounded(u[half][i] + up_bias), kind), LANES);
            }
        }
    }
}

/* gate_up [rows, 2 * width], gates first; y [rows, width]. */
void NAME(gated)(const element *gate_up, element *y, long rows, long width, int kind, int threads) {
    const long pieces = (width + 511) / 512; /* so that one row, too, is shared by the threads */
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > 1024)
    for (long piece = 0; piece < rows * pieces; piece++) {
        const long row = piece / pieces, first = piece % pieces * 512;
        const long stop = first + 512 < width ? first + 512 : width;
        const element *gates = gate_up + row * 2 * width, *ups = gates + width;
        for (long i = first; i < stop; i += LANES)
            put_some(y + row * width + i, gate(get_some(gates + i, stop - i), get_some(ups + i, stop - i), kind),
                     stop - i);
    }
}
