"""The commands and their options. Declares; the work is in the module named as the command."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from medusa_spec.cli.corpus_app import corpus as corpus_app
from medusa_spec.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Faster decoding of a Hugging Face causal language model, with exactly its own output.",
)

app.add_typer(corpus_app, name="corpus")


class DType(str, Enum):
    """Dtype of the weights."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    float64 = "float64"


class To(str, Enum):
    """Whose engine is to read the heads."""

    vllm = "vllm"
    vllm_class = "vllm-class"
    original = "original"


class Mode(str, Enum):
    """How far drafting is left to what it brings."""

    auto = "auto"
    fixed = "fixed"


class LMHead(str, Enum):
    """What turns a head's state into logits."""

    shared = "shared"
    own = "own"
    low_rank = "low_rank"


Heads = Annotated[
    str | None,
    typer.Option(
        help='Heads: a folder, a packaged name or a hub id; "mtp": layers that the checkpoint ships.', metavar="NAME"
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(help='Draft by "heads", "hybrid" (and by what stood before), "suffix" or "ngram" (no heads needed).'),
]
Corpus = Annotated[
    Path | None, typer.Option(help="Folder of texts for suffix and hybrid to look up in; see medusa-spec corpus.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest continuation, in tokens.")]
DraftNodes = Annotated[int | None, typer.Option(min=0, help="Most draft nodes per pass; default: the heads' own tree.")]
TreeNodes = Annotated[int | None, typer.Option(min=1, help="Most draft nodes per pass; default: the heads' own tree.")]
Speculation = Annotated[
    Mode, typer.Option(help="auto: times and gains decide, pass by pass, down to plain decoding; fixed: always draft.")
]
NoChatTemplate = Annotated[bool, typer.Option("--no-chat-template", help="Take prompts as they are.")]
NoBaseline = Annotated[bool, typer.Option("--no-baseline", help="Leave out Hugging Face's generate on a second load.")]
Dtype = Annotated[DType, typer.Option(help="Dtype of the weights; auto: as they were saved.")]


@app.command()
def demo(
    heads: Heads = None,
    drafter: Drafter = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts to decode.")] = 6,
    max_new_tokens: MaxNewTokens = 96,
    no_baseline: NoBaseline = False,
) -> None:
    """Decode a few packaged prompts plainly and with the tree, and compare."""
    from medusa_spec.cli.demo import demo as run

    run(
        heads=heads,
        drafter=drafter,
        limit=limit,
        max_new_tokens=max_new_tokens,
        baseline=not no_baseline,
    )


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Folder or hub id of the model, or of heads.")],
    heads: Heads = None,
    drafter: Drafter = None,
    corpus: Corpus = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; default: stdin.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File of the text to continue.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy; above 0 samples.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest share p.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    draft_nodes: DraftNodes = None,
    speculation: Speculation = Mode.auto,
    no_chat_template: NoChatTemplate = False,
    dtype: Dtype = DType.auto,
    show_accepted: Annotated[
        bool, typer.Option("--show-accepted", help="Mark accepted draft tokens; print figures.")
    ] = False,
) -> None:
    """Continue one prompt, writing the text as it comes."""
    from medusa_spec.cli.generate import generate as run
    from medusa_spec.cli.generate import read_prompt, sampling_arguments
    from medusa_spec.cli.loading import load

    sampling = sampling_arguments(temperature, top_k, top_p)
    text = read_prompt(prompt, prompt_file)
    run(
        load(model, heads, drafter, dtype=dtype.value, corpus=corpus),
        text,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        draft_nodes=draft_nodes,
        speculation=speculation.value,
        seed=seed,
        chat_template=not no_chat_template,
        show_accepted=show_accepted,
    )


@app.command()
def bench(
    model: Annotated[str | None, typer.Argument(help="Folder or hub id; default: the default model.")] = None,
    heads: Heads = None,
    drafter: Drafter = None,
    corpus: Corpus = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with prompt, turns or messages; default: packaged ones."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts to decode, in turn from all categories.")] = None,
    per_category: Annotated[int | None, typer.Option(min=1, help="Most prompts of each category.")] = None,
    max_new_tokens: MaxNewTokens = 128,
    draft_nodes: TreeNodes = None,
    speculation: Speculation = Mode.auto,
    dtype: Dtype = DType.auto,
    temperature: Annotated[float, typer.Option(min=0, help="All arms sample at it; 0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap and of sampling.")] = 0,
    no_chat_template: NoChatTemplate = False,
    no_baseline: NoBaseline = False,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
) -> None:
    """Measure tree decoding against Hugging Face's generate and against plain decoding."""
    from medusa_spec.cli.bench import bench as run
    from medusa_spec.files import write_text

    comparison = run(
        model=model,
        heads=heads,
        drafter=drafter,
        corpus=corpus,
        prompts=prompts,
        limit=limit,
        per_category=per_category,
        max_new_tokens=max_new_tokens,
        draft_nodes=draft_nodes,
        speculation=speculation.value,
        dtype=dtype.value,
        seed=seed,
        chat_template=not no_chat_template,
        baseline=not no_baseline,
        temperature=temperature,
    )
    print(comparison.table())
    if json is not None:
        write_text(json, comparison.to_json() + "\n")


@app.command()
def plan(
    model: Annotated[str | None, typer.Argument(help="Folder or hub id; default: the default model.")] = None,
    heads: Heads = None,
    prefix: Annotated[int, typer.Option(min=1, help="Tokens before the passes that are timed.")] = 256,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the text whose memory is reckoned.")] = 4096,
    batch: Annotated[int | None, typer.Option(min=2, help="Also time passes over so many rows.")] = None,
    measure: Annotated[
        Path | None, typer.Option(help="Also decode some of these prompts (JSON lines) plainly and with trees.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of --measure, in turn from all categories.")] = 4,
    max_new_tokens: MaxNewTokens = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of every measurement; the median counts.")] = 5,
    dtype: Dtype = DType.auto,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of tables.")] = False,
) -> None:
    """Say what drafting would bring on this machine, and when not to draft."""
    from json import dumps

    from medusa_spec.cli.plan import plan as run
    from medusa_spec.cli.plan_table import plan_table

    found = run(
        model=model,
        heads=heads,
        prefix=prefix,
        context=context,
        batch=batch,
        measure=measure,
        limit=limit,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        dtype=dtype.value,
    )
    print(dumps(found.to_dict()) if json else plan_table(found))


@app.command()
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
    top_logits: Annotated[
        int | None, typer.Option(help="Likeliest tokens of the target kept per position, for such a loss.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest conversation, tokens.")] = None,
    held_out: Annotated[float | None, typer.Option(help="Share kept from training.")] = None,
    seed: Annotated[int | None, typer.Option(help="Order of the data.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the target.")] = None,
    device: Annotated[str | None, typer.Option(help="Device; default: a GPU if any.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the target on the hub.")] = None,
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
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens per pass of the target; lower it when memory is short.")
    ] = None,
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
    report_to: Annotated[
        list[str] | None, typer.Option(help="Tracker of the log, like tensorboard or wandb; repeatable.")
    ] = None,
    report_prompts: Annotated[int | None, typer.Option(help="Held-out prompts that the report decodes.")] = None,
    self_conversations: Annotated[
        int | None, typer.Option(help="Conversations that the model writes for --data self.")
    ] = None,
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
    from medusa_spec.cli.finetune import finetune as run

    if output is None and not preview:
        raise ConfigError("--output: expected a folder for the run, got none; name one")
    asked = {
        "sources": tuple(source) if source else None,
        "max_records": max_records,
        "skip_unusable": skip_unusable,
        "drop_loops": drop_loops,
        "drop_duplicates": drop_duplicates,
        "init_from": init_from,
        "adapter_rank": adapter_rank,
        "adapter_alpha": adapter_alpha,
        "kind": kind,
        "options": tuple(option) if option else None,
        "num_heads": num_heads,
        "unroll": unroll,
        "unroll_ramp": unroll_ramp,
        "feature_weight": feature_weight,
        "num_layers": num_layers,
        "lm_head": lm_head.value if lm_head else None,
        "draft_vocab_size": draft_vocab_size,
        "epochs": epochs,
        "max_steps": max_steps,
        "batch_positions": batch_positions,
        "gradient_accumulation": gradient_accumulation,
        "learning_rate": learning_rate,
        "learning_rates": tuple(learning_rates) if learning_rates else None,
        "ema": ema,
        "loss": loss,
        "top_logits": top_logits,
        "max_length": max_length,
        "held_out": held_out,
        "seed": seed,
        "dtype": dtype,
        "device": device,
        "revision": revision,
        "rank": rank,
        "target_rank": target_rank,
        "target_alpha": target_alpha,
        "target_loss": target_loss,
        "target_learning_rate": target_learning_rate,
        "heads_rate": heads_rate,
        "heads_weight": heads_weight,
        "joint_epochs": joint_epochs,
        "joint_max_steps": joint_max_steps,
        "joint_batch_tokens": joint_batch_tokens,
        "tree_size": tree_size,
        "batch_tokens": batch_tokens,
        "states_from": states_from,
        "states_dump": states_dump,
        "keep_states": keep_states or None,
        "eval_prompts": eval_prompts,
        "report_to": tuple(report_to) if report_to else None,
        "report_prompts": report_prompts,
        "self_conversations": self_conversations,
        "self_openings": tuple(self_opening) if self_opening else None,
        "distil": distil or None,
        "distil_new_tokens": distil_new_tokens,
        "distil_temperature": distil_temperature,
        "distil_batch": distil_batch,
    }
    run(
        model=model,
        data=tuple(data),
        output=output,
        preview=preview,
        stages=tuple(stage) if stage else None,
        redo=redo,
        settings=asked,
    )


@app.command()
def export(
    heads: Annotated[str, typer.Argument(help="Heads: a folder, a packaged name or a hub id.")],
    output: Annotated[Path, typer.Option(help="Folder for the engine: new, empty, or an earlier export.")],
    to: Annotated[
        To,
        typer.Option(help="vllm (TGI, too); vllm-class: Medusa for vLLM from 0.33 on; original: the authors' layout."),
    ] = To.vllm,
    model: Annotated[str | None, typer.Option(help="The target, where the heads' own name for it is not it.")] = None,
    dtype: Dtype = DType.auto,
) -> None:
    """Write heads as another engine reads them, read them back and compare."""
    from medusa_spec.cli.export import export as run

    run(heads=heads, output=output, to=to.value, model=model, dtype=dtype.value)
