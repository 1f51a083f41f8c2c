"""The noise with which plain sampling draws for a batch, for rows that are at different positions. Knows no trees.

`torch.multinomial(p, 1)` of a batch [B, V] is the arg-max of p / q, with q one exponential draw of [B, V] from the
random state. Plain decoding draws so once per position, for all rows at once. Here rows run ahead of others: what a
position draws is kept until the last row has passed it, and where that would be much the random state before it is.

```
position      0   1   2   3   4          row 0 is at 4, row 1 at 1, row 2 has ended at 2
drawn         ·   ■   ■   ■   ■          what stood at 0 is forgotten
```
"""

import torch

from medusa_spec.acceptance import Rule

MOST_BYTES = 1 << 28
"""Noise that is kept; of what goes beyond only the random states are."""


class SharedNoise:
    """Draws for several rows as plain sampling of the batch draws them, whatever the order in which rows ask.

    The random state moves as in plain decoding: once per position, up to the longest row's.

    Args:
        rows: B.
    """

    def __init__(self, rows: int) -> None:
        self._positions: list[int | None] = [0] * rows  # the next one of each row; None where it has ended
        self._states: dict[int, torch.Tensor] = {}
        self._noise: dict[int, torch.Tensor] = {}
        self._drawn = self._forgotten = 0

    def rule(self, row: int) -> Rule:
        """How a row's tokens are chosen; to be asked once per position, in order."""
        return Rule(name="exact_sampling", lossless=True, choose=lambda scores: self._choose(scores, row))

    def end(self, row: int) -> None:
        """Is told that a row draws no more."""
        self._positions[row] = None
        self._forget()

    def _choose(self, scores: torch.Tensor, row: int) -> int:
        position = self._positions[row]
        assert position is not None, "a row that has ended draws"
        chances = torch.softmax(scores, dim=-1)
        if not bool(torch.isfinite(chances.sum())):  # as torch's own draw, when processors leave nothing to draw from
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        noise = self._at(position, chances)[row]
        self._positions[row] = position + 1
        self._forget()
        return int(torch.argmax(chances[0] / noise))

    def _at(self, position: int, like: torch.Tensor) -> torch.Tensor:
        """[B, V] of a position."""
        while self._drawn <= position:
            self._states[self._drawn] = _state(like.device)
            self._keep(self._drawn, self._draw(like))
            self._drawn += 1
        if position not in self._noise:
            now = _state(like.device)
            _set_state(self._states[position], like.device)
            try:
                self._keep(position, self._draw(like))
            finally:
                _set_state(now, like.device)
        return self._noise[position]

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(len(self._positions), like.shape[-1]).exponential_(1)

    def _keep(self, position: int, noise: torch.Tensor) -> None:
        room = max(1, MOST_BYTES // (noise.numel() * noise.element_size()))
        while len(self._noise) >= room:  # the latest is the one that most rows are still far from
            del self._noise[max(self._noise)]
        self._noise[position] = noise

    def _forget(self) -> None:
        """What no row will ask for again."""
        behind = min((position for position in self._positions if position is not None), default=self._drawn)
        for position in range(self._forgotten, min(behind, self._drawn)):
            self._noise.pop(position, None)
            del self._states[position]
        self._forgotten = max(self._forgotten, min(behind, self._drawn))


def _state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
