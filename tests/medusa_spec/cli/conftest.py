"""A tiny model in a folder, for commands."""

from pathlib import Path

import pytest

from medusa_spec.testing import save_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random model and its tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
