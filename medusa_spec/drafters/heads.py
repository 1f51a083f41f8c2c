"""Drafting with trained heads, over a static template or a tree that grows. Knows ids, not how heads are trained."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from medusa_spec.adapters import adapter_state, merged_copy
from medusa_spec.drafters.asking import Ask, Drafting, alone, answered
from medusa_spec.drafters.autoregressive import TextDraft
from medusa_spec.drafters.base import Drafter, DraftSession, FixedDraft, ReadStates
from medusa_spec.drafters.choice import Choice, GrowthChoice, ProductChoice, TemplateChoice
from medusa_spec.drafters.levels import plan_of
from medusa_spec.errors import ConfigError
from medusa_spec.heads import (
    LEVELS,
    AutoregressiveHeads,
    DraftHeads,
    HeadsConfig,
    LevelHeads,
    MedusaHeads,
    StackedMedusaHeads,
)
from medusa_spec.heads.steps import DraftSteps
from medusa_spec.heads_note import note_of
from medusa_spec.prepared.draft_step import fast_step
from medusa_spec.prepared.packed_linear import fast_linear
from medusa_spec.tree import (
    Candidates,
    Growth,
    PathValues,
    Prices,
    TokenTree,
    TreeTemplate,
    Trust,
    best_tree,
    chain_template,
    expected_accepted,
)

LARGEST_TREE = 64
"""Most draft nodes of a tree whose size is chosen by what passes cost."""


class HeadsDrafter(Drafter):
    """Fills a template with the heads' best guesses, or lets a tree of them grow.

    Args:
        heads: Trained heads; a frozen copy of them in a form made for decoding is drafted with, made anew when they
            were trained, cast or moved since the last request, or an adapter of theirs was loaded, swapped or unloaded.
        template: The tree.
        values: Calibration counts, from which smaller trees are chosen when a limit asks for one; None cuts the
            template instead.
        growth: Lets trees grow by these rules instead of filling the template.
        follow_adapters: While an adapter of the heads is active that brought a calibration of its own, draft by that.
        dtype: Compute dtype, the target's.
        device: Device of h.

    Raises:
        ConfigError: If the template asks for more heads or guesses than there are.
    """

    name = "heads"

    def __init__(
        self,
        heads: DraftHeads,
        template: TreeTemplate,
        values: PathValues | None = None,
        *,
        growth: Growth | None = None,
        follow_adapters: bool = True,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.heads = heads
        self.reads = heads.taps if heads.attends else None
        self.follow_adapters = follow_adapters
        self._own = template, values, growth
        self._stack(dtype, device)

    def _stack(self, dtype: torch.dtype, device: torch.device) -> None:
        self._state = _state_of(self.heads)
        self._calibrate()
        self.stacked = decoding_form(self.heads, dtype=dtype, device=device)
        self.draft_ids = None if self.heads.draft_ids is None else self.heads.draft_ids.to(device)
        self.draft_tokens: list[int] | None = None if self.draft_ids is None else self.draft_ids.tolist()
        self._slots: dict[TreeTemplate, torch.Tensor] = {}

    def _calibrate(self) -> None:
        """Takes tree, values and growth of the heads, or of an adapter that is active and has its own."""
        template, values, growth = self._own
        config = note_of(self.heads) if self.follow_adapters else None
        if config is not None:
            template = config.tree or chain_template(self.heads.config.num_heads)
            values, growth = config.values, config.growth
        _check_template(template, self.heads.config)
        self.template, self.values = template, values
        self.growth = growth
        self._limited: dict[int, TreeTemplate] = {}
        self._expected: Sequence[float] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which stack anew: a packed kernel is of this process."""
        dtype, device = self.stacked.dtype, self.stacked.device
        return {**self.__dict__, "stacked": (dtype, device), "_slots": {}, "_state": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stack(*state["stacked"])

    def begin(self, prompt: Sequence[int]) -> DraftSession:
        """A session; only heads that attend keep a state in it, the others find all they need in h."""
        if _state_of(self.heads).key != self._state.key:
            self._stack(self.stacked.dtype, self.stacked.device)
        if self.heads.attends:
            return _AttendingSession(self)
        return _LevelsSession(self) if self.heads.sequential else _HeadsSession(self)

    def choice(self, limit: int | None, growth: Growth | None, trust: Trust | None = None) -> Choice | None:
        """What becomes of the guesses of sequential heads in one draft; None if nothing is to be drafted."""
        if limit == 0:
            return None
        if growth is not None:
            return self.growing(growth, limit, trust=trust)
        template = self.limited(limit)
        if not template.paths:
            return None
        return TemplateChoice(template, plan_of(template, self.stacked.device), self.draft_ids)

    def growing(
        self, growth: Growth, limit: int | None, candidates: Candidates | None = None, trust: Trust | None = None
    ) -> GrowthChoice:
        """A tree that grows, among candidates if there are some, as far as its chances are trusted."""
        return GrowthChoice(growth, self.heads.config.num_heads, limit, self.draft_tokens, candidates, trust)

    @property
    def level_share(self) -> float:
        """See `Drafter`; as it was where the heads were calibrated."""
        return 0.0 if self.growth is None else self.growth.level_seconds / self.growth.seconds(1)

    @property
    def hit(self) -> float | None:
        """See `Drafter`."""
        if self.values is not None and self.template.paths:
            return self.values.value((0,))
        return None if self.growth is None else self.growth.hit

    def expected(self) -> Sequence[float] | None:
        """See `Drafter`; by the calibration's counts, of trees that do not grow."""
        if self.growth is not None or self.values is None:
            return None
        if self._expected is None:
            self._expected = expected_accepted(self.values, LARGEST_TREE)
        return self._expected

    def limited(self, limit: int | None) -> TreeTemplate:
        """The template for at most `limit` draft nodes: the best of that size if it was calibrated."""
        if limit is None or (limit >= len(self.template.paths) and self.values is None):
            return self.template
        if limit not in self._limited:
            if self.values is not None:
                self._limited[limit] = best_tree(self.values, limit)
            else:
                shallow_first = sorted(self.template.paths, key=lambda path: (len(path), path))
                self._limited[limit] = TreeTemplate(paths=tuple(shallow_first[:limit]))
        return self._limited[limit]

    def ask(self, h: torch.Tensor, count: int) -> Ask:
        """For logits [1, count, draft vocabulary] of the first `count` heads that do not wait for each other, at h [H].

        The others are asked in a session.
        """
        self.follow(h)
        assert isinstance(self.stacked, StackedMedusaHeads), "the others draft level by level"
        return Ask(to=self.stacked.logits, settings=(count,), of=(h[None],))

    def fill(self, template: TreeTemplate, logits: torch.Tensor) -> torch.Tensor:
        """Tokens of the template's draft nodes, in layout order, from logits [K, draft vocabulary]: int64 [N - 1]."""
        if template not in self._slots:
            self._slots[template] = template.slots().to(logits.device)
        # Top-k in bfloat16 is slow on CPUs.
        table = logits.float().topk(template.width, dim=-1).indices.flatten()[self._slots[template]]
        return table if self.draft_ids is None else self.draft_ids[table]

    @torch.inference_mode()
    def guesses(self, h: torch.Tensor, template: TreeTemplate) -> torch.Tensor:
        """The same for h [H], where h is; with nothing read by the host."""
        ask = self.ask(h, template.depth)
        return self.fill(template, ask.to(*ask.settings, *ask.of)[0])

    def follow(self, h: torch.Tensor) -> None:
        """Stacks the heads anew if the target, and h with it, was cast or moved."""
        if h.dtype != self.stacked.dtype or h.device != self.stacked.device:
            self._stack(h.dtype, h.device)


DecodingForm = StackedMedusaHeads | LevelHeads | DraftSteps


def decoding_form(heads: DraftHeads, *, dtype: torch.dtype, device: torch.device) -> DecodingForm:
    """A frozen copy of heads made for decoding, adapters merged in, on the fastest linear layers that are here."""
    heads = merged_copy(heads, heads.projection, heads.embedding)
    if isinstance(heads, AutoregressiveHeads):
        return DraftSteps(heads, dtype=dtype, device=device, linear=fast_linear, step=fast_step)
    if heads.sequential:
        return LEVELS[heads.config.kind](heads, dtype=dtype, device=device, linear=fast_linear)
    assert isinstance(heads, MedusaHeads), "the only family whose heads do not wait for each other"
    return StackedMedusaHeads(heads, dtype=dtype, device=device, linear=fast_linear)


class _State(NamedTuple):
    """What changes whenever a weight does, or what adapters do to them.

    Attributes:
        key: Places in memory, how often each was written to, and adapters.
        weights: Keep those places from being given to others, of an adapter with the name of one that is gone.
    """

    key: tuple[Any, ...]
    weights: list[torch.Tensor]


def _state_of(heads: DraftHeads) -> _State:
    weights = [weight.detach() for weight in heads.parameters()]
    places = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in heads.parameters()]
    return _State((places, adapter_state(heads)), weights)


def _check_template(template: TreeTemplate, config: HeadsConfig) -> None:
    if template.depth > config.num_heads:
        raise ConfigError(
            f"tree must be at most {config.num_heads} deep, one level per head, got depth {template.depth}; "
            "leave out its longer paths or train more heads"
        )
    if template.width > config.num_draft_tokens:
        raise ConfigError(
            f"tree must use ranks below {config.num_draft_tokens}, the draft vocabulary's size, got rank "
            f"{template.width - 1}"
        )


class _PricedSession(DraftSession):
    """What all drafts of heads have in common: rules of growth, if there are some, at the prices of the moment, and how
    far the heads' chances hold on this text."""

    def __init__(self, drafter: HeadsDrafter) -> None:
        self.drafter, self.growth = drafter, drafter.growth
        self.trust = Trust()
        self.chosen: Choice | ProductChoice | None = None  # the last draft's, until it is known what came of it

    def price(self, prices: Prices) -> None:
        if self.growth is not None:
            self.growth = self.growth.priced(prices)

    def observe(self, tokens: Sequence[int]) -> None:
        if self.chosen is not None:
            self.chosen.learn(tokens)
            self.chosen = None


class _HeadsSession(_PricedSession):
    """All guesses at once from h: a template is filled, or a tree made of this step's chances."""

    def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
        return alone(self.drafting(root, h, limit))

    def propose(self, root: int, h: torch.Tensor | None, candidates: Candidates) -> bool:
        return alone(self.proposing(root, h, candidates))

    def drafting(self, root: int, h: torch.Tensor | None, limit: int | None) -> Drafting[TokenTree]:
        if h is None or limit == 0:
            return TokenTree.root_only(root)
        choice = yield from self.growing(h, limit)
        if choice is not None:
            return choice.tree(root)
        template = self.drafter.limited(limit)
        if not template.paths:
            return TokenTree.root_only(root)
        logits = yield self.drafter.ask(h, template.depth)
        return TokenTree(shape=template.shape, tokens=(root, *self.drafter.fill(template, logits[0]).tolist()))

    def proposing(self, root: int, h: torch.Tensor | None, candidates: Candidates) -> Drafting[bool]:
        return h is not None and (yield from self.growing(h, None, candidates)) is not None

    def growing(
        self, h: torch.Tensor, limit: int | None, candidates: Candidates | None = None
    ) -> Drafting[ProductChoice | None]:
        """Guesses among candidates, of which a tree can be made; None if the heads have no rules for it.

        All heads are asked before a tree is made, so those that did not pay for a place in the template are left out.
        """
        drafter, growth = self.drafter, self.growth
        if growth is None or not drafter.template.paths:
            return None
        choice = self.chosen = ProductChoice(growth, limit, drafter.draft_tokens, candidates, self.trust)
        choice.take((yield drafter.ask(h, drafter.template.depth))[0])
        return choice

    def fixed(self, h: torch.Tensor, limit: int | None) -> FixedDraft | None:
        drafter, template = self.drafter, self.drafter.limited(limit)
        if not template.paths:
            return None
        drafter.follow(h)
        key = (drafter.stacked, template)
        return FixedDraft(shape=template.shape, guess=lambda h: drafter.guesses(h, template), key=key)


class _SequentialSession(_PricedSession):
    """What drafts of heads that see the drafted tokens have in common."""

    def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
        return alone(self.drafting(root, h, limit))

    def propose(self, root: int, h: torch.Tensor | None, candidates: Candidates) -> bool:
        return alone(self.proposing(root, h, candidates))

    def drafting(self, root: int, h: torch.Tensor | None, limit: int | None) -> Drafting[TokenTree]:
        choice = self.chosen = self.drafter.choice(limit, self.growth, self.trust)
        self.levels = 0
        if choice is None or not (yield from self.guessing(root, h, choice)):
            return TokenTree.root_only(root)
        self.levels = choice.levels
        return choice.tree(root)

    def proposing(self, root: int, h: torch.Tensor | None, candidates: Candidates) -> Drafting[bool]:
        self.levels = 0
        if self.growth is None:
            return False
        choice = self.chosen = self.drafter.growing(self.growth, None, candidates, self.trust)
        guessed = yield from self.guessing(root, h, choice)
        self.levels = choice.levels
        return guessed

    def guessing(self, root: int, h: torch.Tensor | None, choice: Choice) -> Drafting[bool]:
        """Gives guesses to `choice`, level by level; false if there is nothing to guess from."""
        raise NotImplementedError


class _LevelsSession(_SequentialSession):
    """Level by level from h; a state of its own it has not."""

    def guessing(self, root: int, h: torch.Tensor | None, choice: Choice) -> Drafting[bool]:
        if h is None:
            return False
        self.drafter.follow(h)
        heads = self.drafter.stacked
        assert isinstance(heads, LevelHeads), "sequential heads that do not attend"
        state = yield Ask(to=heads.start, of=(h[None], torch.tensor([root], device=h.device)))
        for depth in range(heads.config.num_heads):
            logits = yield Ask(to=heads.logits, settings=(depth,), of=(state,))
            chosen = choice.take(depth, logits)
            if chosen is None:
                break
            state = yield Ask(to=heads.descend, settings=(depth + 1,), of=(state[chosen.rows], chosen.tokens))
        return True


class _AttendingSession(_SequentialSession):
    """A session that begins once the dtype and the device of the target's states are seen."""

    def __init__(self, drafter: HeadsDrafter) -> None:
        super().__init__(drafter)
        self.inner: TextDraft | None = None

    @property
    def bytes_per_token(self) -> int:
        return 0 if self.inner is None else self.inner.bytes_per_token

    def read(self, ids: Sequence[int], states: ReadStates) -> None:
        if self.inner is None:
            self.drafter.follow(states.h)
            assert isinstance(self.drafter.stacked, DraftSteps), "heads that attend"
            self.inner = TextDraft(self.drafter.stacked)
        self.inner.read(ids, states)

    def forget(self) -> None:
        self.inner = None

    def guessing(self, root: int, h: torch.Tensor | None, choice: Choice) -> Drafting[bool]:
        # Each text has keys and values of its own, so nothing is asked together.
        return answered(self.inner is not None and self.inner.guess(root, choice))
