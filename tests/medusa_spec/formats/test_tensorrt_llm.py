"""Medusa heads of a converted TensorRT-LLM checkpoint of one rank."""

import pytest
import torch

from medusa_spec.errors import CheckpointError
from medusa_spec.formats.tensorrt_llm import tensorrt_llm_layout

H, V, K, L = 32, 128, 2, 2
CONFIG = {"architecture": "MedusaForCausalLM", "num_medusa_heads": K, "num_medusa_layers": L}
TARGET = {"transformer.vocab_embedding.weight": (V, H), "lm_head.weight": (V, H)}


def shapes():
    blocks = [f"medusa_heads.{i}.medusa_layers.{j}.linear" for i in range(K) for j in range(L)]
    found = {f"{name}.weight": (H, H) for name in blocks} | {f"{name}.bias": (H,) for name in blocks}
    return found | {f"medusa_heads.{i}.lm_head.weight": (V, H) for i in range(K)}


def test_heads_give_their_own_logits(randoms, write, decodes):
    tensors = randoms(shapes() | TARGET)
    model = decodes(write(tensors, CONFIG, file="rank0.safetensors"))
    h = torch.randn(5, H, dtype=torch.float64)
    for i, logits in enumerate(model.heads(h)):
        z = h
        for j in range(L):
            weight, bias = (tensors[f"medusa_heads.{i}.medusa_layers.{j}.linear.{part}"] for part in ("weight", "bias"))
            z = z + torch.nn.functional.silu(z @ weight.T + bias)
        torch.testing.assert_close(logits, z @ tensors[f"medusa_heads.{i}.lm_head.weight"].T)


def test_ranks_of_tensor_parallelism_are_refused(randoms, write, load):
    write(randoms(shapes()), CONFIG, file="rank0.safetensors")
    with pytest.raises(CheckpointError, match=r"once, got 2: in rank0\.safetensors, rank1\.safetensors; .* not joined"):
        load(write(randoms(shapes()), CONFIG, file="rank1.safetensors"))


def test_scales_of_quantised_heads_are_surplus(randoms, write, load):
    scales = {"medusa_heads.0.medusa_layers.0.linear.weights_scaling_factor": (1,)}
    with pytest.raises(CheckpointError, match=r"must hold 10 tensors, got 11: .* surplus .*weights_scaling_factor"):
        load(write(randoms(shapes() | scales), CONFIG))


def test_the_format_is_named_by_its_tensors(names):
    layout = tensorrt_llm_layout(names(*shapes(), *TARGET, **CONFIG))
    assert layout.format == "TensorRT-LLM Medusa" and (layout.num_heads, layout.num_layers) == (K, L)
    assert not layout.with_target  # transformers cannot load what is beside the heads
    assert tensorrt_llm_layout(names("medusa_heads.0.0.linear.weight")) is None
