"""The model card of trained heads: what they are, what they were trained on, what was measured."""

from pathlib import Path
from typing import Any

from medusa_spec.config import MedusaConfig


def model_card(config: MedusaConfig) -> str:
    """The text of README.md, with the front matter that the hub reads."""
    base = config.base_model_name_or_path
    training = config.training
    parts = [
        "---\nlibrary_name: medusa-spec\n"
        + (f"base_model: {base}\n" if base else "")
        + "tags:\n- speculative-decoding\n- medusa\n---",
        f"# Draft heads for {base or 'a causal LM'}",
        f"{config.heads.num_heads} heads of the family {config.heads.kind}, {config.heads.num_layers} block(s), "
        f"LM head: {config.heads.lm_head.replace('_', ' ')}, {config.heads.num_draft_tokens} draft tokens. "
        + _promise(config),
        _adapter(config),
        _target(config),
        "```python\nfrom medusa_spec import MedusaModel\n\n"
        'model = MedusaModel.from_pretrained("path-or-hub-id-of-these-heads")\n'
        "out = model.generate(**inputs, max_new_tokens=256)\n```",
        _data(training.get("data", {})),
        _recipe(training),
        _figures(training),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _adapter(config: MedusaConfig) -> str:
    if config.base_heads is None:
        return ""
    name = Path(config.base_heads).name if Path(config.base_heads).is_absolute() else config.base_heads
    return (
        f"This is an adapter (LoRA) on the heads `{name}`, for one domain of several: `model.load_adapter(folder, "
        '"name")` puts it beside others on those heads, `model.set_adapter("name")` swaps; so do PEFT\'s own calls on '
        "`model.heads`."
    )


def _promise(config: MedusaConfig) -> str:
    if config.target_adapter_hash is None:
        return "They propose tokens; the base model checks them, so its output does not change."
    return "They propose tokens; the *adapted* base model checks them: see below."


def _target(config: MedusaConfig) -> str:
    if config.target_adapter_hash is None:
        return ""
    base, found = config.base_model_name_or_path, config.training.get("target")
    text = (
        f"They were trained together with an adapter (LoRA) on {base} (Medusa-2), which is in `adapter/` and is loaded "
        f"and merged with them. Output is exactly that of the adapted model, *not* that of {base}."
    )
    if found:
        text += (
            f" On {found['positions']} held-out answer tokens its perplexity is {found['perplexity']:.3f}, without the "
            f"adapter {found['perplexity_without']:.3f} ({found['perplexity_change']:+.2%}); the greedy choice is the "
            f"same at {found['same_choice']:.1%} of them."
        )
    return text


def _data(data: dict[str, Any]) -> str:
    if not data:
        return ""
    train, held_out = data["train"], data.get("held_out")
    lines = [
        "## Training data",
        f"{train['conversations']} conversations, {train['answer_tokens']} answer tokens; loss on answers only."
        + (f" Held out: {held_out['conversations']} conversations." if held_out else ""),
        *(f"- source `{name}`: {count} conversations" for name, count in data["sources"].items()),
        *(f"- licence {name}: {count} conversations" for name, count in data["licenses"].items()),
    ]
    return "\n".join([lines[0], "", lines[1], "", *lines[2:]])


def _recipe(training: dict[str, Any]) -> str:
    recipe = training.get("recipe")
    if not recipe:
        return ""
    rows = [f"| {key} | {value} |" for key, value in recipe.items()]
    return "\n".join(["## Recipe", "", "| setting | value |", "|---|---|", *rows])


def _figures(training: dict[str, Any]) -> str:
    if "held_out" not in training:
        return ""
    lines = ["## Measured", ""]
    coverages = {"training": "draft_coverage", "held-out": "held_out_draft_coverage"}
    known = [f"{training[key]:.1%} of the {name} tokens" for name, key in coverages.items() if key in training]
    if known:
        lines.append(f"- the draft vocabulary covers {', '.join(known)}")
    for name in ("top1", "top5"):
        shares = ", ".join(f"{share:.3f}" for share in training["held_out"][name])
        lines.append(f"- held-out top-{name[3:]} by head: {shares}")
    if "overlap" in training["held_out"]:
        shares = ", ".join(f"{share:.3f}" for share in training["held_out"]["overlap"])
        lines.append(f"- held-out overlap with the base model's probabilities by head: {shares}")
    trees = ", ".join(f"{mu:.2f} ({size})" for size, mu in training["expected_mu"].items())
    lines.append(f"- expected μ by draft nodes: {trees}")
    if "base_top1" in training["held_out"]:
        shares = ", ".join(f"{share:.3f}" for share in training["held_out"]["base_top1"])
        lines.append(f"- held-out top-1 by head without the adapter: {shares}")
    measured = training.get("measured")
    if measured:
        lines += _decoder(measured)
    return "\n".join(lines)


def _decoder(measured: dict[str, Any]) -> list[str]:
    """What the decoder did, line by line, and on what; older records hold less."""
    lines = [f"- decoder on {measured['prompts']} held-out prompts: μ {measured['mu']:.3f}, τ {measured['tau']:.3f}"]
    straight = measured.get("without_loops", {})
    if straight.get("looping"):
        kept = f"μ {straight['mu']:.3f}, τ {straight['tau']:.3f}" if "mu" in straight else "none is left"
        lines.append(f"- without the {straight['looping']} answers that end in repetition: {kept}")
    rows = {"of all drafts": "accepted_marginal", "if the node above was": "accepted_conditional"}
    for words, name in rows.items():
        if measured.get(name):
            shares = ", ".join(f"{share:.3f}" for share in measured[name])
            lines.append(f"- accepted at depth 1, 2, … {words}: {shares}")
    for pair, ratio in measured["speedup"].items():
        lines.append(f"- speed {pair}: {ratio['value']:.2f} (95 %: {ratio['low']:.2f} to {ratio['high']:.2f})")
    for pair, same in measured.get("equal", {}).items():
        lines.append(f"- same output {pair}: {same['equal']} of {same['of']}")
    machine = measured.get("machine")
    if machine:
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
        where = f"{machine['device']}, {machine['threads']} threads, {machine['dtype']}; {machine['system']}"
        lines.append(f"- measured on {where}; Python {machine['python']}, {versions}")
    return lines
