"""Texts decoded side by side."""

from collections import deque

import pytest
import torch

from medusa_spec.backbone import Backbone
from medusa_spec.batch import Keep, Sampling, Text, decode_batch
from medusa_spec.native.build import library
from medusa_spec.prepare import prepare
from medusa_spec.prepared.packed_linear import available

NEW = 12


@pytest.fixture(params=["llama", "gemma2", "gpt2"])
def backbone(request, make_model):
    """Full and sliding attention, and learnt positions."""
    return Backbone(make_model(request.param))


def texts_of(prompt, lengths=(7, 1, 70, 30, 3, 60), **settings):
    return [
        Text(key=n, prompt=prompt(length)[0].tolist(), new_tokens=NEW, seed=n, **settings)
        for n, length in enumerate(lengths)
    ]


def plain(backbone, text, eos=None):
    ids = torch.tensor([text.prompt])
    out = backbone.model.generate(
        ids, max_new_tokens=text.new_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0
    )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("batch", [1, 2, 4, 9])
def test_every_text_is_the_targets_own_greedy_one(backbone, prompt, batch):
    texts = texts_of(prompt)
    found = list(decode_batch(backbone, texts, batch=batch, eos_ids=frozenset()))
    assert sorted(text.key for text in found) == list(range(len(texts)))
    for text in texts:
        assert text.tokens == plain(backbone, text) and not text.ended


def test_texts_end_where_they_should_and_make_room_for_others(backbone, prompt):
    """At an EOS, where `stop` says so, or at their length; a text that is added meanwhile is decoded too."""
    texts = texts_of(prompt)
    eos = plain(backbone, texts[0])[4]
    late = Text(key="late", prompt=texts[2].prompt, new_tokens=3)
    waiting, found = deque(texts), []
    for text in decode_batch(
        backbone, waiting, batch=3, eos_ids=frozenset({eos}), stop=lambda tokens: len(tokens) == 9
    ):
        if not found:
            waiting.append(late)
        found.append(text)
    assert len(found) == len(texts) + 1 and late in found
    for text in found:
        expected = plain(backbone, text)
        end = expected.index(eos) + 1 if eos in expected else None
        stopped = text is not late and (end is None or end > 9)
        assert text.tokens == expected[: 9 if stopped else end]
        assert (text.ended, text.stopped) == (not stopped and end is not None, stopped)


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.8}], ids=str)
def test_draws_do_not_depend_on_the_texts_beside_them(backbone, prompt, settings):
    sampling = Sampling(temperature=1.3, **settings)
    alone, together = texts_of(prompt), texts_of(prompt)
    for text in alone:
        list(decode_batch(backbone, [text], batch=1, eos_ids=frozenset(), sampling=sampling))
    list(decode_batch(backbone, together, batch=4, eos_ids=frozenset(), sampling=sampling))
    assert [text.tokens for text in alone] == [text.tokens for text in together]


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}, {"top_p": 0.7}], ids=str)
def test_draws_follow_the_targets_distribution(make_model, settings):
    """Chi-square of first tokens against the processed distribution."""
    backbone = Backbone(make_model("llama"))
    texts = [Text(key=n, prompt=[5, 9, 2], new_tokens=1, seed=n) for n in range(900)]
    sampling = Sampling(temperature=1.5, **settings)
    list(decode_batch(backbone, texts, batch=50, eos_ids=frozenset(), sampling=sampling))
    logits = backbone.model(torch.tensor([[5, 9, 2]])).logits[0, -1].detach() / 1.5
    shares = logits.softmax(-1)
    order = shares.argsort(descending=True)
    kept = shares[order].cumsum(0) - shares[order] < settings.get("top_p", 1.0)
    kept &= torch.arange(len(order)) < settings.get("top_k", len(order))
    allowed = order[kept]
    expected = shares[allowed] / shares[allowed].sum() * len(texts)
    drawn = torch.bincount(torch.tensor([text.tokens[0] for text in texts]), minlength=len(shares))
    assert drawn[allowed].sum() == len(texts)
    big = expected >= 5
    observed, expected = drawn[allowed][big], expected[big]
    chi = float(((observed - expected) ** 2 / expected).sum())
    assert chi < len(expected) + 5 * (2 * len(expected)) ** 0.5


def test_a_text_needs_a_prompt_and_room():
    for wrong in ({"prompt": [], "new_tokens": 1}, {"prompt": [1], "new_tokens": 0}):
        with pytest.raises(ValueError, match="prompt must hold a token"):
            Text(key=0, **wrong)


KEPT = {"taps": (1,), "dtype": torch.float32}


@pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")
@pytest.mark.parametrize("keep", [None, Keep(**KEPT)], ids=["tokens", "states"])
@pytest.mark.parametrize(
    ("name", "alike", "spared"),
    [("llama", 40, 119), ("llama", 200, 599), ("mistral-window", 40, 119), ("mistral-window", 200, 599)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_prompts_begin_with_alike_is_read_once_in_a_row(
    make_model, prompt, monkeypatch, name, alike, spared, dtype, keep
):
    """The bits are those of texts that are read whole, windows or not."""
    monkeypatch.setattr("medusa_spec.prepare.WORTH_IT", 0.0)
    model = make_model(name, dtype=dtype).requires_grad_(False)
    prepare(model, model.get_output_embeddings())
    backbone = Backbone(model)
    assert backbone.reads_chains
    system = prompt(alike)[0].tolist()
    prompts = [[*system, 3, 4], [*system, 3], system, [*system, 5, 6, 7], [9, *system], [*system, 3, 4]]

    def texts():
        return [Text(key=n, prompt=list(ids), new_tokens=NEW) for n, ids in enumerate(prompts)]

    alone = [
        found for text in texts() for found in decode_batch(backbone, [text], batch=1, eos_ids=frozenset(), keep=keep)
    ]
    read, verify = [], backbone.verify

    def counted(ids, *arguments, **settings):
        read.append(ids.shape[1])
        return verify(ids, *arguments, **settings)

    monkeypatch.setattr(backbone, "verify", counted)
    together = sorted(
        decode_batch(backbone, texts(), batch=2, eos_ids=frozenset(), keep=keep), key=lambda text: text.key
    )
    assert [text.tokens for text in together] == [text.tokens for text in alone]
    for one, other in zip(together, alone, strict=True):
        assert not keep or torch.equal(torch.cat(one.states), torch.cat(other.states))
    whole = sum(map(len, prompts)) + len(prompts) * (NEW - 1)
    assert sum(read) == whole - spared  # of the third, fourth and sixth; a row holds one prompt
