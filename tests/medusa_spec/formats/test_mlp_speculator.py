"""Published MLP speculators give the logits that their own code computes, tied or not."""

import math
import warnings

import pytest
import torch

from medusa_spec import MedusaModel, TreeTemplate
from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import load_heads
from medusa_spec.errors import CheckpointError
from medusa_spec.formats.mlp_speculator import mlp_speculator_layout
from medusa_spec.testing import tiny

H, V, K, INNER = 32, 128, 3, 20
CONFIG = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "emb_dim": H,
    "inner_dim": INNER,
    "n_predict": K,
    "scale_input": True,
    "tie_weights": False,
    "vocab_size": V,
}
ONCE = ("emb.0", "proj.0", "proj.1", "ln.0", "head.0")
TREE = TreeTemplate(paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


def shapes(inner=INNER, prefix="speculator.", heads=K):
    found = {}
    for i in range(heads):
        found |= {f"emb.{i}.weight": (V, inner), f"proj.{i}.weight": (inner, inner if i else H)}
        found |= {f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,), f"head.{i}.weight": (V, inner)}
    return {prefix + name: shape for name, shape in found.items()}


def tied(tensors, *, once=False, prefix="speculator."):
    """The same with every tied tensor a copy of the first, or written once."""
    found = {}
    for name in tensors:
        part, head, end = name.removeprefix(prefix).split(".")
        first = min(int(head), 1 if part == "proj" else 0)
        if not once or int(head) == first:
            found[name] = tensors[f"{prefix}{part}.{first}.{end}"].clone()
    return found


def reference(tensors, h, tokens, *, scale_input, prefix="speculator.", heads=K):
    """The paper's recurrence: a weighted sum of the projected state and the token's own vector, normed, GELU."""

    def norm(x):
        return x / (x.square().mean() + 1e-6).sqrt()

    def part(name, i):
        return tensors[f"{prefix}{name.replace('?', str(i))}"]

    state, logits = norm(h) / math.sqrt(2) if scale_input else h, []
    inner = part("proj.0.weight", 0).shape[0]
    state_weight = 0.5 ** (0.5 / heads)
    emb_weight = math.sqrt((1 - state_weight**2) * inner / 2)
    for i in range(heads):
        projected = part("proj.?.weight", i) @ state
        mixed = projected + part("emb.?.weight", i)[tokens[i]] * emb_weight / state_weight
        x = norm(mixed) * part("ln.?.weight", i) + part("ln.?.bias", i)
        state = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        logits.append(part("head.?.weight", i) @ state)
    return torch.stack(logits)


def same(heads, tensors, **settings):
    h, tokens = 3 * torch.randn(H, dtype=torch.float64), torch.tensor([5, 99, 41])
    torch.testing.assert_close(heads(h, tokens), reference(tensors, h, tokens, **settings), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["speculator.", ""])
@pytest.mark.parametrize("inner", [INNER, H, 48])
@pytest.mark.parametrize("scale_input", [True, False])
def test_heads_give_their_own_logits(scale_input, inner, prefix, file, randoms, write, target):
    tensors = randoms(shapes(inner, prefix))
    settings = {"scale_input": scale_input, "inner_dim": 0 if inner == H else inner}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heads, config = load_heads(write(tensors, CONFIG | settings, file=file), target)
    assert config.training["format"] == "MLP speculator" and config.tree is None
    same(heads, tensors, scale_input=scale_input, prefix=prefix)


@pytest.mark.parametrize("once", [True, False])
def test_tied_heads_are_one_set_however_often_they_are_written(once, randoms, write, load):
    tensors = randoms(shapes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heads = load(write(tied(tensors, once=once), CONFIG | {"tie_weights": True}))
    assert heads.config.num_heads == K and len(heads.heads) == 1
    same(heads, tied(tensors), scale_input=True)


def test_tied_heads_written_once_need_not_be_called_so(randoms, write, load):
    tensors = randoms(shapes())
    heads = load(write(tied(tensors, once=True), {"n_predict": K, "scale_input": True}))
    same(heads, tied(tensors), scale_input=True)


def test_a_target_that_scales_embeddings_or_logits_gives_the_same_guesses(randoms, write):
    backbone = Backbone(tiny("gemma2"))
    assert backbone.embedding().scale != 1.0 and backbone.projection().softcap is not None
    tensors = randoms(shapes())
    heads, _ = load_heads(write(tensors, CONFIG), backbone)
    h, tokens = torch.randn(H, dtype=torch.float64), torch.tensor([5, 99, 41])
    expected = heads.projection.finish(reference(tensors, h, tokens, scale_input=True))
    torch.testing.assert_close(heads(h, tokens), expected)


@pytest.mark.parametrize("is_tied", [True, False])
def test_heads_draft_what_their_logits_say(is_tied, randoms, write, base):
    tensors = tied(randoms(shapes())) if is_tied else randoms(shapes())
    folder = write(tensors, CONFIG | {"tie_weights": is_tied})
    model = MedusaModel.from_pretrained(base, heads=folder, tree=TreeTemplate(paths=((0,), (0, 0), (0, 0, 0))))
    h, guesses = torch.randn(H, dtype=torch.float64), [7]
    for i in range(K):
        tokens = torch.tensor([*guesses, 0, 0, 0])
        guesses.append(int(reference(tensors, h, tokens, scale_input=True)[i].argmax()))
    assert list(model.drafter.begin([]).draft(7, h, None).tokens) == guesses


@pytest.mark.parametrize("is_tied", [True, False])
def test_they_decode_by_the_public_call_as_trees_too(is_tied, randoms, write, decodes, tmp_path):
    tensors = tied(randoms(shapes()), once=True) if is_tied else randoms(shapes())
    folder = write(tensors, CONFIG | {"tie_weights": is_tied})
    decodes(folder)
    model = decodes(folder, tree=TREE)
    model.save_pretrained(tmp_path / "ours")
    again = MedusaModel(model.detach(), tmp_path / "ours")
    h, tokens = torch.randn(H, dtype=torch.float64), torch.tensor([5, 99, 41])
    assert again.heads.config == model.heads.config
    assert torch.equal(again.heads(h, tokens), model.heads(h, tokens))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_dtype_of_16_bits_or_more_is_read(dtype, randoms, write, load):
    tensors = {name: tensor.to(dtype) for name, tensor in randoms(shapes()).items()}
    same(load(write(tensors, CONFIG)), {name: tensor.double() for name, tensor in tensors.items()}, scale_input=True)


def test_a_config_that_counts_otherwise_is_not_believed(randoms, write, load):
    folder = write(randoms(shapes()), CONFIG | {"n_predict": 5, "inner_dim": 24})
    with pytest.warns(UserWarning) as warned:
        assert load(folder).config.num_heads == K
    said = "".join(str(warning.message) for warning in warned)
    assert "n_predict = 5, the tensors are those of 3 heads" in said
    assert "inner_dim = 24, the tensors are those of 20 inner entries" in said


def rename(old, new):
    def change(tensors):
        tensors[f"speculator.{new}"] = tensors.pop(f"speculator.{old}")

    return change


MISFITS = {
    "no-head": (lambda t: t.pop("speculator.head.2.weight"), {}, r"must hold 15 tensors, got 14: missing \['head\.2"),
    "no-shift": (lambda t: t.pop("speculator.ln.1.bias"), {}, r"missing \['ln\.1\.bias'\]"),
    "surplus": (lambda t: t.update(extra=torch.ones(1)), {}, r"got 16: missing \[\], surplus \['extra'\]"),
    "gap": (rename("emb.1.weight", "emb.4.weight"), {}, r"heads must be numbered 0\.\.2, .* got \[0, 2, 4\]"),
    "biased": (lambda t: t.update({"speculator.proj.0.bias": torch.ones(INNER)}), {}, r"surplus \['proj\.0\.bias'\]"),
    "other-target": (
        lambda t: t.update({"speculator.proj.0.weight": torch.ones(INNER, H + 2)}),
        {},
        r"speculator\.proj\.0\.weight must have shape \(20, 32\) for this target, got \(20, 34\)",
    ),
    "other-vocabulary": (
        lambda t: t.update({"speculator.emb.1.weight": torch.ones(V + 8, INNER)}),
        {},
        r"emb\.1\.weight must have shape \(128, 20\) for this target, got \(136, 20\)",
    ),
    "not-tied": (
        lambda t: None,
        {"tie_weights": True},
        r"emb\.1\.weight must be a copy of .*emb\.0\.weight, .* differ",
    ),
    "no-config": (
        lambda t: None,
        {"n_predict": None, "scale_input": None},
        "says scale_input, true or false, got None",
    ),
    "not-finite": (lambda t: t["speculator.ln.0.bias"].fill_(float("nan")), {}, r"ln\.0\.bias is not finite"),
}


@pytest.mark.parametrize(("change", "config", "named"), MISFITS.values(), ids=list(MISFITS))
def test_what_does_not_fit_is_named(change, config, named, randoms, write, load):
    tensors = randoms(shapes())
    change(tensors)
    with pytest.raises(CheckpointError, match=named):
        load(write(tensors, CONFIG | config))


def test_tied_heads_written_once_are_counted_by_the_config_alone(randoms, write, load):
    tensors = tied(randoms(shapes()), once=True)
    with pytest.raises(CheckpointError, match="must say n_predict, 2 or more, .* got None"):
        load(write(tensors, CONFIG | {"tie_weights": True, "n_predict": None}))
    with pytest.raises(CheckpointError, match="says that heads are not tied, and there are 1 emb and 2 proj"):
        load(write(tensors, CONFIG))


def test_the_format_is_named_by_its_tensors(names):
    layout = mlp_speculator_layout(names(*shapes()))
    assert (layout.format, layout.kind, layout.num_heads) == ("MLP speculator", "mlp_speculator", K)
    assert layout.names["heads.2.later.weight"] == "speculator.proj.2.weight"
    assert mlp_speculator_layout(names("head.0.weight", "model.norm.weight")) is None
