"""Weights of a tree pass are what each node gives to prefix and ancestors, and to nothing else."""

import pytest
import torch
from torch import nn

from medusa_spec.attention import TreePass
from medusa_spec.attention_weights import WeighingPass, tree_weights
from medusa_spec.cache import SlabCache
from medusa_spec.testing import tiny
from medusa_spec.tree import shape_of

SHAPE = shape_of((-1, 0, 1, 0))


class Layer(nn.Module):
    layer_idx = 0


def a_pass(kind: type[TreePass], *, window: int | None, length: int = 9) -> tuple[TreePass, torch.Tensor]:
    """A pass behind a prefix of random keys, and the layer's key buffer."""
    model = tiny("mistral", sliding_window=window)
    cache = SlabCache(model.config)
    model(torch.arange(2, 2 + length)[None], cache=cache, use_cache=True)
    cache.seal(SHAPE.size)
    cache.make_room(SHAPE.size)
    keys, values = cache.buffers(0)
    keys[:], values[:] = torch.randn_like(keys), torch.randn_like(values)
    return kind(shape=SHAPE, cache=cache, device=torch.device("cpu")), keys


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sink", [False, True])
def test_weights_times_values_are_the_output(window, softcap, sink):
    tree_pass, keys = a_pass(WeighingPass, window=window)
    values = tree_pass.cache.buffers(0)[1]
    query = torch.randn(1, 4, SHAPE.size, keys.shape[3], dtype=keys.dtype)
    more = {"softcap": softcap, "s_aux": torch.randn(4, dtype=keys.dtype) if sink else None}
    out, weights = tree_pass.attend(Layer(), query, keys, values, None, **more)
    assert weights.shape == (1, 4, SHAPE.size, 9 + SHAPE.size)
    base = tree_pass.cache.base(0, 0)
    seen = values[:, :, : 9 - base + SHAPE.size].repeat_interleave(2, dim=1)
    torch.testing.assert_close((weights[..., base:] @ seen).transpose(1, 2), out, rtol=1e-5, atol=1e-6)
    sums = weights.sum(-1)
    assert bool((sums < 1.0).all()) if sink else torch.allclose(sums, torch.ones_like(sums), atol=1e-6)


def test_what_a_node_does_not_see_has_no_weight():
    tree_pass, keys = a_pass(TreePass, window=4)
    query = torch.randn(1, 4, SHAPE.size, keys.shape[3], dtype=keys.dtype)
    weights = tree_weights(Layer(), query, keys, tree_pass=tree_pass)
    seen = (weights[0] > 0).all(0).int().tolist()
    assert seen == [
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1],
    ]
    assert torch.equal((weights[0] > 0).any(0), (weights[0] > 0).all(0))
