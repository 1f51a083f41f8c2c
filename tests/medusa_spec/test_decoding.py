"""The law: what a tree decodes is what the target says, token for token, in float64."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from medusa_spec import MedusaModel, NgramDrafter, TokenTree
from medusa_spec.figures import first_difference
from medusa_spec.tree import chain

NEW = 30

SAMPLERS = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.1, "top_k": 12},
    "top-p": {"top_p": 0.7, "top_k": 0},
    "min-p": {"min_p": 0.05, "top_k": 0},
    "repetition-penalty": {"temperature": 0.9, "repetition_penalty": 1.4},
    "logit-bias": {"sequence_bias": [[[5], 3.0], [[7, 9], -4.0]], "no_repeat_ngram_size": 3},
}


def plain(model: PreTrainedModel, ids: torch.Tensor, seed: int | None = None, **kwargs) -> torch.Tensor:
    if seed is not None:
        torch.manual_seed(seed)
    return model.generate(ids, do_sample=seed is not None, **{"max_new_tokens": NEW, **kwargs})


@pytest.mark.parametrize("length", [1, 5, 23])
def test_greedy_through_any_tree_equals_plain_greedy(any_model, scripted, prompt, length):
    ids = prompt(length, seed=length)
    answer = plain(any_model, ids)
    for seed, right in enumerate((0.0, 0.5, 0.9, 1.0)):
        drafter = scripted(answer[0].tolist(), right=right, seed=seed)
        model = MedusaModel(any_model, drafter=drafter, probe=False)
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
        model.detach()


@pytest.mark.parametrize("settings", SAMPLERS.values(), ids=list(SAMPLERS))
def test_the_same_seed_gives_the_tokens_of_plain_sampling(any_model, scripted, prompt, settings):
    ids = prompt(11)
    answer = plain(any_model, ids, seed=3, **settings)
    model = MedusaModel(any_model, drafter=scripted(answer[0].tolist(), right=0.7, seed=1), probe=False)
    torch.manual_seed(3)
    drafted = model.generate(ids, do_sample=True, max_new_tokens=NEW, **settings)
    state = torch.get_rng_state()
    assert torch.equal(drafted, answer)
    assert model.last_stats.accepted > 0
    model.detach()
    plain(any_model, ids, seed=3, **settings)
    assert torch.equal(torch.get_rng_state(), state)  # the next call draws the same as well


def test_greedy_with_processors_equals_plain_greedy(any_model, scripted, prompt):
    ids = prompt(9)
    settings = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "sequence_bias": [[[5], 2.5]]}
    answer = plain(any_model, ids, **settings)
    model = MedusaModel(any_model, drafter=scripted(answer[0].tolist(), right=0.8), probe=False)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW, **settings), answer)
    assert model.last_stats.accepted > 0


def test_untrained_heads_and_ngrams_change_nothing(any_model, prompt):
    ids = prompt(12)
    answer = plain(any_model, ids, max_new_tokens=60)
    model = MedusaModel(any_model, probe=False)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=60), answer)
    ngram = NgramDrafter(min_ngram=1)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=60, drafter=ngram), answer)


def test_a_drafter_that_never_is_right_gains_one_token_a_pass(llama, scripted, prompt):
    ids = prompt(7)
    answer = plain(llama, ids)
    model = MedusaModel(llama, drafter=scripted(answer[0].tolist(), right=0.0, lone=0.0), probe=False)
    model.generate(ids, do_sample=False, max_new_tokens=NEW)
    stats = model.last_stats
    assert (stats.mu, stats.tau, stats.passes, stats.drafted_passes) == (0.0, 1.0, NEW - 1, NEW - 1)


def test_a_chain_that_always_is_right_gains_its_length_and_the_bonus(llama, scripted, prompt):
    ids = prompt(7)
    answer = plain(llama, ids, max_new_tokens=60)[0].tolist()

    class Chain(scripted):
        def begin(self, prompt):
            session = super().begin(prompt)

            def draft(root, h, limit):
                place = session.length
                tokens = answer[place : place + 4]
                return TokenTree(shape=chain(len(tokens)), tokens=(root, *tokens))

            session.draft = draft
            return session

    model = MedusaModel(llama, drafter=Chain(answer, right=1.0), probe=False)
    assert model.generate(ids, do_sample=False, max_new_tokens=41)[0].tolist() == answer[: 7 + 41]
    stats = model.last_stats
    assert (stats.passes, stats.mu, stats.tau) == (8, 4.0, 5.0)  # 1 + 8 * (4 + 1) tokens
    assert stats.spans == [1] + [5] * 8
    assert stats.accepted_by_depth == stats.offered_by_depth == [8, 8, 8, 8]


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 8, 13])
def test_exactly_as_many_tokens_as_asked(llama, scripted, prompt, new):
    ids = prompt(6)
    answer = plain(llama, ids, max_new_tokens=40)
    model = MedusaModel(llama, drafter=scripted(answer[0].tolist(), right=1.0), probe=False)
    drafted = model.generate(ids, do_sample=False, max_new_tokens=new)
    assert torch.equal(drafted, answer[:, : 6 + new])
    assert model.last_stats.new_tokens == sum(model.last_stats.spans) == new


def test_every_eos_id_cuts_inside_an_accepted_path(llama, scripted, prompt):
    ids = prompt(6)
    answer = plain(llama, ids, max_new_tokens=40)
    model = MedusaModel(llama, drafter=scripted(answer[0].tolist(), right=1.0, lone=0.0), probe=False)
    for place in range(6, 30):
        eos = [int(answer[0, place]), 127]
        drafted = model.generate(ids, do_sample=False, max_new_tokens=40, eos_token_id=eos)
        model.detach()
        expected = plain(llama, ids, max_new_tokens=40, eos_token_id=eos)
        assert torch.equal(drafted, expected)
        assert int(drafted[0, -1]) in eos
        model = MedusaModel(llama, drafter=model.drafter, probe=False)


def test_plain_decoding_is_a_tree_of_one_node(any_model, scripted, prompt):
    ids = prompt(8)
    answer = plain(any_model, ids)
    model = MedusaModel(any_model, drafter=scripted(answer[0].tolist(), right=1.0), probe=False)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW, draft_nodes=0), answer)
    assert model.last_stats.pass_sizes == {1: NEW - 1}
    assert model.last_stats.mu == 0.0


def test_draft_nodes_bounds_every_pass(llama, scripted, prompt):
    ids = prompt(8)
    answer = plain(llama, ids)
    model = MedusaModel(llama, drafter=scripted(answer[0].tolist(), right=0.6), probe=False)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW, draft_nodes=3), answer)
    assert max(model.last_stats.pass_sizes) <= 4


def test_the_cache_grows_far_beyond_its_first_size(llama, scripted, prompt):
    ids = prompt(3)
    answer = plain(llama, ids, max_new_tokens=400)
    model = MedusaModel(llama, drafter=scripted(answer[0].tolist(), right=0.8), probe=False)
    model.target.generation_config = GenerationConfig(pad_token_id=0)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=400), answer)


def test_a_window_slides_through_a_long_text(make_model, scripted, prompt):
    for name in ("mistral-window", "gemma3"):
        model = make_model(name)
        ids = prompt(70)
        answer = plain(model, ids, max_new_tokens=200)
        wrapped = MedusaModel(model, drafter=scripted(answer[0].tolist(), right=0.8, nodes=14), probe=False)
        assert torch.equal(wrapped.generate(ids, do_sample=False, max_new_tokens=200), answer)


def test_learnt_positions_end_with_their_table(make_model, scripted, prompt):
    model = make_model("gpt2", max_position_embeddings=32)
    ids = prompt(5)
    answer = plain(model, ids, max_new_tokens=27)
    wrapped = MedusaModel(model, drafter=scripted(answer[0].tolist() + [9] * 9, right=1.0), probe=False)
    assert torch.equal(wrapped.generate(ids, do_sample=False, max_new_tokens=27), answer)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_draft_never_rescales_positions_ahead_of_the_text(make_model, scripted, prompt, kind):
    rope = {"rope_type": kind, "rope_theta": 100.0, "original_max_position_embeddings": 24, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    name = "phi3" if kind == "longrope" else "llama"
    bounds = {"original_max_position_embeddings": 24} if kind == "longrope" else {}
    model = make_model(name, rope_parameters=rope, max_position_embeddings=24 if kind == "dynamic" else 96, **bounds)
    ids = prompt(6)
    answer = plain(model, ids, max_new_tokens=16)
    wrapped = MedusaModel(model, drafter=scripted(answer[0].tolist() + [9] * 9, right=0.9), probe=False)
    assert torch.equal(wrapped.generate(ids, do_sample=False, max_new_tokens=16), answer)


def test_sampled_tokens_follow_the_target_s_distribution(make_model, prompt):
    """Chi-square of the second and third token together against their exact probabilities."""
    vocab, draws = 8, 900
    model = make_model("llama", vocab_size=vocab)
    ids = torch.tensor([[2, 5, 3]])
    with torch.no_grad():
        joint = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
        first = model(ids).logits[0, -1].softmax(-1)
        for a in range(vocab):
            second = model(torch.tensor([[2, 5, 3, a]])).logits[0, -1].softmax(-1)
            for b in range(vocab):
                third = model(torch.tensor([[2, 5, 3, a, b]])).logits[0, -1].softmax(-1)
                joint[a, b] = first[a] * second[b] * third
    expected = joint.sum(0).flatten() * draws
    wrapped = MedusaModel(model, probe=False)
    counts = torch.zeros(vocab, vocab)
    torch.manual_seed(0)
    for _ in range(draws):
        out = wrapped.generate(ids, do_sample=True, max_new_tokens=3, top_k=0)
        counts[out[0, 4], out[0, 5]] += 1
    assert wrapped.last_stats.drafted_passes > 0
    cells = expected > 5  # the rest is pooled, as the test demands
    pooled = torch.cat([expected[cells], expected[~cells].sum()[None]])
    seen = torch.cat([counts.flatten()[cells], counts.flatten()[~cells].sum()[None]]).double()
    chi_square = float(((seen - pooled) ** 2 / pooled).sum())
    freedom = len(pooled) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations


def longrope(make_model, name="phi3"):
    """A model whose rotary factors change behind 24 tokens."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    edge = {"original_max_position_embeddings": 24}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, **edge, **factors}
    return make_model(name, rope_parameters=rope, max_position_embeddings=96, **edge)


@pytest.mark.parametrize("name", ["phi3", "llama"])
@pytest.mark.parametrize("length", [6, 23, 24, 25, 30])
def test_a_text_that_grows_past_rescaled_positions_equals_plain_decoding(make_model, scripted, prompt, name, length):
    """Phi-3 reads its text anew there; Llama with the same positions does not."""
    model, ids = longrope(make_model, name), prompt(length)
    answer = plain(model, ids)
    wrapped = MedusaModel(model, drafter=scripted(answer[0].tolist() + [9] * 9, right=0.9), probe=False)
    assert torch.equal(wrapped.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
    stats = wrapped.last_stats
    assert stats.accepted > 0
    assert sum(stats.spans) == stats.new_tokens == NEW and len(stats.spans) == stats.passes + 1


def test_padding_and_chunks_keep_rescaled_positions_as_they_are_in_plain_decoding(make_model, scripted, prompt):
    model, ids = longrope(make_model), prompt(12)
    ids[:, :3] = 0
    mask = (torch.arange(12) >= 3).long()[None]
    answer = plain(model, ids, attention_mask=mask)
    wrapped = MedusaModel(model, drafter=scripted(answer[0, 3:].tolist(), right=0.9), probe=False)
    settings = {"do_sample": False, "max_new_tokens": NEW}
    assert torch.equal(wrapped.generate(ids, attention_mask=mask, **settings), answer)
    ids = prompt(20)
    wrapped.drafter.answer = plain(wrapped.target, ids)[0].tolist()
    assert torch.equal(wrapped.generate(ids, prefill_chunk_size=7, **settings)[0], torch.tensor(wrapped.drafter.answer))


def test_a_conversation_in_one_cache_grows_past_rescaled_positions(make_model, prompt):
    model = longrope(make_model)

    def talk(generate_with):
        def generate(text, **kwargs):
            return generate_with(text, attention_mask=torch.ones_like(text), **kwargs)

        cache, text, answers = DynamicCache(config=model.config), prompt(9), []
        for new, said in ((5, 3), (12, 4), (5, 2)):  # 14 tokens, then 29: past the edge while answering
            text = generate(text, do_sample=False, max_new_tokens=new, cache=cache)
            answers += text[0].tolist()
            text = torch.cat([text, prompt(said, new)], dim=1)
        cache, text = DynamicCache(config=model.config), prompt(9)
        text = torch.cat([generate(text, do_sample=False, max_new_tokens=5, cache=cache), prompt(15, 1)], dim=1)
        return answers + generate(text, do_sample=False, max_new_tokens=8, cache=cache)[0].tolist()  # and by a prompt

    expected = talk(model.generate)
    assert talk(MedusaModel(model, drafter=NgramDrafter(min_ngram=1), probe=False).generate) == expected


@pytest.mark.parametrize("window", [2, 3])
def test_a_window_narrower_than_the_tree_is_deep(make_model, scripted, prompt, window):
    for name in ("mistral-window", "gpt-oss"):
        model, ids = make_model(name, sliding_window=window), prompt(9)
        answer = plain(model, ids, max_new_tokens=80)
        wrapped = MedusaModel(model, drafter=scripted(answer[0].tolist(), right=0.9), probe=False)
        assert torch.equal(wrapped.generate(ids, do_sample=False, max_new_tokens=80), answer)


def test_end_of_sequence_as_the_first_token_and_as_padding(llama, scripted, prompt):
    ids = prompt(6)
    answer = plain(llama, ids, max_new_tokens=40)
    eos = int(answer[0, 6])
    model = MedusaModel(llama, drafter=scripted(answer[0].tolist(), right=1.0), probe=False)
    drafted = model.generate(ids, do_sample=False, max_new_tokens=40, eos_token_id=eos, pad_token_id=eos)
    assert torch.equal(drafted, answer[:, :7])
    assert (model.last_stats.tau, model.last_stats.mu) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt2", "gpt-oss"])
def test_under_autocast_a_tree_decodes_as_one_node_does(make_model, scripted, prompt, name):
    """A rotation widens queries and keys there, and not the values."""
    model, ids = make_model(name, dtype=torch.float32), prompt(9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer = plain(model, ids)
        wrapped = MedusaModel(model, drafter=scripted(answer[0].tolist(), right=0.8), probe=False)
        drafted = wrapped.generate(ids, do_sample=False, max_new_tokens=NEW)
    difference = first_difference(answer[0].tolist(), drafted[0].tolist())
    assert difference is None or difference > 9 + 3  # bfloat16 may tip a choice
    assert wrapped.last_stats.accepted > 0
