/* A step of a draft in one parallel region: what its layer reads, and the layer.
 *
 *     entered = [norm(vector), norm(feature)]        x = join(entered), or feature + join(entered), which is then what
 *                                                    enters, or its norm; without a join, the feature or its norm
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
    int normed_residual;                   /* without a join */
    int added;                             /* with a join: to the feature */
};

enum { DRAFT_PHASES = 1 + LINEAR_PHASES + 1 + LAYER_PHASES };

/* Floats of scratch that a step needs: what enters of both widths, x, the layer's own, and the phases. */
long NAME(draft_scratch)(const struct draft *d) {
    return d->layer.attention.nodes * 4 * d->layer.hidden + NAME(layer_scratch)(&d->layer) + DRAFT_PHASES * PHASE_FLOATS;
}

static void enter(const element *x, const struct norm *norm, float *wide, long width) {
    if (norm->weight) norm_row(x, norm->weight, NULL, wide, width, norm->epsilon, (enum norm_style)norm->style);
    else widen(x, wide, width);
}

static void put_row(element *to, const float *wide, long width) {
    floats value = {0};
    for (long i = 0; i < width; i += LANES) {
        memcpy(&value, wide + i, (width - i < LANES ? width - i : LANES) * sizeof(float));
        put_some(to + i, value, width - i);
    }
}

static void draft_team(struct team *team, const struct draft *d, element *out, float *scratch) {
    struct layer layer = d->layer;
    const long nodes = layer.attention.nodes, hidden = layer.hidden;
    float *entered = scratch, *joined = entered + nodes * 2 * hidden;
    element *x = (element *)(joined + nodes * hidden);
    scratch = joined + nodes * 2 * hidden;
    for (long r; (r = next_task(team, nodes)) >= 0;) {
        float *wide = entered + r * 2 * hidden;
        enter(d->vectors + r * hidden, &d->vector_norm, wide, hidden);
        enter(d->features + r * hidden, &d->feature_norm, wide + hidden, hidden);
        if (d->normed_residual) put_row(x + r * hidden, wide + hidden, hidden);
    }
    layer.entered = entered;
    if (d->join.weight) {
        NAME(linear_team)(team, &d->join, entered, d->added ? d->features : NULL, x, nodes);
        if (layer.first_norm.weight) { /* the layer's own, of x */
            layer.entered = NULL;
        } else {
            for (long r; (r = next_task(team, nodes)) >= 0;) widen(x + r * hidden, joined + r * hidden, hidden);
            layer.entered = joined;
        }
    }
    NAME(layer_team)(team, &layer, d->join.weight || d->normed_residual ? x : d->features, out, scratch);
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
