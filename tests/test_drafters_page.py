"""docs/drafters.md is true: its drafter decodes what the target says, in fewer passes where the text has its period."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec import MedusaModel
from medusa_spec.testing import tiny_model

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "drafters.md").read_text(encoding="utf-8")


def names_of_the_page() -> dict[str, Any]:
    (body,) = re.findall(r"^```python\n(# period\.py\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(body, "docs/drafters.md: period.py", "exec"), names)
    return names


@pytest.mark.parametrize("period", [1, 3, 7])
@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_what_was_so_many_tokens_ago_is_proposed(period: int, nodes: int) -> None:
    session = names_of_the_page()["PeriodDrafter"](period, nodes).begin(list(range(6)))
    session.observe([6])
    count = min(period, nodes) if period <= 7 else 0
    assert session.draft(6, None, None).tokens == (6, *range(7 - period, 7 - period + count))
    assert session.draft(6, None, 0).tokens == (6,)


def test_the_page_s_drafter_changes_no_token() -> None:
    target = tiny_model().double()
    ids = torch.tensor([[3, 4, 5, 6, 3, 4, 5, 6]])
    plain = target.generate(ids, do_sample=False, max_new_tokens=30)
    model = MedusaModel(target, drafter=names_of_the_page()["PeriodDrafter"](4), probe=False)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=30), plain)
    assert model.last_stats is not None and model.last_stats.drafted_passes > 0
