"""What only a GPU can answer, in one run of random models: exactness, pass times, graphs; one JSON line last.

python benchmarks/gpu_check.py [--budget 450] [--shapes 1B 8B] [--device cuda] … (--help)

Needs no network and no files. A part that fails is reported with its reason and does not stop the others; what the
budget leaves no time for is named. The exit status is 1 if outputs were not the target's own. One file, long as it is:
what it says about a machine can be read beside how it was measured.
"""

import argparse
import gc
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from medusa_spec import MedusaModel, attention
from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.comparison_table import columns
from medusa_spec.drafters import Drafter, DraftSession, FixedDraft
from medusa_spec.excuse import explain
from medusa_spec.graph import Recorder
from medusa_spec.machine import machine_facts
from medusa_spec.static_attention import StaticTreePass
from medusa_spec.static_buckets import capacity_for
from medusa_spec.static_cache import StaticCache
from medusa_spec.static_kernels import available
from medusa_spec.static_step import StaticStep
from medusa_spec.static_tree import StaticTree
from medusa_spec.testing import ARCHITECTURES, tiny
from medusa_spec.tree import TokenTree, TreeShape, TreeTemplate, chain, shape_of

SHAPES: dict[str, dict[str, int]] = {
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32},
    "3B": {"hidden_size": 3072, "num_hidden_layers": 28, "intermediate_size": 8192, "num_attention_heads": 24},
    "1B": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_attention_heads": 32},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 8},
}
"""Models as they are in the field, the largest first; 8 KV heads each."""

GIBIBYTES = {"8B": 26, "3B": 14, "1B": 8, "tiny": 0}
"""Free memory wanted: weights, heads, the longest prefix twice, logits."""

TEMPLATE = TreeTemplate(
    paths=(
        *((0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)),
        *((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0, 0)),
    )
)
"""Sixteen nodes with the root, four deep."""


@dataclass
class Settings:
    """How much is measured."""

    device: torch.device
    shapes: list[str]
    prefixes: list[int]
    sizes: list[int]
    attention_prefixes: list[int]
    new_tokens: int
    rounds: int
    architectures: list[str]


@dataclass
class Report:
    """What was found, what failed, what was left out; prints as it goes."""

    budget: float
    began: float = field(default_factory=perf_counter)
    results: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def attempt(self, name: str, run: Callable[..., Any], *arguments: Any, exactness: bool = False) -> Any:
        """What a function returns; None if there is no time for it, or if it fails: either is named."""
        began = perf_counter()
        if began - self.began >= self.budget:
            self.skipped.append(name)
            return None
        try:
            return run(*arguments)
        except Exception as error:
            lines = str(error).strip().splitlines()
            self.failed[name] = f"{type(error).__name__}: {lines[0] if lines else ''}"
            print(f"{name}: FAILED, {self.failed[name]}", end="\n\n", flush=True)
            if exactness:
                self.inexact.append(name)
        finally:
            self.seconds[name] = round(perf_counter() - began, 1)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def table(self, name: str, rows: list[list[str]], found: Any) -> None:
        """Prints rows, the first being the head, and keeps what they say for the JSON line."""
        self.results[name] = found
        print(columns([[name, *rows[0][1:]], *rows[1:]]), end="\n\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts, print their tables, then the JSON line; 1 if outputs were not the target's own."""
    options = _parser().parse_args(arguments)
    settings, report = _settings(options), Report(options.budget)
    facts = machine_facts(settings.device, torch.bfloat16)
    facts["libraries"] = {name: _version(name) for name in ("triton", "flash-attn", "transformers")}
    facts["attention"] = available(settings.device)
    print(f"{facts['device']}, torch {torch.__version__}, attention by {', '.join(facts['attention'])}", end="\n\n")
    report.attempt("exactness, float64", exactness_float64, settings, report, exactness=True)
    for shape in settings.shapes:
        report.attempt(shape, with_model, shape, settings, report)
    report.attempt("attention alone", attention_alone, settings, report)
    for title, named in (("failed", report.failed), ("skipped", report.skipped), ("not exact", report.inexact)):
        print(f"{title}: {json.dumps(named) if named else 'none'}")
    found = {"failed": report.failed, "skipped": report.skipped, "inexact": report.inexact}
    print(
        json.dumps(
            {
                **report.results,
                **found,
                "seconds": {name: n for name, n in report.seconds.items() if n >= 1},
                "machine": facts,
            }
        )
    )
    return 1 if report.inexact else 0


# --- exactness --------------------------------------------------------------------------------------------------------


def exactness_float64(settings: Settings, report: Report) -> None:
    """Token for token on tiny models of all kinds, without an excuse."""
    rows, found = [["", "ordinary loop", "steps, eager", "steps, graph", "plain", "graphs"]], {}
    for kind in settings.architectures:
        name = f"exactness, float64, {kind}"
        equal = report.attempt(name, _equal_in_float64, kind, settings, exactness=True)
        if equal is not None:
            found[kind] = equal
            *verdicts, reason = equal.values()
            rows.append([kind, *map(str, verdicts), reason or "recorded"])
            if not all(verdicts):
                report.inexact.append(name)
    report.table("exactness, float64", rows, found)


def _equal_in_float64(kind: str, settings: Settings) -> dict[str, Any]:
    target, new = tiny(kind).to(settings.device), settings.new_tokens
    target.generation_config = GenerationConfig(pad_token_id=0)
    ids = _prompt(11, 128, settings.device)
    answer = target.generate(ids, do_sample=False, max_new_tokens=new)
    model, equal = (
        MedusaModel(target, drafter=Oracle(target, answer), probe=False, prepare=False, speculation="fixed"),
        {},
    )
    for mode, nodes in (("off", None), ("eager", None), ("auto", None), ("auto", 0)):
        model.steps.mode = mode
        out = model.generate(ids, do_sample=False, max_new_tokens=new, draft_nodes=nodes)
        equal[mode if nodes is None else "plain"] = torch.equal(out, answer)
    return {**equal, "graph_reason": model.graph_reason}


ARMS: dict[str, tuple[str, int | None]] = {
    "ordinary loop": ("off", None),
    "steps, eager": ("eager", None),
    "steps, graph": ("auto", None),
    "plain, graph": ("auto", 0),
}
"""Ways to decode: mode and draft nodes."""


def exactness_by_excuse(shape: str, target: Any, settings: Settings, report: Report) -> None:
    """In bfloat16 a first difference must be a tie that rounding tipped."""
    name = f"{shape}, exactness, bfloat16"
    rows, found = [["", "equal", "excused", "faults", "mu", "graphs"]], {}
    for arm, (mode, nodes) in ARMS.items():
        counts: Counter[str] = Counter()
        mu, reason = 0.0, "-"
        for seed in range(2):
            told = f"{name}, {arm}, text {seed}"
            text = report.attempt(told, _one_text, target, settings, mode, nodes, seed, exactness=True)
            if text is not None:
                kind, mu, reason = text
                counts[kind] += 1
                if kind == "faults":
                    report.inexact.append(told)
        found[arm] = {**{kind: counts[kind] for kind in rows[0][1:4]}, "mu": mu, "graph_reason": reason}
        rows.append([arm, *(str(counts[kind]) for kind in rows[0][1:4]), f"{mu:.2f}", reason or "recorded"])
    report.table(name, rows, found)


def _one_text(target: Any, settings: Settings, mode: str, nodes: int | None, seed: int) -> tuple[str, float, Any]:
    ids = _prompt(64, target.config.vocab_size, settings.device, seed)
    answer = target.generate(ids, do_sample=False, max_new_tokens=settings.new_tokens)
    model = MedusaModel(
        target, drafter=Oracle(target, answer), prepare=False, speculation="fixed"
    )  # CPU kernels are no matter here
    model.steps.mode = mode
    try:
        out = model.generate(ids, do_sample=False, max_new_tokens=settings.new_tokens, draft_nodes=nodes)
    finally:
        model.detach()
    difference = explain(target, ids, answer[0, 64:].tolist(), out[0, 64:].tolist())
    kind = "equal" if difference is None else "excused" if difference.excused else "faults"
    return kind, model.last_stats.mu if model.last_stats else 0.0, model.graph_reason


class Oracle(Drafter):
    """Knows a text by the hidden states that lead to it: many of its paths are right, some end early.

    Args:
        target: The model, not wrapped.
        text: Prompt and answer ids [1, T].
    """

    name = "oracle"
    shape = shape_of((-1, 0, 1, 2, 0, 4, 1, 3))

    def __init__(self, target: Any, text: torch.Tensor) -> None:
        backbone = Backbone(target)
        self.states = backbone.hidden_states(text)[0].float()
        backbone.detach()
        self.text = torch.nn.functional.pad(text[0], (0, self.shape.max_depth + 2))
        siblings = [self.shape.children[parent].index(node) for node, parent in enumerate(self.shape.parents) if node]
        self.ranks = torch.tensor(siblings, device=text.device)
        self.depths = torch.tensor(self.shape.depths[1:], device=text.device)
        self.vocab_size = target.config.vocab_size

    def begin(self, prompt: Sequence[int]) -> DraftSession:
        """Its state is the text."""
        return _OracleSession(self)

    def guess(self, h: torch.Tensor) -> torch.Tensor:
        """Tokens of the draft nodes for h [H]."""
        place = (self.states - h.float()).abs().sum(dim=1).argmin(dim=0, keepdim=True) + 1  # of the root
        true = self.text.index_select(0, (place + self.depths).clamp_max(self.text.numel() - 1))
        wrong = ((place + 2 * self.depths) % 5 == 0).long()
        return (true + self.ranks + wrong) % self.vocab_size


class _OracleSession(DraftSession):
    def __init__(self, drafter: Oracle) -> None:
        self.drafter = drafter

    def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
        if h is None:
            return TokenTree.root_only(root)
        return TokenTree(shape=self.drafter.shape, tokens=(root, *self.drafter.guess(h).tolist()))

    def fixed(self, h: torch.Tensor, limit: int | None) -> FixedDraft | None:
        return FixedDraft(shape=self.drafter.shape, guess=self.drafter.guess, key=self.drafter)


# --- times ------------------------------------------------------------------------------------------------------------


def with_model(shape: str, settings: Settings, report: Report) -> None:
    """All parts that want a model of this shape."""
    target = build(shape, settings.device)
    parts: dict[str, Callable[..., None]] = {
        "exactness, bfloat16": exactness_by_excuse,
        "the step": step_times,
        "passes": pass_times,
        "decoding": decoding_speed,
    }
    for title, run in parts.items():
        report.attempt(f"{shape}, {title}", run, shape, target, settings, report, exactness=run is exactness_by_excuse)


def pass_times(shape: str, target: Any, settings: Settings, report: Report) -> None:
    """T(N) and T(N)/T(1) by attention and prefix, as graphs where they can be recorded."""
    backbone, name, sizes = Backbone(target), f"{shape}, passes", settings.sizes
    rows, found = [["", *(f"T({n}), ms" for n in sizes), "as"]], {}
    try:
        for prefix in settings.prefixes:
            for backend in available(settings.device):
                label = f"prefix {prefix}, {backend}"
                times = report.attempt(f"{name}, {label}", _pass_times, backbone, prefix, backend, settings)
                if times is not None:
                    found[label] = times
                    cells = [f"{times['ms'][n]:.2f} ({times['ratio'][n]:.2f})" for n in sizes]
                    rows.append([label, *cells, "graph" if times["graph_reason"] is None else "eager"])
    finally:
        backbone.detach()
    report.table(name, rows, found)


def _pass_times(backbone: Backbone, prefix: int, backend: str, settings: Settings) -> dict[str, Any]:
    sizes = settings.sizes
    cache, _ = _filled(backbone, prefix, max(sizes))
    timers = {n: Timed(_verify(backbone, cache, _bush(n), backend), cache) for n in sizes}
    seconds = {n: timer.seconds(settings.rounds) for n, timer in timers.items()}
    return {
        "ms": {n: round(s * 1e3, 4) for n, s in seconds.items()},
        "ratio": {n: round(s / seconds[sizes[0]], 3) for n, s in seconds.items()},
        "graph_reason": next((timer.reason for timer in timers.values() if timer.reason), None),
    }


def step_times(shape: str, target: Any, settings: Settings, report: Report) -> None:
    """The whole step with heads: eager against graph, the pool's memory, and the share outside the target."""
    model, name = (
        MedusaModel(target, tree=TEMPLATE, probe=False, prepare=False, speculation="fixed"),
        f"{shape}, the step",
    )
    rows, found = [["", "eager ms", "graph ms", "target alone ms", "outside the target", "pool MiB", "graph"]], {}
    try:
        for prefix in settings.prefixes:
            times = report.attempt(f"{name}, prefix {prefix}", _step_times, model, prefix, settings)
            if times is not None:
                found[prefix] = times
                cells = [times["eager_ms"], times["graph_ms"], times["verify_ms"]]
                cells = ["-" if cell is None else f"{cell:.2f}" for cell in cells]
                cells += [f"{times['outside_the_target']:.1%}", f"{times['pool_mib']:.0f}"]
                rows.append([f"prefix {prefix}", *cells, times["graph_reason"] or "recorded"])
    finally:
        model.detach()
    report.table(name, rows, found)


def _step_times(model: MedusaModel, prefix: int, settings: Settings) -> dict[str, Any]:
    cache, h = _filled(model.backbone, prefix, TEMPLATE.shape.size)
    draft = model.drafter.begin([]).fixed(h, None)
    assert draft is not None
    step, before = StaticStep(model.backbone, draft, cache, h), _reserved(settings.device)
    step.begin(torch.zeros(1, dtype=torch.long), h)
    whole = Timed(step, cache)
    pool = (_reserved(settings.device) - before) / 2**20
    alone = Timed(_verify(model.backbone, cache, TEMPLATE.shape, None), cache)
    eager = Timed(step, cache, record=False).seconds(settings.rounds)
    graph = whole.seconds(settings.rounds) if whole.reason is None else None
    verify = alone.seconds(settings.rounds)
    return {
        "eager_ms": eager * 1e3,
        "graph_ms": None if graph is None else graph * 1e3,
        "verify_ms": verify * 1e3,
        "outside_the_target": 1 - verify / (graph or eager),
        "pool_mib": pool,
        "graph_reason": whole.reason,
    }


def decoding_speed(shape: str, target: Any, settings: Settings, report: Report) -> None:
    """Tokens per second from end to end; untrained heads are seldom right, the oracle is what good ones could be."""
    name, ids = f"{shape}, decoding", _prompt(256, target.config.vocab_size, settings.device)
    answer = target.generate(ids, do_sample=False, max_new_tokens=settings.new_tokens)
    oracle = Oracle(target, answer)
    model = MedusaModel(target, tree=TEMPLATE, probe=False, prepare=False, speculation="fixed")
    # Arm -> mode, draft nodes, drafter; None is Hugging Face's own loop.
    arms: dict[str, tuple[str, int | None, Drafter | None] | None] = {
        "Hugging Face": None,
        "plain, ordinary loop": ("off", 0, None),
        "plain, graph": ("auto", 0, None),
        "heads, ordinary loop": ("off", None, None),
        "heads, graph": ("auto", None, None),
        "oracle, ordinary loop": ("off", None, oracle),
        "oracle, graph": ("auto", None, oracle),
    }
    rows, found = [["", "tokens/s", "tau", "equal", "graphs"]], {}
    try:
        for arm, how in arms.items():
            speed = report.attempt(f"{name}, {arm}", _speed, model, how, ids, answer, settings)
            if speed is not None:
                found[arm] = speed
                rate, tau, equal, reason = speed.values()
                rows.append([arm, f"{rate:.1f}", f"{tau:.2f}", str(equal), reason or "recorded"])
    finally:
        model.detach()
    report.table(name, rows, found)


def _speed(model: MedusaModel, how: Any, ids: torch.Tensor, answer: torch.Tensor, settings: Settings) -> dict[str, Any]:
    arguments = {"do_sample": False, "max_new_tokens": settings.new_tokens}
    for _ in range(2):  # the first one records
        began = perf_counter()
        if how is None:
            target: Any = model.target
            out = target.generate(ids, **arguments)
        else:
            model.steps.mode, nodes, drafter = how
            out = model.generate(ids, **arguments, draft_nodes=nodes, drafter=drafter)
        new = len(out[0, ids.shape[1] :].tolist())  # waits for the device as well
        seconds = perf_counter() - began
    return {
        "tokens_per_second": new / seconds,
        "tau": model.last_stats.tau if how and model.last_stats else 1.0,
        "equal": torch.equal(out, answer),
        "graph_reason": model.graph_reason if how else "-",
    }


def attention_alone(settings: Settings, report: Report) -> None:
    """Where two kernels and a merge beat a masked one, by prefix: for `attention.SPLIT_FROM`, and in fixed shape."""
    rows, found = [["prefix"]], {}
    for prefix in settings.attention_prefixes:
        cells = report.attempt(f"attention alone, prefix {prefix}", _attention_times, prefix, settings)
        if cells is not None:
            rows[0] = ["", *(f"{name}, us" for name in cells)]
            found[prefix] = cells
            rows.append([f"prefix {prefix}", *(f"{cell:.1f}" for cell in cells.values())])
    report.table("attention alone", rows, found)


def _attention_times(prefix: int, settings: Settings, nodes: int = 16) -> dict[str, float]:
    """Microseconds of one layer with 32 heads of 128 and 8 KV heads, by way of computing it."""
    device, shape, capacity = settings.device, _bush(nodes), capacity_for(prefix + nodes)
    states = [
        torch.randn(1, heads, tokens, 128, device=device, dtype=torch.bfloat16)
        for heads, tokens in ((32, nodes), (8, capacity), (8, capacity))
    ]
    alike: dict[str, Any] = dict.fromkeys(("window", "chunk"), lambda layer: None)
    prefixes: Any = SimpleNamespace(lengths=[prefix], base=lambda layer, row: 0, **alike)
    length = torch.tensor([prefix], device=device)
    buffers: Any = SimpleNamespace(length=length, slots=length + torch.arange(nodes, device=device), **vars(prefixes))
    buffers.capacity, buffers.device = capacity, device
    module, tree = SimpleNamespace(layer_idx=0), StaticTree(shape=shape, device=device)
    ordinary = TreePass(shape=shape, cache=prefixes, device=device)
    runs: dict[str, tuple[Any, int | None]] = {
        "ordinary, one kernel": (ordinary, 10**9),
        "ordinary, two": (ordinary, 0),
        **{
            f"fixed shape, {name}": (StaticTreePass(tree=tree, cache=buffers, backend=name), None)
            for name in available(device)
        },
    }
    found = {}
    for name, (tree_pass, split_from) in runs.items():
        with _split_from(device, split_from):

            def run(tree_pass: Any = tree_pass) -> None:
                tree_pass.attend(module, *states)

            run()  # masks are made once per pass, not once per layer
            replay, _ = _recorded(Recorder(), run, device)
            found[name] = round(_seconds(replay, settings.rounds, device) * 1e6, 2)
    return found


@contextmanager
def _split_from(device: torch.device, keys: int | None) -> Iterator[None]:
    """Common keys from which the ordinary attention takes two kernels, for as long as this lasts."""
    before = dict(attention.SPLIT_FROM)
    if keys is not None:
        attention.SPLIT_FROM[device.type] = keys
    try:
        yield
    finally:
        attention.SPLIT_FROM.clear()
        attention.SPLIT_FROM.update(before)


class Timed:
    """A function timed as a graph, or as it is if it cannot be recorded; the cache's length is the same before each.

    Args:
        run: The function.
        cache: What it may move on.
        record: Whether to record it.
    """

    def __init__(self, run: Callable[[], None], cache: StaticCache, *, record: bool = True) -> None:
        self.run, self.cache, self.length, self.reason = run, cache, cache.known, "not asked for"
        if record:
            self.run, self.reason = _recorded(Recorder(), run, cache.device, self._back)

    def _back(self) -> None:
        self.cache.cut(self.length)

    def seconds(self, rounds: int) -> float:
        """Median of the rounds."""
        return _seconds(self.run, rounds, self.cache.device, self._back)


def _recorded(
    recorder: Recorder, run: Callable[[], Any], device: torch.device, undo: Callable[[], None] = lambda: None
) -> tuple[Callable[[], None], str | None]:
    if device.type != "cuda":
        return run, f"on {device.type}"
    try:
        return recorder.record(run, undo), None
    except Exception as error:
        return run, str(error).splitlines()[0]


def _seconds(
    run: Callable[[], Any], rounds: int, device: torch.device, undo: Callable[[], None] = lambda: None
) -> float:
    """Median seconds; on CUDA by events, the device having all it needs beforehand."""
    laps: list[Any] = []
    for lap in range(rounds + 2):
        undo()
        if device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            run()
            events[1].record()
            laps.append(events)
        else:
            began = perf_counter()
            run()
            laps.append(perf_counter() - began)
        if lap == 1:
            laps.clear()  # warm now
    if device.type == "cuda":
        torch.cuda.synchronize()
        laps = [first.elapsed_time(second) / 1e3 for first, second in laps]
    return statistics.median(laps)


def _verify(backbone: Backbone, cache: StaticCache, shape: TreeShape, backend: str | None) -> Callable[[], None]:
    tree = StaticTree(shape=shape, device=cache.device)
    ids = torch.zeros(1, shape.size, dtype=torch.long, device=cache.device)

    def run() -> None:
        cache.place(shape.size)
        tree_pass = StaticTreePass(tree=tree, cache=cache, backend=backend)
        backbone.verify(ids, tree_pass).logits[0].float().argmax(dim=-1)

    return run


def _filled(backbone: Backbone, prefix: int, nodes: int) -> tuple[StaticCache, torch.Tensor]:
    """A static cache behind `prefix` tokens, and their last hidden state."""
    slabs = SlabCache(backbone.config)
    out = backbone.forward(_prompt(prefix, backbone.ids_below, backbone.device), last_only=True, cache=slabs)
    slabs.seal(0)
    cache = StaticCache(slabs, capacity_for(prefix + nodes))
    cache.load(slabs.states(), prefix)
    return cache, out.h[0, -1]


def _bush(size: int) -> TreeShape:
    """Four levels, bushy at the root."""
    if size <= 4:
        return chain(size - 1)
    return shape_of(tuple(([-1, 0, 1, 2, 3] + [node // 3 for node in range(5, size)])[:size]))


def build(shape: str, device: torch.device) -> Any:
    """A random Llama of this shape in bfloat16, made on the device."""
    tiny_one = shape == "tiny"
    config = LlamaConfig(
        **SHAPES[shape],
        num_key_value_heads=8,
        vocab_size=512 if tiny_one else 128256,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        initializer_range=0.1 if tiny_one else 0.02,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to(device).eval().requires_grad_(False)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def _prompt(length: int, vocab_size: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Random ids [1, length]."""
    return torch.randint(3, vocab_size, (1, length), generator=torch.Generator().manual_seed(seed)).to(device)


def _reserved(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _settings(options: argparse.Namespace) -> Settings:
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    if options.tiny:
        return Settings(device, ["tiny"], [24, 600], [1, 2, 8], [64], 12, 1, ["llama", "mistral", "gpt_oss"])
    return Settings(
        device=device,
        shapes=options.shapes or _fitting(device),
        prefixes=options.prefix,
        sizes=options.sizes,
        attention_prefixes=[64, 256, 512, 1024, 2048, 4096, 8192, 16384],
        new_tokens=options.max_new_tokens,
        rounds=options.rounds,
        architectures=list(ARCHITECTURES),
    )


def _fitting(device: torch.device) -> list[str]:
    """1B, and the largest shape that free memory holds."""
    free = torch.cuda.mem_get_info(device)[0] / 2**30 if device.type == "cuda" else 0.0
    largest = next(shape for shape, need in GIBIBYTES.items() if need <= free)
    return list(dict.fromkeys(["1B", largest])) if GIBIBYTES["1B"] <= free else [largest]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda")
    add("--tiny", action="store_true", help="the smallest of everything: is the script itself in order?")
    add("--budget", type=float, default=450.0, help="seconds after which what remains is skipped, and named")
    add("--shapes", nargs="+", choices=list(SHAPES), help="default: 1B and the largest that fits")
    add("--prefix", type=int, nargs="+", default=[256, 2048, 8192])
    add("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    add("--max-new-tokens", type=int, default=64)
    add("--rounds", type=int, default=15)
    return parser


if __name__ == "__main__":
    sys.exit(main())
