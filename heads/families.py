"""The families of heads by name. A new one is a file, and its lines here; see docs/extending.md."""

from collections.abc import Mapping
from typing import Any

import torch

from medusa_spec.heads.base import DraftHeads
from medusa_spec.heads.config import HeadsConfig
from medusa_spec.heads.eagle import EagleHeads
from medusa_spec.heads.eagle3 import Eagle3Heads
from medusa_spec.heads.embedding import TokenEmbedding
from medusa_spec.heads.fused import FusedHeads
from medusa_spec.heads.hydra import HydraHeads, HydraLevels
from medusa_spec.heads.levels import LevelHeads
from medusa_spec.heads.medusa import MedusaHeads
from medusa_spec.heads.mlp_speculator import SpeculatorHeads, SpeculatorLevels
from medusa_spec.heads.mtp import MtpHeads, MtpOptions
from medusa_spec.heads.options import read_options
from medusa_spec.heads.projection import Projection
from medusa_spec.heads.recurrent import RecurrentHeads, RecurrentLevels
from medusa_spec.heads.sizes import LayerSizes, TapOptions, sizes_of, usual_taps
from medusa_spec.heads.target_config import more_layers

FAMILIES: dict[str, type[DraftHeads]] = {
    "medusa": MedusaHeads,
    "hydra": HydraHeads,
    "mlp_speculator": SpeculatorHeads,
    "recurrent": RecurrentHeads,
    "eagle": EagleHeads,
    "eagle3": Eagle3Heads,
    "mtp": MtpHeads,
    "fused": FusedHeads,
}
"""`HeadsConfig.kind` to the class."""

LEVELS: dict[str, type[LevelHeads]] = {
    "hydra": HydraLevels,
    "mlp_speculator": SpeculatorLevels,
    "recurrent": RecurrentLevels,
}
"""`HeadsConfig.kind` of the sequential families that do not attend to their decoding form."""


def make_heads(
    config: HeadsConfig,
    projection: Projection,
    draft_ids: torch.Tensor | None = None,
    embedding: TokenEmbedding | None = None,
) -> DraftHeads:
    """Fresh heads of the family that `config.kind` names; arguments as for `DraftHeads`."""
    return FAMILIES[config.kind](config, projection, draft_ids, embedding)


def options_of(kind: str, options: Mapping[str, Any]) -> Any:
    """The options of a family with its defaults filled in.

    Raises:
        ValueError: If a name is unknown or a value cannot be, naming it.
    """
    return read_options(FAMILIES[kind].Options, options, kind)


def fitted_options(kind: str, options: Mapping[str, Any], target: Any) -> dict[str, Any]:
    """Options as given, and where a family follows the target what that is.

    Args:
        kind: Family.
        options: As given.
        target: Config of the target's decoder.
    """
    family = FAMILIES[kind].Options
    given = {name: value for name, value in options.items() if value is not None}
    if family is MtpOptions and target is not None:
        return {"decoder": more_layers(target)} | given
    if not issubclass(family, LayerSizes):
        return dict(options)
    found = sizes_of(target)
    layers = getattr(target, "num_hidden_layers", None)
    if issubclass(family, TapOptions) and isinstance(layers, int):
        found["taps"] = usual_taps(layers)
    return found | given
