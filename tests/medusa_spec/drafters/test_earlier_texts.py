"""Texts are remembered when their sessions are gone, once each, up to a limit."""

import copy
import pickle
import threading
from array import array

from medusa_spec.drafters.earlier_texts import EarlierTexts


class Session:
    """Something that a text belongs to."""


def remembered(*texts: list[int], limit: int = 1000) -> EarlierTexts:
    earlier = EarlierTexts(limit)
    for text in texts:
        session = Session()
        earlier.watch(session, array("i", text))
        del session
    earlier.take_over()
    return earlier


def after(earlier: EarlierTexts, context: list[int], depth: int = 4) -> list[list[int]]:
    return [list(place.tokens) for place in earlier.find(context, above=1, depth=depth)]


def test_a_text_is_remembered_once_its_session_is_gone() -> None:
    earlier, session, text = EarlierTexts(1000), Session(), array("i", [1, 2])
    earlier.watch(session, text)
    text.extend([3, 4])
    earlier.take_over()
    assert after(earlier, [1, 2]) == []
    del session
    earlier.take_over()
    assert after(earlier, [1, 2]) == [[3, 4]]


def test_texts_do_not_run_into_each_other() -> None:
    assert after(remembered([1, 2, 3], [4, 5]), [2, 3]) == []


def test_a_conversation_is_remembered_once_however_many_turns_it_has() -> None:
    turns = [list(range(200)), list(range(400)), list(range(600))]
    earlier = remembered(*turns)
    assert earlier.index is not None
    assert len(earlier.index) < 600 + 100
    for start in (10, 150, 205, 300, 390, 405, 550):
        assert after(earlier, [start, start + 1]) == [[start + 2, start + 3, start + 4, start + 5]]
    same = remembered([1, 2, 3], [1, 2, 3])
    assert after(same, [1, 2]) == [[3]]


def test_no_more_than_the_limit_is_remembered_and_nothing_where_it_is_none() -> None:
    earlier = remembered(*([number] * 40 for number in range(50)), limit=256)
    assert earlier.index is not None and len(earlier.index) <= 256
    none = remembered([1, 2, 3], limit=0)
    assert none.index is None and after(none, [1, 2]) == []


def test_a_copy_and_a_pickle_remember_the_same() -> None:
    earlier = remembered([1, 2, 3, 4])
    for twin in (copy.deepcopy(earlier), pickle.loads(pickle.dumps(earlier))):
        assert after(twin, [1, 2]) == [[3, 4]]


def test_threads_may_remember_and_look_up_together() -> None:
    earlier, wrong = EarlierTexts(20000), list[object]()

    def work(first: int) -> None:
        for number in range(30):
            start = 1000 * (30 * first + number)
            session = Session()
            earlier.watch(session, array("i", range(start, start + 50)))
            del session
            earlier.take_over()
            for tokens in after(earlier, [start, start + 1]):
                if tokens != [start + 2, start + 3, start + 4, start + 5]:
                    wrong.append((start, tokens))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert earlier.index is not None and len(earlier.index) == 4 * 30 * 51 - 1
