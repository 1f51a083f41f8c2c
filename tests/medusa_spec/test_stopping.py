from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria

from medusa_spec.stopping import Sequence

PROMPT = torch.tensor([[4, 5, 6]])


class Told(StoppingCriteria):
    """Notes what it is told and stops at a length."""

    def __init__(self, stop_at: int = 10**9) -> None:
        self.stop_at = stop_at
        self.seen: list[tuple[list[int], Any]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((input_ids[0].tolist(), scores))
        return torch.full((1,), input_ids.shape[1] >= self.stop_at)


def pushes(sequence: Sequence, tokens: list[int]) -> int:
    """How many tokens are taken until one of them is the last."""
    return next((count for count, token in enumerate(tokens, start=1) if sequence.push(token)), len(tokens) + 1)


def test_the_length_asked_for_is_exact() -> None:
    sequence = Sequence(PROMPT, StoppingCriteriaList([MaxLengthCriteria(max_length=8)]))
    assert pushes(sequence, [9] * 20) == 5
    assert sequence.ids.tolist() == [[4, 5, 6, 9, 9, 9, 9, 9]] and sequence.new_tokens == 5


@pytest.mark.parametrize("eos", [7, [7, 8]])
def test_every_end_of_sequence_id_ends_the_text_and_is_kept(eos: int | list[int]) -> None:
    for end in [eos] if isinstance(eos, int) else eos:
        sequence = Sequence(PROMPT, StoppingCriteriaList([EosTokenCriteria(eos_token_id=eos)]))
        assert pushes(sequence, [9, 9, end, 9]) == 3
        assert sequence.ids[0, -1] == end


def test_the_prompts_own_end_of_sequence_ids_end_nothing() -> None:
    criteria = StoppingCriteriaList([EosTokenCriteria(eos_token_id=5), MaxLengthCriteria(max_length=6)])
    assert pushes(Sequence(PROMPT, criteria), [9] * 9) == 3


def test_other_criteria_are_asked_at_every_token_with_the_ids_so_far() -> None:
    told = Told(stop_at=6)
    sequence = Sequence(PROMPT, StoppingCriteriaList([told]))
    assert pushes(sequence, [1, 2, 3, 9]) == 3
    assert told.seen == [([4, 5, 6, 1], None), ([4, 5, 6, 1, 2], None), ([4, 5, 6, 1, 2, 3], None)]


def test_other_criteria_are_given_the_scores_where_they_are_kept() -> None:
    told = Told()
    sequence = Sequence(PROMPT, StoppingCriteriaList([told]))
    sequence.scores = [torch.ones(1, 4)]
    sequence.push(1)
    ((_, scores),) = told.seen
    assert isinstance(scores, tuple) and torch.equal(scores[0], torch.ones(1, 4))


def test_a_subclass_of_a_known_criterion_is_asked_itself() -> None:
    class Never(EosTokenCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.zeros(1, dtype=torch.bool)

    assert pushes(Sequence(PROMPT, StoppingCriteriaList([Never(eos_token_id=7)])), [7, 7]) == 3


def test_a_text_without_a_bound_grows_on() -> None:
    sequence = Sequence(PROMPT, StoppingCriteriaList())
    tokens = list(range(2000))
    assert pushes(sequence, tokens) == 2001
    assert sequence.ids.tolist() == [[4, 5, 6, *tokens]]
    assert PROMPT.tolist() == [[4, 5, 6]]


def test_every_criterion_is_asked_at_the_last_token_too() -> None:
    """As in plain decoding: criteria may count, or show progress."""
    first, second = Told(stop_at=5), Told()
    ends = [MaxLengthCriteria(max_length=6), EosTokenCriteria(eos_token_id=7)]
    assert pushes(Sequence(PROMPT, StoppingCriteriaList([first, second])), [1, 2, 3]) == 2
    assert len(first.seen) == len(second.seen) == 2
    for tokens in ([1, 2, 3], [1, 2, 7]):
        told = Told()
        assert pushes(Sequence(PROMPT, StoppingCriteriaList([*ends, told])), tokens) == 3
        assert [len(ids) for ids, _ in told.seen] == [4, 5, 6]


def test_a_length_that_nobody_reaches_costs_no_memory() -> None:
    sequence = Sequence(PROMPT, StoppingCriteriaList([MaxLengthCriteria(max_length=10**12)]))
    tokens = list(range(5000))
    assert pushes(sequence, tokens) == 5001
    assert sequence.ids.tolist() == [[4, 5, 6, *tokens]]


def test_ids_come_back_as_int64() -> None:
    sequence = Sequence(PROMPT.int(), StoppingCriteriaList())
    sequence.push(2**40)
    assert sequence.ids.dtype == torch.long and sequence.ids[0, -1] == 2**40
