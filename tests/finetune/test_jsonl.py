"""Files of one object a line, in shards."""

from pathlib import Path

import pytest

from medusa_spec.finetune.jsonl import in_shards, read_objects, write_objects


def test_objects_come_back_whatever_stands_in_their_texts(tmp_path: Path) -> None:
    objects = [{"a": "x\u2028y\u0085z\n\r"}, {"a": "ü", "b": [1, None]}]
    write_objects(tmp_path / "a.jsonl", objects)
    assert read_objects(tmp_path / "a.jsonl") == objects


def test_shards_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    def stops(number: int) -> list[dict[str, int]]:
        if number == 2:
            raise KeyboardInterrupt
        return [{"n": number}]

    with pytest.raises(KeyboardInterrupt):
        in_shards(tmp_path / "s", "test", 4, stops)
    written = []
    found = in_shards(tmp_path / "s", "test", 4, lambda number: written.append(number) or [{"n": number}])
    assert written == [2, 3] and found == [{"n": number} for number in range(4)]
