"""generate() as people know it: every option does what it does in Hugging Face's loop, or is refused by name."""

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

from medusa_spec import Drafter, MedusaModel, NgramDrafter
from medusa_spec.errors import ConfigError, UnsupportedError
from medusa_spec.testing import tiny_model, tiny_tokenizer

NEW = 24


@pytest.fixture
def ids(prompt):
    return prompt(9)


@pytest.fixture
def wrapped(llama, scripted, ids):
    """A model whose drafter is often right, and the answer of the same model untouched."""
    answer = llama.generate(ids, do_sample=False, max_new_tokens=NEW + 8)
    return MedusaModel(llama, drafter=scripted(answer[0].tolist(), right=0.8), probe=False)


def both(model: MedusaModel, ids: torch.Tensor, **kwargs):
    """(drafted, plain) of the same call."""
    arguments = {"do_sample": False, "max_new_tokens": NEW, **kwargs}
    return model.generate(ids, **arguments), model.target.generate(ids, **arguments)


REFUSED = {
    "num_beams": {"num_beams": 3},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 4},
    "guidance_scale": {"guidance_scale": 1.5},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_speculated_is_refused_by_name(wrapped, ids, name):
    with pytest.raises(UnsupportedError, match=name):
        wrapped.generate(ids, **{"max_new_tokens": 4, **REFUSED[name]})


def test_an_assistant_is_refused(wrapped, ids):
    with pytest.raises(UnsupportedError, match="assistant_model"):
        wrapped.generate(ids, assistant_model=wrapped.target, max_new_tokens=4)


def test_embeddings_are_refused(wrapped, ids):
    embeddings = wrapped.get_input_embeddings()(ids)
    with pytest.raises(UnsupportedError, match="inputs_embeds"):
        wrapped.generate(inputs_embeds=embeddings, max_new_tokens=4)


@pytest.mark.parametrize("value", [-1, 2.5, "many"])
def test_a_wrong_draft_nodes_is_named(wrapped, ids, value):
    with pytest.raises(ConfigError, match="draft_nodes"):
        wrapped.generate(ids, max_new_tokens=4, draft_nodes=value)


def test_left_padding_changes_nothing(wrapped, ids):
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(14) >= 5).long()[None]
    drafted, plain = both(wrapped, padded, attention_mask=mask)
    assert torch.equal(drafted, plain)
    assert wrapped.last_stats.accepted > 0


def test_padding_counts_for_processors_as_in_plain_decoding(wrapped, ids):
    padded = torch.cat([torch.full((1, 3), 17), ids], dim=1)
    mask = (torch.arange(12) >= 3).long()[None]
    drafted, plain = both(wrapped, padded, attention_mask=mask, repetition_penalty=2.0)
    assert torch.equal(drafted, plain)


def test_a_prompt_of_padding_alone_is_an_error(wrapped):
    ids = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ConfigError, match="attention_mask"):
        wrapped.generate(ids, attention_mask=torch.zeros_like(ids), max_new_tokens=2)


def test_output_has_the_fields_and_shapes_of_plain_output(wrapped, ids):
    drafted, plain = both(wrapped, ids, return_dict_in_generate=True, output_scores=True, output_logits=True, top_k=5)
    assert torch.equal(drafted.sequences, plain.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(drafted, name), getattr(plain, name)
        assert isinstance(ours, tuple) and len(ours) == len(theirs) == NEW
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert drafted.cache.get_seq_length() == plain.cache.get_seq_length() == 9 + NEW - 1
    for ours, theirs in zip(drafted.cache.layers, plain.cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)
    assert drafted.stats is wrapped.last_stats


def test_scores_come_from_processors_and_logits_from_the_model(wrapped, ids):
    settings = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "do_sample": True}
    torch.manual_seed(1)
    drafted = wrapped.generate(ids, max_new_tokens=6, top_k=4, **settings)
    assert all(int(score.isfinite().sum()) == 4 for score in drafted.scores)
    assert all(bool(logits.isfinite().all()) for logits in drafted.logits)


class _Recorder(LogitsProcessor):
    """A processor with state: any call too many, too few or with other ids is seen."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        return scores + torch.sin(torch.arange(scores.shape[1]) * float(len(self.seen)))


def test_a_processor_with_state_is_called_as_in_plain_decoding(wrapped, ids):
    ours, theirs = _Recorder(), _Recorder()
    drafted = wrapped.generate(ids, do_sample=False, max_new_tokens=NEW, logits_processor=LogitsProcessorList([ours]))
    plain = wrapped.target.generate(
        ids, do_sample=False, max_new_tokens=NEW, logits_processor=LogitsProcessorList([theirs])
    )
    assert torch.equal(drafted, plain)
    assert ours.seen == theirs.seen


def test_allowed_tokens_by_prefix_hold_on_every_path(wrapped, ids):
    drafted, plain = both(
        wrapped, ids, prefix_allowed_tokens_fn=lambda row, seen: list(range(2, 60)) if len(seen) % 2 else [70, 71, 72]
    )
    assert torch.equal(drafted, plain)


def test_minimum_length_and_suppressed_tokens_hold(wrapped, ids):
    answer = wrapped.target.generate(ids, do_sample=False, max_new_tokens=NEW)
    eos = int(answer[0, 12])
    drafted, plain = both(wrapped, ids, eos_token_id=eos, min_new_tokens=10, suppress_tokens=[int(answer[0, 15])])
    assert torch.equal(drafted, plain)


class _StopAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length, self.lengths, self.score_counts = length, [], []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        self.score_counts.append(None if scores is None else len(scores))
        return torch.tensor([input_ids.shape[1] >= self.length])


def test_a_stopping_criterion_is_asked_at_every_token(wrapped, ids):
    ours, theirs = _StopAt(17), _StopAt(17)
    drafted = wrapped.generate(ids, do_sample=False, max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([ours]))
    plain = wrapped.target.generate(
        ids, do_sample=False, max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([theirs])
    )
    assert torch.equal(drafted, plain)
    assert ours.lengths == theirs.lengths == list(range(10, 18))
    assert ours.score_counts == theirs.score_counts


def test_max_time_ends_the_text(wrapped, ids):
    assert wrapped.generate(ids, do_sample=False, max_new_tokens=NEW, max_time=0.0).shape[1] == 10


def test_a_generation_config_is_used_and_left_alone(wrapped, ids):
    config = GenerationConfig(max_new_tokens=7, do_sample=False, repetition_penalty=1.3, pad_token_id=0)
    before = config.to_dict()
    drafted = wrapped.generate(ids, generation_config=config)
    assert torch.equal(drafted, wrapped.target.generate(ids, generation_config=config))
    assert drafted.shape[1] == 16
    assert config.to_dict() == before


class _Lines(TextStreamer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.text, self.ends = "", 0

    def on_finalized_text(self, text, stream_end=False):
        self.text += text
        self.ends += stream_end


@pytest.fixture
def talker(scripted):
    """A tiny model with a tokenizer, its prompt and a drafter that knows the answer."""
    target, tokenizer = tiny_model(), tiny_tokenizer()
    inputs = tokenizer("Grüße, 世界 and ", return_tensors="pt")
    answer = target.generate(**inputs, do_sample=False, max_new_tokens=60)
    drafter = scripted(answer[0].tolist(), right=0.9)
    return MedusaModel(target, drafter=drafter, probe=False), tokenizer, inputs, answer


def test_a_streamer_gets_every_token_once(talker):
    model, tokenizer, inputs, _ = talker
    ours, theirs = _Lines(tokenizer), _Lines(tokenizer)
    drafted = model.generate(**inputs, do_sample=False, max_new_tokens=40, streamer=ours)
    plain = model.target.generate(**inputs, do_sample=False, max_new_tokens=40, streamer=theirs)
    assert torch.equal(drafted, plain)
    assert (ours.text, ours.ends) == (theirs.text, theirs.ends)
    assert ours.ends == 1


def test_stop_strings_cut_inside_an_accepted_path(talker):
    model, tokenizer, inputs, answer = talker
    text = tokenizer.decode(answer[0, inputs.input_ids.shape[1] :])
    for place in range(4, 20, 3):
        stop = text[place : place + 2]
        arguments = {"do_sample": False, "max_new_tokens": 40, "stop_strings": stop, "tokenizer": tokenizer}
        assert torch.equal(model.generate(**inputs, **arguments), model.target.generate(**inputs, **arguments))
    config = GenerationConfig(stop_strings=[text[6:8]], max_new_tokens=40, do_sample=False, pad_token_id=258)
    arguments = {"generation_config": config, "tokenizer": tokenizer}
    assert torch.equal(model.generate(**inputs, **arguments), model.target.generate(**inputs, **arguments))
    assert config.stop_strings == [text[6:8]]


def test_stop_strings_without_a_tokenizer_are_an_error(wrapped, ids):
    with pytest.raises(ConfigError, match="tokenizer"):
        wrapped.generate(ids, stop_strings="x", max_new_tokens=4)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole text", "new tokens only"])
def test_a_user_s_cache_is_read_and_brought_up_to_date(make_model, scripted, prompt, name, whole):
    target = make_model(name)
    first, second = prompt(21, 1), prompt(4, 2)

    def talk(generate):
        cache = DynamicCache(config=target.config)
        one = generate(first, do_sample=False, max_new_tokens=10, cache=cache)
        text = torch.cat([one, second], dim=1)
        # Only the new part: the last token of the first answer is not in the cache yet.
        inputs = text if whole else text[:, cache.get_seq_length() :]
        mask = torch.ones_like(text)
        two = generate(inputs, attention_mask=mask, do_sample=False, max_new_tokens=10, cache=cache)
        return two, cache

    plain, plain_cache = talk(target.generate)
    model = MedusaModel(target, drafter=scripted([3] * 99, right=0.0), probe=False)
    drafted, cache = talk(model.generate)
    assert torch.equal(drafted, plain)
    assert cache.get_seq_length() == plain_cache.get_seq_length()
    window = target.config.sliding_window if name != "llama" else None
    for ours, theirs in zip(cache.layers, plain_cache.layers, strict=True):
        kept = theirs.keys.shape[2] if window is None else min(theirs.keys.shape[2], window - 1)
        torch.testing.assert_close(ours.keys[:, :, -kept:], theirs.keys[:, :, -kept:])


def test_a_cache_of_another_class_is_refused(wrapped, ids):
    cache = StaticCache(config=wrapped.config, max_cache_len=64)
    with pytest.raises(UnsupportedError, match="StaticCache"):
        wrapped.generate(ids, cache=cache, max_new_tokens=4)


def test_a_cache_that_holds_the_whole_prompt_is_an_error(wrapped, ids):
    cache = DynamicCache(config=wrapped.config)
    wrapped.target(ids, cache=cache)
    with pytest.raises(ConfigError, match="cache"):
        wrapped.generate(ids, cache=cache, max_new_tokens=4)


def test_arguments_for_the_forward_are_not_lost_in_silence(make_model, scripted, ids):
    model = MedusaModel(make_model("gpt2"), drafter=scripted([], right=0.0), probe=False)
    with pytest.raises(UnsupportedError, match="token_type_ids"):
        model.generate(ids, token_type_ids=torch.ones_like(ids), max_new_tokens=4)
    with pytest.raises(UnsupportedError, match="position_ids"):
        model.generate(ids, position_ids=torch.arange(9)[None] + 3, max_new_tokens=4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_prompt_read_in_chunks_gives_the_same(make_model, scripted, prompt, name):
    target, ids = make_model(name), prompt(25)
    answer = target.generate(ids, do_sample=False, max_new_tokens=NEW)
    model = MedusaModel(target, drafter=scripted(answer[0].tolist(), right=0.8), probe=False)
    chunked = model.generate(ids, do_sample=False, max_new_tokens=NEW, prefill_chunk_size=7)
    assert torch.equal(chunked, answer)


def test_a_custom_generate_is_refused(wrapped, ids):
    with pytest.raises(UnsupportedError, match="custom_generate"):
        wrapped.generate(ids, custom_generate="org/repo", max_new_tokens=4)


@pytest.mark.parametrize("sharded", [False, True])
def test_whether_ranks_wait_for_each_other_is_found_out_as_hugging_face_does(wrapped, ids, monkeypatch, sharded):
    """With a callable it finds it out and does not say so."""
    monkeypatch.setattr("medusa_spec.generation.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("medusa_spec.generation.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("medusa_spec.generation.is_fsdp_managed_module", lambda model: sharded)
    monkeypatch.setattr(type(wrapped.target), "_has_unfinished_sequences", lambda self, done, *_, **__: not done)
    wrapped.generate(ids, do_sample=False, max_new_tokens=3)
    assert ("ranks that share the target" in wrapped.last_stats.rule) is sharded
    wrapped.generate(ids, do_sample=False, max_new_tokens=3, synced_gpus=False)
    assert "ranks" not in wrapped.last_stats.rule


MODES = {
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "high"},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "token_healing": {"token_healing": True},
}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_that_chooses_otherwise_is_refused_by_name(wrapped, ids, name):
    with pytest.raises(UnsupportedError, match=name):
        wrapped.generate(ids, do_sample=False, max_new_tokens=4, **MODES[name])


@pytest.mark.parametrize("drafter", ["ngram", NgramDrafter])
def test_a_drafter_of_a_wrong_type_is_named(wrapped, ids, drafter):
    with pytest.raises(ConfigError, match="drafter"):
        wrapped.generate(ids, max_new_tokens=4, drafter=drafter)


@pytest.mark.parametrize("scores", [False, True])
def test_criteria_are_asked_as_in_plain_decoding_up_to_the_last_token(wrapped, ids, scores):
    ours, theirs = _StopAt(10**9), _StopAt(10**9)
    settings = {"return_dict_in_generate": scores, "output_scores": scores, "do_sample": False, "max_new_tokens": 8}
    wrapped.generate(ids, stopping_criteria=StoppingCriteriaList([ours]), **settings)
    wrapped.target.generate(ids, stopping_criteria=StoppingCriteriaList([theirs]), **settings)
    assert ours.lengths == theirs.lengths == list(range(10, 18))
    assert ours.score_counts == theirs.score_counts


def test_a_criterion_sees_as_much_of_the_stream_as_in_plain_decoding(wrapped, ids):
    """Whatever the order is in which Hugging Face asks whether to stop and puts the token."""

    def streamed(generate):
        puts, seen = [], []

        class Streamer:
            def put(self, value):
                puts.append(value)

            def end(self):
                pass

        class Watch(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                seen.append(len(puts))
                return torch.tensor([False])

        criteria = StoppingCriteriaList([Watch()])
        generate(ids, do_sample=False, max_new_tokens=8, streamer=Streamer(), stopping_criteria=criteria)
        return seen

    assert streamed(wrapped.generate) == streamed(wrapped.target.generate)


def test_a_limit_that_nobody_reaches_costs_no_memory(wrapped, ids):
    answer = wrapped.target.generate(ids, do_sample=False, max_new_tokens=NEW)
    eos = int(answer[0, 16])
    drafted = wrapped.generate(ids, do_sample=False, max_new_tokens=10**9, eos_token_id=eos)
    assert int(drafted[0, -1]) == eos and drafted.shape[1] <= 17


@pytest.mark.parametrize("fails", ["processor", "streamer", "drafter"])
def test_an_error_in_the_middle_leaves_the_model_and_the_cache_as_they_were(wrapped, ids, fails):
    class Fails:
        left = 4

        def __call__(self, *args, **kwargs):
            Fails.left -= 1
            if not Fails.left:
                raise ZeroDivisionError
            return args[-1]

        put = draft = __call__

        def end(self):
            pass

    class FailingDrafter(Drafter):
        name = "failing"

        def begin(self, prompt):
            session = wrapped.drafter.begin(prompt)
            draft = session.draft
            session.draft = lambda *args: Fails()(draft(*args))
            return session

    extra = {
        "processor": {"logits_processor": LogitsProcessorList([Fails()])},
        "streamer": {"streamer": Fails()},
        "drafter": {"drafter": FailingDrafter()},
    }[fails]
    cache = DynamicCache(config=wrapped.config)
    with pytest.raises(ZeroDivisionError):
        wrapped.generate(ids, do_sample=False, max_new_tokens=NEW, cache=cache, **extra)
    assert cache.get_seq_length() == 0
    drafted, plain = both(wrapped, ids)
    assert torch.equal(drafted, plain)
