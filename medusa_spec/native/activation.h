/* exp and what is made of it, a vector at a time; the same result for a value wherever it stands. */
#ifndef ACTIVATION_H
#define ACTIVATION_H
#include <math.h>
#include "element.h"

static inline floats exp_of(floats x) { /* within 2 ulp; 0 below -87, infinite above 88.72; nan stays nan */
    const ints vanish = x < -87.0f, large = x > 88.72f;
    const floats infinite = spread(INFINITY);
    x = (floats)(~(vanish | large) & (ints)x);
    const floats scaled = x * 1.44269504f;
    const ints whole = __builtin_convertvector(scaled + (floats)(((ints)scaled & (int32_t)0x80000000) | (ints)spread(0.5f)), ints);
    const floats n = __builtin_convertvector(whole, floats);
    const floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts */
    floats p = spread(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const ints power = (ints)((words)p + ((words)whole << 23));
    return (floats)((~(vanish | large) & power) | (large & (ints)infinite));
}

static inline floats tanh_of(floats x) { /* within 2 ulp: near zero a polynomial, where 1 - 2 / ... would cancel */
    const floats far = 1.0f - 2.0f / (1.0f + exp_of(2.0f * x)), square = x * x;
    floats p = spread(-5.932980683e-3f);
    p = p * square + 2.088131942e-2f;
    p = p * square - 5.382584780e-2f;
    p = p * square + 1.333260089e-1f;
    p = p * square - 3.333332837e-1f;
    const floats near = x + x * square * p;
    const ints small = square < 0.4f; /* not for nan */
    return (floats)((small & (ints)near) | (~small & (ints)far));
}

enum activation { SILU, GELU_TANH };

static inline floats activated(floats x, enum activation kind) {
    if (kind == SILU) return x / (1.0f + exp_of(-x));
    return 0.5f * x * (1.0f + tanh_of(0.79788456f * (x + 0.044715f * x * x * x)));
}

#endif
