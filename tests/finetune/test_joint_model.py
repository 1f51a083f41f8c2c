"""Heads and an adapter of their target, trained together: what is learnt, and what stays."""

from typing import Any

import pytest
import torch

from medusa_spec.backbone import Backbone
from medusa_spec.finetune.joint_model import JointModel
from medusa_spec.finetune.lora import adapt_target
from medusa_spec.finetune.store import UNTRAINED, make_targets
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.heads import HeadsConfig, fitted_options, make_heads
from medusa_spec.testing import tiny_model

K = 2
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("medusa", {}),
    ("hydra", {}),
    ("recurrent", {}),
    ("eagle", {}),
    ("eagle3", {"taps": "1"}),
    ("fused", {"taps": "0,1"}),
]
families = pytest.mark.parametrize(("kind", "options"), FAMILIES, ids=str)


def make(kind: str = "medusa", *, heads_weight: float = 0.5, target_loss: str = "kl", **options: Any) -> JointModel:
    """A tiny target with a fresh adapter, and random heads, in float64."""
    backbone = Backbone(adapt_target(tiny_model().requires_grad_(False), rank=2, alpha=4.0, seed=0))
    config = HeadsConfig(
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        kind=kind,
        num_heads=K,
        options=fitted_options(kind, options, backbone.config),
    )
    heads = make_heads(config, backbone.projection(), None, backbone.embedding()).double()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    trained = TrainedHeads(heads, depth_decay=0.8).double()
    return JointModel(backbone, trained, heads_weight=heads_weight, target_loss=target_loss)


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two texts, the shorter one filled up."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length, prompt in ((14, 4), (11, 5)):
        ids = torch.randint(5, 90, (length,), generator=generator)
        mask = torch.arange(length) >= prompt
        after = make_targets(ids, torch.ones_like(mask), K)[:, :-1].long().clamp_min(0)
        rows.append((ids, make_targets(ids, mask, K), after))
    names, filling = ("input_ids", "targets", "tokens"), (0, UNTRAINED, 0)
    return {
        name: torch.nn.utils.rnn.pad_sequence(parts, True, fill)
        for name, parts, fill in zip(names, zip(*rows, strict=True), filling, strict=True)
    }


def learn(model: JointModel, steps: int, rate: float = 0.01) -> list[dict[str, float]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, found = torch.optim.AdamW(trained, lr=rate), []
    for _ in range(steps):
        out = model(**batch())
        optimizer.zero_grad()
        out["loss"].backward()
        optimizer.step()
        found.append({"loss": out["loss"].item(), "target": out["target_loss"].item(), "head": float(out["losses"][0])})
    return found


@families
def test_a_fresh_adapter_has_diverged_by_nothing_and_heads_lose_what_they_do_alone(
    kind: str, options: dict[str, Any]
) -> None:
    model, given = make(kind, **options), batch()
    out = model(**given)
    assert out["target_loss"].item() == 0.0
    plain = Backbone(tiny_model())
    states = plain.states(given["input_ids"], taps=model.trained.heads.taps)
    alone = model.trained(**model.batch(states, given["targets"], given["tokens"]))
    torch.testing.assert_close(out["loss"], 0.5 * alone["loss"])
    torch.testing.assert_close(out["losses"], alone["losses"])


@families
def test_the_heads_gradient_reaches_the_adapter_and_nothing_else_of_the_target(
    kind: str, options: dict[str, Any]
) -> None:
    model = make(kind, **options)
    model(**batch())["loss"].backward()
    reached = {name for name, parameter in model.target.named_parameters() if parameter.grad is not None}
    assert reached and all(".lora_" in name for name in reached)
    second = [p.grad for name, p in model.target.named_parameters() if ".lora_B" in name]
    assert all(grad is not None and bool(grad.any()) for grad in second)  # first factors wait for the second ones
    assert all(parameter.grad is not None for parameter in model.trained.parameters())


@families
def test_both_are_learnt_and_the_target_stays_near_itself(kind: str, options: dict[str, Any]) -> None:
    model = make(kind, heads_weight=0.2, **options)
    before = {name: tensor.clone() for name, tensor in tiny_model().state_dict().items()}
    found = learn(model, 25)
    assert found[-1]["head"] < 0.9 * found[0]["head"]
    assert 0 < found[-1]["target"] < 0.2
    kept = {name.replace(".base_layer", ""): tensor for name, tensor in model.target.state_dict().items()}
    assert all(torch.equal(kept[name], tensor) for name, tensor in before.items())


def test_more_weight_on_the_heads_moves_the_target_further() -> None:
    distances = []
    for weight in (0.01, 1.0):
        model = make(heads_weight=weight)
        distances.append(learn(model, 25)[-1]["target"])
    assert distances[0] < 0.5 * distances[1]


def test_the_cross_entropy_teaches_the_target_the_data() -> None:
    model = make(heads_weight=0.01, target_loss="cross_entropy")
    found = learn(model, 25)
    assert found[-1]["target"] < 0.8 * found[0]["target"]
    measured = model.measure([batch()])
    assert measured["perplexity"] < 0.8 * measured["perplexity_without"]


def test_switched_off_the_adapter_is_not_there() -> None:
    model, given = make(), batch()
    learn(model, 5)
    plain = Backbone(tiny_model()).states(given["input_ids"]).h
    with model.without_adapter():
        assert torch.equal(model.states(given["input_ids"]).h, plain)
    assert not torch.allclose(model.states(given["input_ids"]).h, plain)
    assert any(p.requires_grad for n, p in model.target.named_parameters() if ".lora_" in n)


@families
def test_what_is_measured_is_what_a_forward_says(kind: str, options: dict[str, Any]) -> None:
    model, given = make(kind, **options), batch(1)
    fresh = model.measure([given])
    assert fresh["perplexity_change"] == 0.0 and fresh["divergence"] == 0.0 and fresh["same_choice"] == 1.0
    learn(model, 10)
    found = model.measure([given])
    rows = given["targets"][..., 0] != UNTRAINED
    assert found["positions"] == int(rows.sum()) == 10 + 6
    logits = model.target(input_ids=given["input_ids"]).logits[rows].detach()
    expected = torch.nn.functional.cross_entropy(logits, given["targets"][rows][:, 0].long()).exp()
    assert found["perplexity"] == pytest.approx(expected.item())
    plain = tiny_model()(input_ids=given["input_ids"]).logits[rows].detach()
    assert found["same_choice"] == pytest.approx((plain.argmax(-1) == logits.argmax(-1)).double().mean().item())
    expected = torch.nn.functional.kl_div(
        logits.log_softmax(-1), plain.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert found["divergence"] == pytest.approx(expected.item()) and found["divergence"] > 0
    assert len(found["top1"]) == K


def test_the_state_is_of_what_was_trained_and_loads_strictly() -> None:
    first, second = make(), make()
    learn(first, 3)
    state = first.state_dict()
    assert {name.split(".")[0] for name in state} == {"target", "trained"}
    assert all(name.startswith("trained.") or ".lora_" in name for name in state)
    second.load_state_dict(state)
    assert torch.equal(second(**batch())["loss"], first(**batch())["loss"])
    state.pop("trained.heads.heads.0.blocks.0.linear.weight")
    with pytest.raises(RuntimeError, match="missing .*linear.weight"):
        second.load_state_dict(state)


def test_the_target_stays_in_evaluation_while_heads_train() -> None:
    model = make().train()
    assert model.trained.training and not any(module.training for module in model.target.modules())


@families
def test_the_pieces_of_a_batch_add_up_to_it(kind: str, options: dict[str, Any]) -> None:
    model, given = make(kind, heads_weight=0.5, **options), batch()
    learn(model, 3)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = model(**given)
    expected = torch.autograd.grad(whole["loss"], trained)
    count, found, losses = model.counts(given["targets"].flatten(0, 1)), [0.0] * len(trained), []
    for row in range(2):
        piece = {name: tensor[row : row + 1] for name, tensor in given.items()}
        counts = torch.stack([model.counts(piece["targets"].flatten(0, 1)), count])
        out = model(**piece, counts=counts)
        losses.append(out["target_loss"])
        found = [a + b for a, b in zip(found, torch.autograd.grad(out["loss"], trained), strict=True)]
    torch.testing.assert_close(sum(losses), whole["target_loss"], rtol=1e-5, atol=1e-9)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6 * float(theirs.abs().max()) + 1e-12)
