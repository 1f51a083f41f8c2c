"""What a family reads is what is kept."""

from collections.abc import Callable
from pathlib import Path

import pytest

from medusa_spec.finetune import FinetuneConfig
from medusa_spec.finetune.wanted import Wanted, wanted_states


@pytest.mark.parametrize(
    ("kind", "options", "whole", "taps"),
    [
        ("medusa", (), False, ()),
        ("hydra", (), False, ()),
        ("eagle", (), True, ()),
        ("eagle3", ("taps=0,1",), True, (0, 1)),
        ("fused", ("taps=1",), True, (1,)),
    ],
)
def test_heads_that_attend_want_whole_texts_and_some_want_layers(
    kind: str,
    options: tuple[str, ...],
    whole: bool,
    taps: tuple[int, ...],
    make_config: Callable[..., FinetuneConfig],
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path / "run", kind=kind, options=options)
    assert wanted_states(config) == Wanted(whole=whole, taps=taps)
