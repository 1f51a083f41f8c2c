"""What the target computed while it wrote is not computed again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_spec.errors import ConfigError
from medusa_spec.finetune import FinetuneConfig, distil, run_pipeline, selfdata
from medusa_spec.finetune import known as known_module
from medusa_spec.finetune.dumps import IDS, read_ids
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.writer import Written
from medusa_spec.finetune.written import keep_of, settings, store, written_folder

MakeConfig = Callable[..., FinetuneConfig]
STAGES = ("self", "distil", "data", "states")


def writes_letters(folder: Path, made: Path) -> str:
    """A tiny model whose words read the same when they are taken apart again: it says printable bytes alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    said = [*range(94), 198, 220, 257]  # as byte-level vocabularies number them, and the end
    rows = torch.ones(model.lm_head.weight.shape[0], dtype=torch.bool)
    rows[said] = False
    with torch.no_grad():
        model.lm_head.weight[rows] = 0.0
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(folder).save_pretrained(made)
    return str(made)


@pytest.fixture(params=["medusa", "eagle3"])
def asked(request: Any, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FinetuneConfig:
    """Prompts and chats of two rounds that the target answers, for heads that read answers alone or whole texts."""
    monkeypatch.setattr(distil, "SHARD", 4)
    records: list[dict[str, Any]] = [{"prompt": f"{n}: red cat"} for n in range(6)]
    for number in range(4):
        turns = [("user", f"{number}: blue"), ("assistant", "-"), ("user", "two"), ("assistant", "-")]
        records.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = make_config(
        tmp_path / "run",
        data=str(path),
        distil=True,
        distil_new_tokens=16,
        held_out=0.3,
        kind=request.param,
        keep_states=True,
    )
    return replace(config, model=writes_letters(Path(config.model), tmp_path / "letters"))


def read_anew(config: FinetuneConfig, output: Path) -> FinetuneConfig:
    return replace(config, output=str(output), keep_states=False)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max() / other.float().abs().max())


def test_the_states_are_those_that_reading_gives(asked: FinetuneConfig, tmp_path: Path) -> None:
    run_pipeline(asked, stages=STAGES)
    plain = read_anew(asked, tmp_path / "anew")
    run_pipeline(plain, stages=STAGES)
    manifest = json.loads((Path(asked.output) / "states" / "manifest.json").read_text())
    found = manifest["conversations_from"]
    assert found["written"] >= 8 and found["target"] <= 2
    for split in ("train", "held_out"):
        kept, read = (StateStore(Path(config.output), split, 2) for config in (asked, plain))
        assert len(kept) == len(read) > 0
        one, other = (dict(zip(rows(part), range(len(part)), strict=True)) for part in (kept, read))
        assert one.keys() == other.keys()
        places = torch.tensor(list(one.values())), torch.tensor([other[row] for row in one])
        assert apart(kept.rows(places[0]).h, read.rows(places[1]).h) < 0.02
        if kept.taps:
            layers = [torch.cat(part.layers)[place] for part, place in zip((kept, read), places, strict=True)]
            assert apart(*layers) < 0.02


def rows(part: StateStore) -> list[tuple[int, int]]:
    conversations, positions = part.where(torch.arange(len(part)))
    return list(zip(conversations.tolist(), positions.tolist(), strict=True))


def test_a_conversation_that_went_on_is_kept_once(asked: FinetuneConfig) -> None:
    run_pipeline(asked, stages=("distil",))
    files = sorted(written_folder(asked).iterdir())
    lines = (Path(asked.output) / "distil.jsonl").read_text().splitlines()
    assert len(files) == len(lines) == 10
    assert all(len(read_ids(file)[0]) > 4 for file in files)


def test_what_the_model_wrote_by_itself_is_kept_as_well(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfdata, "SHARD", 8)
    config = make_config(
        tmp_path / "run", data="self", self_conversations=16, self_new_tokens=20, held_out=0.3, keep_states=True
    )
    config = replace(config, model=writes_letters(Path(config.model), tmp_path / "letters"))
    run_pipeline(config, stages=STAGES)
    manifest = json.loads((Path(config.output) / "states" / "manifest.json").read_text())
    assert manifest["conversations_from"]["written"] > 0


def test_states_that_do_not_fit_are_read_again_and_it_is_said(
    asked: FinetuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(known_module.logger, "warning", said.append)
    run_pipeline(asked, stages=("distil",))
    for file in written_folder(asked).iterdir():
        file.unlink()
    run_pipeline(asked, stages=STAGES)
    assert len(said) == 1 and "reads its texts again" in said[0]
    assert (Path(asked.output) / "states.done.json").exists()


def test_settings_say_what_was_kept_and_nothing_where_nothing_is(asked: FinetuneConfig) -> None:
    keep = keep_of(asked)
    assert keep is not None and settings(asked) == {"kept_states": list(keep.taps)}
    off = replace(asked, keep_states=False)
    assert keep_of(off) is None and settings(off) == {}


def test_a_text_without_states_leaves_no_file(asked: FinetuneConfig) -> None:
    store(asked, "distil", 3, Written(key=3, text="x", tokens=1, finished=True, loops=False))
    assert not written_folder(asked).exists()
    states = torch.ones(2, 1, 8, dtype=torch.bfloat16)
    store(
        asked, "distil", 3, Written(key=3, text="x", tokens=1, finished=True, loops=False, read=(4, 5), states=states)
    )
    (file,) = written_folder(asked).iterdir()
    assert file.name == "distil-0000003.safetensors" and read_ids(file)[0].tolist() == [4, 5] and IDS


def test_it_is_refused_where_the_target_writes_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_states must be off unless the target writes texts"):
        make_config(tmp_path / "run", keep_states=True)
