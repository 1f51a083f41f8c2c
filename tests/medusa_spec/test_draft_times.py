"""Drafts are timed as they are made while decoding."""

import pytest
import torch

from medusa_spec import draft_times
from medusa_spec.backbone import Backbone
from medusa_spec.draft_times import PREFIX, USUAL_GAIN, draft_seconds, draft_seconds_by_depth, first_draft_seconds
from medusa_spec.drafters import DraftSession, HeadsDrafter
from medusa_spec.heads import DraftHeads, HeadsConfig, fitted_options, make_heads
from medusa_spec.testing import tiny
from medusa_spec.tree import TokenTree, chain_template

K = 3
FAMILIES = pytest.mark.parametrize(
    ("kind", "options"),
    [("medusa", {}), ("eagle", {}), ("eagle3", {"taps": "0,1", "tied": False}), ("hydra", {})],
    ids=str,
)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone(tiny("llama", dtype=torch.float32))


def heads_of(backbone: Backbone, kind: str, options: dict[str, object]) -> DraftHeads:
    config = HeadsConfig(
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        kind=kind,
        num_heads=K,
        options=fitted_options(kind, options, backbone.config),
    )
    return make_heads(config, backbone.projection(), None, backbone.embedding())


class Noted:
    """Trees that sessions drafted, and tokens that each was shown before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trees: list[TokenTree] = []
        self.shown: list[int] = []
        begin, noted = HeadsDrafter.begin, self

        def noting(drafter: HeadsDrafter, prompt: list[int]) -> DraftSession:
            session = begin(drafter, prompt)
            draft, read = session.draft, session.read

            def note_draft(*arguments: object) -> TokenTree:
                noted.trees.append(draft(*arguments))  # type: ignore[arg-type]
                return noted.trees[-1]

            def note_read(ids: list[int], states: object) -> None:
                noted.shown.append(len(ids))
                read(ids, states)  # type: ignore[arg-type]

            session.draft, session.read = note_draft, note_read  # type: ignore[method-assign, assignment]
            return session

        monkeypatch.setattr(HeadsDrafter, "begin", noting)


@FAMILIES
def test_the_time_of_a_draft_is_that_of_whole_trees(backbone, monkeypatch, kind, options) -> None:
    """Heads that attend draft nothing before they were shown a text."""
    noted = Noted(monkeypatch)
    assert 0 < draft_seconds(heads_of(backbone, kind, options), backbone, chain_template(K), repeats=4) < 1
    assert [tree.size for tree in noted.trees] == [K + 1] * 4
    assert noted.shown == ([PREFIX] + [USUAL_GAIN] * 3 if kind.startswith("eagle") else [])


@FAMILIES
def test_depths_are_timed_in_turn(backbone, monkeypatch, kind, options) -> None:
    noted = Noted(monkeypatch)
    found = draft_seconds_by_depth(heads_of(backbone, kind, options), backbone, repeats=2)
    assert list(found) == [1, 2, 3] and all(0 < seconds < 1 for seconds in found.values())
    assert [tree.shape.max_depth for tree in noted.trees] == [1, 2, 3] * 2


@FAMILIES
def test_first_drafts_are_those_of_texts_of_their_own(backbone, monkeypatch, kind, options) -> None:
    noted = Noted(monkeypatch)
    heads = heads_of(backbone, kind, options)
    drafter = HeadsDrafter(heads, chain_template(K), dtype=torch.float32, device=torch.device("cpu"))
    assert 0 < first_draft_seconds(drafter, 20, repeats=3) < 1
    assert [tree.size for tree in noted.trees] == [K + 1] * 3
    assert noted.shown == ([20] * 3 if kind.startswith("eagle") else [])


def test_the_median_counts(backbone, monkeypatch) -> None:
    ticks = iter([0.0, 1.0, 0.0, 50.0, 0.0, 2.0])
    monkeypatch.setattr(draft_times.time, "perf_counter", lambda: next(ticks))
    assert draft_seconds(heads_of(backbone, "medusa", {}), backbone, chain_template(K), repeats=3) == 2.0
