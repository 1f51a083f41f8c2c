"""The preview of the mask."""

import json
from collections.abc import Callable
from pathlib import Path

from medusa_spec.finetune import FinetuneConfig, preview
from medusa_spec.finetune.mask_preview import BRACKETS, COLOUR


def test_the_preview_marks_the_answers(make_config: Callable[..., FinetuneConfig], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Q{n}", "completion": "Yes ok"}) + "\n" for n in range(5)))
    config = make_config(tmp_path / "run", data=(str(path),))
    shown = preview(config, limit=2, colour=False)
    opening, closing = BRACKETS
    for n in (0, 1):
        assert f"Q{n}<|im_end|>\n<|im_start|>assistant\n{opening}Yes ok<|im_end|>{closing}\n" in shown
    assert "Q2" not in shown and f"{path}:1: 7 of " in shown
    assert COLOUR[0] in preview(config, colour=True)
    assert not (tmp_path / "run").exists()
