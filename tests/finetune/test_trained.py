"""The trained module."""

from typing import Any

import pytest
import torch

from medusa_spec.backbone import Backbone
from medusa_spec.finetune.store import make_targets
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.heads import FAMILIES as heads_of
from medusa_spec.heads import HeadsConfig, MedusaHeads, Projection, TokenEmbedding, make_heads
from medusa_spec.heads.config import KINDS
from medusa_spec.testing import tiny_model

H, V, DRAFT, K = 8, 20, 6, 3
IDS = torch.tensor([1, 4, 5, 9, 12, 19])


FAMILIES = [
    *((kind, {}) for kind in KINDS),
    ("eagle", {"tied": False}),
    ("eagle3", {"tied": False, "taps": "0,1"}),
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


def batch_of(model: TrainedHeads, rows: int, length: int = 7) -> dict[str, torch.Tensor]:
    """Random rows as the family takes them: positions [T, …], or texts [B, T, …] for those that attend."""
    lead = (rows, length) if model.heads.attends else (rows * length,)
    targets = torch.randint(0, V, (*lead, K + 1), dtype=torch.int32)
    batch = {"h": torch.randn(*lead, H), "targets": targets}
    if model.heads.attends:
        batch["tokens"] = targets[..., :-1].long()
        if model.heads.taps:
            batch["layers"] = torch.randn(*lead, len(model.heads.taps), H)
    return batch


@pytest.mark.parametrize(
    ("kind", "options", "num_layers"),
    [(kind, options, n) for kind, options in FAMILIES for n in (1, 2) if n == 1 or not heads_of[kind].attends],
    ids=str,
)
@pytest.mark.parametrize("lm_head", ["shared", "own", "low_rank"])
def test_losses_are_the_cross_entropies_of_the_heads_own_logits(
    lm_head: str, kind: str, options: dict[str, Any], num_layers: int
) -> None:
    model = make(lm_head, num_layers, kind=kind, options=options)
    batch = batch_of(model, 2)
    flat = batch["targets"].view(-1, K + 1)
    flat[0] = flat[8] = IDS[: K + 1]
    flat[2, 2:] = flat[5, 3:] = flat[9:12] = -100
    tokens = batch.get("tokens", batch["targets"][..., :-1].long().clamp_min(0))
    extra = {"layers": batch["layers"]} if "layers" in batch else {}
    logits = model.heads(batch["h"], tokens, **extra).view(K, -1, DRAFT)
    found, total = model(**batch), torch.zeros(())
    for k in range(K):
        places = [IDS.tolist().index(t) if t in IDS.tolist() else -100 for t in flat[:, k + 1].tolist()]
        assert max(places) >= 0
        expected = torch.nn.functional.cross_entropy(logits[k], torch.tensor(places), ignore_index=-100)
        torch.testing.assert_close(found["losses"][k], expected.detach())
        total = total + 0.8**k * expected
    torch.testing.assert_close(found["loss"], total)


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
    batch = batch_of(model, 2)
    batch["targets"][:] = torch.tensor([4, 4, 9, 12], dtype=torch.int32)
    model(**batch)["loss"].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert not model.heads.projection.weight.requires_grad


@pytest.mark.parametrize(("kind", "options"), [("eagle", {}), ("eagle", {"tied": False}), ("eagle3", {"taps": "0,1"})])
def test_prompts_are_read_but_not_learnt(kind: str, options: dict[str, Any]) -> None:
    """A text whose first half is a prompt: its tokens and states are seen by all that follows, and have no loss."""
    model = make(kind=kind, options=options)
    batch = batch_of(model, 1)
    batch["targets"][:] = torch.tensor([4, 4, 9, 12], dtype=torch.int32)
    batch["targets"][:, :3] = -100
    before = model(**batch)
    batch["targets"][:, 3:] = -100
    assert model(**batch)["losses"].abs().max() == 0
    batch["targets"][:, 3:] = torch.tensor([4, 4, 9, 12], dtype=torch.int32)
    for name in ("tokens", "layers" if model.heads.taps else "h"):
        moved = batch[name].clone()
        moved[:, 1] = (moved[:, 1] + 1) % V if name == "tokens" else moved[:, 1] + 1.0
        assert not torch.allclose(model(**(batch | {name: moved}))["losses"], before["losses"])


@pytest.mark.parametrize("unroll", [1, 2, 3])
def test_fewer_steps_are_the_first_heads_losses_and_ranks_are_of_all(unroll: int) -> None:
    whole, cut = make(kind="eagle"), make(kind="eagle")
    cut.heads, cut.unroll = whole.heads, unroll
    batch = batch_of(whole, 2)
    expected, found = whole(**batch), cut(**batch)
    assert len(found["losses"]) == unroll and torch.equal(found["losses"], expected["losses"][:unroll])
    torch.testing.assert_close(found["loss"], (found["losses"] * 0.8 ** torch.arange(unroll)).sum())
    assert len(cut.features(**batch)) == K  # what is not given a number of steps draws all


@pytest.mark.parametrize("unroll", [None, 2])
def test_features_are_held_near_the_targets_where_they_are_to_stand(unroll: int | None) -> None:
    """Step k at row t stands for h of row t + 1 + k, if all tokens up to there and the one after it are answers."""
    plain = make(kind="eagle")
    mimicking = TrainedHeads(plain.heads, depth_decay=0.8, feature_weight=2.5, unroll=unroll)
    plain.unroll = unroll
    batch = batch_of(plain, 3)
    batch["targets"][0, 2:4] = -100
    batch["targets"][1, 5:] = -100  # a shorter text
    batch["targets"][2, :, 2:] = -100  # nothing to stand for at depths of two and more
    features, targets = plain.features(**batch, steps=unroll), batch["targets"].tolist()
    expected = plain(**batch)["loss"]
    for k in range(unroll or K):
        found = []
        for row in range(3):
            for t in range(7 - 1 - k):
                if min(targets[row][t][: k + 2]) >= 0:
                    gap = (features[k][row, t] - batch["h"][row, t + 1 + k]).abs()
                    found.append(torch.where(gap < 1, 0.5 * gap * gap, gap - 0.5).mean())
        assert found
        expected = expected + 2.5 * 0.8**k * torch.stack(found).mean()
    torch.testing.assert_close(mimicking(**batch)["loss"], expected)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_texts_shorter_than_a_draft_have_a_distance_of_zero_with_a_gradient(length: int) -> None:
    model = TrainedHeads(make(kind="eagle").heads, depth_decay=0.8, feature_weight=1.0)
    batch = batch_of(model, 2, length)
    loss = model(**batch)["loss"]
    loss.backward()
    assert loss.isfinite() and all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_layers_are_handed_on_only_where_some_are_tapped() -> None:
    """The store of another family may hold some."""
    model = make(kind="eagle")
    batch = batch_of(model, 1)
    loss = model(**batch)["loss"]
    assert torch.equal(model(**batch, layers=torch.randn(1, 7, 2, H))["loss"], loss)


@pytest.mark.parametrize(("kind", "options"), FAMILIES)
def test_a_batch_without_a_single_target_moves_nothing(kind: str, options: dict[str, Any]) -> None:
    model = make(kind=kind, options=options)
    batch = batch_of(model, 2)
    batch["targets"] = torch.full_like(batch["targets"], -100)
    out = model(**batch)
    assert float(out["loss"].detach()) == 0 and out["losses"].isfinite().all()
    out["loss"].backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(not gradient.any() for gradient in gradients)
