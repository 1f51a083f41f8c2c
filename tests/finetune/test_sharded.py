"""Weights that FSDP has spread, put together: here over one process, with its own sharded tensors."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from medusa_spec.finetune.gradients import gradient_norms
from medusa_spec.finetune.sharded import put_together, unsharded_copy, whole_state
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.heads import HeadsConfig, Projection, TokenEmbedding, make_heads


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made() -> TrainedHeads:
    config = HeadsConfig(hidden_size=8, vocab_size=20, kind="hydra", num_heads=2, num_layers=1)
    embedding = TokenEmbedding(weight=torch.randn(20, 8))
    return TrainedHeads(make_heads(config, Projection(weight=torch.randn(20, 8)), None, embedding), depth_decay=0.8)


def batch() -> dict[str, torch.Tensor]:
    return {"h": torch.randn(6, 8), "targets": torch.randint(0, 20, (6, 3), dtype=torch.int32)}


def test_sharded_heads_train_as_whole_ones_and_are_whole_again(alone: None) -> None:
    plain, rows = made(), batch()
    spread = unsharded_copy(plain)
    fully_shard(spread, mesh=init_device_mesh("cpu", (1,)))
    assert all(hasattr(parameter, "full_tensor") for parameter in spread.parameters())
    for model in (plain, spread):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(**rows)["loss"].backward()
            optimizer.step()
    assert gradient_norms(spread) == pytest.approx(gradient_norms(plain))
    found, expected = whole_state(spread), plain.state_dict()
    put_together(spread)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
        assert torch.equal(spread.state_dict()[name], found[name]) and type(found[name]) is torch.Tensor


def test_what_is_whole_stays_as_it_is() -> None:
    model = made()
    before = dict(model.named_parameters())
    put_together(model)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in whole_state(model).items())


def test_a_copy_shares_the_targets_tensors_alone() -> None:
    model = made()
    copy = unsharded_copy(model)
    assert copy.heads.projection is model.heads.projection and copy.heads.embedding is model.heads.embedding
    assert all(one is not other for one, other in zip(copy.parameters(), model.parameters(), strict=True))
