"""Bytes are those that tensors have."""

from pathlib import Path

import pytest
import torch
from torch import nn

from medusa_spec.backbone import Backbone
from medusa_spec.cost import filled_cache
from medusa_spec.footprint import Footprint, LayerStates, cache_bytes, free_bytes, layer_states, module_bytes
from medusa_spec.testing import tiny


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma2"])
def test_a_cache_takes_what_its_layers_hold(name: str) -> None:
    cache = filled_cache(Backbone(tiny(name)), 40)
    held = sum(part.numel() * part.element_size() for pair in cache.states() for part in pair)
    layers = layer_states(cache)
    spare = sum(layer.bytes_per_token for layer in layers if layer.window is not None)
    assert cache_bytes(layers, 40) - spare <= held <= cache_bytes(layers, 40)  # a window's last slot may be the node's


def test_layers_with_a_window_keep_no_more_than_that() -> None:
    layers = [LayerStates(bytes_per_token=10), LayerStates(bytes_per_token=4, window=8)]
    assert [cache_bytes(layers, context) for context in (0, 5, 8, 100)] == [0, 70, 112, 1032]


def test_shared_weights_count_once() -> None:
    one = nn.Linear(4, 3, bias=False).bfloat16()
    both = nn.ModuleList([one, nn.Linear(4, 3, bias=False)])
    both[1].weight = one.weight
    assert module_bytes(both) == module_bytes(one) == 24


def test_free_memory_is_known_on_linux_and_unknown_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: "MemTotal:  9 kB\nMemAvailable:   7 kB\n")
    assert free_bytes(torch.device("cpu")) == 7 * 1024
    monkeypatch.setattr(Path, "read_text", lambda self: "MemTotal:  9 kB\n")
    assert free_bytes(torch.device("cpu")) is None

    def missing(self: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert free_bytes(torch.device("cpu")) is None


def test_a_text_fits_if_its_bytes_are_free() -> None:
    def footprint(free: int | None) -> Footprint:
        return Footprint(heads=1, per_token=2, heads_per_token=1, context=100, cache=300, free=free)

    assert footprint(300).fits is True and footprint(299).fits is False and footprint(None).fits is None
