"""What was found of architectures, as a page. Knows the findings' form, no models."""

from collections import Counter
from typing import Any

ORDER = ("exact", "refused", "wrong", "HF inconsistent", "not built", "crashed")
MEANINGS = {
    "exact": "greedy and sampled output equal plain `generate`, token for token",
    "refused": "wrapping or decoding ends in an error that says why",
    "wrong": "output differs from plain `generate`: a fault of this library",
    "HF inconsistent": "plain `generate` does not agree with itself with and without a cache, or does not run",
    "not built": "no tiny model could be made, so nothing is known",
    "crashed": "the examination itself failed",
}
HEAD = """# Architectures

Every causal language model that transformers {transformers} maps, as a tiny random float64 model (torch {torch}):
which route its trees are checked on, and whether what comes out is what the model's own `generate` says. Made by
`make architectures`; the same findings are in [architectures.json](architectures.json).

What is compared: prompts of 3, 13 and 29 tokens (windows are 8 wide), 12 new tokens, greedy and sampled with the same
seed, drafted by random trees that hide the answer, by n-gram look-up and by untrained heads.

| verdict | architectures | meaning |
|---|---|---|
{counts}

Of {consistent} architectures that Hugging Face decodes consistently, {exact} are exact.

| route | exact | |
|---|---|---|
{routes}

| architecture | class | route | layers | verdict | reason |
|---|---|---|---|---|---|
"""
ROUTES = {
    "attention interface": "one pass; the tree reaches every layer's attention",
    "4-D mask": "one pass; the tree is a mask for the model's own attention",
    "paths as batch rows": "one pass over all root-to-leaf paths, from copies of the model's own state",
    "levels as batch rows": "a pass of one token for each depth: passes over several would compute otherwise",
    "nodes one by one": "a pass of one token for each node: the state cannot be held for several rows",
}


def table(facts: dict[str, Any]) -> str:
    """The page."""
    lines = facts["architectures"]
    verdicts = Counter(line["verdict"] for line in lines)
    routes = Counter(line["route"] for line in lines if line["verdict"] == "exact")
    head = HEAD.format(
        **facts["versions"],
        counts="\n".join(f"| {name} | {verdicts[name]} | {MEANINGS[name]} |" for name in ORDER),
        consistent=sum(verdicts[name] for name in ("exact", "refused", "wrong")),
        exact=verdicts["exact"],
        routes="\n".join(f"| {name} | {routes[name]} | {words} |" for name, words in ROUTES.items()),
    )
    return head + "".join(_row(line) for line in sorted(lines, key=lambda line: line["architecture"]))


def _row(line: dict[str, Any]) -> str:
    cells = [f"`{line['architecture']}`", line["class"], line["route"] or "", ", ".join(line["kinds"])]
    cells += [line["verdict"], " ".join((line["reason"] or "").split())]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
