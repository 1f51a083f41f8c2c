"""The trained module."""

from typing import Any

import pytest
import torch

from medusa_spec.backbone import Backbone
from medusa_spec.finetune.store import make_targets
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.heads import HeadsConfig, MedusaHeads, Projection, TokenEmbedding, make_heads
from medusa_spec.heads.config import KINDS
from medusa_spec.testing import tiny_model

H, V, DRAFT, K = 8, 20, 6, 3
IDS = torch.tensor([1, 4, 5, 9, 12, 19])


FAMILIES = [
    *((kind, {}) for kind in KINDS),
    ("mlp_speculator", {"tied": True, "own_embedding": True, "inner_size": 5}),
    ("recurrent", {"tied": False}),
]


def make(
    lm_head: str = "shared",
    num_layers: int = 1,
    *,
    noise: bool = True,
    kind: str = "medusa",
    options: dict[str, Any] | None = None,
) -> TrainedHeads:
    config = HeadsConfig(
        hidden_size=H,
        vocab_size=V,
        kind=kind,
        num_heads=K,
        num_layers=num_layers,
        lm_head=lm_head,  # type: ignore[arg-type]
        rank=2,
        draft_vocab_size=DRAFT,
        options=options or {},
    )
    projection = Projection(weight=torch.randn(V, H), bias=torch.randn(V), scale=0.5, softcap=10.0)
    heads = make_heads(config, projection.rows(IDS), IDS, TokenEmbedding(weight=torch.randn(V, H)))
    if noise:
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    return TrainedHeads(heads, depth_decay=0.8)


@pytest.mark.parametrize(("kind", "options"), FAMILIES)
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("lm_head", ["shared", "own", "low_rank"])
def test_losses_are_the_cross_entropies_of_the_heads_own_logits(
    lm_head: str, num_layers: int, kind: str, options: dict[str, Any]
) -> None:
    model = make(lm_head, num_layers, kind=kind, options=options)
    h, targets = torch.randn(7, H), torch.randint(0, V, (7, K + 1), dtype=torch.int32)
    targets[2, 2:] = targets[5, 3:] = -100
    logits = model.heads(h, targets[:, :-1].long().clamp_min(0))
    total = torch.zeros(())
    for k in range(K):
        places = [IDS.tolist().index(t) if t in IDS.tolist() else -100 for t in targets[:, k + 1].tolist()]
        if max(places) >= 0:
            expected = torch.nn.functional.cross_entropy(logits[k], torch.tensor(places), ignore_index=-100)
            torch.testing.assert_close(model(h, targets)["losses"][k], expected.detach())
            total = total + 0.8**k * expected
    torch.testing.assert_close(model(h, targets)["loss"], total)


def test_sequential_heads_learn_nothing_behind_a_token_that_is_not_known() -> None:
    targets = torch.tensor([[3, 4, -100, 9], [-100, 4, 5, 9]], dtype=torch.int32)
    assert make(kind="hydra").indices(targets).tolist() == [[1, -1, -1], [-1, -1, -1]]
    assert make().indices(targets).tolist() == [[1, -1, 3], [1, 2, 3]]


def test_targets_outside_the_draft_vocabulary_do_not_count() -> None:
    model = make()
    h = torch.randn(3, H)
    targets = torch.tensor([[0, 4, 0, -100], [0, 9, 4, -100], [0, -100, 3, -100]], dtype=torch.int32)
    assert model.indices(targets).tolist() == [[1, -1, -1], [3, 1, -1], [-1, -1, -1]]
    losses = model(h, targets)["losses"]
    alone = model(h[:2], targets[:2])["losses"]
    torch.testing.assert_close(losses, alone)
    assert losses[2] == 0


def test_identity_start_loss_is_that_of_the_targets_own_guess() -> None:
    """Before training a head guesses what the target chooses next, whatever its depth."""
    target = tiny_model(dtype=torch.float32)
    backbone = Backbone(target)
    config = HeadsConfig(hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size, num_heads=K)
    model = TrainedHeads(MedusaHeads(config, backbone.projection()), depth_decay=1.0)
    ids = torch.randint(0, backbone.vocab_size, (1, 40))
    targets = make_targets(ids[0].int(), torch.ones(40, dtype=torch.bool), K)
    out = model(backbone.hidden_states(ids)[0], targets)
    logits = target(ids).logits[0]
    for k in range(K):
        shift = k + 2
        expected = torch.nn.functional.cross_entropy(logits[: 40 - shift], ids[0, shift:])
        torch.testing.assert_close(out["losses"][k], expected)


@pytest.mark.parametrize(("kind", "options"), FAMILIES)
def test_only_the_heads_are_trained_and_every_one_of_them(kind: str, options: dict[str, Any]) -> None:
    model = make("own", kind=kind, options=options)
    targets = torch.tensor([[4, 4, 9, 12]] * 5, dtype=torch.int32)
    model(torch.randn(5, H), targets)["loss"].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert not model.heads.projection.weight.requires_grad
