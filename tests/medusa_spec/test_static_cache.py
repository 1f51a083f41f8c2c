import pytest
import torch

from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.static_cache import StaticCache
from medusa_spec.static_tree import StaticTree
from medusa_spec.tree import shape_of

SHAPE = shape_of((-1, 0, 1, 0, 3))
NAMES = ["llama", "mistral-window", "gpt-oss"]


def sealed(model, ids: torch.Tensor) -> SlabCache:
    backbone = Backbone(model)
    cache = SlabCache(backbone.config)
    backbone.forward(ids, cache=cache)
    cache.seal(8)
    backbone.detach()
    return cache


def copies(states):
    return [tuple(tensor.clone() for tensor in pair) for pair in states]


def same(left, right) -> bool:
    return all(torch.equal(*tensors) for pairs in zip(left, right, strict=True) for tensors in zip(*pairs, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [3, 20])
def test_states_go_there_and_back(make_model, prompt, name, length):
    slabs = sealed(make_model(name), prompt(length))
    before, exported = copies(slabs.states()), slabs.export(make_model(name).config)
    static = StaticCache(slabs, 32)
    static.load(slabs.states(), length)
    slabs.release()
    assert slabs.layers[0].keys.shape[2] == 0
    slabs.renew(static.states(), length)
    assert slabs.lengths == [length]
    # A sliding layer gives back what its window reaches; before it may have held one token more.
    after = slabs.states()
    reach = [
        tuple(old[:, :, -new.shape[2] :] for old, new in zip(*pair, strict=True))
        for pair in zip(before, after, strict=True)
    ]
    assert same(reach, after)
    for old, new in zip(exported.layers, slabs.export(make_model(name).config).layers, strict=True):
        assert torch.equal(old.keys, new.keys) and torch.equal(old.values, new.values)


@pytest.mark.parametrize("name", NAMES)
def test_nodes_are_written_behind_the_prefix_and_nowhere_else(make_model, prompt, name):
    slabs = sealed(make_model(name), prompt(6))
    static = StaticCache(slabs, 32)
    static.load(slabs.states(), 6)
    before = static.layers[1].keys.clone()
    static.place(4)
    new = torch.randn_like(before[:, :, :4])
    keys, values = static.update(new, new, 1)
    assert keys is static.layers[1].keys and values is static.layers[1].values
    assert torch.equal(keys[:, :, 6:10], new) and torch.equal(values[:, :, 6:10], new)
    assert torch.equal(keys[:, :, :6], before[:, :, :6]) and torch.equal(keys[:, :, 10:], before[:, :, 10:])


@pytest.mark.parametrize("node", range(SHAPE.size))
def test_kept_nodes_lie_behind_the_prefix_in_the_order_of_their_path(make_model, prompt, node):
    slabs = sealed(make_model("gpt-oss"), prompt(6))
    static, tree = StaticCache(slabs, 32), StaticTree(shape=SHAPE, device=torch.device("cpu"))
    static.load(slabs.states(), 6)
    static.place(SHAPE.size)
    written = [torch.randn_like(layer.keys[:, :, : SHAPE.size]) for layer in static.layers]
    for index, states in enumerate(written):
        static.update(states, -states, index)
    before = static.layers[0].keys[:, :, :6].clone()
    static.keep(tree.paths[node], tree.depths[node][None] + 1)
    path = list(SHAPE.path_to(node))
    assert static.length.tolist() == [6 + len(path)]
    for layer, states in zip(static.layers, written, strict=True):
        kept = slice(6, 6 + len(path))
        assert torch.equal(layer.keys[:, :, kept], states[:, :, path])
        assert torch.equal(layer.values[:, :, kept], -states[:, :, path])
    assert torch.equal(static.layers[0].keys[:, :, :6], before)


def test_layers_of_one_shape_move_together(make_model, prompt):
    slabs = sealed(make_model("gpt-oss"), prompt(6))
    assert len(StaticCache(slabs, 32)._slabs) == 2  # a window is no matter of shape here


def test_other_shapes_and_types_do_not_fit(make_model, prompt):
    slabs = sealed(make_model("llama"), prompt(6))
    static = StaticCache(slabs, 32)
    assert static.fits(slabs)
    assert not static.fits(sealed(make_model("llama", dtype=torch.float32), prompt(6)))
    assert not static.fits(sealed(make_model("llama", num_key_value_heads=4), prompt(6)))
    assert not static.fits(sealed(make_model("mistral-window"), prompt(6)))


def test_what_models_ask_is_answered_without_the_device(make_model, prompt):
    static = StaticCache(sealed(make_model("llama"), prompt(6)), 32)
    static.cut(5)
    layer = static.layers[0]
    assert (layer.get_seq_length(), layer.get_max_length(), layer.get_mask_sizes(4)) == (5, 32, (32, 0))
    assert static.window(0) is None and static.length.tolist() == [5]
