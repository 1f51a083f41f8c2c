"""Tree attention of fixed shape: length and masks are computed on the device. Knows tensors and kernels, not models."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from medusa_spec.kernels import Part, math_kernel, merge_parts, sink_rescale
from medusa_spec.static_cache import StaticCache
from medusa_spec.static_kernels import MASKED, PREFIX_KERNELS, available, fits
from medusa_spec.static_tree import StaticTree


@dataclass(kw_only=True, eq=False)
class Reach:
    """The slots that a layer kind looks at, and what each node sees of them.

    ```
    length 4, window 3, chain of 2 nodes, capacity 12      slots   2 3 | 4 5     the rest is not looked at
                                                           node 0  ■ ■ | ■ ·
                                                           node 1  · ■ | ■ ■
    ```

    Attributes:
        slots: [S], or None for all.
        mask: Bool [N, S].
    """

    slots: torch.Tensor | None
    mask: torch.Tensor

    def of(self, states: torch.Tensor) -> torch.Tensor:
        """The part of a buffer [1, Hkv, capacity, D] that is looked at."""
        return states if self.slots is None else states.index_select(2, self.slots)


@dataclass(kw_only=True, eq=False)
class StaticTreePass:
    """One verify pass as the attention layers see it, without a number that the host must know.

    Attributes:
        tree: The tree, as tables.
        cache: Where the nodes' keys and values go; `place` has been called.
        backend: A name of `static_kernels.available`; None takes the first.
    """

    tree: StaticTree
    cache: StaticCache
    backend: str | None = None
    _reach: dict[Any, Reach] = field(default_factory=dict, repr=False)
    _biases: dict[Any, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def positions(self) -> torch.Tensor:
        """Position of every node, int64 [1, N]."""
        return (self.cache.length + self.tree.depths).unsqueeze(0)

    @property
    def no_mask(self) -> torch.Tensor:
        """A mask of four dimensions that says nothing: [1, 1, 1, 1]."""
        return torch.zeros(1, 1, 1, 1, device=self.cache.device)

    def reach(self, window: int | None) -> Reach:
        """What layers with this window look at; worked out once per pass."""
        if window not in self._reach:
            nodes, capacity = self.tree.shape.size, self.cache.capacity
            slots = None
            if window is not None and window - 1 + nodes < capacity:
                first = (self.cache.length - window + 1).clamp_min(0)
                slots = first + torch.arange(window - 1 + nodes, device=self.cache.device)
            every = torch.arange(capacity, device=self.cache.device) if slots is None else slots
            self._reach[window] = Reach(slots=slots, mask=self._mask(every, window))
        return self._reach[window]

    def _mask(self, slots: torch.Tensor, window: int | None) -> torch.Tensor:
        """Bool [N, S]: a slot of the prefix is seen, one of the tree by its descendants, all within the window."""
        tree, length = self.tree, self.cache.length
        node = slots - length  # negative in the prefix
        inside = node.clamp(0, tree.shape.size - 1)
        unseen = tree.others.index_select(1, inside) | (node >= tree.shape.size)
        seen = (node < 0) | ~unseen
        if window is None:
            return seen
        position = torch.where(node < 0, slots, length + tree.depths.index_select(0, inside))
        return seen & (self.positions.transpose(0, 1) - position < window)

    def near(self) -> Reach:
        """The tree alone, for layers whose prefix takes a kernel of its own."""
        if "near" not in self._reach:
            self._reach["near"] = Reach(slots=self.cache.slots, mask=~self.tree.others)
        return self._reach["near"]

    def bias(self, reach: Reach, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask for folded queries [1, 1, groups * N, S]; made once per pass and kind."""
        key = (id(reach), groups, dtype)
        if key not in self._biases:
            zeros = torch.zeros(reach.mask.shape, dtype=dtype, device=reach.mask.device)
            self._biases[key] = zeros.masked_fill_(~reach.mask, float("-inf")).repeat(groups, 1)[None, None]
        return self._biases[key]

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of a layer in this pass; see `attention.tree_attention` for the arguments.

        Args:
            module: The attention layer.
            query: [1, Hq, N, D].
            key: [1, Hkv, capacity, D], the layer's whole buffer.
            value: [1, Hkv, capacity, Dv].
            attention_mask: Not read.
            scaling: Factor of the scores; None means D ** -0.5.
            softcap: c of c * tanh(score / c), or None.
            s_aux: One attention sink logit per query head [Hq], or None.
            **kwargs: What else the layer passes.

        Returns:
            Output [1, N, Hq, Dv] and None in place of weights.
        """
        _, heads, nodes, dim = query.shape
        groups = heads // key.shape[1]
        scale = dim**-0.5 if scaling is None else scaling
        folded = query.reshape(1, key.shape[1], groups * nodes, dim)
        window = self.cache.window(module.layer_idx)  # type: ignore[arg-type]
        backend = available(query.device)[0] if self.backend is None else self.backend
        if backend != MASKED and window is None and fits(backend, query, value, softcap):
            out, lse = self._split(backend, folded, key, value, groups, scale, softcap)
        else:
            reach = self.reach(window)
            states = folded, reach.of(key), reach.of(value), self.bias(reach, groups, query.dtype)
            if softcap is None and s_aux is None:
                attention = nn.functional.scaled_dot_product_attention
                out = attention(*states[:3], attn_mask=states[3], scale=scale)
            else:
                out, lse = math_kernel(*states, scale, softcap)
        if s_aux is not None:
            out = sink_rescale(out, lse, s_aux, groups, nodes)
        out = out.to(query.dtype).reshape(1, heads, nodes, value.shape[-1])
        return out.transpose(1, 2).contiguous(), None

    def _split(
        self,
        backend: str,
        folded: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        groups: int,
        scale: float,
        softcap: float | None,
    ) -> Part:
        """The prefix by a kernel without a mask, the tree by a masked one, merged."""
        near, nodes = self.near(), self.tree.shape.size
        length = self.cache.length.to(torch.int32)
        prefix = PREFIX_KERNELS[backend](folded, key, value, length, nodes, scale, softcap)
        bias = self.bias(near, groups, folded.dtype)
        return merge_parts(prefix, math_kernel(folded, near.of(key), near.of(value), bias, scale, softcap))
