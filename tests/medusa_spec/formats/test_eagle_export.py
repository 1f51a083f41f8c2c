"""EAGLE and EAGLE-3 heads are written under the names that engines ask for, with a Llama config of their layer."""

import pytest
import torch

from medusa_spec.backbone import Backbone
from medusa_spec.errors import UnsupportedError
from medusa_spec.formats.eagle_export import engine_eagle, engine_eagle3
from medusa_spec.testing import tiny

H, V, HEADS, KV, DIM, INNER, LAYERS = 32, 128, 4, 2, 8, 40, 8
DRAFT = torch.tensor([1, 5, 9, 70, 127])
SIZES = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": DIM,
    "intermediate_size": INNER,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-5,
}
EAGLE3 = SIZES | {"taps": "2,4,5", "from_h": False}


@pytest.fixture(scope="module")
def deep():
    """A target with layers enough to tap."""
    return Backbone(tiny("llama", num_hidden_layers=LAYERS))


def layer(prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}self_attn.q_proj.weight": (HEADS * DIM, inputs),
        f"{prefix}self_attn.k_proj.weight": (KV * DIM, inputs),
        f"{prefix}self_attn.v_proj.weight": (KV * DIM, inputs),
        f"{prefix}self_attn.o_proj.weight": (H, HEADS * DIM),
        f"{prefix}mlp.gate_proj.weight": (INNER, H),
        f"{prefix}mlp.up_proj.weight": (INNER, H),
        f"{prefix}mlp.down_proj.weight": (H, INNER),
        f"{prefix}post_attention_layernorm.weight": (H,),
    }


def shapes(exported) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in exported.tensors.items()}


def test_eagle_is_its_layer_and_the_joining_product(random_heads, target) -> None:
    heads = random_heads("eagle", options=SIZES)
    exported = engine_eagle(heads, target)
    assert shapes(exported) == layer("layers.0.", H) | {"fc.weight": (H, 2 * H)}
    assert torch.equal(exported.tensors["fc.weight"], heads.heads[0].fc.weight)
    assert exported.config.items() >= (SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}).items()
    assert exported.config["num_hidden_layers"] == 1 and exported.config["max_position_embeddings"] == 512
    assert exported.same_guesses and not exported.notes


def test_eagle_with_a_draft_vocabulary_may_guess_otherwise_and_says_so(random_heads, target) -> None:
    exported = engine_eagle(random_heads("eagle", draft=DRAFT, options=SIZES), target)
    assert not exported.same_guesses and "outside its 5" in exported.notes[0]


def test_eagle3_brings_norms_lm_head_and_offsets(random_heads, deep) -> None:
    heads = random_heads("eagle3", draft=DRAFT, of=deep, options=EAGLE3)
    exported = engine_eagle3(heads, deep)
    norms = dict.fromkeys(["midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "norm.weight"], (H,))
    more = {"fc.weight": (H, 3 * H), "lm_head.weight": (len(DRAFT), H), "d2t": (len(DRAFT),), "t2d": (V,)}
    assert shapes(exported) == layer("midlayer.", 2 * H) | norms | more
    assert torch.equal(exported.tensors["d2t"] + torch.arange(len(DRAFT)), DRAFT)
    assert torch.equal(exported.tensors["t2d"].nonzero().flatten(), DRAFT)
    assert exported.config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert exported.config["num_aux_hidden_states"] == 3 and exported.config["draft_vocab_size"] == len(DRAFT)


def test_eagle3_over_all_tokens_has_no_map(random_heads, deep) -> None:
    exported = engine_eagle3(random_heads("eagle3", of=deep, options=EAGLE3), deep)
    assert exported.tensors["lm_head.weight"].shape == (V, H) and not {"d2t", "t2d"} & set(exported.tensors)


def test_stretched_positions_and_biases_are_in_the_config(random_heads, target) -> None:
    options = SIZES | {"rope_scaling": "linear:4", "qkv_bias": True}
    exported = engine_eagle(random_heads("eagle", options=options), target)
    assert exported.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert exported.config["qkv_bias"] is True and "layers.0.self_attn.v_proj.bias" in exported.tensors


REFUSED = {
    "untied": ("eagle", {"tied": False}, {}, "one layer serves all steps"),
    "bias": ("eagle", {"bias": True}, {}, "joining product has no bias"),
    "own-lm-head": ("eagle", {}, {"lm_head": "own"}, "these have lm_head='own'"),
    "from-h": ("eagle3", {"from_h": True}, {}, "their features begin with h.*--option from_h=false"),
    "no-taps": ("eagle3", {"taps": ""}, {}, "they tap no layers"),
    "biases": ("eagle3", {"qkv_bias": True}, {}, "biases only together with o"),
    "low-rank": ("eagle3", {}, {"lm_head": "low_rank", "rank": 3}, "low-rank addition"),
}


@pytest.mark.parametrize(("kind", "options", "config", "named"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_carried_is_refused(kind, options, config, named, random_heads, deep) -> None:
    heads = random_heads(kind, of=deep, options=(EAGLE3 if kind == "eagle3" else SIZES) | options, **config)
    with pytest.raises(UnsupportedError, match=f"{kind} heads cannot be exported as EAGLE.*{named}"):
        (engine_eagle if kind == "eagle" else engine_eagle3)(heads, deep)
