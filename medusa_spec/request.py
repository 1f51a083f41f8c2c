"""What is decoded together: the rows of one call of generate(), their cache, and who decides. Knows no passes."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from transformers import LogitsProcessorList

from medusa_spec.acceptance import GREEDY, Rule
from medusa_spec.cache import SlabCache
from medusa_spec.controller import Controller, Plan
from medusa_spec.drafters import DraftSession
from medusa_spec.extras import Extras
from medusa_spec.stats import Decision
from medusa_spec.stopping import Sequence

if TYPE_CHECKING:
    from medusa_spec.static_decoding import StaticSteps


@dataclass(kw_only=True, eq=False)
class Row:
    """One text.

    Attributes:
        sequence: Prompt, emitted tokens and stopping criteria.
        unread: What the target still has to read [1, T]: the prompt without padding and without what is cached.
        session: The drafter's state.
        rule: How tokens are chosen.
        processors: Applied to the logits before the choice; empty for none.
        emit: Called with every emitted token, for streaming.
        keep_scores: Collect processed scores.
        keep_logits: Collect raw logits.
        extras: Collects what else is asked of the passes; None for nothing. In a batch there is none.
        ended: Called once, when it has.
        done: Whether it has ended.
        root: The token chosen last, which is the root of the next tree.
        h: The hidden state from which it was chosen [H].
    """

    sequence: Sequence
    unread: torch.Tensor
    session: DraftSession
    rule: Rule = GREEDY
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    emit: Callable[[int], None] | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    extras: Extras | None = None
    ended: Callable[[], None] | None = None
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    done: bool = False
    root: int = -1
    h: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        if self.keep_scores:
            self.sequence.scores = self.scores  # stopping criteria are shown them, as in plain decoding

    @property
    def batched_choice(self) -> bool:
        """Whether all nodes can be chosen from at once: nothing depends on the path."""
        return self.rule.batched and not (self.processors or self.keep_scores or self.keep_logits or self.extras)

    def push(self, token: int) -> bool:
        """Emits a token; true if it is the last."""
        self.done = self.sequence.push(token)
        if self.emit is not None:
            self.emit(token)
        if self.done and self.ended is not None:
            self.ended()
        return self.done


@dataclass(kw_only=True, eq=False)
class Request:
    """Rows that are decoded side by side.

    Attributes:
        rows: The texts; row i of the cache is that of text i.
        cache: Holds what was read before; empty for fresh prompts.
        reads: Layers of the target that the drafter reads beside h at every token; see `Drafter.reads`.
        prefill_chunk: Tokens of a prompt read at once; None reads all.
        draft_nodes: Most draft nodes per pass and row, 0 for plain decoding, None for the drafter's choice.
        controllers: From the number of rows that are not done to who decides pass by pass within that; None does as
            `draft_nodes` says.
        steps: Decodes in steps of fixed shape where that serves; None for the ordinary loop alone.
    """

    rows: list[Row]
    cache: SlabCache
    reads: tuple[int, ...] | None = None
    prefill_chunk: int | None = None
    draft_nodes: int | None = None
    controllers: Callable[[int], Controller | None] | None = None
    steps: "StaticSteps | None" = None
    _deciding: list[Controller] = field(default_factory=list, init=False)
    _now: Controller | None = field(default=None, init=False)  # who planned the step that is under way
    _prefix: int = field(default=0, init=False)  # mean of the rows that the plan was made for

    @property
    def running(self) -> dict[int, Row]:
        """The rows that have not ended, by their place in the cache."""
        return {place: row for place, row in enumerate(self.rows) if not row.done}

    @property
    def done(self) -> bool:
        """Whether all rows have ended."""
        return all(row.done for row in self.rows)

    @property
    def extras(self) -> Extras | None:
        """Of the only row."""
        return self.rows[0].extras

    @property
    def collect(self) -> tuple[str, ...]:
        """What passes give beside logits and h."""
        return () if self.extras is None else self.extras.asked

    @property
    def holds_whole_text(self) -> bool:
        """Whether the only row's sequence is all that the target has read: no padding, nothing that only a user's
        cache holds."""
        return len(self.rows) == 1 and self.rows[0].sequence.length == self.cache.get_seq_length() + 1

    @property
    def decisions(self) -> list[Decision]:
        """Changes of mind so far."""
        return [decision for controller in self._deciding for decision in controller.decisions]

    def plan(self) -> Plan:
        """What the next step does, in every row."""
        running = self.running
        controller = self._now = None if self.controllers is None else self.controllers(len(running))
        if controller is None:
            return Plan(limit=self.draft_nodes)
        if controller not in self._deciding:
            self._deciding.append(controller)
        self._prefix = sum(self.cache.lengths[place] for place in running) // len(running)
        plan = controller.plan(self._prefix, max(row.sequence.new_tokens for row in running.values()))
        if plan.prices is not None:
            for row in running.values():
                row.session.price(plan.prices)
        return plan

    def learn(self, places: Collection[int], *, nodes: int, accepted: int, **seconds: float) -> None:
        """What became of the step that was planned.

        Args:
            places: The rows that took part.
            nodes: N of all of them.
            accepted: Draft tokens accepted in all of them.
            **seconds: `passed`, `step` and `draft`; see `Controller.observe`.
        """
        if self._now is not None:
            self._now.observe(
                size=max(1, round(nodes / len(places))),
                prefix=self._prefix,
                accepted=accepted / len(places),
                levels=max(self.rows[place].session.levels for place in places),
                **seconds,
            )
