"""What MedusaModel does with adapters of its heads, by the names that transformers has for those of models."""

import os

from medusa_spec import head_adapters
from medusa_spec.adapters import active_adapters
from medusa_spec.checkpoint import heads_folder
from medusa_spec.errors import ConfigError
from medusa_spec.heads import DraftHeads


class AdapterMethods:
    """Methods for adapters of `heads`, several for one set of heads: loaded, swapped and unloaded while nothing else is
    touched.

    The next `generate` drafts with what is active then, by the adapter's own tree. PEFT's own calls on `model.heads` do
    the same. Output never depends on any of it. Adapters of the *target* are loaded before it is wrapped.
    """

    heads: DraftHeads | None

    def load_adapter(self, name_or_path: str | os.PathLike[str], adapter_name: str = "default") -> None:
        """Loads an adapter of the heads beside those that are there, and makes it the active one.

        Args:
            name_or_path: Folder or hub id.
            adapter_name: By which it is swapped.

        Raises:
            CheckpointError: If it is not an adapter of heads, or not of heads of this shape.
            ConfigError: If there is one of that name, or there are no heads.
        """
        head_adapters.load_adapter(self._adapted_heads(), heads_folder(name_or_path), adapter_name)

    def set_adapter(self, adapter_name: str) -> None:
        """Makes a loaded adapter the active one, disabled ones or not."""
        head_adapters.activate(self._adapted_heads(), adapter_name)

    def disable_adapters(self) -> None:
        """Drafts with the heads alone until `enable_adapters` or `set_adapter`; adapters stay loaded."""
        head_adapters.enable(self._adapted_heads(), False)

    def enable_adapters(self) -> None:
        """Drafts with the adapter that was active before `disable_adapters`."""
        head_adapters.enable(self._adapted_heads(), True)

    def delete_adapter(self, adapter_name: str) -> None:
        """Unloads an adapter; after the last one the heads are as they were loaded."""
        head_adapters.delete(self._adapted_heads(), adapter_name)

    def active_adapters(self) -> list[str]:
        """Names of the adapters that the heads draft with."""
        return active_adapters(self._adapted_heads())

    def _adapted_heads(self) -> DraftHeads:
        if self.heads is None:
            raise ConfigError("adapters are for heads, and this model has none; wrap it with heads=...")
        return self.heads
