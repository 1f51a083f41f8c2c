"""An LM head of any kind is one product."""

import pytest
import torch

from medusa_spec.heads import Head, HeadsConfig, Projection
from medusa_spec.heads.config import LM_HEADS

H, V = 8, 20


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_operands_give_the_logits(lm_head, bias):
    projection = Projection(weight=torch.randn(V, H), bias=torch.randn(V) if bias else None, scale=0.3, softcap=5.0)
    head = Head(HeadsConfig(hidden_size=H, vocab_size=V, lm_head=lm_head, rank=4), projection)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    z = torch.randn(6, H)
    one_product = projection.finish(torch.nn.functional.linear(*head.operands(z, projection)))
    torch.testing.assert_close(one_product, head.logits(z, projection))
