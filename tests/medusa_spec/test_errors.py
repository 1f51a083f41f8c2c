import inspect

import pytest

from medusa_spec import errors

BUILT_IN = {
    errors.ConfigError: ValueError,
    errors.UnsupportedError: ValueError,
    errors.CheckpointError: ValueError,
    errors.DataError: ValueError,
    errors.AttachError: RuntimeError,
}


@pytest.mark.parametrize("error", BUILT_IN, ids=lambda error: error.__name__)
def test_each_error_is_caught_as_this_librarys_and_as_the_built_in_one(error: type[Exception]) -> None:
    for expected in (errors.MedusaError, BUILT_IN[error]):
        with pytest.raises(expected, match="why"):
            raise error("why")


def test_every_error_of_the_file_is_listed_here() -> None:
    found = {cls for _, cls in inspect.getmembers(errors, inspect.isclass)}
    assert found == {errors.MedusaError, *BUILT_IN}
