"""Attention weights of tree passes, for who asks generate() for them. Knows tensors, not models."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medusa_spec.attention import TreePass, tree_attention


@dataclass(kw_only=True, eq=False)
class WeighingPass(TreePass):
    """A pass whose layers give the weights of attention beside its output, which is the same as ever.

    Kernels that run layers in one call take plain `TreePass`es only, so these pass through the modules.
    """

    def attend(
        self, module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `TreePass.attend`, with weights [1, Hq, N, L + N] of a prefix of L tokens; see `tree_weights`."""
        out, _ = tree_attention(module, query, *args, tree_pass=self, **kwargs)
        return out, tree_weights(module, query, args[0], tree_pass=self, **kwargs)


def tree_weights(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    tree_pass: TreePass,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """What each node of one row's tree gives to each position of the prefix and to each node.

    ```
    prefix of 3, window 3      p0 p1 p2 | n0 n1
                          n0    ·  ■  ■ |  ■  ·
                          n1    ·  ·  ■ |  ■  ■
    ```

    Args:
        module: The attention layer.
        query: [1, Hq, N, D].
        key: [1, Hkv, S, D], with the nodes' keys behind the prefix.
        tree_pass: The tree and the cache.
        scaling: As in `tree_attention`, and so are softcap and s_aux.
        softcap: See there.
        s_aux: See there.
        **kwargs: Nothing that changes weights.

    Returns:
        [1, Hq, N, L + N] in the dtype of the query, from a softmax in float32, as eager attention computes them; 0 for
        what a node does not see.
    """
    _, heads, nodes, dim = query.shape
    layer: int = module.layer_idx  # type: ignore[assignment]
    seen, base = tree_pass.visible(layer, 0), tree_pass.cache.base(layer, 0)
    keys = key[:, :, : seen.end + nodes].to(query.dtype).repeat_interleave(heads // key.shape[1], dim=1)
    scores = (query @ keys.transpose(2, 3)) * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = torch.ones(nodes, seen.end + nodes, dtype=torch.bool, device="cpu")
    visible[:, : seen.first] = False
    boundary = seen.common - seen.first
    visible[:, seen.first : seen.common], visible[:, seen.end :] = seen.mask[:, :boundary], seen.mask[:, boundary:]
    scores = scores.masked_fill(~visible.to(scores.device), float("-inf"))
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.to(scores.dtype).reshape(1, -1, 1, 1).expand(1, -1, nodes, 1)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)[..., : seen.end + nodes]
    return nn.functional.pad(weights, (base, 0))
