"""Repetition in answers."""

from medusa_spec.finetune.loops import loops


def test_loops_are_seen_and_prose_is_not() -> None:
    assert loops(list(range(50)) + [1, 2, 3] * 30)
    assert not loops(list(range(200)))
    assert not loops([1, 2, 3])
    assert not loops([1, 2, 3] * 30 + list(range(64)))
