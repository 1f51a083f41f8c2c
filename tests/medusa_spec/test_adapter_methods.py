"""MedusaModel's methods for adapters of heads have the names and the sense of those of transformers."""

import inspect

import pytest
from transformers.integrations import PeftAdapterMixin

from medusa_spec import MedusaModel
from medusa_spec.adapter_methods import AdapterMethods

METHODS = [name for name in vars(AdapterMethods) if not name.startswith("_") and callable(vars(AdapterMethods)[name])]


@pytest.mark.parametrize("name", METHODS)
def test_each_method_is_one_of_transformers_models(name: str) -> None:
    assert callable(getattr(PeftAdapterMixin, name))
    assert getattr(MedusaModel, name) is getattr(AdapterMethods, name)


def test_an_adapter_is_named_as_there() -> None:
    for method in (AdapterMethods.load_adapter, PeftAdapterMixin.load_adapter):
        assert "adapter_name" in inspect.signature(method).parameters
