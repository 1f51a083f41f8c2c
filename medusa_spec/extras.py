"""Hidden states and attention weights, token by token, as generate() returns them. Knows shapes, no models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad

from medusa_spec.attention import TreePass
from medusa_spec.attention_weights import WeighingPass
from medusa_spec.backbone import TargetOutput
from medusa_spec.cache import SlabCache
from medusa_spec.tree import TokenTree

States = tuple[torch.Tensor, ...]
Selection = tuple[torch.Tensor | None, ...]


@dataclass(kw_only=True, eq=False)
class Extras:
    """What was asked of the passes beside tokens, for one row.

    ```
    prompt of 4, tree 0 ─ 1 ─ 3, path (0, 3) accepted     hidden_states   ([1, 4, H], …)   of the prompt
                  └─ 2                                                    ([1, 1, H], …)   of node 0
                                                                          ([1, 1, H], …)   of node 3
    ```

    Attributes:
        asked: `"hidden_states"`, `"attentions"`, both or one.
        padding: Tokens of padding before the prompt; they stand as zeros.
        selected: Numbers of the hidden states wanted, from the end if negative; None for all. The others are None.
        hidden_states: Per token, per layer [1, T, H]: of the prompt for the first token, of one token then.
        attentions: Per token, per layer [1, Hq, T, keys].
    """

    asked: tuple[str, ...]
    padding: int = 0
    selected: Sequence[int] | None = None
    hidden_states: list[Selection] = field(default_factory=list)
    attentions: list[States] = field(default_factory=list)

    def pass_kind(self) -> type[TreePass]:
        """The class of passes that give what is asked."""
        weighs = "attentions" in self.asked and bool(self.attentions and self.attentions[0])
        return WeighingPass if weighs else TreePass

    def pieces(self, asked: int | None) -> int | None:
        """In pieces of how many tokens a prompt is read, if so many were asked for: weights are those of one pass."""
        return None if "attentions" in self.asked else asked

    def add_prompt(self, out: TargetOutput, cache: SlabCache, read: int, piece: int | None) -> None:
        """Takes what the pass over the prompt, or over the whole text, gave.

        Args:
            out: Of all tokens that were read.
            cache: Holds them now.
            read: How many they were.
            piece: Tokens that plain decoding would read at once: it gives what is of the last piece. None for all.
        """
        rows = self.padding + read
        last = rows if piece is None else (rows - 1) % piece + 1
        if "hidden_states" in self.asked:
            states = self._wanted(
                out.hidden_states or (), lambda layer: pad(layer, (0, 0, self.padding, 0))[..., -last:, :]
            )
            self.hidden_states.append(states)
        if "attentions" in self.asked:
            weights = enumerate(out.attentions or ())
            self.attentions.append(tuple(self._last_rows(layer, cache, index, last) for index, layer in weights))

    def _last_rows(self, weights: torch.Tensor, cache: SlabCache, index: int, last: int) -> torch.Tensor:
        """Of the last tokens, over as many keys as plain decoding holds there."""
        weights = pad(weights, (self.padding, 0, self.padding, 0))
        window, before = cache.window(index) or cache.chunk(index), cache.get_seq_length() + self.padding - last
        keys = last + (before if window is None else min(before, window - 1))
        return weights[:, :, -last:, -keys:]

    def _wanted(self, states: States, part: Callable[[torch.Tensor], torch.Tensor]) -> Selection:
        """That part of the layers that are selected."""
        wanted = None if self.selected is None else {number % len(states) for number in self.selected}
        return tuple(part(layer) if wanted is None or place in wanted else None for place, layer in enumerate(states))

    def add_nodes(self, out: TargetOutput, tree: TokenTree, cache: SlabCache, path: Sequence[int]) -> None:
        """Takes what a tree pass gave at the nodes of an accepted path, before the cache keeps them."""
        for place, node in enumerate(path):
            if "hidden_states" in self.asked:
                self.hidden_states.append(self._wanted(out.hidden_states or (), _at(node)))
            if "attentions" in self.asked:
                self.attentions.append(self._weights(out.attentions or (), cache, path[: place + 1]))

    def _weights(self, attentions: States, cache: SlabCache, path: Sequence[int]) -> States:
        """Of the last node of a path, over the text as it is behind it: as many keys as plain decoding holds there."""
        found, length = [], cache.lengths[0]
        columns = torch.tensor([*range(length), *(length + node for node in path)])
        whole = self.padding + len(columns)
        for index, layer in enumerate(attentions):
            window = cache.window(index) or cache.chunk(index)
            weights = layer[:, :, path[-1] : path[-1] + 1].index_select(3, columns.to(layer.device))
            weights = pad(weights, (self.padding, 0))
            found.append(weights[..., whole - min(whole, window or whole) :])
        return tuple(found)

    def given(self, name: str) -> tuple[Selection, ...] | None:
        """What generate() returns under a name; None if it was not asked for."""
        return tuple(getattr(self, name)) if name in self.asked else None


def _at(node: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda layer: layer.narrow(-2, node, 1).clone()  # some models keep several streams before [B, T, H]
