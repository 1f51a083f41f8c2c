/* Attention of the nodes of a token tree over one row of the cache, from joined q-k-v products to its output; or of
 * several rows, each with a tree of its own over its part of the cache.
 *
 * Rotates queries and keys, writes the nodes' keys and values behind the prefix, and attends. A node sees the common
 * part of the prefix, and of the boundary and the tree what the mask says; see attention.Visibility.
 *
 * A node's result depends on what it sees alone, bit for bit: not on N, on its place among the nodes, or on threads.
 * Scores are sums over the head size; the maximum is exact; weights are added as integers, which have no order; and the
 * values are added key by key in the order of the slots, where what is not seen adds zero and ancestors stand in order
 * of depth. So a tree pass gives the bits that N passes over one token give.
 */
#include "activation.h"
#include "norm.h"
#include "team.h"
#include "tile.h"

static long up_to(long value, long multiple) { return (value + multiple - 1) / multiple * multiple; }

/* One head of one node: normed, then rotated as halves (i, i + rotary / 2), rounding where the modules do. */
static void rotate(element *x, const element *cosine, const element *sine, const element *norm, const struct attention *c) {
    if (norm) norm_row(x, norm, x, NULL, c->dim, c->epsilon, (enum norm_style)c->norm_style);
    const long half = c->rotary / 2;
    for (long i = 0; i < half; i += LANES) {
        const long some = half - i;
        const floats low = get_some(x + i, some), high = get_some(x + half + i, some);
        const floats turned = rounded(low * get_some(cosine + i, some)) - rounded(high * get_some(sine + i, some));
        const floats other =
            rounded(high * get_some(cosine + half + i, some)) + rounded(low * get_some(sine + half + i, some));
        put_some(x + i, turned, some);
        put_some(x + half + i, other, some);
    }
}

/* Rotates a node's heads, stores its key and value, and leaves its queries as floats [head][node][depth]. */
static void lay_out(const struct attention *c, long node, float *queries) {
    const long dim = c->dim, padded = up_to(dim, LANES);
    element *x = c->qkv + node * (c->q_heads + 2 * c->kv_heads) * dim;
    const element *cosine = c->cosine + node * c->rotary, *sine = c->sine + node * c->rotary;
    for (long head = 0; head < c->q_heads; head++, x += dim) {
        rotate(x, cosine, sine, c->q_norm, c);
        float *to = queries + (head * c->nodes + node) * padded;
        for (long i = 0; i < dim; i += LANES) {
            const floats value = get_some(x + i, dim - i);
            memcpy(to + i, &value, sizeof value);
        }
    }
    for (long head = 0; head < c->kv_heads; head++, x += dim) {
        rotate(x, cosine, sine, c->k_norm, c);
        memcpy(c->keys + head * c->head_stride + (c->end + node) * dim, x, dim * sizeof(element));
    }
    for (long head = 0; head < c->kv_heads; head++, x += dim)
        memcpy(c->values + head * c->head_stride + (c->end + node) * dim, x, dim * sizeof(element));
}

#if defined(__clang__) || __GNUC__ >= 12
#if LANES == 16
#define FIRST_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define FIRST_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define FIRST_HALVES 0, 4, 1, 5
#define SECOND_HALVES 2, 6, 3, 7
#endif

/* As many perfect shuffles as LANES has bits turn rows into columns. */
static void transpose(floats v[LANES]) {
    for (int round = LANES; round > 1; round /= 2) {
        floats next[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            const floats a = v[i], b = v[i + LANES / 2];
            next[2 * i] = __builtin_shufflevector(a, b, FIRST_HALVES);
            next[2 * i + 1] = __builtin_shufflevector(a, b, SECOND_HALVES);
        }
        memcpy(v, next, sizeof next);
    }
}
#else
static void transpose(floats v[LANES]) {
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            const float kept = v[i][j];
            v[i][j] = v[j][i];
            v[j][i] = kept;
        }
}
#endif

/* Up to COLUMNS keys [count, dim] as columns [padded dim, COLUMNS]; what is missing is zero. */
static void columns_of(const element *keys, long count, long dim, float *to) {
    for (long half = 0; half < COLUMNS; half += LANES)
        for (long i = 0; i < dim; i += LANES) {
            floats square[LANES];
            for (long j = 0; j < LANES; j++)
                square[j] = half + j < count ? get_some(keys + (half + j) * dim + i, dim - i) : (floats){0};
            transpose(square);
            for (long j = 0; j < LANES; j++) memcpy(to + (i + j) * COLUMNS + half, &square[j], sizeof(floats));
        }
}

static inline floats scaled(const struct attention *c, floats score) {
    score = score * c->scale;
    return c->softcap > 0 ? c->softcap * tanh_of(score / c->softcap) : score;
}

/* Scores of all queries of a head with a block of keys. */
static void score(const struct attention *c, const float *queries, long rows, long padded, const float *keys,
                  float *scores, long stride) {
    floats low[ROWS], high[ROWS];
    const long size = rows_per_tile(rows);
    for (long r = 0; r < rows; r += size) {
        const long some = rows - r < size ? rows - r : size;
        memset(low, 0, sizeof low);
        memset(high, 0, sizeof high);
        tile_of((int)some, FLOATS, queries + r * padded, padded, padded, keys, COLUMNS * sizeof(float), low, high);
        for (long i = 0; i < some; i++) {
            const floats left = scaled(c, low[i]), right = scaled(c, high[i]);
            memcpy(scores + (r + i) * stride, &left, sizeof left);
            memcpy(scores + (r + i) * stride + LANES, &right, sizeof right);
        }
    }
}

typedef int64_t longs __attribute__((vector_size(WIDTH)));
typedef uint64_t sums __attribute__((vector_size(WIDTH))); /* unsigned: the shares of nan are anything, and may wrap */
typedef float some_floats __attribute__((vector_size(WIDTH / 2)));

#define SHARE 1099511627776.0f /* 2^40: the largest weight, 1, as an integer */

/* Adds weights as integers, whose sum has no order. */
static inline sums add_shares(sums total, floats weights) {
    some_floats half[2];
    memcpy(half, &weights, sizeof half);
    return total + (sums)__builtin_convertvector(half[0] * SHARE, longs) +
           (sums)__builtin_convertvector(half[1] * SHARE, longs);
}

/* Scores of one query to weights, not yet divided by their sum; returns the divisor's inverse. */
static float weigh(const struct attention *c, float *scores, long stride, long node, const float *sink) {
    const long count = c->end + c->nodes - c->first, boundary = c->common - c->first, tree = c->end - c->first;
    const uint8_t *mask = c->mask + node * (boundary + c->nodes);
    for (long j = 0; j < boundary; j++)
        if (!mask[j]) scores[j] = -INFINITY;
    for (long j = tree; j < count; j++)
        if (!mask[boundary + j - tree]) scores[j] = -INFINITY;
    for (long j = count; j < stride; j++) scores[j] = -INFINITY;
    floats most = spread(-INFINITY), value;
    for (long j = 0; j < stride; j += LANES) {
        memcpy(&value, scores + j, sizeof value);
        const ints above = value > most;
        most = (floats)((above & (ints)value) | (~above & (ints)most));
    }
    float top = sink ? *sink : -INFINITY;
    for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
    sums shares = {0};
    for (long j = 0; j < stride; j += LANES) {
        memcpy(&value, scores + j, sizeof value);
        value = exp_of(value - top);
        memcpy(scores + j, &value, sizeof value);
        shares = add_shares(shares, value);
    }
    uint64_t total = sink ? (uint64_t)(exp_of(spread(*sink - top))[0] * SHARE) : 0;
    for (int i = 0; i < LANES / 2; i++) total += shares[i];
    return (float)((double)SHARE / (double)total);
}

static void put_out(const struct attention *c, long at, floats value, long count) {
    if (count <= 0) return;
    if (c->out) put_some(c->out + at, value, count);
    else put_wide(c->wide + at, value, count);
}

/* COLUMNS of a head's output: weights times values. */
static void gather(const struct attention *c, const float *weights, const float *inverse, long stride, long head,
                   long column) {
    const long groups = c->q_heads / c->kv_heads, rows = groups * c->nodes, count = c->end + c->nodes - c->first;
    const long width = c->dim - column, size = rows_per_tile(rows);
    const element *values = c->values + head * c->head_stride + c->first * c->dim + column;
    floats low[ROWS], high[ROWS];
    for (long r = 0; r < rows; r += size) {
        const long some = rows - r < size ? rows - r : size;
        const float *x = weights + r * stride;
        memset(low, 0, sizeof low);
        memset(high, 0, sizeof high);
        if (width >= COLUMNS) {
            tile_of((int)some, PLAIN, x, stride, count, values, c->dim * sizeof(element), low, high);
        } else { /* head sizes that are no multiple of COLUMNS */
            for (long i = 0; i < some; i++) {
                for (long k = 0; k < count; k++) {
                    low[i] += get_some(values + k * c->dim, width) * x[i * stride + k];
                    if (width > LANES) high[i] += get_some(values + k * c->dim + LANES, width - LANES) * x[i * stride + k];
                }
            }
        }
        for (long i = 0; i < some; i++) {
            const long group = (r + i) / c->nodes, node = (r + i) % c->nodes;
            const long at = (node * c->q_heads + head * groups + group) * c->dim + column;
            put_out(c, at, low[i] * inverse[r + i], width);
            put_out(c, at + LANES, high[i] * inverse[r + i], width - LANES);
        }
    }
}

/* What follows from the sizes of one row. */
struct plan {
    long groups, rows, padded, count, stride, blocks, pieces; /* rows: queries of a key head */
    float *queries, *scores, *inverse;
};

static struct plan plan_of(const struct attention *c) {
    struct plan p = {.groups = c->q_heads / c->kv_heads, .padded = up_to(c->dim, LANES)};
    p.rows = p.groups * c->nodes;
    p.count = c->end + c->nodes - c->first;
    p.stride = up_to(p.count, COLUMNS);
    p.blocks = p.stride / COLUMNS;
    p.pieces = (c->dim + COLUMNS - 1) / COLUMNS;
    p.queries = c->scratch;
    p.scores = p.queries + c->q_heads * c->nodes * p.padded;
    p.inverse = p.scores + c->q_heads * c->nodes * p.stride;
    return p;
}

/* The tasks of each phase: a block of keys of a head, a query, a piece of a head's output. */
static void score_block(const struct attention *c, const struct plan *p, long task) {
    const long head = task / p->blocks, first = task % p->blocks * COLUMNS;
    float keys[p->padded * COLUMNS];
    columns_of(c->keys + head * c->head_stride + (c->first + first) * c->dim, p->count - first, c->dim, keys);
    score(c, p->queries + head * p->rows * p->padded, p->rows, p->padded, keys,
          p->scores + head * p->rows * p->stride + first, p->stride);
}

static void weigh_query(const struct attention *c, const struct plan *p, long row) {
    const float *sink = c->sinks ? c->sinks + row / c->nodes : NULL;
    p->inverse[row] = weigh(c, p->scores + row * p->stride, p->stride, row % c->nodes, sink);
}

static void gather_piece(const struct attention *c, const struct plan *p, long task) {
    const long head = task / p->pieces, at = head * p->rows;
    gather(c, p->scores + at * p->stride, p->inverse + at, p->stride, head, task % p->pieces * COLUMNS);
}

/* A row of a batch, by one thread. */
static void attend_alone(const struct attention *c) {
    const struct plan p = plan_of(c);
    for (long node = 0; node < c->nodes; node++) lay_out(c, node, p.queries);
    for (long task = 0; task < c->kv_heads * p.blocks; task++) score_block(c, &p, task);
    for (long row = 0; row < c->q_heads * c->nodes; row++) weigh_query(c, &p, row);
    for (long task = 0; task < c->kv_heads * p.pieces; task++) gather_piece(c, &p, task);
}

static long scratch_of(const struct attention *c, long nodes, long keys) {
    return c->q_heads * nodes * (up_to(c->dim, LANES) + up_to(keys, COLUMNS) + 1);
}

/* Floats of scratch. */
long NAME(attention_scratch)(const struct attention *c) {
    if (!c->rows) return scratch_of(c, c->nodes, c->end + c->nodes - c->first);
    long total = 0;
    for (const struct row *r = c->rows; r < c->rows + c->batch; r++)
        total += scratch_of(c, r->nodes, r->end + r->nodes - r->first);
    return total;
}

/* One row of a batch as a call of its own. */
static struct attention row_of(const struct attention *c, long number) {
    struct attention own = *c;
    const struct row *row = c->rows + number;
    long at = 0;
    own.rows = c->rows;
    own.batch = number;
    own.scratch += NAME(attention_scratch)(&own); /* of the rows before */
    for (const struct row *before = c->rows; before < row; before++) at += before->nodes;
    own.rows = NULL;
    own.qkv += at * (c->q_heads + 2 * c->kv_heads) * c->dim;
    own.cosine += at * c->rotary;
    own.sine += at * c->rotary;
    own.keys += row->offset;
    own.values += row->offset;
    if (own.out) own.out += at * c->q_heads * c->dim;
    else own.wide += at * c->q_heads * c->dim;
    own.mask = row->mask;
    own.nodes = row->nodes;
    own.first = row->first;
    own.common = row->common;
    own.end = row->end;
    return own;
}

void NAME(attention_team)(struct team *team, const struct attention *c) {
    if (c->rows) { /* enough of them for the threads */
        for (long number; (number = next_task(team, c->batch)) >= 0;) {
            const struct attention own = row_of(c, number);
            attend_alone(&own);
        }
        return;
    }
    const struct plan p = plan_of(c);
    for (long node; (node = next_task(team, c->nodes)) >= 0;) lay_out(c, node, p.queries);
    for (long task; (task = next_task(team, c->kv_heads * p.blocks)) >= 0;) score_block(c, &p, task);
    for (long row; (row = next_task(team, c->q_heads * c->nodes)) >= 0;) weigh_query(c, &p, row);
    for (long task; (task = next_task(team, c->kv_heads * p.pieces)) >= 0;) gather_piece(c, &p, task);
}

void NAME(attention)(const struct attention *c) {
    struct phase phases[ATTENTION_PHASES] = {{0}};
#pragma omp parallel num_threads(c->threads)
    {
        struct team team = {phases, 0};
        NAME(attention_team)(&team, c);
    }
}
