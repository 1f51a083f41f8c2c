"""T(N) is measured once, kept, and follows what decoding sees."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec import pass_times as module
from medusa_spec.backbone import Backbone
from medusa_spec.pass_times import PassTimes, measure, pass_times
from medusa_spec.testing import tiny

MEASURED = {100: {1: 1.0, 4: 1.2, 16: 2.0}, 1100: {1: 2.0, 4: 2.4, 16: 5.0}}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "cache_directory", lambda: tmp_path)
    return tmp_path / "pass-times"


def test_times_are_linear_in_the_prefix_and_between_sizes():
    times = PassTimes(MEASURED)
    assert times.table(100) == MEASURED[100] and times.table(1100) == MEASURED[1100]
    assert times.table(600) == pytest.approx({1: 1.5, 4: 1.8, 16: 3.5})
    assert times.seconds(10, 100) == pytest.approx(1.6)
    assert times.table(10) == MEASURED[100]  # never less than at the shortest
    assert times.seconds(16, 2100) == pytest.approx(8.0)


def test_one_prefix_stands_for_all():
    assert PassTimes({64: {1: 1.0, 2: 1.5}}).table(5000) == {1: 1.0, 2: 1.5}


@given(st.floats(0.6, 1.9), st.integers(1, 16), st.integers(50, 1500))
def test_times_follow_what_is_seen(factor, size, prefix):
    times = PassTimes(MEASURED)
    seen = times.seconds(size, prefix) * factor
    for _ in range(80):
        times.observe(size, prefix, seen)
    assert times.seconds(size, prefix) == pytest.approx(seen, rel=0.02)


def test_a_machine_that_slows_down_does_it_to_all_sizes():
    times = PassTimes(MEASURED)
    for place in range(300):
        size = (1, 4, 16)[place % 3]
        times.observe(size, 100, 1.5 * MEASURED[100][size])
    assert times.table(100) == pytest.approx({size: 1.5 * seconds for size, seconds in MEASURED[100].items()}, rel=0.03)


def test_an_outlier_moves_little():
    times = PassTimes(MEASURED)
    times.observe(4, 100, 500.0)
    assert times.seconds(4, 100) < 1.2 * 1.2


def test_a_size_beyond_the_measured_ones_is_taken_by_the_last():
    times = PassTimes(MEASURED)
    for _ in range(50):
        times.observe(40, 100, 9.0)
    assert times.seconds(40, 100) > 4.0


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_passes_of_a_model_are_timed_without_reading_a_text(name):
    backbone = Backbone(tiny(name))
    times = measure(backbone, sizes=(1, 3, 9), prefixes=(20, 60))
    assert times.sizes == (1, 3, 9) and all(seconds > 0 for seconds in times.table(40).values())


def test_prefixes_end_where_positions_do():
    backbone = Backbone(tiny("gpt2"))
    longest = backbone.max_length
    assert longest is not None
    times = measure(backbone, sizes=(1, 4), prefixes=(16, longest))
    assert list(times.measured) == [16]
    assert list(measure(backbone, sizes=(1, 4), prefixes=(longest,)).measured) == [longest - 4]


def test_a_machine_is_measured_once(cache, monkeypatch):
    monkeypatch.setattr(module, "PREFIXES", (16,))
    backbone = Backbone(tiny("llama"))
    first = pass_times(backbone, "as it is")
    monkeypatch.setattr(module, "measure", None)
    assert pass_times(backbone, "as it is").measured == first.measured
    assert len(list(cache.iterdir())) == 1


def test_another_preparation_dtype_or_thread_count_is_measured_anew(cache, monkeypatch):
    monkeypatch.setattr(module, "PREFIXES", (16,))
    for model, prepared in (("float64", "a"), ("float32", "a"), ("float32", "b")):
        pass_times(Backbone(tiny("llama").to(getattr(torch, model))), prepared)
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("content", ["", "{}", '{"seconds": {}}', '{"seconds": {"a": 1}}', '{"seconds": []}'])
def test_a_damaged_file_is_measured_anew_and_mended(cache, monkeypatch, content):
    monkeypatch.setattr(module, "PREFIXES", (16,))
    backbone = Backbone(tiny("llama"))
    pass_times(backbone, "x")
    (path,) = cache.iterdir()
    whole = path.read_text()
    path.write_text(content)
    pass_times(backbone, "x")
    assert path.read_text().count("16") and len(path.read_text()) > len(whole) // 2


def test_a_home_that_cannot_be_written_is_no_error(cache, monkeypatch):
    monkeypatch.setattr(module, "PREFIXES", (16,))
    cache.parent.joinpath("pass-times").write_text("a file where the folder should be")
    assert pass_times(Backbone(tiny("llama")), "x").sizes == module.SIZES


def test_times_of_several_rows_are_those_of_as_many_nodes():
    alone = PassTimes({256: {1: 1.0, 2: 1.5, 4: 2.0, 8: 4.0}, 2048: {1: 2.0, 2: 2.5, 4: 3.0, 8: 6.0}})
    assert alone.for_rows(2).measured == {
        256: {1: 1.5, 2: 2.0, 4: 4.0, 8: 8.0},
        2048: {1: 2.5, 2: 3.0, 4: 6.0, 8: 12.0},
    }
    assert alone.for_rows(100).measured[256] == {1: 50.0, 2: 100.0, 4: 200.0, 8: 400.0}


def test_times_of_many_rows_rise_where_those_of_one_were_measured_falling():
    table = PassTimes({256: {1: 1.0, 48: 7.0, 64: 5.0}}).for_rows(16).measured[256]
    assert 0 < table[1] < table[48] < table[64]
