"""The commands and their options. Declares; the work is in the module named as the command."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from medusa_spec.cli.corpus_app import corpus as corpus_app
from medusa_spec.cli.finetune_app import finetune

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Faster decoding of a Hugging Face causal language model, with exactly its own output.",
)

app.add_typer(corpus_app, name="corpus")
app.command()(finetune)


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
