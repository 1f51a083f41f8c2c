"""The law for what followed before, beside heads and without: in float64 the output is the target's."""

from typing import Any

import pytest
import torch

from medusa_spec import HybridDrafter, MedusaModel, SuffixCorpus, SuffixDrafter
from medusa_spec.drafters import Drafter, HeadsDrafter
from medusa_spec.heads import HeadsConfig, fitted_options, make_heads
from medusa_spec.tree import Growth, Prices, TreeTemplate

NEW = 40
SAMPLERS = {
    "temperature": {"temperature": 0.4},
    "top-k": {"temperature": 0.8, "top_k": 5},
    "top-p": {"top_p": 0.5, "top_k": 0},
    "processors": {"temperature": 0.5, "repetition_penalty": 1.1, "sequence_bias": [[[5], 2.0]]},
}
FREE = Prices(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (17, 1.01)))
GROWTH = Growth(token_seconds=1.0, level_seconds=0.02, pass_seconds=((1, 1.0), (17, 1.05)), hit=0.6, beam=3, width=4)
TEMPLATE = TreeTemplate(paths=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
KINDS = ["suffix", "medusa", "recurrent", "eagle"]
kinds = pytest.mark.parametrize("kind", KINDS)


def plain(target: Any, ids: torch.Tensor, seed: int | None = None, **kwargs: Any) -> torch.Tensor:
    if seed is not None:
        torch.manual_seed(seed)
    return target.generate(ids, do_sample=seed is not None, **{"max_new_tokens": NEW, **kwargs})


def drafting(target: Any, kind: str, **settings: Any) -> MedusaModel:
    """Look-up alone, or beside random heads of a family."""
    model = MedusaModel(target, drafter="suffix", probe=False)
    suffix = SuffixDrafter(prices=FREE, **settings)
    model.drafter = suffix if kind == "suffix" else HybridDrafter(heads_drafter(model, kind), suffix)
    return model


def heads_drafter(model: MedusaModel, kind: str) -> Drafter:
    backbone = model.backbone
    config = HeadsConfig(
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        kind=kind,
        num_heads=3,
        options=fitted_options(kind, {}, backbone.config),
    )
    heads = make_heads(config, backbone.projection(), None, backbone.embedding()).to(backbone.dtype)
    for parameter in heads.requires_grad_(False).parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    growth = GROWTH if heads.sequential else None
    return HeadsDrafter(heads, TEMPLATE, growth=growth, dtype=backbone.dtype, device=backbone.head_device)


def repeating(target: Any, ids: torch.Tensor) -> torch.Tensor:
    """A prompt in which the answer stands already, and once more with other words in it."""
    answer = plain(target, ids)
    other = answer.clone()
    other[:, 20::7] += 1
    whole = torch.cat([other, ids, answer, ids], dim=1)
    return whole.clamp(1, target.config.vocab_size - 1)  # 0 is padding, which generate() would hide


def test_greedy_through_any_tree_equals_plain_greedy(any_model, prompt):
    ids = repeating(any_model, prompt(6))
    answer = plain(any_model, ids)
    for kind in KINDS:
        model = drafting(any_model, kind)
        for _ in range(2):  # the second time the whole answer is remembered
            assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
        stats = model.last_stats
        assert stats.accepted > NEW // 2 and stats.new_tokens == sum(stats.spans) == NEW
        model.detach()


def test_a_corpus_that_knows_the_answer_changes_no_token(any_model, prompt, tmp_path):
    ids = prompt(6)
    answer = plain(any_model, ids)
    SuffixCorpus(tmp_path).add([answer[0].tolist()])
    for kind in KINDS:
        model = drafting(any_model, kind, corpus=SuffixCorpus(tmp_path))
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
        assert model.last_stats.accepted > NEW // 2
        model.detach()


@kinds
@pytest.mark.parametrize("settings", SAMPLERS.values(), ids=list(SAMPLERS))
def test_the_same_seed_gives_the_tokens_of_plain_sampling(llama, prompt, settings, kind):
    ids = repeating(llama, prompt(6))
    answer = plain(llama, ids, seed=3, **settings)
    model = drafting(llama, kind)
    for _ in range(2):
        torch.manual_seed(3)
        assert torch.equal(model.generate(ids, do_sample=True, max_new_tokens=NEW, **settings), answer)
    state = torch.get_rng_state()
    assert model.last_stats.accepted > 0
    model.detach()
    plain(llama, ids, seed=3, **settings)
    assert torch.equal(torch.get_rng_state(), state)


@kinds
def test_branches_are_accepted_and_not_chains_alone(make_model, prompt, kind):
    """Texts that part and meet again: what is said next stood there with several tokens behind it."""
    target = make_model("llama", vocab_size=12)
    ids = prompt(6).remainder(9) + 3
    ids = torch.cat([*(plain(target, ids, seed=number, temperature=0.7)[:, 6:] for number in range(6)), ids], dim=1)
    ids = ids.clamp(min=1)
    settings = {"temperature": 0.7, "max_new_tokens": 4 * NEW}
    answer = plain(target, ids, seed=9, **settings)
    model, trees = drafting(target, kind), list[Any]()
    watch(model, trees)
    torch.manual_seed(9)
    assert torch.equal(model.generate(ids, do_sample=True, **settings), answer)
    said = answer[0].tolist()
    assert sum(branch_taken(tree, said[start:]) for tree, start in trees) > 2


def watch(model: MedusaModel, trees: list[Any]) -> None:
    """Writes down every tree and the place in the text behind its root."""
    drafter, begin = model.drafter, type(model.drafter).begin

    def watched(prompt: Any) -> Any:
        session = begin(drafter, prompt)
        drafting, observe, place = session.drafting, session.observe, [len(prompt)]

        def noted(root: int, h: Any, limit: Any) -> Any:
            tree = yield from drafting(root, h, limit)
            trees.append((tree, place[0]))
            return tree

        def counted(tokens: Any) -> None:
            place[0] += len(tokens)
            observe(tokens)

        session.drafting, session.observe = noted, counted
        return session

    drafter.begin = watched


def branch_taken(tree: Any, said: list[int]) -> bool:
    """Whether the accepted path leaves the first child somewhere."""
    node = 0
    for token in said:
        child = tree.child_with(node, token)
        if child is None:
            return False
        if child != tree.shape.children[node][0]:
            return True
        node = child
    return False


@kinds
def test_draft_nodes_bounds_every_pass(llama, prompt, kind):
    ids = repeating(llama, prompt(6))
    answer = plain(llama, ids)
    model = drafting(llama, kind)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW, draft_nodes=3), answer)
    assert max(model.last_stats.pass_sizes) == 4
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW, draft_nodes=0), answer)
    assert set(model.last_stats.pass_sizes) == {1}


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_short_prompts_and_short_answers(llama, prompt, length):
    ids = prompt(length)
    answer = plain(llama, ids)
    for kind in KINDS:
        model = drafting(llama, kind)
        for new in (1, 2, 3, NEW):
            out = model.generate(ids, do_sample=False, max_new_tokens=new)
            assert torch.equal(out, answer[:, : length + new])
        model.detach()


@kinds
def test_sampled_tokens_follow_the_target_s_distribution(make_model, kind):
    """Chi-square of the second and third token together against their exact probabilities."""
    vocab, draws = 8, 500
    target = make_model("llama", vocab_size=vocab)
    ids = torch.tensor([[2, 5, 3, 2, 5, 3, 4, 2, 5]])
    with torch.no_grad():
        joint = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
        first = target(ids).logits[0, -1].softmax(-1)
        for a in range(vocab):
            one = torch.cat([ids, torch.tensor([[a]])], dim=1)
            second = target(one).logits[0, -1].softmax(-1)
            two = torch.cat([one.expand(vocab, -1), torch.arange(vocab)[:, None]], dim=1)
            joint[a] = first[a] * second[:, None] * target(two).logits[:, -1].softmax(-1)
    expected = joint.sum(0).flatten() * draws
    model = drafting(target, kind, session_tokens=4096)  # what was drawn before is proposed again
    counts, accepted = torch.zeros(vocab, vocab), 0
    torch.manual_seed(0)
    for _ in range(draws):
        out = model.generate(ids, do_sample=True, max_new_tokens=3, top_k=0)
        counts[out[0, -2], out[0, -1]] += 1
        accepted += model.last_stats.accepted
    assert accepted > draws // 10
    cells = expected > 5  # the rest is pooled, as the test demands
    pooled = torch.cat([expected[cells], expected[~cells].sum()[None]])
    seen = torch.cat([counts.flatten()[cells], counts.flatten()[~cells].sum()[None]]).double()
    chi_square = float(((seen - pooled) ** 2 / pooled).sum())
    freedom = len(pooled) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations


def test_names_make_drafters_that_need_heads_or_none(llama, prompt):
    ids = repeating(llama, prompt(6))
    answer = plain(llama, ids)
    first = MedusaModel(llama, probe=False)
    heads = first.heads
    first.detach()
    for name, given, kind in (
        ("suffix", None, SuffixDrafter),
        ("hybrid", None, SuffixDrafter),
        ("hybrid", heads, HybridDrafter),
    ):
        model = MedusaModel(llama, given, drafter=name, probe=False)
        assert type(model.drafter) is kind and model.heads is given
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
        assert model.last_stats.accepted > 0
        model.detach()
