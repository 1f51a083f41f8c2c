/* y = x W^T + b for a few rows of x and a frozen bfloat16 W, on CPUs with or without bfloat16 instructions.
 *
 * A verify pass multiplies 1 to 64 rows. Libraries are made for one row or for very many: without bfloat16
 * instructions they spend several times longer on 16 rows than on one, although the time should be that of reading W.
 * Here W is read once per block of rows, widened to float32 in registers (a shift), and accumulated in float32; the
 * result is rounded once.
 *
 * Layout of packed W: blocks of 32 outputs; in a block, for each input k, 32 values in which outputs 0..15 stand at
 * even places and 16..31 at odd ones, so that one 64-byte load yields two float vectors by a shift and a mask.
 *
 * Written with GCC's vector extensions: AVX-512, AVX2 and NEON come from -march=native.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float floats __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));

#define OUTPUTS 32
#ifdef __AVX512F__
#define ROWS 12 /* rows at once: 24 accumulators of 64 bytes, of 32 registers */
#else
#define ROWS 4
#endif
#define AHEAD 64 /* inputs ahead of the one in use, 4 KB: the memory is read while the registers multiply */

static inline float widen(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

static inline uint16_t narrow(float value) { /* to nearest, ties to even; nan stays nan */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

/* One block of outputs for R rows; R is a constant at every call, so the loops unroll. */
static inline __attribute__((always_inline)) void tile(const int R, const float *x, long inputs, const uint16_t *w,
                                                        floats *even, floats *odd) {
    floats a[ROWS], b[ROWS];
    for (int r = 0; r < R; r++) a[r] = b[r] = (floats){0};
    for (long k = 0; k < inputs; k++) {
        words packed;
        memcpy(&packed, w + k * OUTPUTS, 64);
        __builtin_prefetch(w + (k + AHEAD) * OUTPUTS, 0, 3); /* never faults, past the end neither */
        const floats low = (floats)(packed << 16), high = (floats)(packed & 0xffff0000u);
        for (int r = 0; r < R; r++) {
            const float value = x[r * inputs + k];
            a[r] += low * value;
            b[r] += high * value;
        }
    }
    for (int r = 0; r < R; r++) even[r] = a[r], odd[r] = b[r];
}

static void store(const floats *even, const floats *odd, int rows, const float *bias, uint16_t *y, long outputs,
                  long first) {
    const int width = outputs - first < OUTPUTS ? (int)(outputs - first) : OUTPUTS;
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) {
            float value = j < 16 ? even[r][j] : odd[r][j - 16];
            if (bias) value += bias[first + j];
            y[r * outputs + first + j] = narrow(value);
        }
}

#define CASE(R) case R: tile(R, in, inputs, block, even, odd); break;

/* x [rows, inputs], w packed, bias [outputs] or NULL, y [rows, outputs]; scratch [rows, inputs] floats. */
void bf16_linear(const uint16_t *x, const uint16_t *w, const float *bias, uint16_t *y, float *scratch, long rows,
                 long inputs, long outputs, int threads) {
    for (long i = 0; i < rows * inputs; i++) scratch[i] = widen(x[i]);
    const long blocks = (outputs + OUTPUTS - 1) / OUTPUTS;
    const long groups = (rows + ROWS - 1) / ROWS, size = (rows + groups - 1) / groups; /* 16 rows as 8 + 8 */
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long n = 0; n < blocks; n++) {
        const uint16_t *block = w + n * inputs * OUTPUTS;
        floats even[ROWS], odd[ROWS];
        for (long r = 0; r < rows; r += size) {
            const int some = (int)(rows - r < size ? rows - r : size);
            const float *in = scratch + r * inputs;
            switch (some) {
                CASE(1) CASE(2) CASE(3) CASE(4)
#if ROWS > 4
                CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
            }
            store(even, odd, some, bias, y + r * outputs, outputs, n * OUTPUTS);
        }
    }
}
