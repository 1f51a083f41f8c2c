import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache, LlamaConfig, StaticCache

from medusa_spec import slab as slab_file
from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone
from medusa_spec.cache import LONGEST_RESERVE, SlabCache
from medusa_spec.errors import UnsupportedError
from medusa_spec.slab import ALIGNMENT, Slab
from medusa_spec.testing import tiny
from medusa_spec.tree import TreeShape, chain, shape_of

HEADS, DIM = 2, 4
BUSH = shape_of((-1, 0, 1, 0, 3, 2, 3))


def config(kinds: list[str], window: int = 6) -> LlamaConfig:
    """A text config with layers of these kinds."""
    return LlamaConfig(num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=window)


class Written:
    """A slab cache and, beside it, everything that was ever kept: per row and layer the keys [HEADS, T, DIM].

    Values are the keys' negatives.
    """

    def __init__(self, kinds: list[str], *, window: int = 6, prompt: int = 5, batch: int = 1, reserve: int = 0) -> None:
        self.batch, self.layers = batch, len(kinds)
        self.cache = SlabCache(config(kinds, window), batch)
        states = torch.randn(self.layers, batch, HEADS, prompt, DIM)
        for layer, keys in zip(self.cache.layers, states, strict=True):
            layer.update(keys, -keys)
        self.cache.seal(reserve)
        self.kept = [[states[layer, row] for layer in range(self.layers)] for row in range(batch)]

    def step(self, nodes: int | list[int], paths: list[list[int]]) -> None:
        """One tree pass of as many nodes in each row, which keeps a path of them; no path from no nodes."""
        self.cache.make_room(nodes)
        counts = [nodes] * self.batch if isinstance(nodes, int) else nodes
        states = torch.randn(self.layers, 1, HEADS, sum(counts), DIM)
        for layer, keys in zip(self.cache.layers, states, strict=True):
            layer.update(keys, -keys)
        for row, path in enumerate(paths):
            self.cache.keep(row, path)
            places = [sum(counts[:row]) + node for node in path]
            for layer in range(self.layers):
                self.kept[row][layer] = torch.cat([self.kept[row][layer], states[layer, 0][:, places]], dim=1)

    def check(self) -> None:
        """Every layer holds what was kept, from its base on, and its base is no later than its window's beginning."""
        for row in range(self.batch):
            length = self.kept[row][0].shape[1]
            assert self.cache.lengths[row] == length
            for index, layer in enumerate(self.cache.layers):
                base = self.cache.base(index, row)
                assert base <= (0 if layer.window is None else max(0, length - layer.window + 1))
                expected = self.kept[row][index][:, base:]
                assert torch.equal(layer.keys[row, :, : length - base], expected)
                assert torch.equal(layer.values[row, :, : length - base], -expected)


def random_path(rng: random.Random, nodes: int) -> list[int]:
    return [0, *sorted(rng.sample(range(1, nodes), rng.randrange(nodes)))] if nodes else []


@pytest.mark.parametrize("window", [4, 5, 8])
@pytest.mark.parametrize("batch", [1, 3], ids=["one-row", "ragged"])
def test_layers_hold_what_was_kept_however_often_they_slide_and_grow(
    window: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_file, "ALIGNMENT", 4)
    slid, grown = [], []
    slide, grow = Slab._slide, Slab._grow
    monkeypatch.setattr(Slab, "_slide", lambda slab, lengths: (slid.append(1), slide(slab, lengths)))
    monkeypatch.setattr(Slab, "_grow", lambda slab, slots: (grown.append(slots), grow(slab, slots)))
    rng = random.Random(window)
    written = Written(["full_attention", "sliding_attention", "full_attention"], window=window, batch=batch)
    for _ in range(100):
        nodes = [rng.randrange(1, 8) if batch == 1 or rng.random() < 0.8 else 0 for _ in range(batch)]
        written.step(nodes, [random_path(rng, count) for count in nodes])
        written.check()
    assert len(slid) > 8 and len(grown) >= 3
    full, sliding = written.cache.layers[0].slab, written.cache.layers[1].slab
    # A sliding layer stays small: twice its window and tree per row, while a full one grows geometrically.
    spread = max(written.cache.lengths) - min(written.cache.lengths)
    assert sliding.capacity <= 2 * (window + 7) + 4 + 2 * spread
    assert max(written.cache.lengths) <= full.capacity <= 4 * max(written.cache.lengths)


@pytest.mark.parametrize("prompt", [1, 3, 5, 6, 20])
def test_prompts_shorter_and_longer_than_the_window_are_taken_over(prompt: int) -> None:
    written = Written(["sliding_attention", "full_attention"], window=6, prompt=prompt, reserve=9)
    written.check()
    written.step(7, [[0, 3, 6]])
    written.check()


def test_a_kept_chain_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[tuple[list[int], int]] = []
    move = Slab.move

    def spy(slab: Slab, row: int, sources: torch.Tensor, first: int) -> None:
        moves.append((sources.tolist(), first))
        move(slab, row, sources, first)

    monkeypatch.setattr(Slab, "move", spy)
    written = Written(["full_attention"], prompt=5)
    written.step(6, [[0, 1, 2, 3]])
    assert moves == []
    written.step(6, [[0, 1, 4, 5]])  # behind 9: nodes 0 and 1 lie right, 4 and 5 move up to 11
    assert moves == [([13, 14], 11)]
    written.check()


def test_rows_come_and_go_and_leave_the_others_alone() -> None:
    """A row is emptied and filled by itself, in the same memory."""
    written = Written(["full_attention", "sliding_attention"], batch=3, reserve=40)
    for _ in range(4):
        written.step(3, [[0, 2], [0], [0, 1]])
    cache = written.cache
    cache.empty(1)
    written.kept[1] = [keys[:, :0] for keys in written.kept[1]]
    with cache.only(1) as own:
        own.make_room(4)
        for index, layer in enumerate(own.layers):
            keys = torch.randn(1, HEADS, 4, DIM)
            layer.update(keys, -keys)
            written.kept[1][index] = keys[0]
        own.keep(0, range(4))
    written.check()
    for _ in range(3):
        written.step([3, 0, 2], [[0, 2], [], [0, 1]])
    written.check()


def test_a_row_goes_on_from_what_another_text_begins_with() -> None:
    written = Written(["full_attention"], batch=2, reserve=40)
    written.step(4, [[0, 1, 2], [0, 1]])
    cache, held = written.cache, written.cache.lengths[0]
    assert cache.cut(0, held - 2) == held - 2 == cache.lengths[0]
    written.kept[0] = [keys[:, : held - 2] for keys in written.kept[0]]
    written.check()
    written.step(3, [[0, 2], [0]])
    written.check()
    with pytest.raises(ValueError, match=r"length must be in 0\.\."):
        cache.cut(1, cache.lengths[1] + 1)


def test_a_row_whose_window_has_moved_is_emptied() -> None:
    written = Written(["full_attention", "sliding_attention"], batch=1, reserve=4)
    for _ in range(60):
        written.step(3, [[0, 1, 2]])
    assert written.cache.cut(0, 5) == 0 and written.cache.lengths == [0]


def test_caches_of_one_row_are_joined_to_one_of_several() -> None:
    """Of any lengths, some of them past their window; the same one may fill several rows."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    parts = [Written(kinds, prompt=prompt) for prompt in (5, 40, 1)]
    for written in parts:
        for _ in range(3):
            written.step(4, [[0, 2, 3]])
    order = [1, 0, 2, 1]
    joined = Written(kinds, batch=4)
    joined.cache = SlabCache.joined([parts[place].cache for place in order], config(kinds), reserve=20)
    joined.kept = [list(parts[place].kept[0]) for place in order]
    joined.check()
    for _ in range(12):
        joined.step([3, 0, 5, 1], [[0, 2], [], [0, 1, 4], [0]])
        joined.check()
    parts[1].check()


def test_a_row_by_itself_may_not_outgrow_the_others() -> None:
    written = Written(["full_attention"], batch=2)
    with pytest.raises(AssertionError, match="it grew"), written.cache.only(0) as own:
        own.make_room(500)


def test_layers_of_one_kind_lie_in_one_slab() -> None:
    written = Written(["full_attention", "sliding_attention", "full_attention"])
    slabs = [layer.slab for layer in written.cache.layers]
    assert slabs[0] is slabs[2] and slabs[0] is not slabs[1]
    assert written.cache.layers[0].keys.untyped_storage().data_ptr() == slabs[0].keys.untyped_storage().data_ptr()


def test_room_that_was_reserved_is_not_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slab, "_grow", lambda slab, slots: pytest.fail("grown"))
    written = Written(["full_attention"], prompt=5, reserve=200)
    for _ in range(50):
        written.step(7, [[0, 1, 2, 3]])


def test_layers_in_chunks_keep_everything_and_a_slab_of_their_own() -> None:
    made = config(["full_attention"] * 3)
    made.layer_types, made.attention_chunk_size = ["chunked_attention", "full_attention", "chunked_attention"], 4
    cache = SlabCache(made)
    for layer in range(3):
        cache.update(torch.ones(1, 2, 9, 4), torch.ones(1, 2, 9, 4), layer)
    cache.seal(8)
    assert cache.kind(0) == cache.kind(2) != cache.kind(1)
    assert [cache.chunk(layer) for layer in range(3)] == [4, None, 4]
    assert cache.states()[0][0].shape[2] == 9


def test_the_end_of_a_text_in_chunks_is_not_taken_over() -> None:
    made = config(["full_attention"])
    made.layer_types, made.attention_chunk_size = ["chunked_attention"], 4
    full = DynamicCache(config=made)
    full.update(torch.ones(1, 2, 9, 4), torch.ones(1, 2, 9, 4), 0)
    with pytest.raises(UnsupportedError, match="chunks of 4.*no cache"):
        SlabCache(made).load(full)


def test_layers_that_share_keys_read_those_of_the_last_layer_of_their_kind() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    made = AutoConfig.for_model("gemma4_text", num_hidden_layers=6, layer_types=kinds, num_kv_shared_layers=2)
    cache = SlabCache(made)
    assert len(cache.layers) == 4 and cache.window(4) == cache.window(2) == made.sliding_window
    assert cache.window(5) is None


# --- against a model --------------------------------------------------------------------------------------------------


def ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(seed))


def tree_pass(backbone: Backbone, cache: SlabCache, tokens: torch.Tensor, shape: TreeShape) -> torch.Tensor:
    """Logits [N, V] of a verify pass."""
    cache.make_room(shape.size)
    run = TreePass(shape=shape, cache=cache, device=tokens.device)
    return backbone.verify(tokens, run).logits[0]


MODELS = ["llama", "mistral", "gemma3_text", "gpt2"]
PATH = [0, 3, 6]


@pytest.mark.parametrize("prompt", [3, 30])
@pytest.mark.parametrize("name", MODELS)
def test_keeping_a_path_equals_reading_it_from_the_start(name: str, prompt: int) -> None:
    backbone = Backbone(tiny(name))
    text, tokens = ids(prompt), ids(BUSH.size, seed=1)
    cache = SlabCache(backbone.config)
    backbone.forward(text, cache=cache)
    cache.seal(0)
    for _ in range(12):  # past the window of 8 several times
        logits = tree_pass(backbone, cache, tokens, BUSH)
        cache.keep(0, PATH)
        text = torch.cat([text, tokens[:, PATH]], dim=1)
        expected = backbone.forward(text).logits[0]
        assert torch.allclose(logits[PATH], expected[-len(PATH) :], atol=1e-9)


@pytest.mark.parametrize("cut", [1, 4, 20])
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_read_in_pieces_equals_one_read_whole(name: str, cut: int) -> None:
    backbone = Backbone(tiny(name))
    text = ids(25)
    cache = SlabCache(backbone.config)
    pieces = [backbone.forward(piece, cache=cache).logits for piece in (text[:, :cut], text[:, cut:])]
    assert torch.allclose(torch.cat(pieces, 1), backbone.forward(text).logits, atol=1e-9)


def read(backbone: Backbone, text: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits [T, V] of a plain pass that goes on from a transformers cache."""
    return backbone.forward(text, cache=cache).logits[0]


@pytest.mark.parametrize("bare", [False, True], ids=["configured", "bare"])
@pytest.mark.parametrize("read_before", [0, 4, 30])
@pytest.mark.parametrize("steps", [1, 12])
@pytest.mark.parametrize("name", MODELS)
def test_a_users_cache_is_gone_on_from_and_brought_up_to_date(
    name: str, steps: int, read_before: int, bare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_file, "ALIGNMENT", 4)  # twelve steps slide, so sliding layers forget their beginning
    backbone = Backbone(tiny(name))
    text, tokens = ids(40)[:, : read_before + 5], ids(BUSH.size, seed=1)
    users = DynamicCache() if bare else DynamicCache(config=backbone.config)
    if read_before:
        read(backbone, text[:, :read_before], users)
    cache = SlabCache(backbone.config)
    cache.load(users)
    assert cache.get_seq_length() == read_before
    backbone.forward(text[:, read_before:], cache=cache)
    cache.seal(0)
    for _ in range(steps):
        tree_pass(backbone, cache, tokens, BUSH)
        cache.keep(0, PATH)
        text = torch.cat([text, tokens[:, PATH]], dim=1)
    assert cache.export(backbone.config, into=users) is users
    follow = ids(3, seed=2)
    expected = backbone.forward(torch.cat([text, follow], dim=1)).logits[0, -3:]
    fresh = cache.export(backbone.config)
    for exported in (users, fresh):
        assert exported.get_seq_length() == text.shape[1]
        assert torch.allclose(read(backbone, follow, exported), expected, atol=1e-9)


def test_what_was_exported_is_the_users_own() -> None:
    backbone = Backbone(tiny("llama"))
    cache = SlabCache(backbone.config)
    backbone.forward(ids(5), cache=cache)
    cache.seal(0)
    exported = cache.export(backbone.config)
    before = exported.layers[0].keys.clone()
    tree_pass(backbone, cache, ids(3), chain(2))
    cache.layers[0].keys.zero_()
    assert torch.equal(exported.layers[0].keys, before)


def test_other_caches_are_refused_by_name() -> None:
    made = config(["full_attention"])
    with pytest.raises(UnsupportedError, match="got StaticCache"):
        SlabCache(made).load(StaticCache(config=made, max_cache_len=8))


def test_a_reserve_that_nobody_needs_costs_no_memory() -> None:
    cache = SlabCache(tiny("llama").config)
    states = torch.randn(1, 2, 5, 8)
    for layer in cache.layers:
        layer.update(states, states)
    cache.seal(10**12)
    assert cache.layers[0].keys.shape[2] <= LONGEST_RESERVE + 5 + 2 * ALIGNMENT
