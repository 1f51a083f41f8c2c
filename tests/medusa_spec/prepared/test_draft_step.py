"""A step in one call is the modules' step, for every family, text and tree, and stands aside for what it is not."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_spec.drafters.autoregressive import TextDraft
from medusa_spec.drafters.base import ReadStates
from medusa_spec.drafters.choice import TemplateChoice
from medusa_spec.drafters.heads import decoding_form
from medusa_spec.drafters.levels import plan_of
from medusa_spec.drafters.memory import TextMemory, TextView, draft_mask, text_mask
from medusa_spec.heads import HeadsConfig, Projection, TokenEmbedding, View, make_heads
from medusa_spec.heads.draft_layer import DraftAttention, DraftLayer, DraftMlp
from medusa_spec.heads.eagle import EagleHead
from medusa_spec.heads.steps import DraftSteps
from medusa_spec.heads.view import UnrolledView
from medusa_spec.native.build import library
from medusa_spec.prepared import draft_step
from medusa_spec.prepared.draft_step import FastStep, fast_step
from medusa_spec.prepared.packed_linear import available, fast_linear
from medusa_spec.tree import TreeTemplate

pytestmark = pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")

CPU, H, V, K = torch.device("cpu"), 72, 90, 4
DTYPES = (torch.bfloat16, torch.float32)
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle-bias": ("eagle", {"bias": True}),
    "eagle-untied": ("eagle", {"tied": False}),
    "eagle3": ("eagle3", {"taps": "1,2"}),
    "fused": ("fused", {"taps": "1,2"}),
    "fused-untied": ("fused", {"taps": "1,2", "tied": False}),
    "eagle3-untied": ("eagle3", {"taps": "1,2", "tied": False}),
    "eagle3-published": (
        "eagle3",
        {
            "taps": "1,2",
            "from_h": False,
            "norm_before_residual": True,
            "qkv_bias": True,
            "rope_scaling": "llama3:8,1,4,32",
        },
    ),
    "eagle3-wide": ("eagle3", {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 64}),
}
TEMPLATE = TreeTemplate(paths=((0,), (0, 0), (0, 1), (1,), (0, 0, 0), (1, 0), (0, 0, 0, 0), (1, 0, 2), (2,)))


def heads(name: str, *, seed: int = 0, **options: Any) -> Any:
    """Heads all of whose weights say something."""
    torch.manual_seed(seed)
    kind, own = KINDS[name]
    config = HeadsConfig(hidden_size=H, vocab_size=V, num_heads=K, kind=kind, options={**SIZES, **own, **options})
    projection = Projection(weight=torch.randn(V, H) * 0.3)
    made = make_heads(config, projection, None, TokenEmbedding(weight=torch.randn(V, H), scale=1.5))
    for parameter in made.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=1.2 * parameter.shape[1] ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return made


def form(made: Any, dtype: torch.dtype, *, fast: bool = True) -> DraftSteps:
    step: Callable[..., Any] = fast_step if fast else lambda head: None
    steps = DraftSteps(made, dtype=dtype, device=CPU, linear=fast_linear if fast else torch_linear, step=step)
    assert {type(found) for found in steps._fast} == {FastStep if fast else type(None)}
    return steps


def torch_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.nn.functional.linear(x, weight, bias)


class Pass:
    """One pass of random rows: some of a text, or a level of a draft behind it."""

    def __init__(self, *, rows: int, positions: list[int], mask: torch.Tensor, text: bool) -> None:
        self.positions, self.mask, self.text = positions, mask, text
        self.tokens, self.feature = torch.randint(V, (rows,)), torch.randn(rows, H)


def passes(seed: int, length: int, levels: int = 4) -> Iterator[Pass]:
    """A text read in random pieces, and drafts behind each: random rows that see random slots of the levels before."""
    chance, read = random.Random(seed), 0
    torch.manual_seed(seed)
    while read < length:
        rows = min(chance.choice((1, 2, 5, 40, 300)), length - read)
        mask = text_mask(read, rows, chance.choice((0, 0, 2)), CPU)
        yield Pass(rows=rows, positions=list(range(read, read + rows)), mask=mask, text=True)
        read, end = read + rows, read + rows
        for depth in range(chance.randrange(levels + 1)):
            rows = chance.randrange(1, 15)
            seen = [[slot for slot in range(read, end) if chance.random() < 0.4] for _ in range(rows)]
            mask = draft_mask(read, end, seen, CPU)
            yield Pass(rows=rows, positions=[read + depth] * rows, mask=mask, text=False)
            end += rows


def run(steps: DraftSteps, seed: int, length: int) -> list[torch.Tensor]:
    """Features and logits of all passes, and the keys and values that they left of the text."""
    memories, found = [TextMemory() for _ in range(steps.num_sets)], []
    for one in passes(seed, length):
        for k, memory in enumerate(memories):
            if one.text:
                memory.drop_draft()
            view = TextView(memory, one.positions, one.mask)
            feature = steps.step(k, one.feature.to(steps.dtype), one.tokens, view)
            found += [feature, steps.logits(k, feature)]
            if one.text:
                memory.keep_all()
    for memory in memories:
        found += [memory.keys[:, :, :length], memory.values[:, :, :length]]
    return found


def distance(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Of all numbers together, as a share of their size."""
    pairs = [(a.double().flatten(), b.double().flatten()) for a, b in zip(got, expected, strict=True)]
    left, right = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return float((left - right).norm() / right.norm())


lengths = st.integers(1, 300)


@given(name=st.sampled_from(sorted(KINDS)), length=lengths, seed=st.integers(0, 999))
@settings(max_examples=40)
def test_in_float32_a_step_is_the_modules_but_for_the_last_bits(name: str, length: int, seed: int) -> None:
    made = heads(name, seed=seed)
    got, expected = (run(form(made, torch.float32, fast=fast), seed, length) for fast in (True, False))
    assert distance(got, expected) < 2e-6
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().mean()))


@given(name=st.sampled_from(sorted(KINDS)), length=lengths, seed=st.integers(0, 999))
@settings(max_examples=25)
def test_in_bfloat16_a_step_is_as_near_to_the_exact_one_as_the_modules(name: str, length: int, seed: int) -> None:
    made = heads(name, seed=seed).bfloat16().float()  # so that all of them have the same weights
    exact = run(form(made.double(), torch.float64, fast=False), seed, length)
    got, plain = (run(form(made.float(), torch.bfloat16, fast=fast), seed, length) for fast in (True, False))
    assert distance(plain, exact) < 2e-2
    assert distance(got, exact) < 1.15 * distance(plain, exact)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [1, 3, 40, 300])
def test_in_float32_drafts_are_the_modules(name: str, length: int) -> None:
    made, trees = heads(name), []
    h, layers, ids = torch.randn(length + 9, H), torch.randn(length + 9, 2, H), torch.randint(V, (length + 9,)).tolist()
    for fast in (True, False):
        draft = TextDraft(form(made, torch.float32, fast=fast))
        for start, stop in ((0, length), (length, length + 1), (length + 1, length + 5), (length + 5, length + 9)):
            draft.read(ids[start:stop], ReadStates(h=h[start:stop], layers=layers[start:stop]))
            choice = TemplateChoice(TEMPLATE, plan_of(TEMPLATE, CPU), None)
            assert draft.guess(7, choice)
            trees.append(choice.tree(7))
    assert trees[:4] == trees[4:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_bits_depend_neither_on_how_a_text_was_cut_nor_on_threads(name: str, dtype: torch.dtype) -> None:
    steps, length = form(heads(name), dtype), 70
    feature, tokens = torch.randn(length, H).to(dtype), torch.randint(V, (length,))
    threads, results = torch.get_num_threads(), []
    try:
        for count, cut in ((1, 70), (1, 1), (2, 13), (5, 29), (2, 57)):
            torch.set_num_threads(count)
            memory, found = TextMemory(), []
            for start in range(0, length, cut):
                rows = min(cut, length - start)
                view = TextView(memory, range(start, start + rows), text_mask(start, rows, 0, CPU))
                found.append(steps.step(0, feature[start : start + rows], tokens[start : start + rows], view))
                memory.keep_all()
            results.append(torch.cat([torch.cat(found).flatten(), memory.keys[:, :, :length].flatten()]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["eagle", "eagle3-published", "fused"])
def test_angles_are_the_modules_at_every_position(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_step, "FIRST_POSITIONS", 8)
    made = heads(name)
    fast: Any = form(made, dtype)._fast[0]
    for last in (0, 7, 8, 500, 3, 4099):
        expected = made.head(0).layer.self_attn.angles(torch.arange(last + 1)[None], dtype)
        assert torch.equal(fast._angles(last)[:, : last + 1], torch.cat(expected))


def test_far_positions_are_the_modules() -> None:
    made, got = heads("eagle3"), []
    feature, tokens = torch.randn(3, H), torch.randint(V, (3,))
    for fast in (True, False):
        view = TextView(TextMemory(), (9_000, 17, 70_001), text_mask(0, 3, 0, CPU))
        got.append(form(made, torch.float32, fast=fast).step(0, feature, tokens, view))
    torch.testing.assert_close(*got, rtol=1e-4, atol=1e-5)


# --- what it leaves to the modules ------------------------------------------------------------------------------------

ODD = {
    "keys": {"num_key_value_heads": 1, "head_dim": 12},
    "queries": {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 12},
    "inner": {"intermediate_size": 100},
}


def plainly(made: Any, dtype: torch.dtype) -> None:
    """Decoding works without the fast step, and gives what the modules give."""
    steps = decoding_form(made, dtype=dtype, device=CPU)
    assert isinstance(steps, DraftSteps) and not any(isinstance(found, FastStep) for found in steps._fast)
    got, expected = run(steps, 1, 30), run(form(made, dtype, fast=False), 1, 30)
    assert distance(got, expected) < 1e-5


@pytest.mark.parametrize("name", ["eagle", "eagle3", "fused"])
def test_float64_is_left_to_the_modules(name: str) -> None:
    plainly(heads(name).double(), torch.float64)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "fused"])
@pytest.mark.parametrize("options", ODD.values(), ids=ODD)
def test_sizes_that_do_not_fit_are_left_to_the_modules(name: str, options: dict[str, Any]) -> None:
    plainly(heads(name, **options), torch.float32)


def test_without_kernels_all_is_left_to_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_step, "kernels", lambda dtype: None)
    plainly(heads("eagle3"), torch.float32)


class Halved(EagleHead):
    def step(self, feature: torch.Tensor, vector: torch.Tensor, view: View) -> torch.Tensor:
        return super().step(feature, vector, view) / 2


class Twice(DraftLayer):
    def forward(self, x: torch.Tensor, entered: torch.Tensor, view: View) -> torch.Tensor:
        return super().forward(x, entered, view) * 2


def another_head(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made.head(0).__class__ = Halved


def another_layer(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made.head(0).layer.__class__ = Twice


def another_attention(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = DraftAttention.forward
    monkeypatch.setattr(DraftAttention, "forward", lambda self, x, view: before(self, x, view) * 1.5)


def another_mlp(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    relu = torch.nn.functional.relu
    monkeypatch.setattr(DraftMlp, "forward", lambda self, x: self.down_proj(relu(self.gate_proj(x)) * self.up_proj(x)))


def another_product(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = made.head(0).layer.self_attn
    attention.k_proj = torch.nn.Sequential(attention.k_proj, torch.nn.Tanh())


def other_positions(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_spec.heads import draft_layer

    monkeypatch.setattr(draft_layer, "rotated", lambda x, angles: x)


CHANGES = [another_head, another_layer, another_attention, another_mlp, another_product, other_positions]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_step_that_computes_something_else_is_left_to_its_modules(
    change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = heads("eagle")
    change(made, monkeypatch)
    plainly(made, torch.float32)


def test_views_without_room_are_left_to_the_modules() -> None:
    steps = form(heads("eagle3"), torch.float32)
    vector, feature = torch.randn(5, H), torch.randn(5, H)
    view = UnrolledView(1, 5, CPU).next()
    assert steps._fast[0] is not None and steps._fast[0](feature, vector, view) is None
    tokens = torch.randint(V, (5,))
    got = steps.step(0, feature, tokens, UnrolledView(1, 5, CPU).next())
    expected = steps.step(0, feature, tokens, TextView(TextMemory(), range(5), text_mask(0, 5, 0, CPU)))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 3])
def test_what_the_kernel_would_misread_takes_no_room(rows: int) -> None:
    steps, memory = form(heads("eagle"), torch.bfloat16), TextMemory()
    fast: Any = steps._fast[0]
    states = torch.randn(rows, H) if rows else torch.randn(0, H).bfloat16()
    assert fast(states, states, TextView(memory, range(rows), text_mask(0, rows, 0, CPU))) is None
    assert memory.end == 0


# --- what it leaves alone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_the_trained_heads_stay_as_they_are(name: str) -> None:
    made = heads(name)
    before = {key: value.clone() for key, value in made.state_dict().items()}
    kinds = [type(module) for module in made.modules()]
    assert isinstance(decoding_form(made, dtype=torch.bfloat16, device=CPU), DraftSteps)
    assert [type(module) for module in made.modules()] == kinds
    assert all(torch.equal(value, before[key]) for key, value in made.state_dict().items())
    assert all(parameter.requires_grad for parameter in made.parameters())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_modes_and_the_users_defaults_change_nothing(dtype: torch.dtype) -> None:
    made = heads("eagle3")
    with torch.no_grad():
        expected = run(form(made, dtype), 3, 40)
    with torch.inference_mode():
        steps = form(made, dtype)
        results = [run(steps, 3, 40)]
    results.append(run(steps, 3, 40))
    torch.set_default_dtype(torch.float64)
    try:
        later = form(made, dtype)
        memory = TextMemory()
        view = TextView(memory, range(3), text_mask(0, 3, 0, CPU))
        assert later.step(0, torch.ones(3, H, dtype=dtype), torch.arange(3), view).dtype == memory.keys.dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    for result in results:
        assert all(torch.equal(one, other) for one, other in zip(result, expected, strict=True))


def test_threads_at_once_do_not_disturb_each_other() -> None:
    steps = form(heads("eagle3"), torch.float32)
    inputs = [(torch.randn(5, H), torch.randint(V, (5,))) for _ in range(4)]

    def step(place: int) -> torch.Tensor:
        view = TextView(TextMemory(), range(5), text_mask(0, 5, 0, CPU))
        return steps.step(0, *inputs[place], view)

    expected, wrong = [step(place) for place in range(4)], []

    def work(place: int) -> None:
        if not all(torch.equal(step(place), expected[place]) for _ in range(20)):
            wrong.append(place)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
