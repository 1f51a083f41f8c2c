"""Does a tree pass of this model equal sequential passes? Asked once per model, before anyone decodes with it."""

import logging
from dataclasses import dataclass

import torch
import transformers

from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.delegation import PREFIX
from medusa_spec.errors import AttachError
from medusa_spec.tree import TreeShape, chain, shape_of
from medusa_spec.twin import WINDOW, shrink, twin

logger = logging.getLogger(__name__)

PROBE_SHAPE = shape_of((-1, 0, 1, 0, 3, 2, 3))
"""Two branches of depth three and two, and a fork: a chain's mask is wrong for five of its nodes."""

EXACT = 1e-6
"""Largest difference of float64 logits that counts as equal: eager attention takes its softmax in float32."""

FAR_BELOW = 0.4
"""A tree pass of the real model must differ from sequential passes by less than this share of what a wrong mask does:
in bfloat16 rounding alone comes to a tenth of it, a wrong mask to all of it."""

_verdicts: dict[tuple[str, ...], str] = {}


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
    """Checks a freshly attached model.

    On a shrunk float64 twin of the same architecture a tree pass must equal sequential passes; on the model itself,
    whose rounding is its own, the error must be far below that of a deliberately wrong mask.

    Args:
        backbone: The model; it stays attached.

    Returns:
        One line on what was found. The twin's part is remembered by class and versions.

    Raises:
        AttachError: If tree passes are not exact; the message says where.
        UnsupportedError: If a layer kind cannot hold a tree.
    """
    name = type(backbone.model).__name__
    key = _architecture(backbone)
    if key not in _verdicts:
        _verdicts[key] = _probe_twin(backbone)
    verdict = compare(backbone, prompt=arbitrary_prompt(backbone, 12))
    if not verdict.mean < FAR_BELOW * verdict.wrong:
        raise AttachError(
            f"{name}: tree passes differ from sequential passes (mean difference {verdict.mean:.3g}; a wrong mask "
            f"gives {verdict.wrong:.3g}); this model cannot be speculated exactly. Use its own generate()"
        )
    return f"{_verdicts[key]}; model: mean error {verdict.mean:.3g}, wrong mask {verdict.wrong:.3g}"


def compare(backbone: Backbone, prompt: torch.Tensor) -> Verdict:
    """Logits at the nodes of `PROBE_SHAPE` behind a prompt [1, T]: by one tree pass, by full passes over each path."""
    tokens = arbitrary_prompt(backbone, PROBE_SHAPE.size + 3)[:, 3:]
    right = tree_logits(backbone, prompt, tokens, PROBE_SHAPE)
    wrong = tree_logits(backbone, prompt, tokens, chain(PROBE_SHAPE.size - 1), positions=PROBE_SHAPE)
    expected = torch.stack(
        [
            backbone.forward(torch.cat([prompt, tokens[:, list(PROBE_SHAPE.path_to(node))]], dim=1)).logits[0, -1]
            for node in range(PROBE_SHAPE.size)
        ]
    ).double()
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
) -> torch.Tensor:
    """Logits of one tree pass [N, V] in float64, of nodes `tokens` [1, N] behind a prompt [1, T].

    `positions` puts the nodes where another shape's would be.
    """
    cache = SlabCache(backbone.config)
    backbone.forward(prompt, last_only=True, cache=cache)
    cache.seal(shape.size)
    cache.make_room(shape.size)
    tree_pass = TreePass(shape=shape, cache=cache, device=backbone.device)
    if positions is not None:
        tree_pass = _Misplaced(shape=shape, cache=cache, device=backbone.device, depths=positions.depths)
    return backbone.verify(tokens, tree_pass).logits[0].double()


@dataclass(kw_only=True, eq=False)
class _Misplaced(TreePass):
    """A pass whose positions are those of another tree, so that a wrong mask is its only fault."""

    depths: tuple[int, ...]

    @property
    def positions(self) -> torch.Tensor:
        return self.cache.lengths[0] + torch.tensor([self.depths], device=self.device)


def _probe_twin(backbone: Backbone) -> str:
    try:
        small = Backbone(twin(backbone.model, _original(backbone)))
        small.forward(arbitrary_prompt(small, 4))
    except Exception as error:  # a config that cannot be shrunk says nothing about the model; the model itself is next
        logger.info("no twin of %s: %r", type(backbone.model).__name__, error)
        return f"twin: none ({type(error).__name__})"
    verdicts = [compare(small, prompt=arbitrary_prompt(small, length)) for length in (WINDOW // 2, 3 * WINDOW)]
    worst = max(verdict.error for verdict in verdicts)
    if not worst < EXACT:
        raise AttachError(
            f"{type(backbone.model).__name__}: on a small float64 twin tree passes differ from sequential passes by "
            f"{worst:.3g} (allowed {EXACT:.0e}); this architecture (layer kinds {sorted(set(_kinds(backbone)))}) "
            "cannot be speculated exactly yet. Use its own generate()"
        )
    return f"twin: exact to {worst:.1e}"


def arbitrary_prompt(backbone: Backbone, length: int) -> torch.Tensor:
    """Arbitrary ids [1, length], different from one another where the vocabulary allows it."""
    ids = (torch.arange(1, length + 1) * 7919) % max(2, backbone.ids_below - 1) + 1
    return (ids % backbone.ids_below).unsqueeze(0).to(backbone.device)


def _kinds(backbone: Backbone) -> list[str]:
    return list(getattr(backbone.config, "layer_types", None) or ["full_attention"])


def _architecture(backbone: Backbone) -> tuple[str, ...]:
    """What a verdict holds for: the class and everything in its config but sizes, under these versions."""
    config = backbone.config
    settings = shrink(config).to_json_string(use_diff=False)
    return type(backbone.model).__name__, _original(backbone), settings, torch.__version__, transformers.__version__


def _original(backbone: Backbone) -> str:
    """The attention implementation that the model came with."""
    return str(backbone.model.config._attn_implementation).removeprefix(PREFIX)
