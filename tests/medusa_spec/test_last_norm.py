"""What turns the last layer's output into h."""

import pytest
import torch

from medusa_spec.backbone import Backbone
from medusa_spec.errors import UnsupportedError
from medusa_spec.last_norm import LastNorm
from medusa_spec.testing import ARCHITECTURES, tiny

IDS = torch.arange(3, 15)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_gives_the_h_of_the_model_from_what_leaves_the_last_layer(name: str) -> None:
    backbone = Backbone(tiny(name))
    norm = LastNorm(backbone)
    states = norm.states(IDS)
    count = len(norm.layers)
    assert states.shape == (len(IDS), count + 2, backbone.hidden_size)
    h = backbone.hidden_states(IDS[None])[0]
    assert torch.equal(states[:, -1], h) and torch.equal(norm(states[:, -2]), h)
    assert not torch.allclose(states[:, -2], h)
    output = backbone.model(IDS[None], output_hidden_states=True)
    for layer in range(count):
        assert torch.equal(states[:, layer], output.hidden_states[layer][0])
    backbone.detach()


def test_rows_may_come_in_any_shape_and_dtype() -> None:
    backbone = Backbone(tiny("llama", dtype=torch.bfloat16))
    norm = LastNorm(backbone)
    states = norm.states(IDS)
    assert torch.equal(norm(states[None, 2:5, -2].float()), states[None, 2:5, -1])


def test_no_hooks_stay() -> None:
    backbone = Backbone(tiny("llama"))
    LastNorm(backbone).states(IDS)
    inside = [module for module in backbone.model.get_decoder().modules()]
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in inside)


def test_a_model_without_a_norm_passes_states_on() -> None:
    model = tiny("llama")
    model.model.norm = torch.nn.Identity()
    backbone = Backbone(model)
    norm = LastNorm(backbone)
    assert torch.equal(norm(norm.states(IDS)[:, -2]), backbone.hidden_states(IDS[None])[0])


def test_what_is_not_one_module_is_refused() -> None:
    model = tiny("llama")
    model.model.register_forward_hook(lambda module, given, came: _halved(came))
    with pytest.raises(UnsupportedError, match="does not turn what leaves its last layer into h by one module"):
        LastNorm(Backbone(model))


def _halved(output: object) -> object:
    output.last_hidden_state = output.last_hidden_state / 2  # type: ignore[attr-defined]
    return output
