"""What a route offers to the loop: a cache, reading, verifying. Knows no model."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from medusa_spec.target_output import TargetOutput

if TYPE_CHECKING:
    from medusa_spec.backbone import Backbone
    from medusa_spec.delegation import Pass


class Route(ABC):
    """A way in which a target checks a tree.

    ```
    attention interface   one pass, the tree told to every layer's attention          keys and values in slabs
    4-D mask              one pass, the tree as a mask of the model's own kind        keys and values in slabs
    paths as batch rows   one pass, a row for each root-to-leaf path                  copies of the model's own state
    levels as batch rows  a pass for each depth, a row for each node                  copies of the model's own state
    nodes one by one      a pass for each node                                        copies of the model's own state
    ```

    Args:
        backbone: The target.

    Attributes:
        name: As printed.
        failing_means: What must be so of a model that fails here, in words.
        reads_chains: Whether a prompt may be read by tree passes.
        reads_in_parts: Whether a prompt may be read in several passes.
        needs_proof: Whether it is taken only if a float64 twin has shown it exact: others are so by construction, or
            have been from the beginning.
        collects: Whether hidden states and attentions can be read off its passes.
    """

    name: ClassVar[str]
    failing_means: ClassVar[str] = ""
    reads_chains: ClassVar[bool] = False
    reads_in_parts: ClassVar[bool] = True
    needs_proof: ClassVar[bool] = False
    collects: ClassVar[bool] = False

    def __init__(self, backbone: "Backbone") -> None:
        self.backbone = backbone

    def enter(self) -> None:
        """Makes the model ready for this route.

        Raises:
            AttachError: If it cannot be.
        """
        self.backbone.detach_attention()

    def check(self) -> None:  # noqa: B027 (most routes ask nothing of the signature)
        """Raises UnsupportedError if the model's forward lacks what the route needs."""

    @abstractmethod
    def new_cache(self, batch: int = 1) -> Any:
        """An empty cache of `batch` rows, with what `SlabCache` offers to the loop.

        Raises:
            UnsupportedError: If a layer keeps what this route cannot hold; the message names layer and kind.
        """

    @abstractmethod
    def read(self, ids: torch.Tensor, cache: Any, **wanted: Any) -> TargetOutput:
        """A plain pass over the next tokens [B, T] of a text; `wanted` as in `Backbone.forward`."""

    @abstractmethod
    def verify(self, ids: torch.Tensor, tree_pass: "Pass", **wanted: Any) -> TargetOutput:
        """A pass over the nodes [1, M] of the trees of all rows; `wanted` as in `Backbone.forward`."""
