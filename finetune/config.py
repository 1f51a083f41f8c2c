"""Every setting of a fine-tuning run. Knows no stage; each stage names the settings it depends on."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from medusa_spec.errors import ConfigError
from medusa_spec.finetune.choices import LOSSES, TOP_LOGITS, DType
from medusa_spec.finetune.config_checks import check
from medusa_spec.heads import fitted_options, parse_options
from medusa_spec.heads.config import HeadsConfig


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Settings of a run, all stages.

    Attributes:
        model: Folder or hub id of the target.
        data: Files (JSONL, `.gz` too, parquet) or hub data sets; `("self",)` lets the model write its own.
        output: Folder of the run; `heads/` in it is the result.
        revision: Revision of the target on the hub.
        base_name: Name of the target in the heads' config, where `model` is a local copy of it.
        sources: Keep only records whose `source` field is one of these; None keeps all.
        max_records: Records read from each input, its first ones; a hub data set is then streamed. None reads all.
        skip_unusable: Leave out records that cannot be used, and count them, instead of stopping at the first.
        drop_loops: Train on no answer that ends in repetition: it is easy to guess and teaches little.
        drop_duplicates: Keep one of conversations whose tokens are the same.
        max_length: Tokens after which a conversation is cut.
        held_out: Share of the conversations kept from training, for calibration and report.
        kind: Family of heads, as in `HeadsConfig`.
        options: Settings that this family alone has, by name, or written `("tied=true", ...)`.
        num_heads: K.
        num_layers: Blocks per head.
        lm_head: `shared`, `own` or `low_rank`, as in `HeadsConfig`.
        rank: Rank of `low_rank`.
        draft_vocab_size: Tokens that heads can guess, the most frequent of the answers; None means all.
        init_from: Trained heads (folder, packaged name or hub id) to start from; None starts at the identity.
        adapter_rank: Trains an adapter (LoRA of this rank) on the heads of `init_from`, which stay as they are: many
            domains on one base. None trains the heads.
        adapter_alpha: What the adapter adds is multiplied by `adapter_alpha / adapter_rank`; None is twice the rank.
        target_rank: After the heads, or beginning with those of `init_from`, trains heads and an adapter (LoRA of this
            rank) on the target together (Medusa-2): output is then exactly that of the *adapted* target. Published: 32.
            None leaves the target as it is.
        target_alpha: What that adapter adds is multiplied by `target_alpha / target_rank`; None is half the rank.
        target_loss: What keeps the adapted target as it is: `kl`, near its own choices without the adapter; or
            `cross_entropy` on the data, which teaches it those.
        target_learning_rate: Peak for the adapter of the target while both are trained.
        heads_rate: The heads' is so many times that.
        heads_weight: Of the heads' loss beside the target's own.
        joint_epochs: Passes over the data while both are trained.
        joint_max_steps: Steps after which that ends before; None for all.
        joint_batch_tokens: Tokens per step of it, padding included.
        epochs: Passes over the stored states.
        max_steps: Training steps after which it ends before those are through; None for all.
        batch_positions: Positions per training step.
        gradient_accumulation: Pieces that a step's batch is computed in, one after the other: the same step in less
            memory. Of the heads' own training; joint steps are of `joint_batch_tokens`.
        learning_rate: Peak of the cosine schedule.
        weight_decay: AdamW's.
        warmup: Share of the steps over which the learning rate rises.
        max_grad_norm: Clipping.
        depth_decay: Weight of head k in the loss is `depth_decay ** k`.
        unroll: Steps of a draft that are trained, for heads that attend with one layer for all steps: later ones, up to
            K, go on as they have learnt; None trains all.
        unroll_ramp: Share of the training over which the steps that are trained grow from one to `unroll`: later steps
            learn little before the first has, and cost as much.
        feature_weight: Weight of the distance between guessed features and the target's beside the cross-entropy; for
            EAGLE-1 heads.
        loss: What heads learn: `cross_entropy`, the target's tokens; else its probabilities: `kl` to be near them,
            `total_variation` to be accepted by rejection sampling, `log_acceptance` the same by its logarithm, `lk`
            first the one and then the other. Joint training after it goes by cross-entropy.
        top_logits: The target's likeliest tokens kept per position, with their probabilities; None keeps 32 if the
            loss learns from them.
        learning_rates: Factors on `learning_rate` for parts of the heads, by a part of the parameters' names, or
            written `("lm_head=0.1", ...)`; those of several parts are multiplied.
        ema: Decay of a moving average of the weights, which is evaluated and saved in their place; 0 for none. Joint
            training after it begins with the average and takes none.
        save_steps: Steps between training checkpoints: what a kill can cost.
        eval_prompts: Held-out prompts decoded after every epoch with the heads as they are, for the log; 0 for none.
        eval_new_tokens: Tokens decoded for each of them.
        report_to: Trackers that the log goes to, as `transformers.Trainer` names them: `("tensorboard",)`.
        seed: Order of the data.
        dtype: Dtype of the target while its states are read; `auto` is bfloat16, or float32 on a CPU that would only
            emulate it (four times slower).
        device: Where the target and the training run; None takes a GPU if there is one.
        batch_tokens: Tokens, padding included, per pass of the target.
        shard_positions: Positions per shard of the store: what a kill of the states stage can cost.
        states_from: Folder of another run on the same target: conversations that it has read are not read again.
        states_dump: Folder of hidden states that an engine has dumped (vLLM's `extract_hidden_states`): conversations
            in it are not read by the target.
        keep_states: Keep what the target computed while it wrote texts itself (`distil`, `data = self`), so that it
            does not read them again: costs a few kilobytes of disk per token.
        reverse: Read the states from the last shard backwards, and nothing else: a second process beside a first one,
            until they meet.
        tree_width: Ranks per head that calibration counts.
        max_tree_size: Largest tree considered, in draft nodes.
        tree_size: Draft nodes of the tree; None chooses by measured pass times.
        report_prompts: Held-out prompts that the report decodes.
        report_new_tokens: Tokens decoded per prompt of the report.
        self_conversations: Conversations written for `data=("self",)`.
        self_new_tokens: Longest answer written for `data=("self",)`.
        self_openings: Words with which the prompts of `data=("self",)` begin, in turn: the tasks that users come with;
            none leaves the first word to the model, too.
        distil: The target answers the prompts of `data` itself: other people's answers cost acceptance.
        distil_new_tokens: Longest of those answers.
        distil_temperature: At which the model's own answers are sampled, of `distil` and of `data=("self",)`; 0 takes
            the likeliest tokens.
        distil_batch: Texts that the model writes side by side.

    Raises:
        ConfigError: If a value is out of range, or would have no effect beside another, naming it.
    """

    model: str
    data: tuple[str, ...]
    output: str
    revision: str | None = None
    base_name: str | None = None
    sources: tuple[str, ...] | None = None
    max_records: int | None = None
    skip_unusable: bool = False
    drop_loops: bool = False
    drop_duplicates: bool = False
    max_length: int = 1024
    held_out: float = 0.02
    kind: str = "medusa"
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    num_heads: int = 4
    num_layers: int = 1
    lm_head: Literal["shared", "own", "low_rank"] = "shared"
    rank: int = 64
    draft_vocab_size: int | None = 4096
    init_from: str | None = None
    adapter_rank: int | None = None
    adapter_alpha: float | None = None
    target_rank: int | None = None
    target_alpha: float | None = None
    target_loss: Literal["kl", "cross_entropy"] = "kl"
    target_learning_rate: float = 5e-4
    heads_rate: float = 4.0
    heads_weight: float = 0.2
    joint_epochs: int = 2
    joint_max_steps: int | None = None
    joint_batch_tokens: int = 2048
    epochs: int = 6
    max_steps: int | None = None
    batch_positions: int = 2048
    gradient_accumulation: int = 1
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warmup: float = 0.05
    max_grad_norm: float = 1.0
    depth_decay: float = 0.8
    unroll: int | None = None
    unroll_ramp: float = 0.0
    feature_weight: float = 0.0
    loss: str = "cross_entropy"
    top_logits: int | None = None
    learning_rates: dict[str, float] = field(default_factory=dict, hash=False)
    ema: float = 0.0
    save_steps: int = 200
    eval_prompts: int = 2
    eval_new_tokens: int = 64
    report_to: tuple[str, ...] = ()
    seed: int = 0
    dtype: DType = "auto"
    device: str | None = None
    batch_tokens: int = 2048
    shard_positions: int = 16384
    states_from: str | None = None
    states_dump: str | None = None
    keep_states: bool = False
    reverse: bool = False
    tree_width: int = 12
    max_tree_size: int = 63
    tree_size: int | None = None
    report_prompts: int = 16
    report_new_tokens: int = 128
    self_conversations: int = 2000
    self_new_tokens: int = 224
    self_openings: tuple[str, ...] = ()
    distil: bool = False
    distil_new_tokens: int = 256
    distil_temperature: float = 0.0
    distil_batch: int = 56

    def __post_init__(self) -> None:
        for name in ("data", "sources", "self_openings", "report_to"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif value is not None:
                object.__setattr__(self, name, tuple(str(item) for item in value))
        object.__setattr__(self, "report_to", tuple(name for name in self.report_to if name != "none"))
        object.__setattr__(self, "options", _named(self.options))
        object.__setattr__(self, "learning_rates", _factors(self.learning_rates))
        check(self)

    def unroll_at(self, progress: float) -> int | None:
        """Steps trained at a share of the training in 0..1; None for all.

        ```
        unroll 3, ramp 0.6      progress 0 … 0.3: 1      0.3 … 0.6: 2      0.6 … 1: 3
        ```
        """
        if self.unroll is None or self.unroll_ramp == 0:
            return self.unroll
        return min(self.unroll, 1 + int(progress / self.unroll_ramp * (self.unroll - 1)))

    @property
    def used_adapter_alpha(self) -> float:
        """`adapter_alpha`, twice the rank where it is None."""
        return float(2 * (self.adapter_rank or 0)) if self.adapter_alpha is None else self.adapter_alpha

    @property
    def used_target_alpha(self) -> float:
        """`target_alpha`, half the rank where it is None."""
        return (self.target_rank or 0) / 2 if self.target_alpha is None else self.target_alpha

    @property
    def joint(self) -> bool:
        """Whether heads and an adapter of the target are trained together."""
        return self.target_rank is not None

    @property
    def joint_alone(self) -> bool:
        """Whether that is all that is trained: it begins with given heads."""
        return self.joint and self.init_from is not None

    @property
    def last_training(self) -> str:
        """The stage whose heads are the result."""
        return "joint" if self.joint else "train"

    @property
    def kept_logits(self) -> int:
        """`top_logits`, as many as the loss asks for where it is None."""
        if self.top_logits is not None:
            return self.top_logits
        return 0 if self.loss == LOSSES[0] else TOP_LOGITS

    def heads_config(self, *, hidden_size: int, vocab_size: int, target: Any = None) -> HeadsConfig:
        """The heads' config on a target of these sizes; a draft vocabulary of V or more means all of V.

        Args:
            hidden_size: H.
            vocab_size: V.
            target: Config of the target's decoder, which the layers of some families follow.
        """
        size = self.draft_vocab_size
        return HeadsConfig(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            kind=self.kind,
            options=fitted_options(self.kind, self.options, target),
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            lm_head=self.lm_head,
            rank=self.rank,
            draft_vocab_size=None if size is None or size >= vocab_size else size,
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain types, for JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "FinetuneConfig":
        """The inverse of `to_dict`; an unknown key is an error that names it."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown settings {unknown}; known are {sorted(known)}")
        return cls(**values)


def _factors(given: Any) -> dict[str, float]:
    """`learning_rates` as a dict, from one or from texts."""
    try:
        found = dict(given) if isinstance(given, dict) else parse_options((given,) if isinstance(given, str) else given)
    except ValueError as error:
        raise ConfigError(f"learning_rates must be written part=factor, got {given!r}") from error
    for part, factor in found.items():
        number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not part or not number or not 0 < factor < float("inf"):
            raise ConfigError(f"learning_rates must give each part a factor above 0, got {part!r}: {factor!r}")
    return {part: float(factor) for part, factor in found.items()}


def _named(given: Any) -> dict[str, Any]:
    """`options` as a dict, from one or from texts."""
    try:
        return given if isinstance(given, dict) else parse_options((given,) if isinstance(given, str) else given)
    except ValueError as error:
        raise ConfigError(str(error)) from error
