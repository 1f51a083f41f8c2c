"""What a folder of heads says about itself. Knows no weights and no files."""

import json
from dataclasses import dataclass, field
from typing import Any

from medusa_spec.errors import CheckpointError
from medusa_spec.heads import HeadsConfig
from medusa_spec.tree import Growth, PathValues, TreeTemplate

FORMAT_VERSION = 1

OPTIONAL = ("base_heads", "base_heads_hash", "target_adapter_hash")
"""Left out of the file where they say nothing."""


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """The contents of `medusa_config.json`.

    Attributes:
        heads: Kind and shape of the heads.
        base_model_name_or_path: The model that the heads were trained on, as `from_pretrained` takes it.
        base_revision: Its revision; None for the default one.
        lm_head_hash: Names the weights of its LM head; another one on loading is a warning, not an error (heads of a
            base on a fine-tune of it are normal use).
        chat_template_hash: Names the chat template of training; None if no chats were rendered.
        tree: The static tree to draft with; None for a chain of every head's first guess.
        growth: Rules by which trees grow at every step, for heads that can; None drafts with the static tree.
        values: Calibration counts, from which trees of other sizes are chosen; None if not calibrated.
        training: Record of data, recipe and measured figures, for people.
        base_heads: Of an adapter of heads: those that it stands on, as `load_heads` takes them.
        base_heads_hash: Names their weights; others on loading are a warning.
        target_adapter_hash: Of heads that were trained together with an adapter on their target: names its weights,
            which are in `adapter/` beside the heads.
        format_version: Of the folder; a later one than this library's is refused.
    """

    heads: HeadsConfig
    base_model_name_or_path: str | None = None
    base_revision: str | None = None
    lm_head_hash: str | None = None
    chat_template_hash: str | None = None
    tree: TreeTemplate | None = None
    growth: Growth | None = None
    values: PathValues | None = None
    training: dict[str, Any] = field(default_factory=dict)
    base_heads: str | None = None
    base_heads_hash: str | None = None
    target_adapter_hash: str | None = None
    format_version: int = FORMAT_VERSION

    def to_dict(self) -> dict[str, Any]:
        """As plain types, for JSON."""
        values = None
        if self.values is not None:
            values = {
                "total": self.values.total,
                "counts": sorted([list(path), count] for path, count in self.values.counts.items()),
                "singles": [list(ranks) for ranks in self.values.singles],
            }
        optional = {name: getattr(self, name) for name in OPTIONAL}
        return {
            "format_version": self.format_version,
            "base_model_name_or_path": self.base_model_name_or_path,
            "base_revision": self.base_revision,
            "lm_head_hash": self.lm_head_hash,
            "chat_template_hash": self.chat_template_hash,
            "heads": self.heads.to_dict(),
            "tree": None if self.tree is None else self.tree.to_list(),
            "growth": None if self.growth is None else self.growth.to_dict(),
            "values": values,
            "training": self.training,
            **{name: value for name, value in optional.items() if value is not None},
        }

    def to_text(self) -> str:
        """As the text of `medusa_config.json`."""
        return json.dumps(self.to_dict(), ensure_ascii=False) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "MedusaConfig":
        """The inverse of `to_text`.

        Raises:
            CheckpointError: If it is no JSON object, or as for `from_dict`.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"medusa_config.json must be JSON, got {text[:60]!r}: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"medusa_config.json must hold a JSON object, got {type(values).__name__}")
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "MedusaConfig":
        """The inverse of `to_dict`.

        Raises:
            CheckpointError: If the format is of a later version, or a part is missing, unknown or malformed.
        """
        version = values.get("format_version")
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise CheckpointError(
                f"format_version must be 1 to at most {FORMAT_VERSION}, which this version of medusa-spec reads, got "
                f"{version!r}; upgrade medusa-spec"
            )
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            known = sorted(cls.__dataclass_fields__)
            raise CheckpointError(f"medusa_config.json has unknown keys {unknown}; known are {known}")
        try:
            parts = dict(values)
            parts["heads"] = HeadsConfig.from_dict(values["heads"])
            if values.get("tree") is not None:
                parts["tree"] = TreeTemplate.from_list(values["tree"])
            if values.get("growth") is not None:
                parts["growth"] = Growth(**values["growth"])
            if values.get("values") is not None:
                parts["values"] = _read_values(values["values"])
            _check_sizes(parts)
            return cls(**parts)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"medusa_config.json is malformed: {error!r}; restore it or train again") from error


def _check_sizes(parts: dict[str, Any]) -> None:
    for name in ("tree", "values"):
        part, heads = parts.get(name), parts["heads"].num_heads
        if part is not None and part.depth > heads:
            raise ValueError(f"{name} must be at most {heads} deep, one level per head, got depth {part.depth}")
        ranks = parts["heads"].num_draft_tokens
        if part is not None and part.width > ranks:
            raise ValueError(f"{name} must use ranks below {ranks}, the draft vocabulary's size, got {part.width - 1}")


def _read_values(values: dict[str, Any]) -> PathValues:
    return PathValues(
        total=values["total"],
        counts={tuple(path): count for path, count in values["counts"]},
        singles=tuple(tuple(ranks) for ranks in values["singles"]),
    )
