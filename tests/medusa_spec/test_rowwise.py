"""What is shown rows of a batch one by one: Hugging Face's own by name, a user's if it says that it goes by rows."""

import inspect

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TopKLogitsWarper,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria

from medusa_spec.rowwise import criteria_of, processors_of, reason_against_rows


class Users(LogitsProcessor):
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Ends(StoppingCriteria):
    pass


def test_a_users_own_class_must_say_that_it_goes_by_rows():
    own = [TopKLogitsWarper(3)], [MaxLengthCriteria(9)]
    assert reason_against_rows(*own) is None
    assert "logits processor Users" in reason_against_rows([*own[0], Users()], own[1])
    assert "stopping criterion Ends" in reason_against_rows(own[0], [*own[1], Ends()])
    assert reason_against_rows([Users(rowwise=True)], []) is None
    assert "Users" in reason_against_rows([Users(rowwise=False)], [])


def test_what_has_a_state_is_copied_and_what_has_none_is_not():
    state, plain = Users(rowwise=True, seen=[]), TopKLogitsWarper(3)
    first, second = (processors_of(LogitsProcessorList([state, plain]), row, 2) for row in range(2))
    first[0].seen.append(1)
    assert second[0].seen == state.seen == []
    assert first[1] is second[1] is plain
    watermark = SynthIDTextWatermarkLogitsProcessor(3, [1, 2], 8, 8, 0, torch.device("cpu"))
    assert processors_of(LogitsProcessorList([watermark]), 0, 2)[0] is not watermark
    counting = Ends()
    counting.seen = []
    criteria_of(StoppingCriteriaList([counting]))[0].seen.append(1)
    assert counting.seen == []


def test_what_holds_something_for_each_row_is_given_that_rows():
    asked = []
    prefix = PrefixConstrainedLogitsProcessor(lambda row, ids: asked.append(row) or [3], num_beams=1)
    ignoring = RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=torch.tensor([0, 2, 1]))
    scores = torch.ones(1, 8)
    for row, penalised in enumerate([{4, 5, 6}, {6}, {5, 6}]):
        prefixed, penalty = processors_of(LogitsProcessorList([prefix, ignoring]), row, 3)
        prefixed(torch.tensor([[4, 5, 6]]), scores)
        assert {int(place) for place in penalty(torch.tensor([[4, 5, 6]]), scores)[0].lt(1).nonzero()} == penalised
    assert asked == [0, 1, 2]
    assert ignoring.prompt_ignore_length.shape == (3,)


@pytest.mark.parametrize(("module", "base"), [(logits_process, LogitsProcessor), (stopping_criteria, StoppingCriteria)])
def test_nothing_of_hugging_faces_holds_something_for_each_row_that_is_not_known(module, base):
    """Another version may bring a class that does: its source would speak of the batch at construction."""
    known = {
        "PrefixConstrainedLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        *("EncoderNoRepeatNGramLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor"),
        # Refused as guidance, or of speech and codebooks.
        *("UnbatchedClassifierFreeGuidanceLogitsProcessor", "ClassifierFreeGuidanceLogitsProcessor"),
        *("WhisperTimeStampLogitsProcessor", "WhisperNoSpeechDetection", "DiaClassifierFreeGuidanceLogitsProcessor"),
        "DiaEOSDelayPatternLogitsProcessor",
    }
    classes = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, base) and c is not base]
    assert len(classes) > 3
    for kind in (kind for kind in classes if inspect.isfunction(kind.__init__)):
        code = "".join(line.split("#")[0] for line in inspect.getsource(kind.__init__).splitlines())
        assert kind.__name__ in known or "batch" not in code.split('"""')[-1], kind
