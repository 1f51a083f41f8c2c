"""MTP heads in the decoder, trained here or shipped with a checkpoint: the target's output, through any tree."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from medusa_spec import MedusaModel
from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import load_heads
from medusa_spec.drafters import HeadsDrafter
from medusa_spec.drafters.base import ReadStates
from medusa_spec.drafters.choice import Choice, Chosen
from medusa_spec.errors import CheckpointError, UnsupportedError
from medusa_spec.finetune import FinetuneConfig
from medusa_spec.finetune.train import start_heads
from medusa_spec.heads import DraftHeads, HeadsConfig, fitted_options, make_heads
from medusa_spec.heads.view import UnrolledView
from medusa_spec.mtp import STEPS, _findable, native_heads
from medusa_spec.testing import COMMON, tiny
from medusa_spec.tree import Growth, TokenTree, TreeTemplate

NEW, K = 30, 3
TARGETS = ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "mixtral", "gpt_oss"]
CASES = [(name, True) for name in TARGETS] + [(name, False) for name in ("llama", "gemma2", "mixtral")]
TREE = TreeTemplate(paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)))
GROWTH = Growth(token_seconds=1.0, level_seconds=0.001, pass_seconds=((1, 1.0), (14, 1.01)), hit=0.9, beam=3, width=4)

MIXTURE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
SHIPPING: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **MIXTURE,
        **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
        **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    },
    "glm4_moe": {**MIXTURE, "n_routed_experts": 4, "head_dim": 8, "first_k_dense_replace": 1},
    "mellum": {
        **MIXTURE,
        **{"num_experts": 4, "head_dim": 8, "sliding_window": 8},
        **{"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"]},
    },
}
PARTS = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
MELLUM = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
NATIVE = [("deepseek_v3", 1), ("deepseek_v3", 3), ("glm4_moe", 1), ("mellum", 1)]


def ship(folder: Path, name: str, layers: int) -> Path:
    """A checkpoint that ships MTP layers, named as published ones are: more decoder layers than the config counts."""
    settings = {**COMMON, **SHIPPING[name], "num_hidden_layers": 2 + layers}
    for key in ("layer_types", "mlp_layer_types"):
        if key in settings:
            settings[key] = [*settings[key], *[settings[key][-1]] * layers]
    config = AutoConfig.for_model(name, **settings)
    config._experts_implementation = "eager"
    model: Any = AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    model.save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text())
    told |= {"num_hidden_layers": 2, "num_nextn_predict_layers": layers}
    told |= {key: told[key][:2] for key in ("layer_types", "mlp_layer_types") if key in told}
    (folder / "config.json").write_text(json.dumps(told))
    state = load_file(folder / "model.safetensors")
    if name == "mellum":
        state = {key.replace("model.layers.2.", "mtp.layers.0."): tensor for key, tensor in state.items()}
    hidden = COMMON["hidden_size"]
    for layer in range(layers):
        for part, called in (MELLUM if name == "mellum" else PARTS).items():
            key = f"mtp.{called}.weight" if name == "mellum" else f"model.layers.{2 + layer}.{called}.weight"
            shape = (hidden, 2 * hidden) if part == "eh_proj" else (hidden,)
            state[key] = (torch.randn(shape) * 0.3 + (part != "eh_proj")).double()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """Folders of such checkpoints."""
    torch.manual_seed(0)
    return {key: ship(tmp_path_factory.mktemp(key[0]), *key) for key in NATIVE}


def load(folder: Path, **kwargs: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", **{"dtype": "auto", **kwargs})


def build(name: str) -> PreTrainedModel:
    model = tiny(name)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model


def fresh(model: PreTrainedModel, **options: Any) -> DraftHeads:
    """Fresh MTP heads of a model that stays unwrapped."""
    backbone = Backbone(model)
    config = HeadsConfig(
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        kind="mtp",
        num_heads=K,
        options=fitted_options("mtp", options, backbone.config),
    )
    heads = make_heads(config, backbone.projection(), None, backbone.embedding()).double()
    backbone.detach()
    return heads


def states_of(model: PreTrainedModel, text: torch.Tensor) -> torch.Tensor:
    backbone = Backbone(model)
    h = backbone.hidden_states(text)
    backbone.detach()
    return h


def following(text: torch.Tensor, rows: int, steps: int = K) -> torch.Tensor:
    """The tokens t + 1 … t + K of the first rows of a text."""
    return torch.stack([text[:, 1 + k : 1 + k + rows] for k in range(steps)], dim=-1)


def train(heads: DraftHeads, model: PreTrainedModel, text: torch.Tensor, steps: int = 60) -> list[float]:
    """Lets heads learn a text by heart; the losses."""
    h, rows = states_of(model, text), text.shape[1] - K - 1
    tokens = following(text, rows)
    wanted = torch.stack([text[:, 2 + k : 2 + k + rows] for k in range(K)])
    optimizer = torch.optim.AdamW(heads.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        logits = heads(h[:, :rows], tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def fingerprint(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for key, tensor in model.state_dict().items():
        digest.update(key.encode() + tensor.double().numpy().tobytes())
    return digest.hexdigest()


def answer_of(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **kwargs})


@pytest.fixture
def ids() -> torch.Tensor:
    """A prompt."""
    return torch.randint(3, 120, (1, 9))


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_what_was_learnt_is_accepted_and_the_output_is_plain_greedys(name: str, tied: bool, ids: torch.Tensor) -> None:
    model = build(name)
    text, before = answer_of(model, ids), fingerprint(model)
    heads = fresh(model, tied=tied)
    losses = train(heads, model, text)
    assert losses[-1] < 0.5 * losses[0]
    assert fingerprint(model) == before and all(parameter.grad is None for parameter in model.parameters())
    wrapped = MedusaModel(model, heads, tree=TREE, probe=False)
    assert torch.equal(answer_of(wrapped, ids), text)
    assert wrapped.last_stats.mu > 0.5
    wrapped.drafter.growth = GROWTH
    assert torch.equal(answer_of(wrapped, ids), text)
    assert wrapped.last_stats.mu > 0.5
    other = torch.randint(3, 120, (1, 5))
    wrapped.drafter.growth = None
    drafted = answer_of(wrapped, other)
    assert torch.equal(drafted, answer_of(wrapped.detach(), other))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_same_seed_gives_the_same_tokens(name: str, tied: bool, ids: torch.Tensor) -> None:
    model = build(name)
    heads = fresh(model, tied=tied)
    train(heads, model, answer_of(model, ids), steps=20)
    wrapped = MedusaModel(model, heads, tree=TREE, probe=False)
    for seed in range(3):
        found = []
        for decoder in (wrapped, model):
            torch.manual_seed(seed)
            found.append(answer_of(decoder, ids, do_sample=True, temperature=0.8))
        assert torch.equal(*found)


@pytest.mark.parametrize("tied", [True, False])
def test_left_padding_changes_neither_text_nor_acceptance(tied: bool, ids: torch.Tensor) -> None:
    model = build("llama")
    heads = fresh(model, tied=tied)
    train(heads, model, answer_of(model, ids))
    wrapped = MedusaModel(model, heads, tree=TREE, probe=False)
    plain, stats = answer_of(wrapped, ids), wrapped.last_stats
    padded, mask = torch.nn.functional.pad(ids, (4, 0)), torch.nn.functional.pad(torch.ones_like(ids), (4, 0))
    assert torch.equal(answer_of(wrapped, padded, attention_mask=mask)[:, 4:], plain)
    assert wrapped.last_stats.mu == stats.mu > 0.5 and wrapped.last_stats.passes == stats.passes


class _Follow(Choice):
    """Drafts the true tokens, and keeps the logits."""

    def __init__(self, text: Sequence[int], place: int, steps: int) -> None:
        self.text, self.place, self.steps = text, place, steps
        self.logits: list[torch.Tensor] = []

    def take(self, depth: int, logits: torch.Tensor) -> Chosen | None:
        self.logits.append(logits[0])
        if depth + 1 == self.steps:
            return None
        return Chosen(rows=[0], tokens=torch.tensor([self.text[self.place + 2 + depth]]))

    def tree(self, root: int) -> TokenTree:
        return TokenTree.root_only(root)


def check_session(model: PreTrainedModel, heads: DraftHeads, text: torch.Tensor) -> None:
    """What a session computes while it is shown a text piece by piece is what training computed."""
    steps, h = heads.config.num_heads, states_of(model, text)
    rows = text.shape[1] - steps - 1
    with torch.no_grad():
        expected = heads(h[:, :rows], following(text, rows, steps))[:, 0]
    drafter = HeadsDrafter(heads, TREE, dtype=torch.float64, device=torch.device("cpu"))
    session: Any = drafter.begin([])
    read, known = 0, text[0].tolist()
    for place in (4, 5, 8, 9, 15, rows - 1):
        session.read(known[read : place + 1], ReadStates(h=h[0, read : place + 1]))
        read = place + 1
        if place == 8:  # the next draft finds more that is not read yet
            continue
        follow = _Follow(known, place, steps)
        session.inner.guess(known[place + 1], follow)
        torch.testing.assert_close(torch.stack(follow.logits), expected[:, place], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_a_session_computes_what_training_computed(name: str, tied: bool, ids: torch.Tensor) -> None:
    model = build(name)
    heads = fresh(model, tied=tied).requires_grad_(False)
    for parameter in heads.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    check_session(model, heads, answer_of(model, ids))


@pytest.mark.parametrize("tied", [True, False])
def test_saved_heads_load_bit_for_bit_without_the_target_that_shaped_them(
    tied: bool, ids: torch.Tensor, tmp_path: Path
) -> None:
    model = build("qwen3")
    heads = fresh(model, tied=tied)
    train(heads, model, answer_of(model, ids), steps=10)
    wrapped = MedusaModel(model, heads, tree=TREE, probe=False)
    wrapped.save_pretrained(tmp_path)
    loaded, config = load_heads(tmp_path, wrapped.backbone)
    assert config.heads == heads.config and loaded.options == heads.options
    for (key, one), (other_key, two) in zip(heads.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert key == other_key and torch.equal(one, two)
    h, tokens = torch.randn(1, 5, 32).double(), torch.randint(0, 128, (1, 5, K))
    assert torch.equal(loaded(h, tokens), heads(h, tokens))


def test_heads_of_one_target_are_refused_by_one_of_other_sizes(tmp_path: Path) -> None:
    model = build("llama")
    MedusaModel(model, fresh(model), tree=TREE, probe=False).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="hidden_size 32, the target has 48"):
        load_heads(tmp_path, Backbone(tiny("llama", hidden_size=48)))
    config = json.loads((tmp_path / "medusa_config.json").read_text())
    config["heads"]["options"]["decoder"]["intermediate_size"] = 40
    (tmp_path / "medusa_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"must have shape \(40, 32\), got \(48, 32\)"):
        load_heads(tmp_path, Backbone(build("llama")))


@pytest.mark.parametrize("key", NATIVE, ids=lambda key: f"{key[0]}-{key[1]}")
def test_a_checkpoints_own_layers_decode_trees_exactly(
    key: tuple[str, int], shipped: dict[tuple[str, int], Path], ids: torch.Tensor
) -> None:
    model = load(shipped[key])
    text, before = answer_of(model, ids), fingerprint(model)
    wrapped = MedusaModel(model, heads="mtp", tree=TREE)
    assert wrapped.heads.config.num_heads == 3 and len(wrapped.heads.heads) == key[1]
    assert torch.equal(answer_of(wrapped, ids), text)
    assert max(wrapped.last_stats.pass_sizes) == 8
    wrapped.drafter.growth = GROWTH
    assert torch.equal(answer_of(wrapped, ids), text)
    wrapped.detach()
    assert fingerprint(model) == before
    check_session(model, wrapped.heads, text)


@pytest.mark.parametrize("key", NATIVE, ids=lambda key: f"{key[0]}-{key[1]}")
def test_a_checkpoints_own_layers_compute_what_transformers_computes(
    key: tuple[str, int], shipped: dict[tuple[str, int], Path], ids: torch.Tensor
) -> None:
    """The first step at every row, and all steps of a text of one row: there our rule for the text is the published."""
    model = load(shipped[key])
    text = answer_of(model, ids)
    backbone = Backbone(model)
    heads = native_heads(backbone)
    backbone.detach()
    with _findable(model):
        theirs = MtpModel.from_pretrained(model)
    theirs.set_attn_implementation("eager")
    h = model(text, output_hidden_states=True).hidden_states[-1].detach()
    rows = text.shape[1] - K
    ours = heads.features(h[:, :rows], following(text, rows))[0]
    cache = MtpCache(config=model.config.get_mtp_config())
    places = torch.arange(1, rows + 1)[None]
    with torch.no_grad():
        first = theirs.forward_layer(0, h[:, :rows], places, cache, input_ids=text[:, 1 : rows + 1])
        torch.testing.assert_close(ours, first, rtol=1e-5, atol=1e-5)
        feature, cache = h[:, :1], MtpCache(config=model.config.get_mtp_config())
        for k in range(key[1]):
            feature = theirs.forward_layer(k, feature, torch.tensor([[1 + k]]), cache, input_ids=text[:, 1 + k : 2 + k])
            alone = heads.features(h[:, :1], following(text, 1))[k]
            torch.testing.assert_close(alone, feature, rtol=1e-5, atol=1e-5)


def test_one_layer_takes_as_many_steps_as_the_tree_is_deep(
    shipped: dict[tuple[str, int], Path], ids: torch.Tensor
) -> None:
    model = load(shipped["glm4_moe", 1])
    text = answer_of(model, ids)
    wrapped = MedusaModel(model, heads="mtp")
    assert wrapped.heads.config.num_heads == STEPS
    wrapped.detach()
    deep = MedusaModel(model, heads="mtp", tree=TreeTemplate(paths=tuple((0,) * depth for depth in range(1, 6))))
    assert deep.heads.config.num_heads == 5 and deep.heads.options.tied
    assert torch.equal(answer_of(deep, ids), text)


def test_shipped_layers_are_saved_as_heads_and_load_without_the_checkpoint(
    shipped: dict[tuple[str, int], Path], ids: torch.Tensor, tmp_path: Path
) -> None:
    wrapped = MedusaModel.from_pretrained(
        shipped["deepseek_v3", 3], heads="mtp", tree=TREE, experts_implementation="eager"
    )
    text, mu = answer_of(wrapped, ids), wrapped.last_stats.mu
    wrapped.save_pretrained(tmp_path)
    again = MedusaModel(wrapped.detach(), tmp_path, tree=TREE)
    assert torch.equal(answer_of(again, ids), text) and again.last_stats.mu == mu


@pytest.mark.parametrize("key", [("deepseek_v3", 3), ("glm4_moe", 1)], ids=lambda key: f"{key[0]}-{key[1]}")
def test_shipped_layers_are_trained_on_from_where_they_are(
    key: tuple[str, int], shipped: dict[tuple[str, int], Path], tmp_path: Path
) -> None:
    wrapped = MedusaModel(load(shipped[key]), heads="mtp", tree=TREE, probe=False)
    wrapped.save_pretrained(tmp_path)
    options = {"tied": key[1] == 1, "from_h": False}
    settings = FinetuneConfig(
        model="m", data=("d",), output="o", kind="mtp", num_heads=3, options=options, init_from=str(tmp_path)
    )
    heads = start_heads(settings, wrapped.backbone, torch.ones(128), frozenset({2}))
    assert all(parameter.requires_grad for parameter in heads.parameters())
    for name, tensor in wrapped.heads.state_dict().items():
        assert torch.equal(heads.state_dict()[name], tensor.float()), name


def test_shipped_layers_are_found_on_a_target_that_is_then_prepared(
    shipped: dict[tuple[str, int], Path], ids: torch.Tensor
) -> None:
    model = load(shipped["glm4_moe", 1], dtype=torch.float32)
    wrapped = MedusaModel(model, heads="mtp", tree=TREE)
    assert {parameter.dtype for parameter in wrapped.heads.parameters()} == {torch.float32}
    assert answer_of(wrapped, ids).shape == (1, 9 + NEW)
    assert wrapped.last_stats.passes > 0


def test_loading_leaves_the_model_as_it_was(shipped: dict[tuple[str, int], Path]) -> None:
    model = load(shipped["deepseek_v3", 1])
    before, attributes = model.config.to_dict(), set(vars(model))
    wrapped = MedusaModel(model, heads="mtp")
    wrapped.detach()
    assert model.config.to_dict() == before and model.config.name_or_path == str(shipped["deepseek_v3", 1])
    assert set(vars(model)) == attributes


def test_a_target_that_ships_none_is_refused_by_what_is_missing(shipped: dict[tuple[str, int], Path]) -> None:
    model = build("llama")
    with pytest.raises(UnsupportedError, match=r"names none \(num_mtp_layers is None\); train some: .*--kind mtp"):
        MedusaModel(model, heads="mtp")
    MedusaModel(model, drafter="ngram", probe=False).detach()  # it went back as it came


def test_a_checkpoint_without_the_layers_that_its_config_names_is_an_error(
    shipped: dict[tuple[str, int], Path], tmp_path: Path
) -> None:
    model = load(shipped["glm4_moe", 1])
    model.save_pretrained(tmp_path)  # saves what it loaded, which they are not among
    with pytest.raises(CheckpointError, match=r"must hold the MTP layers that its config names.*eh_proj"):
        MedusaModel(load(tmp_path), heads="mtp")


def test_a_view_knows_the_places_of_its_keys() -> None:
    view = UnrolledView(1, 3, torch.device("cpu"))
    assert view.next().places().tolist() == [0, 1, 2]
    assert view.next().places().tolist() == [0, 1, 2, 1, 2, 3] and view.seen().shape == (3, 6)
    own = UnrolledView(1, 3, torch.device("cpu"), own=True).next().next()
    assert own.places().tolist() == [1, 2, 3] and own.seen().shape == (3, 3)
