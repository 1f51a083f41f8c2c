"""Which states of the target a family of heads reads. Knows settings alone."""

from dataclasses import dataclass

from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.target import decoder_config
from medusa_spec.heads import FAMILIES, fitted_options, options_of


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the store is to hold.

    Attributes:
        whole: Whole texts, prompts too; otherwise the positions after which the target chose.
        taps: Layers of the target whose inputs are kept beside h.
    """

    whole: bool
    taps: tuple[int, ...]


def wanted_states(config: FinetuneConfig) -> Wanted:
    """What the family of heads reads."""
    family = FAMILIES[config.kind]
    options = options_of(config.kind, fitted_options(config.kind, config.options, decoder_config(config)))
    return Wanted(whole=family.attends, taps=family.taps_of(options))
