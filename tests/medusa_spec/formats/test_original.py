"""Published Medusa heads give the logits that their own code computes, wherever they are kept."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from medusa_spec import MedusaModel
from medusa_spec.checkpoint import load_heads, names_heads
from medusa_spec.errors import CheckpointError
from medusa_spec.formats.original import original_layout
from medusa_spec.testing import tiny

H, V, K = 32, 128, 3
PREFIXES = {"": "Medusa", "medusa_head.": "Medusa full model", "medusa_heads.": "ModelOpt Medusa"}


def shapes(*, layers=1, heads=K, prefix="", lm_heads=True):
    found = {}
    for i in range(heads):
        for j in range(layers):
            found |= {f"{prefix}{i}.{j}.linear.weight": (H, H), f"{prefix}{i}.{j}.linear.bias": (H,)}
        if lm_heads:
            found[f"{prefix}{i}.{layers}.weight"] = (V, H)
    return found


def reference(tensors, h, *, layers=1, prefix="", lm_head=None):
    """What the authors' code computes: blocks x + SiLU(W x + b), then the head's LM head, or the target's."""
    logits = []
    for i in range(K):
        z = h
        for j in range(layers):
            weight, bias = (tensors[f"{prefix}{i}.{j}.linear.{part}"] for part in ("weight", "bias"))
            z = z + torch.nn.functional.silu(z @ weight.T + bias)
        logits.append(z @ (tensors[f"{prefix}{i}.{layers}.weight"] if lm_head is None else lm_head).T)
    return torch.stack(logits)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "any name.bin"])
@pytest.mark.parametrize("layers", [1, 3])
def test_heads_give_their_own_logits(layers, file, randoms, write, load):
    tensors = randoms(shapes(layers=layers))
    heads = load(write(tensors, {"medusa_num_heads": K, "medusa_num_layers": layers}, file=file))
    h = torch.randn(5, H, dtype=torch.float64)
    torch.testing.assert_close(heads(h), reference(tensors, h, layers=layers))


@pytest.mark.parametrize("prefix", list(PREFIXES))
def test_heads_without_lm_heads_read_the_targets(prefix, randoms, write, load, target):
    tensors = randoms(shapes(layers=2, lm_heads=False, prefix=prefix))
    heads = load(write(tensors, {"version": "2"}))
    h = torch.randn(5, H, dtype=torch.float64)
    expected = reference(tensors, h, layers=2, prefix=prefix, lm_head=target.lm_head.weight)
    torch.testing.assert_close(heads(h), expected)
    assert heads.config.lm_head == "shared" and not any("lm_head" in name for name in heads.state_dict())


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
def test_a_full_model_is_target_and_heads_in_one(prefix, randoms, tmp_path):
    tensors = randoms(shapes(prefix=prefix))
    model = tiny("llama")
    model.save_pretrained(tmp_path, max_shard_size="60kB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    save_file(tensors, tmp_path / "model-heads.safetensors")
    index["weight_map"] |= dict.fromkeys(tensors, "model-heads.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((tmp_path / "config.json").read_text())
    keys = {"medusa_num_heads": K, "medusa_num_layers": 1}
    said = keys if prefix == "medusa_head." else {"medusa": {"num_medusa_heads": K, "num_medusa_layers": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config | said | {"base_model_name_or_path": "org/untuned"}))
    assert names_heads(tmp_path)
    loaded = MedusaModel.from_pretrained(tmp_path)  # target and heads
    h = torch.randn(2, H, dtype=torch.float64)
    torch.testing.assert_close(loaded.heads(h), reference(tensors, h, prefix=prefix))
    assert torch.equal(loaded.target.lm_head.weight, model.lm_head.weight)
    assert loaded.medusa_config.base_model_name_or_path == str(tmp_path)
    ids = torch.tensor([[5, 17, 80]])
    plain = model.generate(ids, do_sample=False, max_new_tokens=9)
    assert torch.equal(loaded.generate(ids, do_sample=False, max_new_tokens=9), plain)


def test_only_the_shards_that_hold_heads_are_opened(randoms, write, load):
    tensors = randoms(shapes(prefix="medusa_head."))
    folder = write(tensors, file="heads-shard.safetensors")
    names = dict.fromkeys(tensors, "heads-shard.safetensors") | {"model.norm.weight": "not-here.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert load(folder).config.num_heads == K


def test_a_full_model_in_one_pickle_is_read_without_its_other_tensors(randoms, write, load):
    tensors = randoms(shapes(prefix="medusa_head.") | {"model.norm.weight": (H,), "lm_head.weight": (V, H)})
    heads = load(write(tensors, file="pytorch_model.bin"))
    h = torch.randn(2, H, dtype=torch.float64)
    torch.testing.assert_close(heads(h), reference(tensors, h, prefix="medusa_head."))


def test_a_target_beside_the_heads_is_left_alone(randoms, write, load):
    tensors = randoms(shapes())
    write(randoms({"model.norm.weight": (H,), "lm_head.weight": (V, H)}), file="model.safetensors")
    h = torch.randn(2, H, dtype=torch.float64)
    torch.testing.assert_close(load(write(tensors, file="medusa_lm_head.pt"))(h), reference(tensors, h))


@pytest.mark.parametrize(("same", "kind"), [(True, "shared"), (False, "own")])
def test_an_lm_head_written_once_is_all_heads(same, kind, randoms, write, load, target):
    tensors = randoms(shapes(lm_heads=False))
    lm_head = target.lm_head.weight.clone() if same else torch.randn(V, H, dtype=torch.float64)
    config = {"medusa_num_heads": K, "medusa_num_layers": 1, "original_lm_head": True, "medusa_fc_bias": True}
    heads = load(write(tensors | {"0.1.weight": lm_head}, config, file="medusa_lm_head.safetensors"))
    h = torch.randn(5, H, dtype=torch.float64)
    torch.testing.assert_close(heads(h), reference(tensors, h, lm_head=lm_head))
    assert heads.config.lm_head == kind


@pytest.mark.parametrize(("key", "said", "counted"), [("medusa_num_heads", 2, 3), ("medusa_num_layers", 4, 1)])
def test_a_config_that_counts_otherwise_is_not_believed(key, said, counted, randoms, write, load):
    folder = write(randoms(shapes()), {key: said})
    with pytest.warns(UserWarning, match=f"{key} = {said}, .* {counted} "):
        heads = load(folder)
    assert (heads.config.num_heads, heads.config.num_layers) == (K, 1)


def test_a_true_config_is_no_warning(randoms, write, load):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(write(randoms(shapes()), {"medusa_num_heads": K, "medusa_num_layers": 1}))


MISFITS = {
    "a-missing-bias": (
        lambda t: t.pop("1.0.linear.bias"),
        r"must hold 9 tensors, got 8: missing \['1\.0\.linear\.bias",
    ),
    "a-missing-lm-head": (lambda t: t.pop("2.1.weight"), r"must hold 9 tensors, got 8: missing \['2\.1\.weight'\]"),
    "one-lm-head-of-three": (lambda t: [t.pop(f"{i}.1.weight") for i in (1, 2)], r"must hold 9 tensors, got 7"),
    "surplus": (lambda t: t.update(extra=torch.ones(2)), r"must hold 9 tensors, got 10: .* surplus \['extra'\]"),
    "a-gap": (lambda t: [t.pop(n) for n in list(t) if n[0] == "1"], r"heads must be numbered 0\.\.1, .* got \[0, 2\]"),
    "wide": (
        lambda t: t.update({"0.0.linear.weight": torch.ones(48, 48)}),
        r"0\.0\.linear\.weight must have shape \(32, 32\) for this target, got \(48, 48\).*\(org/base\)",
    ),
    "more-rows": (
        lambda t: t.update({"1.1.weight": torch.ones(V + 64, H)}),
        r"1\.1\.weight must have shape \(128, 32\) for this target, got \(192, 32\)",
    ),
    "not-finite": (lambda t: t["0.0.linear.bias"].fill_(float("nan")), r"0\.0\.linear\.bias is not finite"),
    "quantised": (
        lambda t: t.update({"0.0.linear.weight": torch.ones(H, H, dtype=torch.int8)}),
        r"0\.0\.linear\.weight must hold floating-point .* got torch\.int8; quantised",
    ),
}


@pytest.mark.parametrize(("change", "named"), MISFITS.values(), ids=list(MISFITS))
def test_what_does_not_fit_is_named(change, named, randoms, write, load):
    tensors = randoms(shapes())
    change(tensors)
    with pytest.raises(CheckpointError, match=named):
        load(write(tensors, {"base_model_name_or_path": "org/base"}))


@pytest.mark.parametrize("prefix", list(PREFIXES))
def test_the_format_is_named_by_its_tensors(prefix, names):
    layout = original_layout(names(*shapes(prefix=prefix), "beside.weight" if prefix else "0.1.weight"))
    assert layout.format == PREFIXES[prefix] and layout.with_target == bool(prefix)
    assert (layout.num_heads, layout.num_layers) == (K, 1)
    assert layout.names["heads.2.blocks.0.linear.bias"] == f"{prefix}2.0.linear.bias"
    assert original_layout(names("0.linear.weight", "model.layers.0.mlp.weight")) is None


def test_heads_alone_name_their_target_and_become_ours_when_saved(randoms, write, decodes, base, tmp_path):
    tensors = randoms(shapes())
    folder = write(tensors, {"medusa_num_heads": K, "base_model_name_or_path": str(base)}, file="medusa_lm_head.pt")
    model = MedusaModel.from_pretrained(folder)
    h = torch.randn(2, H, dtype=torch.float64)
    torch.testing.assert_close(model.heads(h), reference(tensors, h))
    model.save_pretrained(tmp_path / "ours")
    assert (tmp_path / "ours" / "medusa_config.json").is_file()
    again = MedusaModel.from_pretrained(tmp_path / "ours")
    assert torch.equal(again.heads(h), model.heads(h))
    assert again.medusa_config == model.medusa_config and again.medusa_config.tree is None
    assert again.drafter.template.paths == ((0,), (0, 0), (0, 0, 0))
    decodes(folder)


def test_heads_on_a_target_with_biases_have_none(randoms, write):
    from medusa_spec.backbone import Backbone

    model = tiny("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.randn(V, dtype=torch.float64))
    tensors = randoms(shapes())
    heads, _ = load_heads(write(tensors), Backbone(model))
    h = torch.randn(2, H, dtype=torch.float64)
    torch.testing.assert_close(heads(h), reference(tensors, h))


def test_bfloat16_heads_take_the_targets_dtype(randoms, write, load):
    tensors = {name: tensor.bfloat16() for name, tensor in randoms(shapes()).items()}
    heads = load(write(tensors))
    h = torch.randn(2, H, dtype=torch.float64)
    torch.testing.assert_close(heads(h), reference({name: t.double() for name, t in tensors.items()}, h))


def test_a_folder_without_heads_is_no_foreign_checkpoint(load, base):
    with pytest.raises(CheckpointError, match="holds no heads of a known format: its tensors are"):
        load(Path(base))
