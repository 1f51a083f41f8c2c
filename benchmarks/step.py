"""What a pass costs: Hugging Face's one-token pass, and passes of N nodes, prepared and not; one JSON line last.

python benchmarks/step.py [MODEL] [--prefix 256 2048] [--sizes 1 2 4 8 14 16 28] [--rounds 9]

All are timed in turn, round after round, in one process; medians count. Then what each part of the preparation brings,
and the linear layers alone.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from medusa_spec.backbone import Backbone
from medusa_spec.comparison_table import columns
from medusa_spec.cost import filled_cache, pass_timer, timed_in_turn
from medusa_spec.default_model import default_model_path
from medusa_spec.machine import LoadWatch, machine_facts, quiet_words
from medusa_spec.prepare import prepare
from medusa_spec.prepared.attention import FastAttention
from medusa_spec.prepared.decoder import FastDecoder
from medusa_spec.prepared.decoder_layer import FastDecoderLayer
from medusa_spec.prepared.gated_mlp import FastGatedMlp
from medusa_spec.prepared.norm import FastNorm
from medusa_spec.prepared.packed_linear import PackedLinear, available
from medusa_spec.prepared.swap import swap_back

INPUTS, OUTPUTS, LAYERS = 576, 1536, 60

PARTS: dict[str, tuple[type, ...]] = {
    "packed linear layers": (),
    "+ norms": (FastNorm,),
    "+ gated MLPs": (FastNorm, FastGatedMlp),
    "+ attention": (FastNorm, FastGatedMlp, FastAttention),
    "+ whole layers": (FastNorm, FastGatedMlp, FastAttention, FastDecoderLayer),
    "+ all layers in one call": (FastNorm, FastGatedMlp, FastAttention, FastDecoderLayer, FastDecoder),
}
"""Which fast forwards are left in place, from few to all."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Time, print the tables, then the JSON line."""
    options = _parser().parse_args(arguments)
    name = options.model or str(default_model_path())
    load = LoadWatch()

    def target() -> Any:
        return AutoModelForCausalLM.from_pretrained(name, dtype=options.dtype).eval().requires_grad_(False)

    untouched, plain, fast = target(), Backbone(target()), target()
    prepared = prepare(fast, fast.get_output_embeddings())
    packed = Backbone(fast)
    results: dict[str, Any] = {"prepared": prepared.reason, "passes_ms": {}}
    for prefix in options.prefix:
        timers = {"Hugging Face, 1 token": _hugging_face_timer(untouched, prefix)}
        for size in options.sizes:
            timers[f"not prepared, N = {size}"] = pass_timer(plain, size, filled_cache(plain, prefix))
            timers[f"prepared, N = {size}"] = pass_timer(packed, size, filled_cache(packed, prefix))
        found = {key: seconds * 1e3 for key, seconds in timed_in_turn(timers, options.rounds).items()}
        results["passes_ms"][prefix] = found
        unit = found["Hugging Face, 1 token"]
        rows = [[f"prefix {prefix}", "ms", "x Hugging Face's 1 token"]]
        rows += [[key, f"{value:.1f}", f"{value / unit:.2f}"] for key, value in found.items()]
        print(columns(rows), end="\n\n")
    results["parts_ms"] = parts = parts_table(name, options.dtype, options.prefix[0], options.rounds)
    sizes = list(next(iter(parts.values())))
    print(f"passes behind {options.prefix[0]} tokens, ms, by what of the preparation is in place")
    print(
        columns(
            [
                ["", *(f"N = {n}" for n in sizes)],
                *([part, *(f"{row[n]:.1f}" for n in sizes)] for part, row in parts.items()),
            ]
        )
    )
    print()
    results["linear_us"] = linears = linear_table(options.rows, options.rounds)
    names = list(next(iter(linears.values())))
    print(f"one linear layer of {INPUTS} x {OUTPUTS}, microseconds, {LAYERS} of them in turn")
    print(columns([["rows", *names], *([str(n), *(f"{v:.0f}" for v in row.values())] for n, row in linears.items())]))
    print()
    print(prepared.reason)
    print(quiet_words(load.others()), end="\n\n")
    facts = machine_facts(packed.device, packed.dtype)
    print(json.dumps({**results, "busy_cores_elsewhere": load.others(), "machine": facts}))


def parts_table(name: str, dtype: str, prefix: int, rounds: int, sizes: Sequence[int] = (1, 8, 16)) -> dict[str, Any]:
    """Milliseconds of a pass by part of the preparation and N; every part is a model of its own, timed in turn."""
    timers = {}
    for part, kinds in PARTS.items():
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval().requires_grad_(False)
        for module in prepare(model, model.get_output_embeddings()).modules:
            if not isinstance(module, kinds):
                swap_back(module)
        backbone = Backbone(model)
        cache = filled_cache(backbone, prefix)
        timers.update({(part, size): pass_timer(backbone, size, cache) for size in sizes})
    found = timed_in_turn(timers, rounds)
    return {part: {size: found[part, size] * 1e3 for size in sizes} for part in PARTS}


@torch.inference_mode()
def linear_table(rows: Sequence[int], rounds: int) -> dict[int, dict[str, float]]:
    """Microseconds of one linear layer by rows and by way of computing it, over weights too many for the caches."""
    weights = [torch.randn(OUTPUTS, INPUTS).bfloat16() for _ in range(LAYERS)]
    wide = [weight.float() for weight in weights]
    packed = [PackedLinear(weight) for weight in weights] if available() else []
    table = {}
    for count in rows:
        x = torch.randn(count, INPUTS).bfloat16()
        ways: dict[str, Callable[[], None]] = {
            "torch, bfloat16": lambda x=x: _each(nn.functional.linear, x, weights),
            "torch, float32 and back": lambda x=x: _each(
                lambda x, weight: nn.functional.linear(x.float(), weight).bfloat16(), x, wide
            ),
        }
        if packed:
            ways["packed"] = lambda x=x: _each(lambda x, linear: linear(x), x, packed)
        table[count] = {name: s / LAYERS * 1e6 for name, s in timed_in_turn(ways, rounds).items()}
    return table


def _each(apply: Callable[..., Any], x: torch.Tensor, weights: Sequence[Any]) -> None:
    for weight in weights:
        apply(x, weight)


def _hugging_face_timer(model: Any, prefix: int) -> Callable[[], None]:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.arange(prefix)[None] % model.config.vocab_size, cache=cache)

    @torch.inference_mode()
    def run() -> None:
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache).logits[:, -1].float().argmax(-1).tolist()
        cache.crop(-1)

    return run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("model", nargs="?", help="folder or hub id; default: the default model")
    add("--prefix", type=int, nargs="+", default=[256, 2048])
    add("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 14, 16, 28])
    add("--rows", type=int, nargs="+", default=[1, 4, 8, 14, 16, 28, 56, 256], help="of the linear layers alone")
    add("--rounds", type=int, default=9)
    add("--dtype", default="auto")
    return parser


if __name__ == "__main__":
    main()
