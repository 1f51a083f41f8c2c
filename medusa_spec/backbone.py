"""The target as this library sees it. The only file that reads Hugging Face model internals; knows no decoding loop."""

import hashlib
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from accelerate.utils import align_module_device
from torch import nn
from transformers import PreTrainedModel

from medusa_spec import positions
from medusa_spec.adapters import adapter_state, without_wrapper
from medusa_spec.cache import SlabCache
from medusa_spec.capture import CutError, capture_input, capturing, capturing_output
from medusa_spec.delegation import PREFIX, Pass, attach, register
from medusa_spec.errors import AttachError, ConfigError, UnsupportedError
from medusa_spec.heads import Projection, TokenEmbedding
from medusa_spec.prepared.decoder import FastDecoder
from medusa_spec.routes import AttentionRoute, Route
from medusa_spec.taps import Tapped, find_layers, listening, tapping
from medusa_spec.target_output import TargetOutput, TargetStates

_attached: "WeakKeyDictionary[nn.Module, ref[Backbone]]" = WeakKeyDictionary()
"""Backbones of attached models by LM head. A deep copy of such a model brings the hook along without being here, and a
backbone that nobody holds any more stands in nobody's way."""


class Backbone:
    """A frozen causal LM with tree attention attached.

    Attaching registers an attention and a mask function under a name of their own, and points the model's configs at
    it. Both hand every call without a tree to the model's original functions, so plain calls behave as before, from
    any thread. The tree travels as a keyword argument of the forward, which Hugging Face models hand to each layer's
    attention. That is the route to begin with; `take` changes it, see `routes`.

    Args:
        model: A causal LM with an LM head; a PEFT model with weight-injecting adapters is unwrapped.

    Attributes:
        route: How tree passes are made.
        cache_argument: What the model's forward calls its cache.
        takes_positions: Whether its forward takes `position_ids`.
        takes_mask: Whether it takes an `attention_mask`.

    Raises:
        UnsupportedError: If the model has no LM head, is an encoder-decoder, or carries prompt-learning adapters.
        AttachError: If the model is attached already, or its attention cannot be exchanged.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = _unwrap(model)
        self.lm_head = _lm_head(self.model)
        parameters = inspect.signature(self.model.forward).parameters
        self.cache_argument = "past_key_values" if "past_key_values" in parameters else "cache"
        self._keeps_logits = "logits_to_keep" in parameters
        self.takes_positions = "position_ids" in parameters
        self.takes_mask = "attention_mask" in parameters
        other = _attached.get(self.lm_head)
        if other is not None and other() is not None:
            raise AttachError(
                f"this {type(self.model).__name__} is already wrapped; use the MedusaModel that wraps it, or call its "
                "detach() first"
            )
        self._originals: list[tuple[Any, str]] = []
        self.attached = True
        self.route: Route = AttentionRoute(self)
        self.route.enter()
        for key, hook in list(self.lm_head._forward_pre_hooks.items()):
            if hook is capture_input:
                del self.lm_head._forward_pre_hooks[key]  # of another backbone, which is gone or the original's
        self._hook = self.lm_head.register_forward_pre_hook(capture_input)
        _attached[self.lm_head] = ref(self)
        self.adapters = adapter_state(self.model)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For copies, and for pickles read in another process, where nothing is registered yet."""
        self.__dict__.update(state)
        for _, original in self._originals:
            register(original)
        if self.attached:
            _attached[self.lm_head] = ref(self)

    @property
    def device(self) -> torch.device:
        """Where input ids go: the device of the input embeddings."""
        return _runs_on(self.model.get_input_embeddings())

    @property
    def head_device(self) -> torch.device:
        """Where h is: the device of the LM head."""
        return _runs_on(self.lm_head)

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of the target."""
        return self.model.dtype

    @cached_property
    def config(self) -> Any:
        """The text decoder's config."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def hidden_size(self) -> int:
        """H, the width of h."""
        return getattr(self.lm_head, "in_features", None) or self.config.hidden_size

    @cached_property
    def vocab_size(self) -> int:
        """V, the number of logits: models may cut the LM head's rows, or have more of them than the config says."""
        if getattr(self.lm_head, "out_features", None) in (None, self.config.vocab_size):
            return self.config.vocab_size
        return self.forward(torch.zeros(1, 1, dtype=torch.long, device=self.device)).logits.shape[-1]

    @property
    def ids_below(self) -> int:
        """Number of ids that have an input embedding."""
        return getattr(self.model.get_input_embeddings(), "num_embeddings", None) or self.vocab_size

    def deepest(self, length: int) -> int | None:
        """How deep a tree may be behind `length` prefix tokens; None for no bound. See `positions.deepest`."""
        return positions.deepest(self.config, length)

    @property
    def reads_chains(self) -> bool:
        """Whether tree passes run in one call (see `prepare`), so that a prompt is best read as chains of nodes.

        Not where positions are rescaled by the longest one of a pass: there a prompt is one piece.
        """
        fast = self.route.reads_chains and isinstance(self.model.get_decoder(), FastDecoder)
        return fast and not self.rescales_positions

    @property
    def rescales_positions(self) -> bool:
        """Whether rotary positions depend on the longest one of a pass."""
        return positions.rescaled(self.config)

    @cached_property
    def mixes_tokens(self) -> bool:
        """Whether there are layers of LLM.int8 with its threshold for outliers.

        They compute columns in 16 bits where *any* token of a pass stands out, and in 8 where none does, so a token's
        result depends on the others of its pass by more than rounding.
        """
        states: list[Any] = [getattr(module, "state", None) for module in self.model.modules()]
        return any(type(state).__name__ == "MatmulLtState" and state.threshold > 0 for state in states)

    @property
    def spread(self) -> str | None:
        """Why a pass does not stay on one device with weights that lie still, in words; None if it does."""
        if any(hasattr(module, "_hf_hook") for module in self.model.modules()):
            return "the target's weights are moved or dispatched by hooks"
        devices = {tensor.device for tensor in self._tensors()}
        return f"the target is spread over {len(devices)} devices" if len(devices) > 1 else None

    @property
    def placed(self) -> int:
        """Names the places in memory of all weights: another number after a cast, a move, an exchange."""
        return hash(tuple(tensor.data_ptr() for tensor in self._tensors()))

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()

    @property
    def max_length(self) -> int | None:
        """Longest text that learnt positions allow; None where positions are computed."""
        return positions.longest(self.config)

    def reads_anew(self, ids: torch.Tensor, cache: SlabCache) -> bool:
        """Whether plain generation would drop its cache now and read the whole text again.

        Phi-3 does so once, where the text grows past the length at which its rotary factors change. The model's own
        `prepare_inputs_for_generation` is asked.

        Args:
            ids: The whole text so far [1, T], without padding.
            cache: Holds a part of it.
        """
        edge = positions.longrope_edge(self.config)
        if edge is None or not 0 < cache.get_seq_length() <= edge < ids.shape[1]:
            return False
        prepare: Any = self.model.prepare_inputs_for_generation
        inputs = prepare(ids, next_sequence_length=1, use_cache=True, **{self.cache_argument: cache})
        return inputs.get(self.cache_argument) is None

    def take(self, route: type[Route]) -> None:
        """Makes tree passes in another way from here on."""
        if type(self.route) is not route:
            self.route = route(self)
            self.route.enter()

    def attach_attention(self) -> None:
        """Lets trees reach the layers through the attention interface."""
        if not self._originals:
            self._originals = attach(self.model)

    def detach_attention(self) -> None:
        """Gives the model's own attention and masks back."""
        for config, original in self._originals:
            config._attn_implementation_internal = original
        self._originals = []

    def new_cache(self, batch: int = 1) -> Any:
        """An empty cache for the route; see `Route.new_cache`."""
        return self.route.new_cache(batch)

    def read(self, input_ids: torch.Tensor, cache: Any, **wanted: Any) -> TargetOutput:
        """A plain pass over the next tokens [B, T] of the texts in a cache of `new_cache`; `wanted` as in `forward`."""
        return self.route.read(input_ids, cache, **wanted)

    def detach(self) -> None:
        """Gives the model back as it was: attention, masks, hooks. Calling it twice does nothing."""
        self.detach_attention()
        self.attached = False
        self._hook.remove()
        _attached.pop(self.lm_head, None)

    def check_unchanged(self) -> None:
        """Raises AttachError if an adapter was added, switched, merged or disabled since the attach."""
        if not self.attached:
            raise AttachError("this model was detached; wrap it again with MedusaModel(model, heads)")
        if any(config._attn_implementation != PREFIX + original for config, original in self._originals):
            raise AttachError(
                "the attention implementation of the target was changed since it was wrapped (by "
                "set_attn_implementation, or through a config that it shares with another model); detach() it and wrap "
                "it again"
            )
        if self.model.get_output_embeddings() is not self.lm_head and adapter_state(self.model) == self.adapters:
            raise AttachError(
                "the LM head of the target was exchanged since it was wrapped (by resize_token_embeddings, perhaps); "
                "detach() it and wrap it again"
            )
        if adapter_state(self.model) != self.adapters:
            raise AttachError(
                "the active adapters of the target changed after it was wrapped, so the wrapped heads and probe are "
                "for another model; wrap it again: medusa_model.detach(); MedusaModel(model, heads)"
            )

    def forward(self, input_ids: torch.Tensor, **arguments: Any) -> TargetOutput:
        """One plain pass that also returns h.

        Args:
            input_ids: [B, T].
            **arguments: As for `passed`.

        Returns:
            Logits, h and layers of the T positions, or of the last one.

        Raises:
            ConfigError: If taps do not rise, or name no layer.
            UnsupportedError: If the layers that taps name cannot be found.
        """
        return self.passed(input_ids, **arguments)[0]

    @torch.no_grad()
    def passed(
        self,
        input_ids: torch.Tensor,
        *,
        last_only: bool = False,
        all_states: bool = False,
        taps: tuple[int, ...] = (),
        collect: tuple[str, ...] = (),
        **kwargs: Any,
    ) -> tuple[TargetOutput, Any]:
        """As `forward`, together with what the model itself returned.

        Args:
            input_ids: [B, T].
            last_only: Compute logits of the last position only (prefill), and return h and layers of it alone.
            all_states: Return h and layers of all positions even so.
            taps: Decoder layers, rising, of which the hidden state that enters them is returned too; tap i is Hugging
                Face's `hidden_states[i]`.
            collect: `"hidden_states"` and `"attentions"`, as the model's forward gives them.
            **kwargs: Passed on; `cache` is renamed for older versions of transformers.
        """
        if "cache" in kwargs:
            kwargs[self.cache_argument] = kwargs.pop("cache")
            kwargs["use_cache"] = kwargs[self.cache_argument] is not None
        around = last_only and all_states and self._keeps_logits and self.decoder_gives_h
        if self._keeps_logits:
            kwargs["logits_to_keep"] = 1 if last_only and (around or not all_states) else 0
        kwargs |= {f"output_{name}": True for name in collect}
        decoded: AbstractContextManager[list[torch.Tensor]] = nullcontext([])
        if around:
            decoded = capturing_output(self.model.get_decoder())
        with capturing() as captured, self._tapping(taps) as tapped, decoded as outputs:
            raw = self.model(input_ids=input_ids, return_dict=True, **kwargs)
        logits = raw.logits
        h = self._last(captured)
        if around:
            h = outputs[-1].to(h.device)
        only = last_only and not all_states
        collected: dict[str, Any] = {name: getattr(raw, name) for name in collect}
        out = TargetOutput(
            logits=logits[:, -1:] if last_only else logits,
            h=h[:, -1:] if only else h,
            layers=None if tapped is None else tapped.stacked(h, last_only=only),
            **collected,
        )
        return out, raw

    def verify(
        self,
        input_ids: torch.Tensor,
        tree_pass: Pass,
        *,
        last_only: bool = False,
        all_states: bool = False,
        taps: tuple[int, ...] = (),
        collect: tuple[str, ...] = (),
    ) -> TargetOutput:
        """One pass over the N nodes of a tree, each row behind its own prefix.

        Args:
            input_ids: Node tokens of all rows, side by side [1, M].
            tree_pass: Shape, prefix lengths and cache; see `attention.TreePass` and `StaticTreePass`.
            last_only: As in `forward`, for the last node.
            all_states: As in `forward`.
            taps: As in `forward`; not while a graph is recorded.
            collect: As in `forward`.

        Returns:
            Logits [1, M, V], h [1, M, H] and layers [1, M, L, H] at every node, or at the last one.
        """
        return self.route.verify(
            input_ids, tree_pass, last_only=last_only, all_states=all_states, taps=taps, collect=collect
        )

    def hidden_states(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """h [B, T, H] of every position without paying for the LM head; see `states`."""
        return self.states(input_ids, attention_mask).h

    def states(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        taps: tuple[int, ...] = (),
        gradient: bool = False,
    ) -> TargetStates:
        """h and layers of every position without paying for the LM head, by cutting the forward off there.

        Args:
            input_ids: [B, T]; right padding is fine with a mask.
            attention_mask: [B, T], 1 for real tokens; None means all are.
            taps: As in `forward`.
            gradient: Let gradients run back into what is trained of the target: its adapters.

        Returns:
            h [B, T, H] and layers [B, T, L, H], in the model's dtype.

        Raises:
            ConfigError: If the text is longer than the model's learnt positions; or as `forward`, for taps.
            UnsupportedError: As `forward`.
        """
        if self.max_length is not None and input_ids.shape[1] > self.max_length:
            raise ConfigError(
                f"max_length must be at most {self.max_length}, where the learnt positions of "
                f"{type(self.model).__name__} end, got a text of {input_ids.shape[1]} tokens"
            )
        kwargs: dict[str, Any] = {"logits_to_keep": 0} if self._keeps_logits else {}
        mode = nullcontext() if gradient else torch.no_grad()
        with mode, capturing(cut=True) as captured, self._tapping(taps) as tapped:
            try:
                self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **kwargs)
            except CutError:
                pass
        h = self._last(captured)
        return TargetStates(h=h, layers=None if tapped is None else tapped.stacked(h))

    @contextmanager
    def _tapping(self, taps: tuple[int, ...]) -> Iterator[Tapped | None]:
        """Within it, what enters the layers goes to what is returned; None if nothing is asked."""
        if not taps:
            with tapping(None):
                yield None
            return
        decoder = self.model.get_decoder()
        tapped = Tapped(find_layers(decoder, getattr(self.config, "num_hidden_layers", None)), taps)
        # A decoder in one call would see the hooks and not be one; where it must, it listens itself.
        listens: AbstractContextManager[None] = nullcontext() if isinstance(decoder, FastDecoder) else listening()
        with tapping(tapped), listens:
            yield tapped

    @cached_property
    def decoder_gives_h(self) -> bool:
        """Whether the decoder's output enters the LM head as it is, read off a pass."""
        ids = torch.arange(1, 4, device=self.device).remainder(self.ids_below).unsqueeze(0)
        with capturing_output(self.model.get_decoder()) as outputs:
            h = self.forward(ids).h
        if not outputs or outputs[-1].dtype != h.dtype:
            return False
        return torch.equal(outputs[-1].to(h.device), h)

    def _last(self, captured: list[torch.Tensor]) -> torch.Tensor:
        if not captured:
            raise AttachError(
                f"{type(self.model).__name__} does not call the LM head that get_output_embeddings() returns, so its "
                "hidden state cannot be had; use the model without medusa-spec"
            )
        return captured[-1]

    def projection(self) -> Projection:
        """The LM head with the model's own post-processing, all V rows, as drafts use it."""
        scale, softcap = self._post_processing()
        with align_module_device(self.lm_head):  # offloaded weights are there for as long as this lasts, and no longer
            weight, bias = self.lm_head.weight.detach()[: self.vocab_size], self.lm_head.bias
            bias = None if bias is None else bias.detach()[: self.vocab_size]
        return Projection(weight=weight, bias=bias, scale=scale, softcap=softcap)

    def embedding(self) -> TokenEmbedding:
        """The input embeddings as sequential heads read them, with the factor that the model puts on them."""
        module: Any = self.model.get_input_embeddings()
        with align_module_device(module):
            weight = module.weight.detach()
            ids = torch.arange(min(8, weight.shape[0]), device=weight.device)
            raw, vectors = weight[ids].double(), module(ids).detach().double()
        scale = float((vectors * raw).sum() / (raw * raw).sum().clamp_min(1e-30))
        return TokenEmbedding(weight=weight, scale=scale if abs(scale - 1.0) > 0.01 else 1.0)

    def _post_processing(self) -> tuple[float, float | None]:
        """(scale, softcap) between the LM head's output and the model's logits, read off a pass and checked.

        Drafts only need their order to be right, so what is not understood is left out rather than refused.
        """
        ids = torch.arange(1, 9, device=self.device).remainder(self.ids_below).unsqueeze(0)
        out = self.forward(ids)
        raw = self.lm_head(out.h)[..., : self.vocab_size].detach().double()
        logits = out.logits.double()
        softcap = getattr(self.config, "final_logit_softcapping", None)
        if softcap:
            capped = softcap * torch.tanh(raw / softcap)
            return (1.0, float(softcap)) if torch.allclose(capped, logits, rtol=0.02, atol=0.02) else (1.0, None)
        scale = float((logits * raw).sum() / (raw * raw).sum().clamp_min(1e-30))
        fits = torch.allclose(raw * scale, logits, rtol=0.02, atol=0.02 * float(logits.abs().max()))
        return (scale if fits and abs(scale - 1.0) > 0.01 else 1.0), None

    def lm_head_hash(self) -> str:
        """Sixteen hex digits that name the LM head's weights: heads trained on another LM head are noticed."""
        with align_module_device(self.lm_head):
            weight = self.lm_head.weight.detach()
            sample = weight[:: max(1, weight.shape[0] // 512)].to("cpu", torch.float32).contiguous()
        return hashlib.sha256(sample.numpy().tobytes() + repr(tuple(weight.shape)).encode()).hexdigest()[:16]


def _unwrap(model: Any) -> PreTrainedModel:
    model = without_wrapper(model)
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"model must be a transformers PreTrainedModel with a causal LM head, got {type(model).__name__}"
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"{type(model).__name__} is an encoder-decoder; only decoder-only models are supported")
    return model


def _lm_head(model: PreTrainedModel) -> Any:
    """An `nn.Linear`, or what quantisation or an adapter put in its place."""
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no LM head; load it with AutoModelForCausalLM rather than AutoModel"
        )
    return head


def _runs_on(module: Any) -> torch.device:
    """Device of a module's weights when it is called: offloaded ones lie elsewhere until then."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        device: Any = getattr(part, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return module.weight.device
