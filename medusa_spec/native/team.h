/* What the kernels do inside a parallel region: every thread of a team calls these together, and when one returns its
 * result is there for all. The exported functions of the same names open a region around one; layer.c around several.
 */
#ifndef TEAM_H
#define TEAM_H
#include "element.h"

struct norm {
    const element *weight; /* [width] */
    float epsilon;
    int style; /* of norm.h */
};

struct linear {
    const element *weight; /* packed */
    const float *bias;     /* [outputs], or NULL */
    long inputs, outputs;
};

struct attention {
    element *qkv;          /* [nodes, (q_heads + 2 * kv_heads) * dim], queries first; rotated in place */
    const element *cosine; /* [nodes, rotary] */
    const element *sine;
    const element *q_norm; /* [dim], or NULL */
    const element *k_norm;
    const float *sinks;    /* [q_heads], or NULL */
    element *keys;         /* the row's [kv_heads, capacity, dim] */
    element *values;
    const uint8_t *mask;   /* [nodes, boundary + nodes] */
    element *out;          /* [nodes, q_heads * dim], or NULL for wide */
    float *wide;           /* the same as floats, already rounded */
    float *scratch;        /* floats: q_heads * nodes * (dim up to 16 + keys up to 32 + 1) */
    long nodes, q_heads, kv_heads, dim, rotary;
    long head_stride;        /* elements from one head of the cache to the next */
    long first, common, end; /* slots: of the boundary, of the common part, of the tree */
    float scale, softcap, epsilon; /* softcap 0: none */
    int norm_style, threads;
};

/* x [rows, width] to floats [rows, width], rounded to elements. */
void NAME(norm_team)(const struct norm *norm, const element *x, float *wide, long rows, long width);

/* x [rows, inputs] to y [rows, outputs], on top of a residual of that shape if there is one. */
void NAME(linear_team)(const struct linear *linear, const float *x, const element *residual, element *y, long rows);

/* activation(gate) * up of x [rows, inputs], to floats [rows, width], rounded to elements. The layer is gate and up
 * packed side by side, 2 * width outputs, width a multiple of 32. */
void NAME(gated_team)(const struct linear *gate_up, const float *x, float *wide, long rows, int activation);

/* See attention.c. */
void NAME(attention_team)(const struct attention *attention);

#endif
