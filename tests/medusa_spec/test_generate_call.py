"""The law for batches: every row of one is what plain decoding of the batch says, token for token, in float64."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from medusa_spec import Drafter, MedusaModel

NEW = 24
LENGTHS = (5, 1, 23, 12)
PAD = 0

SAMPLERS = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.1, "top_k": 12},
    "top-p": {"top_p": 0.7, "top_k": 0, "repetition_penalty": 1.3},
}


def batch_of(prompt, lengths=LENGTHS):
    """Prompts of these lengths, padded on the left: ids and mask, each [B, T]."""
    ids = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in enumerate(lengths):
        ids[row, max(lengths) - length :] = prompt(length, seed=row + 1)
    mask = torch.tensor([[0] * (max(lengths) - length) + [1] * length for length in lengths])
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": PAD}


def padded(model, prompt):
    """Prompts of several lengths; of one, where Hugging Face's own padded passes give nan in float64."""
    broken = model.config.model_type == "gemma2"
    return batch_of(prompt, (9, 9, 9, 9) if broken else LENGTHS)


def plain(model, batch, seed=None, **kwargs):
    if seed is not None:
        torch.manual_seed(seed)
    return model.generate(**batch, do_sample=seed is not None, **{"max_new_tokens": NEW, **kwargs})


class Knowing(Drafter):
    """Knows every row's answer and hides it in random trees."""

    name = "knowing"

    def __init__(self, scripted, answer, batch, right=0.7):
        self.texts = [row[mask[0] :].tolist() for row, mask in zip(answer, _starts(batch), strict=True)]
        self.drafters = [scripted(text, right=right, seed=row) for row, text in enumerate(self.texts)]

    def begin(self, prompt):
        matching = [d for d, text in zip(self.drafters, self.texts, strict=True) if text[: len(prompt)] == prompt]
        return matching[0].begin(prompt)


def _starts(batch):
    return batch["attention_mask"].long().argmax(dim=1, keepdim=True).tolist()


def wrapped(model, scripted, answer, batch, right=0.7):
    return MedusaModel(model, drafter=Knowing(scripted, answer, batch, right), probe=False)


def test_every_row_is_plain_greedy_decoding_of_the_batch(any_model, scripted, prompt):
    batch = padded(any_model, prompt)
    answer = plain(any_model, batch)
    for right in (0.0, 0.6, 1.0):
        model = wrapped(any_model, scripted, answer, batch, right)
        assert torch.equal(model.generate(**batch, do_sample=False, max_new_tokens=NEW), answer)
        stats = model.last_stats
        assert stats.requests == len(LENGTHS) and stats.new_tokens == sum(stats.spans) == NEW * len(LENGTHS)
        assert (stats.accepted > 0) is (right > 0)
        model.detach()


def test_every_row_is_the_same_row_alone(any_model, prompt):
    batch = batch_of(prompt)
    model = MedusaModel(any_model, probe=False)
    together = model.generate(**batch, do_sample=False, max_new_tokens=NEW)
    for row, length in enumerate(LENGTHS):
        ids = batch["input_ids"][row : row + 1, -length:]
        alone = model.generate(ids, do_sample=False, max_new_tokens=NEW)
        assert torch.equal(together[row, -length - NEW :], alone[0])


@pytest.mark.parametrize("settings", SAMPLERS.values(), ids=list(SAMPLERS))
def test_the_same_seed_gives_the_tokens_of_plain_sampling_of_the_batch(any_model, scripted, prompt, settings):
    batch = padded(any_model, prompt)
    answer = plain(any_model, batch, seed=3, **settings)
    state = torch.get_rng_state()
    model = wrapped(any_model, scripted, answer, batch)
    torch.manual_seed(3)
    assert torch.equal(model.generate(**batch, do_sample=True, max_new_tokens=NEW, **settings), answer)
    assert torch.equal(torch.get_rng_state(), state)  # the next call draws the same as well
    assert model.last_stats.accepted > 0


@pytest.mark.parametrize("seed", [None, 4], ids=["greedy", "sampled"])
def test_rows_end_where_they_should_and_do_not_change_any_more(llama, scripted, prompt, seed):
    batch = batch_of(prompt)
    free = plain(llama, batch, seed=seed)
    width = batch["input_ids"].shape[1]
    ends = [int(free[0, width + 3]), int(free[2, width + 9])]
    answer = plain(llama, batch, seed=seed, eos_token_id=ends)
    lengths = [(row[width:] != PAD).sum().item() for row in answer]
    assert len(set(lengths)) > 1
    model = wrapped(llama, scripted, answer, batch)
    if seed is not None:
        torch.manual_seed(seed)
    out = model.generate(**batch, do_sample=seed is not None, max_new_tokens=NEW, eos_token_id=ends)
    assert torch.equal(out, answer)


def test_several_answers_to_one_prompt_read_it_once(llama, prompt, monkeypatch):
    ids = prompt(17)
    torch.manual_seed(5)
    answer = llama.generate(ids, do_sample=True, num_return_sequences=3, max_new_tokens=NEW)
    model, read = MedusaModel(llama, probe=False, prepare=False), []
    forward = model.backbone.forward

    def noting(ids, **kwargs):
        read.append(ids.shape[1])
        return forward(ids, **kwargs)

    monkeypatch.setattr(model.backbone, "forward", noting)
    torch.manual_seed(5)
    out = model.generate(ids, do_sample=True, num_return_sequences=3, max_new_tokens=NEW)
    assert torch.equal(out, answer) and out.shape[0] == 3
    assert read.count(17) == 1


def test_scores_and_logits_are_those_of_plain_decoding(llama, scripted, prompt):
    batch = batch_of(prompt)
    settings = {
        "output_scores": True,
        "output_logits": True,
        "return_dict_in_generate": True,
        "repetition_penalty": 1.2,
    }
    answer = plain(llama, batch, **settings)
    model = wrapped(llama, scripted, answer.sequences, batch)
    out = model.generate(**batch, do_sample=False, max_new_tokens=NEW, **settings)
    assert torch.equal(out.sequences, answer.sequences)
    for name in ("scores", "logits"):
        assert len(out[name]) == NEW
        for own, other in zip(out[name], answer[name], strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_allowed_tokens_are_asked_with_the_row_that_they_are_for(llama, scripted, prompt):
    batch = batch_of(prompt)

    def allowed(row, ids):
        return [token for token in range(2, 128) if token % len(LENGTHS) == row]

    answer = plain(llama, batch, prefix_allowed_tokens_fn=allowed)
    model = wrapped(llama, scripted, answer, batch)
    out = model.generate(**batch, do_sample=False, max_new_tokens=NEW, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(out, answer) and model.last_stats.accepted > 0


def test_answers_to_one_prompt_are_asked_for_with_the_number_of_the_prompt(llama, prompt):
    ids = torch.cat([prompt(6, seed=1), prompt(6, seed=2)])

    def allowed(number, ids):
        return [token for token in range(2, 128) if token % 2 == number]

    settings = {
        "do_sample": True,
        "num_return_sequences": 2,
        "max_new_tokens": NEW,
        "prefix_allowed_tokens_fn": allowed,
    }
    torch.manual_seed(1)
    answer = llama.generate(ids, **settings)
    model = MedusaModel(llama, probe=False)
    torch.manual_seed(1)
    assert torch.equal(model.generate(ids, **settings), answer)


class ByRow(LogitsProcessor):
    """A grammar with a state for each row: every row may repeat no token."""

    def __init__(self):
        self.seen = {}

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in enumerate(input_ids):
            self.seen.setdefault(row, set()).add(int(ids[-1]))
            scores[row, list(self.seen[row])] = -torch.inf
        return scores


class EndsAt(StoppingCriteria):
    """Ends a row at the token 7 or later multiples of it."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 7 == 0


def test_what_may_look_at_other_rows_is_left_to_the_targets_own_loop_and_it_is_said(llama, prompt):
    batch = batch_of(prompt)
    answer = plain(llama, batch, logits_processor=LogitsProcessorList([ByRow()]))
    model = MedusaModel(llama, probe=False)
    out = model.generate(**batch, do_sample=False, max_new_tokens=NEW, logits_processor=LogitsProcessorList([ByRow()]))
    assert torch.equal(out, answer)
    assert "ByRow may look at other rows" in model.last_stats.rule


def test_what_says_that_it_goes_by_rows_is_copied_for_each(llama, scripted, prompt):
    batch = batch_of(prompt)
    processor, criterion = ByRow(), EndsAt()
    settings = {"eos_token_id": 127}
    answer = plain(
        llama,
        batch,
        logits_processor=LogitsProcessorList([copy.deepcopy(processor)]),
        stopping_criteria=StoppingCriteriaList([criterion]),
        **settings,
    )
    processor.rowwise = criterion.rowwise = True
    model = wrapped(llama, scripted, answer, batch)
    out = model.generate(
        **batch,
        do_sample=False,
        max_new_tokens=NEW,
        logits_processor=LogitsProcessorList([processor]),
        stopping_criteria=StoppingCriteriaList([criterion]),
        **settings,
    )
    assert torch.equal(out, answer) and model.last_stats.accepted > 0
    assert processor.seen == {}


def own_loop(model, batch, answer, words, **settings):
    """The target's own loop decodes it, and says why, and what."""
    out = model.generate(**batch, do_sample=False, max_new_tokens=NEW, **settings)
    assert torch.equal(getattr(out, "sequences", out), answer)
    assert words in model.last_stats.rule and model.last_stats.new_tokens == NEW * len(answer)
    return out


def test_a_batch_whose_longest_row_rescales_positions_is_the_targets_own(make_model, prompt):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 20}
    target = make_model("llama", rope_parameters=rope, max_position_embeddings=20)
    batch = batch_of(prompt, (3, 17, 9))
    answer = plain(target, batch)
    own_loop(MedusaModel(target, drafter="ngram", probe=False), batch, answer, "rescales")


def test_a_cache_and_a_streamer_of_a_batch_are_the_targets_own(llama, prompt):
    batch, plain_cache, own_cache = batch_of(prompt, (6, 6)), DynamicCache(), DynamicCache()
    answer = plain(llama, batch, cache=plain_cache)
    model = MedusaModel(llama, drafter="ngram", probe=False)
    own_loop(model, batch, answer, "a cache was passed", cache=own_cache)
    assert own_cache.get_seq_length() == plain_cache.get_seq_length() > 0
    put = {True: [], False: []}
    for mine, generate in ((False, llama.generate), (True, model.generate)):
        streamer = SimpleNamespace(put=lambda ids, mine=mine: put[mine].append(ids.tolist()), end=lambda: None)
        generate(**batch, do_sample=False, max_new_tokens=NEW, streamer=streamer)
    assert put[True] == put[False] and "streamer" in model.last_stats.rule


def test_what_the_targets_own_loop_returns_has_counters(llama, prompt):
    batch = batch_of(prompt, (6, 6))
    answer = plain(llama, batch)
    model = MedusaModel(llama, drafter="ngram", probe=False)
    asked = {"return_dict_in_generate": True, "output_hidden_states": True}
    out = own_loop(model, batch, answer, "hidden_states", **asked)
    assert out.stats is model.last_stats and len(out.hidden_states) == NEW


@pytest.mark.parametrize("answers", [1, 2])
def test_processors_that_hold_all_prompts_are_given_the_rows_own(llama, scripted, prompt, answers):
    batch = batch_of(prompt, (6, 6, 6))
    settings = {"encoder_no_repeat_ngram_size": 2} | ({"encoder_repetition_penalty": 1.5} if answers == 1 else {})
    torch.manual_seed(2)
    answer = llama.generate(**batch, do_sample=True, num_return_sequences=answers, max_new_tokens=NEW, **settings)
    model = MedusaModel(llama, drafter="ngram", probe=False)
    torch.manual_seed(2)
    out = model.generate(**batch, do_sample=True, num_return_sequences=answers, max_new_tokens=NEW, **settings)
    assert torch.equal(out, answer) and "own loop" not in model.last_stats.rule


def test_a_batch_of_any_number_of_rows_is_decoded_whatever_its_passes_take(llama, prompt):
    batch = batch_of(prompt, (4,) * 70)
    answer = plain(llama, batch, max_new_tokens=6)
    model = MedusaModel(llama, drafter="ngram", probe=False, speculation="auto")
    assert torch.equal(model.generate(**batch, do_sample=False, max_new_tokens=6), answer)


def test_ranks_that_share_the_target_are_left_to_its_own_loop(llama, prompt, monkeypatch):
    """One row, too: a rank that is done must go on with empty passes until all are, which that loop does."""
    batch, asked = batch_of(prompt, (6,)), []
    answer = plain(llama, batch)

    def unfinished(done, synced_gpus, device):
        asked.append((done, synced_gpus))
        return not done

    monkeypatch.setattr(llama, "_has_unfinished_sequences", unfinished)
    model = MedusaModel(llama, drafter="ngram", probe=False)
    own_loop(model, batch, answer, "ranks", synced_gpus=True)
    assert all(synced for _, synced in asked) and len(asked) >= NEW
