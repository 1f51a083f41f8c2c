"""The frozen target of a run, loaded when a stage first asks for it."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from medusa_spec.backbone import Backbone
from medusa_spec.errors import CheckpointError, ConfigError
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.weights import weights_name
from medusa_spec.target_adapter import with_adapter

TORCH_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_NATIVE_BF16 = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
"""Not public in torch: where a version lacks them, float32 is the careful answer."""


def compute_device(config: FinetuneConfig) -> torch.device:
    """The device asked for, else a GPU if there is one."""
    try:
        device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch that was built without it
        raise ConfigError(f"device must be one that torch finds here, got {config.device!r}: {error}") from error
    return device


def compute_dtype(config: FinetuneConfig) -> torch.dtype:
    """The dtype asked for; `auto` avoids bfloat16 where the CPU has no instructions for it."""
    if config.dtype != "auto":
        return TORCH_DTYPES[config.dtype]
    if compute_device(config).type != "cpu":
        return torch.bfloat16
    native = (getattr(torch.cpu, name, None) for name in _NATIVE_BF16)
    return torch.bfloat16 if any(check is not None and check() for check in native) else torch.float32


def decoding_dtype(config: FinetuneConfig) -> torch.dtype:
    """What users decode with: the dtype asked for; for `auto` the checkpoint's own, however states were computed."""
    if config.dtype != "auto":
        return TORCH_DTYPES[config.dtype]
    saved = AutoConfig.from_pretrained(config.model, revision=config.revision).dtype
    return saved or torch.float32


def decoder_config(config: FinetuneConfig) -> Any:
    """The config of the target's decoder, without loading the target."""
    return AutoConfig.from_pretrained(config.model, revision=config.revision).get_text_config(decoder=True)


def load_model(config: FinetuneConfig, dtype: torch.dtype, adapter: Path | None = None) -> Any:
    """A load of the target, frozen, on the device of `config`, with an adapter of its own if there is one."""
    model: Any = AutoModelForCausalLM.from_pretrained(config.model, revision=config.revision, dtype=dtype)
    model = model.to(compute_device(config)).eval().requires_grad_(False)
    return model if adapter is None else with_adapter(model, adapter)


MARKS = ("weights", "eos_ids")
"""Settings of stages that let the target write, which runs of older versions did not note."""


def target_marks(config: FinetuneConfig, target: "Target") -> dict[str, Any]:
    """What tells the target that writes from another one under the same name."""
    return {"weights": weights_name(config), "eos_ids": sorted(target.eos_ids)}


class Target:
    """Tokenizer, model and backbone of `config.model`; each is loaded once, on first use.

    Args:
        config: Names model, revision, dtype and device.

    Attributes:
        adapter: Folder of the adapter that was trained on the target in this run; None before.
    """

    def __init__(self, config: FinetuneConfig) -> None:
        self.config = config
        self.adapter: Path | None = None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        try:
            return AutoTokenizer.from_pretrained(self.config.model, revision=self.config.revision)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"model must be a folder or hub id of a model with its tokenizer, got {self.config.model!r}: {error}"
            ) from error

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids at which generation stops: the generation config's, and the tokenizer's own."""
        ids = {self.tokenizer.eos_token_id}
        try:
            stop = GenerationConfig.from_pretrained(
                self.config.model, revision=self.config.revision or "main"
            ).eos_token_id
            ids |= set(stop) if isinstance(stop, list) else {stop}
        except OSError:
            pass  # a model without a generation config stops at the tokenizer's EOS
        return frozenset(int(token) for token in ids if token is not None)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Compute dtype of the target."""
        return compute_dtype(self.config)

    @cached_property
    def model(self) -> Any:
        """The causal LM, frozen, in `config.dtype`."""
        return load_model(self.config, self.dtype, self.adapter)

    @cached_property
    def backbone(self) -> Backbone:
        """The backbone attached to the model."""
        return Backbone(self.model)

    def release(self) -> Any:
        """Detaches the backbone, if there is one, and gives the model; a later `backbone` attaches anew."""
        attached = self.__dict__.pop("backbone", None)
        if attached is not None:
            attached.detach()
        return self.model

    def adapt(self, adapter: Path) -> None:
        """From now on the target of this run is the one with this adapter, loaded anew when it is asked for."""
        if self.adapter == adapter:
            return
        if "model" in self.__dict__:
            self.release()
            del self.__dict__["model"]
        self.adapter = adapter

    def untouched(self, dtype: torch.dtype) -> Any:
        """A second load of the target, nothing attached."""
        return load_model(self.config, dtype, self.adapter)

    def for_decoding(self) -> Any:
        """The model, detached, in the dtype that users decode with; from now on it is the target of this run."""
        attached = self.__dict__.pop("backbone", None)
        if attached is not None:
            attached.detach()
        dtype, loaded = decoding_dtype(self.config), self.__dict__.get("model")
        if loaded is None or loaded.dtype != dtype:
            self.__dict__["model"] = load_model(self.config, dtype, self.adapter)
        return self.model
