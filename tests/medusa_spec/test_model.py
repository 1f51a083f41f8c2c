"""The front door: loading, wrapping, saving."""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from medusa_spec import HeadsConfig, MedusaHeads, MedusaModel, NgramDrafter, TreeTemplate
from medusa_spec import model as model_module
from medusa_spec.errors import AttachError, CheckpointError, ConfigError

TREE = TreeTemplate(paths=((0,), (1,), (0, 0), (0, 1)))


@pytest.fixture
def trained(llama):
    """Heads with random weights and a draft vocabulary for the tiny Llama."""
    from medusa_spec.backbone import Backbone

    backbone = Backbone(llama)
    ids = torch.arange(10, 74)
    config = HeadsConfig(hidden_size=32, vocab_size=128, num_heads=3, draft_vocab_size=64)
    heads = MedusaHeads(config, backbone.projection().rows(ids), ids).double()
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    backbone.detach()
    return heads


def test_saved_heads_load_bit_equal_and_decode_the_same(llama, trained, prompt, tmp_path):
    llama.save_pretrained(tmp_path / "base")
    model = MedusaModel(llama, trained, tree=TREE)
    ids = prompt(8)
    out = model.generate(ids, do_sample=False, max_new_tokens=20)
    model.save_pretrained(tmp_path / "heads")
    again = MedusaModel.from_pretrained(tmp_path / "base", heads=tmp_path / "heads", tree=TREE)
    assert again.dtype == torch.float64
    for name, tensor in model.heads.state_dict().items():
        assert torch.equal(tensor, again.heads.state_dict()[name])
    assert torch.equal(again.generate(ids, do_sample=False, max_new_tokens=20), out)
    assert again.last_stats.accepted_by_depth == model.last_stats.accepted_by_depth


def test_heads_alone_load_their_target(llama, trained, prompt, tmp_path):
    llama.save_pretrained(tmp_path / "base")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    MedusaModel(target, trained).save_pretrained(tmp_path / "heads")
    model = MedusaModel.from_pretrained(tmp_path / "heads")
    ids = prompt(6)
    assert torch.equal(
        model.generate(ids, do_sample=False, max_new_tokens=9), llama.generate(ids, do_sample=False, max_new_tokens=9)
    )


def test_heads_that_do_not_name_their_target_say_so(llama, trained, tmp_path):
    llama.config._name_or_path = ""
    MedusaModel(llama, trained).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="do not name their target"):
        MedusaModel.from_pretrained(tmp_path)


def test_heads_of_another_size_are_refused_and_the_model_given_back(llama, trained, make_model, tmp_path):
    MedusaModel(llama, trained).save_pretrained(tmp_path)
    other = make_model("llama", hidden_size=64)
    name = other.config._attn_implementation
    with pytest.raises(CheckpointError, match=r"hidden_size 32, the target has 64"):
        MedusaModel(other, str(tmp_path))
    assert other.config._attn_implementation == name


def test_heads_of_another_lm_head_are_a_warning(llama, trained, make_model, prompt, tmp_path):
    MedusaModel(llama, trained).save_pretrained(tmp_path)
    other = make_model("llama", seed=7)
    ids = prompt(5)
    answer = other.generate(ids, do_sample=False, max_new_tokens=9)
    with pytest.warns(UserWarning, match="another LM head"):
        model = MedusaModel(other, tmp_path)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=9), answer)


def test_without_heads_they_start_as_the_target_s_own_lm_head(llama, prompt):
    model = MedusaModel(llama)
    h = model.backbone.forward(prompt(5), last_only=True)
    for logits in model.heads(h.h[0, -1]):
        torch.testing.assert_close(logits, h.logits[0, -1])


def test_ngram_needs_no_heads(llama, prompt, tmp_path):
    llama.save_pretrained(tmp_path)
    model = MedusaModel.from_pretrained(tmp_path, drafter="ngram")
    assert model.heads is None
    assert isinstance(model.drafter, NgramDrafter)
    with pytest.raises(ConfigError, match="no heads to save"):
        model.save_pretrained(tmp_path / "heads")


@pytest.mark.parametrize("drafter", ["magic", 3, None])
def test_an_unknown_drafter_is_named(llama, drafter):
    with pytest.raises(ConfigError, match="drafter"):
        MedusaModel(llama, drafter=drafter)


def test_a_tree_deeper_than_the_heads_is_refused(llama, trained):
    with pytest.raises(ConfigError, match="at most 3 deep"):
        MedusaModel(llama, trained, tree=TreeTemplate(paths=tuple((0,) * n for n in range(1, 5))))


def test_heads_of_a_wrong_type_are_named(llama):
    with pytest.raises(ConfigError, match="heads"):
        MedusaModel(llama, heads=7)


def test_what_the_target_offers_is_passed_through(llama, prompt):
    model = MedusaModel(llama, probe=False)
    ids = prompt(4)
    assert model.config is llama.config
    assert model.device == llama.device
    assert model.get_input_embeddings() is llama.get_input_embeddings()
    assert torch.equal(model(ids).logits, llama(ids).logits)
    assert model.can_generate()
    with pytest.raises(AttributeError):
        _ = model.no_such_thing


def test_the_target_is_frozen_and_only_heads_are_saved(llama, trained, tmp_path):
    model = MedusaModel(llama, trained, probe=False)
    assert not any(parameter.requires_grad for parameter in model.target.parameters())
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"heads.safetensors", "medusa_config.json"}


def test_detach_gives_back_what_was_trainable_and_training(llama):
    llama.train()
    llama.lm_head.requires_grad_(False)
    model = MedusaModel(llama, probe=False)
    model.train()
    assert not model.target.training
    assert model.heads.training
    assert model.detach() is llama
    assert llama.training
    assert {name for name, p in llama.named_parameters() if not p.requires_grad} == {"lm_head.weight"}


def test_a_failed_wrap_gives_the_model_back(llama, monkeypatch):
    def refuse(backbone):
        raise AttachError("not exact")

    monkeypatch.setattr(model_module, "_probe", refuse)
    name = llama.config._attn_implementation
    with pytest.raises(AttachError, match="not exact"):
        MedusaModel(llama)
    assert llama.config._attn_implementation == name


def test_push_to_hub_uploads_what_save_pretrained_writes(llama, trained, monkeypatch, tmp_path):
    pushed = {}
    monkeypatch.setattr(MedusaModel, "push_to_hub", lambda self, repo_id, **kwargs: pushed.update(repo_id=repo_id))
    MedusaModel(llama, trained, probe=False).save_pretrained(tmp_path / "my-heads", push_to_hub=True)
    assert pushed == {"repo_id": "my-heads"}


def test_loading_warns_of_nothing(llama, trained, tmp_path):
    MedusaModel(llama, trained).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llama_again = AutoModelForCausalLM.from_config(llama.config).double()
        llama_again.load_state_dict(llama.state_dict())
        MedusaModel(llama_again, tmp_path)


CASTS = {
    "half": lambda model: model.half(),
    "to": lambda model: model.to(torch.bfloat16),
    "target": lambda model: model.target.double(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=list(CASTS))
def test_a_model_that_was_cast_after_wrapping_decodes_in_its_new_dtype(make_model, prompt, cast):
    model = MedusaModel(make_model("llama", dtype=torch.float32))
    cast(model)
    ids = prompt(9)
    plain = model.target.generate(ids, do_sample=False, max_new_tokens=9)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=9), plain)
    assert model.drafter.stacked.dtype == model.dtype != torch.float32
    model.heads.to(model.dtype)
    h = model.backbone.forward(ids, last_only=True)
    torch.testing.assert_close(model.heads(h.h[0, -1])[0], h.logits[0, -1])


def test_only_what_was_training_trains_again(make_model):
    target = make_model("gpt2").train()
    target.transformer.h[0].eval()
    before = [module.training for module in target.modules()]
    MedusaModel(target).detach()
    assert [module.training for module in target.modules()] == before


def test_dropout_is_off_before_anything_is_checked(make_model, prompt):
    target = make_model("gpt2").train()  # as from_config and get_peft_model leave a model
    assert "exact" in MedusaModel(target).probe_result


def test_a_generation_config_set_here_is_the_target_s(llama, prompt):
    model = MedusaModel(llama, drafter="ngram", probe=False)
    model.generation_config = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert llama.generation_config is model.generation_config
    assert model.generate(prompt(5)).shape == (1, 8)
