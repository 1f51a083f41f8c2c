"""The target as a writer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from medusa_spec.batch import Sampling
from medusa_spec.finetune import FinetuneConfig
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.writer import Prompt, Writer

MakeConfig = Callable[..., FinetuneConfig]


@pytest.fixture
def writer(make_config: MakeConfig, tmp_path: Path) -> Writer:
    config = make_config(tmp_path, max_length=120)
    return Writer(config, Target(config))


def test_what_is_written_follows_from_the_prompt_and_its_seed_alone(writer: Writer) -> None:
    prompts = [Prompt(key=n, text=writer.chat([{"role": "user", "content": f"{n} red"}]), seed=n) for n in range(5)]
    sampling = Sampling(temperature=1.0)
    with writer:
        together = {text.key: text for text in writer.write(prompts, 20, sampling)}
        for prompt in reversed(prompts):
            (alone,) = writer.write([prompt], 20, sampling)
            assert alone == together[prompt.key]
    assert len({text.text for text in together.values()}) == 5
    assert writer.tokens == 2 * sum(text.tokens for text in together.values())


def test_prompts_are_cut_short_by_max_length_and_those_without_room_left_out(writer: Writer) -> None:
    prompts = [Prompt(key=size, text="x" * size) for size in (5, 110, 120, 400)]
    with writer:
        found = {text.key: text.tokens for text in writer.write(prompts, 20, Sampling()) if not text.finished}
    assert set(found) <= {5, 110} and found.get(110, 10) == 10 and found.get(5, 20) == 20


def test_what_goes_round_in_circles_is_stopped(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("medusa_spec.finetune.writer.loops", lambda tokens: asked.append(len(tokens)) or True)
    monkeypatch.setattr(Target, "eos_ids", frozenset[int]())
    with writer:
        (text,) = writer.write([Prompt(key=0, text="red")], 100, Sampling())
    assert text.loops and not text.finished and text.tokens == 64 and asked == [64]


def test_the_target_is_given_back_as_it_was(writer: Writer) -> None:
    model = writer.target.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with writer:
        list(writer.write([Prompt(key=0, text="red")], 4, Sampling()))
    after = model.state_dict()
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
