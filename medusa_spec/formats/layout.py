"""Which foreign tensor is which of ours: names and counts. Knows no tensor, and not the target."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_spec.errors import CheckpointError
from medusa_spec.formats.contents import Contents

Shapes = Mapping[str, tuple[int, ...]]
Fit = Callable[[Shapes, int, int | None], dict[str, Any]]
"""From the shapes of a checkpoint's tensors, the target's H and its number of layers to the options of a family."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a foreign checkpoint says, found from the names of its tensors.

    Attributes:
        format: Its name, for people.
        kind: Family of the heads, as in `HeadsConfig`.
        num_heads: K, counted.
        num_layers: Blocks per head, counted.
        names: Our name of each of the heads' tensors, as in `DraftHeads.state_dict`, to theirs.
        own_lm_heads: Every head has an LM head, which is in `names`.
        lm_head_bias: Those have biases.
        one_lm_head: Their name of one LM head that all heads read; None together with `own_lm_heads` false means that
            they read the target's.
        biases: The blocks have biases; otherwise ours are zero.
        residual: As in `HeadsConfig`.
        token_map: Their name of the target ids that the LM head's rows stand for; None where those are all V.
        logit_scale: Factor on the logits.
        embedding: Their name of a copy of the target's input embeddings.
        offsets: Their name of what must be added to the row numbers of LM heads to get the target's ids, instead of a
            token map, and of a table over all V of which ids those are, where there is one.
        copies: Their names of tensors that must be copies of others, to the names of those.
        fit: Works out the family's options; None where it needs none.
        chain: Guesses of a draft that has no tree; None is one of every head.
        with_target: The files hold the target's weights, too.
    """

    format: str
    kind: str
    num_heads: int
    num_layers: int
    names: dict[str, str] = field(repr=False)
    own_lm_heads: bool
    lm_head_bias: bool = False
    one_lm_head: str | None = None
    biases: bool = True
    residual: str = "identity"
    token_map: str | None = None
    logit_scale: float = 1.0
    embedding: str | None = None
    offsets: tuple[str, str | None] | None = None
    copies: dict[str, str] = field(default_factory=dict, repr=False)
    fit: Fit | None = None
    chain: int | None = None
    with_target: bool = False


def count(contents: Contents, what: str, numbers: Iterable[int]) -> int:
    """How many things are numbered from 0.

    Raises:
        CheckpointError: If a number is left out.
    """
    found = sorted(set(numbers))
    if found != list(range(len(found))):
        raise CheckpointError(
            f"{contents.folder}: {what} must be numbered 0..{len(found) - 1}, as there are {len(found)} of them, got "
            f"{found}; the checkpoint is incomplete"
        )
    return len(found)


def check_names(contents: Contents, format: str, expected: Iterable[str], found: Iterable[str]) -> None:
    """The tensors are those that they must be.

    Raises:
        CheckpointError: If some are missing or surplus, with both numbers and the names.
    """
    wanted, held = set(expected), set(found)
    missing, surplus = sorted(wanted - held), sorted(held - wanted)
    if missing or surplus:
        raise CheckpointError(
            f"{contents.folder}, {format} heads, must hold {len(wanted)} tensors, got {len(held)}: missing "
            f"{_some(missing)}, surplus {_some(surplus)}; the checkpoint is incomplete or of another version"
        )


def compare_config(contents: Contents, what: str, keys: Sequence[str], counted: int) -> None:
    """Warns, with both numbers, where the config says something else than the file: the file is believed."""
    for key in keys:
        said = contents.config.get(key)
        if said is not None and said != counted:
            warnings.warn(
                f"{contents.folder}: the config says {key} = {said}, the tensors are those of {counted} {what}; the "
                f"tensors are believed, so {counted} it is",
                stacklevel=2,
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:6]))
    return f"[{shown}{f', … ({len(names)} in all)' if len(names) > 6 else ''}]"
