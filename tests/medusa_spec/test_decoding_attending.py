"""The law for heads that attend: whatever trees they draft, in float64 the output is the target's, token for token."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from medusa_spec import MedusaModel
from medusa_spec.backbone import Backbone
from medusa_spec.drafters import Drafter, DraftSession, HeadsDrafter, ReadStates
from medusa_spec.finetune.store import make_targets
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.heads import DraftHeads, HeadsConfig, fitted_options, make_heads
from medusa_spec.native.build import library
from medusa_spec.prepare import prepare
from medusa_spec.prepared.packed_linear import available
from medusa_spec.testing import tiny
from medusa_spec.tree import Growth, TokenTree, TreeTemplate

NEW, V, K = 30, 40, 4
NAMES = ["qwen3", "mistral-window", "gemma2", "gemma3", "gpt2", "gpt-neox", "phi3", "mixtral", "gpt-oss"]
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("eagle", {"tied": False}),
    ("eagle3", {}),
    ("eagle3", {"tied": False, "taps": "1"}),
    ("fused", {"taps": "0,1"}),
]
families = pytest.mark.parametrize(("kind", "options"), FAMILIES, ids=str)
RULES = Growth(
    token_seconds=1.0, level_seconds=0.01, pass_seconds=((1, 1.0), (20, 1.2)), hit=0.6, temperature=1.5, beam=3, width=5
)
growths = pytest.mark.parametrize("growth", [None, RULES], ids=["template", "growth"])


def random_heads(backbone: Backbone, kind: str, **options: Any) -> DraftHeads:
    """Heads with random weights, in the target's dtype."""
    settings = fitted_options(kind, options, backbone.config)
    config = HeadsConfig(
        hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size, kind=kind, num_heads=K, options=settings
    )
    heads = make_heads(config, backbone.projection(), None, backbone.embedding()).to(backbone.dtype)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return heads


def random_template(seed: int, nodes: int = 12) -> TreeTemplate:
    """A chain of first guesses with a random tree around it."""
    dice, paths = random.Random(seed), [(0,) * depth for depth in range(K + 1)]
    while len(paths) <= nodes:
        path = (*dice.choice(paths), dice.randrange(6))
        if len(path) <= K and path not in paths:
            paths.append(path)
    return TreeTemplate(paths=tuple(paths[1:]))


def attending(target, heads: DraftHeads, *, seed: int = 0, growth: Growth | None = None) -> MedusaModel:
    model = MedusaModel(target, heads.requires_grad_(False), tree=random_template(seed), probe=False)
    assert isinstance(model.drafter, HeadsDrafter)
    model.drafter.growth = growth
    return model


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, V, (1, length), generator=torch.Generator().manual_seed(seed))


def plain(target, ids: torch.Tensor, seed: int | None = None, **kwargs: Any) -> torch.Tensor:
    if seed is not None:
        torch.manual_seed(seed)
    return target.generate(ids, do_sample=seed is not None, **{"max_new_tokens": NEW, **kwargs})


class ByHeart:
    """A target, a text of its own, and heads that have learnt the text by heart: any beginning of it is a prompt."""

    def __init__(self, target) -> None:
        self.target = target
        self.text = plain(target, prompt(6), max_new_tokens=NEW + 60)
        self.heads: dict[str, DraftHeads] = {}

    def model(self, kind: str, options: dict[str, Any], **kwargs: Any) -> MedusaModel:
        name = f"{kind} {options}"
        if name not in self.heads:
            self.heads[name] = self._learnt(kind, options)
        return attending(self.target, self.heads[name], **kwargs)

    def _learnt(self, kind: str, options: dict[str, Any]) -> DraftHeads:
        backbone = Backbone(self.target)
        heads = random_heads(backbone, kind, **options)
        states = backbone.states(self.text, taps=heads.taps)
        targets = make_targets(self.text[0].int(), torch.ones(self.text.shape[1]).bool(), K)[None]
        model = TrainedHeads(heads, depth_decay=1.0).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(80):
            loss = model(states.h, targets, layers=states.layers)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        backbone.detach()
        return heads


@pytest.fixture(scope="module")
def by_heart() -> Iterator[ByHeart]:
    """Tests may only wrap its target, not change it."""
    target = tiny("llama", vocab_size=V)
    target.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield ByHeart(target)


@pytest.mark.parametrize(("kind", "options"), [FAMILIES[0], FAMILIES[3]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_through_any_tree_and_growth_equals_plain_greedy(make_model, name, kind, options):
    target = make_model(name, vocab_size=V)
    backbone = Backbone(target)
    heads = random_heads(backbone, kind, **options)
    backbone.detach()
    for seed, (length, growth) in enumerate(((2, None), (23, RULES))):
        ids = prompt(length, seed)
        answer = plain(target, ids)
        model = attending(target, heads, seed=seed, growth=growth)
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
        stats = model.last_stats
        assert stats.drafted_passes > 0 and stats.new_tokens == sum(stats.spans) == NEW
        assert max(stats.pass_sizes) == 13 if growth is None else 1 < max(stats.pass_sizes) <= 20
        model.detach()


@growths
@families
def test_what_was_learnt_by_heart_is_accepted_and_nothing_else(by_heart, kind, options, growth):
    for seed, length in enumerate((1, 2, 7, 23)):
        ids = by_heart.text[:, :length]
        answer = plain(by_heart.target, ids)
        model = by_heart.model(kind, options, seed=seed, growth=growth)
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
        model.detach()
    assert torch.equal(answer, by_heart.text[:, : 23 + NEW])
    assert model.last_stats.passes < 0.5 * NEW and len(model.last_stats.accepted_by_depth) > 2


@growths
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.5}, {"top_p": 0.8, "top_k": 0}, {"repetition_penalty": 1.2}], ids=str
)
@families
def test_the_same_seed_gives_the_tokens_of_plain_sampling(by_heart, settings, kind, options, growth):
    ids = by_heart.text[:, :11]
    answer = plain(by_heart.target, ids, seed=3, **settings)
    state = torch.get_rng_state()
    model = by_heart.model(kind, options, growth=growth)
    torch.manual_seed(3)
    output = model.generate(ids, do_sample=True, max_new_tokens=NEW, **settings)
    model.detach()
    assert torch.equal(output, answer)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.last_stats.accepted > 0


class Shown(Drafter):
    """Notes what another drafter's sessions are shown, and when they are told to forget."""

    name = "shown"

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.reads = inner, inner.reads
        self.texts: list[tuple[list[int], list[ReadStates]]] = []

    def begin(self, prompt: Sequence[int]) -> DraftSession:
        return _ShownSession(self, self.inner.begin(prompt))


class _ShownSession(DraftSession):
    def __init__(self, drafter: Shown, inner: DraftSession) -> None:
        self.texts, self.inner = drafter.texts, inner
        self.texts.append(([], []))

    def read(self, ids: Sequence[int], states: ReadStates) -> None:
        self.texts[-1][0].extend(ids)
        self.texts[-1][1].append(states)
        self.inner.read(ids, states)

    def forget(self) -> None:
        self.texts.append(([], []))
        self.inner.forget()

    def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
        return self.inner.draft(root, h, limit)

    def observe(self, tokens: Sequence[int]) -> None:
        self.inner.observe(tokens)


def check_shown(model: MedusaModel, shown: Shown, output: list[int], *, start: int = 0) -> None:
    """The last text shown is the output from `start` on, up to the root of the last pass, with its states."""
    ids, states = shown.texts[-1]
    assert len(ids) + start < len(output) and ids == output[start : start + len(ids)]
    expected = model.backbone.states(torch.tensor([output[: start + len(ids)]]), taps=shown.reads or ())
    torch.testing.assert_close(torch.cat([part.h for part in states]), expected.h[0, start:])
    if shown.reads:
        torch.testing.assert_close(torch.cat([part.layers for part in states]), expected.layers[0, start:])
    else:
        assert all(part.layers is None for part in states)


def shown_by(model: MedusaModel) -> Shown:
    model.drafter = shown = Shown(model.drafter)
    return shown


@growths
@families
def test_the_heads_are_shown_the_text_once_with_the_targets_states(by_heart, kind, options, growth):
    ids = by_heart.text[:, :9]
    model = by_heart.model(kind, options, growth=growth)
    shown = shown_by(model)
    for settings in ({}, {"prefill_chunk_size": 4}, {"do_sample": True, "top_k": 5}):
        shown.texts.clear()
        output = model.generate(ids, **{"do_sample": False, "max_new_tokens": NEW, **settings})[0].tolist()
        assert len(shown.texts) == 1 and len(shown.texts[0][0]) > len(output) - 1 - K - 1
        check_shown(model, shown, output)
    model.detach()


@growths
@families
def test_left_padding_is_neither_read_nor_shown(by_heart, kind, options, growth):
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), by_heart.text[:, :9]], dim=1)
    mask = (torch.arange(14) >= 5).long()[None]
    answer = plain(by_heart.target, padded, attention_mask=mask)
    model = by_heart.model(kind, options, growth=growth)
    shown = shown_by(model)
    output = model.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    assert torch.equal(output, answer) and model.last_stats.accepted > 5
    check_shown(model, shown, output[0, 5:].tolist())
    model.detach()


@growths
@families
@pytest.mark.parametrize("whole", [True, False], ids=["whole text", "new tokens only"])
@pytest.mark.parametrize("said", [0, 4])
def test_behind_a_users_cache_the_heads_read_what_is_new(by_heart, kind, options, growth, whole, said):
    """With nothing said in between one token of the text is new: the one that was emitted last."""
    second = prompt(4, 2)[:, :said]

    def talk(generate, cache):
        one = generate(by_heart.text[:, :21], do_sample=False, max_new_tokens=10, cache=cache)
        text = torch.cat([one, second], dim=1)
        past = cache.get_seq_length()
        inputs = text if whole else text[:, past:]
        mask = torch.ones_like(text)
        two = generate(inputs, attention_mask=mask, do_sample=False, max_new_tokens=NEW, cache=cache)
        return two if whole else torch.cat([text[:, :past], two], dim=1), past

    answer, _ = talk(by_heart.target.generate, DynamicCache(config=by_heart.target.config))
    model = by_heart.model(kind, options, growth=growth)
    shown = shown_by(model)
    output, past = talk(model.generate, DynamicCache(config=by_heart.target.config))
    assert torch.equal(output, answer) and past == 30 and len(shown.texts) == 2
    check_shown(model, shown, output[0].tolist(), start=past)
    model.detach()


@growths
@families
def test_a_text_that_is_read_anew_is_shown_anew(make_model, kind, options, growth):
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    edge = {"original_max_position_embeddings": 24}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, **edge, **factors}
    target = make_model("phi3", vocab_size=V, rope_parameters=rope, max_position_embeddings=96, **edge)
    backbone = Backbone(target)
    heads = random_heads(backbone, kind, **options)
    backbone.detach()
    for length in (6, 24, 30):
        ids = prompt(length)
        answer = plain(target, ids)
        model = attending(target, heads, growth=growth)
        shown = shown_by(model)
        output = model.generate(ids, do_sample=False, max_new_tokens=NEW)
        assert torch.equal(output, answer)
        assert len(shown.texts) == (2 if length < 25 else 1)
        check_shown(model, shown, output[0].tolist())
        model.detach()


@growths
@families
def test_exactly_as_many_tokens_as_asked_and_none_behind_an_eos(by_heart, kind, options, growth):
    ids = by_heart.text[:, :6]
    cuts: list[dict[str, int]] = [{"max_new_tokens": new} for new in (1, 2, 3, 4, 5, 13)]
    cuts += [{"max_new_tokens": NEW, "eos_token_id": eos} for eos in by_heart.text[0, 6:30:2].tolist()]
    model, accepted = by_heart.model(kind, options, growth=growth), 0
    for cut in cuts:
        output = model.generate(ids, do_sample=False, **cut)
        accepted += model.last_stats.accepted
        assert torch.equal(output, plain(by_heart.target, ids, **cut))
    model.detach()
    assert accepted > len(cuts)


@growths
@families
def test_draft_nodes_bounds_every_pass(by_heart, kind, options, growth):
    ids = by_heart.text[:, :8]
    model = by_heart.model(kind, options, growth=growth)
    shown = shown_by(model)
    for nodes in (0, 1, 3, 50):
        shown.texts.clear()
        output = model.generate(ids, do_sample=False, max_new_tokens=NEW, draft_nodes=nodes)
        assert torch.equal(output, by_heart.text[:, : 8 + NEW])
        assert max(model.last_stats.pass_sizes) <= nodes + 1
        assert (model.last_stats.drafted_passes > 0) == (nodes > 0)
        assert bool(shown.texts[0][0]) == (nodes > 0)  # plain decoding pays for no states
    model.detach()


@families
def test_learnt_positions_end_with_their_table(make_model, kind, options):
    target, ids = make_model("gpt2", vocab_size=V, max_position_embeddings=32), prompt(5)
    backbone = Backbone(target)
    heads = random_heads(backbone, kind, **options)
    backbone.detach()
    model = attending(target, heads, growth=RULES)
    output = model.generate(ids, do_sample=False, max_new_tokens=27)
    assert torch.equal(output, plain(target, ids, max_new_tokens=27))


@pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")
@growths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@families
def test_through_a_prepared_target_the_bits_are_those_of_its_plain_decoding(
    make_model, monkeypatch, kind, options, dtype, growth
):
    monkeypatch.setattr("medusa_spec.prepare.WORTH_IT", 0.0)
    target = make_model("llama", dtype=dtype, head_dim=16, intermediate_size=64, vocab_size=V).requires_grad_(False)
    backbone = Backbone(target)
    heads = random_heads(backbone, kind, **options)
    backbone.detach()
    model = attending(target, heads, growth=growth)
    prepare(target, target.get_output_embeddings())
    assert model.backbone.reads_chains
    for length in (1, 60):
        ids = prompt(length, length)
        alone = model.generate(ids, do_sample=False, max_new_tokens=NEW, draft_nodes=0)
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), alone)
        assert model.last_stats.drafted_passes > 0
