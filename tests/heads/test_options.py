"""Options are known by name and type before anything is made of them."""

from dataclasses import dataclass

import pytest

from medusa_spec.heads.options import NoOptions, StateOptions, parse_options, read_options


@dataclass(frozen=True, kw_only=True)
class Many:
    """Of every type."""

    width: int | None = None
    share: float = 0.5
    deep: bool = False
    name: str = "a"


def test_what_is_left_out_keeps_its_default():
    assert read_options(Many, {"width": 3, "deep": True}, "many") == Many(width=3, deep=True)
    assert read_options(Many, {}, "many") == Many()
    assert read_options(Many, {"width": None}, "many").width is None


def test_an_integer_may_stand_for_a_float_and_nothing_else():
    share = read_options(Many, {"share": 3}, "many").share
    assert share == 3.0 and type(share) is float
    with pytest.raises(ValueError, match="share of many heads must be float, got True"):
        read_options(Many, {"share": True}, "many")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"widht": 3}, r"options of many heads must be among \['deep', 'name', 'share', 'width'\], got 'widht'"),
        ({"width": True}, "width of many heads must be int or None, got True"),
        ({"width": "3"}, "width of many heads must be int or None, got '3'"),
        ({"deep": 1}, "deep of many heads must be bool, got 1"),
        ({"share": None}, "share of many heads must be float, got None"),
    ],
)
def test_a_wrong_name_or_type_is_named(values, words):
    with pytest.raises(ValueError, match=words):
        read_options(Many, values, "many")


def test_a_family_without_options_knows_none():
    with pytest.raises(ValueError, match=r"among \[\], got 'tied'"):
        read_options(NoOptions, {"tied": True}, "medusa")


@pytest.mark.parametrize("size", [0, -4])
def test_a_width_is_positive(size):
    with pytest.raises(ValueError, match=f"inner_size must be an integer of 1 or more, or None, got {size}"):
        StateOptions(inner_size=size)


def test_written_options_have_the_types_they_look_like():
    written = ["width=3", "share=0.25", "deep=true", "name=b", "other=None", "more=False"]
    found = {"width": 3, "share": 0.25, "deep": True, "name": "b", "other": None, "more": False}
    assert parse_options(written) == found
    assert [type(value) for value in parse_options(written).values()] == [type(value) for value in found.values()]


def test_an_option_without_a_value_is_refused():
    with pytest.raises(ValueError, match="must be written name=value, got 'tied'"):
        parse_options(["tied"])
