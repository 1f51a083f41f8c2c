import pytest
import torch

from medusa_spec.acceptance import walk
from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.drafters import FixedDraft
from medusa_spec.static_cache import StaticCache
from medusa_spec.static_decoding import plain_draft
from medusa_spec.static_step import StaticStep
from medusa_spec.tree import TokenTree, shape_of

SHAPE = shape_of((-1, 0, 1, 0, 3, 2, 3))


def read(backbone: Backbone, ids: torch.Tensor):
    """A sealed cache, the token after it, and the hidden state from which that was chosen."""
    cache = SlabCache(backbone.config)
    out = backbone.forward(ids, last_only=True, cache=cache)
    cache.seal(64)
    return cache, int(out.logits[0, -1].argmax()), out.h[0, -1]


def test_a_step_does_what_the_verbs_do_one_by_one(any_model, prompt):
    ids = prompt(11)
    answer = any_model.generate(ids, do_sample=False, max_new_tokens=40)[0, 11:].tolist()
    backbone = Backbone(any_model)
    cache, root, h = read(backbone, ids)
    buffers = StaticCache(cache, 64)
    buffers.load(cache.states(), 11)
    guesses = torch.zeros(SHAPE.size - 1, dtype=torch.long)
    step = StaticStep(backbone, FixedDraft(shape=SHAPE, guess=lambda h: guesses, key="given"), buffers, h)
    step.begin(torch.tensor([root]), h)
    said, depths = 1, set()
    for right in (0, 2, 0, 1, 2):  # so many of the chain 1, 2, 5 are the target's own
        truth = answer[said : said + right]
        others = [token for token in range(2, 128) if token not in truth]
        guesses.copy_(torch.tensor(others[said : said + SHAPE.size - 1]))
        for node, token in zip((1, 2, 5), truth, strict=False):
            guesses[node - 1] = token

        tokens = (root, *guesses.tolist())
        cache.make_room(SHAPE.size)
        out = backbone.verify(torch.tensor([tokens]), TreePass(shape=SHAPE, cache=cache, device=backbone.device))
        accepted = walk(TokenTree(shape=SHAPE, tokens=tokens), out.logits[0].argmax(-1).tolist().__getitem__)
        cache.keep(0, accepted.path)

        step()
        count = len(accepted.path)
        assert step.emitted.tolist() == [accepted.path[-1], *accepted.tokens, *[-1] * (4 - count)]
        assert buffers.length.tolist() == cache.lengths
        assert torch.allclose(step.h, out.h[0, accepted.path[-1]], rtol=1e-9, atol=1e-9)
        root = accepted.tokens[-1]
        assert step.root.tolist() == [root]
        assert list(accepted.tokens) == answer[said : said + count]
        said += count
        depths.add(count)
    assert len(depths) > 1


def test_without_a_draft_a_step_is_plain_decoding(any_model, prompt):
    answer = any_model.generate(prompt(9), do_sample=False, max_new_tokens=12)[0, 9:].tolist()
    backbone = Backbone(any_model)
    cache, root, h = read(backbone, prompt(9))
    buffers = StaticCache(cache, 32)
    buffers.load(cache.states(), 9)
    step = StaticStep(backbone, plain_draft(), buffers, h)
    step.begin(torch.tensor([root]), h)
    emitted = [root]
    for _ in range(11):
        step()
        assert step.emitted[0] == 0
        emitted.append(int(step.emitted[1]))
    assert emitted == answer


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_a_step_changes_its_own_buffers_in_place(make_model, prompt, name):
    backbone = Backbone(make_model(name))
    cache, root, h = read(backbone, prompt(9))
    buffers = StaticCache(cache, 32)
    buffers.load(cache.states(), 9)
    step = StaticStep(backbone, plain_draft(), buffers, h)
    step.begin(torch.tensor([root]), h)
    own = (step.root, step.h, step.emitted, buffers.length, *(layer.keys for layer in buffers.layers))
    places = [tensor.data_ptr() for tensor in own]
    step()
    now = (step.root, step.h, step.emitted, buffers.length, *(layer.keys for layer in buffers.layers))
    assert [tensor.data_ptr() for tensor in now] == places
