"""How near the heads' probabilities are to the target's."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from medusa_spec.finetune.batches import in_order
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import run_data
from medusa_spec.finetune.overlap import measure_overlap
from medusa_spec.finetune.ranks import draft_logits
from medusa_spec.finetune.states import run_states
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.teacher import run_teacher
from medusa_spec.finetune.tokens import TokenData
from medusa_spec.finetune.train import start_heads
from medusa_spec.finetune.trained import TrainedHeads


@pytest.mark.parametrize("kind", ["medusa", "recurrent", "eagle"])
def test_it_is_the_mean_of_the_least_of_both(
    make_config: Callable[..., FinetuneConfig], tmp_path: Path, kind: str
) -> None:
    config = make_config(tmp_path, kind=kind, top_logits=6)
    target = Target(config)
    run_data(config, target)
    run_states(config, target)
    run_teacher(config, target)
    counts = TokenData(tmp_path / "data", "train").answer_counts(target.backbone.vocab_size)
    torch.manual_seed(0)
    heads = start_heads(config, target.backbone, counts, target.eos_ids)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model = TrainedHeads(heads, depth_decay=0.8)
    store = StateStore(tmp_path, "held_out", 3, teacher=True)
    found = measure_overlap(model, in_order(store, attends=heads.attends))
    sums, seen = torch.zeros(3), torch.zeros(3)
    assert heads.draft_ids is not None
    for batch in in_order(store, attends=heads.attends):
        rows = batch["targets"].flatten(0, -2)[:, 0] >= 0
        columns = {
            name: part.flatten(0, -2 if name == "targets" else -3)[rows]
            for name, part in batch.items()
            if name in ("targets", "teacher_ids", "teacher_probs")
        }
        pieces: list[list[torch.Tensor]] = [[], [], []]
        for k, logits, _ in draft_logits(model, batch):
            pieces[k].append(logits)
        for k in range(3):
            q = torch.zeros(int(rows.sum()), target.backbone.vocab_size)
            q[:, heads.draft_ids] = torch.cat(pieces[k]).softmax(1).detach()
            for t in range(len(q)):
                known = columns["targets"][t, : k + 2] >= 0
                if known.all() if heads.sequential else known[-1]:
                    ids, probs = columns["teacher_ids"][t, k], columns["teacher_probs"][t, k]
                    sums[k] += torch.minimum(probs, q[t, ids.long()]).sum()
                    seen[k] += 1
    torch.testing.assert_close(torch.tensor(found), sums / seen, rtol=1e-4, atol=1e-5)
    assert all(0 < share < 1 for share in found) and seen.min() > 20
    few = measure_overlap(model, in_order(store, attends=heads.attends, batch_positions=64, limit=64))
    assert few != found and all(0 <= share < 1 for share in few)
