/* The most likely token of each row of logits. */
#include "element.h"

/* First place of the largest of `width` numbers; of the first nan if there is one, as torch has it. */
static int64_t argmax_row(const element *x, long width) {
    floats most = spread(-__builtin_inff());
    ints strange = {0};
    const long whole = width / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) {
        const floats value = get(x + i);
        const ints above = value > most;
        strange |= value != value;
        most = (floats)((above & (ints)value) | (~above & (ints)most));
    }
    float parts[LANES], top = -__builtin_inff();
    memcpy(parts, &most, sizeof parts);
    for (int i = 0; i < LANES; i++) top = parts[i] > top ? parts[i] : top;
    for (long i = whole; i < width; i++) {
        const floats value = get_some(x + i, 1);
        strange |= value != value;
        top = value[0] > top ? value[0] : top;
    }
    const int search_nan = any(strange);
    for (long i = 0; i < width; i += LANES) {
        const floats value = get_some(x + i, width - i);
        const ints hit = search_nan ? value != value : value == top;
        if (any(hit))
            for (int j = 0; j < LANES && i + j < width; j++)
                if (hit[j]) return i + j;
    }
    return 0;
}

/* x [rows, width]; places [rows]. */
void NAME(argmax)(const element *x, int64_t *places, long rows, long width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > 65536)
    for (long r = 0; r < rows; r++) places[r] = argmax_row(x + r * width, width);
}
