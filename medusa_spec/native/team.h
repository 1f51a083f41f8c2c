/* What the kernels do inside a parallel region: every thread of a team calls these together, and when one returns its
 * result is there for all. The exported functions of the same names open a region around one; layer.c around several.
 *
 * A team shares a row of phases. In each, threads claim tasks one by one and go on as soon as all tasks are done, not when
 * all threads have come: one that another program keeps from running delays the others by the task in its hands at
 * most, and finds the phases behind it done. A barrier for all threads would cost a time slice at every step.
 */
#ifndef TEAM_H
#define TEAM_H
#include <sched.h>
#include "element.h"

#define PATIENCE 4000 /* looks at unfinished work before the processor is offered to others */

struct phase {
    long claimed, done; /* tasks; zero at first */
    char apart[48];     /* a cache line each */
};

/* One thread's place in the row of phases. */
struct team {
    struct phase *phase;
    int busy; /* holds a task */
};

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The next task of `count`, or -1 when all are done; the phase is over then. The one claimed before is done by now. */
static inline long next_task(struct team *team, long count) {
    struct phase *phase = team->phase;
    if (team->busy) __atomic_fetch_add(&phase->done, 1, __ATOMIC_RELEASE);
    const long task = __atomic_fetch_add(&phase->claimed, 1, __ATOMIC_RELAXED);
    team->busy = task < count;
    if (team->busy) return task;
    for (long looks = 1; __atomic_load_n(&phase->done, __ATOMIC_ACQUIRE) < count; looks++)
        if (looks % PATIENCE) pause_briefly();
        else sched_yield();
    team->phase++;
    return -1;
}

/* Phases of the functions below, and the floats that one takes in scratch. */
enum { LINEAR_PHASES = 1, NORM_PHASES = 1, GATED_PHASES = 1, ATTENTION_PHASES = 4 };
enum { LAYER_PHASES = 1 + 2 * NORM_PHASES + 3 * LINEAR_PHASES + GATED_PHASES + ATTENTION_PHASES }; /* one for a tap */
enum { PHASE_FLOATS = sizeof(struct phase) / sizeof(float) };

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

/* One row of a batch. */
struct row {
    const uint8_t *mask;           /* [nodes, boundary + nodes] */
    long nodes;                    /* of its tree; rows lie one behind the other in x */
    long offset;                   /* elements from the layer's keys, and values, to the row's */
    long first, common, end;       /* slots, as below */
};

struct attention {
    element *qkv;          /* [nodes, (q_heads + 2 * kv_heads) * dim], queries first; rotated in place */
    const element *cosine; /* [nodes, rotary] */
    const element *sine;
    const element *q_norm; /* [dim], or NULL */
    const element *k_norm;
    const float *sinks;    /* [q_heads], or NULL */
    const struct row *rows; /* of a batch, which then say what stands in mask, first, common and end; NULL for one row */
    element *keys;         /* the row's [kv_heads, capacity, dim]; of a batch the first row's */
    element *values;
    const uint8_t *mask;   /* [nodes, boundary + nodes] */
    element *out;          /* [nodes, q_heads * dim], or NULL for wide */
    float *wide;           /* the same as floats, already rounded */
    float *scratch;        /* floats: q_heads * nodes * (dim up to LANES + keys up to COLUMNS + 1), of each row */
    long nodes, q_heads, kv_heads, dim, rotary; /* nodes: of all rows */
    long batch;              /* rows, where there are some */
    long head_stride;        /* elements from one head of the cache to the next */
    long first, common, end; /* slots: of the boundary, of the common part, of the tree */
    float scale, softcap, epsilon; /* softcap 0: none */
    int norm_style, threads;
};

struct layer {
    long hidden;
    const float *entered; /* [nodes, qkv.inputs], rounded to elements: what q-k-v reads; NULL: the first norm of x */
    element *tap;         /* [nodes, hidden], gets x; or NULL */
    struct norm first_norm, second_norm;
    struct linear qkv, o, gate_up, down;
    struct attention attention; /* its qkv, out, wide and scratch are set by the layer */
    int activation;
};

/* x [rows, width] to floats [rows, width], rounded to elements. */
void NAME(norm_team)(struct team *team, const struct norm *norm, const element *x, float *wide, long rows, long width);

/* x [rows, inputs] to y [rows, outputs], on top of a residual of that shape if there is one. */
void NAME(linear_team)(struct team *team, const struct linear *linear, const float *x, const element *residual, element *y,
                       long rows);

/* activation(gate) * up of x [rows, inputs], to floats [rows, width], rounded to elements. The layer is gate and up
 * packed side by side, 2 * width outputs, width a multiple of COLUMNS. */
void NAME(gated_team)(struct team *team, const struct linear *gate_up, const float *x, float *wide, long rows, int activation);

/* See attention.c. */
long NAME(attention_scratch)(const struct attention *attention);
void NAME(attention_team)(struct team *team, const struct attention *attention);

/* See layer.c. x and out [nodes, hidden]; they may be the same. */
void NAME(layer_team)(struct team *team, const struct layer *layer, const element *x, element *out, float *scratch);

/* Floats of scratch that it needs. */
long NAME(layer_scratch)(const struct layer *layer);

#endif
