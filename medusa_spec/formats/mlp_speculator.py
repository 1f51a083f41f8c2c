"""MLP speculators: `speculator.{emb,proj,ln,head}.{head}.*`, with or without what stands before them."""

import re
from typing import Any

from medusa_spec.errors import CheckpointError
from medusa_spec.formats.contents import Contents
from medusa_spec.formats.layout import Fit, Layout, Shapes, check_names, compare_config, count

FORMAT = "MLP speculator"
PREFIX = "speculator."
PARTS = re.compile(r"(emb|proj|head|ln)\.(?P<head>\d+)\.(weight|bias)")
MARK = re.compile(rf"({re.escape(PREFIX)})?(emb|proj)\.\d+\.weight")
OURS = {
    "token.weight": "emb.{k}.weight",
    "norm.weight": "ln.{k}.weight",
    "norm.bias": "ln.{k}.bias",
    "lm_head.weight": "head.{k}.weight",
}
"""Tensors of a head beside the product of its state, and theirs."""


def mlp_speculator_layout(contents: Contents) -> Layout | None:
    """The layout if these are such heads, else None.

    Raises:
        CheckpointError: If they are, but not whole.
    """
    beside = contents.names_beside(MARK)
    if not beside:
        return None
    found = {name.removeprefix(PREFIX): name for name in beside}
    counted = count(contents, "heads", _numbers(found, "emb"))
    tied = _is_tied(contents, found, counted)
    heads = _told(contents, counted) if tied else counted
    names = _tied_names() if tied else {name: theirs for k in range(heads) for name, theirs in _head(k, k).items()}
    copies = _copies(heads, counted) if tied else {}
    check_names(contents, FORMAT, [*names.values(), *copies], found)
    compare_config(contents, "heads", ["n_predict"], heads)
    return Layout(
        format=FORMAT,
        kind="mlp_speculator",
        num_heads=heads,
        num_layers=1,
        names={ours: found[theirs] for ours, theirs in names.items()},
        own_lm_heads=True,
        copies={found[copy]: found[original] for copy, original in copies.items()},
        fit=_fit(contents, found["proj.0.weight"], tied=tied),
    )


def _numbers(found: dict[str, str], part: str) -> list[int]:
    return [int(match["head"]) for name in found if (match := PARTS.fullmatch(name)) and match[1] == part]


def _head(place: int, k: int) -> dict[str, str]:
    """Our names of a head's tensors to theirs of head k."""
    names = {f"heads.{place}.{ours}": theirs.format(k=k) for ours, theirs in OURS.items()}
    return names | {f"heads.{place}.{'later' if k else 'first'}.weight": f"proj.{k}.weight"}


def _tied_names() -> dict[str, str]:
    """One set for all heads; only the first one's product reads h."""
    return _head(0, 0) | {"heads.0.later.weight": "proj.1.weight"}


def _is_tied(contents: Contents, found: dict[str, str], counted: int) -> bool:
    """Whether one set of weights is meant: the config says so, or only the first head is whole."""
    said = contents.config.get("tie_weights")
    once = counted == 1 and len(_numbers(found, "proj")) > 1
    if said is False and once:
        raise CheckpointError(
            f"{contents.folder}: the config says that heads are not tied, and there are {counted} emb and "
            f"{len(_numbers(found, 'proj'))} proj; the checkpoint is incomplete"
        )
    return once or (said is True and counted > 1)


def _told(contents: Contents, counted: int) -> int:
    """K of tied heads: where they are written once only the config knows it."""
    said = contents.config.get("n_predict")
    if counted > 1:
        return counted
    if type(said) is not int or said < 2:
        raise CheckpointError(
            f"{contents.folder}: the config must say n_predict, 2 or more, since the heads are tied and written once, "
            f"got {said!r}"
        )
    return said


def _copies(heads: int, counted: int) -> dict[str, str]:
    """Further copies of tied tensors, where they are written, to the first ones."""
    if counted == 1:
        return {}
    found = {theirs.format(k=k): theirs.format(k=0) for theirs in OURS.values() for k in range(1, heads)}
    return found | {f"proj.{k}.weight": "proj.1.weight" for k in range(2, heads)}


def _fit(contents: Contents, first: str, *, tied: bool) -> Fit:
    config = contents.config

    def fit(shapes: Shapes, hidden_size: int, layers: int | None) -> dict[str, Any]:
        inner, scaled = shapes[first][0], config.get("scale_input", False)
        if type(scaled) is not bool or not ("scale_input" in config or "n_predict" in config):
            raise CheckpointError(
                f"{contents.folder} must hold a config.json that says scale_input, true or false, got "
                f"{config.get('scale_input')!r}; it cannot be read off the tensors"
            )
        if config.get("inner_dim"):  # 0 stands for emb_dim
            compare_config(contents, "inner entries", ["inner_dim"], inner)
        return {"inner_size": inner, "tied": tied, "scale_input": scaled, "own_embedding": True, "direct": True}

    return fit
