"""What an engine gets is what was trained: read back, compared, or not there."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from medusa_spec import MedusaModel, export, export_heads
from medusa_spec.errors import CheckpointError, ConfigError, UnsupportedError
from medusa_spec.export import FORMATS
from medusa_spec.finetune.lora import adapt_heads
from medusa_spec.formats.medusa_export import universal_medusa
from medusa_spec.heads import DraftHeads, HeadsConfig, make_heads
from medusa_spec.testing import tiny

H, V = 32, 128
DRAFT = torch.tensor([1, 5, 9, 40, 70, 99, 127])
EAGLE3 = {"taps": "1,2,4", "from_h": False}


def wrapped(
    kind: str = "medusa", *, of: str = "llama", draft=None, dtype=torch.float64, seed=0, **config
) -> MedusaModel:
    """A tiny target with random heads."""
    target = tiny(of, num_hidden_layers=6 if kind == "eagle3" else 2, dtype=dtype)
    target.config.name_or_path = "org/base"
    model = MedusaModel(target, drafter="ngram", probe=False, prepare=False)
    sizes = HeadsConfig(
        hidden_size=H,
        vocab_size=V,
        kind=kind,
        draft_vocab_size=None if draft is None else len(draft),
        **{"num_heads": 3, **config},
    )
    backbone = model.backbone
    heads = make_heads(sizes, backbone.projection().rows(draft), draft, backbone.embedding()).to(dtype)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.detach()
    return MedusaModel(target, heads, probe=False, prepare=False)


CASES = {
    "shared": {},
    "shared, draft vocabulary": {"draft": DRAFT},
    "own": {"lm_head": "own"},
    "own, draft vocabulary": {"lm_head": "own", "draft": DRAFT},
    "low rank": {"lm_head": "low_rank", "rank": 3},
    "two blocks": {"num_layers": 2, "draft": DRAFT},
    "gemma, soft-cap": {"of": "gemma2", "draft": DRAFT},
}


@pytest.mark.parametrize("to", ["vllm", "original"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_exported_medusa_heads_draft_what_the_heads_draft(case, to, tmp_path: Path) -> None:
    model = wrapped(**case)
    report = export_heads(model, tmp_path / "out", to=to)
    assert report.same_guesses and report.difference < 1e-6
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "medusa_lm_head.safetensors"]
    h = torch.randn(40, H, dtype=torch.float64)
    expected = model.heads(h).argmax(-1)
    again = MedusaModel(model.detach(), tmp_path / "out", probe=False, prepare=False).heads
    assert torch.equal(again(h).argmax(-1), expected if "draft" not in case else DRAFT[expected])


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("eagle", {}),
        ("eagle", {"draft": DRAFT}),
        ("eagle", {"of": "gemma2"}),  # whose embeddings have a factor
        ("eagle3", {"options": EAGLE3}),
        ("eagle3", {"options": EAGLE3 | {"norm_before_residual": True}, "draft": DRAFT}),
        ("eagle3", {"options": EAGLE3, "lm_head": "own", "draft": DRAFT}),
    ],
)
def test_exported_heads_that_attend_draft_what_the_heads_draft(kind, case, tmp_path: Path) -> None:
    model = wrapped(kind, **case)
    report = export_heads(model, tmp_path / "out")
    assert report.difference < 1e-5
    assert report.same_guesses == (kind == "eagle3" or "draft" not in case)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["base_model_name_or_path"] == "org/base"


def test_bfloat16_heads_go_unchanged(tmp_path: Path) -> None:
    model = wrapped(dtype=torch.bfloat16, draft=DRAFT)
    assert export_heads(model, tmp_path / "out").difference < 1e-5  # products of other shapes sum otherwise
    tensors = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    kept = [tensor for tensor in model.heads.state_dict().values() if tensor.is_floating_point()]
    blocks = [tensor for name, tensor in tensors.items() if ".linear." in name]
    assert blocks and all(any(torch.equal(tensor, own) for own in kept) for tensor in blocks)


@pytest.mark.parametrize("to", list(FORMATS))
def test_the_active_adapter_of_heads_goes_along(to, tmp_path: Path) -> None:
    model = wrapped(draft=DRAFT)
    h = torch.randn(40, H, dtype=torch.float64)
    plain = model.heads(h)
    adapt_heads(model.heads, rank=2, alpha=4.0, seed=0)
    for name, parameter in model.heads.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.3
    expected = model.heads(h)
    assert not torch.equal(expected.argmax(-1), plain.argmax(-1))
    assert export_heads(model, tmp_path / "out", to=to).difference < 1e-5
    again = MedusaModel(model.detach(), tmp_path / "out", probe=False, prepare=False).heads(h)
    torch.testing.assert_close(again if to == "vllm-class" else again[..., DRAFT], expected, rtol=1e-6, atol=1e-6)


def test_an_adapter_of_the_target_is_told(tmp_path: Path) -> None:
    target = get_peft_model(tiny("llama"), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    target.get_base_model().config.name_or_path = "org/base"
    model = MedusaModel(target, probe=False, prepare=False)
    assert "with its adapter" in " ".join(export_heads(model, tmp_path / "out").notes)


def test_families_that_no_engine_knows_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="'vllm' carries medusa, eagle, eagle3 heads, got fused heads"):
        export_heads(wrapped("fused"), tmp_path / "out")
    with pytest.raises(UnsupportedError, match="'original' carries medusa heads, got eagle heads"):
        export_heads(wrapped("eagle"), tmp_path / "out", to="original")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_and_absent_heads_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="to must be one of vllm, vllm-class, original, got 'onnx'"):
        export_heads(wrapped(), tmp_path / "out", to="onnx")
    with pytest.raises(ConfigError, match="no heads to export: the drafter is 'ngram'"):
        export_heads(MedusaModel(tiny("llama"), drafter="ngram", probe=False, prepare=False), tmp_path / "out")


def test_heads_must_name_their_target(tmp_path: Path) -> None:
    model = MedusaModel(tiny("llama"), probe=False, prepare=False)
    with pytest.raises(ConfigError, match="must name their target"):
        export_heads(model, tmp_path / "out")


def test_an_earlier_export_is_replaced_and_nothing_else_ever_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_heads(wrapped(), out)
    before = load_file(out / "medusa_lm_head.safetensors")
    export_heads(wrapped(seed=1), out)
    assert not torch.equal(
        load_file(out / "medusa_lm_head.safetensors")["0.0.linear.weight"], before["0.0.linear.weight"]
    )
    save_file({"weight": torch.ones(2)}, out / "model.safetensors")  # an engine would read it, too
    with pytest.raises(ConfigError, match=r"must be new, empty or an earlier export, got \['config.json', 'medusa_lm"):
        export_heads(wrapped(), out)
    assert (out / "model.safetensors").is_file()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="must be new, empty or an earlier export"):
        export_heads(wrapped(), tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]  # no temporary folder is left


def spoil(change):
    """A writer whose tensors were changed on the way."""

    def write(heads: DraftHeads, backbone):
        exported = universal_medusa(heads, backbone)
        change(exported.tensors)
        return exported

    return write


FAULTS = {
    "a bias lost": (lambda t: t["1.0.linear.bias"].zero_(), "logits of the export must be those of the heads"),
    "a head mixed up": (lambda t: t["1.0.linear.weight"].copy_(t["2.0.linear.weight"]), "logits of the export must be"),
    "rows outside too large": (lambda t: t["0.1.weight"][0].fill_(9.0), "first guesses of the export must be those"),
}


@pytest.mark.parametrize(("change", "named"), FAULTS.values(), ids=list(FAULTS))
def test_what_reads_back_otherwise_is_not_there(change, named, tmp_path: Path, monkeypatch) -> None:
    model = wrapped(draft=DRAFT)
    monkeypatch.setitem(export.FORMATS, "vllm", {"medusa": spoil(change)})
    with pytest.raises(CheckpointError, match=named):
        export_heads(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_its_reader_warns_about_is_not_there(tmp_path: Path, monkeypatch) -> None:
    def wrong_count(heads, backbone):
        exported = universal_medusa(heads, backbone)
        exported.config["medusa_num_heads"] = 5
        return exported

    monkeypatch.setitem(export.FORMATS, "vllm", {"medusa": wrong_count})
    with pytest.raises(CheckpointError, match="reads otherwise than it was written: .*medusa_num_heads = 5"):
        export_heads(wrapped(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_formats_are_those_of_the_command() -> None:
    from medusa_spec.cli.app import To

    assert [choice.value for choice in To] == list(FORMATS)


def test_heads_go_with_the_adapter_of_theirs_that_is_active(tmp_path: Path) -> None:
    model = wrapped(dtype=torch.float32)
    alone = export_heads(model, tmp_path / "alone")
    get_peft_model(model.heads, LoraConfig(r=2, target_modules=["linear"], init_lora_weights=False))
    adapted = export_heads(model, tmp_path / "adapted")
    assert alone.same_guesses and adapted.same_guesses
    stored = [next(iter(sorted((tmp_path / name).glob("*.safetensors")))) for name in ("alone", "adapted")]
    first, second = (load_file(path) for path in stored)
    assert first.keys() == second.keys()
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_it_is_told_that_the_target_must_be_the_adapted_one(tmp_path: Path) -> None:
    model = wrapped(dtype=torch.float32)
    model.target_adapter = tmp_path
    assert any("for the target with its adapter" in note for note in export_heads(model, tmp_path / "out").notes)
