/* A step of a draft in one parallel region: what its layer reads, and the layer.
 *
 *     entered = [norm(vector), norm(feature)]        x = join(entered), which is then what enters; without a join, feature
 *
 * Rounded where the modules round, as in layer.c.
 */
#include "norm.h"
#include "team.h"

struct draft {
    const element *vectors, *features;     /* [nodes, hidden] */
    struct norm vector_norm, feature_norm; /* weight NULL: none */
    struct linear join;                    /* weight NULL: none */
    struct layer layer;                    /* its entered is set here */
};

enum { DRAFT_PHASES = 1 + LINEAR_PHASES + 1 + LAYER_PHASES };

/* Floats of scratch that a step needs: both widths of what enters, x, the layer's own, and the phases. */
long NAME(draft_scratch)(const struct draft *d) {
    const long hidden = d->layer.hidden, width = d->join.weight ? 4 * hidden : 2 * hidden;
    return d->layer.attention.nodes * width + NAME(layer_scratch)(&d->layer) + DRAFT_PHASES * PHASE_FLOATS;
}

static void enter(const element *x, const struct norm *norm, float *wide, long width) {
    if (norm->weight) norm_row(x, norm->weight, NULL, wide, width, norm->epsilon, (enum norm_style)norm->style);
    else widen(x, wide, width);
}

static void draft_team(struct team *team, const struct draft *d, element *out, float *scratch) {
    struct layer layer = d->layer;
    const long nodes = layer.attention.nodes, hidden = layer.hidden;
    const element *residual = d->features;
    float *entered = scratch;
    scratch += nodes * 2 * hidden;
    for (long r; (r = next_task(team, nodes)) >= 0;) {
        enter(d->vectors + r * hidden, &d->vector_norm, entered + r * 2 * hidden, hidden);
        enter(d->features + r * hidden, &d->feature_norm, entered + r * 2 * hidden + hidden, hidden);
    }
    layer.entered = entered;
    if (d->join.weight) {
        float *joined = scratch;
        element *x = (element *)(joined + nodes * hidden);
        scratch += nodes * 2 * hidden;
        NAME(linear_team)(team, &d->join, entered, NULL, x, nodes);
        for (long r; (r = next_task(team, nodes)) >= 0;) widen(x + r * hidden, joined + r * hidden, hidden);
        layer.entered = joined;
        residual = x;
    }
    NAME(layer_team)(team, &layer, residual, out, scratch);
}

/* out [nodes, hidden]. */
void NAME(draft)(const struct draft *d, element *out, float *scratch) {
    struct phase *phases = (struct phase *)scratch; /* first, where tensors are aligned */
    memset(phases, 0, DRAFT_PHASES * sizeof *phases);
#pragma omp parallel num_threads(d->layer.attention.threads)
    {
        struct team team = {phases, 0};
        draft_team(&team, d, out, scratch + DRAFT_PHASES * PHASE_FLOATS);
    }
}
