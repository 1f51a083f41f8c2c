"""Only the files that hold heads are downloaded, and no target with them."""

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

from medusa_spec import checkpoint
from medusa_spec.checkpoint import heads_folder, load_heads, names_heads
from medusa_spec.errors import CheckpointError
from medusa_spec.formats import hub
from medusa_spec.formats.hub import fetch, speaks_of_heads

H, V = 32, 128
MEDUSA = {"0.0.linear.weight": (H, H), "0.0.linear.bias": (H,), "0.1.weight": (V, H)}
OWN = ["medusa_config.json", "heads.safetensors"]


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A stand-in for the hub: `write`'s folder is the repository `org/heads`; the list of what was downloaded."""
    downloaded: list[str] = []
    here = tmp_path / "downloads"

    def download(repository, allow_patterns, ignore_patterns=()):
        if repository != "org/heads":
            raise OSError("no such repository")
        here.mkdir(exist_ok=True)
        for path in (tmp_path / "foreign").iterdir():
            wanted = any(fnmatch(path.name, pattern) for pattern in allow_patterns)
            if wanted and not any(fnmatch(path.name, pattern) for pattern in ignore_patterns):
                shutil.copy(path, here)
                downloaded.append(path.name)
        return str(here)

    monkeypatch.setattr(hub, "snapshot_download", download)
    return downloaded


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_heads_alone_are_downloaded_with_their_config(file, served, randoms, write, target):
    write(randoms(MEDUSA), {"medusa_num_heads": 1}, file=file)
    (Path(write({}, file="optimizer.pt")) / "README.md").write_text("words")
    heads, _ = load_heads("org/heads", target)
    assert heads.config.num_heads == 1
    assert set(served) == {"config.json", "README.md", file}


def test_safetensors_are_preferred(served, randoms, write):
    write(randoms(MEDUSA), {"medusa_num_heads": 1}, file="medusa_lm_head.pt")
    write(randoms(MEDUSA), file="medusa_lm_head.safetensors")
    fetch("org/heads", OWN, own_config=OWN[0])
    assert "medusa_lm_head.pt" not in served


def test_of_a_full_model_only_the_shards_with_heads_are_downloaded(served, randoms, write, target):
    tensors = randoms({f"medusa_head.{name}": shape for name, shape in MEDUSA.items()})
    write(randoms({"model.norm.weight": (H,)}), {"model_type": "llama"}, file="model-1.safetensors")
    folder = write(tensors, file="model-2.safetensors")
    names = dict.fromkeys(tensors, "model-2.safetensors") | {"model.norm.weight": "model-1.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    heads, _ = load_heads("org/heads", target)
    assert heads.config.num_heads == 1 and "model-1.safetensors" not in served


def test_heads_beside_the_shards_of_a_target_come_without_them(served, randoms, write, target):
    write(randoms({"model.norm.weight": (H,)}), {"medusa_num_heads": 1}, file="model-1.safetensors")
    folder = write(randoms(MEDUSA), file="medusa_lm_head.safetensors")
    index = json.dumps({"weight_map": {"model.norm.weight": "model-1.safetensors"}})
    (folder / "model.safetensors.index.json").write_text(index)
    heads, _ = load_heads("org/heads", target)
    assert heads.config.num_heads == 1 and "model-1.safetensors" not in served


def test_our_own_heads_are_downloaded_alone(served, write):
    folder = write({"heads.x": torch.ones(1)})
    (folder / "medusa_config.json").write_text("{}")
    write({"other": torch.ones(1)}, file="model.safetensors")
    assert (fetch("org/heads", OWN, own_config=OWN[0]) / "heads.safetensors").is_file()
    assert sorted(served) == ["heads.safetensors", "medusa_config.json"]


@pytest.mark.parametrize("config", [None, {"model_type": "llama"}])
def test_a_repository_without_heads_is_refused_before_its_weights_are_downloaded(config, served, write):
    write({"model.norm.weight": torch.ones(H)}, config, file="model.safetensors")
    with pytest.raises(CheckpointError, match="'org/heads': .* says nothing of heads"):
        heads_folder("org/heads")
    assert "model.safetensors" not in served


SPEAKING = [
    {"medusa_num_heads": 2},
    {"hydra_num_heads": 4},
    {"model_type": "medusa", "num_heads": 3},
    {"model_type": "llama", "medusa": {"num_medusa_heads": 2}},
    {"architecture": "MedusaForCausalLM"},
    {"architectures": ["MedusaModel"], "num_heads": 3},
    {"speculators_model_type": "eagle3"},
]


@pytest.mark.parametrize("config", SPEAKING)
def test_a_config_speaks_of_heads(config):
    assert speaks_of_heads(config)


@pytest.mark.parametrize(
    "config", [{}, [], None, {"model_type": "llama", "num_attention_heads": 4, "num_heads": 4, "medusa": None}]
)
def test_a_models_config_does_not(config):
    assert not speaks_of_heads(config)


@pytest.mark.parametrize("config", [{"medusa_num_heads": 2}, {"model_type": "llama"}, None])
def test_a_name_is_one_of_heads_if_its_config_speaks_of_them(config, tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    if config is not None:
        path.write_text(json.dumps(config))
    found = {"config.json": None if config is None else str(path)}
    monkeypatch.setattr(checkpoint, "cached_file", lambda repository, file, **_: found.get(file))
    speaks = config == {"medusa_num_heads": 2}
    assert names_heads("org/somewhere") == names_heads(tmp_path) == speaks


EAGLE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}


def test_a_config_of_one_layer_is_enough_to_download_but_does_not_speak_of_heads(served, randoms, write):
    write(randoms({"fc.weight": (H, 2 * H)}), EAGLE, file="pytorch_model.bin")
    assert not speaks_of_heads(EAGLE)
    assert (fetch("org/heads", OWN, own_config=OWN[0]) / "pytorch_model.bin").is_file()


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"architectures": ["Eagle3DraftModel"]},
        {"architectures": ["EagleLlamaForCausalLM"]},
        {"architectures": ["MLPSpeculatorPreTrainedModel"]},
        {"model_type": "mlp_speculator"},
        {"draft_vocab_size": 32000},
    ],
)
def test_configs_of_draft_models_speak_of_heads(config):
    assert speaks_of_heads(config)
    assert not speaks_of_heads({"architectures": ["Eagle2_5_VLForConditionalGeneration"], "model_type": "eagle_2_5_vl"})


@pytest.mark.parametrize("name", ["midlayer.mlp.up_proj.weight", "speculator.emb.0.weight", "fc.weight"])
def test_shards_of_a_draft_model_are_all_downloaded(name, served, randoms, write):
    write(randoms({"other.weight": (H,)}), {"draft_vocab_size": 3}, file="model-1.safetensors")
    folder = write(randoms({name: (H,)}), file="model-2.safetensors")
    index = {"weight_map": {"other.weight": "model-1.safetensors", name: "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fetch("org/heads", OWN, own_config=OWN[0])
    assert {"model-1.safetensors", "model-2.safetensors"} <= set(served)
