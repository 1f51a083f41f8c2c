"""Heads in a folder that another engine reads, written, read back and compared. Knows no format's names."""

import copy
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from medusa_spec.adapters import merged_copy
from medusa_spec.checkpoint import load_heads
from medusa_spec.errors import CheckpointError, ConfigError, UnsupportedError
from medusa_spec.files import read_json, write_json, write_tensors
from medusa_spec.formats import CONFIG_FILE
from medusa_spec.formats.eagle_export import engine_eagle, engine_eagle3
from medusa_spec.formats.exported import Exported
from medusa_spec.formats.medusa_export import original_medusa, proposer_medusa, universal_medusa
from medusa_spec.heads import DraftHeads

if TYPE_CHECKING:
    from medusa_spec.model import MedusaModel

Writer = Callable[[DraftHeads, Any], Exported]

FORMATS: dict[str, dict[str, Writer]] = {
    "vllm": {"medusa": universal_medusa, "eagle": engine_eagle, "eagle3": engine_eagle3},
    "vllm-class": {"medusa": proposer_medusa},
    "original": {"medusa": original_medusa},
}
"""Names of formats to families to what writes them."""

MARK = "exported_by"
"""Key of the config by which a folder is known as one of these, which may be written again."""
ROUNDING = 1e-5
"""What float32 sums in another order may differ by, relative to the largest logit."""
TOKENS = 48
"""Length of the text on which heads are compared."""


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was exported.

    Attributes:
        folder: Where it is.
        format: Its name, for people.
        difference: Largest difference between logits of the heads and of what was read back, relative to the largest
            logit; 0 where no number was changed on the way.
        same_guesses: Every first guess is that of the heads.
        notes: What the user has to know.
    """

    folder: Path
    format: str
    difference: float
    same_guesses: bool
    notes: tuple[str, ...]


def export_heads(model: "MedusaModel", folder: str | Path, *, to: str = "vllm") -> ExportReport:
    """Writes a model's heads as another engine reads them; they are there when they were read back as what they are.

    Args:
        model: With its heads; an adapter of theirs that is active goes along, merged.
        folder: Made; if it exists it must be empty, or an earlier export.
        to: `vllm`: Medusa heads for vLLM 0.27 to 0.32 and TGI, EAGLE and EAGLE-3 heads for vLLM; `original`:
            Medusa heads in the authors' layout; `vllm-class`: Medusa heads and a class that vLLM 0.32 and 0.33 draft
            with.

    Raises:
        ConfigError: If there is no such format, nothing to export, or something else in the folder.
        UnsupportedError: If the format cannot carry what the heads are; the message says what it is.
        CheckpointError: If what was read back is not what was written; the folder is as it was before.
    """
    if model.heads is None:
        raise ConfigError(f"there are no heads to export: the drafter is {model.drafter.name!r}")
    heads, folder = merged_copy(model.heads, model.heads.projection, model.heads.embedding), Path(folder)
    exported = _writer(heads, to)(heads, model.backbone)
    config = exported.config | {"base_model_name_or_path": _base(model), MARK: "medusa-spec"}
    _check_folder(folder, {exported.file, CONFIG_FILE, *exported.beside})
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        write_tensors(fresh / exported.file, exported.tensors, metadata={"format": "pt"})
        write_json(fresh / CONFIG_FILE, config)
        for name, source in exported.beside.items():
            shutil.copyfile(source, fresh / name)
        difference, same = _compare(model, heads, fresh, exported)
        if folder.exists():
            shutil.move(folder, Path(scratch) / "before")
        fresh.rename(folder)
    notes = exported.notes
    if model.backbone.adapters or model.target_adapter is not None:
        notes += ("the heads are for the target with its adapter, which the engine must be given, too",)
    return ExportReport(folder=folder, format=exported.format, difference=difference, same_guesses=same, notes=notes)


def _writer(heads: DraftHeads, to: str) -> Writer:
    if to not in FORMATS:
        raise ConfigError(f"to must be one of {', '.join(FORMATS)}, got {to!r}")
    found = FORMATS[to].get(heads.config.kind)
    if found is None:
        raise UnsupportedError(
            f"{to!r} carries {', '.join(FORMATS[to])} heads, got {heads.config.kind} heads, which that engine does not "
            f"know; train some: medusa-spec finetune --kind {next(iter(FORMATS[to]))}"
        )
    return found


def _base(model: "MedusaModel") -> str:
    named = model.medusa_config.base_model_name_or_path if model.medusa_config is not None else None
    name = named or model.target.config.name_or_path
    if not name:
        raise ConfigError(
            "the heads must name their target, which engines load beside them, got none; load the target by folder or "
            "hub id"
        )
    return str(name)


def _check_folder(folder: Path, known: set[str]) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    config = read_json(folder / CONFIG_FILE) if folder.is_dir() and CONFIG_FILE in found else {}
    if not found <= known or not isinstance(config, dict) or MARK not in config:
        raise ConfigError(
            f"{folder} must be new, empty or an earlier export, got {sorted(found)[:4]}; engines read every file of "
            "weights in a folder: name another"
        )


@torch.no_grad()
def _compare(model: "MedusaModel", heads: DraftHeads, folder: Path, exported: Exported) -> tuple[float, bool]:
    """Reads an export back and compares its logits on a text with those of the heads it was made of."""
    backbone = model.backbone
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        again, _ = load_heads(folder, backbone, dtype=torch.float32)
    told = [str(warning.message) for warning in seen if str(folder) in str(warning.message)]
    if told:  # the reader's own, for which our files must give no reason
        raise CheckpointError(f"what was exported reads otherwise than it was written: {told[0]}; it was not kept")
    own = copy.deepcopy(heads).float()
    expected, got = (_logits(some, model, min(own.config.num_heads, again.config.num_heads)) for some in (own, again))
    ids = None if own.draft_ids is None else own.draft_ids.to(got.device)
    inside = got if ids is None or again.draft_ids is not None else got[..., ids]
    rounding = ROUNDING + 2 * torch.finfo(next(heads.parameters()).dtype).eps
    difference = float((inside - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not difference <= rounding:
        raise CheckpointError(
            f"logits of the export must be those of the heads to {rounding:.1g} of the largest, got a difference of "
            f"{difference:.3g}; it was not kept"
        )
    same = exported.same_guesses
    if same and not _same_guesses(expected, got, inside, rounding):
        raise CheckpointError("first guesses of the export must be those of the heads, got others; it was not kept")
    return difference, same


def _same_guesses(expected: torch.Tensor, got: torch.Tensor, inside: torch.Tensor, rounding: float) -> bool:
    """Whether nothing outside the draft vocabulary is likeliest, and inside it the same token, ties left out."""
    top = expected.topk(2, dim=-1).values
    clear = top[..., 0] - top[..., 1] > 2 * rounding * expected.abs().max()
    return bool((got.amax(-1) <= inside.amax(-1)).all() and (expected.argmax(-1) == inside.argmax(-1))[clear].all())


def _logits(heads: DraftHeads, model: "MedusaModel", steps: int) -> torch.Tensor:
    """Draft logits [K, T, draft vocabulary] on a text of random tokens, in float32."""
    backbone, count = model.backbone, heads.config.num_heads
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, backbone.ids_below, (1, TOKENS + count), generator=generator).to(backbone.device)
    states = backbone.states(ids[:, :TOKENS], taps=heads.taps)
    device = heads.projection.weight.device
    tokens = ids[:, 1:].unfold(1, count, 1)[:, :TOKENS].to(device)
    h = states.h.to(device, torch.float32)
    layers = None if states.layers is None else states.layers.to(device, torch.float32)
    features = heads.features(h, tokens, layers, steps) if heads.attends else heads.features(h)  # type: ignore[call-arg]
    return torch.stack([heads.head(k).logits(z, heads.projection)[0] for k, z in enumerate(features[:steps])])
