"""Processors and stopping criteria for one row of a batch. Knows which of Hugging Face's look at rows, not the loop.

Plain decoding shows a processor all rows at once. Here rows are at different positions, so each is shown alone. What
Hugging Face ships does the same with a row alone as in a batch, with few exceptions that are taken care of; a user's
own class may look at its neighbours or count rows, so it must say that it does not, by an attribute `rowwise = True`.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor, SynthIDTextWatermarkLogitsProcessor

STATEFUL = (SynthIDTextWatermarkLogitsProcessor,)
"""Hugging Face's own that remember what they have seen: every row gets a copy."""


HELD = ("prompt_ignore_length", "encoder_input_ids", "generated_ngrams")
"""Attributes in which Hugging Face's own hold something for each row."""


def reason_against_rows(processors: Iterable[Any], criteria: Iterable[Any]) -> str | None:
    """Why a batch cannot be decoded row by row, in words; None if it can."""
    for kind, module, given in (
        ("logits processor", logits_process, processors),
        ("stopping criterion", stopping_criteria, criteria),
    ):
        for one in given:
            if type(one).__module__ != module.__name__ and not getattr(one, "rowwise", False):
                return (
                    f"the {kind} {type(one).__name__} may look at other rows of the batch; if it does not, say so by "
                    "its attribute rowwise = True"
                )
    return None


def processors_of(processors: LogitsProcessorList, row: int, rows: int) -> LogitsProcessorList:
    """The processors of one row of a batch of `rows`."""
    return LogitsProcessorList([_processor(processor, row, rows) for processor in processors])


def _processor(processor: Any, row: int, rows: int) -> Any:
    if type(processor) is PrefixConstrainedLogitsProcessor:
        # Answers to one prompt are told to the function as beams are: by the number of the prompt.
        allowed, prompt = processor._prefix_allowed_tokens_fn, row // processor._num_beams
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(prompt, ids), num_beams=1)
    held = {name: value for name in HELD if isinstance(value := getattr(processor, name, None), (torch.Tensor, list))}
    if held:
        processor = copy.copy(processor)
        for name, value in held.items():  # one for each row, or for each prompt, of which there are several answers
            place = row * len(value) // rows
            setattr(processor, name, value[place : place + 1])
        if hasattr(processor, "batch_size"):
            processor.batch_size = 1
        return processor
    own = type(processor).__module__ == logits_process.__name__ and not isinstance(processor, STATEFUL)
    return processor if own else copy.deepcopy(processor)


def criteria_of(criteria: StoppingCriteriaList) -> StoppingCriteriaList:
    """The stopping criteria of one row of a batch: a user's may count what they see."""
    return StoppingCriteriaList(
        [one if type(one).__module__ == stopping_criteria.__name__ else copy.deepcopy(one) for one in criteria]
    )
