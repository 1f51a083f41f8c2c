"""What each layer of a text decoder keeps, read off its config. Knows no tensors."""

from typing import Any

from transformers.cache_utils import get_layer_types_and_kwargs

from medusa_spec.errors import UnsupportedError


def layer_windows(config: Any) -> list[int | None]:
    """Window of every layer of a text decoder's config that keeps keys and values; None for full attention.

    Layers at the end that attend to another one's are left out; see `layer_sources`.

    Raises:
        UnsupportedError: If a layer keeps something other than keys and values of a full or sliding attention; the
            message names the layer and its kind.
    """
    kinds, arguments = get_layer_types_and_kwargs(config)
    holding = len(kinds) - len(layer_sources(config))
    kinds, arguments = kinds[:holding], arguments[:holding]
    windows: list[int | None] = []
    for index, (kind, kwargs) in enumerate(zip(kinds, arguments, strict=True)):
        if kind in ("full_attention", "chunked_attention"):  # chunks are seen in part, and kept whole
            windows.append(None)
        elif kind == "sliding_attention":
            windows.append(kwargs["sliding_window"])
        else:
            raise UnsupportedError(
                f"layer {index} is of kind {kind!r}; slabs hold full_attention, chunked_attention and "
                "sliding_attention layers alone"
            )
    return windows


def layer_chunks(config: Any) -> list[int | None]:
    """Width of the chunks of every layer that attends within its own chunk alone; None for the others."""
    kinds, arguments = get_layer_types_and_kwargs(config)
    return [
        kwargs["sliding_window"] if kind == "chunked_attention" else None
        for kind, kwargs in zip(kinds, arguments, strict=True)
    ]


def layer_sources(config: Any) -> dict[int, int]:
    """Which layer's keys and values the layers at the end of a text decoder attend to that keep none of their own."""
    modes, kinds = getattr(config, "kv_sharing_modes", None) or [], getattr(config, "layer_types", None) or []
    owners = {kind: layer for layer, (kind, mode) in enumerate(zip(kinds, modes, strict=False)) if mode != "reuse"}
    first = max(owners.values(), default=-1) + 1
    return {layer: owners[kinds[layer]] for layer in range(first, len(kinds)) if modes and kinds[layer] in owners}
