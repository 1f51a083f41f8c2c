"""Published EAGLE-3 heads give the logits that their own code computes; variants are refused with the reason."""

import warnings

import pytest
import torch

from medusa_spec import MedusaModel, TreeTemplate
from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import load_heads, names_heads
from medusa_spec.errors import CheckpointError, UnsupportedError
from medusa_spec.formats.eagle3 import eagle3_layout
from medusa_spec.testing import tiny

H, V, DRAFT, HEADS, KV, DIM, INNER, LAYERS = 32, 128, 48, 4, 2, 8, 40, 8
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "rms_norm_eps": 1e-5,
    "vocab_size": V,
    "draft_vocab_size": DRAFT,
}
LAYER_CONFIG = {key: value for key, value in CONFIG.items() if key not in ("architectures", "draft_vocab_size")}
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "draft_vocab_size": DRAFT,
    "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
    "embed_requires_grad": False,
    "norm_before_fc": False,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "other", "speculative_tokens": 9},
            {"proposal_type": "greedy", "speculative_tokens": 3},
        ],
        "verifier": {"name_or_path": "org/base", "architectures": []},
    },
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "transformer_layer_config": LAYER_CONFIG | {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
}
TREE = TreeTemplate(paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)))


@pytest.fixture(scope="module")
def backbone():
    """The target of these heads."""
    return Backbone(tiny("llama", num_hidden_layers=LAYERS))


def shapes(prefix="midlayer.", rows=DRAFT, taps=3):
    layer = {
        "self_attn.q_proj": (HEADS * DIM, 2 * H),
        "self_attn.k_proj": (KV * DIM, 2 * H),
        "self_attn.v_proj": (KV * DIM, 2 * H),
        "self_attn.o_proj": (H, HEADS * DIM),
        "mlp.gate_proj": (INNER, H),
        "mlp.up_proj": (INNER, H),
        "mlp.down_proj": (H, INNER),
        "hidden_norm": (H,),
        "input_layernorm": (H,),
        "post_attention_layernorm": (H,),
    }
    found = {f"{prefix}{name}.weight": shape for name, shape in layer.items()}
    return found | {"fc.weight": (H, taps * H), "norm.weight": (H,), "lm_head.weight": (rows, H)}


def maps(size=DRAFT):
    ids = torch.randperm(V)[:size].sort().values
    table = torch.zeros(V, dtype=torch.bool)
    table[ids] = True
    return ids, {"d2t": ids - torch.arange(size), "t2d": table}


def reference(tensors, prefix, embedding, low_to_high, ids, t, steps, by_hand, *, before_residual=False, **sizes):
    """What the authors' code computes behind row t: logits of the draft vocabulary for every step."""

    def entered(token, hidden):
        normed = by_hand.norm(hidden, tensors[f"{prefix}hidden_norm.weight"], 1e-5)
        read = by_hand.norm(embedding[token], tensors[f"{prefix}input_layernorm.weight"], 1e-5)
        return normed if before_residual else hidden, torch.cat([read, normed])

    text = [entered(ids[row + 1], low_to_high[row].flatten() @ tensors["fc.weight"].T) for row in range(t + 1)]
    features = by_hand(
        tensors,
        prefix,
        text,
        lambda k, feature: entered(ids[t + 1 + k], feature),
        steps,
        heads=HEADS,
        kv_heads=KV,
        eps=1e-5,
        **sizes,
    )
    return [by_hand.norm(z, tensors["norm.weight"], 1e-5) @ tensors["lm_head.weight"].T for z in features]


def check(heads, backbone, tensors, prefix, taps, by_hand, **settings):
    """Heads' logits of all steps, read from the target's own hidden states, are those of the reference."""
    ids, rows, steps = torch.randint(0, V, (10,)), 5, 4
    outputs = backbone.model(ids[None], output_hidden_states=True)
    read = torch.stack([outputs.hidden_states[tap][0] for tap in taps], dim=1).detach()
    states = backbone.states(ids[None], taps=heads.taps)
    torch.testing.assert_close(states.layers[0], read)
    tokens = torch.stack([ids[1 + k : 1 + rows + k] for k in range(steps)], dim=-1)
    features = heads.features(states.h[:, :rows], tokens[None], states.layers[:, :rows], steps)
    embedding = backbone.model.get_input_embeddings().weight.detach()
    for t in range(rows):
        expected = reference(tensors, prefix, embedding, read, ids, t, steps, by_hand, **settings)
        for k in range(steps):
            logits = heads.head(k).logits(features[k][0, t], heads.projection)
            torch.testing.assert_close(logits, expected[k], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_heads_give_their_own_logits(file, randoms, write, backbone, draft_by_hand):
    tensors = randoms(shapes())
    ids, vocabulary = maps()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heads, config = load_heads(write(tensors | vocabulary, CONFIG, file=file), backbone)
    assert heads.taps == (2, LAYERS // 2, LAYERS - 3) and torch.equal(heads.draft_ids, ids)
    assert (config.training["format"], config.tree.depth, config.heads.lm_head) == ("EAGLE-3", 5, "own")
    check(heads, backbone, tensors, "midlayer.", (2, 4, 5), draft_by_hand)


@pytest.mark.parametrize("before_residual", [True, False])
def test_the_layout_of_speculators_gives_its_own_logits(before_residual, randoms, write, backbone, draft_by_hand):
    tensors = randoms(shapes("layers.0."))
    copy = {"embed_tokens.weight": backbone.model.get_input_embeddings().weight.detach().clone()}
    settings = SPECULATORS | {"norm_before_residual": before_residual}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heads, config = load_heads(write(tensors | maps()[1] | copy, settings), backbone)
    assert (config.base_model_name_or_path, config.tree.depth) == ("org/base", 3)
    assert "speculators" in config.training["format"]
    check(heads, backbone, tensors, "layers.0.", (1, 4, 6), draft_by_hand, before_residual=before_residual, theta=500.0)


def test_layers_named_inside_eagle_config_are_those_whose_outputs_are_read(randoms, write, backbone, draft_by_hand):
    tensors = randoms(shapes())
    named = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 6], "use_aux_hidden_state": True}}
    heads, _ = load_heads(write(tensors | maps()[1], CONFIG | named), backbone)
    check(heads, backbone, tensors, "midlayer.", (1, 5, 7), draft_by_hand)
    again = {"eagle_aux_hidden_state_layer_ids": [1, 5, 7]}
    assert load_heads(write(tensors | maps()[1], CONFIG | named | again), backbone)[0].taps == (1, 5, 7)


def test_stretched_positions_of_llama_are_computed(randoms, write, backbone, draft_by_hand):
    """As the checkpoints of `speculators` for Llama 3.1 have them; here so short that every kind of rate is met."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 50}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    met = set()

    def stretch(rate):
        length = 2 * torch.pi / rate
        if length < 50 / 4:
            met.add("kept")
            return rate
        if length > 50:
            met.add("slowed")
            return rate / 8
        met.add("mixed")
        share = (50 / length - 1) / (4 - 1)
        return (1 - share) * rate / 8 + share * rate

    tensors = randoms(shapes("layers.0."))
    nested = {"transformer_layer_config": LAYER_CONFIG | {"rope_parameters": rope}, "norm_before_residual": False}
    heads, _ = load_heads(write(tensors | maps()[1], SPECULATORS | nested), backbone)
    check(heads, backbone, tensors, "layers.0.", (1, 4, 6), draft_by_hand, theta=500.0, stretch=stretch)
    assert met == {"kept", "slowed", "mixed"}


def test_another_number_of_layers_is_read_off_the_tensors(randoms, write, backbone, draft_by_hand):
    tensors = randoms(shapes(taps=2))
    named = {"eagle_aux_hidden_state_layer_ids": [0, 7]}
    heads, _ = load_heads(write(tensors | maps()[1], CONFIG | named), backbone)
    check(heads, backbone, tensors, "midlayer.", (0, 7), draft_by_hand)


@pytest.mark.parametrize("mapped", [True, False])
def test_an_lm_head_of_all_tokens_needs_no_draft_vocabulary(mapped, randoms, write, backbone, draft_by_hand):
    tensors = randoms(shapes(rows=V))
    vocabulary = maps(V)[1] if mapped else {}
    heads, _ = load_heads(write(tensors | vocabulary, CONFIG | {"draft_vocab_size": V}), backbone)
    assert heads.draft_ids is None
    check(heads, backbone, tensors, "midlayer.", (2, 4, 5), draft_by_hand)


def test_without_an_lm_head_the_targets_serves(randoms, write, backbone, draft_by_hand):
    tensors = randoms(shapes())
    del tensors["lm_head.weight"]
    heads, config = load_heads(write(tensors, CONFIG | {"draft_vocab_size": None}), backbone)
    assert config.heads.lm_head == "shared"
    own = {"lm_head.weight": backbone.model.lm_head.weight.detach()}
    check(heads, backbone, tensors | own, "midlayer.", (2, 4, 5), draft_by_hand)


@pytest.mark.parametrize("before_residual", [True, False])
def test_heads_draft_what_their_logits_say(before_residual, randoms, write, deep, draft_by_hand, chain):
    tensors = randoms(shapes("layers.0."))
    draft_ids, vocabulary = maps()
    settings = SPECULATORS | {"norm_before_residual": before_residual}
    model = MedusaModel.from_pretrained(deep, heads=write(tensors | vocabulary, settings))
    ids = torch.randint(0, V, (9,))
    read = model.backbone.states(ids[None], taps=(1, 4, 6)).layers[0]
    embedding, guesses = model.get_input_embeddings().weight.detach(), ids.tolist()
    sizes = {"before_residual": before_residual, "theta": 500.0}
    for k in range(3):
        logits = reference(tensors, "layers.0.", embedding, read, guesses, 7, k + 1, draft_by_hand, **sizes)
        guesses.append(int(draft_ids[logits[-1].argmax()]))
    assert chain(model, ids) == guesses[9:]


@pytest.mark.parametrize("speculators", [True, False])
def test_they_decode_by_the_public_call_as_trees_too(speculators, randoms, write, decodes, deep, tmp_path):
    tensors = randoms(shapes("layers.0." if speculators else "midlayer.")) | maps()[1]
    folder = write(tensors, SPECULATORS if speculators else CONFIG)
    decodes(folder, deep)
    model = decodes(folder, deep, tree=TREE)
    model.save_pretrained(tmp_path / "ours")
    again = MedusaModel(model.detach(), tmp_path / "ours")
    assert again.heads.config == model.heads.config and torch.equal(again.heads.draft_ids, model.heads.draft_ids)
    h, tokens = torch.randn(1, 6, H, dtype=torch.float64), torch.randint(0, V, (1, 6, again.heads.config.num_heads))
    layers = torch.randn(1, 6, 3, H, dtype=torch.float64)
    for one, other in zip(
        again.heads.features(h, tokens, layers), model.heads.features(h, tokens, layers), strict=True
    ):
        assert torch.equal(one, other)


def test_their_folder_is_one_of_heads_and_names_its_target(randoms, write, deep):
    folder = write(randoms(shapes("layers.0.")) | maps()[1], SPECULATORS)
    assert names_heads(folder)
    config = SPECULATORS["speculators_config"] | {"verifier": {"name_or_path": str(deep)}}
    model = MedusaModel.from_pretrained(write({}, SPECULATORS | {"speculators_config": config}, file="none.bin"))
    assert model.heads.config.kind == "eagle3" and len(model.model.layers) == LAYERS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_dtype_of_16_bits_or_more_is_read(dtype, randoms, write, backbone):
    tensors = {name: tensor.to(dtype) for name, tensor in randoms(shapes()).items()}
    heads, _ = load_heads(write(tensors | maps()[1], CONFIG), backbone)
    assert torch.equal(heads.heads[0].lm_head.weight, tensors["lm_head.weight"].double())


def test_other_embeddings_than_the_targets_are_a_warning(randoms, write, backbone):
    tensors = randoms(shapes() | {"embed_tokens.weight": (V, H)})
    with pytest.warns(UserWarning, match=r"embed_tokens\.weight differs from the target's input embeddings"):
        load_heads(write(tensors | maps()[1], CONFIG), backbone)


def test_a_config_that_counts_otherwise_is_not_believed(randoms, write, backbone):
    folder = write(randoms(shapes()) | maps()[1], CONFIG | {"draft_vocab_size": 50, "intermediate_size": 7})
    with pytest.warns(UserWarning) as warned:
        heads, _ = load_heads(folder, backbone)
    assert (heads.config.draft_vocab_size, heads.options.intermediate_size) == (DRAFT, INNER)
    said = "".join(str(warning.message) for warning in warned)
    assert (
        "draft_vocab_size = 50, d2t holds 48" in said and "intermediate_size = 7, the tensors are those of 40" in said
    )


MISFITS = {
    "no-norm": ({"norm.weight": None}, {}, r"must hold 15 tensors, got 14: missing \['norm\.weight'\]"),
    "no-lm-head": ({"lm_head.weight": None}, {}, r"missing \['lm_head\.weight'\]"),
    "no-offsets": ({"d2t": None}, {}, r"missing \['d2t'\]"),
    "no-maps": ({"d2t": None, "t2d": None}, {}, r"must hold 14 tensors, got 13: missing \['d2t'\]"),
    "surplus": ({"extra": torch.ones(1)}, {}, r"must hold 15 tensors, got 16: missing \[\], surplus \['extra'\]"),
    "both-prefixes": ({"layers.0.hidden_norm.weight": torch.ones(H)}, {}, r"surplus \['layers\.0\.hidden_norm"),
    "short-offsets": ({"d2t": torch.zeros(40, dtype=torch.long)}, {}, "t2d must mark the 40 ids that d2t leads to"),
    "falling-offsets": ({"d2t": -torch.arange(DRAFT)}, {}, r"must be rising ids in 0\.\.127, .* got 1 different"),
    "past-the-end": ({"d2t": torch.full((DRAFT,), 81)}, {}, r"rising ids in 0\.\.127, .* got 48 .* in 81\.\.128"),
    "float-offsets": ({"d2t": torch.zeros(DRAFT)}, {}, r"an int64 for each row .* of torch\.float32"),
    "other-table": ({"t2d": torch.arange(V) < DRAFT + 1}, {}, "t2d must mark the 48 ids .* it marks 49"),
    "other-vocabulary": ({"t2d": torch.zeros(V + 8, dtype=torch.bool)}, {}, r"t2d must have shape \(128,\).* \(136,\)"),
    "more-rows": (
        {"lm_head.weight": torch.ones(V, H)},
        {},
        r"lm_head\.weight must have shape \(48, 32\) .* \(128, 32\)",
    ),
    "two-layers-of-three": (
        {"fc.weight": torch.ones(H, 2 * H)},
        {},
        r"must be 2 rising numbers below its 8.* \(2, 4, 5\)",
    ),
    "unrising": ({}, {"eagle_aux_hidden_state_layer_ids": [2, 2, 4]}, r"3 rising numbers below its 8.*\(2, 2, 4\)"),
    "after-the-last": ({}, {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, r"below its 8.*\(2, 4, 8\)"),
    "named-twice": (
        {},
        {
            "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]},
        },
        r"must name the layers that are read once, got .* \[1, 4, 6\], inputs, and inside eagle_config \[1, 4, 6\]",
    ),
    "other-target": ({"fc.weight": torch.ones(H, 100)}, {}, r"a multiple of 32\) for this target, got \(32, 100\)"),
    "other-width": ({"fc.weight": torch.ones(16, 3 * H)}, {}, r"got \(16, 96\); .* of another width"),
    "eagle-1-attention": (
        {"midlayer.self_attn.k_proj.weight": torch.ones(KV * DIM, H)},
        {},
        r"k_proj\.weight must have shape \(16, 64\) for this target, got \(16, 32\)",
    ),
    "no-heads": ({}, {"num_attention_heads": None}, "must say num_attention_heads"),
    "embeddings-of-another-vocabulary": (
        {"embed_tokens.weight": torch.ones(V + 2, H)},
        {},
        r"the target's input embeddings, \(128, 32\), got \(130, 32\)",
    ),
    "not-finite": ({"norm.weight": torch.full((H,), float("inf"))}, {}, r"norm\.weight is not finite"),
}


@pytest.mark.parametrize(("change", "config", "named"), MISFITS.values(), ids=list(MISFITS))
def test_what_does_not_fit_is_named(change, config, named, randoms, write, backbone):
    tensors = randoms(shapes()) | maps()[1] | change
    with pytest.raises(CheckpointError, match=named):
        load_heads(
            write({name: tensor for name, tensor in tensors.items() if tensor is not None}, CONFIG | config), backbone
        )


def test_a_target_of_too_few_layers_for_the_published_ones_is_refused(randoms, write, target):
    with pytest.raises(CheckpointError, match=r"3 rising numbers below its 2, .* got \(2, 1, -1\)"):
        load_heads(write(randoms(shapes()) | maps()[1], CONFIG), target)


VARIANTS = {
    "norm-before-fc": (["input_norm.weight"], {}, r"a norm before fc \(input_norm\.weight\)"),
    "norms-before-fc": (["fc_norm.0.weight"], {}, "a norm before fc"),
    "bias": (["fc.bias"], {}, "a bias of fc"),
    "biased-output": (["midlayer.self_attn.o_proj.bias"], {}, "biases of products but q, k and v"),
    "head-norms": (["midlayer.self_attn.k_norm.weight"], {}, "norms of queries and keys"),
    "latent": (["midlayer.self_attn.kv_a_proj_with_mqa.weight"], {}, "latent attention"),
    "parallel": (["parallel_draft_heads.0.medusa_layers.0.linear.weight"], {}, "several guesses of one pass"),
    "p-eagle": (["mask_hidden"], {}, "several guesses of one pass"),
    "two-layers": (["layers.1.mlp.up_proj.weight"], {}, "more than one layer"),
    "said-norm": ([], {"norm_before_fc": True}, "norm_before_fc = True: only False is read"),
    "norm-output": ([], {"eagle_config": {"norm_output": True}}, "norm_output = True: only False"),
    "last-layer-alone": (
        [],
        {"eagle_config": {"use_aux_hidden_state": False}},
        "use_aux_hidden_state = False: only True",
    ),
    "trained-embeddings": ([], {"embed_requires_grad": True}, "embed_requires_grad = True: only False"),
    "other-width": ([], {"target_hidden_size": 64}, "of width 32 for a target of width 64: only equal widths"),
    "layers-of-a-fork": ([], {"target_layer_ids": [1, 2, 3]}, "layers named by target_layer_ids, which are numbered"),
    "activation": ([], {"hidden_act": "relu"}, "hidden_act 'relu'"),
    "stretched": ([], {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "rotary positions of type 'yarn'"),
}


@pytest.mark.parametrize(("more", "config", "named"), VARIANTS.values(), ids=list(VARIANTS))
def test_variants_are_refused_with_the_reason(more, config, named, names):
    with pytest.raises(UnsupportedError, match=f"there holds EAGLE-3 heads (with )?{named}.*not supported yet"):
        eagle3_layout(names(*shapes(), "d2t", "t2d", *more, **CONFIG | config))


def test_the_format_is_named_by_its_tensors(names):
    layout = eagle3_layout(names(*shapes(), "d2t", "t2d", **CONFIG))
    assert (layout.format, layout.kind, layout.offsets) == ("EAGLE-3", "eagle3", ("d2t", "t2d"))
    assert layout.names["heads.0.hidden_norm.weight"] == "midlayer.hidden_norm.weight"
    assert eagle3_layout(names("fc.weight", "layers.0.self_attn.q_proj.weight")) is None
    assert eagle3_layout(names(*shapes(), "d2t", **CONFIG)).offsets == ("d2t", None)
