"""Which format a folder is of: by the names of its tensors, never by those of files or models."""

from collections.abc import Callable

from medusa_spec.errors import CheckpointError
from medusa_spec.formats.contents import Contents
from medusa_spec.formats.eagle import eagle_layout
from medusa_spec.formats.eagle3 import eagle3_layout
from medusa_spec.formats.hydra import hydra_layout
from medusa_spec.formats.layout import Layout
from medusa_spec.formats.mlp_speculator import mlp_speculator_layout
from medusa_spec.formats.original import original_layout
from medusa_spec.formats.others import refuse_by_config, refuse_by_names
from medusa_spec.formats.tensorrt_llm import tensorrt_llm_layout
from medusa_spec.formats.vllm import vllm_layout

FORMATS: tuple[Callable[[Contents], Layout | None], ...] = (
    hydra_layout,
    tensorrt_llm_layout,
    vllm_layout,
    original_layout,
    eagle3_layout,
    eagle_layout,
    mlp_speculator_layout,
)


def layout_of(contents: Contents) -> Layout:
    """The layout of the heads in a folder.

    Raises:
        UnsupportedError: If it holds another kind of draft model, naming it.
        CheckpointError: If the heads are not whole, or it holds none.
    """
    refuse_by_config(contents)
    for read in FORMATS:
        layout = read(contents)
        if layout is not None:
            return layout
    refuse_by_names(contents)
    if any(name.startswith("heads.0.") for name in contents.files):
        raise CheckpointError(f"{contents.folder} holds heads of this library without their medusa_config.json")
    raise CheckpointError(
        f"{contents.folder} holds no heads of a known format: its tensors are {sorted(contents.files)[:4]} … "
        f"({len(contents.files)} in all); see docs/formats.md for what can be read"
    )
