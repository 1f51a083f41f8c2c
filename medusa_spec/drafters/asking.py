"""Drafts that ask heads as they go, so that the questions of several rows are asked at once. Knows no heads.

A draft is a generator: it yields what it asks and is sent the answer.

```
row 0   ask start ─ ask logits 0 ─ ask descend 1 ─ ask logits 1 ─ tree        rows that ask the same of the same heads
row 1   ask start ─ ask logits 0 ─ tree                                       are answered by one call, whose weights
row 2   ask start ─ ask logits 0 ─ ask descend 1 ─ ask logits 1 ─ tree        are read once
```
"""

from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Ask:
    """A question about M nodes.

    Attributes:
        to: A function of `settings` and of tensors whose first dimension is M, to one of M rows. Questions to equal
            functions (a method of one object, say) with equal settings may be put together.
        settings: Its first arguments.
        of: The tensors.
    """

    to: Callable[..., torch.Tensor]
    settings: tuple[Hashable, ...] = ()
    of: tuple[torch.Tensor, ...]


T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
Drafting = Generator[Ask, torch.Tensor, T]


def answered(result: T) -> Drafting[T]:
    """A draft that asks nothing."""
    yield from ()
    return result


def alone(drafting: Drafting[T]) -> T:
    """Runs one draft to its result."""
    return together({0: drafting})[0]


@torch.inference_mode()
def together(draftings: Mapping[K, Drafting[T]]) -> dict[K, T]:
    """Runs drafts side by side to their results, by key; what they ask at the same time is asked together."""
    found, asking = dict[K, T](), dict[K, Ask]()

    def go_on(key: K, answer: torch.Tensor | None) -> None:
        try:
            asking[key] = draftings[key].send(answer)  # type: ignore[arg-type]  # None begins a generator
        except StopIteration as end:
            found[key] = end.value

    for key in draftings:
        go_on(key, None)
    while asking:
        groups: dict[Any, list[K]] = {}
        for key, ask in asking.items():
            groups.setdefault((ask.to, ask.settings), []).append(key)
        for (to, settings), keys in groups.items():
            asks = [asking.pop(key) for key in keys]
            counts = [ask.of[0].shape[0] for ask in asks]
            tensors = [_joined(parts) for parts in zip(*(ask.of for ask in asks), strict=True)]
            for key, answer in zip(keys, to(*settings, *tensors).split(counts), strict=True):
                go_on(key, answer)
    return {key: found[key] for key in draftings}


def _joined(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
