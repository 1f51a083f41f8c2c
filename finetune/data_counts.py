"""Adds up what becomes of records, so that nothing is left out in silence. Knows records and masks, writes nothing."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from medusa_spec.errors import DataError
from medusa_spec.finetune.chat import Rendered
from medusa_spec.finetune.loops import loops
from medusa_spec.finetune.records import Record

EXAMPLES = 5


def looping_spans(rendered: Rendered, length: int) -> list[tuple[int, int]]:
    """The trained answers that end in repetition within the first `length` tokens."""
    cut = [(start, min(end, length)) for start, end in rendered.spans if start < length]
    return [(start, end) for start, end in cut if loops(rendered.input_ids[start:end])]


class DataCounts:
    """Counts of one data stage."""

    def __init__(self) -> None:
        self.conversations: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.forms: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.licenses: Counter[str] = Counter()
        self.template: Counter[str] = Counter()
        self.unusable: list[DataError] = []
        self._seen: set[bytes] = set()

    def is_new(self, ids: Sequence[int], mask: Sequence[bool]) -> bool:
        """Whether no conversation before had the same tokens and mask; notes this one."""
        name = hashlib.sha256(repr((ids, mask)).encode()).digest()
        new = name not in self._seen
        self._seen.add(name)
        self.conversations["duplicates"] += not new
        return new

    def add(self, record: Record, rendered: Rendered, length: int, looping: int) -> None:
        """A conversation that is kept, of which the first `length` tokens are read and `looping` answers repeat
        themselves."""
        self.forms[record.form] += 1
        self.sources[record.source or "not given"] += 1
        self.licenses[record.license or "not given"] += 1
        self.template.update(rendered.notes)
        self.conversations["unfinished"] += not record.finished
        self.answers["read"] += rendered.answers
        self.answers["cut"] += sum(end > length for _, end in rendered.spans)
        self.answers["weightless"] += rendered.weightless
        self.answers["rewritten"] += rendered.rewritten
        self.answers["looping"] += looping

    def to_dict(self) -> dict[str, Any]:
        """For the manifest."""
        found = {name: self.conversations[name] for name in ("cut", "skipped", "duplicates", "unfinished")}
        return found | {
            "answers": {name: self.answers[name] for name in ("read", "cut", "weightless", "rewritten", "looping")},
            "forms": dict(self.forms),
            "sources": dict(self.sources),
            "licenses": dict(self.licenses),
            "template": dict(self.template),
            "unusable": {"records": len(self.unusable), "first": [str(error) for error in self.unusable[:EXAMPLES]]},
        }
