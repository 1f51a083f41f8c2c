/* y = x W^T + b for a few rows of x and a frozen W.
 *
 * A verify pass multiplies 1 to 64 rows. Libraries are made for one row or for very many: on CPUs without bfloat16
 * instructions they spend several times longer on 16 rows than on one, although the time should be that of reading W.
 * Here W is read once per tile of rows, widened to float32 in registers, and accumulated in float32; the result is
 * rounded once.
 *
 * Layout of packed W: blocks of COLUMNS outputs; in a block, for each input k, its weights in the order of tile.h.
 */
#include "team.h"
#include "tile.h"

/* Outputs of a block, which differ with the width of the registers. */
long NAME(columns)(void) { return COLUMNS; }

static floats get_bias(const struct linear *l, long first) {
    float padded[LANES] = {0};
    const long count = l->outputs - first;
    if (l->bias && count > 0) memcpy(padded, l->bias + first, (count < LANES ? count : LANES) * sizeof(float));
    floats value;
    memcpy(&value, padded, sizeof value);
    return value;
}

static void put_on(element *to, floats value, const element *residual, long count) {
    if (count <= 0) return;
    if (residual) value = get_some(residual, count) + rounded(value);
    put_some(to, value, count);
}

void NAME(linear_team)(struct team *team, const struct linear *l, const float *x, const element *residual, element *y,
                       long rows) {
    const long blocks = (l->outputs + COLUMNS - 1) / COLUMNS;
    for (long n; (n = next_task(team, blocks)) >= 0;) {
        const element *block = l->weight + n * l->inputs * COLUMNS;
        const long first = n * COLUMNS, width = l->outputs - first;
        const floats left = get_bias(l, first), right = get_bias(l, first + LANES);
        floats low[GROUP], high[GROUP];
        for (long r = 0; r < rows; r += GROUP) {
            const long some = rows - r < GROUP ? rows - r : GROUP;
            block_product(x + r * l->inputs, some, l->inputs, block, low, high);
            for (long i = 0; i < some; i++) {
                const long at = (r + i) * l->outputs + first;
                put_on(y + at, low[i] + left, residual ? residual + at : NULL, width);
                put_on(y + at + LANES, high[i] + right, residual ? residual + at + LANES : NULL, width - LANES);
            }
        }
    }
}

/* x [rows, inputs], w packed, bias [outputs] or NULL, y [rows, outputs]; scratch [rows, inputs] floats. */
void NAME(linear)(const element *x, const element *w, const float *bias, element *y, float *scratch, long rows,
                  long inputs, long outputs, int threads) {
    const struct linear l = {w, bias, inputs, outputs};
    struct phase phases[1 + LINEAR_PHASES] = {{0}};
#pragma omp parallel num_threads(threads)
    {
        struct team team = {phases, 0};
        for (long r; (r = next_task(&team, rows)) >= 0;) widen(x + r * inputs, scratch + r * inputs, inputs);
        NAME(linear_team)(&team, &l, scratch, NULL, y, rows);
    }
}
