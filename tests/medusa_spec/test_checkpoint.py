import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_spec import checkpoint, files
from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    heads_folder,
    load_heads,
    names_heads,
    packaged_heads,
    read_config,
    save_heads,
    target_of,
)
from medusa_spec.config import MedusaConfig
from medusa_spec.errors import CheckpointError
from medusa_spec.heads import HeadsConfig, MedusaHeads, make_heads
from medusa_spec.testing import tiny

H, V = 32, 128
DRAFT = torch.tensor([1, 5, 9, 70, 127])
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone(tiny("llama"))


def trained(backbone: Backbone, lm_head: str = "shared", *, draft: bool = True) -> tuple[MedusaHeads, MedusaConfig]:
    """Random heads of a target, in float64, and their config."""
    ids = DRAFT if draft else None
    config = HeadsConfig(
        hidden_size=H,
        vocab_size=V,
        num_heads=2,
        rank=3,
        lm_head=lm_head,
        draft_vocab_size=len(DRAFT) if draft else None,
    )
    heads = MedusaHeads(config, backbone.projection().rows(ids), ids).double()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return heads, MedusaConfig(heads=config, base_model_name_or_path="org/base", lm_head_hash=backbone.lm_head_hash())


@pytest.fixture
def saved(backbone: Backbone, tmp_path: Path) -> Path:
    """A folder of heads with a draft vocabulary."""
    save_heads(tmp_path / "heads", *trained(backbone))
    return tmp_path / "heads"


def change_state(folder: Path, change: Callable[[State], Any]) -> None:
    state = load_file(folder / WEIGHTS_NAME)
    change(state)
    save_file(state, folder / WEIGHTS_NAME)


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / CONFIG_NAME).read_text())
    config["heads"].update(values)
    (folder / CONFIG_NAME).write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("draft", [False, True], ids=["all", "draft"])
@pytest.mark.parametrize("lm_head", ["shared", "own", "low_rank"])
def test_saved_heads_load_bit_for_bit(
    backbone: Backbone, tmp_path: Path, lm_head: str, draft: bool, dtype: torch.dtype
) -> None:
    heads, config = trained(backbone, lm_head, draft=draft)
    heads.to(dtype)
    heads.projection = heads.projection.to(dtype)
    save_heads(tmp_path, heads, config, dtype=dtype)
    loaded, loaded_config = load_heads(tmp_path, backbone, dtype=dtype)
    assert loaded_config == config
    assert loaded.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in heads.state_dict().items())
    h = torch.randn(3, H).to(dtype)
    assert torch.equal(loaded(h), heads(h))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("hydra", {}),
        ("mlp_speculator", {"tied": True, "own_embedding": True, "inner_size": 5}),
        ("recurrent", {}),
        ("recurrent", {"tied": False}),
    ],
)
def test_heads_of_every_family_load_bit_for_bit(
    backbone: Backbone, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    sizes = HeadsConfig(hidden_size=H, vocab_size=V, kind=kind, num_heads=3, lm_head="own", options=options)
    heads = make_heads(sizes, backbone.projection(), None, backbone.embedding()).double()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    save_heads(tmp_path, heads, MedusaConfig(heads=sizes), dtype=torch.float64)
    loaded, config = load_heads(tmp_path, backbone)
    assert config.heads == sizes
    h, tokens = torch.randn(4, H, dtype=torch.float64), torch.randint(0, V, (4, 3))
    assert torch.equal(loaded(h, tokens), heads(h, tokens))
    if options.get("tied", kind == "recurrent"):
        assert not any(name.startswith("heads.1.") for name in load_file(tmp_path / WEIGHTS_NAME))


def test_options_that_the_family_does_not_know_are_named(backbone: Backbone, saved: Path) -> None:
    change_config(saved, options={"tied": True})
    with pytest.raises(CheckpointError, match=r"options of medusa heads must be among \[\], got 'tied'"):
        load_heads(saved, backbone)


def test_heads_are_stored_in_bfloat16_and_load_frozen_in_the_targets_dtype(backbone: Backbone, saved: Path) -> None:
    state = load_file(saved / WEIGHTS_NAME)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16, torch.long}
    assert not any("projection" in name for name in state)
    heads, _ = load_heads(saved, backbone)
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.float64}
    assert not any(parameter.requires_grad for parameter in heads.parameters())
    assert not heads.training and heads.projection.weight.dtype == torch.float64


MISFITS: dict[str, tuple[Callable[[State], Any], str]] = {
    "missing": (lambda state: state.pop("heads.1.blocks.0.linear.bias"), r"missing \['heads\.1\.blocks\.0\.linear\.bi"),
    "surplus": (lambda state: state.update(extra=torch.ones(2)), r"must hold 5 tensors, got 6: .*surplus \['extra'\]"),
    "shape": (
        lambda state: state.update({"heads.0.blocks.0.linear.weight": torch.ones(H, H + 1)}),
        r"heads\.0\.blocks\.0\.linear\.weight must have shape \(32, 32\), got \(32, 33\)",
    ),
    "empty": (
        lambda state: state.update({"heads.0.blocks.0.linear.weight": torch.ones(0)}),
        r"must have shape \(32, 32\), got \(0,\)",
    ),
    "not-finite": (lambda state: state["heads.0.blocks.0.linear.bias"].fill_(float("nan")), "bias is not finite"),
    "no-draft-ids": (lambda state: state.pop("draft_ids"), "draft_vocab_size: it is 5, and draft_ids are missing"),
    "too-few-draft-ids": (lambda state: state.update(draft_ids=DRAFT[:3].clone()), r"must be 5 int64 .* shape \(3,\)"),
    "empty-draft-ids": (lambda state: state.update(draft_ids=DRAFT[:0].clone()), r"must be 5 int64 .* shape \(0,\)"),
    "draft-ids-past-the-end": (lambda state: state.update(draft_ids=DRAFT + 1), r"in 0\.\.127, got .* in 2\.\.128"),
    "negative-draft-ids": (lambda state: state.update(draft_ids=DRAFT - 2), r"in 0\.\.127, got .* in -1\.\.125"),
    "draft-ids-that-are-no-ids": (lambda state: state.update(draft_ids=DRAFT.float()), r"int64 .* of torch\.float32"),
}


@pytest.mark.parametrize(("change", "named"), MISFITS.values(), ids=list(MISFITS))
def test_tensors_that_do_not_fit_are_named(
    backbone: Backbone, saved: Path, change: Callable[[State], Any], named: str
) -> None:
    change_state(saved, change)
    with pytest.raises(CheckpointError, match=named):
        load_heads(saved, backbone)


def test_draft_ids_that_the_config_does_not_know_are_refused(backbone: Backbone, saved: Path) -> None:
    change_config(saved, draft_vocab_size=None)
    with pytest.raises(CheckpointError, match="it is None, and draft_ids are there"):
        load_heads(saved, backbone)


@pytest.mark.parametrize(("name", "own"), [("hidden_size", H), ("vocab_size", V)])
def test_heads_of_another_model_are_refused_with_both_numbers(
    backbone: Backbone, saved: Path, name: str, own: int
) -> None:
    change_config(saved, **{name: own + 8})
    with pytest.raises(CheckpointError, match=f"{name} {own + 8}, the target has {own}.*org/base"):
        load_heads(saved, backbone)


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"\xff" * 8 + data[8:]],
    ids=["truncated", "emptied", "tampered"],
)
def test_a_damaged_file_is_named(backbone: Backbone, saved: Path, damage: Callable[[bytes], bytes]) -> None:
    path = saved / WEIGHTS_NAME
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=f"{WEIGHTS_NAME} cannot be read"):
        load_heads(saved, backbone)


def test_a_missing_file_is_named(backbone: Backbone, saved: Path) -> None:
    (saved / WEIGHTS_NAME).unlink()
    with pytest.raises(CheckpointError, match=f"{WEIGHTS_NAME} cannot be read"):
        load_heads(saved, backbone)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "{}"])
def test_a_config_that_is_none_is_refused(saved: Path, text: str) -> None:
    (saved / CONFIG_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=r"cannot be read|JSON object|format_version"):
        read_config(saved)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_heads_that_are_not_finite_are_not_saved(backbone: Backbone, tmp_path: Path, bad: float) -> None:
    heads, config = trained(backbone)
    with torch.no_grad():
        heads.heads[1].blocks[0].linear.bias[3] = bad
    with pytest.raises(CheckpointError, match=r"heads\.1\.blocks\.0\.linear\.bias is empty or not finite"):
        save_heads(tmp_path / "heads", heads, config)
    assert not (tmp_path / "heads").exists()


def test_an_empty_tensor_is_not_saved(backbone: Backbone, tmp_path: Path) -> None:
    heads, config = trained(backbone)
    heads.heads[0].blocks[0].linear.bias = torch.nn.Parameter(torch.ones(0))
    with pytest.raises(CheckpointError, match="bias is empty"):
        save_heads(tmp_path / "heads", heads, config)


@pytest.mark.parametrize("fails", ["while-writing", "while-renaming"])
def test_an_interrupted_write_leaves_the_old_file(
    backbone: Backbone, saved: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def interrupted(*args: Any, **kwargs: Any) -> None:
        if fails == "while-writing":
            Path(args[1]).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(*((files, "save_file") if fails == "while-writing" else (files.os, "replace")), interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_heads(saved, *trained(backbone), model_card="new")
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_saving_again_replaces_heads_and_leaves_other_files(backbone: Backbone, saved: Path) -> None:
    (saved / "README.md").write_text("mine")
    (saved / "notes.txt").write_text("mine")
    heads, config = trained(backbone, "low_rank", draft=False)
    save_heads(saved, heads, config)
    assert load_heads(saved, backbone)[1] == config
    assert (saved / "README.md").read_text() == (saved / "notes.txt").read_text() == "mine"
    save_heads(saved, heads, config, model_card="# Grüße\n")
    assert (saved / "README.md").read_text(encoding="utf-8") == "# Grüße\n"


def test_heads_of_the_same_lm_head_load_in_silence_and_others_with_a_warning(backbone: Backbone, saved: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_heads(saved, backbone)
    other = Backbone(tiny("llama", seed=1))
    with pytest.warns(UserWarning, match="org/base with another LM head"):
        load_heads(saved, other)


def test_heads_are_found_by_path_by_packaged_name_or_not_at_all(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PACKAGED", tmp_path / "packaged")
    assert packaged_heads() == []
    shutil.copytree(saved, tmp_path / "packaged" / "small")
    assert packaged_heads() == ["small"]
    assert heads_folder(saved) == saved and heads_folder("small") == tmp_path / "packaged" / "small"
    assert names_heads(str(saved)) and names_heads("small") and not names_heads("org/large")
    with pytest.raises(CheckpointError, match=r"one of \['small'\], got 'org/large'"):
        heads_folder("org/large")
    with pytest.raises(CheckpointError, match=f"folder with a {CONFIG_NAME}"):
        heads_folder(tmp_path)


@pytest.mark.parametrize("ids", [[1, 5, 9, 70, 70], [5, 1, 9, 70, 127]], ids=["double", "unsorted"])
def test_draft_ids_that_do_not_rise_are_refused(backbone: Backbone, saved: Path, ids: list[int]) -> None:
    change_state(saved, lambda state: state.update(draft_ids=torch.tensor(ids)))
    with pytest.raises(CheckpointError, match="draft_ids must rise"):
        load_heads(saved, backbone)


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", ""])
def test_what_can_be_no_name_names_no_heads(name: str) -> None:
    assert not names_heads(name)


def test_a_file_of_heads_is_asked_for_by_its_folder(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file: give its folder"):
        heads_folder(saved / WEIGHTS_NAME)


def test_heads_name_their_target_or_it_has_to_be_given(backbone: Backbone, saved: Path, tmp_path: Path) -> None:
    assert target_of("any name", saved) == ("org/base", None)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    tensors = {"0.0.linear.weight": torch.ones(H, H), "0.0.linear.bias": torch.ones(H)}
    save_file(tensors, foreign / "x.safetensors")
    with pytest.raises(CheckpointError, match="do not name their target"):
        target_of("any name", foreign)
    (foreign / "config.json").write_text('{"base_model_name_or_path": "org/other"}')
    assert target_of("any name", foreign) == ("org/other", None)
    inside = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    save_file(inside | {"model.norm.weight": torch.ones(H)}, foreign / "x.safetensors")
    assert target_of("any name", foreign) == ("any name", None)


def test_our_own_folder_is_read_strictly_whatever_foreign_files_lie_in_it(backbone: Backbone, saved: Path) -> None:
    foreign = {"0.0.linear.weight": torch.ones(H, H), "0.0.linear.bias": torch.ones(H)}
    save_file(foreign, saved / "medusa_lm_head.safetensors")
    assert load_heads(saved, backbone)[0].config.draft_vocab_size == len(DRAFT)
    save_file(foreign, saved / WEIGHTS_NAME)
    with pytest.raises(CheckpointError, match="draft_ids are missing"):
        load_heads(saved, backbone)
