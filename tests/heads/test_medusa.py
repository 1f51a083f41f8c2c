import pytest
import torch

from medusa_spec.heads import HeadsConfig, MedusaHeads, Projection
from medusa_spec.heads.config import LM_HEADS

H, V = 8, 20
DRAFT = torch.tensor([1, 4, 5, 11, 19])


def make(lm_head: str, *, draft: bool = False, **kwargs: object) -> tuple[MedusaHeads, Projection]:
    """Fresh heads in float64 and the whole projection of their target."""
    whole = Projection(
        weight=torch.randn(V, H, dtype=torch.float64),
        bias=torch.randn(V, dtype=torch.float64),
        scale=0.5,
        softcap=4.0,
    )
    size, ids = (len(DRAFT), DRAFT) if draft else (None, None)
    config = HeadsConfig(
        hidden_size=H,
        vocab_size=V,
        num_heads=3,
        num_layers=2,
        rank=4,
        lm_head=lm_head,
        draft_vocab_size=size,
        **kwargs,
    )
    torch.set_default_dtype(torch.float64)  # made in float64, so that `own` is not rounded
    try:
        return MedusaHeads(config, whole.rows(ids), ids), whole
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("draft", [False, True], ids=["all", "draft"])
@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_every_fresh_head_is_the_targets_lm_head(lm_head: str, draft: bool) -> None:
    heads, whole = make(lm_head, draft=draft)
    h = torch.randn(2, 6, H, dtype=torch.float64)
    expected = whole(h)[..., DRAFT] if draft else whole(h)
    logits = heads(h)
    assert logits.shape == (3, 2, 6, len(DRAFT) if draft else V)
    for head in range(3):
        assert torch.allclose(logits[head], expected, rtol=0, atol=1e-12)
    if not draft:  # the very same product: not a bit may differ
        assert torch.equal(logits, expected.expand(3, -1, -1, -1))


@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_layers_and_heads_share_no_storage(lm_head: str) -> None:
    heads, _ = make(lm_head)
    tensors = list(heads.parameters())
    assert len(tensors) == 3 * (2 * 2 + {"shared": 0, "own": 2, "low_rank": 2}[lm_head])
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_an_own_lm_head_is_a_copy_of_the_targets() -> None:
    heads, _ = make("own")
    before = heads.projection.weight.clone()
    with torch.no_grad():
        for head in heads.heads:
            assert torch.equal(head.lm_head.weight, before)
            head.lm_head.weight.add_(1.0)
    assert torch.equal(heads.projection.weight, before)


def test_an_own_lm_head_has_a_bias_only_where_the_target_has_one() -> None:
    config = HeadsConfig(hidden_size=H, vocab_size=V, lm_head="own")
    heads = MedusaHeads(config, Projection(weight=torch.randn(V, H)))
    assert all(head.lm_head.bias is None for head in heads.heads)


def test_a_low_rank_addition_starts_at_zero_and_can_leave_it() -> None:
    heads, _ = make("low_rank")
    assert all(not head.up.weight.any() and head.down.weight.any() for head in heads.heads)
    heads(torch.randn(4, H, dtype=torch.float64)).pow(2).sum().backward()
    assert all(head.up.weight.grad.abs().max() > 0 for head in heads.heads)


@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_gradients_reach_every_parameter_and_never_the_projection(lm_head: str) -> None:
    heads, _ = make(lm_head)
    heads.projection.weight.requires_grad_(False)
    for parameter in heads.parameters():  # off the start, where low_rank's product hides `down`
        torch.nn.init.normal_(parameter, std=0.3)
    heads(torch.randn(4, H, dtype=torch.float64)).pow(2).sum().backward()
    for name, parameter in heads.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    assert heads.projection.weight.grad is None
    assert not any("projection" in name for name in heads.state_dict())


def test_the_draft_ids_travel_with_the_state() -> None:
    heads, _ = make("shared", draft=True)
    assert torch.equal(heads.state_dict()["draft_ids"], DRAFT)
    assert heads.to(torch.bfloat16).draft_ids.dtype == torch.long
    assert "draft_ids" not in make("shared")[0].state_dict()


def test_a_projection_of_another_model_is_refused_with_both_shapes() -> None:
    config = HeadsConfig(hidden_size=H, vocab_size=V)
    with pytest.raises(ValueError, match=rf"\({V}, {H}\).* got \({V}, 16\)"):
        MedusaHeads(config, Projection(weight=torch.randn(V, 16)))


def test_draft_ids_are_given_if_and_only_if_configured() -> None:
    whole = Projection(weight=torch.randn(V, H))
    with pytest.raises(ValueError, match="if, and only if"):
        MedusaHeads(HeadsConfig(hidden_size=H, vocab_size=V), whole, torch.arange(V))
    configured = HeadsConfig(hidden_size=H, vocab_size=V, draft_vocab_size=5)
    with pytest.raises(ValueError, match="if, and only if"):
        MedusaHeads(configured, whole.rows(DRAFT))
    with pytest.raises(ValueError, match="draft_vocab_size = 5 ids, got 3"):
        MedusaHeads(configured, whole.rows(DRAFT), DRAFT[:3])


def test_heads_that_are_cast_take_their_projection_along() -> None:
    heads, _ = make("shared", draft=True)
    heads.float()
    assert heads.projection.weight.dtype == heads.projection.bias.dtype == torch.float32
    assert heads(torch.randn(H)).dtype == torch.float32
    assert heads.draft_ids.dtype == torch.long
