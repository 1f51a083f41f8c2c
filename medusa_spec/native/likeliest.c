/* The best guesses of each row of logits, and the chance of each: what trees that grow ask at every level. */
#include "activation.h"

/* Puts a value among the `known` largest, which fall; of equal ones those that came first stand first. */
static void put_among(float *values, int64_t *places, long known, float value, int64_t place) {
    long at = known;
    for (; at > 0 && value > values[at - 1]; at--) values[at] = values[at - 1], places[at] = places[at - 1];
    values[at] = value;
    places[at] = place;
}

/* Adds what stands out of x [width] from `from` on to the `count` largest. */
static void search(const element *x, long from, long width, long count, float *values, int64_t *places) {
    for (long i = from; i < width; i += LANES) {
        const floats value = get_some(x + i, width - i);
        if (!any(value > spread(values[count - 1]))) continue;
        for (long j = 0; j < LANES && i + j < width; j++)
            if (value[j] > values[count - 1]) put_among(values, places, count - 1, value[j], i + j);
    }
}

/* Sum of exp((x - top) / temperature); nan where one is nan. */
static float total_of(const element *x, long width, float top, float inverse) {
    const long whole = width / LANES * LANES;
    floats sum = {0};
    for (long i = 0; i < whole; i += LANES) sum += exp_of((get(x + i) - top) * inverse);
    float total = sum_of(sum);
    for (long i = whole; i < width; i++) total += exp_of((get_some(x + i, 1) - top) * inverse)[0];
    return total;
}

/* x [rows, width]; places and chances [rows, count], count at most width; softmax(x / temperature) of the largest. */
void NAME(likeliest)(const element *x, int64_t *places, float *chances, long rows, long width, long count,
                     float temperature) {
    for (long r = 0; r < rows; r++, x += width, places += count, chances += count) {
        for (long i = 0; i < count; i++) put_among(chances, places, i, get_some(x + i, 1)[0], i);
        search(x, count, width, count, chances, places);
        const float top = chances[0], inverse = 1.0f / temperature, total = total_of(x, width, top, inverse);
        for (long i = 0; i < count; i++) chances[i] = exp_of(spread((chances[i] - top) * inverse))[0] / total;
    }
}
