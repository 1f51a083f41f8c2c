"""What no engine carries, whatever the family: biases of LM heads, other vocabularies, changed hidden states."""

from typing import NoReturn

from medusa_spec.backbone import Backbone
from medusa_spec.errors import UnsupportedError
from medusa_spec.formats.full_rows import has_bias
from medusa_spec.heads import DraftHeads

HERE = "decode them with this library"


def refuse(heads: DraftHeads, format: str, what: str, instead: str = HERE) -> NoReturn:
    """Raises UnsupportedError for something in the heads that a format cannot carry.

    Args:
        heads: Which they are.
        format: That cannot.
        what: What it cannot carry.
        instead: What to do.
    """
    raise UnsupportedError(f"{heads.config.kind} heads cannot be exported as {format}: {what}; {instead}")


def check_limits(heads: DraftHeads, backbone: Backbone, format: str, *, reads_h: bool = True) -> None:
    """Refuses what engines cannot carry for any family.

    Args:
        heads: To be exported.
        backbone: Their target.
        format: For errors.
        reads_h: The heads read h, not only layers of the target.

    Raises:
        UnsupportedError: If there is something of the kind.
    """
    if has_bias(heads):
        refuse(heads, format, "engines know no biases of LM heads, and these have one")
    scale, vocab_size = heads.projection.scale, heads.config.vocab_size
    if scale <= 0:
        refuse(heads, format, f"the target scales its logits by {scale}, which turns their order round")
    if reads_h and not backbone.decoder_gives_h:
        refuse(
            heads,
            format,
            f"{type(backbone.model).__name__} changes its last hidden state before the LM head; these heads read the "
            "changed one, engines hand out the other",
        )
    rows = getattr(backbone.config, "vocab_size", None)
    if rows != vocab_size:
        refuse(
            heads,
            format,
            f"the target's config says vocab_size = {rows}, its logits are {vocab_size}, and engines load LM heads of "
            "as many rows as the config says",
        )
