"""States that an engine has dumped take the place of the target's own, if they are its own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from medusa_spec.errors import ConfigError
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import SPLITS, run_data
from medusa_spec.finetune.dumped import DumpedStates, H
from medusa_spec.finetune.states import run_states
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import TokenData
from medusa_spec.testing import tiny_model

MakeConfig = Callable[..., FinetuneConfig]
LAST = 2
"""The tiny model has two layers: id 2 is what leaves the second."""


@torch.no_grad()
def engine(config: FinetuneConfig, folder: Path, ids: Sequence[int | str], **changes: Any) -> Path:
    """What an engine would dump, by plain transformers: layer ids as vLLM counts them, `h` for normed states.

    Args:
        config: A run whose data stage is done.
        folder: Of the dump.
        ids: The columns.
        **changes: `model` that computes, `dtype` that is written, `every` which conversations, `cut` that many
            last tokens off, `change` of the tensor.
    """
    model = changes.get("model") or Target(config).model
    caught: list[Any] = []
    layer = model.model.layers[-1].register_forward_hook(lambda module, given, came: caught.append(came))
    folder.mkdir()
    conversations = [c for split in SPLITS for c in TokenData(Path(config.output) / "data", split)]
    for number, conversation in enumerate(conversations[:: changes.get("every", 1)]):
        tokens = conversation.input_ids.long()
        tokens = tokens[: len(tokens) - changes.get("cut", 0)]
        states = model(tokens[None], output_hidden_states=True).hidden_states
        last = caught[-1][0] if isinstance(caught[-1], tuple) else caught[-1]
        named = {**dict(enumerate(state[0] for state in states[:-1])), LAST: last.reshape(states[-1][0].shape)}
        columns = torch.stack([states[-1][0] if name == H else named[name] for name in ids], 1)
        columns = changes.get("change", lambda part: part)(columns).to(changes.get("dtype", torch.float32)).contiguous()
        save_file({"hidden_states": columns, "token_ids": tokens.contiguous()}, folder / f"cmpl-{number}.safetensors")
    layer.remove()
    return folder


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> FinetuneConfig:
    """A run whose data stage is done."""
    config = make_config(tmp_path / "run", sources=("even",))
    run_data(config, Target(config))
    return config


def dumped(config: FinetuneConfig, folder: Path, *, whole: bool = False, taps: tuple[int, ...] = ()) -> DumpedStates:
    data = {split: TokenData(Path(config.output) / "data", split) for split in SPLITS}
    backbone = Target(config).backbone
    return DumpedStates(str(folder), data, backbone, max_length=config.max_length, whole=whole, taps=taps)


def columns_of(config: FinetuneConfig, split: str = "train") -> dict[int, dict[str, torch.Tensor]]:
    """Stored columns by conversation."""
    store = StateStore(Path(config.output), split, 3)
    found: dict[int, dict[str, torch.Tensor]] = {}
    for shard, conversations in enumerate(store.conversations):
        for number in conversations.unique_consecutive().tolist():
            rows = conversations == number
            found[number] = {"h": store.h[shard][rows], "position": store.positions[shard][rows]}
            if store.taps:
                found[number]["layers"] = store.layers[shard][rows]
    return found


@pytest.mark.parametrize(
    ("kind", "ids", "dtype"),
    [
        ("medusa", (LAST,), torch.float32),
        ("medusa", (0, 1, LAST), torch.bfloat16),
        ("medusa", (H,), torch.float16),
        ("eagle", (1, LAST), torch.float32),
        ("eagle3", (LAST, 1, 0), torch.bfloat16),
        ("eagle3", (0, 1, H), torch.float32),
    ],
)
def test_an_engines_states_are_the_targets_own(
    config: FinetuneConfig, tmp_path: Path, kind: str, ids: tuple[int | str, ...], dtype: torch.dtype
) -> None:
    config = replace(config, kind=kind)
    own = replace(config, output=str(tmp_path / "own"))
    run_data(own, Target(own))
    run_states(own, Target(own))
    folder = engine(config, tmp_path / "dump", ids, dtype=dtype)
    manifest = run_states(replace(config, states_dump=str(folder)), Target(config))
    assert manifest["conversations_from"]["target"] == 0 < manifest["conversations_from"]["states_dump"]
    one, two = columns_of(own), columns_of(config)
    assert one.keys() == two.keys()
    for number in one:
        assert one[number].keys() == two[number].keys() and torch.equal(
            one[number]["position"], two[number]["position"]
        )
        for name in one[number].keys() - {"position"}:
            torch.testing.assert_close(one[number][name].float(), two[number][name].float(), rtol=0.03, atol=0.03)


def test_conversations_that_are_not_in_the_dump_are_read_by_the_target(config: FinetuneConfig, tmp_path: Path) -> None:
    folder = engine(config, tmp_path / "dump", (LAST,), every=2)
    total = sum(len(TokenData(Path(config.output) / "data", split)) for split in SPLITS)
    manifest = run_states(replace(config, states_dump=str(folder)), Target(config))
    assert manifest["conversations_from"] == {"states_dump": -(-total // 2), "target": total // 2}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("cut", [1, 2])
def test_last_tokens_that_an_engine_did_not_read_are_not_needed(
    config: FinetuneConfig, tmp_path: Path, cut: int, whole: bool
) -> None:
    folder = engine(config, tmp_path / "dump", (LAST,), cut=cut)  # the end of turn, and the line break behind it
    conversation = TokenData(Path(config.output) / "data", "train")[0]
    states = dumped(config, folder, whole=whole)
    assert conversation in states and states.find(conversation) is not None


def test_tokens_after_which_the_target_chose_are_needed(config: FinetuneConfig, tmp_path: Path) -> None:
    folder = engine(config, tmp_path / "dump", (LAST,), cut=3)
    with pytest.raises(ConfigError, match="got none of them"):
        dumped(config, folder, whole=True)


def test_a_run_that_was_stopped_goes_on_with_the_dump(config: FinetuneConfig, tmp_path: Path) -> None:
    folder = engine(config, tmp_path / "dump", (LAST,), every=2)
    config = replace(config, states_dump=str(folder))
    run_states(config, Target(config))
    whole = {path.name: path.read_bytes() for path in (Path(config.output) / "states").iterdir()}
    (Path(config.output) / "states.done.json").unlink()
    next((Path(config.output) / "states").glob("train-*")).unlink()
    run_states(config, Target(config))
    assert whole == {path.name: path.read_bytes() for path in (Path(config.output) / "states").iterdir()}


def noisy(states: torch.Tensor) -> torch.Tensor:
    return states * (1 + 0.2 * torch.randn_like(states))


FAULTS: dict[str, tuple[tuple[int | str, ...], dict[str, Any], str]] = {
    "one layer too early": ((0, 1), {}, r"layers \[2\] .* are \[0, 1\]: \[2\] missing; .*_layer_ids = \[2\]"),
    "shifted by a token": ((LAST,), {"change": lambda s: s.roll(1, 0)}, "not the target's own within a relative error"),
    "noise": ((LAST,), {"change": noisy}, "column 0: nearest is what leaves the last layer at 0.2"),
    "scaled": ((H,), {"change": lambda s: s * 1.2}, "column 0: nearest is h at 0.200"),
    "another width": (
        (LAST,),
        {"change": lambda s: s[..., :16]},
        "hidden size 32, the target's, got 16 .*another model",
    ),
}


@pytest.mark.parametrize(("ids", "changes", "message"), FAULTS.values(), ids=list(FAULTS))
def test_states_that_are_not_those_that_enter_the_lm_head_are_refused(
    config: FinetuneConfig, tmp_path: Path, ids: tuple[int | str, ...], changes: dict[str, Any], message: str
) -> None:
    folder = engine(config, tmp_path / "dump", ids, **changes)
    with pytest.raises(ConfigError, match=f"states_dump must hold .*{message}"):
        run_states(replace(config, states_dump=str(folder)), Target(config))


def test_a_dump_of_other_weights_is_refused(config: FinetuneConfig, tmp_path: Path) -> None:
    folder = engine(config, tmp_path / "dump", (LAST,), model=tiny_model(seed=1, dtype=torch.float32))
    with pytest.raises(ConfigError, match="It is a dump of another model, of other weights"):
        dumped(config, folder)


def test_one_text_of_another_model_among_those_looked_at_is_noticed(config: FinetuneConfig, tmp_path: Path) -> None:
    folder = engine(config, tmp_path / "dump", (LAST,))
    states = dumped(config, folder)
    conversations = [c for split in SPLITS for c in TokenData(Path(config.output) / "data", split)]
    longest = states.dump.find(max(conversations, key=lambda c: len(c.input_ids)).input_ids, 1)
    assert longest is not None
    ids = torch.tensor(max(conversations, key=lambda c: len(c.input_ids)).input_ids.tolist())
    save_file({"hidden_states": torch.randn(len(ids), 1, 32), "token_ids": ids}, longest)
    with pytest.raises(ConfigError, match="not the target's own"):
        dumped(config, folder)


def test_a_dump_of_another_tokenizer_is_refused(config: FinetuneConfig, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    save_file({"hidden_states": torch.zeros(3, 1, 32), "token_ids": torch.arange(3)}, folder / "a.safetensors")
    with pytest.raises(ConfigError, match=r"got none of them in .*another tokenizer, .*dumps requests RUN FILE"):
        run_states(replace(config, states_dump=str(folder)), Target(config))


def test_layers_that_heads_tap_must_be_there(config: FinetuneConfig, tmp_path: Path) -> None:
    folder = engine(config, tmp_path / "dump", (1, LAST))
    assert dumped(config, folder, whole=True, taps=(1,)).columns == [1, LAST]
    with pytest.raises(ConfigError, match=r"layers \[0, 1, 2\] .* are \[1, 2\]: \[0\] missing"):
        dumped(config, folder, whole=True, taps=(0, 1))


def test_another_dump_is_another_setting(config: FinetuneConfig, tmp_path: Path) -> None:
    folder = engine(config, tmp_path / "dump", (LAST,))
    run_states(replace(config, states_dump=str(folder)), Target(config))
    with pytest.raises(ConfigError, match=r"'states'.*states_dump was '\w+', is None"):
        run_states(config, Target(config))
