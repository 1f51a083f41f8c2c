"""The calibrate stage: which rank paths were right on held-out states, and the tree that follows. Saves the heads."""

from pathlib import Path
from typing import Any

from medusa_spec import head_adapters
from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import TARGET_ADAPTER
from medusa_spec.config import MedusaConfig
from medusa_spec.cost import SIZES, best_size, interpolate, measure_pass_times
from medusa_spec.draft_times import PREFIX, draft_seconds
from medusa_spec.finetune import stages
from medusa_spec.finetune.batches import in_order
from medusa_spec.finetune.chances import measure_chances
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.joint import held_out_store
from medusa_spec.finetune.overlap import measure_overlap
from medusa_spec.finetune.ranks import accuracy, measure_ranks
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.train import load_trained, save_trained
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.heads import DraftHeads
from medusa_spec.prepare import prepare
from medusa_spec.tree import Growth, PathValues, TreeTemplate, best_tree, chain_template, count_paths, expected_accepted

CHANCE_POSITIONS = 1 << 14
"""Held-out positions at which probabilities are calibrated, spread over all."""

SHOWN_SIZES = (1, 3, 7, 15, 31, 63)
"""Tree sizes, in draft nodes, that the record lists."""


SHOWN_ACCURACIES = ("positions", "top1", "top5", "overlap", "base_top1")
"""Held-out figures that the record lists, those that there are."""


def settings(config: FinetuneConfig) -> dict[str, Any]:
    """What the stage's result depends on."""
    return {
        "train": stages.read_done(Path(config.output), config.last_training)["hash"],
        "tree_width": config.tree_width,
        "max_tree_size": config.max_tree_size,
        "tree_size": config.tree_size,
        "base_name": config.base_name,
    }


def run_calibrate(config: FinetuneConfig, target: Target) -> dict[str, Any]:
    """Runs the stage and writes `heads/`, the folder that `from_pretrained` takes.

    Returns:
        A record: accuracy by head, expected μ by tree size, the tree chosen and the pass times behind the choice.
    """
    output, wanted = Path(config.output), settings(config)
    if stages.begin(output, "calibrate", wanted):
        return dict(stages.read_done(output, "calibrate")["result"])
    if config.joint:
        target.adapt(output / "joint" / TARGET_ADAPTER)
    heads = load_trained(config, target.backbone)
    values, result = count(config, heads)
    if config.adapter_rank is not None:
        result["base_top1"] = _base_accuracy(config, heads)
    expected = expected_accepted(values, config.max_tree_size)
    result["expected_mu"] = [round(mu, 4) for mu in expected]
    if config.tree_size is None:
        target.for_decoding()
        tree, times, drafts = choose_tree(values, config.max_tree_size, heads, target.backbone)
    else:
        tree, times, drafts = best_tree(values, min(config.tree_size, len(expected) - 1)), {}, {}
    # Parallel heads are all asked before a tree is made: where no tree pays for that, nothing is to be drafted.
    grows = times and (heads.sequential or tree.paths)
    growth = growth_rules(config, heads, values, tree, times, drafts) if grows else None
    result |= {
        "growth": None if growth is None else growth.to_dict(),
        "tree_size": len(tree.paths),
        "tree_depth": tree.depth,
        "pass_seconds": {str(n): seconds for n, seconds in times.items()},
        "draft_seconds": {str(depth): seconds for depth, seconds in drafts.items()},
    }
    medusa_config = MedusaConfig(
        heads=heads.config,
        base_model_name_or_path=config.base_name or config.model,
        base_revision=config.revision,
        lm_head_hash=target.backbone.lm_head_hash(),
        chat_template_hash=stages.read_done(output, "data")["result"]["chat_template_hash"],
        tree=tree,
        growth=growth,
        values=values,
        training=training_record(config, result),
    )
    save_trained(output / "heads", heads, medusa_config, config)
    stages.finish(output, "calibrate", wanted, result)
    return result


def count(config: FinetuneConfig, heads: DraftHeads) -> tuple[PathValues, dict[str, Any]]:
    """Counts rank paths on the held-out states.

    Returns:
        The counts, and a record of positions and accuracy, and of `overlap` where likeliest tokens are kept.
    """
    store = held_out_store(config, heads.config.num_heads, teacher=config.kept_logits > 0)
    model = TrainedHeads(heads, depth_decay=config.depth_decay)
    ranks = measure_ranks(model, in_order(store, attends=heads.attends))
    width = min(config.tree_width, heads.config.num_draft_tokens)
    record = {"positions": len(ranks), "top1": accuracy(ranks, 1), "top5": accuracy(ranks, 5)}
    if store.teacher is not None:
        record["overlap"] = measure_overlap(model, in_order(store, attends=heads.attends))
    return count_paths(ranks, width=width), record


def _base_accuracy(config: FinetuneConfig, heads: DraftHeads) -> list[float]:
    """Top-1 by head of the heads that an adapter stands on, on the same held-out states."""
    head_adapters.enable(heads, False)
    try:
        return count(config, heads)[1]["top1"]
    finally:
        head_adapters.enable(heads, True)


def choose_tree(
    values: PathValues, largest: int, heads: DraftHeads, backbone: Backbone
) -> tuple[TreeTemplate, dict[int, float], dict[int, float]]:
    """The tree that gains most per second on this machine, searched over size and depth.

    Sequential heads pay for every level of a tree, so a deep one must be worth its drafting as well as its pass.

    Args:
        values: Counts.
        largest: Most draft nodes considered.
        heads: Their time is paid by every drafted pass.
        backbone: The target, whose pass times are measured.

    Returns:
        The tree, of no nodes where plain decoding is the fastest; seconds of a pass by N; seconds of a draft by depth.
    """
    prepared = prepare(backbone.model, backbone.lm_head)  # as it will be when it decodes
    try:
        times = measure_pass_times(backbone, [size for size in SIZES if size <= largest + 1], PREFIX)
        drafts = {depth: draft_seconds(heads, backbone, chain_template(depth)) for depth in range(1, values.depth + 1)}
    finally:
        prepared.undo()
    found: list[tuple[float, int, TreeTemplate]] = []
    for depth, seconds in drafts.items():
        shallow = values.up_to(depth)
        expected = expected_accepted(shallow, largest)
        size = best_size(expected, times, extra=seconds)
        cost = interpolate(times, size + 1) + (seconds if size else 0.0)
        found.append(((1.0 + expected[size]) / cost, -depth, best_tree(shallow, size)))
    return max(found, key=lambda entry: entry[:2])[2], times, drafts


def growth_rules(
    config: FinetuneConfig,
    heads: DraftHeads,
    values: PathValues,
    tree: TreeTemplate,
    times: dict[int, float],
    drafts: dict[int, float],
) -> Growth:
    """The rules by which trees of these heads grow on this machine.

    The price of a token is what it costs with the best static tree. Sequential heads weigh levels one by one as a tree
    grows, so of them that tree is charged one level's time. The others guess all depths at once, those that the best
    static tree pays for, and a level is free.

    Args:
        config: The run, for its held-out states.
        heads: Of any family.
        values: Counts.
        tree: The best static tree.
        times: Seconds of a pass by N.
        drafts: Seconds of a draft by depth.
    """
    store = held_out_store(config, heads.config.num_heads)
    model = TrainedHeads(heads, depth_decay=config.depth_decay)
    width = min(config.tree_width, heads.config.num_draft_tokens)
    chances = measure_chances(model, in_order(store, attends=heads.attends, limit=CHANCE_POSITIONS), width)
    deepest = max(drafts) if heads.sequential else tree.depth
    sunk, level = drafts[1 if heads.sequential else deepest], 0.0
    if heads.sequential:
        level = max(0.0, (drafts[deepest] - drafts[1]) / max(deepest - 1, 1))
    expected = expected_accepted(values.up_to(deepest), config.max_tree_size)
    size = best_size(expected, times, extra=sunk)
    token = (interpolate(times, size + 1) + sunk) / (1.0 + expected[size])
    return Growth(
        token_seconds=token,
        level_seconds=level,
        pass_seconds=tuple(sorted(times.items())),
        temperature=chances.temperature,
        coverage=chances.coverage,
        hit=chances.hit,
        **({} if heads.sequential else {"width": width}),
    )


def training_record(config: FinetuneConfig, calibration: dict[str, Any]) -> dict[str, Any]:
    """What the heads' config says of their training: data, recipe, held-out figures. No paths, which mean nothing
    elsewhere."""
    output = Path(config.output)
    data = stages.read_done(output, "data")["result"]
    train = stages.read_done(output, config.last_training)
    hashes = ("data", "states", "teacher", "train", "weights", "init_weights")
    recipe = {key: value for key, value in train["settings"].items() if key not in hashes}
    if config.kept_logits:
        recipe["top_logits"] = config.kept_logits
    recipe["draft_vocab_size"] = train["result"]["heads"]["draft_vocab_size"]  # of given heads it is theirs
    if recipe["init_from"] is not None:
        given = Path(recipe["init_from"])
        recipe["init_from"] = "/".join(given.parts[-2:]) if given.name == "heads" else given.name  # of a run: its name
    return {
        "data": {
            "names": [Path(name).name for name in config.data],
            "sources": data["sources"],
            "licenses": data["licenses"],
            "train": data["splits"]["train"],
            "held_out": data["splits"]["held_out"],
        },
        "recipe": recipe,
        "steps": train["result"]["steps"],
        **{key: value for key, value in train["result"].items() if key.endswith("draft_coverage")},
        "held_out": {key: calibration[key] for key in SHOWN_ACCURACIES if key in calibration},
        **{key: value for key, value in train["result"].items() if key == "target"},
        "expected_mu": {
            str(size): calibration["expected_mu"][size]
            for size in SHOWN_SIZES
            if size < len(calibration["expected_mu"])
        },
    }
