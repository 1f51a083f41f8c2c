"""MTP layers that a target's own checkpoint ships, as heads. Knows transformers' loading of them, no decoding."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from medusa_spec.backbone import Backbone
from medusa_spec.errors import CheckpointError, UnsupportedError
from medusa_spec.heads import HeadsConfig, fitted_options, make_heads
from medusa_spec.heads.mtp import MtpHeads

NATIVE = "mtp"
"""What `heads` says to ask for them."""
STEPS = 3
"""Steps for which a single layer is used where no tree says how many."""


def native_heads(backbone: Backbone, steps: int | None = None) -> MtpHeads:
    """The MTP layers of the target's checkpoint, as heads of kind `mtp`.

    ```
    one layer         used for every step, on its own features (tied)
    several layers    one for each step
    ```

    Args:
        backbone: The target, loaded from a checkpoint and not prepared yet.
        steps: K where there is one layer only; None is `STEPS`.

    Raises:
        UnsupportedError: If the target ships none, or of a form that cannot be drafted with.
        CheckpointError: If its checkpoint does not hold them.
    """
    layers = getattr(backbone.config, "num_mtp_layers", None)
    if not layers:
        raise UnsupportedError(
            f"heads={NATIVE!r} asks for MTP layers that the checkpoint ships, but the config of "
            f"{type(backbone.model).__name__} names none (num_mtp_layers is {layers}); train some: medusa-spec "
            f"finetune --kind {NATIVE}"
        )
    _check_states(backbone)
    loaded = _load(backbone.model)
    if not loaded.use_post_norm:
        raise UnsupportedError(
            f"the MTP layers of {type(backbone.model).__name__} have no norm of their own at their end "
            "(chain_hidden_post_norm), which is not supported; train heads instead"
        )
    config = HeadsConfig(
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        kind="mtp",
        num_heads=layers if layers > 1 else steps or STEPS,
        options=fitted_options("mtp", {"tied": layers == 1, "from_h": False}, backbone.config),
    )
    projection, embedding = backbone.projection(), backbone.embedding()
    try:
        with torch.device("meta"):  # such layers can be larger than memory holds twice
            heads: Any = make_heads(config, projection, None, embedding)
    except ValueError as error:
        raise UnsupportedError(f"the target's MTP layers cannot be drafted with: {error}") from error
    for head, layer in zip(heads.heads, loaded.layers, strict=True):
        head.layer.adopt(layer)
    return heads.to(device=backbone.head_device, dtype=backbone.dtype).requires_grad_(False).eval()


def _check_states(backbone: Backbone) -> None:
    """MTP layers read the decoder's last hidden state; drafters are shown what enters the LM head.

    Raises:
        UnsupportedError: If that is another tensor.
    """
    ids = torch.arange(1, 4, device=backbone.device).remainder(backbone.ids_below).unsqueeze(0)
    with torch.no_grad():
        last = backbone.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[-1]
    h = backbone.forward(ids).h
    if not torch.equal(last.to(h.device), h):
        raise UnsupportedError(
            f"the MTP layers of {type(backbone.model).__name__} read its last hidden state, which is not what enters "
            "its LM head; train heads instead"
        )


def _load(model: Any) -> Any:
    """Transformers' `MtpModel` of the checkpoint that `model` was loaded from."""
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise UnsupportedError("MTP layers of a checkpoint need transformers 5.24 or later; install it") from error
    try:
        with _findable(model):
            return MtpModel.from_pretrained(model)
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint of {model.config.name_or_path!r} must hold the MTP layers that its config names: {error}"
        ) from error


@contextmanager
def _findable(model: Any) -> Iterator[None]:
    """Within it transformers finds the layers: those behind the last one, in the revision that was loaded.

    It looks under names that each class lists for its published sizes alone, and in the default revision.
    """
    config, own, ignored = model.config, "_keys_to_ignore_on_load_unexpected", model._keys_to_ignore_on_load_unexpected
    before = model.__dict__.get(own)
    first, count = config.get_text_config(decoder=True).num_hidden_layers, config.get_text_config().num_mtp_layers
    behind = [rf"(^|\.)layers\.{number}\." for number in range(first, first + count)]
    others = [pattern for pattern in ignored or [] if not re.search(r"layers\\\.\d", pattern)]
    name, folder = config.name_or_path, _snapshot(config)
    model.__dict__[own] = [*others, *behind]
    config.name_or_path = folder
    try:
        yield
    finally:
        config.name_or_path = name
        del model.__dict__[own]
        if before is not None:  # most models have what their class says
            model.__dict__[own] = before


def _snapshot(config: Any) -> str:
    """Where the checkpoint lies: a folder, or that of the revision which was loaded from the hub."""
    name, revision = config.name_or_path, getattr(config, "_commit_hash", None)
    if revision is None or Path(name).is_dir():
        return name
    found = cached_file(name, "config.json", revision=revision, local_files_only=True)
    return name if found is None else str(Path(found).parent)
