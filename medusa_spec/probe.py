"""On which route does a tree pass of this model equal plain decoding? Asked before anyone decodes with it."""

import logging
from dataclasses import dataclass

import torch
import transformers

from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone
from medusa_spec.delegation import PREFIX
from medusa_spec.errors import AttachError, MedusaError
from medusa_spec.routes import ROUTES, AttentionRoute, NodesRoute
from medusa_spec.routes.text_state import TextState
from medusa_spec.tree import TreeShape, chain, shape_of
from medusa_spec.twin import WINDOW, shrink, twin

logger = logging.getLogger(__name__)

PROBE_SHAPE = shape_of((-1, 0, 1, 0, 3, 2, 3))
"""Two branches of depth three and two, and a fork: a chain's mask is wrong for five of its nodes."""

EXACT = 1e-5
"""Largest difference of float64 logits that counts as equal: softmax of eager attention and linear attention in chunks
compute in float32 whatever they are given."""

FAR_BELOW = 0.4
"""A tree pass of the real model must differ from sequential passes by less than this share of what a wrong mask does:
in bfloat16 rounding alone comes to a tenth of it, a wrong mask to all of it."""

PASSING = (torch.OutOfMemoryError, MemoryError)
"""Failures that say nothing about a route: they are raised rather than remembered."""

_verdicts: dict[tuple[str, ...], tuple[str, bool | None]] = {}
"""What a twin said, in words, and whether it was exact; None where there was none."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the probe found.

    Attributes:
        error: Largest difference of a logit between tree pass and sequential passes.
        wrong: Mean difference with a deliberately wrong mask.
        mean: Mean difference with the right mask.
    """

    error: float
    wrong: float
    mean: float


def probe(backbone: Backbone) -> str:
    """Finds the route on which a freshly attached model's tree passes are exact; the fastest is tried first.

    On a shrunk float64 twin of the same architecture a tree pass must equal the model's own plain decoding; on the
    model itself, whose rounding is its own, the error must be far below that of a deliberately wrong mask.

    Args:
        backbone: The model; it stays attached, and is on that route then.

    Returns:
        One line on what was found. The twin's part is remembered by class and versions.

    Raises:
        AttachError: If tree passes are exact on no route; the message says where each of them failed.
    """
    name, failures = type(backbone.model).__name__, []
    for route in ROUTES:
        backbone.take(route)
        try:
            found = _probe_route(backbone)
        except PASSING:
            raise
        except Exception as error:  # of a model that does not suit the route: whatever it is, the next one is tried
            reason = str(error) if isinstance(error, MedusaError) else f"{type(error).__name__}: {error}"
            failures.append(f"{route.name}: {reason}{route.failing_means}")
            continue
        if failures:
            logger.info("%s is on the route %r, since %s", name, route.name, "; ".join(failures))
        return f"route: {route.name}; {found}"
    backbone.take(AttentionRoute)
    raise AttachError(
        f"{name} (layer kinds {sorted(set(_kinds(backbone)))}) cannot be speculated exactly on any route; use its own "
        f"generate(). {'; '.join(failures)}"
    )


def _probe_route(backbone: Backbone) -> str:
    """What was found on the backbone's route; raises if tree passes are not exact."""
    backbone.route.check()
    key = (backbone.route.name, *_architecture(backbone))
    if key not in _verdicts:
        _verdicts[key] = _probe_twin(backbone)
    words, exact = _verdicts[key]
    own_twin = backbone.dtype == torch.float64
    if exact is False:
        raise AttachError(words)
    if exact is None and backbone.route.needs_proof and not own_twin:
        raise AttachError(f"{words}, so that nothing proves it exact")
    verdict = compare(backbone, prompt=arbitrary_prompt(backbone, 12))
    if not verdict.mean < FAR_BELOW * verdict.wrong or (own_twin and not verdict.error < EXACT):
        raise AttachError(
            f"tree passes differ from plain decoding (mean difference {verdict.mean:.3g}; a wrong mask gives "
            f"{verdict.wrong:.3g})"
        )
    return f"{words}; model: mean error {verdict.mean:.3g}, wrong mask {verdict.wrong:.3g}"


def compare(backbone: Backbone, prompt: torch.Tensor, kept: tuple[int, ...] = ()) -> Verdict:
    """Logits at the nodes of `PROBE_SHAPE` behind a prompt [1, T]: by tree passes, and by plain decoding of each path.

    With `kept`, a path of that shape, a first tree is drafted, the path becomes part of the text, and the second tree
    is what is compared.
    """
    tokens = arbitrary_prompt(backbone, PROBE_SHAPE.size + 3)[:, 3:]
    right = tree_logits(backbone, prompt, tokens, PROBE_SHAPE, kept=kept)
    wrong = tree_logits(backbone, prompt, tokens, chain(PROBE_SHAPE.size - 1), positions=PROBE_SHAPE)
    plain, text = NodesRoute(backbone), TextState(backbone)
    for part in (prompt, *(tokens[:, node : node + 1] for node in kept)):
        text.read(part, last_only=True)
    expected = plain.verify_text(text, tokens[0], PROBE_SHAPE)[0].logits[0].double()
    difference = (right - expected).abs()
    # The root and node 1 are the same under both masks.
    return Verdict(
        error=float(difference.max()),
        mean=float(difference[2:].mean()),
        wrong=float((wrong - expected).abs()[2:].mean()),
    )


def tree_logits(
    backbone: Backbone,
    prompt: torch.Tensor,
    tokens: torch.Tensor,
    shape: TreeShape,
    positions: TreeShape | None = None,
    kept: tuple[int, ...] = (),
) -> torch.Tensor:
    """Logits of one tree pass [N, V] in float64, of nodes `tokens` [1, N] behind a prompt [1, T].

    `positions` puts the nodes where another shape's would be; with `kept` it is the second pass, behind that path.
    """
    cache = backbone.new_cache()
    backbone.read(prompt, cache, last_only=True)
    cache.seal(shape.size)
    for path in (kept, ()) if kept else ((),):
        cache.make_room(shape.size)
        tree_pass = TreePass(shape=shape, cache=cache, device=backbone.device)
        if positions is not None:
            tree_pass = _Misplaced(shape=shape, cache=cache, device=backbone.device, depths=positions.depths)
        logits = backbone.verify(tokens, tree_pass).logits[0].double()
        if path:
            cache.keep(0, path)
    return logits


@dataclass(kw_only=True, eq=False)
class _Misplaced(TreePass):
    """A pass whose positions are those of another tree, so that a wrong mask is its only fault."""

    depths: tuple[int, ...]

    @property
    def positions(self) -> torch.Tensor:
        return self.cache.lengths[0] + torch.tensor([self.depths], device=self.device)


def _probe_twin(backbone: Backbone) -> tuple[str, bool | None]:
    """What a twin on the same route says, in words, and whether it is exact; None if there is no twin."""
    try:
        small = Backbone(twin(backbone.model, _original(backbone)))
        small.forward(arbitrary_prompt(small, 4))
    except PASSING:
        raise
    except Exception as error:  # a config that cannot be shrunk says nothing about the model; the model itself is next
        logger.info("no twin of %s: %r", type(backbone.model).__name__, error)
        return f"twin: none ({type(error).__name__})", None
    try:
        small.take(type(backbone.route))
        verdicts = [
            compare(small, prompt=arbitrary_prompt(small, length), kept=kept)
            for length, kept in ((WINDOW // 2, ()), (3 * WINDOW, (0, 3, 4)), (3 * WINDOW, (0, 1, 2, 5)))
        ]
    except PASSING:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, MedusaError) else f"{type(error).__name__}: {error}"
        return f"on a small float64 twin: {reason}", False
    worst = max(verdict.error for verdict in verdicts)
    if worst < EXACT:
        return f"twin: exact to {worst:.1e}", True
    return (
        f"on a small float64 twin tree passes differ from plain decoding by {worst:.3g} (allowed {EXACT:.0e})",
        False,
    )


def arbitrary_prompt(backbone: Backbone, length: int) -> torch.Tensor:
    """Arbitrary ids [1, length], different from one another where the vocabulary allows it."""
    ids = (torch.arange(1, length + 1) * 7919) % max(2, backbone.ids_below - 1) + 1
    return (ids % backbone.ids_below).unsqueeze(0).to(backbone.device)


def _kinds(backbone: Backbone) -> list[str]:
    return list(getattr(backbone.config, "layer_types", None) or ["full_attention"])


def _architecture(backbone: Backbone) -> tuple[str, ...]:
    """What a verdict holds for: the class and everything in its config but sizes, under these versions."""
    try:
        settings = shrink(backbone.config).to_json_string(use_diff=False)
    except Exception:  # a config that cannot be shrunk; there will be no twin either
        settings = backbone.config.to_json_string(use_diff=False)
    return type(backbone.model).__name__, _original(backbone), settings, torch.__version__, transformers.__version__


def _original(backbone: Backbone) -> str:
    """The attention implementation that the model came with."""
    return str(backbone.model.config._attn_implementation).removeprefix(PREFIX)
