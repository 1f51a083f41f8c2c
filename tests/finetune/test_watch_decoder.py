"""Acceptance in the real decoder while heads are trained."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from medusa_spec.checkpoint import load_heads
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import TokenData
from medusa_spec.finetune.train import start_heads
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.finetune.trainer import train_heads
from medusa_spec.finetune.watch_decoder import decoder_watch, frozen_copy
from medusa_spec.heads import DraftHeads
from medusa_spec.model import MedusaModel
from medusa_spec.tree import chain_template

MakeConfig = Callable[..., FinetuneConfig]


def held_out(finished: FinetuneConfig) -> TokenData:
    return TokenData(Path(finished.output) / "data", "held_out")


def trained(finished: FinetuneConfig, target: Target) -> DraftHeads:
    return load_heads(Path(finished.output) / "heads", target.backbone, dtype=torch.float32)[0]


def test_what_is_logged_is_what_the_decoder_does(
    finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    target = Target(finished)
    heads = trained(finished, target)
    watch = decoder_watch(make_config(tmp_path, eval_prompts=3, eval_new_tokens=20), target, held_out(finished), None)
    found = watch.measure(heads)
    model = MedusaModel(Target(finished).model, heads, tree=chain_template(3))
    accepted, drafts, depths = 0, 0, [0, 0, 0]
    for prompt in watch.prompts:
        ids = prompt.long()[None]
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        stats = model.last_stats
        assert stats is not None
        accepted, drafts = accepted + stats.accepted, drafts + stats.drafted_passes
        for depth, count in enumerate(stats.accepted_by_depth):
            depths[depth] += count
    assert len(watch.prompts) == 3 and drafts > 0
    assert found["decoder_mu"] == round(accepted / drafts, 4)
    assert [found.get(f"decoder_depth_{d + 1}", 0.0) for d in range(3)] == [round(n / drafts, 4) for n in depths]
    assert found["decoder_seconds"] > 0


def test_prompts_end_where_the_first_answer_begins(
    finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    data, target = held_out(finished), Target(finished)
    watch = decoder_watch(make_config(tmp_path, eval_prompts=1000), target, data, None)
    assert len(watch.prompts) == len(data)
    for prompt, conversation in zip(watch.prompts, data, strict=True):
        assert prompt.equal(conversation.input_ids[: len(prompt)])
        assert conversation.mask[len(prompt)] and not conversation.mask[: len(prompt)].any()
    longest = max(map(len, watch.prompts))
    fewer = decoder_watch(make_config(tmp_path, eval_prompts=1000, eval_new_tokens=8), target, data, longest + 7)
    assert 0 < len(fewer.prompts) < len(data) and max(map(len, fewer.prompts)) < longest


def test_without_prompts_nothing_is_decoded(finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path) -> None:
    target = Target(finished)
    watch = decoder_watch(make_config(tmp_path, eval_new_tokens=900), target, held_out(finished), 900)
    assert watch.measure(trained(finished, target)) == {}


def test_a_copy_guesses_the_same_and_shares_no_weights(finished: FinetuneConfig) -> None:
    heads = trained(finished, Target(finished))
    copy, h = frozen_copy(heads), torch.randn(5, heads.config.hidden_size)
    assert torch.equal(copy(h), heads(h)) and copy.projection is heads.projection
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    places = {parameter.data_ptr() for parameter in heads.parameters()}
    assert not places & {parameter.data_ptr() for parameter in copy.parameters()}


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_decoding_between_the_epochs_changes_no_bit(
    kind: str, finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path, kind=kind, eval_new_tokens=8)
    stores = [StateStore(Path(finished.output), split, 3) for split in ("train", "held_out")]
    states, random = [], []
    for watched in (False, True):
        target = Target(finished)
        counts = TokenData(Path(finished.output) / "data", "train").answer_counts(target.backbone.vocab_size)
        model = TrainedHeads(start_heads(config, target.backbone, counts, target.eos_ids), depth_decay=0.8)
        watch = decoder_watch(config, target, held_out(finished), None) if watched else None
        before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
        history = train_heads(model, stores[0], stores[1], config, tmp_path / str(watched), watch)
        states.append(model.state_dict())
        random.append(torch.get_rng_state())
        assert sum("decoder_mu" in entry for entry in history) == 2 * watched
        after = target.release().state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert torch.equal(random[0], random[1])
