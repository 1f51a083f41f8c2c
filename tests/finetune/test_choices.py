"""Names that settings may have."""

from medusa_spec.finetune.choices import LOSSES, MIMICS, TARGET_LOSSES
from medusa_spec.finetune.distillation import TERMS
from medusa_spec.heads.config import KINDS


def test_names_are_those_that_the_code_knows() -> None:
    assert LOSSES == ("cross_entropy", *TERMS)
    assert set(TARGET_LOSSES) == {"kl", "cross_entropy"} < set(LOSSES)
    assert set(MIMICS) < set(KINDS) and "eagle" in MIMICS
