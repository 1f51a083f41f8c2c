"""The target as a writer: texts go in, what it says behind them comes out. Knows no records and no files."""

import hashlib
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from medusa_spec.batch import Keep, Sampling, Text, decode_batch
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.loops import WINDOW, loops
from medusa_spec.finetune.records import Message
from medusa_spec.finetune.target import Target
from medusa_spec.prepare import Prepared, prepare


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is to be gone on with.

    Attributes:
        key: Its name for whoever asked.
        text: As the target reads it, with special tokens.
        seed: Anything that names its draws.
    """

    key: Hashable
    text: str
    seed: Hashable = 0


@dataclass(frozen=True, kw_only=True)
class Written:
    """What the target wrote.

    Attributes:
        key: The prompt's.
        text: Without the token that ended it.
        tokens: How many it took, that one included.
        finished: Whether it ended by itself.
        loops: Whether it was stopped since it went round in circles.
        read: Ids that the target has read, the prompt's and its own but the last one; empty unless states are kept.
        states: What it computed there, bfloat16 [T, L + 1, H], tapped layers and then h; None unless kept.
    """

    key: Hashable
    text: str
    tokens: int
    finished: bool
    loops: bool
    read: tuple[int, ...] = ()
    states: torch.Tensor | None = None


class Writer:
    """Writes with the target of a run, which is made fast for it as long as the context lasts.

    Args:
        config: The run: sizes and seed.
        target: Its target.
        keep: What to keep of its states; None keeps none.
    """

    def __init__(self, config: FinetuneConfig, target: Target, keep: Keep | None = None) -> None:
        self.config, self.target, self.keep = config, target, keep
        self.tokens = 0
        self._prepared: Prepared | None = None

    def __enter__(self) -> "Writer":
        backbone = self.target.backbone
        self._prepared = prepare(backbone.model, backbone.lm_head)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._prepared is not None
        self._prepared.undo()

    def write(
        self, prompts: "deque[Prompt] | Iterable[Prompt]", new_tokens: int, sampling: Sampling
    ) -> Iterator[Written]:
        """Texts as they end; a deque may be added to between two of them. Prompts that fill `max_length` are left out.

        Args:
            prompts: What is gone on with.
            new_tokens: Most tokens of each.
            sampling: How they are drawn.
        """
        waiting = prompts if isinstance(prompts, deque) else deque(prompts)
        texts: deque[Text] = deque()
        while waiting or texts:
            self._move(waiting, texts, new_tokens)
            decoded = decode_batch(
                self.target.backbone,
                texts,
                batch=self.config.distil_batch,
                eos_ids=self.target.eos_ids,
                sampling=sampling,
                stop=_goes_round,
                keep=self.keep,
            )
            for text in decoded:
                self.tokens += len(text.tokens)
                yield self._written(text)
                self._move(waiting, texts, new_tokens)

    def chat(self, messages: Sequence[Message], **given: Any) -> str:
        """A conversation as the target reads it before it answers."""
        return str(
            self.target.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **given
            )
        )

    def _move(self, waiting: "deque[Prompt]", texts: "deque[Text]", new_tokens: int) -> None:
        longest = min(self.config.max_length, self.target.backbone.max_length or self.config.max_length)
        while waiting:
            prompt = waiting.popleft()
            ids = list(self.target.tokenizer(prompt.text, add_special_tokens=False)["input_ids"])
            room = longest - len(ids)
            if ids and room > 0:
                seed = self.seed(prompt.seed)
                texts.append(Text(key=prompt.key, prompt=ids, new_tokens=min(new_tokens, room), seed=seed))

    def seed(self, name: Hashable) -> int:
        """A seed that follows from the run's and a name, whatever is written beside it."""
        return int.from_bytes(hashlib.sha256(repr((self.config.seed, name)).encode()).digest()[:7], "big")

    def _written(self, text: Text) -> Written:
        tokens = text.tokens[:-1] if text.ended else text.tokens
        return Written(
            key=text.key,
            text=str(self.target.tokenizer.decode(tokens)),
            tokens=len(text.tokens),
            finished=text.ended,
            loops=text.stopped,
            read=(*text.prompt, *text.tokens[:-1]) if text.states else (),
            states=torch.cat(text.states) if text.states else None,
        )


def _goes_round(tokens: list[int]) -> bool:
    """Looked at now and then: what loops goes on doing so. Short answers may repeat themselves."""
    return len(tokens) >= WINDOW and len(tokens) % (WINDOW // 4) == 0 and loops(tokens)
