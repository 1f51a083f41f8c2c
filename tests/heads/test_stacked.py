import pytest
import torch

from medusa_spec.heads import HeadsConfig, MedusaHeads, Projection, StackedMedusaHeads
from medusa_spec.heads.config import LM_HEADS

H, V = 8, 20
DRAFT = torch.tensor([0, 2, 3, 7, 12, 18])
CPU = torch.device("cpu")


def trained(
    lm_head: str, *, layers: int = 1, bias: bool = True, draft: bool = False, own_bias: bool | None = None
) -> MedusaHeads:
    """Heads with random weights everywhere, in float64."""
    whole = Projection(
        weight=torch.randn(V, H, dtype=torch.float64),
        bias=torch.randn(V, dtype=torch.float64) if bias else None,
        scale=0.7,
        softcap=3.0,
    )
    ids = DRAFT if draft else None
    config = HeadsConfig(
        hidden_size=H,
        vocab_size=V,
        num_heads=3,
        num_layers=layers,
        lm_head=lm_head,
        rank=4,
        draft_vocab_size=len(DRAFT) if draft else None,
        lm_head_bias=own_bias,
    )
    heads = MedusaHeads(config, whole.rows(ids), ids).double()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return heads


@pytest.mark.parametrize("draft", [False, True], ids=["all", "draft"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_stacked_heads_guess_as_the_modules_do(lm_head: str, layers: int, bias: bool, draft: bool) -> None:
    heads = trained(lm_head, layers=layers, bias=bias, draft=draft)
    stacked = StackedMedusaHeads(heads, dtype=torch.float64, device=CPU)
    for _ in range(3):
        h = torch.randn(H, dtype=torch.float64)
        assert torch.allclose(stacked(h), heads(h), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("own_bias", [False, True], ids=["plain-heads", "bias-heads"])
def test_stacked_heads_have_the_bias_of_their_own(own_bias: bool, bias: bool) -> None:
    heads = trained("own", bias=bias, own_bias=own_bias)
    h = torch.randn(H, dtype=torch.float64)
    torch.testing.assert_close(StackedMedusaHeads(heads, dtype=torch.float64, device=CPU)(h), heads(h))


def test_stacked_heads_are_a_frozen_copy() -> None:
    heads = trained("low_rank", layers=2)
    stacked = StackedMedusaHeads(heads, dtype=torch.float64, device=CPU)
    h = torch.randn(H, dtype=torch.float64)
    before = stacked(h)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(1.0)
    assert torch.equal(stacked(h), before)
    assert not before.requires_grad


def test_stacked_heads_compute_in_the_dtype_asked_for() -> None:
    heads = trained("own")
    stacked = StackedMedusaHeads(heads, dtype=torch.float32, device=CPU)
    h = torch.randn(H)
    logits = stacked(h)
    assert logits.dtype == torch.float32 and logits.shape == (3, V)
    assert torch.allclose(logits.double(), heads(h.double()), atol=1e-5)


@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_the_first_heads_alone_guess_as_they_do_among_all(lm_head: str) -> None:
    stacked = StackedMedusaHeads(trained(lm_head, layers=2, draft=True), dtype=torch.float64, device=CPU)
    h = torch.randn(H, dtype=torch.float64)
    for count in (1, 2, 3):
        torch.testing.assert_close(stacked(h, count), stacked(h)[:count])
