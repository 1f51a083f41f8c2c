/* The numbers that the kernels read and write: bfloat16 or float32, always computed with in float32.
 *
 * Every source is compiled once per element type; NAME(f) is f_bf16 or f_f32. Vectors are GCC's and clang's: AVX-512,
 * AVX2 and NEON come from -march=native. They are as wide as the registers: wider ones are kept in memory by compilers,
 * at a thirtieth of the speed.
 */
#ifndef ELEMENT_H
#define ELEMENT_H
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define WIDTH 64 /* bytes of a register */
#elif defined(__AVX__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
#define LANES (WIDTH / 4)
typedef float floats __attribute__((vector_size(WIDTH)));
typedef int32_t ints __attribute__((vector_size(WIDTH)));
typedef uint32_t words __attribute__((vector_size(WIDTH)));
typedef uint16_t halves __attribute__((vector_size(WIDTH / 2)));

#ifdef ELEMENT_BF16
#define NAME(function) function##_bf16
typedef uint16_t element;

static inline words narrow(floats value) { /* to nearest, ties to even; nan stays nan */
    const words bits = (words)value, nan = (words)((bits & 0x7fffffffu) > 0x7f800000u);
    const words near = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (nan & ((bits >> 16) | 0x40u)) | (~nan & near);
}

static inline floats rounded(floats value) { return (floats)(narrow(value) << 16); }

static inline floats get(const element *from) {
    halves bits;
    memcpy(&bits, from, sizeof bits);
    return (floats)(__builtin_convertvector(bits, words) << 16);
}

static inline void put(element *to, floats value) {
    const halves bits = __builtin_convertvector(narrow(value), halves);
    memcpy(to, &bits, sizeof bits);
}
#else
#define NAME(function) function##_f32
typedef float element;

static inline floats rounded(floats value) { return value; }

static inline floats get(const element *from) {
    floats value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline void put(element *to, floats value) { memcpy(to, &value, sizeof value); }
#endif

/* The first `count` of a vector of elements; the others are zero, or left alone. */
static inline floats get_some(const element *from, long count) {
    if (count >= LANES) return get(from);
    element padded[LANES] = {0};
    memcpy(padded, from, count * sizeof(element));
    return get(padded);
}

static inline void put_some(element *to, floats value, long count) {
    if (count >= LANES) return put(to, value);
    element padded[LANES];
    put(padded, value);
    memcpy(to, padded, count * sizeof(element));
}

/* To floats, rounded to elements. */
static inline void put_wide(float *to, floats value, long count) {
    value = rounded(value);
    memcpy(to, &value, (count < LANES ? count : LANES) * sizeof(float));
}

static inline void widen(const element *from, float *to, long count) {
    for (long i = 0; i < count; i += LANES) put_wide(to + i, get_some(from + i, count - i), count - i);
}

static inline int any(ints mask) {
    int32_t parts[LANES];
    memcpy(parts, &mask, sizeof parts);
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= parts[i];
    return found != 0;
}

static inline floats spread(float value) { return (floats){0} + value; }

static inline float sum_of(floats value) { /* in a fixed order */
    float parts[LANES];
    memcpy(parts, &value, sizeof parts);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) parts[i] += parts[i + step];
    return parts[0];
}

#endif
