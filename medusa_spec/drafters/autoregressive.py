"""Drafting with heads that attend to the text: what they have read of it, and a draft behind that. Knows no trees."""

from collections.abc import Sequence

import torch

from medusa_spec.drafters.base import ReadStates
from medusa_spec.drafters.choice import Choice, Chosen
from medusa_spec.drafters.memory import TextMemory, TextView, draft_mask, text_mask
from medusa_spec.heads.steps import DraftSteps

READ_AT_ONCE = 224
"""Most rows of the text that the heads' layer reads in one pass: a multiple of those that a kernel takes at a time."""


class TextDraft:
    """The heads' layer has read the text of one request, up to what it was shown.

    Args:
        steps: Decoding form of the heads.
    """

    def __init__(self, steps: DraftSteps) -> None:
        self.steps = steps
        self.text: list[int] = []
        self.shown: list[ReadStates] = []
        self.memories = [TextMemory() for _ in range(steps.num_sets)]
        self.unread: list[list[torch.Tensor]] = [[] for _ in range(steps.num_sets)]

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values that the heads' layers keep."""
        return sum(memory.bytes_per_token for memory in self.memories)

    def read(self, ids: Sequence[int], states: ReadStates) -> None:
        """See `DraftSession`: the features of these tokens wait for the tokens after them."""
        self.text += ids
        self.shown.append(states)  # features are made of them when a draft needs them, of all at once

    @torch.inference_mode()
    def guess(self, root: int, choice: Choice) -> bool:
        """Gives guesses from the root on, the token after all that was read; false if nothing was."""
        if not self.text:
            return False
        self._begin_shown()
        feature = self._read_text(0, root)[-1:]
        seen: list[tuple[int, ...]] = [()]
        for depth in range(self.steps.config.num_heads):
            chosen = choice.take(depth, self.steps.logits(depth, feature))
            if chosen is None:
                break
            feature = feature[chosen.rows]
            if self.steps.num_sets > 1:
                self._read_text(depth + 1, root)
            feature, seen = self._guess_below(depth + 1, feature, chosen, seen)
        for memory in self.memories:
            memory.drop_draft()
        return True

    def _begin_shown(self) -> None:
        if not self.shown:
            return
        layers = [states.layers for states in self.shown if states.layers is not None]
        h = torch.cat([states.h for states in self.shown])
        self.unread[0].append(self.steps.begin(h, torch.cat(layers) if layers else None))
        self.shown = []

    def _guess_below(
        self, depth: int, feature: torch.Tensor, chosen: Chosen, seen: list[tuple[int, ...]]
    ) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        """Runs a step over nodes of a depth; their features, and the slots that their children will see."""
        memory = self.memories[depth % len(self.memories)]
        own = len(self.memories) > 1
        before = [() if own else seen[row] for row in chosen.rows]
        mask = draft_mask(memory.length, memory.end, before, feature.device)
        view = TextView(memory, [len(self.text) - 1 + depth] * len(before), mask)
        slots = range(memory.end, memory.end + len(before))
        feature = self.steps.step(depth, feature, chosen.tokens, view)
        return feature, [(*above, slot) for above, slot in zip(before, slots, strict=True)]

    def _read_text(self, k: int, root: int) -> torch.Tensor:
        """Lets step k read what it has not: rows whose next k + 1 tokens are known. Its features of them [T, H]."""
        memory, waiting = self.memories[k], self.unread[k]
        tokens, features = [*self.text, root], torch.cat(waiting)
        rows = max(0, len(self.text) - k - memory.length)  # a text may be shorter than k
        self.unread[k] = [features[rows:]] if rows < len(features) else []
        found = []
        for part in features[:rows].split(READ_AT_ONCE) if rows else ():
            start, count = memory.length, len(part)
            after = torch.tensor(tokens[start + 1 + k : start + 1 + k + count], device=part.device)
            mask = text_mask(start, count, k, part.device)
            view = TextView(memory, range(start + k, start + k + count), mask)
            found.append(self.steps.step(k, part, after, view))
            memory.keep_all()
        read = torch.cat(found) if found else features[:0]
        if k + 1 < len(self.memories):
            self.unread[k + 1].append(read)
        return read
