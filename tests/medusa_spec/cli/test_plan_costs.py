"""What is measured of a wrapped model is there, and of the size that it must be."""

import pytest
import torch

from medusa_spec import MedusaModel
from medusa_spec.cli.plan_costs import measure_costs, measure_footprint, rest_seconds
from medusa_spec.heads import HeadsConfig, fitted_options, make_heads
from medusa_spec.testing import tiny


def wrapped(kind: str) -> MedusaModel:
    target = tiny("llama", dtype=torch.float32)
    plain = MedusaModel(target, drafter="ngram", probe=False, prepare=False)
    backbone = plain.backbone
    config = HeadsConfig(
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        kind=kind,
        num_heads=2,
        options=fitted_options(kind, {}, backbone.config),
    )
    heads = make_heads(config, backbone.projection(), None, backbone.embedding())
    plain.detach()
    return MedusaModel(target, heads.requires_grad_(False), probe=False, prepare=False)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle", "eagle3"])
def test_every_depth_is_timed_and_heads_that_attend_read_a_prompt(kind: str) -> None:
    model = wrapped(kind)
    costs = measure_costs(model, model.drafter, {1: 1.0, 2: 1.1}, prefix=30, repeats=1)
    assert set(costs.drafts) == {1, 2} and costs.passes == {1: 1.0, 2: 1.1}
    assert all(0 < seconds < 5 for seconds in (*costs.drafts.values(), costs.rest))
    assert costs.reading >= 0
    footprint = measure_footprint(model, model.drafter, 10)
    layers = model.config.num_hidden_layers
    size = 2 * model.config.num_key_value_heads * model.config.head_dim * 4
    assert footprint.per_token == layers * size
    assert footprint.heads_per_token == (size if kind.startswith("eagle") else 0)
    assert footprint.cache == 10 * (footprint.per_token + footprint.heads_per_token)


def test_the_rest_of_a_step_does_not_hold_draft_and_pass() -> None:
    model = wrapped("medusa")
    rest = rest_seconds(model)
    stats = model.last_stats
    assert stats.passes * rest < sum(stats.seconds.values()) - stats.seconds["draft"] - stats.seconds["verify"]
