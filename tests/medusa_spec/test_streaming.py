"""A stream holds every token once, as plain decoding's does, and ends whatever happens."""

import queue
import threading
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, TextIteratorStreamer, TextStreamer

from medusa_spec import MedusaModel
from medusa_spec.streaming import Stream, ended
from medusa_spec.testing import tiny_model, tiny_tokenizer

SETTINGS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 48}


class Notes:
    """What a streamer is told."""

    def __init__(self, *, fails_at: int = -1) -> None:
        self.puts: list[Any] = []
        self.ends, self.fails_at = 0, fails_at

    def put(self, value: torch.Tensor) -> None:
        if len(self.puts) == self.fails_at:
            raise ConnectionError("the reader is gone")
        self.puts.append((value.shape, value.dtype, value.device.type, value.tolist()))

    def end(self) -> None:
        self.ends += 1


@pytest.fixture
def talker(scripted):
    """A model, its tokenizer and a prompt of several scripts; drafts are mostly right."""
    target, tokenizer = tiny_model(), tiny_tokenizer()
    inputs = tokenizer("Grüße, 世界 🙂 and ", return_tensors="pt")
    answer = target.generate(**inputs, **{**SETTINGS, "max_new_tokens": 60})
    drafter = scripted(answer[0].tolist(), right=0.9, lone=0.0)
    return MedusaModel(target, drafter=drafter, probe=False), tokenizer, inputs


def test_a_streamer_is_told_what_plain_decoding_tells_it(talker):
    model, _, inputs = talker
    ours, theirs = Notes(), Notes()
    out = model.generate(**inputs, **SETTINGS, streamer=ours)
    assert torch.equal(out, model.target.generate(**inputs, **SETTINGS, streamer=theirs))
    assert ours.puts == theirs.puts and ours.ends == theirs.ends == 1
    tokens = [token for *_, value in ours.puts for token in (value[0] if isinstance(value[0], list) else value)]
    assert tokens == out[0].tolist(), "the prompt, then every token once"


def test_a_streamer_in_its_place_among_the_arguments_is_used_as_well(talker):
    model, _, inputs = talker
    notes = Notes()
    model.target.generation_config.update(**SETTINGS)
    model.generate(inputs.input_ids, None, None, None, None, None, None, notes)
    assert len(notes.puts) == 1 + model.last_stats.new_tokens and notes.ends == 1


@pytest.mark.parametrize("skip", [False, True], ids=["with the prompt", "without"])
def test_the_pieces_of_a_text_make_up_the_text(talker, skip):
    """A character of several bytes comes whole, or not yet."""
    model, tokenizer, inputs = talker

    def pieces(generate: Any) -> list[str]:
        found: list[str] = []
        streamer = TextStreamer(tokenizer, skip_prompt=skip)
        streamer.on_finalized_text = lambda text, stream_end=False: found.append(text)  # type: ignore[method-assign]
        out = generate(**inputs, **SETTINGS, streamer=streamer)
        start = inputs.input_ids.shape[1] if skip else 0
        assert "".join(found) == tokenizer.decode(out[0, start:])
        return found

    assert pieces(model.generate) == pieces(model.target.generate)


def test_a_text_is_read_in_another_thread(talker):
    model, tokenizer, inputs = talker
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60.0)
    thread = threading.Thread(target=model.generate, kwargs={**inputs, **SETTINGS, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    out = model.target.generate(**inputs, **SETTINGS)
    assert text == tokenizer.decode(out[0, inputs.input_ids.shape[1] :])


class FailsLater(LogitsProcessor):
    def __init__(self) -> None:
        self.left = 6

    def __call__(self, input_ids, scores):
        self.left -= 1
        if not self.left:
            raise ZeroDivisionError
        return scores


def test_who_reads_a_stream_is_not_left_waiting_when_something_raises(talker):
    model, tokenizer, inputs = talker
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60.0)
    errors: queue.Queue[Exception] = queue.Queue()

    def run() -> None:
        try:
            processors = LogitsProcessorList([FailsLater()])
            model.generate(**inputs, **SETTINGS, streamer=streamer, logits_processor=processors)
        except ZeroDivisionError as error:
            errors.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    text = "".join(streamer)
    thread.join()
    expected = model.target.generate(**inputs, **{**SETTINGS, "max_new_tokens": 5})
    assert text == tokenizer.decode(expected[0, inputs.input_ids.shape[1] :])
    assert isinstance(errors.get_nowait(), ZeroDivisionError)


def test_an_error_before_the_first_token_ends_a_stream_that_holds_the_prompt(talker):
    model, _, inputs = talker
    notes = Notes()
    with pytest.raises(ValueError, match="max_length"):
        model.generate(**inputs, do_sample=False, max_length=3, streamer=notes)
    assert notes.ends == 1


def test_a_stream_that_was_not_begun_is_left_for_another_call(talker):
    model, _, inputs = talker
    notes = Notes()
    with pytest.raises(Exception, match="num_beams"):
        model.generate(**inputs, **SETTINGS, num_beams=3, streamer=notes)
    assert (notes.puts, notes.ends) == ([], 0)


@pytest.mark.parametrize("place", [0, 1, 7])
def test_a_streamer_that_fails_itself_is_ended_and_its_error_told(talker, place):
    model, _, inputs = talker
    notes = Notes(fails_at=place)
    with pytest.raises(ConnectionError):
        model.generate(**inputs, **SETTINGS, streamer=notes)
    assert notes.ends == 1 and len(notes.puts) == place


def test_an_error_at_the_end_hides_no_other_and_is_not_hidden():
    class Fails(Notes):
        def end(self) -> None:
            super().end()
            raise OSError("closed")

    notes = Fails()
    with pytest.raises(ZeroDivisionError), ended(notes) as stream:
        stream.put(torch.tensor([1]))
        raise ZeroDivisionError
    assert notes.ends == 1
    with pytest.raises(OSError, match="closed"), ended(notes) as stream:
        stream.put(torch.tensor([1]))
        stream.end()
    assert notes.ends == 2


def test_without_a_streamer_there_is_no_stream():
    with ended(None) as stream:
        assert stream is None
    with ended(Notes()) as stream:
        assert isinstance(stream, Stream) and not stream.open
