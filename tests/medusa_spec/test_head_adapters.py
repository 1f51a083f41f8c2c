"""Adapters of heads of every family: loaded, swapped and unloaded by PEFT's own calls and by ours."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from medusa_spec import MedusaModel
from medusa_spec.adapters import adapted_layers
from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import ADAPTER_WEIGHTS, read_config, save_heads
from medusa_spec.config import MedusaConfig
from medusa_spec.drafters import HeadsDrafter, ReadStates
from medusa_spec.errors import CheckpointError, ConfigError
from medusa_spec.finetune.lora import adapt_heads
from medusa_spec.head_adapters import (
    activate,
    delete,
    enable,
    is_adapter,
    load_adapter,
    load_with_adapter,
    names,
    save_active,
    save_adapter,
)
from medusa_spec.heads import DraftHeads, HeadsConfig, fitted_options, make_heads
from medusa_spec.heads_note import weights_hash
from medusa_spec.testing import save_tiny_model, tiny_model
from medusa_spec.tree import TreeTemplate, chain_template

K = 3
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("medusa", "shared", {}),
    ("medusa", "low_rank", {}),
    ("hydra", "own", {}),
    ("mlp_speculator", "shared", {"own_embedding": True}),
    ("recurrent", "low_rank", {}),
    ("eagle", "shared", {}),
    ("eagle3", "own", {"taps": "1", "tied": False}),
    ("mtp", "shared", {}),
    ("fused", "shared", {"taps": "0,1"}),
]
families = pytest.mark.parametrize(("kind", "lm_head", "options"), CASES, ids=str)
TREES = {"maths": TreeTemplate(paths=((0,), (1,), (0, 0))), "code": TreeTemplate(paths=((0,), (0, 0), (0, 1)))}


def make(backbone: Backbone, kind: str, lm_head: Any = "shared", **options: Any) -> DraftHeads:
    """Heads with random weights that bfloat16 holds, in the target's dtype."""
    config = HeadsConfig(
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        kind=kind,
        num_heads=K,
        num_layers=1 if kind in ("eagle", "eagle3", "mtp", "fused") else 2,
        lm_head=lm_head,
        rank=4,
        options=fitted_options(kind, options, backbone.config),
    )
    heads = make_heads(config, backbone.projection(), None, backbone.embedding()).to(backbone.dtype)
    for parameter in heads.parameters():
        parameter.data = torch.randn_like(parameter).mul_(0.2).bfloat16().to(backbone.dtype)
    return heads.requires_grad_(False).eval()


def shake(heads: DraftHeads, seed: int) -> None:
    """What training does to an adapter: both its factors are something."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in heads.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.5


def drafted(drafter: HeadsDrafter, count: int = 3) -> list[tuple[int, ...]]:
    """What is drafted from a few made-up states: the trees' tokens, and where they stand."""
    heads, found = drafter.heads, []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        h = torch.randn(5, heads.config.hidden_size, generator=generator, dtype=torch.float64)
        session = drafter.begin([])
        if drafter.reads is not None:
            layers = torch.randn(5, len(heads.taps), heads.config.hidden_size, generator=generator, dtype=h.dtype)
            session.read([3, 1, 4, 1, 5], ReadStates(h=h, layers=layers if heads.taps else None))
        tree = session.draft(9, h[-1], None)
        found.append((*tree.tokens, *tree.shape.parents))
    return found


def drafting(heads: DraftHeads) -> HeadsDrafter:
    tree = TreeTemplate(paths=((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))
    return HeadsDrafter(heads, tree, dtype=torch.float64, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone(tiny_model())


def save_two(heads: DraftHeads, folder: Path, base: str = "base") -> dict[str, Path]:
    """Two adapters of these heads on disk, each with a tree of its own; the heads are left as they came."""
    folders = {}
    for seed, (name, tree) in enumerate(TREES.items(), start=1):
        adapt_heads(heads, rank=2, alpha=4.0, seed=seed)
        shake(heads, seed)
        config = MedusaConfig(heads=heads.config, tree=tree, base_heads=base, base_heads_hash=weights_hash(heads))
        save_adapter(folder / name, heads, config, "card\n")
        folders[name] = folder / name
        delete(heads, "default")
    return folders


@families
def test_a_fresh_adapter_changes_no_bit_of_the_guesses(
    backbone: Backbone, kind: str, lm_head: str, options: dict[str, Any]
) -> None:
    heads = make(backbone, kind, lm_head, **options)
    drafter = drafting(heads)
    h, tokens = torch.randn(1, 4, heads.config.hidden_size, dtype=torch.float64), torch.randint(0, 90, (1, 4, K))
    given = {"layers": torch.randn(1, 4, len(heads.taps), h.shape[-1], dtype=h.dtype)} if heads.taps else {}
    before, guesses = heads(h, tokens, **given), drafted(drafter)
    adapt_heads(heads, rank=2, alpha=4.0, seed=0)
    assert drafted(drafter) == guesses
    torch.testing.assert_close(heads(h, tokens, **given), before, atol=1e-12, rtol=1e-12)
    shake(heads, 1)
    assert drafted(drafter) != guesses


@families
def test_swapping_there_and_back_gives_the_guesses_of_the_first(
    backbone: Backbone, tmp_path: Path, kind: str, lm_head: str, options: dict[str, Any]
) -> None:
    """By PEFT's own calls, each adapter with its own tree, and the base's after unloading."""
    heads = make(backbone, kind, lm_head, **options)
    drafter = drafting(heads)
    alone, state = drafted(drafter), {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    folders = save_two(heads, tmp_path)
    peft = PeftModel.from_pretrained(heads, folders["maths"], adapter_name="maths")
    maths = drafted(drafter)
    assert drafter.template == TREES["maths"]
    peft.load_adapter(folders["code"], adapter_name="code")
    assert drafted(drafter) == maths  # not active yet, as PEFT has it
    peft.set_adapter("code")
    code = drafted(drafter)
    assert drafter.template == TREES["code"] and code != maths
    peft.set_adapter("maths")
    assert drafted(drafter) == maths
    with peft.disable_adapter():
        assert drafted(drafter) == alone
    peft.delete_adapter("code")
    assert drafted(drafter) == maths
    assert peft.unload() is heads and drafted(drafter) == alone
    assert heads.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in heads.state_dict().items())


@families
def test_drafts_are_those_of_the_modules_with_the_adapter_in_place(
    backbone: Backbone, kind: str, lm_head: str, options: dict[str, Any]
) -> None:
    heads = make(backbone, kind, lm_head, **options)
    adapt_heads(heads, rank=2, alpha=4.0, seed=0)
    shake(heads, 1)
    drafter = HeadsDrafter(heads, chain_template(K), dtype=torch.float64, device=torch.device("cpu"))
    for tokens in drafted(drafter):
        seed = drafted(drafter).index(tokens)
        generator = torch.Generator().manual_seed(seed)
        h = torch.randn(5, heads.config.hidden_size, generator=generator, dtype=torch.float64)
        layers = torch.randn(5, len(heads.taps), h.shape[-1], generator=generator, dtype=h.dtype)
        text = torch.tensor([3, 1, 4, 1, 5, *tokens[: K + 1]])
        after = torch.stack([text[1 + k : 6 + k] for k in range(K)], dim=-1)
        given = {"layers": layers[None]} if heads.taps else {}
        guesses = heads(h[None], after[None], **given)[:, 0, -1].argmax(-1)
        assert tuple(guesses.tolist()) == tokens[1 : K + 1]


@families
def test_an_adapter_is_loaded_bit_for_bit_by_peft_and_by_us(
    backbone: Backbone, tmp_path: Path, kind: str, lm_head: str, options: dict[str, Any]
) -> None:
    heads = make(backbone, kind, lm_head, **options)
    folder = save_two(heads, tmp_path)["maths"]
    described = json.loads((folder / "adapter_config.json").read_text())
    assert described["peft_type"] == "LORA" and described["r"] == 2 and described["base_model_name_or_path"] == "base"
    stored = load_file(folder / ADAPTER_WEIGHTS)
    load_adapter(heads, folder, "ours")
    ours = {name.replace(".ours", ""): tensor for name, tensor in heads.state_dict().items() if ".lora_" in name}
    delete(heads, "ours")
    PeftModel.from_pretrained(heads, folder, adapter_name="theirs")
    theirs = {name.replace(".theirs", ""): tensor for name, tensor in heads.state_dict().items() if ".lora_" in name}
    assert len(ours) == len(stored) - 1  # and the note
    for name, tensor in ours.items():
        assert torch.equal(tensor, stored["base_model.model." + name]) and torch.equal(tensor, theirs[name])


def test_what_peft_saves_again_still_has_its_tree(backbone: Backbone, tmp_path: Path) -> None:
    heads = make(backbone, "medusa")
    folder = save_two(heads, tmp_path)["code"]
    peft = PeftModel.from_pretrained(heads, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for the base on the hub
        peft.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    peft.unload()
    drafter = drafting(heads)
    PeftModel.from_pretrained(heads, tmp_path / "again")
    drafted(drafter)
    assert drafter.template == TREES["code"]


@pytest.mark.parametrize(("kind", "options"), [("medusa", {}), ("hydra", {}), ("eagle", {}), ("fused", {"taps": "1"})])
def test_output_is_the_targets_under_every_adapter(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    target = tiny_model()
    prompt = torch.randint(5, 90, (1, 9), generator=torch.Generator().manual_seed(3))
    greedy = target.generate(prompt, do_sample=False, max_new_tokens=24)
    torch.manual_seed(11)
    sampled = target.generate(prompt, do_sample=True, max_new_tokens=24)
    probe = Backbone(target)
    heads = make(probe, kind, **options)
    probe.detach()
    model = MedusaModel(target, heads, probe=False)
    for name, folder in save_two(heads, tmp_path).items():
        model.load_adapter(folder, name)
    for name in ("maths", "code", "maths", None):
        model.disable_adapters() if name is None else model.set_adapter(name)
        assert model.active_adapters() == ([] if name is None else [name])
        assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=24), greedy)
        expected = 4 if name is None else len(TREES[name].paths) + 1  # a chain of K guesses, and the root
        assert max(model.last_stats.pass_sizes) == expected
        torch.manual_seed(11)
        assert torch.equal(model.generate(prompt, do_sample=True, max_new_tokens=24), sampled)


def test_a_folder_of_an_adapter_brings_its_heads_and_its_model(tmp_path: Path) -> None:
    name = str(save_tiny_model(tmp_path / "model"))
    plain = MedusaModel.from_pretrained(name)
    heads = make(plain.backbone, "medusa")
    config = replace(plain.medusa_config, heads=heads.config)
    save_heads(tmp_path / "heads", heads, config)
    adapt_heads(heads, rank=2, alpha=4.0, seed=0)
    shake(heads, 5)
    own = replace(config, tree=TREES["maths"], base_heads=str(tmp_path / "heads"), base_heads_hash=weights_hash(heads))
    save_adapter(tmp_path / "adapter", heads, own)
    assert is_adapter(tmp_path / "adapter") and not is_adapter(tmp_path / "heads")
    model = MedusaModel.from_pretrained(tmp_path / "adapter")
    assert model.active_adapters() == ["default"] and model.drafter.template == TREES["maths"]
    assert drafted(model.drafter) == drafted(
        HeadsDrafter(heads, TREES["maths"], dtype=torch.float64, device=torch.device("cpu"))
    )
    model.save_pretrained(tmp_path / "again")  # the active adapter, as transformers has it
    assert (
        load_file(tmp_path / "again" / ADAPTER_WEIGHTS).keys()
        == load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS).keys()
    )
    assert read_config(tmp_path / "again") == own
    shutil.rmtree(tmp_path / "heads")
    with pytest.raises(CheckpointError, match=r"stands on the heads .*heads', which cannot be loaded"):
        load_with_adapter(tmp_path / "adapter", model.backbone)


def test_an_explicit_tree_is_kept_whatever_adapter_is_active(tmp_path: Path) -> None:
    target = tiny_model()
    probe = Backbone(target)
    heads = make(probe, "medusa")
    probe.detach()
    folder = save_two(heads, tmp_path)["maths"]
    model = MedusaModel(target, heads, tree=chain_template(2), probe=False)
    model.load_adapter(folder)
    drafted(model.drafter)
    assert model.drafter.template == chain_template(2)


def test_a_new_adapter_under_an_old_name_is_drafted_with(backbone: Backbone, tmp_path: Path) -> None:
    heads = make(backbone, "medusa")
    drafter, found = drafting(heads), []
    folders = save_two(heads, tmp_path)
    for name in ("maths", "code", "maths"):
        load_adapter(heads, folders[name], "same")
        found.append(drafted(drafter))
        delete(heads, "same")
    assert found[0] == found[2] != found[1]


def test_adapters_made_by_peft_alone_keep_the_heads_own_tree(backbone: Backbone, tmp_path: Path) -> None:
    heads = make(backbone, "medusa")
    drafter = drafting(heads)
    get_peft_model(heads, LoraConfig(r=2, target_modules=["linear"], init_lora_weights=False))
    drafted(drafter)
    assert len(drafter.template.paths) == 5
    config = MedusaConfig(heads=heads.config, tree=drafter.template)
    assert save_active(tmp_path / "own", heads, config)
    assert read_config(tmp_path / "own").base_heads_hash == weights_hash(heads)


def test_names_and_states_are_those_that_were_asked_for(backbone: Backbone, tmp_path: Path) -> None:
    heads = make(backbone, "medusa")
    assert names(heads) == [] and not save_active(tmp_path / "none", heads, MedusaConfig(heads=heads.config))
    folders = save_two(heads, tmp_path)
    for name, folder in folders.items():
        load_adapter(heads, folder, name)
    assert names(heads) == ["maths", "code"]
    assert not any(parameter.requires_grad for parameter in heads.parameters())
    enable(heads, False)
    with pytest.raises(ConfigError, match=r"one adapter must be active to be saved, got \[\] of"):
        save_active(tmp_path / "none", heads, MedusaConfig(heads=heads.config))
    activate(heads, "maths")
    with pytest.raises(ConfigError, match=r"adapter_name must be one of those loaded, \['maths', 'code'\], got 'law'"):
        activate(heads, "law")
    with pytest.raises(ConfigError, match="adapter_name must be a new one, got 'code'"):
        load_adapter(heads, folders["code"], "code")
    with pytest.warns(UserWarning, match="maths was active which is now deleted. Setting active adapter to code"):
        delete(heads, "maths")  # as PEFT does it
    delete(heads, "code")
    assert names(heads) == [] and not adapted_layers(heads)
    with pytest.raises(ConfigError, match="one of those loaded"):
        delete(heads, "maths")


def test_an_adapter_of_other_heads_is_refused_or_told(backbone: Backbone, tmp_path: Path) -> None:
    heads = make(backbone, "medusa")
    folder = save_two(heads, tmp_path)["maths"]
    with pytest.raises(CheckpointError, match=r"is for the heads 'base', .*kind='medusa'.* got .*kind='hydra'"):
        load_adapter(make(backbone, "hydra"), folder, "maths")
    with pytest.warns(UserWarning, match=r"trained on other weights of the heads 'base' than these\. Output stays"):
        load_adapter(make(backbone, "medusa"), folder, "maths")


def test_an_adapter_of_a_target_is_not_one_of_heads(tmp_path: Path) -> None:
    model = MedusaModel(tiny_model(), drafter="ngram", probe=False)
    get_peft_model(tiny_model(), LoraConfig(r=2)).save_pretrained(tmp_path / "target")
    with pytest.raises(ConfigError, match="this model has none; wrap it with heads"):
        model.load_adapter(tmp_path / "target")
    model.detach()
    model = MedusaModel(model.target, probe=False)
    with pytest.raises(CheckpointError):
        model.load_adapter(tmp_path / "target")
    with pytest.raises(CheckpointError, match="an adapter of the target is loaded before the target is wrapped"):
        load_adapter(model.heads, tmp_path / "target", "default")


def test_damaged_adapters_are_refused_and_leave_no_trace(backbone: Backbone, tmp_path: Path) -> None:
    heads = make(backbone, "medusa")
    folder = save_two(heads, tmp_path)["maths"]
    state = load_file(folder / ADAPTER_WEIGHTS)
    missing = next(name for name in state if "lora_B" in name)
    for change, words in (
        ({missing: None}, "missing"),
        ({"base_model.model.heads.9.lora_A.weight": torch.ones(1, 2)}, "surplus"),
    ):
        changed = {name: tensor for name, tensor in (state | change).items() if tensor is not None}
        save_file(changed, folder / ADAPTER_WEIGHTS)
        with pytest.raises(CheckpointError, match=words):
            load_adapter(heads, folder, "maths")
        assert names(heads) == [] and not adapted_layers(heads)
    save_file(state | {missing: state[missing][:3].clone()}, folder / ADAPTER_WEIGHTS)
    with pytest.raises(CheckpointError, match="does not fit these heads"):
        load_adapter(heads, folder, "maths")
    assert names(heads) == [] and not adapted_layers(heads)
    adapt_heads(heads, rank=2, alpha=4.0, seed=0)
    with torch.no_grad():
        heads.heads[0].blocks[0].linear.lora_A["default"].weight[0] = float("nan")
    with pytest.raises(CheckpointError, match="not finite; the adapter was not saved"):
        save_adapter(tmp_path / "nan", heads, MedusaConfig(heads=heads.config))
    assert not (tmp_path / "nan").exists()
