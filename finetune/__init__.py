"""From conversations to trained heads."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_spec.finetune.chat import chat_template_hash as chat_template_hash
    from medusa_spec.finetune.config import FinetuneConfig as FinetuneConfig
    from medusa_spec.finetune.mask_preview import preview as preview
    from medusa_spec.finetune.pipeline import STAGES as STAGES
    from medusa_spec.finetune.pipeline import run_pipeline as run_pipeline

__all__ = ["STAGES", "FinetuneConfig", "chat_template_hash", "preview", "run_pipeline"]

_PLACES = {
    "STAGES": "pipeline",
    "FinetuneConfig": "config",
    "chat_template_hash": "chat",
    "preview": "mask_preview",
    "run_pipeline": "pipeline",
}


def __getattr__(name: str) -> Any:
    # Lazy: who wants a setting or a hash need not wait for Trainer.
    if name in _PLACES:
        return getattr(import_module(f"medusa_spec.finetune.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
