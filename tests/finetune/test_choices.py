"""Names that settings may have."""

from pathlib import Path

from medusa_spec.finetune import distillation
from medusa_spec.finetune.choices import LOSSES, MIMICS, TARGET_LOSSES
from medusa_spec.heads.config import KINDS


def test_names_are_those_that_the_code_knows() -> None:
    assert set(MIMICS) < set(KINDS) and "eagle" in MIMICS
    assert set(TARGET_LOSSES) <= set(LOSSES) and len(set(LOSSES)) == len(LOSSES)
    source = Path(str(distillation.__file__)).read_text(encoding="utf-8")
    assert all(f'"{loss}"' in source for loss in LOSSES[1:])
