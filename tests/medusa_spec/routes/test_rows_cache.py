"""States come and go by row, and a user's cache is refused rather than ignored."""

import pytest
import torch
from transformers import DynamicCache

from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone
from medusa_spec.cost import filled_cache
from medusa_spec.errors import UnsupportedError
from medusa_spec.routes import LevelsRoute
from medusa_spec.tree import chain


@pytest.fixture
def backbone(make_other) -> Backbone:
    backbone = Backbone(make_other("mamba"))
    backbone.take(LevelsRoute)
    return backbone


def read(backbone, cache, ids) -> torch.Tensor:
    tree_pass = TreePass(shape=chain(len(ids) - 1), cache=cache, device=backbone.device)
    logits = backbone.verify(torch.tensor([ids]), tree_pass, last_only=True).logits
    cache.keep(0, range(len(ids)))
    return logits[0, 0]


def test_a_row_is_emptied_and_read_as_a_cache_of_its_own(backbone) -> None:
    cache = backbone.new_cache(3)
    assert cache.lengths == [0, 0, 0]
    with cache.only(1) as own:
        first = read(backbone, own, [5, 6, 7])
    assert cache.lengths == [0, 3, 0] and cache.get_seq_length() == 3
    cache.select([1, 0])
    assert cache.lengths == [3, 0]
    cache.empty(0)
    with cache.only(0) as own:
        assert torch.equal(read(backbone, own, [5, 6, 7]), first)


def test_texts_that_were_read_apart_are_joined(backbone) -> None:
    caches = [backbone.new_cache(), backbone.new_cache()]
    for cache, ids in zip(caches, ([5, 6], [7, 8, 9]), strict=True):
        backbone.read(torch.tensor([ids]), cache, last_only=True)
    whole = type(caches[0]).joined([caches[0], caches[1], caches[0]], backbone.config, reserve=8)
    assert whole.lengths == [2, 3, 2]
    with whole.only(2) as own:
        read(backbone, own, [4])
    assert whole.lengths == [2, 3, 3] and caches[0].lengths == [2], "each text has a copy"


def test_a_cache_behind_padding_is_not_given(backbone) -> None:
    cache = backbone.new_cache()
    backbone.read(torch.tensor([[5, 6]]), cache, last_only=True)
    assert cache.export(backbone.config, padding=2) is None
    with pytest.raises(UnsupportedError, match="unpadded"):
        cache.export(backbone.config, into=DynamicCache(), padding=2)


def test_a_full_cache_of_the_user_is_refused_and_an_empty_one_filled(backbone) -> None:
    full = DynamicCache()
    full.update(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), 0)
    with pytest.raises(UnsupportedError, match=r"route 'levels as batch rows'.*no cache"):
        backbone.new_cache().load(full)
    cache, empty = backbone.new_cache(), DynamicCache()
    cache.load(empty)
    backbone.read(torch.tensor([[5, 6, 7]]), cache, last_only=True)
    assert cache.export(backbone.config, into=empty) is empty
    assert type(empty.layers[0]) is type(cache.states[0].kwargs[backbone.cache_argument].layers[0])
    assert empty.layers[0] is not cache.states[0].kwargs[backbone.cache_argument].layers[0]


@pytest.mark.parametrize(("name", "grows"), [("mamba", False), ("bloom", True)])
def test_bytes_are_those_that_states_have(make_other, name, grows) -> None:
    backbone = Backbone(make_other(name))
    backbone.take(LevelsRoute)
    cache = filled_cache(backbone, 4)
    constant, growing = cache.bytes_held()
    assert constant + 4 * growing == cache.states[0].bytes_held
    assert growing == (2 * 2 * 32 * 8 if grows else 0) and (constant == 0) == grows
    assert cache.lengths == [4]


def test_nothing_is_kept_of_a_tree_that_was_not_checked(backbone) -> None:
    with pytest.raises(AssertionError, match="before a tree pass"):
        backbone.new_cache().keep(0, (0,))
