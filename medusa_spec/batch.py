"""Many texts decoded plainly, side by side; where one ends the next begins. Knows no drafts and no generate()."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone, TargetOutput
from medusa_spec.cache import SlabCache
from medusa_spec.prefill import CHAIN
from medusa_spec.prepared.choice import most_likely
from medusa_spec.tree import chain

Stop = Callable[[list[int]], bool]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: By which logits are divided; 0 takes the likeliest token.
        top_k: Draw from the k likeliest; None for all.
        top_p: Draw from the fewest of those that hold this share.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What to keep of the target's states.

    Attributes:
        taps: Layers whose inputs are kept beside h.
        dtype: As which they are kept, on the CPU.
    """

    taps: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    def of(self, out: TargetOutput) -> list[torch.Tensor]:
        """[T, L + 1, H] of each row of a pass."""
        columns = out.h[:, :, None] if out.layers is None else torch.cat([out.layers, out.h[:, :, None]], dim=2)
        return list(columns.to("cpu", self.dtype).unbind(0))


@dataclass(kw_only=True, eq=False)
class Text:
    """A prompt, and what was decoded behind it.

    Attributes:
        key: Its name for whoever asked.
        prompt: Its ids, one or more.
        new_tokens: Most tokens decoded.
        seed: Of its draws: they do not depend on the texts beside it.
        tokens: Decoded so far, the token that ended it included.
        ended: Whether it ended with an EOS token.
        stopped: Whether `stop` ended it.
        states: What the target computed at its tokens, if that was asked for, piece by piece: [T, L + 1, H], the tapped
            layers' inputs and then h; together those of all tokens but the last, which is not read.
    """

    key: Hashable
    prompt: list[int]
    new_tokens: int
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    stopped: bool = False
    states: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.prompt or self.new_tokens < 1:
            raise ValueError(
                f"prompt must hold a token and new_tokens be 1 or more, got {len(self.prompt)} and {self.new_tokens}"
            )


@torch.inference_mode()
def decode_batch(
    backbone: Backbone,
    texts: "deque[Text] | Iterable[Text]",
    *,
    batch: int,
    eos_ids: frozenset[int],
    sampling: Sampling | None = None,
    stop: Stop | None = None,
    keep: Keep | None = None,
) -> Iterator[Text]:
    """Decodes texts with up to `batch` of them in a pass, one token each.

    ```
    pass     1 2 3 4 5 6 7 8 9
    row 0    A A A D D D D D ·       a row whose text has ended takes the next one, so that passes stay full
    row 1    B B B B B B B E E
    row 2    C C C C C · · · ·
    ```

    Where tree passes run in one call (see `prepare`), a text has the bits that it has alone, whatever stands beside it.
    There a row keeps the tokens with which the next text in it begins as the last one did (a system prompt, say), and
    reads the others alone.

    Args:
        backbone: The target.
        texts: What is to be decoded; a deque may be added to between two results.
        batch: Rows of a pass.
        eos_ids: Ids that end a text.
        sampling: How tokens are drawn; None takes the likeliest.
        stop: Ends a text by its tokens so far.
        keep: What to keep of the target's states; None keeps none.

    Yields:
        The texts, as they end.
    """
    waiting = texts if isinstance(texts, deque) else deque(texts)
    sampling, running, held = sampling or Sampling(), list[Text | None](), list[_Held]()
    cache, chooser = None, _Chooser(sampling)
    while waiting or any(running):
        if cache is None:
            rows = min(batch, len(waiting))
            room = max(len(text.prompt) + text.new_tokens for text in waiting)
            cache, running, held = _empty_cache(backbone, rows, room), [None] * rows, [_Held()] * rows
        for row, text in enumerate(running):
            while text is None and waiting:
                text = waiting.popleft()
                logits = _read(backbone, cache, row, text, keep, held[row])
                held[row] = _Held(prompt=tuple(text.prompt), states=tuple(text.states))
                _push(text, chooser.choose(logits, [text])[0], eos_ids, stop)
                if text.ended or text.stopped or len(text.tokens) == text.new_tokens:
                    yield text
                    text = None
            running[row] = text
        if not any(running):
            cache = None
            continue
        for row, token in _step(backbone, cache, running, chooser, keep):
            text = running[row]
            assert text is not None
            _push(text, token, eos_ids, stop)
            if text.ended or text.stopped or len(text.tokens) == text.new_tokens:
                running[row] = None
                yield text


def _push(text: Text, token: int, eos_ids: frozenset[int], stop: Stop | None) -> None:
    text.tokens.append(token)
    text.ended = token in eos_ids
    text.stopped = not text.ended and stop is not None and stop(text.tokens)


def _empty_cache(backbone: Backbone, rows: int, room: int) -> SlabCache:
    """A sealed cache of as many empty rows; a token that is read and forgotten tells the shapes."""
    cache = backbone.new_cache(rows)
    backbone.read(torch.zeros(rows, 1, dtype=torch.int64, device=backbone.device), cache, last_only=True)
    cache.seal(room)
    for row in range(rows):
        cache.empty(row)
    return cache


@dataclass(frozen=True, kw_only=True, eq=False)
class _Held:
    """The prompt that a row has read last, and what was kept of the target's states at it."""

    prompt: tuple[int, ...] = ()
    states: tuple[torch.Tensor, ...] = ()

    def shared(self, prompt: list[int]) -> int:
        """Tokens with which another prompt begins alike; its last one is read for its logits."""
        most = min(len(self.prompt), len(prompt) - 1)
        return next((place for place in range(most) if self.prompt[place] != prompt[place]), most)


def _read(backbone: Backbone, cache: SlabCache, row: int, text: Text, keep: Keep | None, held: _Held) -> torch.Tensor:
    """Reads a prompt into a row, less what it begins with alike as the one before; logits [1, V] behind it."""
    shared = held.shared(text.prompt) if backbone.reads_chains else 0
    known = cache.cut(row, shared) if shared else 0
    if not known:
        cache.empty(row)
    if keep is not None and known:
        text.states.append(torch.cat(held.states)[:known].clone())
    unread = text.prompt[known:]
    cache.make_room([len(unread) * (other == row) for other in range(len(cache.lengths))])
    ids = torch.tensor([unread], device=backbone.device)
    with cache.only(row) as own:
        for part in ids.split(CHAIN, dim=1):
            nodes = part.shape[1]
            own.make_room(nodes)
            tree_pass = TreePass(shape=chain(nodes - 1), cache=own, device=backbone.device)
            if keep is None:
                out = backbone.verify(part, tree_pass, last_only=True)
            else:
                out = backbone.verify(part, tree_pass, last_only=True, all_states=True, taps=keep.taps)
                text.states += keep.of(out)
            own.keep(0, range(nodes))
    return out.logits[0]


def _step(
    backbone: Backbone, cache: SlabCache, running: list[Text | None], chooser: "_Chooser", keep: Keep | None
) -> list[tuple[int, int]]:
    """One pass: (row, next token) of every running text; rows without one take no part."""
    texts = {row: text for row, text in enumerate(running) if text is not None}
    cache.make_room([int(row in texts) for row in range(len(running))])
    ids = torch.tensor([[text.tokens[-1] for text in texts.values()]], device=backbone.device)
    shape = tuple(None if text is None else chain(0) for text in running)
    tree_pass = TreePass(shape=shape, cache=cache, device=backbone.device)
    out = backbone.verify(ids, tree_pass, taps=keep.taps if keep else ())
    states = keep.of(out)[0] if keep else torch.empty(0)
    for place, (row, text) in enumerate(texts.items()):
        cache.keep(row, (0,))
        if keep:
            text.states.append(states[place, None])
    return list(zip(texts, chooser.choose(out.logits[0], list(texts.values())), strict=True))


class _Chooser:
    """Chooses the next token of each of several texts, with a generator for each."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generators: dict[int, torch.Generator] = {}

    def choose(self, logits: torch.Tensor, texts: list[Text]) -> list[int]:
        """From logits [B, V]."""
        if self.sampling.temperature == 0:
            return most_likely(logits.contiguous())
        scores, ids = logits.float() / self.sampling.temperature, None
        if self.sampling.top_k is not None or self.sampling.top_p < 1:
            scores, ids = scores.topk(min(self.sampling.top_k or scores.shape[1], scores.shape[1]))
        shares = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
        if self.sampling.top_p < 1:  # the first one whose sum reaches top_p is the last that counts
            end = (shares < self.sampling.top_p).sum(-1, keepdim=True).clamp_max(shares.shape[1] - 1)
            total = shares.gather(1, end)
        else:
            total = shares[:, -1:]
        drawn = torch.stack([self._draw(text) for text in texts])[:, None].to(shares.device) * total
        places = torch.searchsorted(shares, drawn, right=True).clamp_max(shares.shape[1] - 1)
        return (places if ids is None else ids.gather(1, places))[:, 0].tolist()

    def _draw(self, text: Text) -> torch.Tensor:
        """A number in 0..1 that follows from the text's seed and the position alone."""
        if id(text) not in self._generators or not text.tokens:
            self._generators[id(text)] = torch.Generator().manual_seed(text.seed)
        return torch.rand((), generator=self._generators[id(text)], dtype=torch.float64)
