"""The attention kernel is a masked softmax, gives nodes the bits of one-token passes, and serves only where it fits."""

import copy
import ctypes
import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import LlamaAttention

from medusa_spec import prepare as prepare_module
from medusa_spec.attention import visibility
from medusa_spec.native.build import library
from medusa_spec.prepare import prepare
from medusa_spec.prepared.attention import FastAttention
from medusa_spec.prepared.kernels import NORM_STYLES, AttentionCall, RowCall, kernels
from medusa_spec.prepared.packed_linear import available
from medusa_spec.prepared.swap import RECORD
from medusa_spec.tree import shape_of

pytestmark = pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")
DTYPES = (torch.bfloat16, torch.float32)
LEFT_ALONE = 7.0
ROTARY = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "starcoder2", "granite"]


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch):
    monkeypatch.setattr(prepare_module, "WORTH_IT", 0.0)


def numbers(*shape, seed, dtype, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@dataclass(kw_only=True)
class Case:
    """Attention of a random tree behind a random prefix.

    Slots that no node sees are nan where they must not be read, and `LEFT_ALONE` where nothing may be written.
    """

    dtype: torch.dtype
    parents: tuple[int, ...] = (-1,)
    length: int = 5
    base: int = 0
    window: int | None = None
    kv_heads: int = 2
    groups: int = 2
    dim: int = 16
    rotary: int = 16
    softcap: float = 0.0
    sinks: bool = False
    normed: str | None = None
    threads: int = 1
    seed: int = 0
    q_heads: int = field(init=False)

    def __post_init__(self):
        self.q_heads = self.groups * self.kv_heads
        heads, nodes = self.q_heads + 2 * self.kv_heads, len(self.parents)
        self.qkv = numbers(nodes, heads * self.dim, seed=self.seed, dtype=self.dtype, scale=2.0)
        self.depths = torch.tensor(shape_of(self.parents).depths)
        angles = (self.length + self.depths)[:, None] * torch.logspace(0, -3, self.rotary // 2).repeat(2)
        self.cosine, self.sine = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        self.seen = visibility(shape_of(self.parents), length=self.length, base=self.base, window=self.window)
        shape = (self.kv_heads, self.length - self.base + nodes + 3, self.dim)
        self.keys = torch.full(shape, LEFT_ALONE, dtype=self.dtype)
        self.values = self.keys.clone()
        prefix = slice(self.seen.first, self.seen.end)
        for states, seed in ((self.keys, 1), (self.values, 2)):
            states[:, : self.seen.first] = torch.nan
            # by position, so that the prefix of another base or window is the same
            whole = numbers(self.kv_heads, self.length, self.dim, seed=self.seed + seed, dtype=self.dtype)
            states[:, prefix] = whole[:, self.base :][:, prefix]
        self.weights = [numbers(self.dim, seed=self.seed + seed, dtype=self.dtype) for seed in (3, 4)]
        self.sink = numbers(self.q_heads, seed=self.seed + 5, dtype=torch.float32) if self.sinks else None

    def run(self):
        """Output [N, Hq, D]; `keys` and `values` are written to, and `qkv` too."""
        return run_call(self.call(), self.dtype)

    def call(self):
        """The call, but for `out` and `scratch`."""
        nodes = len(self.parents)
        call = AttentionCall(nodes=nodes, q_heads=self.q_heads, kv_heads=self.kv_heads, dim=self.dim)
        call.rotary, call.head_stride, call.threads = self.rotary, self.keys.stride(0), self.threads
        call.first, call.common, call.end = self.seen.first, self.seen.common, self.seen.end
        call.scale, call.softcap, call.epsilon = self.dim**-0.5, self.softcap, 1e-6
        for name in ("qkv", "cosine", "sine", "keys", "values"):
            setattr(call, name, getattr(self, name).data_ptr())
        call.mask = self.seen.mask.data_ptr()
        if self.normed:
            call.norm_style = NORM_STYLES.index(self.normed)
            call.q_norm, call.k_norm = (weight.data_ptr() for weight in self.weights)
        if self.sink is not None:
            call.sinks = self.sink.data_ptr()
        return call

    def states(self, heads, first, weight):
        """Heads of q or k, normed and rotated as modules do, in float64 with no rounding but the inputs'."""
        x = self.qkv.view(len(self.parents), -1, self.dim)[:, first : first + heads].double()
        if self.normed:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            x = x * (weight.double() + 1.0 if self.normed == "centred" else weight.double())
        turned, rest = x[..., : self.rotary], x[..., self.rotary :]
        half = torch.cat([-turned[..., self.rotary // 2 :], turned[..., : self.rotary // 2]], dim=-1)
        turned = turned * self.cosine.double()[:, None] + half * self.sine.double()[:, None]
        return torch.cat([turned, rest], dim=-1)

    def parts(self):
        """Exact (q, k, v) of the nodes, each [N, heads, D]."""
        query = self.states(self.q_heads, 0, self.weights[0])
        key = self.states(self.kv_heads, self.q_heads, self.weights[1])
        return query, key, self.qkv.view(len(self.parents), -1, self.dim)[:, self.q_heads + self.kv_heads :].double()

    def sees(self):
        """Bool [N, keys from slot `first` on], from positions and ancestors alone."""
        rows = []
        for node, depth in enumerate(self.depths.tolist()):
            place, line = self.length + depth, {node}
            while self.parents[min(line)] >= 0:
                line.add(self.parents[min(line)])
            near = (lambda p, q=place: True) if self.window is None else (lambda p, q=place: q - self.window < p)
            prefix = [near(self.base + slot) for slot in range(self.seen.first, self.seen.end)]
            rows.append(
                prefix + [n in line and near(self.length + int(self.depths[n])) for n in range(len(self.parents))]
            )
        return torch.tensor(rows)

    def exact(self, query, keys, values):
        """A masked softmax in float64: [N, Hq, D] over keys and values [Hkv, S, D] from slot `first` on."""
        keys, values = (states.double().repeat_interleave(self.groups, dim=0) for states in (keys, values))
        scores = torch.einsum("nhd,hsd->hns", query.double(), keys) * self.dim**-0.5
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~self.sees(), -torch.inf)
        if self.sink is not None:
            scores = torch.cat([scores, self.sink.double()[:, None, None].expand(-1, len(self.parents), 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., : keys.shape[1]]
        return torch.einsum("hns,hsd->nhd", weights, values)


def run_call(call, dtype):
    """Output [N, Hq, D] of a call."""
    out = torch.empty(call.nodes, call.q_heads * call.dim, dtype=dtype)
    asked = kernels(dtype).attention_scratch(ctypes.byref(call))
    scratch = torch.full((asked,), torch.nan)
    call.out, call.scratch = out.data_ptr(), scratch.data_ptr()
    kernels(dtype).attention(ctypes.byref(call))
    return out.view(call.nodes, call.q_heads, call.dim)


def tree_of(nodes, seed):
    dice = random.Random(seed)
    return (-1, *(dice.choice([node - 1, dice.randrange(node)]) for node in range(1, nodes)))


@st.composite
def cases(draw, most_nodes=40):
    dim = draw(st.sampled_from([8, 16, 24, 32, 40, 64, 80, 96, 128]))
    length = draw(st.integers(1, 90))
    window = draw(st.sampled_from([None, None, 1, 4, 30]))
    seed = draw(st.integers(0, 99))
    return {
        "dtype": draw(st.sampled_from(DTYPES)),
        "parents": tree_of(draw(st.integers(1, most_nodes)), seed),
        "length": length,
        "base": 0 if window is None else draw(st.integers(0, max(0, length - window + 1))),
        "window": window,
        "kv_heads": draw(st.integers(1, 3)),
        "groups": draw(st.sampled_from([1, 2, 3, 7])),
        "dim": dim,
        "rotary": draw(st.sampled_from([dim, dim // 2, dim // 4 // 2 * 2 or 2])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 5.0])),
        "sinks": draw(st.booleans()),
        "normed": draw(st.sampled_from([None, "scaled", "centred", "scaled32"])),
        "threads": draw(st.integers(1, 3)),
        "seed": seed,
    }


@given(cases())
def test_it_is_a_masked_softmax(settings):
    case = Case(**settings)
    query, key, _ = case.parts()
    out = case.run()
    first, end = case.seen.first, case.seen.end
    unit = torch.finfo(case.dtype).eps
    rotated = case.qkv.view(len(case.parents), -1, case.dim)[:, : case.q_heads]
    roundings = 4 * unit  # norm in the middle and at its end, two products, their sum: of up to |x| + |y|
    for got, expected in ((rotated, query), (case.keys[:, end:-3].transpose(0, 1), key)):
        assert ((got.double() - expected).abs() <= roundings * expected.abs().amax(-1, keepdim=True) + 1e-6).all()
    # from here on with the rounded ones
    reach = slice(first, end + len(case.parents))
    exact = case.exact(rotated, case.keys[:, reach], case.values[:, reach])
    largest = case.values[:, reach].double().abs().max()
    assert ((out.double() - exact).abs() <= 0.51 * unit * exact.abs() + 3e-6 * largest).all()


@given(cases())
def test_keys_and_values_are_written_behind_the_prefix_and_nothing_else_is_touched(settings):
    case = Case(**settings)
    before, value = (case.keys.clone(), case.values.clone()), case.parts()[2]
    case.run()
    end, stop = case.seen.end, case.seen.end + len(case.parents)
    assert torch.equal(case.values[:, end:stop].transpose(0, 1).double(), value)
    assert not (case.keys[:, end:stop] == LEFT_ALONE).all()
    for states, old in zip((case.keys, case.values), before, strict=True):
        assert torch.equal(states[:, :end].nan_to_num(0), old[:, :end].nan_to_num(0))
        assert (states[:, stop:] == LEFT_ALONE).all()


@given(cases(most_nodes=20))
def test_nodes_have_the_bits_of_one_token_passes(settings):
    case = Case(**settings)
    whole = copy.deepcopy(case)
    together = whole.run()
    end = case.seen.end
    for node in range(len(case.parents)):
        line = [node]
        while case.parents[line[0]] >= 0:
            line.insert(0, case.parents[line[0]])
        keys, values = case.keys[:, :end], case.values[:, :end]
        for depth, ancestor in enumerate(line):
            one = Case(**{**settings, "parents": (-1,), "length": case.length + depth, "threads": 1})
            one.qkv, one.weights, one.sink = case.qkv[ancestor, None].clone(), case.weights, case.sink
            one.keys[:, : end + depth], one.values[:, : end + depth] = keys, values
            alone = one.run()
            keys, values = one.keys[:, : end + depth + 1], one.values[:, : end + depth + 1]
        assert torch.equal(alone[0], together[node])


@pytest.mark.parametrize("dim", [16, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_nothing(dim, dtype):
    settings = {"dtype": dtype, "parents": tree_of(33, 3), "length": 300, "dim": dim, "rotary": dim}
    results = [Case(**settings, threads=threads).run() for threads in (1, 2, 3, 8)]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_a_batch_have_the_bits_of_rows_alone(threads, dtype):
    """Trees, lengths and windows of their own; keys and values lie one row behind the other."""
    sizes = {"groups": 3, "kv_heads": 2, "dim": 40, "rotary": 16, "dtype": dtype, "sinks": True}
    trees = ((-1,), 70, None), ((-1, 0, 0, 1), 3, None), ((-1, 0), 40, 20)
    rows, again = (
        [
            Case(parents=parents, length=length, window=window, normed="scaled", **sizes)
            for parents, length, window in trees
        ]
        for _ in range(2)
    )
    alone = [row.run() for row in rows]
    whole = {name: torch.cat([getattr(row, name) for row in again]) for name in ("qkv", "cosine", "sine")}
    slots = max(row.keys.shape[1] for row in again)
    for name in ("keys", "values"):
        whole[name] = torch.zeros(3, 2, slots, 40, dtype=dtype)
        for place, row in zip(whole[name], again, strict=True):
            place[:, : row.keys.shape[1]] = getattr(row, name)
    calls = (RowCall * 3)()
    for number, (call, row) in enumerate(zip(calls, again, strict=True)):
        call.mask, call.nodes, call.offset = row.seen.mask.data_ptr(), len(row.parents), number * 2 * slots * 40
        call.first, call.common, call.end = row.seen.first, row.seen.common, row.seen.end
    batch = again[0].call()
    for name, tensor in whole.items():
        setattr(batch, name, tensor.data_ptr())
    batch.nodes, batch.batch, batch.rows = 7, 3, ctypes.addressof(calls)
    batch.head_stride, batch.threads = slots * 40, threads
    assert torch.equal(run_call(batch, dtype), torch.cat(alone))
    for number, row in enumerate(rows):
        for name in ("keys", "values"):
            got, expected = whole[name][number, :, : row.keys.shape[1]], getattr(row, name)
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_than_64_nodes_and_heads_wider_than_256_are_right(dtype):
    case = Case(dtype=dtype, parents=tree_of(150, 1), length=70, dim=320, rotary=64)
    out = case.run()
    rotated = case.qkv.view(150, -1, 320)[:, : case.q_heads]
    exact = case.exact(rotated, case.keys[:, : 70 + 150], case.values[:, : 70 + 150])
    assert ((out.double() - exact).abs() <= 0.51 * torch.finfo(dtype).eps * exact.abs() + 3e-5).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_and_sinks_neither_overflow_nor_vanish(dtype):
    case = Case(dtype=dtype, length=40, sinks=True)
    case.qkv *= 100
    case.sink += 1e4
    out = case.run()
    rotated = case.qkv.view(1, -1, case.dim)[:, : case.q_heads]
    torch.testing.assert_close(
        out.double(), case.exact(rotated, case.keys[:, :41], case.values[:, :41]), rtol=1e-2, atol=1e-4
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_nan_and_where_it_is(dtype):
    case = Case(dtype=dtype, parents=(-1, 0, 0), length=9)
    case.qkv[1, : case.dim] = torch.nan  # one head of one node's query
    out = case.run()
    assert out[1, 0].isnan().all()
    assert out[1, 1:].isfinite().all() and out[[0, 2]].isfinite().all()


# --- which modules it is given to -------------------------------------------------------------------------------------


def found(model):
    return [layer.self_attn for layer in model.model.layers if isinstance(layer.self_attn, FastAttention)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROTARY)
def test_rotary_attention_is_found(make_wide, name, dtype):
    model = make_wide(name, dtype=dtype)
    prepare(model)
    assert len(found(model)) == 3
    assert all(type(layer.self_attn).__name__.endswith("Attention") for layer in model.model.layers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["cohere", "olmo", "olmo2"])
def test_interleaved_rotation_clamps_and_norms_over_all_heads_are_left_alone(make_wide, name, dtype):
    model = make_wide(name, dtype=dtype)
    assert prepare(model).layers
    assert not found(model)


@pytest.mark.parametrize("name", ["smollm3", "exaone4"])
def test_layers_without_rotation_are_left_alone(make_wide, name):
    model = make_wide(name, dtype=torch.float32)
    prepare(model)
    fast = [isinstance(layer.self_attn, FastAttention) for layer in model.model.layers]
    assert fast == [True, False, True]


class Gated(LlamaAttention):
    """Attention with a gate on its output."""

    def forward(self, hidden_states, *args, **kwargs):
        out, weights = super().forward(hidden_states, *args, **kwargs)
        return out * hidden_states.sigmoid(), weights


class Clamped(LlamaAttention):
    """Attention whose states are clamped, far outside the usual."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states.clamp(-500, 500), *args, **kwargs)


class Shifted(LlamaAttention):
    """Attention that turns its rotation the other way round."""

    def forward(self, *args, position_embeddings, **kwargs):
        cosine, sine = position_embeddings
        return super().forward(*args, position_embeddings=(cosine, -sine), **kwargs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [Gated, Clamped, Shifted])
def test_other_attention_is_left_alone(make_wide, kind, dtype):
    model = make_wide("llama", dtype=dtype)
    model.model.layers[1].self_attn.__class__ = kind
    prepare(model)
    assert [isinstance(layer.self_attn, FastAttention) for layer in model.model.layers] == [True, False, True]


def test_plain_calls_and_unknown_arguments_are_as_before(make_wide, prompt):
    model = make_wide("llama", dtype=torch.float32)
    ids = prompt(12)
    before = model(ids, attention_mask=torch.tensor([[0] * 3 + [1] * 9])).logits
    prepare(model)
    after = model(ids, attention_mask=torch.tensor([[0] * 3 + [1] * 9])).logits
    torch.testing.assert_close(after[:, 3:], before[:, 3:], rtol=1e-4, atol=1e-4)


def test_looking_at_a_layer_leaves_no_trace(make_wide):
    model = make_wide("llama", dtype=torch.float32)
    names, implementation = set(AttentionInterface._global_mapping), model.config._attn_implementation
    random_state = torch.get_rng_state()
    prepare(model).undo()
    assert set(AttentionInterface._global_mapping) == names
    assert model.config._attn_implementation == implementation
    assert torch.equal(torch.get_rng_state(), random_state)
    assert type(model.model.layers[0].self_attn) is LlamaAttention


class WithSinks(LlamaAttention):
    """Attention that hands over one more logit a head."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, s_aux=self.sinks, **kwargs)


def test_sinks_are_those_of_the_layer_now(make_wide, passes, random_tree, prompt):
    model = make_wide("llama", dtype=torch.float32, attn_implementation="eager")
    for layer in model.model.layers:
        layer.self_attn.__class__ = WithSinks
        layer.self_attn.sinks = nn.Parameter(torch.randn(4), requires_grad=False)
    plain = copy.deepcopy(model)
    prepare(model)
    assert len(found(model)) == 3
    for own in (model, plain):
        for layer in own.model.layers:
            layer.self_attn.sinks = nn.Parameter(torch.full((4,), 3.0), requires_grad=False)
    logits = []
    for own in (model, plain):
        with passes(own, prompt(9)) as run:
            logits.append(run.tree(*random_tree(7)))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_record_keeps_nothing_of_a_pass(make_wide, passes, random_tree, prompt):
    model = make_wide("qwen3", dtype=torch.bfloat16)
    prepare(model)
    with passes(model, prompt(9)) as run:
        first = run.tree(*random_tree(7))
        run.tree(*random_tree(9, seed=1))
        assert torch.equal(run.tree(*random_tree(7)), first)
    template = found(model)[0].__dict__[RECORD].template
    assert (template.qkv, template.keys, template.mask, template.scratch) == (None, None, None, None)
