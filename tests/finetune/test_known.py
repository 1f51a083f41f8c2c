"""Several sources of known states."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import SPLITS, run_data
from medusa_spec.finetune.dumps import write_dump
from medusa_spec.finetune.known import Known, known_states
from medusa_spec.finetune.states import run_states
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import Conversation, TokenData

MakeConfig = Callable[..., FinetuneConfig]


class Source:
    """Knows the conversations of some first tokens."""

    def __init__(self, name: float, *first: int) -> None:
        self.name, self.first = name, first

    def __contains__(self, conversation: Conversation) -> bool:
        return int(conversation.input_ids[0]) in self.first

    def find(self, conversation: Conversation) -> dict[str, torch.Tensor] | None:
        return {"h": torch.tensor([self.name])} if conversation in self else None


def said(*ids: int) -> Conversation:
    return Conversation(input_ids=torch.tensor(ids), mask=torch.ones(len(ids), dtype=torch.bool))


def test_the_first_source_that_knows_a_conversation_is_taken() -> None:
    known = Known({"one": Source(1, 5, 6), "two": Source(2, 6, 7)})
    found = [known.find(said(first)) for first in (5, 6, 7, 8)]
    assert [part and float(part["h"]) for part in found] == [1, 1, 2, None]
    assert known.counts([[said(5), said(6)], [said(7), said(8), said(9)]]) == {"one": 2, "two": 1, "target": 2}  # type: ignore[list-item]


def test_a_run_that_names_no_source_has_none(finished: FinetuneConfig) -> None:
    assert known_states(finished, {}, None, whole=False, taps=()) is None


def test_another_run_and_a_dump_may_be_named_together(make_config: MakeConfig, tmp_path: Path) -> None:
    runs = {source: make_config(tmp_path / source, kind="eagle", sources=(source,)) for source in ("even", "odd")}
    for config in runs.values():
        run_data(config, Target(config))
        run_states(config, Target(config))
    write_dump(Path(runs["odd"].output), tmp_path / "dump")
    both = replace(
        runs["even"],
        output=str(tmp_path / "both"),
        sources=None,
        states_from=runs["even"].output,
        states_dump=str(tmp_path / "dump"),
    )
    run_data(both, Target(both))
    manifest = run_states(both, Target(both))
    assert manifest["conversations_from"] == {"states_from": 100, "states_dump": 100, "target": 0}
    assert sum(len(TokenData(tmp_path / "both" / "data", split)) for split in SPLITS) == 200
