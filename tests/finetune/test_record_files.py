"""Values in files, folders and data sets."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from medusa_spec.errors import DataError
from medusa_spec.finetune.record_files import DataName, read_values, without_nulls

ROWS = [{"prompt": f"Q{n}", "completion": "A"} for n in range(5)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data sets that are loaded keep their copies here."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def values(name: Any, limit: int | None = None) -> list[Any]:
    return [value for _, value in read_values(str(name), limit)]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_reads_as_its_lines(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "a.json"
    path.write_text("\n " + json.dumps(ROWS, indent=indent))
    with gzip.open(tmp_path / "b.json.gz", "wt") as file:
        file.write(path.read_text())
    assert values(path) == values(tmp_path / "b.json.gz") == ROWS
    assert [place for place, _ in read_values(str(path))][4] == f"{path}:5"


def test_a_json_file_of_lines_is_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + "\n".join(map(json.dumps, ROWS)).encode())
    assert values(tmp_path / "a.json") == ROWS


def test_an_array_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS)[:-9])
    with pytest.raises(DataError, match=r"a\.json must be a JSON array"):
        values(tmp_path / "a.json")


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json"])
def test_a_folder_of_files_reads_as_they_do(tmp_path: Path, kind: str) -> None:
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "set"
    folder.mkdir()
    for part, rows in (("0", ROWS[:3]), ("1", ROWS[3:])):
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"train-{part}.parquet")
        else:
            text = json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"train-{part}.{kind}").write_text(text)
    assert values(folder) == values(f"{folder}:train") == ROWS
    assert values(f"{folder}:train[1:3]") == ROWS[1:3]
    assert values(folder, limit=4) == ROWS[:4]
    with pytest.raises(DataError, match="neither a file nor a data set.*test"):
        values(f"{folder}:test")


def test_a_data_set_saved_to_disk_is_read_with_its_splits(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list(ROWS)
    rows.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": rows, "test": rows.select([4])}).save_to_disk(str(tmp_path / "two"))
    assert values(tmp_path / "one") == values(tmp_path / "two") == ROWS
    assert values(f"{tmp_path / 'two'}:test") == ROWS[4:]
    with pytest.raises(DataError, match="neither a file nor a data set.*none"):
        values(f"{tmp_path / 'two'}:none")


def test_a_table_has_no_fields_that_only_other_rows_have(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    calls = [{"name": "f", "arguments": {"city": "Oslo"}}, {"name": "g", "arguments": {"amount": 3}}]
    rows = [{"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]} for call in calls]
    rows.append({"messages": [{"role": "assistant", "content": "A"}]})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet") == rows
    assert without_nulls({"a": [{"b": None, "value": None}], "c": None}) == {"a": [{"value": None}]}


NAMES = {
    "org/set": ("org/set", None, "train"),
    "org/set:test": ("org/set", None, "test"),
    "org/set:en:test": ("org/set", "en", "test"),
    "org/set:train[:100]": ("org/set", None, "train[:100]"),
    "org/set:en:train[5:100]": ("org/set", "en", "train[5:100]"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_data_set_configuration_and_split(name: str) -> None:
    parsed = DataName.parse(name)
    assert (parsed.name, parsed.configuration, parsed.split) == NAMES[name]


@pytest.mark.parametrize("name", ["org/set:a:b:c", "org/set:", "org/set::train"])
def test_a_name_of_other_parts_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="name:split"):
        DataName.parse(name)


def test_a_file_whose_name_has_a_colon_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "a:b:c:d.jsonl").write_text(json.dumps(ROWS[0]))
    assert values(tmp_path / "a:b:c:d.jsonl") == ROWS[:1]


@pytest.mark.parametrize("passed", ["extra.jsonl", "below/extra.jsonl", "extra.parquet"])
def test_a_folder_of_which_a_part_would_be_passed_by_is_refused(tmp_path: Path, passed: str) -> None:
    """`datasets` reads files that are named after a split, or else those of one format."""
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train-a.jsonl").write_text('{"a": 1}\n')
    (folder / "dataset_infos.json").write_text("{}")
    assert values(folder) == [{"a": 1}]
    (folder / passed).parent.mkdir(exist_ok=True)
    if passed.endswith("parquet"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"a": 2}]), folder / passed)
    else:
        (folder / passed).write_text('{"a": 2}\n')
    with pytest.raises(DataError, match=f"1 files that would not be read with the others, .*{passed}"):
        values(folder)
