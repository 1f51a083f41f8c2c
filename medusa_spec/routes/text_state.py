"""What plain generation carries from pass to pass, for rows that can be copied. Knows generate()'s loop, no trees."""

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from medusa_spec.cache import plain_cache
from medusa_spec.target_output import TargetOutput

if TYPE_CHECKING:
    from medusa_spec.backbone import Backbone


class TextState:
    """A text, and what the model's own `generate` would hand to its next pass.

    Passes are made as `generate` makes them, by the model's own `prepare_inputs_for_generation`, whatever the model
    calls its state and wherever that lies.

    Args:
        backbone: The target.

    Attributes:
        ids: The text so far, [R, T]; one row to begin with.
        kwargs: Model arguments that go from pass to pass: caches, states.
    """

    def __init__(self, backbone: "Backbone") -> None:
        self.backbone = backbone
        self.ids = torch.empty(1, 0, dtype=torch.long, device=backbone.device)
        self.kwargs: dict[str, Any] = {"use_cache": True}
        cache = plain_cache(backbone.model)
        if cache is not None:
            self.kwargs[backbone.cache_argument] = cache

    def read(self, ids: torch.Tensor, **wanted: Any) -> TargetOutput:
        """A plain pass over the next tokens [R, T], which belong to the text then; `wanted` as in `Backbone.forward`.

        Returns:
            Logits, h and layers of what the model computed: of the T tokens, or of fewer or more, the last being last.
        """
        model: Any = self.backbone.model
        first, new = self.ids.shape[1] == 0, ids.shape[1]
        text = torch.cat([self.ids, ids], dim=1)
        kwargs = dict(self.kwargs)
        if self.backbone.takes_positions:
            kwargs["position_ids"] = torch.arange(text.shape[1], device=text.device).expand_as(text)
        if self.backbone.takes_mask:
            kwargs["attention_mask"] = None
        inputs = model.prepare_inputs_for_generation(
            text, next_sequence_length=None if first else new, is_first_iteration=first, **kwargs
        )
        inputs.pop("next_sequence_length", None)  # models that prepare for themselves hand on what they do not know
        out, raw = self.backbone.passed(inputs.pop("input_ids"), **inputs, **wanted)
        kept = model._update_model_kwargs_for_generation(raw, kwargs)
        self.kwargs = {key: value for key, value in kept.items() if key not in ("position_ids", "attention_mask")}
        self.ids = text
        return out

    def adopt(self, cache: Any, length: int) -> None:
        """Goes on from a copy of a cache that has read `length` tokens of one text; which they were does not count."""
        self.ids = self.ids.new_zeros(1, length)
        self.kwargs[self.backbone.cache_argument] = _Rows(self.ids.new_zeros(1), of=1).copy(cache)

    @property
    def bytes_held(self) -> int:
        """Bytes of all states, ids apart."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(self.kwargs))

    def rows(self, rows: Sequence[int]) -> "TextState":
        """Copies of some rows, in this order; what is done to them leaves this state alone."""
        state = copy.copy(self)
        index = torch.tensor(rows, device=self.ids.device)
        state.ids = self.ids.index_select(0, index)
        state.kwargs = _Rows(index, of=self.ids.shape[0]).copy(self.kwargs)
        return state


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors that arguments hold, in containers and caches too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module | type):
        yield from _tensors(vars(value))


class _Rows:
    """Copies whatever holds tensors, with other rows. A tensor is one of rows if its first dimension says so."""

    def __init__(self, index: torch.Tensor, of: int) -> None:
        self.index, self.of = index, of
        self.same = index.tolist() == list(range(of))
        self._done: dict[int, Any] = {}

    def copy(self, value: Any) -> Any:
        """The copy; what is met twice is copied once."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if value is None or isinstance(value, str | int | float | bool | torch.dtype | torch.device | type):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = value  # for what refers to itself
            self._done[id(value)] = self._object(value)
        return self._done[id(value)]

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if self.same or value.dim() == 0 or value.shape[0] != self.of:
            return value.clone()
        return value.index_select(0, self.index.to(value.device))

    def _object(self, value: Any) -> Any:
        if isinstance(value, dict):
            new = copy.copy(value)
            for key in value:
                new[key] = self.copy(value[key])
            return new
        if isinstance(value, list | tuple):
            items = [self.copy(item) for item in value]
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*items)
            return type(value)(items)
        if not hasattr(value, "__dict__") or hasattr(value, "to_dict") or isinstance(value, torch.nn.Module):
            return value  # configs and modules are no state of a text
        new = copy.copy(value)
        self._done[id(value)] = new
        for key, part in vars(value).items():
            new.__dict__[key] = self.copy(part)
        return new
