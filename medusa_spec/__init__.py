"""Multi-head speculative decoding for Hugging Face causal LMs: faster, token for token the same."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_spec.config import MedusaConfig as MedusaConfig
    from medusa_spec.drafters import Drafter as Drafter
    from medusa_spec.drafters import DraftSession as DraftSession
    from medusa_spec.drafters import HybridDrafter as HybridDrafter
    from medusa_spec.drafters import NgramDrafter as NgramDrafter
    from medusa_spec.drafters import SuffixCorpus as SuffixCorpus
    from medusa_spec.drafters import SuffixDrafter as SuffixDrafter
    from medusa_spec.errors import MedusaError as MedusaError
    from medusa_spec.export import export_heads as export_heads
    from medusa_spec.heads import HeadsConfig as HeadsConfig
    from medusa_spec.heads import MedusaHeads as MedusaHeads
    from medusa_spec.model import MedusaModel as MedusaModel
    from medusa_spec.stats import DecodingStats as DecodingStats
    from medusa_spec.tree import TokenTree as TokenTree
    from medusa_spec.tree import TreeTemplate as TreeTemplate

__version__ = "0.1.0"

# Loaded on first use: `import medusa_spec.tree` must not load transformers.
_HOMES = {
    "DecodingStats": "medusa_spec.stats",
    "DraftSession": "medusa_spec.drafters",
    "Drafter": "medusa_spec.drafters",
    "HeadsConfig": "medusa_spec.heads",
    "HybridDrafter": "medusa_spec.drafters",
    "MedusaConfig": "medusa_spec.config",
    "MedusaError": "medusa_spec.errors",
    "MedusaHeads": "medusa_spec.heads",
    "MedusaModel": "medusa_spec.model",
    "NgramDrafter": "medusa_spec.drafters",
    "SuffixCorpus": "medusa_spec.drafters",
    "SuffixDrafter": "medusa_spec.drafters",
    "TokenTree": "medusa_spec.tree",
    "TreeTemplate": "medusa_spec.tree",
    "export_heads": "medusa_spec.export",
}

__all__ = [
    "DecodingStats",
    "DraftSession",
    "Drafter",
    "HeadsConfig",
    "HybridDrafter",
    "MedusaConfig",
    "MedusaError",
    "MedusaHeads",
    "MedusaModel",
    "NgramDrafter",
    "SuffixCorpus",
    "SuffixDrafter",
    "TokenTree",
    "TreeTemplate",
    "__version__",
    "export_heads",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
