"""A step of autoregressive heads in one call, from embeddings and features to features. Knows no family, no trees."""

from typing import Any

import torch
from torch import nn

from medusa_spec.heads import Room, View
from medusa_spec.heads.autoregressive import AutoregressiveHead, StepParts
from medusa_spec.heads.draft_layer import DraftLayer
from medusa_spec.heads.view import UnrolledView
from medusa_spec.prepared.joined import JoinedLinear, pack_together
from medusa_spec.prepared.kernels import ACTIVATIONS, DraftCall, LinearCall, NormCall, block_width, kernels, takes
from medusa_spec.prepared.norm import NormRecord, fasten_norm
from medusa_spec.prepared.packed_layer import pack_layer
from medusa_spec.prepared.swap import RECORD, sample

FIRST_POSITIONS = 1024
"""Positions whose angles are worked out at first; a longer text doubles them."""

SAMPLED = (5, 900, 31)
"""Positions of the rows of the comparison."""


class FastStep:
    """A frozen head's step in one call of the kernel, on views that have room for its keys and values.

    Products are those of `PackedLinear`, so a row depends neither on the rows beside it nor on the number of threads.

    Args:
        parts: What the step is made of; its products are packed in place, side by side where they read the same.
    """

    def __init__(self, parts: StepParts) -> None:
        own, mlp, norms = parts.layer.self_attn, parts.layer.mlp, (parts.vector_norm, parts.feature_norm)
        self.dtype = own.q_proj.weight.dtype
        found = kernels(self.dtype)
        assert found is not None, "fast_step asks for them"
        self._draft, self._scratch = found.draft, found.draft_scratch
        self._held: list[Any] = [parts]  # the call below holds addresses alone
        self.kv_heads, self.dim, self._angles_of = own.kv_heads, own.dim, own.angles
        self._table = torch.empty(2, 0, self.dim, dtype=self.dtype, device="cpu")
        self._template = call = DraftCall()
        call.vector_norm, call.feature_norm = (NormCall() if norm is None else _norm(norm) for norm in norms)
        if parts.join is not None:
            call.join = self._linear(parts.join)
        call.normed_residual = parts.normed_residual and parts.join is None
        call.added = parts.added and parts.join is not None
        layer, attended = call.layer, call.layer.attention
        layer.hidden, layer.activation = own.o_proj.out_features, ACTIVATIONS.index("silu")
        if parts.input_norm is not None:
            layer.first_norm = _norm(parts.input_norm)
        layer.second_norm = _norm(parts.layer.post_attention_layernorm)
        layer.qkv = self._joined(own, "q_proj", "k_proj", "v_proj")
        layer.gate_up = self._joined(mlp, "gate_proj", "up_proj")
        layer.o, layer.down = self._linear(own.o_proj), self._linear(mlp.down_proj)
        attended.q_heads, attended.kv_heads = own.heads, own.kv_heads
        attended.dim = attended.rotary = own.dim
        attended.scale = own.dim**-0.5

    def _linear(self, module: Any) -> LinearCall:
        pack_layer(module, keep_dense=False)
        return self._call(module.packed, module.bias)

    def _joined(self, owner: Any, *names: str) -> LinearCall:
        joined = JoinedLinear(owner, names, pack_together([getattr(owner, name) for name in names]))
        return self._call(joined.packed, joined.bias())

    def _call(self, packed: Any, bias: torch.Tensor | None) -> LinearCall:
        wide = None if bias is None else bias.detach().float().contiguous()
        self._held += [packed, wide]
        address = None if wide is None else wide.data_ptr()
        weight = packed.packed.data_ptr()
        return LinearCall(weight=weight, bias=address, inputs=packed.inputs, outputs=packed.outputs)

    def __call__(self, feature: torch.Tensor, vector: torch.Tensor, view: View) -> torch.Tensor | None:
        """Features and embeddings [M, H] to the next features [M, H]; None if this pass is not for the kernel."""
        if not len(feature) or not takes(feature, self.dtype) or not takes(vector, self.dtype):
            return None
        room = view.room(self.kv_heads, self.dim, self.dtype)
        if room is None:
            return None
        feature, vector = feature.contiguous(), vector.contiguous()
        angles = self._angles(room.last).index_select(1, view.positions[0])
        call, out = DraftCall.from_buffer_copy(self._template), torch.empty_like(feature)
        call.vectors, call.features = vector.data_ptr(), feature.data_ptr()
        attended, at = call.layer.attention, angles.data_ptr()
        attended.nodes, attended.threads = len(feature), torch.get_num_threads()
        attended.cosine, attended.sine = at, at + angles.stride(0) * angles.element_size()
        attended.keys, attended.values = room.keys.data_ptr(), room.values.data_ptr()
        attended.head_stride, attended.mask = room.keys.stride(1), room.mask.data_ptr()
        attended.common = attended.end = room.start  # the mask says all: no slot counts as seen by every row
        scratch = torch.empty(self._scratch(call), dtype=torch.float32, device="cpu")
        self._draft(call, out.data_ptr(), scratch.data_ptr())
        return out

    def _angles(self, last: int) -> torch.Tensor:
        """Cosines and sines [2, P, D] of the positions from 0 to beyond `last`."""
        table = self._table
        if last >= table.shape[1]:
            positions = torch.arange(max(FIRST_POSITIONS, 2 * (last + 1)), device="cpu")
            self._table = table = torch.cat(self._angles_of(positions[None], self.dtype))
        return table


def _norm(module: Any) -> NormCall:
    record: NormRecord = module.__dict__[RECORD]
    return NormCall(weight=module.weight.data_ptr(), epsilon=record.epsilon, style=record.style)


@torch.no_grad()
def fast_step(head: AutoregressiveHead) -> FastStep | None:
    """The step of a frozen head in one call, where the kernel knows it; what it packs in place stays equal.

    Both ways are run on the same rows, and must give the same keys, values and features but for rounding.
    """
    for module in head.modules():
        if isinstance(module, nn.RMSNorm):
            fasten_norm(module)
    if type(head).step is not AutoregressiveHead.step or not _known(head.parts()):
        return None
    last: nn.Linear = head.parts().layer.self_attn.o_proj
    feature, vector = (sample(len(SAMPLED), last.out_features, dtype=last.weight.dtype, seed=seed) for seed in range(2))
    plain, fast = _SampleView(), _SampleView()
    expected, step = head.step(feature[None], vector[None], plain)[0], FastStep(head.parts())
    got = step(feature, vector, fast)
    pairs = ((got, expected), (fast.keys, plain.keys), (fast.values, plain.values))
    return step if all(_same(*pair) for pair in pairs) else None


def _known(parts: StepParts) -> bool:
    """Whether all parts are plain modules of sizes and of a dtype that the kernel serves."""
    if type(parts.layer) is not DraftLayer:
        return False
    layer = parts.layer
    own, mlp = layer.self_attn, layer.mlp
    products = [own.q_proj, own.k_proj, own.v_proj, own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    products += [] if parts.join is None else [parts.join]
    if parts.join is None and (parts.added or parts.input_norm is not None):
        return False
    norms = [layer.post_attention_layernorm, parts.vector_norm, parts.feature_norm, parts.input_norm]
    if not all(type(product) is nn.Linear and product.weight.is_cpu for product in products):
        return False
    if not all(norm is None or RECORD in norm.__dict__ for norm in norms):
        return False
    widths = (own.q_proj.out_features, own.k_proj.out_features, mlp.gate_proj.out_features)
    return kernels(own.q_proj.weight.dtype) is not None and not any(width % block_width() for width in widths)


class _SampleView(UnrolledView):
    """A few rows of a text, far from each other, and the keys and values that came of them."""

    def __init__(self) -> None:
        super().__init__(1, len(SAMPLED), torch.device("cpu"))
        self.next()
        self.positions = torch.tensor([SAMPLED], device="cpu")
        self.keys = self.values = torch.empty(0)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.keys, self.values = key, value
        return super().attend(query, key, value)

    def room(self, heads: int, dim: int, dtype: torch.dtype) -> Room:
        self.keys, self.values = (torch.empty(1, heads, len(SAMPLED), dim, dtype=dtype, device="cpu") for _ in range(2))
        return Room(keys=self.keys, values=self.values, start=0, mask=self.seen(), last=max(SAMPLED))


def _same(got: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Equal but for roundings that went through several products: another computation differs by its whole size."""
    if got is None or got.shape != expected.shape:
        return False
    return bool((got - expected).double().norm() <= 2e-2 * expected.double().norm())
