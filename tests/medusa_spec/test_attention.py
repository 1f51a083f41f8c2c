import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec import attention
from medusa_spec.attention import TreePass, Visibility, tree_attention, visibility
from medusa_spec.tree import TreeShape, chain, shape_of

BUSH = shape_of((-1, 0, 1, 0, 3, 2, 3, 5, 7))
PARENTS = st.integers(0, 9).flatmap(lambda n: st.tuples(st.just(-1), *(st.integers(0, i) for i in range(n))))
HQ, HKV, D, DV = 6, 2, 8, 4


@dataclass
class Prefixes:
    """What attention asks of a cache: a length per row, a window and a base per layer."""

    lengths: list[int]
    windows: tuple[int | None, ...] = (None,)
    bases: tuple[int, ...] = (0, 0)

    def window(self, layer: int) -> int | None:
        return self.windows[layer]

    def chunk(self, layer: int) -> int | None:
        return None

    def base(self, layer: int, row: int) -> int:
        return self.bases[row] if self.windows[layer] is not None else 0


def tree_pass(shape: TreeShape | tuple[TreeShape | None, ...], cache: Prefixes) -> TreePass:
    return TreePass(shape=shape, cache=cache, device=torch.device("cpu"))


def seen_by_position(shape: TreeShape, length: int, base: int, window: int | None) -> torch.Tensor:
    """[N, slots]: key by key, whether a node's position reaches it; ancestors alone of the tree."""
    mask = torch.zeros(shape.size, length - base + shape.size, dtype=torch.bool)
    for node, depth in enumerate(shape.depths):
        here = length + depth
        for slot in range(length - base):
            mask[node, slot] = window is None or here - window < base + slot <= here
        for other in shape.path_to(node):
            mask[node, length - base + other] = window is None or depth - shape.depths[other] < window
    return mask


def dense(seen: Visibility, nodes: int) -> torch.Tensor:
    """The whole mask [N, slots] that a `Visibility` abbreviates."""
    boundary = seen.common - seen.first
    return torch.cat(
        [
            torch.zeros(nodes, seen.first, dtype=torch.bool),
            seen.mask[:, :boundary],
            torch.ones(nodes, seen.end - seen.common, dtype=torch.bool),
            seen.mask[:, boundary:],
        ],
        dim=1,
    )


@given(PARENTS, st.integers(0, 20), st.integers(1, 7))
def test_a_node_sees_the_part_of_its_own_chunk_that_lies_before_it(
    parents: tuple[int, ...], length: int, chunk: int
) -> None:
    shape = shape_of(parents)
    expected = seen_by_position(shape, length, 0, None)
    places = [*range(length), *(length + depth for depth in shape.depths)]
    for node, depth in enumerate(shape.depths):
        expected[node] &= torch.tensor([place // chunk == (length + depth) // chunk for place in places])
    seen = visibility(shape, length=length, base=0, window=None, chunk=chunk)
    assert torch.equal(dense(seen, shape.size), expected)


@given(PARENTS, st.integers(0, 20), st.one_of(st.none(), st.integers(1, 12)), st.data())
def test_a_node_sees_what_its_position_reaches(
    parents: tuple[int, ...], length: int, window: int | None, data: st.DataObject
) -> None:
    # A sliding buffer may have forgotten whatever the first node's window does not reach.
    base = 0 if window is None else data.draw(st.integers(0, max(0, length - window + 1)))
    shape = shape_of(parents)
    seen = visibility(shape, length=length, base=base, window=window)
    assert 0 <= seen.first <= seen.common <= seen.end == length - base
    assert torch.equal(dense(seen, shape.size), seen_by_position(shape, length, base, window))


def test_the_common_part_is_all_that_every_node_sees() -> None:
    seen = visibility(chain(2), length=6, base=0, window=4)
    assert (seen.first, seen.common, seen.end) == (3, 5, 6)
    assert seen.mask.int().tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]


def by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: list[torch.Tensor],
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dense attention with repeated KV heads; keys behind the tree of a row are cut off."""
    rows = []
    queries = query.chunk(len(masks), dim=2)
    for row, mask in enumerate(masks):
        keys, values = (states[row].repeat_interleave(HQ // HKV, 0)[:, : mask.shape[1]] for states in (key, value))
        scores = queries[row][0] @ keys.mT * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
        rows.append((torch.softmax(scores, -1)[..., : keys.shape[1]] @ values).transpose(0, 1))
    return torch.cat(rows)[None]


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["", "softcap"])
@pytest.mark.parametrize("split_from", [1, 1000], ids=["split", "whole"])
@pytest.mark.parametrize("window", [None, 3, 6], ids=["full", "window-3", "window-6"])
@pytest.mark.parametrize("lengths", [[13], [0], [17, 5]], ids=["one-row", "no-prefix", "ragged"])
def test_tree_attention_is_dense_masked_attention(
    lengths: list[int],
    window: int | None,
    split_from: int,
    softcap: float | None,
    sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "SPLIT_FROM", {"cpu": split_from})
    bases = tuple(0 if window is None else max(0, length - window - 2) for length in lengths)
    cache = Prefixes(lengths, (window,), bases)
    slots = max(length - base for length, base in zip(lengths, bases, strict=True)) + BUSH.size
    query = torch.randn(1, HQ, len(lengths) * BUSH.size, D, dtype=torch.float64)
    key, value = (torch.randn(len(lengths), HKV, slots, dim, dtype=torch.float64) for dim in (D, DV))
    s_aux = torch.randn(HQ, dtype=torch.float64) if sinks else None
    out, weights = tree_attention(
        SimpleNamespace(layer_idx=0),
        query,
        key,
        value,
        tree_pass=tree_pass(BUSH, cache),
        scaling=0.4,
        softcap=softcap,
        s_aux=s_aux,
        dropout=0.0,
    )
    masks = [seen_by_position(BUSH, *row, window) for row in zip(lengths, bases, strict=True)]
    expected = by_hand(query, key, value, masks, 0.4, softcap, s_aux)
    assert weights is None and out.shape == (1, len(lengths) * BUSH.size, HQ, DV)
    assert torch.allclose(out, expected, rtol=1e-10, atol=1e-12)


def random_states(nodes: int, slots: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(1, heads, tokens, D).to(dtype) for heads, tokens in ((HQ, nodes), (HKV, slots), (HKV, slots))]


def test_scores_are_scaled_by_the_head_size_unless_told() -> None:
    states = random_states(3, 8)
    module, run = SimpleNamespace(layer_idx=0), tree_pass(chain(2), Prefixes([5]))
    told = tree_attention(module, *states, tree_pass=run, scaling=D**-0.5)[0]
    assert torch.equal(tree_attention(module, *states, tree_pass=run)[0], told)


@pytest.mark.parametrize("split_from", [1, 1000], ids=["split", "whole"])
def test_bfloat16_is_rounded_once(split_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT_FROM", {"cpu": split_from})
    query, key, value = random_states(BUSH.size, 40 + BUSH.size, torch.bfloat16)
    run = tree_pass(BUSH, Prefixes([40]))
    out, _ = tree_attention(SimpleNamespace(layer_idx=0), query, key, value, tree_pass=run)
    expected = by_hand(
        query.double(), key.double(), value.double(), [seen_by_position(BUSH, 40, 0, None)], scale=D**-0.5
    )
    assert out.dtype == torch.bfloat16
    # Half a unit in the last place of the output, and as much again for bfloat16 weights inside the fused kernel.
    assert torch.allclose(out.double(), expected, rtol=2**-7, atol=2**-8)


def test_a_row_does_not_depend_on_the_batch() -> None:
    """Rows with trees of their own, one of them without any, stand side by side in one pass."""
    trees, lengths = (BUSH, None, chain(2), BUSH), [17, 9, 30, 5]
    nodes = [0 if tree is None else tree.size for tree in trees]
    query = torch.cat([random_states(count, 1)[0] for count in nodes], dim=2)
    key, value = (torch.cat(states) for states in zip(*(random_states(1, 40)[1:] for _ in trees), strict=True))
    module, run = SimpleNamespace(layer_idx=0), tree_pass(trees, Prefixes(lengths))
    together, _ = tree_attention(module, query, key, value, tree_pass=run)
    assert [part.stop - part.start for part in run.parts.values()] == [count for count in nodes if count]
    for row, part in run.parts.items():
        states = query[:, :, part], key[row, None], value[row, None]
        alone, _ = tree_attention(module, *states, tree_pass=tree_pass(trees[row], Prefixes([lengths[row]])))
        assert torch.equal(together[:, part], alone)


def test_positions_are_prefix_length_and_depth() -> None:
    run = tree_pass((BUSH, None, chain(1)), Prefixes([17, 3, 5]))
    assert run.positions.tolist() == [[17 + depth for depth in BUSH.depths] + [5, 6]]


def test_the_mask_handed_to_the_model_has_four_dimensions_and_hides_nothing() -> None:
    mask = tree_pass(BUSH, Prefixes([5])).no_mask
    assert mask.ndim == 4 and not mask.any()


def test_layers_of_one_kind_share_what_they_see_and_its_mask() -> None:
    run = tree_pass(BUSH, Prefixes([12], (None, 4, 4, None), (3,)))
    full, sliding = run.visible(0, 0), run.visible(1, 0)
    assert run.visible(3, 0) is full and run.visible(2, 0) is sliding and full is not sliding
    like = torch.zeros(1)
    bias = run.bias(full, whole=True, groups=2, like=like)
    assert run.bias(full, whole=True, groups=2, like=like) is bias
    assert run.bias(sliding, whole=True, groups=2, like=like).shape[-1] != bias.shape[-1]


def test_the_pass_follows_a_sharded_model_to_another_device() -> None:
    run = tree_pass(BUSH, Prefixes([5]))
    assert run.to(torch.device("cpu")) is run
    moved = run.to(torch.device("meta"))
    assert (moved.shape, moved.cache, moved.device.type) == (run.shape, run.cache, "meta")


def test_a_hook_that_moves_nothing_moves_nothing() -> None:
    tree_pass = TreePass(shape=chain(2), cache=Prefixes([5]), device=torch.device("cpu"))
    assert tree_pass.to(None) is tree_pass.to(torch.device("cpu")) is tree_pass.to("cpu") is tree_pass
    assert tree_pass.to(torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize("window", [None, 4])
def test_visibility_is_worked_out_on_the_host_whatever_the_default_device_is(window: int | None) -> None:
    expected = visibility(BUSH, length=9, base=0, window=window)
    with torch.device("meta"):
        seen = visibility(BUSH, length=9, base=0, window=window)
    assert (seen.first, seen.common, seen.end) == (expected.first, expected.common, expected.end)
    assert torch.equal(seen.mask, expected.mask)
