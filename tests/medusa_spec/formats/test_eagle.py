"""Published EAGLE-1 heads give the logits that their own code computes; variants are refused with the reason."""

import warnings

import pytest
import torch

from medusa_spec import MedusaModel, TreeTemplate
from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import load_heads
from medusa_spec.errors import CheckpointError, UnsupportedError
from medusa_spec.formats.eagle import eagle_layout
from medusa_spec.testing import tiny

H, V, HEADS, KV, DIM, INNER = 32, 128, 4, 2, 8, 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "vocab_size": V,
}
TREE = TreeTemplate(paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)))


def shapes(*, bias=True):
    layer = {
        "self_attn.q_proj": (HEADS * DIM, H),
        "self_attn.k_proj": (KV * DIM, H),
        "self_attn.v_proj": (KV * DIM, H),
        "self_attn.o_proj": (H, HEADS * DIM),
        "mlp.gate_proj": (INNER, H),
        "mlp.up_proj": (INNER, H),
        "mlp.down_proj": (H, INNER),
        "post_attention_layernorm": (H,),
    }
    found = {f"layers.0.{name}.weight": shape for name, shape in layer.items()} | {"fc.weight": (H, 2 * H)}
    return found | ({"fc.bias": (H,)} if bias else {})


def reference(tensors, embedding, h, ids, t, steps, draft_by_hand, **sizes):
    """What the authors' code computes behind row t: fc of [embedding, hidden], the layer, its output as it is."""

    def joined(token, hidden):
        x = torch.cat([embedding[token], hidden]) @ tensors["fc.weight"].T
        x = x + tensors["fc.bias"] if "fc.bias" in tensors else x
        return x, x

    text = [joined(ids[row + 1], h[row]) for row in range(t + 1)]
    sizes = {"heads": HEADS, "kv_heads": KV, "theta": 500.0, "eps": 1e-5} | sizes
    return draft_by_hand(tensors, "layers.0.", text, lambda k, feature: joined(ids[t + 1 + k], feature), steps, **sizes)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors", "model.pt"])
@pytest.mark.parametrize("bias", [True, False])
def test_heads_give_their_own_logits(bias, file, randoms, write, target, draft_by_hand):
    tensors = randoms(shapes(bias=bias))
    embedding = target.model.get_input_embeddings().weight.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = {"embed_tokens.weight": embedding.clone()}
        heads, config = load_heads(write(tensors | copy, CONFIG | {"bias": bias}, file=file), target)
    assert config.heads.kind == "eagle" and not any("embed" in name for name in heads.state_dict())
    ids, steps = torch.randint(0, V, (9,)), 4
    h = torch.randn(5, H, dtype=torch.float64)
    tokens = torch.stack([ids[1 + k : 6 + k] for k in range(steps)], dim=-1)
    features = heads.features(h[None], tokens[None], steps=steps)
    for t in range(5):
        expected = reference(tensors, embedding, h, ids, t, steps, draft_by_hand)
        for k in range(steps):
            logits = heads.head(k).logits(features[k][0, t], heads.projection)
            torch.testing.assert_close(logits, target.model.lm_head(expected[k]), rtol=1e-9, atol=1e-9)


def test_a_target_that_scales_its_embeddings_gives_the_same_features(randoms, write, draft_by_hand):
    backbone = Backbone(tiny("gemma2"))
    embedding = backbone.embedding()
    assert embedding.scale != 1.0
    tensors = randoms(shapes())
    heads, _ = load_heads(write(tensors, CONFIG), backbone)
    h, ids = torch.randn(4, H, dtype=torch.float64), torch.randint(0, V, (6,))
    features = heads.features(h[None], torch.stack([ids[1:5], ids[2:6]], dim=-1)[None], steps=2)
    expected = reference(tensors, embedding.weight, h, ids, 3, 2, draft_by_hand)
    for k in range(2):
        torch.testing.assert_close(features[k][0, 3], expected[k])


def test_what_a_config_leaves_out_is_what_llama_leaves_out(randoms, write, target, draft_by_hand):
    tensors = randoms(shapes())
    config = {key: value for key, value in CONFIG.items() if key not in ("rms_norm_eps", "rope_theta")}
    heads, _ = load_heads(write(tensors, config), target)
    assert (heads.options.rope_theta, heads.options.rms_norm_eps) == (10_000.0, 1e-6)
    heads, _ = load_heads(write(tensors, config | {"rope_parameters": {"rope_theta": 77.0}}), target)
    assert heads.options.rope_theta == 77.0


def test_stretched_positions_and_biases_of_qwen_are_computed(randoms, write, target, draft_by_hand):
    biases = {f"layers.0.self_attn.{part}_proj.bias": (HEADS * DIM if part == "q" else KV * DIM,) for part in "qkv"}
    tensors = randoms(shapes() | biases)
    config = CONFIG | {"rope_scaling": {"type": "linear", "factor": 3.0}, "qkv_bias": True}
    heads, _ = load_heads(write(tensors, config), target)
    h, ids = torch.randn(4, H, dtype=torch.float64), torch.randint(0, V, (6,))
    features = heads.features(h[None], torch.stack([ids[1:5], ids[2:6]], dim=-1)[None], steps=2)
    embedding = target.model.get_input_embeddings().weight.detach()
    expected = reference(tensors, embedding, h, ids, 3, 2, draft_by_hand, stretch=lambda rate: rate / 3)
    for k in range(2):
        torch.testing.assert_close(features[k][0, 3], expected[k])


def test_a_width_of_heads_that_is_not_the_targets_is_read_off_the_tensors(randoms, write, target):
    tensors = randoms(
        shapes()
        | {"layers.0.self_attn.q_proj.weight": (HEADS * 16, H), "layers.0.self_attn.o_proj.weight": (H, HEADS * 16)}
        | {"layers.0.self_attn.k_proj.weight": (16, H), "layers.0.self_attn.v_proj.weight": (16, H)}
    )
    with pytest.warns(UserWarning, match="num_key_value_heads = 2, the tensors are those of 1 "):
        heads, _ = load_heads(write(tensors, CONFIG | {"head_dim": 16}), target)
    options = heads.options
    assert (options.num_attention_heads, options.num_key_value_heads, options.head_dim) == (HEADS, 1, 16)


def test_heads_draft_what_their_logits_say(randoms, write, base, draft_by_hand, chain):
    tensors = randoms(shapes() | {f"layers.0.self_attn.{part}_proj.bias": (KV * DIM,) for part in "kv"})
    tensors |= randoms({"layers.0.self_attn.q_proj.bias": (HEADS * DIM,)})
    folder = write(tensors, CONFIG | {"rope_scaling": {"type": "linear", "factor": 3.0}}, file="pytorch_model.bin")
    model = MedusaModel.from_pretrained(base, heads=folder)
    ids = torch.randint(0, V, (9,))
    h = model.backbone.states(ids[None]).h[0]
    embedding, guesses = model.get_input_embeddings().weight.detach(), ids.tolist()
    for k in range(5):
        features = reference(tensors, embedding, h, guesses, 7, k + 1, draft_by_hand, stretch=lambda rate: rate / 3)
        guesses.append(int(model.lm_head(features[-1]).argmax()))
    assert chain(model, ids) == guesses[9:]


def test_they_decode_by_the_public_call_as_trees_too(randoms, write, decodes, tmp_path):
    folder = write(randoms(shapes()), CONFIG, file="pytorch_model.bin")
    model = decodes(folder)
    assert len(model.drafter.template.paths) == 5 == model.drafter.template.depth
    model = decodes(folder, tree=TREE)
    model.save_pretrained(tmp_path / "ours")
    again = MedusaModel(model.detach(), tmp_path / "ours")
    assert again.heads.config == model.heads.config
    h, tokens = torch.randn(1, 6, H, dtype=torch.float64), torch.randint(0, V, (1, 6, again.heads.config.num_heads))
    for one, other in zip(again.heads.features(h, tokens), model.heads.features(h, tokens), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_dtype_of_16_bits_or_more_is_read(dtype, randoms, write, target):
    tensors = {name: tensor.to(dtype) for name, tensor in randoms(shapes()).items()}
    heads, _ = load_heads(write(tensors, CONFIG), target)
    assert torch.equal(heads.heads[0].fc.weight, tensors["fc.weight"].double())


def test_other_embeddings_than_the_targets_are_a_warning(randoms, write, load):
    folder = write(randoms(shapes() | {"embed_tokens.weight": (V, H)}), CONFIG)
    with pytest.warns(UserWarning, match=r"embed_tokens\.weight differs from the target's input embeddings"):
        load(folder)


MISFITS = {
    "embeddings-of-another-vocabulary": (
        {"embed_tokens.weight": torch.ones(V + 2, H)},
        {},
        r"the target's input embeddings, \(128, 32\), got \(130, 32\)",
    ),
    "no-down": ({"layers.0.mlp.down_proj.weight": None}, {}, r"must hold 10 tensors, got 9: missing \['layers\.0\.mlp"),
    "no-bias": ({"fc.bias": None}, {"bias": True}, r"must hold 10 tensors, got 9: missing \['fc\.bias'\]"),
    "one-bias": (
        {"layers.0.self_attn.q_proj.bias": torch.ones(HEADS * DIM)},
        {},
        r"must hold 13 tensors, got 11: missing \['layers\.0\.self_attn\.k_proj\.bias'",
    ),
    "first-norm": (
        {"layers.0.input_layernorm.weight": torch.ones(H)},
        {},
        r"must hold 10 tensors, got 11: .* surplus \['layers\.0\.input_layernorm\.weight'\]",
    ),
    "other-target": (
        {"fc.weight": torch.ones(H, 2 * H + 2)},
        {},
        r"fc\.weight must have shape \(32, 64\) .* \(32, 66\)",
    ),
    "other-width": ({"layers.0.mlp.up_proj.weight": torch.ones(INNER + 1, H)}, {}, r"\(40, 32\) for this target, got"),
    "no-heads": ({}, {"num_attention_heads": None}, "config must say num_attention_heads, a number above 0, got None"),
    "odd-heads": ({}, {"num_attention_heads": 3}, r"num_attention_heads x head_dim = 3 x 10 rows, .* got 32 and 16"),
    "other-dim": ({}, {"head_dim": 16}, r"num_attention_heads x head_dim = 4 x 16 rows, .* got 32"),
    "uneven-keys": (
        {f"layers.0.self_attn.{name}_proj.weight": torch.ones(3 * DIM, H) for name in "kv"},
        {"num_key_value_heads": 3},
        "EAGLE heads: num_attention_heads must be a multiple of num_key_value_heads 3, got 4",
    ),
    "no-theta": ({}, {"rope_theta": "large"}, "must say rope_theta, a number above 0, got 'large'"),
    "not-finite": ({"fc.bias": torch.full((H,), float("nan"))}, {}, r"fc\.bias is not finite"),
    "quantised": ({"fc.weight": torch.ones(H, 2 * H).to(torch.int8)}, {}, r"16 bits or more, got torch\.int8"),
}


@pytest.mark.parametrize(("change", "config", "named"), MISFITS.values(), ids=list(MISFITS))
def test_what_does_not_fit_is_named(change, config, named, randoms, write, load):
    tensors = {name: tensor for name, tensor in (randoms(shapes()) | change).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=named):
        load(write(tensors, CONFIG | config))


VARIANTS = {
    "biased-output": (["layers.0.self_attn.o_proj.bias"], {}, r"biases of products but q, k and v \(layers\.0\.self_a"),
    "biased-mlp": (["layers.0.mlp.up_proj.bias"], {}, "biases of products but q, k and v"),
    "two-layers": (["layers.1.mlp.up_proj.weight"], {}, r"more than one layer \(layers\.1\.mlp"),
    "head-norms": (["layers.0.self_attn.q_norm.weight"], {}, "norms of queries and keys"),
    "mixture": (["layers.0.mlp.experts.0.up_proj.weight"], {}, "a mixture of experts"),
    "quantised": (["layers.0.mlp.up_proj.weight_scale"], {}, "quantised weights"),
    "activation": ([], {"hidden_act": "gelu"}, "hidden_act 'gelu': only 'silu' is read"),
    "stretched": ([], {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary positions of type 'dynamic'"),
    "partial": ([], {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5: only whole heads"),
}


@pytest.mark.parametrize(("more", "config", "named"), VARIANTS.values(), ids=list(VARIANTS))
def test_variants_are_refused_with_the_reason(more, config, named, names):
    with pytest.raises(UnsupportedError, match=f"there holds EAGLE heads with {named}.*not supported yet"):
        eagle_layout(names(*shapes(), *more, **CONFIG | config))


def test_biases_that_the_config_denies_are_used_with_a_warning(randoms, write, load):
    with pytest.warns(UserWarning, match="bias = False, the tensors are those of 1 bias of fc"):
        assert load(write(randoms(shapes()), CONFIG | {"bias": False})).heads[0].fc.bias is not None


def test_the_format_is_named_by_its_tensors(names):
    layout = eagle_layout(names(*shapes(), **CONFIG))
    assert (layout.format, layout.kind, layout.num_layers, layout.own_lm_heads) == ("EAGLE", "eagle", 1, False)
    assert eagle_layout(names("layers.0.mlp.up_proj.weight")) is None
    assert eagle_layout(names("fc.weight")) is None
