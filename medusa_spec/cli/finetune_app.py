"""The command that trains, and its options. Declares; the work is in `finetune.py`.

Every option is a field of `FinetuneConfig` by name, None or False where it was not given.
"""

from enum import Enum
from typing import Annotated, Any

import typer

from medusa_spec.errors import ConfigError

OF_THE_COMMAND = ("model", "data", "output", "preview", "stage", "redo")
"""Options that are no settings of a run, or are asked for."""

REPEATABLE = {"source": "sources", "option": "options", "self_opening": "self_openings"}
"""Options that are named as one of what the setting holds several of."""


class LMHead(str, Enum):
    """What turns a head's state into logits."""

    shared = "shared"
    own = "own"
    low_rank = "low_rank"


def finetune(
    model: Annotated[str, typer.Option(help="Folder or hub id of the target.")],
    data: Annotated[
        list[str],
        typer.Option(help='JSONL(.gz), parquet or hub data set, repeatable; or "self": none.'),
    ],
    output: Annotated[str | None, typer.Option(help="Folder of the run; the result is heads/ in it.")] = None,
    preview: Annotated[bool, typer.Option("--preview", help="Show which tokens are trained on, and stop.")] = False,
    source: Annotated[list[str] | None, typer.Option(help="Keep only records of this source; repeatable.")] = None,
    max_records: Annotated[int | None, typer.Option(help="Read the first so many records of each input.")] = None,
    skip_unusable: Annotated[
        bool, typer.Option("--skip-unusable", help="Leave out and count records that cannot be used.")
    ] = False,
    drop_loops: Annotated[
        bool, typer.Option("--drop-loops", help="Train on no answer that ends in repetition.")
    ] = False,
    drop_duplicates: Annotated[
        bool, typer.Option("--drop-duplicates", help="Keep one of conversations that are the same.")
    ] = False,
    init_from: Annotated[str | None, typer.Option(help="Trained heads to start from: folder, name or hub id.")] = None,
    adapter_rank: Annotated[
        int | None,
        typer.Option(help="Train an adapter (LoRA of this rank) on the heads of --init-from, not the heads."),
    ] = None,
    adapter_alpha: Annotated[
        float | None, typer.Option(help="Adapters are multiplied by it over their rank; default: twice the rank.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="Family: medusa, hydra, mlp_speculator, recurrent, eagle, eagle3, mtp or fused.", metavar="NAME"
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Setting that this family alone has, as name=value; repeatable.")
    ] = None,
    num_heads: Annotated[int | None, typer.Option(help="Heads: how far ahead they guess.")] = None,
    unroll: Annotated[
        int | None, typer.Option(help="Steps of a draft that are trained, where one layer serves all; default: all.")
    ] = None,
    unroll_ramp: Annotated[
        float | None, typer.Option(help="Share of the training over which these steps grow from one to --unroll.")
    ] = None,
    feature_weight: Annotated[
        float | None, typer.Option(help="Weight of guessed features beside guessed tokens, for eagle.")
    ] = None,
    num_layers: Annotated[int | None, typer.Option(help="Residual blocks per head.")] = None,
    lm_head: Annotated[LMHead | None, typer.Option(help="What gives the logits.")] = None,
    draft_vocab_size: Annotated[int | None, typer.Option(help="Most frequent tokens that heads can guess.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Training steps after which it ends before.")] = None,
    batch_positions: Annotated[int | None, typer.Option(help="Positions per training step.")] = None,
    gradient_accumulation: Annotated[
        int | None, typer.Option(help="Pieces that a step is computed in; more of them take less memory.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup: Annotated[float | None, typer.Option(help="Share of the steps over which it rises.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="AdamW's.")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Longer gradients are clipped to it.")] = None,
    learning_rates: Annotated[
        list[str] | None,
        typer.Option(help="Factor on it for a part of the heads, as lm_head=0.1; repeatable.", metavar="PART=FACTOR"),
    ] = None,
    ema: Annotated[float | None, typer.Option(help="Decay of a moving average of the weights; default: none.")] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="cross_entropy, or from the target's probabilities: kl, total_variation, log_acceptance or lk.",
            metavar="NAME",
        ),
    ] = None,
    depth_decay: Annotated[
        float | None, typer.Option(help="Each head weighs so many times the one before it in the loss.")
    ] = None,
    top_logits: Annotated[
        int | None, typer.Option(help="Likeliest tokens of the target kept per position, for such a loss.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest conversation, tokens.")] = None,
    held_out: Annotated[float | None, typer.Option(help="Share kept from training.")] = None,
    seed: Annotated[int | None, typer.Option(help="Order of the data.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the target.")] = None,
    device: Annotated[str | None, typer.Option(help="Device; default: a GPU if any.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the target on the hub.")] = None,
    base_name: Annotated[
        str | None, typer.Option(help="The target's name for the heads' config, where --model is a local copy.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of --lm-head low_rank.")] = None,
    target_rank: Annotated[
        int | None,
        typer.Option(help="Medusa-2: also train an adapter (LoRA) on the target, whose output changes with it."),
    ] = None,
    target_alpha: Annotated[
        float | None, typer.Option(help="That adapter is multiplied by it over its rank; default: half the rank.")
    ] = None,
    target_loss: Annotated[
        str | None, typer.Option(help="What keeps the target as it is: kl, or cross_entropy on the data.")
    ] = None,
    target_learning_rate: Annotated[float | None, typer.Option(help="Of that adapter.")] = None,
    heads_rate: Annotated[float | None, typer.Option(help="The heads' rate is so many times that.")] = None,
    heads_weight: Annotated[float | None, typer.Option(help="Of the heads' loss beside the target's.")] = None,
    joint_epochs: Annotated[int | None, typer.Option(help="Passes over the data while both are trained.")] = None,
    joint_max_steps: Annotated[int | None, typer.Option(help="Steps after which that ends before.")] = None,
    joint_batch_tokens: Annotated[int | None, typer.Option(help="Tokens per step of it.")] = None,
    tree_size: Annotated[
        int | None, typer.Option(help="Draft nodes of the tree; default: chosen by measured pass times.")
    ] = None,
    tree_width: Annotated[int | None, typer.Option(help="Guesses per head that calibration counts.")] = None,
    max_tree_size: Annotated[int | None, typer.Option(help="Largest tree considered, draft nodes.")] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens per pass of the target; lower it when memory is short.")
    ] = None,
    shard_positions: Annotated[
        int | None, typer.Option(help="Positions per file of states: what a kill while they are read can cost.")
    ] = None,
    reverse: Annotated[
        bool,
        typer.Option("--reverse", help="Read states from the end: a second process beside a first, till they meet."),
    ] = False,
    states_from: Annotated[
        str | None, typer.Option(help="Another run's folder, whose conversations are not read again.")
    ] = None,
    states_dump: Annotated[
        str | None, typer.Option(help="Folder of hidden states that vLLM's extract_hidden_states has written.")
    ] = None,
    keep_states: Annotated[
        bool, typer.Option("--keep-states", help="With --distil or --data self: texts are not read again for training.")
    ] = False,
    eval_prompts: Annotated[
        int | None, typer.Option(help="Held-out prompts decoded after every epoch, for the log; 0: none.")
    ] = None,
    eval_new_tokens: Annotated[int | None, typer.Option(help="Tokens decoded for each of them.")] = None,
    save_steps: Annotated[
        int | None, typer.Option(help="Training steps between checkpoints: what a kill can cost.")
    ] = None,
    report_to: Annotated[
        list[str] | None, typer.Option(help="Tracker of the log, like tensorboard or wandb; repeatable.")
    ] = None,
    report_prompts: Annotated[int | None, typer.Option(help="Held-out prompts that the report decodes.")] = None,
    report_new_tokens: Annotated[int | None, typer.Option(help="Tokens decoded for each of them.")] = None,
    self_conversations: Annotated[
        int | None, typer.Option(help="Conversations that the model writes for --data self.")
    ] = None,
    self_new_tokens: Annotated[int | None, typer.Option(help="Longest answer of --data self, tokens.")] = None,
    self_opening: Annotated[
        list[str] | None,
        typer.Option(help="Words with which prompts of --data self begin, in turn; repeatable."),
    ] = None,
    distil: Annotated[
        bool, typer.Option("--distil", help="The target answers the prompts itself; prompts alone are enough.")
    ] = False,
    distil_new_tokens: Annotated[int | None, typer.Option(help="Longest of these answers, tokens.")] = None,
    distil_temperature: Annotated[
        float | None, typer.Option(min=0, help="At which the model's own answers are sampled; default: greedy.")
    ] = None,
    distil_batch: Annotated[int | None, typer.Option(help="Texts that the model writes side by side.")] = None,
    stage: Annotated[list[str] | None, typer.Option(help="Run only this stage; repeatable. Default: all.")] = None,
    redo: Annotated[str | None, typer.Option(help="Start afresh from this stage on, deleting what is there.")] = None,
) -> None:
    """Train heads for a model on your conversations. Interrupted, it goes on where it was."""
    settings = {name: value for name, value in locals().items() if name not in OF_THE_COMMAND}  # options alone so far
    from medusa_spec.cli.finetune import finetune as run

    if output is None and not preview:
        raise ConfigError("--output: expected a folder for the run, got none; name one")
    run(
        model=model,
        data=tuple(data),
        output=output,
        preview=preview,
        stages=tuple(stage) if stage else None,
        redo=redo,
        settings={REPEATABLE.get(name, name): _plain(value) for name, value in settings.items()},
    )


def _plain(value: Any) -> Any:
    """As a setting; None, which leaves it at its default, for what was not given."""
    if value is False or value == []:
        return None
    if isinstance(value, Enum):
        return value.value
    return tuple(value) if isinstance(value, list) else value
