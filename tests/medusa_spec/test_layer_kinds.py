"""What each layer of a text decoder keeps, by its config."""

import pytest
from transformers import AutoConfig, LlamaConfig

from medusa_spec.errors import UnsupportedError
from medusa_spec.layer_kinds import layer_chunks, layer_sources, layer_windows


def config(kinds: list[str], window: int = 6) -> LlamaConfig:
    """A text config with layers of these kinds."""
    return LlamaConfig(num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=window)


def test_windows_are_those_of_sliding_layers() -> None:
    made = config(["full_attention", "sliding_attention"], window=5)
    assert layer_windows(made) == [None, 5] and layer_chunks(made) == [None, None] and layer_sources(made) == {}


@pytest.mark.parametrize("kind", ["linear_attention", "conv"])
def test_a_layer_that_holds_no_tree_is_refused_by_place_and_kind(kind: str) -> None:
    # `LlamaConfig` itself checks kinds against its own list, so the kinds are put in afterwards.
    made = config(["full_attention"] * 2)
    made.layer_types = ["full_attention", kind]
    with pytest.raises(UnsupportedError, match=f"layer 1 is of kind '{kind}'"):
        layer_windows(made)


def test_layers_in_chunks_are_kept_whole() -> None:
    made = config(["full_attention"] * 3)
    made.layer_types, made.attention_chunk_size = ["chunked_attention", "full_attention", "chunked_attention"], 4
    assert layer_windows(made) == [None] * 3 and layer_chunks(made) == [4, None, 4]


def test_layers_at_the_end_read_the_last_layer_of_their_kind() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    made = AutoConfig.for_model("gemma4_text", num_hidden_layers=6, layer_types=kinds, num_kv_shared_layers=2)
    assert layer_sources(made) == {4: 2, 5: 3} and len(layer_windows(made)) == 4
    assert layer_sources(config(kinds)) == {}
