"""The data-size curve as a picture."""

from pathlib import Path

import pytest

from medusa_spec.finetune import plots
from medusa_spec.finetune.curve_plot import draw_curve

POINTS = [
    {"answer_tokens": tokens, "expected_mu": [0.1 * size for size in range(16)], "top1": [0.5, 0.3]}
    for tokens in (2000, 1000)
]


def test_the_curve_is_an_image(tmp_path: Path) -> None:
    assert draw_curve(POINTS, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert not draw_curve(POINTS, tmp_path / "curve.png") and not list(tmp_path.iterdir())
