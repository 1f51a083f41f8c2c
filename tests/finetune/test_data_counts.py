"""What becomes of records is counted."""

from medusa_spec.errors import DataError
from medusa_spec.finetune.chat import Rendered
from medusa_spec.finetune.data_counts import EXAMPLES, DataCounts, looping_spans
from medusa_spec.finetune.records import Record

LOOP = [1, 2, 3] * 30
PROSE = list(range(100, 190))


def rendered(*answers: list[int]) -> Rendered:
    """Answers with a token of the user's before each."""
    ids: list[int] = []
    spans = []
    for answer in answers:
        ids.append(0)
        spans.append((len(ids), len(ids) + len(answer)))
        ids += answer
    return Rendered(input_ids=ids, mask=[token > 0 for token in ids], spans=tuple(spans), answers=len(answers) + 1)


def test_looping_answers_are_found_in_what_is_read() -> None:
    chat = rendered(PROSE, LOOP)
    assert looping_spans(chat, len(chat.input_ids)) == [(92, 182)]
    assert looping_spans(chat, 170) == [(92, 170)]
    assert looping_spans(chat, 95) == [] == looping_spans(chat, 50)


def test_copies_are_the_same_tokens_under_the_same_mask() -> None:
    counts = DataCounts()
    assert counts.is_new([1, 2], [False, True]) and counts.is_new([1, 2], [True, True])
    assert not counts.is_new([1, 2], [False, True])
    assert counts.to_dict()["duplicates"] == 1


def test_everything_is_added_up() -> None:
    counts = DataCounts()
    record = Record(place="a:1", form="messages", source="s", finished=False)
    counts.add(record, rendered(PROSE, LOOP), 100, 1)
    counts.add(Record(place="a:2", form="text"), rendered(PROSE), 91, 0)
    counts.unusable += [DataError(f"a:{number}") for number in range(3, 30)]
    found = counts.to_dict()
    assert found["answers"] == {"read": 5, "cut": 1, "weightless": 0, "rewritten": 0, "looping": 1}
    assert found["forms"] == {"messages": 1, "text": 1} and found["sources"] == {"s": 1, "not given": 1}
    assert found["unfinished"] == 1 and found["licenses"] == {"not given": 2}
    assert found["unusable"]["records"] == 27 and len(found["unusable"]["first"]) == EXAMPLES
