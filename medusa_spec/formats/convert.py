"""Foreign heads as those of this library, for a given target. Knows no format: see the layouts."""

import math
import warnings
from pathlib import Path
from typing import Any

import torch

from medusa_spec.backbone import Backbone
from medusa_spec.config import MedusaConfig
from medusa_spec.errors import CheckpointError
from medusa_spec.formats.contents import Contents, read_contents
from medusa_spec.formats.detect import layout_of
from medusa_spec.formats.layout import Layout
from medusa_spec.formats.rows import Rows, read_rows
from medusa_spec.heads import HeadsConfig, Projection, TokenEmbedding, make_heads
from medusa_spec.tree import chain_template

ROUNDING = 2.0**-7
"""How far numbers of copies of one matrix may lie apart, relatively: by what rounding to bfloat16 does."""

State = dict[str, torch.Tensor]


def foreign_target(folder: Path) -> tuple[str | None, bool]:
    """Name of the target that foreign heads in a folder are for, None if they name none; and whether it is there, too.

    Raises:
        CheckpointError: If the folder holds no heads that can be read.
        UnsupportedError: If it holds another kind of draft model.
    """
    contents = read_contents(folder)
    return _base(contents), layout_of(contents).with_target


def read_foreign(folder: Path, backbone: Backbone) -> tuple[MedusaConfig, State]:
    """Heads of any known format, as `load_heads` would have found them in a folder of this library.

    Args:
        folder: A checkpoint that is not this library's.
        backbone: The target.

    Returns:
        Their config, without tree and calibration, and their tensors under our names.

    Raises:
        CheckpointError: If they are damaged, incomplete, or do not fit the target.
        UnsupportedError: If the folder holds another kind of draft model.
    """
    contents = read_contents(folder)
    layout = layout_of(contents)
    read = contents.read(layout.names.values())
    rows = read_rows(contents, layout, backbone.vocab_size)
    projection, embedding = backbone.projection(), backbone.embedding()
    one = _one_lm_head(contents, layout, rows, projection.rows(rows.ids))
    own = layout.own_lm_heads or one is not None
    try:
        config = HeadsConfig(
            hidden_size=backbone.hidden_size,
            vocab_size=backbone.vocab_size,
            kind=layout.kind,
            num_heads=layout.num_heads,
            num_layers=layout.num_layers,
            lm_head="own" if own else "shared",
            lm_head_bias=layout.lm_head_bias if own else None,
            draft_vocab_size=None if rows.ids is None else len(rows.ids),
            residual=layout.residual,  # type: ignore[arg-type]  # HeadsConfig checks it
            options=_options(layout, read, backbone),
        )
        shapes = _shapes(config, projection.rows(rows.ids), rows, embedding)
    except ValueError as error:
        raise CheckpointError(f"{contents.folder}, {layout.format} heads: {error}") from error
    state = _state(contents, layout, read, rows, one, shapes)
    _match_scales(layout.kind, state, layout.logit_scale / projection.scale, embedding.scale)
    _compare_embedding(contents, layout, embedding)
    _compare_copies(contents, layout)
    base = backbone.model.config.name_or_path or None if layout.with_target else _base(contents)
    tree = None if layout.chain is None else chain_template(layout.chain)
    training = {"format": layout.format}
    return MedusaConfig(heads=config, base_model_name_or_path=base, tree=tree, training=training), state


def _options(layout: Layout, read: State, backbone: Backbone) -> dict[str, Any]:
    """The family's options, which are found from shapes and the target's sizes."""
    if layout.fit is None:
        return {}
    shapes = {name: tuple(tensor.shape) for name, tensor in read.items()}
    return layout.fit(shapes, backbone.hidden_size, getattr(backbone.config, "num_hidden_layers", None))


def _base(contents: Contents) -> str | None:
    """The target's name in the config."""
    name = contents.config.get("base_model_name_or_path")
    speculators = contents.config.get("speculators_config")
    if isinstance(speculators, dict) and isinstance(speculators.get("verifier"), dict):
        name = speculators["verifier"].get("name_or_path")
    return name if isinstance(name, str) and name else None


def _one_lm_head(contents: Contents, layout: Layout, rows: Rows, projection: Projection) -> torch.Tensor | None:
    """The LM head that all heads read, None if it is the target's, which then serves."""
    if layout.one_lm_head is None:
        return None
    found = contents.read([layout.one_lm_head])[layout.one_lm_head]
    if projection.bias is not None or rows.of(found).shape != projection.weight.shape:
        return found
    return None if _same(rows.of(found), projection.weight) else found


def _shapes(
    config: HeadsConfig, projection: Projection, rows: Rows, embedding: TokenEmbedding
) -> dict[str, torch.Size]:
    """What each tensor must be, without memory for any."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("meta")

    with torch.device("meta"):
        heads = make_heads(config, projection.map(empty), rows.ids, embedding.map(empty))
    return {name: tensor.shape for name, tensor in heads.state_dict().items()}


def _same(found: torch.Tensor, own: torch.Tensor) -> bool:
    return torch.allclose(found.float(), own.to("cpu", torch.float32), rtol=ROUNDING, atol=1e-6)


def _state(
    contents: Contents,
    layout: Layout,
    read: State,
    rows: Rows,
    one: torch.Tensor | None,
    shapes: dict[str, torch.Size],
) -> State:
    names = layout.names
    state: State = {} if rows.ids is None else {"draft_ids": rows.ids}
    for ours, shape in shapes.items():
        if ours in state:
            continue
        if ours in names:
            tensor, theirs = read[names[ours]], names[ours]
        elif one is not None and ours.endswith("lm_head.weight"):
            tensor, theirs = one, str(layout.one_lm_head)
        else:
            assert not layout.biases and ours.endswith(".linear.bias"), f"{layout.format} must hold {ours}"
            tensor, theirs = torch.zeros(shape), ours
        if ".lm_head." in ours:
            tensor = rows.of(tensor)
        _check(contents, theirs, tensor, shape)
        state[ours] = tensor
    return state


def _check(contents: Contents, name: str, tensor: torch.Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape:
        base = _base(contents)
        raise CheckpointError(
            f"{contents.folder}: {name} must have shape {tuple(shape)} for this target, got {tuple(tensor.shape)}; the "
            f"heads are for another model{f' ({base})' if base else ''}"
        )
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise CheckpointError(
            f"{contents.folder}: {name} must hold floating-point numbers of 16 bits or more, got {tensor.dtype}; "
            "quantised heads are not read"
        )
    if not tensor.isfinite().all():
        raise CheckpointError(f"{contents.folder}: {name} is not finite; restore the file")


READS_EMBEDDINGS = {"hydra": (".first.weight", ".residual.weight"), "eagle": (".fc.weight",)}
"""Families whose products read the target's embeddings as they are, and the names of those. EAGLE-3 norms them."""


def _match_scales(kind: str, state: State, logits: float, embeddings: float) -> None:
    """Puts into the weights what the checkpoint's own code does to logits and embeddings otherwise than this target."""
    for name, tensor in state.items():
        if ".lm_head." in name and not math.isclose(logits, 1.0, rel_tol=1e-6):
            state[name] = (tensor.double() * logits).to(tensor.dtype)
        if name.endswith(READS_EMBEDDINGS.get(kind, ())) and embeddings != 1.0:
            first, behind = tensor[:, : len(tensor)].double(), tensor[:, len(tensor) :].double()
            if kind == "eagle":  # which has the embedding first, the others h
                first = first / embeddings
            else:
                behind = behind / embeddings
            state[name] = torch.cat([first, behind], dim=1).to(tensor.dtype)


def _compare_embedding(contents: Contents, layout: Layout, embedding: TokenEmbedding) -> None:
    """A copy of the target's input embeddings is not kept, but it must be one."""
    if layout.embedding is None:
        return
    found = contents.read([layout.embedding])[layout.embedding]
    if found.shape != embedding.weight.shape:
        raise CheckpointError(
            f"{contents.folder}: {layout.embedding} must have the shape of the target's input embeddings, "
            f"{tuple(embedding.weight.shape)}, got {tuple(found.shape)}; the heads are for another model"
        )
    if not _same(found, embedding.weight):
        warnings.warn(
            f"{contents.folder}: {layout.embedding} differs from the target's input embeddings, which are used. Output "
            "stays exactly the target's; acceptance may be lower: use the model that the heads were made for, or "
            "fine-tune them on this one",
            stacklevel=2,
        )


def _compare_copies(contents: Contents, layout: Layout) -> None:
    """What is written several times must say the same each time."""
    read = contents.read([*layout.copies, *layout.copies.values()])
    for name, original in layout.copies.items():
        if not torch.equal(read[name], read[original]):
            raise CheckpointError(
                f"{contents.folder}: {name} must be a copy of {original}, as the heads are tied, but they differ; the "
                "checkpoint is damaged, or its config is that of another"
            )
