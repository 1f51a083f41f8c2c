"""The law for heads that guess at once, while their trees grow: in float64 the output is the target's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from medusa_spec import MedusaModel
from medusa_spec.backbone import Backbone
from medusa_spec.drafters import HeadsDrafter, HybridDrafter
from medusa_spec.finetune.store import make_targets
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.heads import DraftHeads, HeadsConfig, MedusaHeads
from medusa_spec.native.build import library
from medusa_spec.pass_times import PassTimes
from medusa_spec.prepare import prepare
from medusa_spec.prepared.packed_linear import available
from medusa_spec.testing import tiny
from medusa_spec.tree import Growth

NEW, V, K = 30, 40, 4
RULES = Growth(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (20, 2.0)), temperature=1.5, width=6)
FREE = Growth(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (14, 1.0)), width=40)
DEAR = Growth(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (20, 8.0)), width=6)
SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 1.2, "top_k": 12},
    {"top_p": 0.8, "top_k": 0},
    {"repetition_penalty": 1.2},
]


def random_heads(target: PreTrainedModel) -> DraftHeads:
    backbone = Backbone(target)
    config = HeadsConfig(hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size, num_heads=K)
    heads = MedusaHeads(config, backbone.projection()).to(backbone.dtype)
    backbone.detach()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return heads


def growing(target: PreTrainedModel, heads: DraftHeads | None, growth: Growth) -> MedusaModel:
    model = MedusaModel(target, None if heads is None else heads.requires_grad_(False), probe=False)
    assert isinstance(model.drafter, HeadsDrafter)
    model.drafter.growth = growth
    return model


def prompt(length: int, seed: int = 0, *, below: int = V) -> torch.Tensor:
    return torch.randint(3, below, (1, length), generator=torch.Generator().manual_seed(seed))


def plain(target: PreTrainedModel, ids: torch.Tensor, seed: int | None = None, **kwargs: Any) -> torch.Tensor:
    if seed is not None:
        torch.manual_seed(seed)
    return target.generate(ids, do_sample=seed is not None, **{"max_new_tokens": NEW, **kwargs})


class ByHeart:
    """A target, a text of its own, and heads that have learnt the text by heart."""

    def __init__(self, target: PreTrainedModel) -> None:
        self.target = target
        self.text = plain(target, prompt(6), max_new_tokens=NEW + 60)
        self.heads = random_heads(target)
        backbone = Backbone(target)
        states = backbone.states(self.text, taps=())
        backbone.detach()
        targets = make_targets(self.text[0].int(), torch.ones(self.text.shape[1]).bool(), K)[None]
        model = TrainedHeads(self.heads, depth_decay=1.0).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        for _ in range(120):
            loss = model(states.h[0], targets[0])["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def model(self, growth: Growth = RULES) -> MedusaModel:
        return growing(self.target, self.heads, growth)


@pytest.fixture(scope="module")
def by_heart() -> Iterator[ByHeart]:
    """Tests may only wrap its target, not change it."""
    target = tiny("llama", vocab_size=V)
    target.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield ByHeart(target)


@pytest.mark.parametrize("growth", [RULES, FREE], ids=["priced", "free"])
def test_greedy_through_any_tree_that_grows_equals_plain_greedy(any_model, growth):
    """Heads that guess at random, and those that begin as the target's own LM head."""
    for length, heads in ((1, random_heads(any_model)), (23, None)):
        ids = prompt(length, length, below=128)
        answer = plain(any_model, ids)
        model = growing(any_model, heads, growth)
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
        stats = model.last_stats
        assert stats.new_tokens == sum(stats.spans) == NEW
        if growth is FREE:
            assert set(stats.pass_sizes) == {14}
        model.detach()


@pytest.mark.parametrize("growth", [RULES, FREE, DEAR], ids=["priced", "free", "dear"])
def test_what_was_learnt_by_heart_is_accepted_and_nothing_else(by_heart, growth):
    for length in (1, 2, 7, 23):
        ids = by_heart.text[:, :length]
        answer = plain(by_heart.target, ids)
        model = by_heart.model(growth)
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
        model.detach()
    assert torch.equal(answer, by_heart.text[:, : 23 + NEW])
    assert model.last_stats.passes < 0.5 * NEW and len(model.last_stats.accepted_by_depth) > 2
    assert len(model.last_stats.pass_sizes) > 1 or growth is FREE  # trees follow each step's confidence


@pytest.mark.parametrize("settings", SAMPLERS, ids=str)
def test_the_same_seed_gives_the_tokens_of_plain_sampling(by_heart, settings):
    accepted = 0
    for seed in range(3):
        ids = by_heart.text[:, : 11 + seed]
        answer = plain(by_heart.target, ids, seed=seed, **settings)
        state = torch.get_rng_state()
        model = by_heart.model()
        torch.manual_seed(seed)
        output = model.generate(ids, do_sample=True, max_new_tokens=NEW, **settings)
        model.detach()
        assert torch.equal(output, answer)
        assert torch.equal(torch.get_rng_state(), state)
        accepted += model.last_stats.accepted
    assert accepted > 0


@pytest.mark.parametrize("dear", [False, True], ids=["cheap", "dear"])
def test_at_the_prices_of_the_moment_the_text_is_the_same(by_heart, monkeypatch, dear):
    """Where passes over more nodes take ages, trees shrink; in a pool with what stood before, too."""
    ids = by_heart.text[:, :8]
    times = PassTimes({0: {size: 1e-3 * (1 + dear * size) for size in (1, 2, 8, 64)}})
    monkeypatch.setattr(times, "observe", lambda *seen: None)  # this model's real passes all take the same
    monkeypatch.setattr("medusa_spec.speculation.pass_times", lambda backbone, prepared: times)
    nodes = []
    for drafter in (None, "hybrid"):
        model = by_heart.model(FREE)
        chosen = model.drafter if drafter is None else HybridDrafter(model.drafter)
        output = model.generate(ids, do_sample=False, max_new_tokens=NEW, drafter=chosen, speculation="auto")
        assert torch.equal(output, by_heart.text[:, : 8 + NEW])
        nodes += model.last_stats.nodes
        model.detach()
    assert max(nodes) <= 10 if dear else max(nodes) > 10


def test_greedy_with_processors_equals_plain_greedy(by_heart):
    ids = by_heart.text[:, :9]
    settings = {"repetition_penalty": 1.1, "no_repeat_ngram_size": 4, "sequence_bias": [[[5], 0.5]]}
    answer = plain(by_heart.target, ids, **settings)
    model = by_heart.model()
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW, **settings), answer)
    assert model.last_stats.accepted > 0
    model.detach()


def test_draft_nodes_bounds_every_pass(by_heart):
    ids = by_heart.text[:, :8]
    model = by_heart.model(FREE)
    for nodes in (0, 1, 3, 50):
        output = model.generate(ids, do_sample=False, max_new_tokens=NEW, draft_nodes=nodes)
        assert torch.equal(output, by_heart.text[:, : 8 + NEW])
        assert max(model.last_stats.pass_sizes) == min(nodes, FREE.largest) + 1
    model.detach()


def test_exactly_as_many_tokens_as_asked_and_none_behind_an_eos(by_heart):
    ids = by_heart.text[:, :6]
    model = by_heart.model()
    for new in (1, 2, 5, 13):
        output = model.generate(ids, do_sample=False, max_new_tokens=new)
        assert torch.equal(output, by_heart.text[:, : 6 + new])
    model.detach()
    for place in (6, 9, 20):
        eos = int(by_heart.text[0, place])
        expected = plain(by_heart.target, ids, eos_token_id=eos)
        model = by_heart.model()
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW, eos_token_id=eos), expected)
        model.detach()


def test_sampled_tokens_follow_the_target_s_distribution(make_model):
    """Chi-square of the second and third token together against their exact probabilities."""
    vocab, draws, ids = 8, 900, torch.tensor([[2, 5, 3]])
    target = make_model("llama", vocab_size=vocab)
    with torch.no_grad():
        first = target(ids).logits[0, -1].softmax(-1)
        joint = torch.zeros(vocab, vocab, dtype=torch.float64)
        for a in range(vocab):
            second = target(torch.tensor([[2, 5, 3, a]])).logits[0, -1].softmax(-1)
            for b in range(vocab):
                third = target(torch.tensor([[2, 5, 3, a, b]])).logits[0, -1].softmax(-1)
                joint[b] += first[a] * second[b] * third
    model = growing(target, None, Growth(**(RULES.to_dict() | {"pass_seconds": ((1, 1.0), (9, 1.6))})))
    counts, sizes = torch.zeros(vocab, vocab), set()
    torch.manual_seed(0)
    for _ in range(draws):
        out = model.generate(ids, do_sample=True, max_new_tokens=3, top_k=0)
        counts[out[0, 4], out[0, 5]] += 1
        sizes |= set(model.last_stats.pass_sizes)
    assert len(sizes) > 2
    expected = joint.flatten() * draws
    cells = expected > 5  # the rest is pooled, as the test demands
    pooled = torch.cat([expected[cells], expected[~cells].sum()[None]])
    seen = torch.cat([counts.flatten()[cells], counts.flatten()[~cells].sum()[None]]).double()
    chi_square, freedom = float(((seen - pooled) ** 2 / pooled).sum()), len(pooled) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations


@pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_through_a_prepared_target_the_bits_are_those_of_its_plain_decoding(make_model, monkeypatch, dtype):
    monkeypatch.setattr("medusa_spec.prepare.WORTH_IT", 0.0)
    target = make_model("llama", dtype=dtype, head_dim=16, intermediate_size=64, vocab_size=V).requires_grad_(False)
    model = growing(target, random_heads(target), FREE)
    prepare(target, target.get_output_embeddings())
    assert model.backbone.reads_chains
    for length in (1, 60):
        ids = prompt(length, length)
        alone = model.generate(ids, do_sample=False, max_new_tokens=NEW, draft_nodes=0)
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), alone)
        assert model.last_stats.drafted_passes > 0
