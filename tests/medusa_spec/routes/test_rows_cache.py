"""States come and go by row, and a user's cache is refused rather than ignored."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

from medusa_spec import MedusaModel
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
    cache.empty(1)
    assert cache.lengths == [0, 0, 0]
    with cache.only(2) as own:
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


@pytest.mark.parametrize("name", ["bloom", "qwen3_next"])
def test_a_conversation_goes_on_in_the_users_cache(make_other, name) -> None:
    model = MedusaModel(make_other(name), drafter="ngram")
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    texts = [torch.arange(20, 33)[None]] * 2
    for turn in range(3):
        asked = {"max_new_tokens": 7, "do_sample": False}
        texts = [
            generate(text, cache=cache, **asked)
            for generate, text, cache in zip((model.generate, model.target.generate), texts, caches, strict=True)
        ]
        assert torch.equal(*texts)
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == texts[0].shape[1] - 1
        texts = [torch.cat([text, torch.tensor([[40 + turn, 50]])], dim=1) for text in texts]


def test_caches_of_another_form_are_refused(backbone, make_other) -> None:
    with pytest.raises(UnsupportedError, match="cache must be a DynamicCache, got StaticCache"):
        backbone.new_cache().load(StaticCache(config=LlamaConfig(num_hidden_layers=1), max_cache_len=8))
    with pytest.raises(UnsupportedError, match="keeps its state elsewhere"):
        LevelsRoute(Backbone(make_other("rwkv"))).new_cache().load(DynamicCache())


def test_a_full_cache_that_does_not_say_how_full_is_refused_and_an_empty_one_filled(backbone) -> None:
    full = DynamicCache(config=backbone.config)
    backbone.model(torch.tensor([[5, 6, 7]]), cache=full)
    with pytest.raises(UnsupportedError, match="does not say how many tokens"):
        backbone.new_cache().load(full)
    cache, empty = backbone.new_cache(), DynamicCache(config=backbone.config)
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
