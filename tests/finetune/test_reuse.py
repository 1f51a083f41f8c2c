"""States that another run has read are taken, not read again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medusa_spec.errors import ConfigError
from medusa_spec.files import read_json, write_json
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import run_data
from medusa_spec.finetune.reuse import KnownStates
from medusa_spec.finetune.states import run_states
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import TokenData


@pytest.fixture
def general(make_config, tmp_path) -> FinetuneConfig:
    """A run over all sources whose states are read."""
    config = make_config(tmp_path / "general")
    run_data(config, Target(config))
    run_states(config, Target(config))
    return config


@pytest.fixture
def domain(general, tmp_path) -> FinetuneConfig:
    """A run over one source, its data stage done."""
    config = replace(general, output=str(tmp_path / "domain"), sources=("even",), states_from=general.output)
    run_data(config, Target(config))
    return config


class NoTarget:
    """A target that must not be asked."""

    @property
    def backbone(self):
        raise AssertionError("the target was asked for states that are known")


def by_conversation(config: FinetuneConfig, split: str) -> dict[bytes, tuple[torch.Tensor, torch.Tensor]]:
    data, store = TokenData(Path(config.output) / "data", split), StateStore(Path(config.output), split, 3)
    numbers = torch.cat(store.conversations)
    rows = store.rows(torch.arange(len(store)))
    return {
        conversation.input_ids.numpy().tobytes(): (rows.h[numbers == n], rows.targets[numbers == n])
        for n, conversation in enumerate(data)
    }


def test_known_conversations_are_not_read_again_and_have_the_same_states(general, domain):
    run_states(domain, NoTarget())
    every = {key: value for split in ("train", "held_out") for key, value in by_conversation(general, split).items()}
    for split in ("train", "held_out"):
        found = by_conversation(domain, split)
        assert found
        for key, (h, targets) in found.items():
            assert torch.equal(h, every[key][0])
            assert torch.equal(targets, every[key][1])


def test_unknown_conversations_are_read_beside_known_ones(general, domain, make_config, tmp_path):
    wider = replace(general, output=str(tmp_path / "wider"), states_from=str(tmp_path / "narrow"))
    narrow = replace(domain, output=str(tmp_path / "narrow"), states_from=None)
    run_data(narrow, Target(narrow))
    run_states(narrow, Target(narrow))
    run_data(wider, Target(wider))
    run_states(wider, Target(wider))
    expected, found = by_conversation(general, "train"), by_conversation(wider, "train")
    assert expected.keys() == found.keys()
    for key, (h, targets) in found.items():
        assert torch.equal(targets, expected[key][1])
        torch.testing.assert_close(
            h, expected[key][0], rtol=2e-2, atol=2e-2
        )  # batches of other lengths round otherwise


def test_a_conversation_with_another_mask_is_another(general):
    conversation = TokenData(Path(general.output) / "data", "train")[0]
    known = KnownStates(replace(general, states_from=general.output), whole=False, taps=())
    assert known.find(conversation) is not None
    assert known.find(replace(conversation, mask=~conversation.mask)) is None


@pytest.mark.parametrize(("name", "value"), [("model", "other"), ("dtype", "float64"), ("revision", "other")])
def test_states_of_another_kind_are_refused_with_both_values(general, name, value):
    with pytest.raises(ConfigError, match=f"states_from must be a run with {name}"):
        KnownStates(replace(general, states_from=general.output, **{name: value}), whole=False, taps=())


def test_an_unfinished_run_is_refused(general, tmp_path):
    with pytest.raises(ConfigError, match="must be finished first"):
        KnownStates(replace(general, states_from=str(tmp_path / "nothing")), whole=False, taps=())


def read_as(general, tmp_path, kind, name, **changes) -> FinetuneConfig:
    """Another run over the same data, for heads of a kind; its data stage is done."""
    config = replace(general, output=str(tmp_path / name), kind=kind, **changes)
    run_data(config, Target(config))
    return config


@pytest.mark.parametrize("num_heads", [1, 3, 5])
def test_heads_that_read_answers_alone_take_them_from_whole_texts(general, tmp_path, num_heads):
    whole = read_as(general, tmp_path, "eagle3", "whole")
    run_states(whole, Target(whole))
    answers = read_as(general, tmp_path, "hydra", "answers", states_from=whole.output, num_heads=num_heads)
    run_states(answers, NoTarget())
    expected, found = by_conversation(general, "train"), by_conversation(answers, "train")
    assert expected.keys() == found.keys()
    for key, (h, targets) in found.items():
        assert torch.equal(targets, expected[key][1]) and torch.equal(h, expected[key][0])
    assert not StateStore(Path(answers.output), "train", 3).layers


def test_whole_texts_are_taken_from_whole_texts_bit_for_bit(general, tmp_path):
    first = read_as(general, tmp_path, "eagle3", "first")
    run_states(first, Target(first))
    for kind, taps in (("eagle3", (0, 1)), ("eagle", ())):
        second = read_as(general, tmp_path, kind, f"second-{kind}", states_from=first.output)
        run_states(second, NoTarget())
        old, new = (StateStore(Path(config.output), "train", 3) for config in (first, second))
        assert new.taps == taps and len(new) == len(old)
        texts = {text_key(old, text): old.batch([text]) for text in old.texts()}
        for text in new.texts():
            batch = new.batch([text])
            assert all(torch.equal(batch[name], texts[text_key(new, text)][name]) for name in batch)


def text_key(store: StateStore, text) -> int:
    return int(store.conversations[text.shard][text.start])


def test_whole_texts_cannot_come_from_answers_alone(general, tmp_path):
    wanting = read_as(general, tmp_path, "eagle", "wanting", states_from=general.output)
    with pytest.raises(ConfigError, match=r"states_from must be a run with whole True, the one in .* has False"):
        run_states(wanting, NoTarget())


def test_taps_must_be_those_of_the_run_that_is_taken_from(general, tmp_path):
    whole = read_as(general, tmp_path, "eagle", "whole")
    run_states(whole, Target(whole))
    wanting = read_as(general, tmp_path, "eagle3", "wanting", states_from=whole.output)
    with pytest.raises(ConfigError, match=r"states_from must be a run with taps \[0, 1\], the one in .* has \[\]"):
        run_states(wanting, NoTarget())


def test_states_that_an_older_version_read_are_refused_by_name(general, tmp_path):
    path = Path(general.output) / "states.done.json"
    record = read_json(path)
    del record["settings"]["whole"]
    write_json(path, record)
    wanting = read_as(general, tmp_path, "eagle", "wanting", states_from=general.output)
    with pytest.raises(ConfigError, match=r"states_from must be a run with whole True, the one in .* has None"):
        run_states(wanting, NoTarget())
