"""Ancestor masks: which node of a tree may attend to which. Knows parents, nothing of tokens or models."""

from collections.abc import Sequence

import torch


def ancestor_mask(parents: Sequence[int]) -> torch.Tensor:
    """Boolean mask in which a node sees itself and its ancestors.

    ```
    parents (-1, 0, 1, 0)        0 1 2 3
                              0  ■ · · ·
        0 ─ 1 ─ 2             1  ■ ■ · ·
        └── 3                 2  ■ ■ ■ ·
                              3  ■ · · ■
    ```

    Args:
        parents: For each node the index of its parent, -1 for the root at index 0. Parents stand before children.

    Returns:
        Bool tensor [N, N]; `mask[i, j]` is true if j is i or an ancestor of i.
    """
    mask = torch.eye(len(parents), dtype=torch.bool, device="cpu")
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask
