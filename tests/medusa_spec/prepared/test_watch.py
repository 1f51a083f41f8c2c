"""Whatever changes below a module is noticed, and nothing else is."""

import pytest
import torch
from torch import nn
from transformers.utils import output_capturing
from transformers.utils.output_capturing import install_output_capuring_hook

from medusa_spec.prepared.watch import Watch


@pytest.fixture
def root():
    inner = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4, bias=False))
    return nn.Sequential(inner, nn.LayerNorm(4)).requires_grad_(False).eval()


@pytest.fixture
def watch(root):
    watch = Watch(root)
    assert watch.holds()
    return watch


CHANGES = {
    "exchanged": lambda root: root[0].__setitem__(1, nn.SiLU()),
    "wrapped": lambda root: root[0].__setitem__(0, nn.Sequential(root[0][0])),
    "deleted": lambda root: root[0].__delitem__(1),
    "added": lambda root: root[0].append(nn.SiLU()),
    "of another class": lambda root: setattr(root[0][1], "__class__", nn.GELU),
    "assigned": lambda root: setattr(root[0][0], "weight", nn.Parameter(torch.zeros(4, 4), requires_grad=False)),
    "given data": lambda root: setattr(root[0][0].weight, "data", torch.zeros(4, 4)),
    "given a bias": lambda root: setattr(root[0][2], "bias", nn.Parameter(torch.zeros(4), requires_grad=False)),
    "hooked": lambda root: root[0][1].register_forward_hook(lambda *_: None),
    "hooked before": lambda root: root[0].register_forward_pre_hook(lambda *_: None),
    "forward of its own": lambda root: setattr(root[1], "forward", root[1].forward),
    "cast": lambda root: root.double(),
    "trained": lambda root: root[0][0].requires_grad_(True),
    "given another number": lambda root: setattr(root[1], "eps", 0.1),
    "in training": lambda root: root[0][1].train(),
    "root in training": lambda root: setattr(root, "training", True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_noticed(root, watch, change):
    change(root)
    assert not watch.holds()


def test_hooks_of_every_module_are_noticed_while_they_last(watch):
    for register in (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
    ):
        handle = register(lambda *_: None)
        assert not watch.holds()
        handle.remove()
        assert watch.holds()


def test_weights_written_in_place_and_hooks_of_the_root_are_left_to_others(root, watch):
    root[0][0].weight.data.add_(1)
    root.load_state_dict(root.state_dict())
    root.register_forward_hook(lambda *_: None)
    assert watch.holds()


def test_hooks_that_transformers_leaves_behind_are_none_unless_somebody_collects(root, watch):
    install_output_capuring_hook(root[0][0], "hidden_states", 0)
    assert watch.holds()
    token = output_capturing._active_collector.set({"hidden_states": []})
    try:
        assert not watch.holds()
    finally:
        output_capturing._active_collector.reset(token)
    assert watch.holds()
    root[0][0].register_forward_hook(lambda *_: None)
    assert not watch.holds(), "another one's hook beside it"


def test_where_it_cannot_be_told_who_collects_a_hook_is_a_hook(root, watch, monkeypatch):
    install_output_capuring_hook(root[0][0], "hidden_states", 0)
    monkeypatch.delattr(output_capturing, "_active_collector")
    assert not watch.holds()
