"""An LM head of any kind is one product."""

import pytest
import torch

from medusa_spec.heads import Head, HeadsConfig, Projection
from medusa_spec.heads.config import LM_HEADS

H, V = 8, 20


CASES = [(lm_head, bias, None) for lm_head in LM_HEADS for bias in (False, True)]
CASES += [("own", bias, own_bias) for bias in (False, True) for own_bias in (False, True)]


@pytest.mark.parametrize(("lm_head", "bias", "own_bias"), CASES)
def test_operands_give_the_logits(lm_head, bias, own_bias):
    projection = Projection(weight=torch.randn(V, H), bias=torch.randn(V) if bias else None, scale=0.3, softcap=5.0)
    config = HeadsConfig(hidden_size=H, vocab_size=V, lm_head=lm_head, rank=4, lm_head_bias=own_bias)
    head = Head(config, projection)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    z = torch.randn(6, H)
    one_product = projection.finish(torch.nn.functional.linear(*head.operands(z, projection)))
    torch.testing.assert_close(one_product, head.logits(z, projection))


@pytest.mark.parametrize("own_bias", [None, False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_an_own_lm_head_begins_as_the_targets_with_the_bias_asked_for(bias, own_bias):
    projection = Projection(weight=torch.randn(V, H), bias=torch.randn(V) if bias else None)
    head = Head(HeadsConfig(hidden_size=H, vocab_size=V, lm_head="own", lm_head_bias=own_bias), projection)
    assert torch.equal(head.lm_head.weight, projection.weight)
    assert (head.lm_head.bias is not None) == (bias if own_bias is None else own_bias)
    if head.lm_head.bias is not None:
        assert torch.equal(head.lm_head.bias, projection.bias if bias else torch.zeros(V))
