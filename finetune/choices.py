"""What settings of a run may be, by name. Knows no run."""

from typing import Literal

from medusa_spec.heads import FAMILIES

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
MIMICS = tuple(kind for kind, family in FAMILIES.items() if family.mimics)
"""Families whose features are to be the target's h."""
LOSSES = ("cross_entropy", "kl", "total_variation", "log_acceptance", "lk")
"""What heads can be trained by; all but the first learn from the target's probabilities, see `distillation`."""
TOP_LOGITS = 32
"""Tokens per position that such a loss keeps, where none are named."""
TARGET_LOSSES = ("kl", "cross_entropy")
SELF = "self"
"""The value of `data` that asks the model to write its own prompts and answers."""
