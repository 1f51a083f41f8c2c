"""The families of heads by name. A new one is a file, and its lines here; see docs/extending.md."""

import torch

from medusa_spec.heads.base import DraftHeads
from medusa_spec.heads.config import HeadsConfig
from medusa_spec.heads.embedding import TokenEmbedding
from medusa_spec.heads.hydra import HydraHeads, HydraLevels
from medusa_spec.heads.levels import LevelHeads
from medusa_spec.heads.medusa import MedusaHeads
from medusa_spec.heads.projection import Projection

FAMILIES: dict[str, type[DraftHeads]] = {"medusa": MedusaHeads, "hydra": HydraHeads}
"""`HeadsConfig.kind` to the class."""

LEVELS: dict[str, type[LevelHeads]] = {"hydra": HydraLevels}
"""`HeadsConfig.kind` of the sequential families to their decoding form."""


def make_heads(
    config: HeadsConfig,
    projection: Projection,
    draft_ids: torch.Tensor | None = None,
    embedding: TokenEmbedding | None = None,
) -> DraftHeads:
    """Fresh heads of the family that `config.kind` names; arguments as for `DraftHeads`."""
    return FAMILIES[config.kind](config, projection, draft_ids, embedding)
