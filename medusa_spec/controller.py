"""Whether the next pass is worth a draft, and of what size. Knows times and gains; no model, no tokens.

All gains are counted in tokens of plain decoding: a drafted step that accepts a and takes as long as c plain steps nets
1 + a - c. The controller keeps an account of what drafting has netted lately:

```
account   stake ┤ ╭──╮    ╭─╮            drafting while it is above zero; it cannot rise above the stake, so that a
                │╭╯  ╰╮  ╭╯ ╰╮           text that turns unpredictable is left after the stake is lost, no more
              0 ┼┴────┴──┴───┴┐    ╭─
                └─────────────┴────┴──   then plain steps until the loss is PRICE of them, and a small account
```

The stake is RISK and a share of what drafting has earned so far: who has earned may lose a little of it by chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from medusa_spec.cost import best_size, interpolate
from medusa_spec.pass_times import OUTLIER, PassTimes
from medusa_spec.slope import Slope
from medusa_spec.stats import Decision
from medusa_spec.tree import Prices

RISK = 2.0
"""Tokens that drafting may lose before it is given up."""

REINVESTED, MOST_REINVESTED = 0.25, 6.0
"""Share of what it has earned that it may lose beside that, and the most of it."""

FORGOTTEN = 1 / 512
"""Share of what was earned that is forgotten at each step."""

PROBE = 1.0
"""Tokens that a probe may lose."""

PRICE = 0.02
"""Share of the time that probes may cost in the long run: after a loss of x tokens x / PRICE plain steps follow."""

LONGEST_CHAIN = 8

LEAST_WAIT = 8

LONGEST_LEGACY = 32
"""Plain steps with which a request begins at most, after one whose text could not be guessed: this one is another."""

UNLIKELY = 128
"""Plain steps with which it begins where passes over several tokens are so dear that drafts could hardly pay."""

RATE = 1 / 16
"""How fast means follow what is seen."""

WARM_UP = 2
"""Drafted steps after a change whose time beside the pass is not counted: they read what was not read before."""

AGAIN = 16
"""Steps after which prices and sizes are reckoned anew."""


@dataclass(kw_only=True)
class Experience:
    """What was learnt from the requests so far, which the next one begins with.

    Attributes:
        account: Tokens that drafting may still lose.
        earned: Tokens that it has brought, all in all, what is long ago counting less.
        wait: Plain steps before drafting is tried (again).
        gain: Mean of accepted draft tokens per drafted step; None before the first.
        ratio: Accepted tokens over those that the calibration expected, for trees of fixed shape.
        plain: Time of a plain step; this and the next two are in passes over one token, T(1) at that moment, so that
            neither the prefix nor the speed of the machine is in them.
        drafted: Time of a drafted step; None before the first.
        beside: What of that is beside the pass.
        level: How that grows with the levels of the draft.
    """

    account: float = RISK
    earned: float = 0.0
    wait: int = 0
    gain: float | None = None
    ratio: float = 1.0
    plain: float = 1.0
    drafted: float | None = None
    beside: float = 0.0
    level: Slope = field(default_factory=Slope)

    @property
    def stake(self) -> float:
        """Most tokens that the account can hold."""
        return RISK + min(REINVESTED * max(0.0, self.earned), MOST_REINVESTED)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the next step does.

    Attributes:
        limit: Most draft nodes; 0 is a plain step, None leaves it to the drafter.
        prices: What passes and tokens cost, if they are to be told anew.
        free: Most draft nodes that cost no time to draft, where the step is plain otherwise; see
            `DraftSession.draft_free`.
    """

    limit: int | None
    prices: Prices | None = None
    free: int | None = 0


@dataclass(kw_only=True, eq=False)
class Controller:
    """Decides for one request, step by step.

    Args:
        times: T(N) on this machine.
        known: From earlier requests; it goes on learning.
        limit: Most draft nodes that were asked for; None for no bound.
        expected: Expected accepted tokens of the drafter's best tree of 0, 1, 2, … nodes, by its calibration; None
            where it sizes its trees itself.
        level_share: Time of a level of the draft, as long as it was not seen; see `Drafter.level_share`.
        hit: Chance that a first guess is right, as the drafter's calibration has it; None where it has none.

    Attributes:
        decisions: Changes of mind, the first step's among them.
    """

    times: PassTimes
    known: Experience
    limit: int | None = None
    expected: Sequence[float] | None = None
    level_share: float = 0.0
    hit: float | None = None
    decisions: list[Decision] = field(default_factory=list)
    _spell: int = 0
    _netted: float = 0.0
    _size: int | None = None

    def __post_init__(self) -> None:
        if self.promising:
            self.known.wait = min(self.known.wait, LONGEST_LEGACY)
        elif self.known.drafted is None:
            self.known.wait, self.known.account = UNLIKELY, PROBE
        else:
            self.known.wait = min(self.known.wait, UNLIKELY)

    @property
    def promising(self) -> bool:
        """Whether a chain of some length would pay on a text that is guessed as well as the calibration's, by T(N)
        alone: where many rows make a pass a matter of arithmetic, none does, and a try would only cost."""
        if not self.hit:
            return True
        table, gain, chance = self.times.table(0), 0.0, 1.0
        unit = self.times.seconds(1, 0)
        for length in range(1, LONGEST_CHAIN + 1):
            chance *= self.hit
            gain += chance
            if gain > interpolate(table, length + 1) / unit - 1.0 + length * self.level_share:
                return True
        return False

    def plan(self, prefix: int, token: int) -> Plan:
        """What to do behind `prefix` tokens, `token` of them new."""
        known, drafting = self.known, self.known.wait <= 0
        if not self.decisions or self.decisions[-1].drafting != drafting:
            gain = 0.0 if known.gain is None else known.gain
            self.decisions.append(Decision(token=token, drafting=drafting, gain=gain, needed=self.needed))
            self._spell, self._netted = 0, 0.0
        prices = None if self._spell % AGAIN else self.prices(prefix)
        if not drafting:
            return Plan(limit=0, prices=prices, free=self.limit)
        if prices is not None:
            self._size = self._best_size(prefix)
        return Plan(limit=self._size, prices=prices)

    @property
    def needed(self) -> float:
        """Accepted tokens at which a drafted step is as good as plain ones."""
        return 0.0 if self.known.drafted is None else self.known.drafted / self.known.plain - 1.0

    def prices(self, prefix: int) -> Prices:
        """What nodes and levels cost now: a token is worth the time that the better way takes for one."""
        table, known = self.times.table(prefix), self.known
        token, unit = known.plain, self.times.seconds(1, prefix)
        if known.drafted is not None and known.gain is not None:
            token = min(token, known.drafted / (1.0 + known.gain))
        level = self.level_share if known.level.value is None else max(0.0, known.level.value)
        return Prices(token_seconds=token * unit, level_seconds=level * unit, pass_seconds=tuple(table.items()))

    def _best_size(self, prefix: int) -> int | None:
        if self.expected is None:
            return self.limit
        most = len(self.expected) if self.limit is None else self.limit + 1
        gains = [self.known.ratio * gain for gain in self.expected[:most]]
        size = best_size(gains, self.times.table(prefix), self.known.beside * self.times.seconds(1, prefix))
        return max(1, size)  # whether to draft at all is the account's affair

    def observe(
        self,
        *,
        size: int,
        prefix: int,
        accepted: float,
        passed: float,
        step: float,
        draft: float = 0.0,
        levels: int = 0,
    ) -> None:
        """Is told what became of the step that was planned.

        Args:
            size: N of its pass; of several rows their mean, as the next two.
            prefix: Tokens before it.
            accepted: Draft tokens accepted.
            passed: Seconds of the pass.
            step: Seconds of the whole step.
            draft: Seconds of the draft.
            levels: Levels of it; see `DraftSession.levels`.
        """
        known = self.known
        self.times.observe(size, prefix, passed)
        unit = self.times.seconds(1, prefix)
        self._spell += 1
        if known.wait > 0:
            known.wait -= 1
            if size == 1:
                known.plain = _mean(known.plain, min(step / unit, OUTLIER * known.plain))
            return
        cost = passed / unit + known.beside
        if self._spell > WARM_UP:
            cost = min(step / unit, OUTLIER * (known.drafted or step / unit))
            known.beside = _mean(None if known.drafted is None else known.beside, max(0.0, step - passed) / unit)
            known.drafted = _mean(known.drafted, cost)
            if levels:
                known.level.add(levels, min(draft / unit, OUTLIER * known.beside))
        net = 1.0 + accepted - cost / known.plain
        known.gain = _mean(known.gain, accepted)
        if self.expected is not None and size > 1 and self.expected[min(size, len(self.expected)) - 1]:
            known.ratio = _mean(known.ratio, accepted / self.expected[min(size, len(self.expected)) - 1])
        self._netted += net
        known.earned += net - FORGOTTEN * known.earned
        known.account = min(known.account + net, known.stake)
        if known.account < 0.0:
            known.wait = max(LEAST_WAIT, round(-self._netted / PRICE))
            known.account = known.stake if self._netted > 0.0 else PROBE


def _mean(mean: float | None, value: float) -> float:
    """A running mean that begins with its first value."""
    return value if mean is None else mean + RATE * (value - mean)
