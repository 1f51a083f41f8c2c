/* Root-mean-square norms as Hugging Face models write them, with the same roundings in between. */
#ifndef NORM_H
#define NORM_H
#include <math.h>
#include "element.h"

enum norm_style {
    SCALED,   /* w * element(x / rms): Llama */
    CENTRED,  /* element(x / rms * (1 + w)): Gemma, whose weights are kept as their distance from one */
    SCALED32, /* element(w * (x / rms)), one rounding */
};

/* To elements y, or if that is NULL to floats rounded to elements; y may be x. */
static inline void norm_row(const element *x, const element *weight, element *y, float *wide, long width,
                            float epsilon, enum norm_style style) {
    floats squares = {0};
    for (long i = 0; i < width; i += LANES) {
        const floats value = get_some(x + i, width - i);
        squares += value * value;
    }
    const float inverse = 1.0f / sqrtf(sum_of(squares) / (float)width + epsilon);
    for (long i = 0; i < width; i += LANES) {
        const floats value = get_some(x + i, width - i) * inverse, scale = get_some(weight + i, width - i);
        floats result;
        if (style == SCALED) result = scale * rounded(value);
        else if (style == CENTRED) result = value * (1.0f + scale);
        else result = scale * value;
        if (y) put_some(y + i, result, width - i);
        else put_wide(wide + i, result, width - i);
    }
}

#endif
