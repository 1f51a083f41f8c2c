"""Fixtures for every test: no network, fixed seeds, and the real model for tests marked `real`.

Tests use tiny random models from configs; only those marked `real` ask for `real_model_path`.
"""

import os

# Before the first import of huggingface_hub, which reads it once: no test may depend on a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import random  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# Processes side by side share the cores: two that each take all of them wait for each other.
if (_workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    _threads = max(1, (os.cpu_count() or 1) // _workers)
    os.environ["OMP_NUM_THREADS"] = str(_threads)  # for processes that tests start
    torch.set_num_threads(_threads)

# A first forward pass takes seconds and later ones do not: time is no law of this library.
settings.register_profile(
    "medusa-spec",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("medusa-spec")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _reproducible() -> Iterator[None]:
    """Trees do not depend on what the clock says, except in tests that ask for `speculation="auto"`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medusa_spec.speculation.DEFAULT", "fixed")
        yield


@pytest.fixture(autouse=True, scope="session")
def _nothing_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Times that are measured in this process are not kept among the user's."""
    folder = tmp_path_factory.mktemp("times")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medusa_spec.pass_times.cache_directory", lambda: folder)
        yield


@pytest.fixture(scope="session")
def repository_root() -> Path:
    """The folder that holds pyproject.toml."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def real_model_path() -> Path:
    """The default model's folder. Where it cannot be had the test fails and names the remedy."""
    from medusa_spec.default_model import ModelNotFoundError, default_model_path

    try:
        return default_model_path()
    except ModelNotFoundError as error:
        pytest.fail(f"{error} Or leave these tests out: `make test-quick`.", pytrace=False)
