"""What was added is found, by others and later, whatever was killed meanwhile."""

import copy
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_spec.drafters.suffix_corpus import DEFAULT_LIMIT, LEAST_LIMIT, PLACES, SuffixCorpus
from medusa_spec.drafters.suffix_folder import MOST_SEGMENTS
from medusa_spec.drafters.suffix_segment import LEAST_MATCH
from medusa_spec.drafters.text_index import LONGEST_MATCH, Place
from medusa_spec.errors import ConfigError

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=60), min_size=1, max_size=6)
KILLED = """
import os, random, signal, sys, time
import torch
from medusa_spec.drafters.suffix_corpus import SuffixCorpus

torch.set_num_threads(1)
folder, added, draw = sys.argv[1], 0, random.Random(0)
for number in range(8):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        corpus = SuffixCorpus(folder, limit=1 << 14)
        while True:
            corpus.add([range(100 * added, 100 * added + 9)])
            added += 1
            os.write(writing, b".")
    os.close(writing)
    time.sleep(draw.uniform(0.01, 0.25))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    added += len(os.read(reading, 1 << 16))
    corpus = SuffixCorpus(folder)
    for text in range(added):
        found = [place.tokens.tolist() for place in corpus.find(range(100 * text, 100 * text + 4))]
        assert found == [list(range(100 * text + 4, 100 * text + 9))], (number, text, added, found)
    added += len(corpus.find(range(100 * added, 100 * added + 4)))  # it was there, though nobody was told
print(added)
"""


def text(number: int, count: int = 9) -> list[int]:
    return list(range(1000 * number, 1000 * number + count))


def knows(corpus: SuffixCorpus, number: int) -> bool:
    return found(corpus, text(number, 4)) == [text(number)[4:]]


def found(corpus: SuffixCorpus, context: list[int], **options: int) -> list[list[int]]:
    return [list(place.tokens) for place in corpus.find(context, **options)]


def by_search(texts: list[list[int]], context: list[int], above: int, depth: int) -> list[Place]:
    """Every place with the longest match, by comparing everywhere."""
    context, everywhere = context[-LONGEST_MATCH:], []
    for ids in texts:
        for place in range(LEAST_MATCH, len(ids)):
            length = len(os.path.commonprefix([ids[:place][::-1], context[::-1]]))
            everywhere.append(Place(length, ids[place : place + depth]))
    longest = max((place.length for place in everywhere), default=0)
    return [place for place in everywhere if place.length == longest > max(above, LEAST_MATCH - 1)]


@given(TEXTS, st.lists(st.integers(0, 2), max_size=40), st.sampled_from([0, 5, 40]), st.integers(1, 9), st.booleans())
@settings(deadline=None)
def test_a_look_up_finds_what_a_search_everywhere_finds(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[list[int]],
    context: list[int],
    above: int,
    depth: int,
    together: bool,
) -> None:
    corpus = SuffixCorpus(tmp_path_factory.mktemp("corpus"))
    for part in [texts] if together else [[ids] for ids in texts]:
        corpus.add(part)
    for asked in (context, texts[0]):
        expected = by_search(texts, asked, above, depth)
        places = [Place(length, list(tokens)) for length, tokens in corpus.find(asked, above=above, depth=depth)]
        assert len(places) == min(len(expected), PLACES)
        assert all(place in expected for place in places)
        if len(expected) <= PLACES:
            assert sorted(places) == sorted(expected)


def test_of_many_places_some_are_taken_from_all_over(tmp_path: Path) -> None:
    corpus = SuffixCorpus(tmp_path)
    corpus.add([[before, 1, 2, 3, 4, 50 + before] for before in range(10, 42)])
    tokens = [ids[0] for ids in found(corpus, [1, 2, 3, 4])]
    assert len(set(tokens)) == PLACES and min(tokens) < 65 and max(tokens) > 80


def test_what_was_added_is_there_for_others_and_later(tmp_path: Path) -> None:
    corpus, reader = SuffixCorpus(tmp_path / "new" / "corpus"), SuffixCorpus(tmp_path / "new" / "corpus")
    corpus.add([text(1), text(2)])
    assert not knows(reader, 1)
    reader.refresh()
    assert knows(reader, 1) and knows(SuffixCorpus(tmp_path / "new" / "corpus"), 2)
    script = "import sys; from medusa_spec.drafters.suffix_corpus import SuffixCorpus as C\n"
    script += "print([list(p.tokens) for p in C(sys.argv[1]).find([1000, 1001, 1002, 1003])])"
    command = [sys.executable, "-c", script, str(corpus.folder)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{[text(1)[4:]]}\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_nothing_is_lost_that_was_added_before_a_kill(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    added = int(done.stdout)
    assert added > 8
    corpus = SuffixCorpus(tmp_path)
    corpus.add([text(10**6)])
    assert all(found(corpus, [*range(100 * k, 100 * k + 4)]) for k in range(added)) and knows(corpus, 10**6)
    assert sorted(file.name for file in tmp_path.iterdir()) == [segment.path.name for segment in corpus.segments]


def test_merging_keeps_every_text(tmp_path: Path) -> None:
    corpus = SuffixCorpus(tmp_path)
    for number in range(5 * MOST_SEGMENTS):
        corpus.add([text(number)])
    assert len(corpus.segments) <= MOST_SEGMENTS and len(corpus) == 10 * 5 * MOST_SEGMENTS
    assert all(knows(corpus, number) for number in range(5 * MOST_SEGMENTS))


def test_no_more_than_the_limit_is_held_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    corpus = SuffixCorpus(tmp_path, limit=LEAST_LIMIT)
    for number in range(200):
        corpus.add([text(number)])
        assert len(corpus) <= LEAST_LIMIT and knows(corpus, number)
    known = [knows(corpus, number) for number in range(200)]
    first = known.index(True)
    assert all(known[first:]) and (200 - first) * 10 >= LEAST_LIMIT * 3 // 4
    corpus.add(text(number) for number in range(200, 400))
    assert len(corpus) <= LEAST_LIMIT and knows(corpus, 399) and not knows(corpus, 199)


def test_a_text_longer_than_a_part_is_found_everywhere(tmp_path: Path) -> None:
    corpus, long = SuffixCorpus(tmp_path, limit=2048), list(range(1500))
    corpus.add([long])
    assert len(corpus.segments) > 1
    for place in range(LEAST_MATCH, len(long)):
        first = corpus.find(long[:place], depth=1)[0]
        assert first.length == min(place, LONGEST_MATCH) and list(first.tokens) == [place]


def test_the_limit_that_was_said_last_holds(tmp_path: Path) -> None:
    assert SuffixCorpus(tmp_path).limit == DEFAULT_LIMIT
    SuffixCorpus(tmp_path, limit=4096).add([text(1)])
    corpus = SuffixCorpus(tmp_path)
    assert corpus.limit == 4096
    corpus.add([text(2)])
    assert SuffixCorpus(tmp_path).limit == 4096 and SuffixCorpus(tmp_path, limit=8192).limit == 8192
    for wrong in (LEAST_LIMIT - 1, 1 << 31):
        with pytest.raises(ConfigError, match=f"limit must be in {LEAST_LIMIT}.*got {wrong}"):
            SuffixCorpus(tmp_path, limit=wrong)


def test_a_damaged_file_is_named_once_and_left_out(tmp_path: Path) -> None:
    corpus = SuffixCorpus(tmp_path)
    corpus.add([text(1)])
    corpus.add([text(2)])
    path = corpus.segments[0].path
    half = path.read_bytes()[:-20]
    path.unlink()
    path.write_bytes(half)
    with pytest.warns(UserWarning, match=f"{re.escape(str(path))} is damaged .*left out"):
        corpus = SuffixCorpus(tmp_path)
    assert not knows(corpus, 1) and knows(corpus, 2)
    corpus.add([text(3)])
    corpus.refresh()
    assert knows(corpus, 2) and knows(corpus, 3) and path.exists()


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    late = SuffixCorpus(tmp_path, identity="other")
    SuffixCorpus(tmp_path, identity="one").add([text(1)])
    SuffixCorpus(tmp_path, identity="one").add([text(2)])
    for _ in range(2):
        with pytest.raises(ConfigError, match="holds ids of the tokenizer 'one', not of the tokenizer 'other'"):
            late.refresh()
    with pytest.raises(ConfigError, match="'one', not of the tokenizer 'other'"):
        SuffixCorpus(tmp_path, identity="other")
    with pytest.raises(ConfigError, match="'one', not of the tokenizer 'other'"):
        late.add([text(3)])
    unnamed = SuffixCorpus(tmp_path)
    assert knows(unnamed, 1)
    with pytest.raises(ConfigError, match="not of a tokenizer without a name"):
        unnamed.add([text(3)])


@pytest.mark.parametrize("wrong", [[1, -1], [1 << 31], [(1 << 31) - 1], ["a"], 5])
def test_what_are_no_ids_is_named(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(ConfigError, match="texts must hold"):
        SuffixCorpus(tmp_path).add([wrong])  # type: ignore[list-item]


def test_texts_too_short_to_be_found_are_left_out(tmp_path: Path) -> None:
    corpus = SuffixCorpus(tmp_path)
    corpus.add([[], [1, 2, 3, 4]])
    assert len(corpus) == 0 and not list(tmp_path.iterdir())
    corpus.add([[(1 << 31) - 2, 2, 3, 4, 5], []])
    assert found(corpus, [(1 << 31) - 2, 2, 3, 4]) == [[5]]


def test_copies_and_pickles_find_the_same(tmp_path: Path) -> None:
    corpus = SuffixCorpus(tmp_path, limit=4096, identity="one")
    corpus.add([text(1)])
    for twin in (copy.copy(corpus), copy.deepcopy(corpus), pickle.loads(pickle.dumps(corpus))):
        assert knows(twin, 1) and twin.limit == 4096 and twin.identity == "one"


def test_threads_may_add_and_look_up_together(tmp_path: Path) -> None:
    corpus, wrong = SuffixCorpus(tmp_path), list[object]()

    def work(first: int, own: SuffixCorpus) -> None:
        for number in range(first, first + 6):
            own.add([text(number)])
            corpus.refresh()
            if not knows(corpus, number):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(10 * k, SuffixCorpus(tmp_path))) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(SuffixCorpus(tmp_path)) == 3 * 6 * 10
