"""One more decoder layer of a target's own class, behind a joining product. Knows no heads and no training."""

import inspect
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from medusa_spec.heads.target_config import FULL, config_of
from medusa_spec.heads.view import UnrolledView, View

RESIDUAL = ("o_proj", "down_proj", "out_proj", "dense", "dense_4h_to_h", "c_proj", "fc2", "w2", "wo")
"""Names of products that end in the residual stream; whether a layer has others is tried out."""
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


class TargetLayer(nn.Module):
    """`MtpLayer` of transformers around a decoder layer of the target's class, on a `View` instead of a cache.

    ```
    x = W [norm(e(token)), norm(feature)]      next feature = norm(layer(x))      without `normed` only the first norm
    ```

    W starts as the map to the norm of the feature and the layer as the identity, by zeros in what ends in its residual
    stream. Dropout and routers' noise are off, in training too.

    Args:
        decoder: Config of one layer or more, see `target_config.more_layers`.
        number: Which of those layers.
        normed: Norms before W for the feature, and behind the layer.

    Raises:
        ValueError: If the layers of this decoder cannot be used this way, naming what is missing.
    """

    def __init__(self, decoder: dict[str, Any], number: int = 0, *, normed: bool = True) -> None:
        super().__init__()
        config = config_of(decoder)
        model = _model_of(config)
        config._attn_implementation = _attention_of(model)
        config._experts_implementation = "eager"  # the same result for a row in any batch
        self.kind = (getattr(config, "layer_types", None) or [FULL] * (number + 1))[number]
        self.window = _window_of(config, self.kind)
        self.mtp = _mtp_layer(model, config, number)
        self.positions = (_rotary_of(model, config),)  # in a tuple: a cast would spoil its frequencies
        self._asks_kind = "layer_type" in inspect.signature(self.positions[0].forward).parameters
        if not normed:
            self.mtp.hnorm, self.mtp.post_norm = nn.Identity(), nn.Identity()
        if self.mtp.eh_proj.weight.device.type != "meta":  # there weights are to come, and nothing can be tried out
            _initialize(model, self.mtp)
            self._try_out()
            self._begin()
        self.eval()

    def train(self, mode: bool = True) -> "TargetLayer":
        """Stays in evaluation, where a row's result does not depend on chance."""
        return super().train(False)

    def forward(self, feature: torch.Tensor, vector: torch.Tensor, view: View) -> torch.Tensor:
        """Features [B, T, H] and embeddings of the tokens after them [B, T, H] to the next features [B, T, H]."""
        rows = view.positions + 1  # the places of those tokens
        (rotary,) = self.positions
        kind = {"layer_type": self.kind} if self._asks_kind else {}
        angles = rotary.to(feature.device)(vector, position_ids=rows, **kind)
        seen = view.seen()
        if self.window is not None:
            seen = seen & (view.positions[0, :, None] - view.places()[None] < self.window)
        mask = torch.zeros_like(seen, dtype=feature.dtype).masked_fill_(~seen, torch.finfo(feature.dtype).min)
        given: Any = view  # has of a cache what layers call: update
        return self.mtp(
            inputs_embeds=vector,
            previous_hidden_state=feature,
            position_embeddings=angles,
            attention_mask=mask[None, None],
            position_ids=rows,
            cache=given,
        )

    def adopt(self, layer: Any) -> None:
        """Takes the weights of an `MtpLayer` of the same form, as they are.

        Raises:
            ValueError: If it is of another form.
        """
        self.mtp.load_state_dict(layer.state_dict(), strict=True, assign=True)
        left = [name for name, tensor in self.mtp.named_buffers() if tensor.device.type == "meta"]
        if left:
            raise ValueError(
                f"{left} of {type(self.mtp.mtp_block).__name__} are computed, and no checkpoint holds them"
            )

    @torch.no_grad()
    def _try_out(self) -> None:
        """Rows see what they are to see, through keys that the view keeps."""
        name = type(self.mtp.mtp_block).__name__
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 1, 3, self.mtp.eh_proj.out_features, generator=generator)
        x = x.to(self.mtp.eh_proj.weight)
        views = [_Counted(1, length, x.device) for length in (3, 2)]
        try:
            long, short = (self(*x[:, :, : view.length].unbind(0), view.next()) for view in views)
        except Exception as error:  # of somebody else's layer: any
            raise ValueError(
                f"{name} does not take what MTP heads hand a layer (hidden states, a 4-D mask, rotary angles, a cache "
                f"with update): {error}; use EAGLE heads, which bring a layer of their own"
            ) from error
        if any(view.updates != 1 for view in views) or not isinstance(long, torch.Tensor) or long.shape != x[0].shape:
            raise ValueError(
                f"{name} must hand its keys and values to the cache once and return hidden states, but did not: it is "
                "recurrent, or of another form; use EAGLE heads, which bring a layer of their own"
            )
        if not torch.allclose(long[:, :2], short, rtol=1e-3, atol=1e-3 * float(short.abs().max())):
            raise ValueError(
                f"{name} does not keep to the mask it is given; use EAGLE heads, which bring their own layer"
            )

    @torch.no_grad()
    def _begin(self) -> None:
        """The start: see the class."""
        mtp = self.mtp
        hidden, behind = mtp.eh_proj.out_features, not getattr(mtp.config, "mtp_hidden_states_first", False)
        mtp.eh_proj.weight.zero_()[:, hidden * behind : hidden * (1 + behind)].fill_diagonal_(1.0)
        for name, parameter in mtp.mtp_block.named_parameters():
            if any(part.removesuffix("_bias") in RESIDUAL for part in name.split(".")):
                parameter.zero_()
        x = torch.ones(1, 2, hidden).to(mtp.eh_proj.weight)
        x[:, 1] = torch.arange(hidden)
        expected = mtp.post_norm(mtp.hnorm(x))
        if not torch.allclose(self(x, x, UnrolledView(1, 2, x.device).next()), expected):
            raise ValueError(
                f"{type(mtp.mtp_block).__name__} cannot start as the identity: what ends in its residual stream is not "
                f"among {', '.join(RESIDUAL)}; use EAGLE heads, which bring a layer of their own"
            )


class _Counted(UnrolledView):
    """Counts the updates."""

    def __init__(self, batch: int, length: int, device: torch.device) -> None:
        super().__init__(batch, length, device)
        self.length, self.updates = length, 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.updates += 1
        return super().update(key, value)


def _model_of(config: Any) -> Any:
    """A decoder of this config without memory, from which classes are read."""
    errors = []
    for auto in (AutoModel, AutoModelForCausalLM):
        try:
            with torch.device("meta"):
                model = auto.from_config(config, attn_implementation="eager")
            return model.get_decoder() if hasattr(model, "get_decoder") else model
        except Exception as error:  # of somebody else's constructor: any
            errors.append(str(error))
    raise ValueError(f"decoder of model_type {config.model_type!r} cannot be built: {errors[0]}")


def _window_of(config: Any, kind: str) -> int | None:
    """How many rows back a layer of this kind sees, its own among them; None for all."""
    if kind not in (FULL, "sliding_attention"):
        raise ValueError(f"a layer of kind {kind!r} cannot be an MTP layer: it must attend; use EAGLE heads")
    return None if kind == FULL else config.sliding_window


def _attention_of(model: Any) -> str:
    """An implementation that takes an explicit mask; torch's own knows no soft-cap and no sinks."""
    capped = getattr(model.config, "attn_logit_softcapping", None)
    return "sdpa" if model._supports_sdpa and not capped else "eager"


def _mtp_layer(model: Any, config: Any, number: int) -> Any:
    """An `MtpLayer` of the classes that the decoder uses."""
    try:
        from transformers.modeling_layers import MtpLayer
    except ImportError as error:
        raise ValueError("MTP heads need a transformers with MtpLayer, 5.24 or later; install it") from error
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ValueError(f"{type(model).__name__} has no list `layers`, of which MTP heads use one; use EAGLE heads")
    norm = next((type(module) for name, module in layers[-1].named_modules() if "norm" in name), None)
    if norm is None:
        raise ValueError(f"{type(layers[-1]).__name__} has no norm, of which MTP heads use the class; use EAGLE heads")
    config.rms_norm_eps = next((float(getattr(config, name)) for name in EPSILONS if getattr(config, name, 0)), 1e-5)
    try:
        return MtpLayer(config, type(layers[-1]), norm, number)
    except Exception as error:  # of somebody else's constructor: any
        raise ValueError(
            f"{type(layers[-1]).__name__} cannot be built as one more layer: {error}; use EAGLE heads"
        ) from error


def _rotary_of(model: Any, config: Any) -> Any:
    """Rotary positions as the decoder has them."""
    rotary = getattr(model, "rotary_emb", None)
    if rotary is None:
        raise ValueError(
            f"{type(model).__name__} has no rotary_emb: MTP heads need rotary positions; use EAGLE heads, which bring "
            "their own"
        )
    with torch.device("cpu"):
        return type(rotary)(config=config)


def _initialize(model: Any, layer: nn.Module) -> None:
    """Weights as the target's were before its training: those of experts are not even written yet."""
    for module in layer.modules():
        model._init_weights(module)
