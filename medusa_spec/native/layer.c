/* Decoder layers of a tree pass in one parallel region, each of them
 *
 *     middle = x + o(attention(qkv(norm(x))))        x = middle + down(activation(gate(norm(middle))) * up(...))
 *
 * Every number is rounded where the modules round it, so that a layer gives the bits that its parts give one by one. A
 * layer with something else than norm(x) to attend to has it in `entered`.
 */
#include "team.h"

static long larger(long a, long b) { return a > b ? a : b; }

/* Inputs of the products, elements in between, and attention's own. */
long NAME(layer_scratch)(const struct layer *l) {
    const struct attention *a = &l->attention;
    const long inputs = larger(l->hidden, a->q_heads * a->dim);
    return a->nodes * (inputs + l->qkv.outputs + l->hidden + l->down.inputs) + NAME(attention_scratch)(a);
}

/* Floats of scratch that the layers need, and the phases of all. */
long NAME(layers_scratch)(const struct layer *layers, long count) {
    long most = 0;
    for (long i = 0; i < count; i++) most = larger(most, NAME(layer_scratch)(layers + i));
    return most + count * LAYER_PHASES * PHASE_FLOATS;
}

void NAME(layer_team)(struct team *team, const struct layer *l, const element *x, element *out, float *scratch) {
    struct attention a = l->attention;
    const long nodes = a.nodes;
    float *inputs = scratch; /* of q-k-v, then of o, then of gate-up */
    float *inner = inputs + nodes * larger(l->hidden, a.q_heads * a.dim);
    element *middle = (element *)(inner + nodes * l->down.inputs);
    a.qkv = (element *)((float *)middle + nodes * l->hidden);
    a.scratch = (float *)a.qkv + nodes * l->qkv.outputs;
    a.out = NULL;
    a.wide = inputs;
    if (l->tap)
        for (long r; (r = next_task(team, nodes)) >= 0;)
            memcpy(l->tap + r * l->hidden, x + r * l->hidden, l->hidden * sizeof(element));
    if (!l->entered) NAME(norm_team)(team, &l->first_norm, x, inputs, nodes, l->hidden);
    NAME(linear_team)(team, &l->qkv, l->entered ? l->entered : inputs, NULL, a.qkv, nodes);
    NAME(attention_team)(team, &a);
    NAME(linear_team)(team, &l->o, inputs, x, middle, nodes);
    NAME(norm_team)(team, &l->second_norm, middle, inputs, nodes, l->hidden);
    NAME(gated_team)(team, &l->gate_up, inputs, inner, nodes, l->activation);
    NAME(linear_team)(team, &l->down, inner, middle, out, nodes);
}

/* `count` layers, one behind the other, of one row or of a batch of them: x to out, both [nodes, hidden]. */
void NAME(layers)(const struct layer *layers, long count, const element *x, element *out, float *scratch) {
    struct phase *phases = (struct phase *)scratch; /* first, where tensors are aligned */
    memset(phases, 0, count * LAYER_PHASES * sizeof *phases);
    scratch = (float *)(phases + count * LAYER_PHASES);
#pragma omp parallel num_threads(layers->attention.threads)
    {
        struct team team = {phases, 0};
        for (long i = 0; i < count; i++) NAME(layer_team)(&team, layers + i, i ? out : x, out, scratch);
    }
}
