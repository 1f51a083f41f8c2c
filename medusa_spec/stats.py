"""What a decoding did: mu, tau, acceptance by depth, time by phase. Knows numbers only."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from medusa_spec.tree import TreeShape

PHASES = ("draft", "lay_out", "verify", "accept", "keep", "rest")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change of mind.

    Attributes:
        token: New tokens at that moment.
        drafting: Whether drafts are made from there on.
        gain: Accepted draft tokens per drafted step, lately.
        needed: What a drafted step must accept to be worth its time.
    """

    token: int
    drafting: bool
    gain: float
    needed: float

    def __str__(self) -> str:
        word = "drafting" if self.drafting else "plain decoding"
        return f"from token {self.token}: {word} (a draft gains {self.gain:.2f} tokens and costs {self.needed:.2f})"


@dataclass(kw_only=True)
class DecodingStats:
    """Counters of one decoding, or of several merged.

    Attributes:
        rule: The acceptance rule, and whether it is lossless; "several" where decodings with different ones are merged.
        new_tokens: Tokens emitted, after every cut.
        requests: Texts decoded, every row of a batch being one; each one's first token comes from its prefill.
        passes: Target passes after the prefill; a pass over several rows counts once for each, so that mu and tau are
            those of a row.
        drafted_passes: Those of them that had at least one draft node.
        accepted: Accepted draft tokens, counted before any cut at EOS or length. (Sampling and logits processors
            stop at the cut, since going on would draw from the user's random state: there it is counted up to it.)
        accepted_by_depth: Entry d - 1: how often a node of depth d was accepted.
        offered_by_depth: Entry d - 1: how often a tree offered a node of depth d below an accepted one.
        pass_sizes: N of the passes: how often each occurred.
        spans: Tokens that each pass gained, the prefill's first; cut as the text was cut.
        nodes: N of each pass, in their order.
        decisions: When drafting was given up or taken up, and why; see `speculation="auto"`.
        seconds: Wall time by phase: `prefill` and the names in `PHASES`. A step of fixed shape (CUDA) is one piece: it
            counts as `verify`, and making its buffers and graphs as `lay_out`.
    """

    rule: str = ""
    new_tokens: int = 0
    requests: int = 0
    passes: int = 0
    drafted_passes: int = 0
    accepted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    offered_by_depth: list[int] = field(default_factory=list)
    pass_sizes: Counter[int] = field(default_factory=Counter)
    spans: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prefill", *PHASES), 0.0))

    @property
    def mu(self) -> float:
        """Mean of accepted draft tokens per drafted pass; 0 if nothing was drafted."""
        return self.accepted / self.drafted_passes if self.drafted_passes else 0.0

    @property
    def tau(self) -> float:
        """Tokens gained per target pass, over all passes after the prefill; 1 for plain decoding."""
        return (self.new_tokens - self.requests) / self.passes if self.passes else 0.0

    @property
    def share(self) -> dict[str, float]:
        """Fraction of the decoding time, the prefill not counted, by phase."""
        total = sum(self.seconds[phase] for phase in PHASES)
        return {phase: self.seconds[phase] / total if total else 0.0 for phase in PHASES}

    def record_pass(self, shape: TreeShape, path: Sequence[int], gained: int) -> None:
        """Counts one verify pass: its tree, the accepted path (root first) and the tokens it gained after cuts."""
        self.passes += 1
        self.pass_sizes[shape.size] += 1
        self.spans.append(gained)
        self.nodes.append(shape.size)
        if shape.size == 1:
            return
        self.drafted_passes += 1
        self.accepted += len(path) - 1
        for depth, node in enumerate(path, start=1):
            if depth > 1:
                _bump(self.accepted_by_depth, depth - 1)
            if shape.children[node]:
                _bump(self.offered_by_depth, depth)

    def merge(self, other: "DecodingStats") -> "DecodingStats":
        """The sum of both, as a new object."""
        merged = DecodingStats(
            rule=self.rule if self.rule == other.rule else "several",
            **{
                name: getattr(self, name) + getattr(other, name)
                for name in ("new_tokens", "requests", "passes", "drafted_passes", "accepted", "pass_sizes", "spans")
            },
            nodes=self.nodes + other.nodes,
            decisions=self.decisions + other.decisions,
        )
        for name in ("accepted_by_depth", "offered_by_depth"):
            for stats in (self, other):
                for depth, count in enumerate(getattr(stats, name), start=1):
                    _bump(getattr(merged, name), depth, count)
        merged.seconds = {phase: self.seconds[phase] + other.seconds[phase] for phase in self.seconds}
        return merged


def _bump(counts: list[int], depth: int, by: int = 1) -> None:
    counts.extend([0] * (depth - len(counts)))
    counts[depth - 1] += by
