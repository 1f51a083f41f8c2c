"""The ways to decode that are compared, and how each is started. Starts nothing."""

import argparse
import json
import sys
from pathlib import Path

from peers_process import Way, clean_environment, foreign_environment

from medusa_spec.model import DRAFTERS

HERE = Path(__file__).parent
ROOM = 32
"""Positions beyond prompt and answer, so that no draft is cut where a text ends."""

VLLM = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix", "num_speculative_tokens": 24},  # the most; how many is chosen draft by draft
}
"""Speculative settings of vLLM that need no training."""


def ways(arguments: argparse.Namespace, model: str, longest: int) -> list[Way]:
    """Every way that the arguments allow, plain ones first in each family.

    Args:
        arguments: Of the conductor.
        model: Folder or hub id of the target.
        longest: Tokens of the longest prompt.
    """
    found = [*_hugging_face(arguments, model), *_vllm(arguments, model, longest), *_ours(arguments, model)]
    return [way for way in found if not arguments.ways or way.name in arguments.ways]


def _hugging_face(arguments: argparse.Namespace, model: str) -> list[Way]:
    layers = arguments.early_exit
    found = {
        "hf": ("Hugging Face generate", {}),
        "hf-lookup": ("Hugging Face prompt lookup", {"prompt_lookup_num_tokens": 10}),
        "hf-early": (f"Hugging Face early exit, {layers} layers", {"assistant_early_exit": layers}),
    }
    settings = {"model": model, "threads": arguments.threads}
    return [
        Way(
            name=name,
            label=label,
            module=HERE / "peers_hf.py",
            settings=settings | {"arguments": options},
            python=sys.executable,
            environment=clean_environment(arguments.threads),
        )
        for name, (label, options) in found.items()
    ]


def _vllm(arguments: argparse.Namespace, model: str, longest: int) -> list[Way]:
    if arguments.engine_python is None:
        return []
    found = {"vllm": ("vLLM", None), "vllm-ngram": ("vLLM n-gram", VLLM["ngram"])}
    found["vllm-suffix"] = ("vLLM suffix", VLLM["suffix"])
    if arguments.medusa_heads is not None:
        heads = json.loads((arguments.medusa_heads / "config.json").read_text())["medusa_num_heads"]
        medusa = {"method": "medusa", "model": str(arguments.medusa_heads), "num_speculative_tokens": heads}
        found["vllm-medusa"] = ("vLLM Medusa", medusa)
    length = longest + arguments.max_new_tokens + ROOM
    return [
        Way(
            name=name,
            label=label,
            module=HERE / "peers_vllm.py",
            settings={"model": model, "speculative": options, "max_model_len": length, "eager": arguments.vllm_eager},
            python=arguments.engine_python,
            environment=foreign_environment(
                arguments.threads,
                LD_PRELOAD=_preloaded(arguments.engine_python),
                VLLM_CPU_OMP_THREADS_BIND="nobind",  # bound to a core that something else uses it takes minutes
                VLLM_CPU_KVCACHE_SPACE="1",
                VLLM_ENABLE_V1_MULTIPROCESSING="0",  # one process, so no token travels between two
                VLLM_NO_USAGE_STATS="1",
            ),
        )
        for name, (label, options) in found.items()
    ]


def _preloaded(python: str) -> str:
    """What vLLM asks to be loaded first on a CPU: Intel's OpenMP, which comes with it, and tcmalloc if it is there."""
    library = Path(python).absolute().parent.parent / "lib" / "libiomp5.so"
    found = [library] if library.exists() else []
    found += sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1]
    return ":".join(map(str, found))


def _ours(arguments: argparse.Namespace, model: str) -> list[Way]:
    settings = {"model": model, "threads": arguments.threads, "heads": arguments.heads}
    names = [name for name in DRAFTERS if arguments.heads is not None or name not in ("heads", "hybrid")]
    return [
        Way(
            name="ours" if name == "plain" else f"ours-{name}",
            label=f"this project, {name}",
            module=HERE / "peers_ours.py",
            settings=settings | {"drafter": name},
            python=sys.executable,
            environment=clean_environment(arguments.threads),
        )
        for name in ("plain", *names)
    ]
