"""What a set of heads is made of: kind and sizes. Knows no weights and no files."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

LMHead = Literal["shared", "own", "low_rank"]
KINDS = ("medusa", "hydra", "mlp_speculator", "recurrent", "eagle", "eagle3", "mtp", "fused")
LM_HEADS: tuple[LMHead, ...] = ("shared", "own", "low_rank")
Residual = Literal["identity", "linear"]
RESIDUALS: tuple[Residual, ...] = ("identity", "linear")


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """Kind and shape of a set of heads.

    Attributes:
        hidden_size: H of the target.
        vocab_size: V of the target.
        kind: Family of heads.
        num_heads: K; head k guesses the token k + 1 places after the one that the target has just chosen.
        num_layers: Blocks per head.
        lm_head: `shared`, the target's own rows; `own`, a trained copy per head; `low_rank`, the target's rows plus
            a trained product of rank `rank` per head.
        rank: Rank of that product; used by `low_rank` only.
        draft_vocab_size: Size of the draft vocabulary, the most frequent tokens; None means all V.
        options: Settings that the family alone has, plain values by name; see its `Options`, which checks them.
        residual: What a Hydra head adds its first block to: `identity`, h; `linear`, a trained map of all it reads.
        lm_head_bias: Whether `own` LM heads have a bias; None where the target has one.

    Raises:
        ValueError: If a size is out of range, naming it.
    """

    hidden_size: int
    vocab_size: int
    kind: str = "medusa"
    num_heads: int = 4
    num_layers: int = 1
    lm_head: LMHead = "shared"
    rank: int = 64
    draft_vocab_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    residual: Residual = "identity"
    lm_head_bias: bool | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers", "rank"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of 1 or more, got {value!r}")
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}; a later version may know it")
        if self.lm_head not in LM_HEADS:
            raise ValueError(f"lm_head must be one of {', '.join(LM_HEADS)}, got {self.lm_head!r}")
        if not isinstance(self.options, dict):
            raise ValueError(f"options must be a dict of settings by name, got {self.options!r}")
        if self.residual not in RESIDUALS:
            raise ValueError(f"residual must be one of {', '.join(RESIDUALS)}, got {self.residual!r}")
        if self.residual == "linear" and self.kind != "hydra":
            raise ValueError(
                f"residual must be 'identity' for {self.kind} heads, got 'linear'; only hydra heads know it"
            )
        if self.lm_head_bias is not None and (type(self.lm_head_bias) is not bool or self.lm_head != "own"):
            raise ValueError(
                f"lm_head_bias must be True or False with lm_head='own', else None, got {self.lm_head_bias!r} with "
                f"lm_head={self.lm_head!r}"
            )
        size = self.draft_vocab_size
        if size is not None and not 1 <= size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size must be in 1..{self.vocab_size} (vocab_size) or None, got {size}")

    @property
    def num_draft_tokens(self) -> int:
        """Number of tokens that a head can guess: the draft vocabulary's size, or V."""
        return self.draft_vocab_size or self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        """As plain types, for JSON; `options` only where there are any."""
        return {name: value for name, value in asdict(self).items() if name != "options" or value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "HeadsConfig":
        """The inverse of `to_dict`; an unknown or missing key is an error that names it."""
        known = cls.__dataclass_fields__
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(
                f"heads config has keys that this version does not know: {unknown}; known are {sorted(known)}"
            )
        missing = sorted({"hidden_size", "vocab_size"} - set(values))
        if missing:
            raise ValueError(f"heads config must have {missing}; they are missing")
        return cls(**values)
