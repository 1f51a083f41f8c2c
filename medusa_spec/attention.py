"""Tree attention: N nodes attend to the prefix and to their ancestors. Knows tensors and kernels, not models."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from medusa_spec.kernels import Kernel, merge_parts, prefix_kernel, sink_rescale, small_kernel
from medusa_spec.tree import TreeShape

if TYPE_CHECKING:
    from medusa_spec.cache import SlabCache

SPLIT_FROM = {"cpu": 8192}
"""Common keys from which the prefix gets a kernel of its own, by kind of device.

On a CPU one masked kernel was as fast or faster up to 8,192 keys (docs/performance.md); beyond, its mask grows with the
prefix. On other devices the masked kernel is plain products and the unmasked one flash attention: `SPLIT_ELSE`.
"""

SPLIT_ELSE = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class Visibility:
    """Which keys of one row and layer kind the N nodes see, as slots of the row's key buffer.

    ```
    window 4, prefix of 6 keys, chain of 3 nodes        slots   0 1 2 | 3 4 | 5 | 6 7 8
                                                        node 0  · · · | ■ ■ | ■ | ■ · ·
                                                        node 1  · · · | · ■ | ■ | ■ ■ ·
                                                        node 2  · · · | · · | ■ | ■ ■ ■
                                                               unseen  bound. com.  tree
    ```

    Attributes:
        first: First slot that any node sees; the boundary reaches from here to `common`.
        common: First slot that every node sees.
        end: First slot of the tree; the common part ends here.
        mask: Bool [N, boundary + N]: what each node sees of the boundary and of the tree.
    """

    first: int
    common: int
    end: int
    mask: torch.Tensor


def visibility(shape: TreeShape, *, length: int, base: int, window: int | None, chunk: int | None = None) -> Visibility:
    """What the nodes of a tree behind `length` prefix tokens see.

    A key at position p is seen from position q if q - window < p <= q: Hugging Face's sliding window; or, with chunks,
    if both lie in the same one and p <= q.

    Args:
        shape: The tree.
        length: Prefix tokens of the row; node i is at position length + depth of i.
        base: Position held by slot 0 of the key buffer (a sliding layer forgets its oldest keys).
        window: Width of the sliding window, None for full attention.
        chunk: Width of the chunks, None where attention does not end at them; there is no window then.
    """
    end = length - base
    if window is None and chunk is None:
        return Visibility(first=0, common=0, end=end, mask=shape.mask)
    depths = torch.tensor(shape.depths, device="cpu")  # as the mask, whatever the user's default device is
    places = length + depths
    edges = places // chunk * chunk if chunk is not None else places - (window or 0) + 1  # first that each node sees
    left = edges.clamp(base, length) - base
    first, common = int(left.min()), int(left.max())
    boundary = torch.arange(first, common, device="cpu") >= left[:, None]
    near = places[None, :] >= edges[:, None]
    return Visibility(first=first, common=common, end=end, mask=torch.cat([boundary, shape.mask & near], dim=1))


@dataclass(kw_only=True, eq=False)
class TreePass:
    """One verify pass as the attention layers see it. Made anew for each pass, shared by all layers.

    The trees of several rows stand side by side in one row of M nodes, each behind a prefix of its own. So rows may
    have trees of different sizes, or none, and nothing is padded: only attention knows which node is whose.

    ```
    trees of 3, 0 and 2 nodes       nodes   0 1 2 | 3 4         `parts`   row 0: 0..2, row 2: 3..4
    behind rows of 7, 5, 9 tokens   row     0 0 0 | 2 2
    ```

    Attributes:
        shape: The tree of every row; or a tuple of one for each row, None for a row that takes no part.
        cache: The cache whose prefixes the nodes stand behind.
        device: Device of the input ids; `to` gives the same pass on another, for sharded models.
    """

    shape: TreeShape | tuple[TreeShape | None, ...]
    cache: "SlabCache"
    device: torch.device
    _biases: dict[Any, torch.Tensor] = field(default_factory=dict, repr=False)
    _visible: dict[Any, Visibility] = field(default_factory=dict, repr=False)

    @cached_property
    def parts(self) -> dict[int, slice]:
        """The nodes of each row that takes part."""
        parts, start = dict[int, slice](), 0
        for row in range(len(self.cache.lengths)):
            shape = self.shape_of(row)
            if shape is not None:
                parts[row] = slice(start, start + shape.size)
                start += shape.size
        return parts

    def shape_of(self, row: int) -> TreeShape | None:
        """The tree of a row, if it takes part."""
        return self.shape[row] if isinstance(self.shape, tuple) else self.shape

    def tree_of(self, row: int) -> TreeShape:
        """The tree of a row that takes part."""
        shape = self.shape_of(row)
        assert shape is not None, f"row {row} takes no part in this pass"
        return shape

    @property
    def positions(self) -> torch.Tensor:
        """Position of every node, int64 [1, M]."""
        lengths, positions = self.cache.lengths, list[int]()
        for row in self.parts:
            positions += [lengths[row] + depth for depth in self.tree_of(row).depths]
        return torch.tensor([positions], device=self.device)

    @property
    def no_mask(self) -> torch.Tensor:
        """A mask of four dimensions that says nothing: [1, 1, 1, 1]."""
        return torch.zeros(1, 1, 1, 1, device=self.device)

    def to(self, device: torch.device | None) -> "TreePass":
        """The same pass for layers on another device; called by accelerate's hooks on sharded models."""
        if device is None or torch.device(device) == self.device:  # None: a hook that moves nothing
            return self
        return replace(self, device=torch.device(device))  # what was worked out for other layers goes along

    def attend(
        self, module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of a layer in this pass; what the delegating attention function calls."""
        return tree_attention(module, query, *args, tree_pass=self, **kwargs)

    def visible(self, layer: int, row: int) -> Visibility:
        """What row `row` sees at attention layer `layer`; worked out once per layer kind."""
        window, chunk, base = self.cache.window(layer), self.cache.chunk(layer), self.cache.base(layer, row)
        key = (row, window, chunk, base)
        if key not in self._visible:
            length = self.cache.lengths[row]
            self._visible[key] = visibility(self.tree_of(row), length=length, base=base, window=window, chunk=chunk)
        return self._visible[key]

    def bias(self, seen: Visibility, *, whole: bool, groups: int, like: torch.Tensor) -> torch.Tensor:
        """Additive mask for folded queries, made once per pass and layer kind.

        Args:
            seen: Result of `visible`.
            whole: Over all keys from `seen.first` on; otherwise over boundary and tree only.
            groups: Query heads per KV head; they are folded into the rows.
            like: A tensor of the kernel's dtype and device.

        Returns:
            [1, 1, groups * N, keys] of 0 and -inf.
        """
        key = (id(seen), whole, groups, like.dtype, like.device)
        if key not in self._biases:
            boundary = seen.common - seen.first
            mask = seen.mask
            if whole:
                common = mask.new_ones(mask.shape[0], seen.end - seen.common)
                mask = torch.cat([mask[:, :boundary], common, mask[:, boundary:]], dim=1)
            bias = torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
            self._biases[key] = bias.to(like.device).repeat(groups, 1)[None, None]
        return self._biases[key]


def tree_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    tree_pass: TreePass,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the nodes of a tree, with the signature of Hugging Face's attention functions.

    Args:
        module: The attention layer; its `layer_idx` names its part of the cache.
        query: [1, Hq, M, D], the nodes of all rows.
        key: [B, Hkv, S, D], the layer's key buffer with the nodes' keys behind each row's prefix.
        value: [B, Hkv, S, Dv].
        attention_mask: Not read; the tree says who sees whom.
        tree_pass: The tree and the cache.
        scaling: Factor of the scores; None means D ** -0.5.
        softcap: c of c * tanh(score / c), or None.
        s_aux: One attention sink logit per query head [Hq], or None.
        **kwargs: What else the layer passes; nothing in it changes attention over a cache without padding.

    Returns:
        Output [1, M, Hq, Dv] and None in place of weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    if not query.dtype == key.dtype == value.dtype:  # under autocast, where a rotation widens some of them
        key, value = key.to(query.dtype), value.to(query.dtype)
    rows = [
        _attend_row(query[:, :, part], key[row, None], value[row, None], row, layer, tree_pass, scale, softcap, s_aux)
        for row, part in tree_pass.parts.items()
    ]
    return (rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)), None


def _attend_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: int,
    layer: int,
    tree_pass: TreePass,
    scale: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """One row alone, so that its result does not depend on the batch; [1, N, Hq, Dv]."""
    _, heads, nodes, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    folded = query.reshape(1, kv_heads, groups * nodes, dim)
    seen = tree_pass.visible(layer, row)
    stop = seen.end + nodes
    parts: Kernel = small_kernel(query.device, softcap)
    split_from = SPLIT_FROM.get(query.device.type, SPLIT_ELSE)
    if seen.end - seen.common < split_from or softcap is not None:
        bias = tree_pass.bias(seen, whole=True, groups=groups, like=query)
        out, lse = parts(folded, key[:, :, seen.first : stop], value[:, :, seen.first : stop], bias, scale, softcap)
    else:
        bias = tree_pass.bias(seen, whole=False, groups=groups, like=query)
        common = slice(seen.common, seen.end)
        prefix = prefix_kernel(query.device)(folded, key[:, :, common], value[:, :, common], None, scale, None)
        near = _without_common(key, seen, stop), _without_common(value, seen, stop)
        out, lse = merge_parts(prefix, parts(folded, *near, bias, scale, None))
    if s_aux is not None:
        out = sink_rescale(out, lse, s_aux, groups, nodes)
    out = out.to(query.dtype).reshape(1, heads, nodes, value.shape[-1])
    return out.transpose(1, 2).contiguous()


def _without_common(states: torch.Tensor, seen: Visibility, stop: int) -> torch.Tensor:
    """Boundary and tree keys side by side; a view when there is no boundary."""
    tree = states[:, :, seen.end : stop]
    if seen.first == seen.common:
        return tree
    return torch.cat([states[:, :, seen.first : seen.common], tree], dim=2)
