/* Products of a few rows with two vectors of columns, the sums in registers: what a linear layer and attention are made
 * of.
 *
 * A result depends on its own row and column alone: sums run over `depth` in order, whatever the number of rows. So a
 * pass over N nodes gives the same bits as N passes over one.
 */
#ifndef TILE_H
#define TILE_H
#include "element.h"

#define COLUMNS (2 * LANES)
#if defined(__AVX512F__) || defined(__aarch64__)
#define ROWS 14 /* rows at once: 28 sums, of 32 registers */
#else
#define ROWS 6 /* 12 sums, of 16 registers */
#endif
#define AHEAD 8192 /* bytes of weights ahead of those in use: the memory is read while the registers multiply */

enum layout { PACKED, PLAIN, FLOATS };

/* The first and the second half of the columns at one place of the depth. PACKED bf16 puts them at even and odd places,
 * so that one load yields two vectors by a shift and a mask; PLAIN are elements as they stand in a tensor, FLOATS floats. */
static inline __attribute__((always_inline)) void columns(enum layout layout, const void *at, floats *low,
                                                           floats *high) {
    if (layout == FLOATS) {
        memcpy(low, at, sizeof *low);
        memcpy(high, (const float *)at + LANES, sizeof *high);
        return;
    }
#ifdef ELEMENT_BF16
    if (layout == PACKED) {
        words pair;
        memcpy(&pair, at, sizeof pair);
        *low = (floats)(pair << 16);
        *high = (floats)(pair & 0xffff0000u);
        return;
    }
#endif
    *low = get(at);
    *high = get((const element *)at + LANES);
}

/* Adds R rows of x [R, depth] times w [depth, COLUMNS] to low and high; `step` is the distance of w's rows in bytes. R and
 * layout are constants at every call, so the loops unroll. */
static inline __attribute__((always_inline)) void tile(const int R, const enum layout layout, const float *x,
                                                        long x_stride, long depth, const void *w, long step,
                                                        floats *low, floats *high) {
    floats a[ROWS], b[ROWS];
    for (int r = 0; r < R; r++) a[r] = low[r], b[r] = high[r];
    for (long k = 0; k < depth; k++) {
        const char *at = (const char *)w + k * step;
        floats left, right;
        columns(layout, at, &left, &right);
        if (layout == PACKED) __builtin_prefetch(at + AHEAD, 0, 2); /* never faults, past the end neither */
        for (int r = 0; r < R; r++) {
            const float value = x[r * x_stride + k];
            a[r] += left * value;
            b[r] += right * value;
        }
    }
    for (int r = 0; r < R; r++) low[r] = a[r], high[r] = b[r];
}

#define TILE(R) case R: tile(R, layout, x, x_stride, depth, w, step, low, high); break;

static inline __attribute__((always_inline)) void tile_of(int rows, const enum layout layout, const float *x,
                                                           long x_stride, long depth, const void *w, long step,
                                                           floats *low, floats *high) {
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if ROWS > 6
        TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14)
#endif
    }
}

/* Rows per tile when `rows` are dealt out evenly: 16 as 8 + 8 rather than 14 + 2. */
static inline long rows_per_tile(long rows) {
    const long tiles = (rows + ROWS - 1) / ROWS;
    return (rows + tiles - 1) / tiles;
}

#define GROUP (4 * ROWS) /* rows whose sums are kept while a block of weights is read */
#define CHUNK 64          /* depth at a time where several tiles read the same weights: 4 KB of them stay close */

/* Rows of x [rows, depth], at most GROUP, times a block of packed weights, to low and high [rows]. */
static inline void block_product(const float *x, long rows, long depth, const element *block, floats *low,
                                 floats *high) {
    const long size = rows_per_tile(rows), chunk = rows > size ? CHUNK : depth;
    memset(low, 0, rows * sizeof *low);
    memset(high, 0, rows * sizeof *high);
    for (long k = 0; k < depth; k += chunk)
        for (long r = 0; r < rows; r += size)
            tile_of((int)(rows - r < size ? rows - r : size), PACKED, x + r * depth + k, depth,
                    depth - k < chunk ? depth - k : chunk, block + k * COLUMNS, COLUMNS * sizeof(element), low + r,
                    high + r);
}

#endif
