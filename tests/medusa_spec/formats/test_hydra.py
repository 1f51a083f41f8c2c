"""Published Hydra heads give the logits that their own code computes; variants are refused with the reason."""

import warnings

import pytest
import torch

from medusa_spec import MedusaModel, TreeTemplate
from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import load_heads
from medusa_spec.errors import CheckpointError, UnsupportedError
from medusa_spec.formats.hydra import hydra_layout
from medusa_spec.testing import tiny

H, V, K = 32, 128, 3
CONFIG = {"hydra_num_heads": K, "hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}


def shapes(layers=2):
    found = {}
    for i in range(K):
        for module in ("linear", "res_connection"):
            found |= {f"hydra_mlp.{i}.0.{module}.weight": (H, (i + 2) * H), f"hydra_mlp.{i}.0.{module}.bias": (H,)}
        for j in range(1, layers):
            found |= {f"hydra_mlp.{i}.{j}.linear.weight": (H, H), f"hydra_mlp.{i}.{j}.linear.bias": (H,)}
        found |= {f"hydra_lm_head.{i}.weight": (V, H), f"hydra_lm_head.{i}.bias": (V,)}
    return found


def reference(tensors, h, tokens, embedding, layers=2):
    """What the authors' code computes: res_connection(x) + SiLU(linear(x)), blocks, an LM head with bias."""
    logits = []

    def linear(name, x):
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    for i in range(K):
        x = torch.cat([h, *embedding[tokens[: i + 1]]])
        z = linear(f"hydra_mlp.{i}.0.res_connection", x) + torch.nn.functional.silu(
            linear(f"hydra_mlp.{i}.0.linear", x)
        )
        for j in range(1, layers):
            z = z + torch.nn.functional.silu(linear(f"hydra_mlp.{i}.{j}.linear", z))
        logits.append(linear(f"hydra_lm_head.{i}", z))
    return torch.stack(logits)


@pytest.mark.parametrize("file", ["hydra_lm_head.pt", "hydra_lm_head.safetensors"])
@pytest.mark.parametrize("layers", [1, 3])
def test_heads_give_their_own_logits(layers, file, randoms, write, load, target):
    tensors = randoms(shapes(layers))
    embedding = target.model.get_input_embeddings().weight.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = {"input_embed_fn.weight": embedding.clone()}
        heads = load(write(tensors | copy, CONFIG | {"hydra_num_layers": layers}, file=file))
    h, tokens = torch.randn(H, dtype=torch.float64), torch.tensor([5, 99, 41])
    torch.testing.assert_close(heads(h, tokens), reference(tensors, h, tokens, embedding, layers))
    assert not any("embed" in name for name in heads.state_dict())


def test_a_target_that_scales_its_embeddings_gives_the_same_logits(randoms, write):
    backbone = Backbone(tiny("gemma2"))
    embedding = backbone.embedding()
    assert embedding.scale != 1.0
    tensors = randoms(shapes())
    heads, _ = load_heads(write(tensors, CONFIG), backbone)
    h, tokens = torch.randn(H, dtype=torch.float64), torch.tensor([5, 99, 41])
    raw = reference(tensors, h, tokens, embedding.weight)
    torch.testing.assert_close(heads(h, tokens), heads.projection.finish(raw))


def test_heads_draft_what_their_logits_say(randoms, write, base):
    tensors = randoms(shapes())
    model = MedusaModel.from_pretrained(base, heads=write(tensors, CONFIG), tree=TreeTemplate(paths=((0,), (0, 0))))
    h, root = torch.randn(H, dtype=torch.float64), 7
    embedding = model.get_input_embeddings().weight
    first = int(reference(tensors, h, torch.tensor([root, 0, 0]), embedding)[0].argmax())
    second = int(reference(tensors, h, torch.tensor([root, first, 0]), embedding)[1].argmax())
    assert model.drafter.begin([]).draft(root, h, None).tokens[1:] == (first, second)


def test_heads_decode_by_the_public_call(randoms, write, decodes, tmp_path):
    model = decodes(write(randoms(shapes()), CONFIG))
    model.save_pretrained(tmp_path / "ours")
    again = MedusaModel(model.detach(), tmp_path / "ours")
    h, tokens = torch.randn(H, dtype=torch.float64), torch.tensor([5, 99, 41])
    assert torch.equal(again.heads(h, tokens), model.heads(h, tokens))


def test_other_embeddings_than_the_targets_are_a_warning(randoms, write, load):
    folder = write(randoms(shapes() | {"input_embed_fn.weight": (V, H)}), CONFIG)
    with pytest.warns(UserWarning, match="input_embed_fn.weight differs from the target's input embeddings"):
        load(folder)


def test_embeddings_of_another_shape_are_refused(randoms, write, load):
    with pytest.raises(CheckpointError, match=r"the target's input embeddings, \(128, 32\), got \(130, 32\)"):
        load(write(randoms(shapes() | {"input_embed_fn.weight": (V + 2, H)}), CONFIG))


MISFITS = {
    "no-lm-head": (
        lambda t: t.pop("hydra_lm_head.2.weight"),
        r"must hold 24 tensors, got 23: missing \['hydra_lm_head\.2",
    ),
    "no-residual": (
        lambda t: t.pop("hydra_mlp.1.0.res_connection.bias"),
        r"missing \['hydra_mlp\.1\.0\.res_connection\.b",
    ),
    "surplus": (lambda t: t.update(extra=torch.ones(1)), r"got 25: missing \[\], surplus \['extra'\]"),
    "narrow": (
        lambda t: t.update({"hydra_mlp.1.0.linear.weight": torch.ones(H, 2 * H)}),
        r"hydra_mlp\.1\.0\.linear\.weight must have shape \(32, 96\) for this target, got \(32, 64\)",
    ),
}


@pytest.mark.parametrize(("change", "named"), MISFITS.values(), ids=list(MISFITS))
def test_what_does_not_fit_is_named(change, named, randoms, write, load):
    tensors = randoms(shapes())
    change(tensors)
    with pytest.raises(CheckpointError, match=named):
        load(write(tensors, CONFIG))


def test_a_config_that_counts_otherwise_is_not_believed(randoms, write, load):
    folder = write(randoms(shapes()), CONFIG | {"hydra_num_heads": 4})
    with pytest.warns(UserWarning, match="hydra_num_heads = 4, .* 3 heads"):
        assert load(folder).config.num_heads == K


PREFIX_MLP = ["hydra_mlp.0.1.linear.weight", "prefix_embeding_layer.norm.weight", "hydra_lm_head.0.1.weight"]
VARIANTS = {
    "prefix-mlp": (PREFIX_MLP, {}, r"prefix-mlp \(Hydra\+\+\): .* a cache of its own"),
    "ungrounded": (["hydra_mlp.0.0.linear.weight", "hydra_lm_head.0.weight"], {}, "ungrounded: its heads do not see"),
    "other-arch": (list(shapes()), {"hydra_head_arch": "eagle-attn"}, "eagle-attn: only mlp heads"),
    "earlier-layer": (list(shapes()), {"hidden_state_offset": 2}, "hidden_state_offset 2: its heads read an earlier"),
}


@pytest.mark.parametrize(("tensors", "config", "named"), VARIANTS.values(), ids=list(VARIANTS))
def test_variants_are_refused_with_the_reason(tensors, config, named, names):
    with pytest.raises(UnsupportedError, match=f"Hydra heads of the variant {named}.*not supported yet"):
        hydra_layout(names(*tensors, **config))


def test_the_format_is_named_by_its_tensors(names):
    layout = hydra_layout(names(*shapes(3), **CONFIG))
    assert (layout.format, layout.num_heads, layout.num_layers, layout.residual) == ("Hydra", K, 3, "linear")
    assert layout.names["heads.1.blocks.1.linear.bias"] == "hydra_mlp.1.2.linear.bias"
    assert hydra_layout(names("0.0.linear.weight")) is None
