import pytest
import torch

from medusa_spec.backbone import Backbone
from medusa_spec.static_attention import StaticTreePass
from medusa_spec.static_probe import static_probe


def test_every_supported_architecture_passes(any_model):
    assert static_probe(Backbone(any_model)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_not_taken_for_a_fault(make_model, dtype):
    for name in ("llama", "mistral-window", "gpt-oss"):
        assert static_probe(Backbone(make_model(name, dtype=dtype))) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_mask_that_hides_the_prefix_is_found(make_model, monkeypatch, dtype):
    seen = StaticTreePass._mask
    monkeypatch.setattr(
        StaticTreePass, "_mask", lambda self, slots, window: seen(self, slots, window) & (slots >= self.cache.length)
    )
    reason = static_probe(Backbone(make_model("llama", dtype=dtype)))
    assert reason is not None and reason.startswith("passes of fixed shape differ from ordinary ones by")
