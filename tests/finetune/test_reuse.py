"""States that another run has read are taken, not read again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medusa_spec.errors import ConfigError
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
    data, store = TokenData(Path(config.output) / "data", split), StateStore(Path(config.output) / "states", split)
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
    known = KnownStates(replace(general, states_from=general.output))
    assert known.find(conversation) is not None
    assert known.find(replace(conversation, mask=~conversation.mask)) is None


@pytest.mark.parametrize(("name", "value"), [("num_heads", 2), ("dtype", "float64"), ("revision", "other")])
def test_states_of_another_kind_are_refused_with_both_values(general, name, value):
    with pytest.raises(ConfigError, match=f"states_from must be a run with {name}"):
        KnownStates(replace(general, states_from=general.output, **{name: value}))


def test_an_unfinished_run_is_refused(general, tmp_path):
    with pytest.raises(ConfigError, match="must be finished first"):
        KnownStates(replace(general, states_from=str(tmp_path / "nothing")))
