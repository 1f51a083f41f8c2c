/* One decoder layer of a tree pass in one parallel region:
 *
 *     middle = x + o(attention(qkv(norm(x))))        out = middle + down(activation(gate(norm(middle))) * up(...))
 *
 * Every number is rounded where the modules round it, so that the layer gives the bits that its parts give one by one.
 */
#include "team.h"

struct layer {
    const element *x; /* [nodes, hidden] */
    element *out;     /* the same shape */
    float *scratch;   /* floats: see layer_scratch */
    long hidden;
    struct norm first_norm, second_norm;
    struct linear qkv, o, gate_up, down;
    struct attention attention; /* its qkv, out, wide and scratch are set here */
    int activation;
};

static long larger(long a, long b) { return a > b ? a : b; }

static long attention_scratch(const struct attention *a) {
    const long keys = a->end + a->nodes - a->first;
    return a->q_heads * a->nodes * ((a->dim + 15) / 16 * 16 + (keys + 31) / 32 * 32 + 1);
}

/* Floats of scratch for a call: inputs of the products, elements in between, and attention's own. */
long NAME(layer_scratch)(const struct layer *l) {
    const struct attention *a = &l->attention;
    return a->nodes * (larger(l->hidden, a->q_heads * a->dim) + l->qkv.outputs + l->hidden + l->down.inputs) +
           attention_scratch(a);
}

void NAME(layer)(const struct layer *l) {
    struct attention a = l->attention;
    const long nodes = a.nodes;
    float *inputs = l->scratch; /* of q-k-v, then of o, then of gate-up */
    float *inner = inputs + nodes * larger(l->hidden, a.q_heads * a.dim);
    element *middle = (element *)(inner + nodes * l->down.inputs);
    a.qkv = (element *)((float *)middle + nodes * l->hidden);
    a.scratch = (float *)a.qkv + nodes * l->qkv.outputs;
    a.out = NULL;
    a.wide = inputs;
#pragma omp parallel num_threads(a.threads)
    {
        NAME(norm_team)(&l->first_norm, l->x, inputs, nodes, l->hidden);
        NAME(linear_team)(&l->qkv, inputs, NULL, a.qkv, nodes);
        NAME(attention_team)(&a);
        NAME(linear_team)(&l->o, inputs, l->x, middle, nodes);
        NAME(norm_team)(&l->second_norm, middle, inputs, nodes, l->hidden);
        NAME(gated_team)(&l->gate_up, inputs, inner, nodes, l->activation);
        NAME(linear_team)(&l->down, inner, middle, l->out, nodes);
    }
}
