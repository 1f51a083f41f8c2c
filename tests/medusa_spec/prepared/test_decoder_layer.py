"""A decoder layer in one call is its parts one by one, and stands aside for whatever happens between them."""

import copy
import threading

import pytest
import torch
from peft import IA3Config, LNTuningConfig, LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from medusa_spec import prepare as prepare_module
from medusa_spec.native.build import library
from medusa_spec.prepare import prepare
from medusa_spec.prepared import decoder, decoder_layer
from medusa_spec.prepared.decoder_layer import FastDecoderLayer
from medusa_spec.prepared.packed_linear import available
from medusa_spec.prepared.swap import swap_back

pytestmark = pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")
DTYPES = (torch.bfloat16, torch.float32)
TAKEN = ["llama", "qwen2", "qwen3", "mistral"]
OTHERS = ["gemma2", "gemma3_text", "olmo2", "cohere", "granite", "starcoder2", "phi3", "exaone4"]


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch):
    monkeypatch.setattr(prepare_module, "WORTH_IT", 0.0)


@pytest.fixture
def counted(monkeypatch):
    """Number of layers that ran in one call."""
    calls, run = [], decoder_layer.run_layers
    counting = lambda records, *args: calls.extend(records) or run(records, *args)  # noqa: E731
    monkeypatch.setattr(decoder_layer, "run_layers", counting)
    monkeypatch.setattr(decoder, "run_layers", counting)
    return calls


@pytest.fixture
def tree_logits(passes, random_tree, prompt):
    """`tree_logits(model)`: logits of a tree behind a prompt."""

    def run(model, nodes=9):
        with passes(model, prompt(20)) as run:
            return run.tree(*random_tree(nodes))

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TAKEN)
def test_it_gives_the_bits_of_its_parts_one_by_one(make_wide, tree_logits, counted, name, dtype):
    model = make_wide(name, dtype=dtype)
    prepare(model, model.get_output_embeddings())
    counted.clear()
    whole = {nodes: tree_logits(model, nodes) for nodes in (1, 9, 33, 80)}
    assert len(counted) == 3 * 4
    for layer in model.model.layers:
        swap_back(layer)
    for nodes, logits in whole.items():
        assert torch.equal(tree_logits(model, nodes), logits)
    assert len(counted) == 3 * 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TAKEN)
def test_layers_of_four_parts_are_found(make_wide, name, dtype):
    model = make_wide(name, dtype=dtype)
    prepared = prepare(model)
    assert all(isinstance(layer, FastDecoderLayer) for layer in model.model.layers)
    assert all(layer in prepared.modules for layer in model.model.layers)


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_left_alone(make_wide, name):
    """Sandwich norms, norms behind, parallel branches, multipliers, plain MLPs, joined projections."""
    model = make_wide(name, dtype=torch.float32)
    assert prepare(model).layers
    assert not any(isinstance(module, FastDecoderLayer) for module in model.modules())


class Parallel(LlamaDecoderLayer):
    """Both branches read the same norm."""

    def forward(self, hidden_states, **kwargs):
        normed = self.input_layernorm(hidden_states)
        return hidden_states + self.self_attn(hidden_states=normed, **kwargs)[0] + self.mlp(normed)


class Skipped(LlamaDecoderLayer):
    """The second residual is the layer's input."""

    def forward(self, hidden_states, **kwargs):
        middle = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(middle))


class Dropping(LlamaDecoderLayer):
    """A dropout that acts in training alone."""

    def forward(self, hidden_states, **kwargs):
        return nn.functional.dropout(super().forward(hidden_states, **kwargs), 0.9, self.training)


@pytest.mark.parametrize("kind", [Parallel, Skipped])
def test_other_chains_are_left_alone(make_wide, kind):
    model = make_wide("llama", dtype=torch.float32)
    model.model.layers[1].__class__ = kind
    prepare(model)
    assert [isinstance(layer, FastDecoderLayer) for layer in model.model.layers] == [True, False, True]


def test_dropout_in_training_is_kept(make_wide, tree_logits):
    model = make_wide("llama", dtype=torch.float32)
    model.model.layers[1].__class__ = Dropping
    prepare(model)
    assert isinstance(model.model.layers[1], FastDecoderLayer)
    assert torch.equal(tree_logits(model), tree_logits(model))
    model.model.layers[1].training = True
    assert not torch.equal(tree_logits(model), tree_logits(model))


# --- what happens afterwards ------------------------------------------------------------------------------------------

PARTS = [
    "",
    ".mlp",
    ".self_attn",
    ".input_layernorm",
    ".post_attention_layernorm",
    ".mlp.act_fn",
    ".mlp.gate_proj",
    ".mlp.down_proj",
    ".self_attn.q_proj",
    ".self_attn.o_proj",
    ".self_attn.q_norm",
    ".self_attn.k_norm",
]


def part(model, name):
    return model.get_submodule("model.layers.1" + name)


def larger(out):
    return (out[0] * 1.5, *out[1:]) if isinstance(out, tuple) else out * 1.5


def hook(name):
    return lambda model: part(model, name).register_forward_hook(lambda module, args, out: larger(out))


def own_forward(name):
    def change(model):
        module = part(model, name)
        forward = module.forward
        module.forward = lambda *args, **kwargs: larger(forward(*args, **kwargs))

    return change


def exchange(name, make):
    def change(model):
        parent, _, attribute = name.rpartition(".")
        setattr(part(model, parent), attribute, make(part(model, name)))

    return change


def bounded(module):
    return nn.Sequential(module, nn.Hardtanh())


def doubled(module):
    module.weight.data.mul_(2)


def strided(norm):
    norm.weight.data = torch.linspace(-1, 2, 2 * len(norm.weight))[::2]


def scaled_state(model, **kwargs):
    state = {name: tensor * 1.25 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, **kwargs)


def lora(*names, **settings):
    def change(model):
        torch.manual_seed(1)
        config = LoraConfig(r=2, target_modules=list(names), init_lora_weights=False, **settings)
        return get_peft_model(model, config).eval()

    return change


def disabled(model):
    adapted = lora("q_proj", "down_proj")(model)
    adapted.base_model.disable_adapter_layers()
    return adapted


def saved_modules(model):
    adapted = lora("q_proj", modules_to_save=["q_norm", "post_attention_layernorm"])(model)
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name:
            parameter.data.mul_(1.5)
    return adapted


def tuned_norms(model):
    adapted = get_peft_model(model, LNTuningConfig(target_modules=["input_layernorm", "k_norm"])).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(1.5)
    return adapted


def rescaled(model):
    config = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    adapted = get_peft_model(model, config).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(1.5)
    return adapted


def global_hook(model):
    kind = type(part(model, ".mlp"))
    return nn.modules.module.register_module_forward_hook(
        lambda module, args, out: larger(out) if type(module) is kind else out
    )


CHANGES = {
    **{f"hook on layer{name}": hook(name) for name in PARTS},
    **{f"forward of layer{name}": own_forward(name) for name in PARTS},
    **{f"another{name}": exchange(name, bounded) for name in PARTS if "proj" in name},
    "no mlp": exchange(".mlp", lambda old: nn.Identity()),
    "no norm": exchange(".input_layernorm", lambda old: nn.Identity()),
    "no q norm": exchange(".self_attn.q_norm", lambda old: nn.Identity()),
    "another activation": exchange(".mlp.act_fn", lambda old: nn.ReLU()),
    "doubled norm": lambda model: doubled(part(model, ".input_layernorm")),
    "doubled q norm": lambda model: doubled(part(model, ".self_attn.q_norm")),
    "another epsilon": lambda model: setattr(part(model, ".input_layernorm"), "variance_epsilon", 0.5),
    "another epsilon of q": lambda model: setattr(part(model, ".self_attn.q_norm"), "variance_epsilon", 0.5),
    "another factor": lambda model: setattr(part(model, ".self_attn"), "scaling", 1.0),
    "parametrized norm": lambda model: register_parametrization(
        part(model, ".input_layernorm"), "weight", nn.Hardtanh()
    ),
    "strided norm": lambda model: strided(part(model, ".input_layernorm")),
    "lora on q": lora("q_proj"),
    "lora on o": lora("o_proj"),
    "lora on gate": lora("gate_proj"),
    "lora on down": lora("down_proj"),
    "lora on all": lora("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "lora disabled": disabled,
    "modules to save": saved_modules,
    "tuned norms": tuned_norms,
    "rescaled": rescaled,
    "loaded": scaled_state,
    "loaded and assigned": lambda model: scaled_state(model, assign=True),
    "a layer loaded": lambda model: part(model, "").load_state_dict(model.model.layers[0].state_dict()),
    "cast": lambda model: model.double(),
    "cast and back": lambda model: model.double().float(),
    "a layer cast and back": lambda model: part(model, "").half().float(),
    "moved": lambda model: model.to("cpu"),
    "trained": lambda model: model.requires_grad_(True),
    "training": lambda model: model.train(),
    "one mlp twice": lambda model: setattr(model.model.layers[1], "mlp", model.model.layers[0].mlp),
}


NEUTRAL = {
    "hook on layer.self_attn.q_proj",  # normed afterwards
    "forward of layer.self_attn.q_proj",
    "lora disabled",
    "cast",
    "cast and back",
    "moved",
    "trained",
    "training",
}
"""Changes that leave the logits as they are."""


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_afterwards_counts_at_once(make_wide, tree_logits, name):
    change = CHANGES[name]
    plain = make_wide("qwen3", dtype=torch.float32)
    model = copy.deepcopy(plain)
    prepare(model, model.get_output_embeddings())
    unchanged, logits = tree_logits(model), []
    for own in (model, plain):
        changed = change(own)
        logits.append(tree_logits(changed if isinstance(changed, PeftModel) else own))
    size = logits[1].abs().mean()
    assert logits[0].dtype == logits[1].dtype
    assert (logits[0] - logits[1]).abs().max() < 1e-4 * size
    if name not in NEUTRAL:  # the change is one, so that missing it would show
        assert (logits[0] - unchanged).abs().max() > 1e-3 * size


def test_hooks_on_everything_are_called(make_wide, tree_logits):
    plain = make_wide("qwen3", dtype=torch.float32)
    model = copy.deepcopy(plain)
    prepare(model)
    logits = []
    for own in (model, plain):
        handle = global_hook(own)
        try:
            logits.append(tree_logits(own))
        finally:
            handle.remove()
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert (tree_logits(model) - logits[0]).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_in_another_dtype_is_never_misread(make_wide, tree_logits, dtype):
    """The plain layer cannot run so; nor may the fast one, on bytes of another kind."""
    model = make_wide("llama", dtype=dtype)
    prepare(model)
    norm = part(model, ".input_layernorm")
    norm.weight.data = norm.weight.data.to(torch.float16 if dtype == torch.bfloat16 else torch.float64)
    with pytest.raises(RuntimeError, match="dtype"):
        tree_logits(model)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_is_as_before(make_wide, tree_logits, dtype, autocast):
    plain = make_wide("qwen3", dtype=dtype)
    model = copy.deepcopy(plain)
    prepare(model, model.get_output_embeddings())
    with torch.autocast("cpu", dtype=autocast):
        got, expected = tree_logits(model), tree_logits(plain)
    assert got.dtype == expected.dtype
    assert (got - expected).float().abs().max() < 0.15 * expected.float().abs().mean()
    assert dtype == autocast or torch.equal(got, expected)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_outputs_of_layers_can_be_recorded(make_wide, name, prompt):
    plain = make_wide("llama", dtype=torch.float32, attn_implementation="eager")
    model = copy.deepcopy(plain)
    prepare(model)
    outputs = [own(prompt(9), **{name: True}) for own in (model, plain)]
    got, expected = (getattr(out, name.removeprefix("output_")) for out in outputs)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_recording_the_states_of_a_tree_pass_works(make_wide, passes, random_tree, prompt):
    plain = make_wide("llama", dtype=torch.float32)
    model, recorded = copy.deepcopy(plain), []
    prepare(model)
    for own in (model, plain):
        own(prompt(3), output_hidden_states=True)  # installs the recording hooks of transformers for good
        states = []
        for layer in own.model.layers:
            layer.register_forward_hook(lambda module, args, out, states=states: states.append(out))
        with passes(own, prompt(9)) as run:
            states.clear()
            run.tree(*random_tree(7))
        recorded.append(torch.stack(states))
    torch.testing.assert_close(*recorded, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_grad_modes_change_nothing(make_wide, tree_logits, mode):
    model = make_wide("llama", dtype=torch.bfloat16)
    prepare(model)
    expected = tree_logits(model)
    with mode():
        assert torch.equal(tree_logits(model), expected)


def test_the_users_defaults_change_nothing(make_wide, tree_logits):
    model = make_wide("qwen3", dtype=torch.float32)
    prepare(model)
    expected = tree_logits(model)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(tree_logits(model), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_at_once_do_not_disturb_each_other(make_wide, random_tree, prompt, passes, dtype):
    model = make_wide("qwen3", dtype=dtype)
    prepare(model, model.get_output_embeddings())
    with passes(model, prompt(20)) as run:
        trees = [random_tree(nodes, seed) for seed, nodes in enumerate((5, 9, 17, 33))]
        expected = [run.tree(*tree) for tree in trees]
        wrong = []

        def work(place):
            for _ in range(15):
                if not torch.equal(run.tree(*trees[place]), expected[place]):
                    wrong.append(place)

        threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_batch_are_those_of_one(make_wide, passes, random_tree, dtype):
    model = make_wide("qwen3", dtype=dtype)
    prepare(model, model.get_output_embeddings())
    ids = torch.randint(2, 128, (3, 12), generator=torch.Generator().manual_seed(0))
    parents, tokens = random_tree(9)
    with passes(model, ids) as run:
        together = run.tree(parents, tokens)
    for row in range(3):
        with passes(model, ids[row : row + 1]) as run:
            assert torch.equal(run.tree(parents, tokens), together[row])
