"""A tree's shape as tables on the device, and acceptance by them. Knows ids and shapes; no model, no cache."""

from dataclasses import dataclass, field

import torch

from medusa_spec.tree import TreeShape


@dataclass(kw_only=True, eq=False)
class StaticTree:
    """What a step of fixed shape asks of a tree, as tensors.

    ```
    parents (-1, 0, 1, 0)      0 ─ 1 ─ 2        paths   0: 0 1 2     of the root alone; 1 and 2 stay where they are
                               └── 3                    1: 0 1 2
                                                        2: 0 1 2
                                                        3: 0 3 2     node 3 goes to where node 1 lies
    ```

    Attributes:
        shape: The tree.
        device: Of the tables.
        parents: [N], the root being its own parent.
        depths: [N].
        others: Bool [N, N]; `others[i, j]`: j is neither i nor an ancestor of it.
        paths: [N, D + 1]: the nodes from the root to each node, then places that keep what lies there.
        places: [D + 1], 0 to D.
        root: Bool [N], true for the root alone.
    """

    shape: TreeShape
    device: torch.device
    parents: torch.Tensor = field(init=False)
    depths: torch.Tensor = field(init=False)
    others: torch.Tensor = field(init=False)
    paths: torch.Tensor = field(init=False)
    places: torch.Tensor = field(init=False)
    root: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape, places = self.shape, list(range(self.shape.max_depth + 1))
        paths = [[*shape.path_to(node), *places[depth + 1 :]] for node, depth in enumerate(shape.depths)]
        self.parents = torch.tensor([0, *shape.parents[1:]], device=self.device)
        self.depths = torch.tensor(shape.depths, device=self.device)
        self.others = (~shape.mask).to(self.device)
        self.paths = torch.tensor(paths, device=self.device)
        self.places = torch.tensor(places, device=self.device)
        self.root = self.depths == 0

    def accept(self, tokens: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        """The last node of the walk from the root along the target's choices, found without walking.

        A node is right if its parent's choice is its token, and accepted if it and all above it are right. Siblings
        carry different tokens, so the accepted nodes are one path, and its end is the deepest of them.

        ```
        17 ─ 5 ─ 7        the target chooses 5 after 17, 8 after 17 5: nodes 0 and 1 are accepted, node 1 is returned
        └─── 9
        ```

        Args:
            tokens: Node tokens [N]; siblings must differ.
            choices: The target's choice at every node [N].

        Returns:
            Int64 [1].
        """
        right = self.root | (choices.index_select(0, self.parents) == tokens)
        accepted = (right | self.others).all(dim=1)
        return torch.where(accepted, self.depths, -1).argmax(dim=0, keepdim=True)
