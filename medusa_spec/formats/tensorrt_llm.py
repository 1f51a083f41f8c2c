"""Medusa heads in a converted TensorRT-LLM checkpoint of one rank, the target's weights beside them."""

from medusa_spec.formats.contents import Contents
from medusa_spec.formats.layout import Layout
from medusa_spec.formats.medusa import medusa_layout, pattern

PREFIX = "medusa_heads."
LINEAR, LM_HEAD = "{head}.medusa_layers.{layer}.linear.{part}", "{head}.lm_head.weight"


def tensorrt_llm_layout(contents: Contents) -> Layout | None:
    """The layout if these are such heads, else None.

    Raises:
        CheckpointError: If they are, but not whole.
    """
    beside = contents.names_beside(pattern(PREFIX + LINEAR))
    if not beside:
        return None
    found = {name.removeprefix(PREFIX): name for name in beside if name.startswith(PREFIX)}
    # The target's weights are there as well, but not as transformers reads them: `with_target` stays false.
    return medusa_layout(contents, found, format="TensorRT-LLM Medusa", linear=LINEAR, lm_head=LM_HEAD)
