"""Masks, exact to the token."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from medusa_spec.errors import DataError
from medusa_spec.finetune.chat import chat_template_hash, has_generation_marks, render
from medusa_spec.finetune.records import Record
from medusa_spec.testing import tiny_tokenizer

# Where `{% generation %}` closes differs between templates in use.
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}INSIDE{% endgeneration %}OUTSIDE"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDINGS = {
    "content": ("{{ message.content }}", "<|im_end|>\n"),
    "content and end of turn": ("{{ message.content }}<|im_end|>", "{{ '\n' }}"),
    "the line break too": ("{{ message.content }}<|im_end|>\n", ""),
}
TURNS = [
    {"role": "system", "content": "Be SHORT."},
    {"role": "user", "content": "Hi, who are you?"},
    {"role": "assistant", "content": "I am Bob."},
    {"role": "user", "content": "Où?"},
    {"role": "assistant", "content": "\n  Ici, ÉTÉ 42 \t"},
]


def plain() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


def marked(ending: str) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    inside, outside = ENDINGS[ending]
    tokenizer.chat_template = MARKED.replace("INSIDE", inside).replace("OUTSIDE", outside)
    return tokenizer


def rendered(
    turns: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **fields: Any
) -> tuple[list[int], list[bool]]:
    record = Record(place="here:1", messages=tuple(turns), **fields)
    result = render(record, tokenizer, frozenset([tokenizer.eos_token_id]))
    return result.input_ids, result.mask


def by_hand(turns: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Laid out turn by turn; the tokenizer is byte-level, so pieces can be encoded one by one."""
    ids: list[int] = []
    mask: list[bool] = []
    for turn in turns:
        pieces = [f"<|im_start|>{turn['role']}\n", f"{turn['content']}<|im_end|>", "\n"]
        for place, piece in enumerate(pieces):
            tokens = tokenizer(piece, add_special_tokens=False)["input_ids"]
            ids += tokens
            mask += [place == 1 and turn["role"] == "assistant"] * len(tokens)
    return ids, mask


def test_mask_is_the_answers_and_their_ends_of_turn() -> None:
    assert rendered(TURNS, plain()) == by_hand(TURNS, plain())


@pytest.mark.parametrize("ending", ENDINGS)
def test_generation_marks_and_prefix_differencing_agree(ending: str) -> None:
    assert has_generation_marks(marked(ending)) and not has_generation_marks(plain())
    assert rendered(TURNS, marked(ending)) == by_hand(TURNS, plain())


@given(st.lists(st.tuples(st.text(max_size=12), st.text(min_size=1, max_size=12)), min_size=1, max_size=3))
def test_mask_is_exact_whatever_is_said(rounds: list[tuple[str, str]]) -> None:
    turns = []
    for question, answer in rounds:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    assert rendered(turns, plain()) == by_hand(turns, plain())


def test_text_is_not_altered() -> None:
    ids, _ = rendered(TURNS, plain())
    text = plain().apply_chat_template(TURNS, tokenize=False)
    assert plain().decode(ids) == text and "ÉTÉ" in text


def test_pad_equal_to_eos_does_not_mask_the_real_eos() -> None:
    tokenizer = plain()
    tokenizer.pad_token = tokenizer.eos_token
    ids, mask = rendered(TURNS, tokenizer)
    trained_ends = [token == tokenizer.eos_token_id and kept for token, kept in zip(ids, mask, strict=True)]
    assert sum(trained_ends) == 2


@pytest.mark.parametrize("make", [plain, lambda: marked("content and end of turn")], ids=["differenced", "marked"])
def test_the_end_of_a_cut_answer_is_not_trained_on(make: Any) -> None:
    ids, whole = rendered(TURNS, make())
    _, cut = rendered(TURNS, make(), finished=False)
    differ = [place for place, (a, b) in enumerate(zip(whole, cut, strict=True)) if a != b]
    assert differ == [max(i for i, token in enumerate(ids) if token == make().eos_token_id)]


def test_a_turn_that_the_template_rewrites_later_is_left_out() -> None:
    tokenizer = plain()
    # As templates do that drop an earlier answer's thoughts.
    tokenizer.chat_template = str(tokenizer.chat_template).replace(
        "{{ message.content }}",
        "{{ message.content if loop.last or message.role == 'user' else message.content.split('|')[-1] }}",
    )
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "thoughts|b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "more|d"},
    ]
    ids, mask = rendered(turns, tokenizer)
    assert tokenizer.decode([t for t, kept in zip(ids, mask, strict=True) if kept]) == "more|d<|im_end|>"


def test_nothing_to_train_on_is_refused() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]
    with pytest.raises(DataError, match="here:1: no token would be trained on"):
        rendered(turns, plain(), finished=False)


def test_a_mask_of_everything_is_refused() -> None:
    tokenizer = plain()
    tokenizer.chat_template = (
        "{% generation %}{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}{% endgeneration %}"
    )
    with pytest.raises(DataError, match="here:1: every token would be trained on"):
        rendered(TURNS[1:3], tokenizer)


def test_prompt_and_completion_need_no_template() -> None:
    tokenizer = plain()
    tokenizer.chat_template = None
    turns = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    ids, mask = rendered(turns, tokenizer)
    assert tokenizer.decode(ids) == "2+2=4<|im_end|>" and mask == [False] * 4 + [True] * 2
    with pytest.raises(DataError, match="chat template"):
        rendered(TURNS, tokenizer)


def test_text_is_trained_on_as_a_whole() -> None:
    result = render(Record(place="here:1", text="Abc"), plain(), frozenset())
    assert plain().decode(result.input_ids) == "Abc" and result.mask == [True] * 3


def test_the_template_hash_names_the_template() -> None:
    tokenizer = plain()
    assert chat_template_hash(tokenizer) == chat_template_hash(plain())
    assert chat_template_hash(tokenizer) != chat_template_hash(marked("content"))
    tokenizer.chat_template = None
    assert chat_template_hash(tokenizer) is None


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{% for", "{{ messages[0].content + 5 }}", "{{ none.x.y }}"],
)
def test_a_template_that_fails_names_the_record(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DataError, match="here:1: the chat template cannot render"):
        rendered(TURNS, tokenizer)


def test_nothing_at_all_is_refused_without_a_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="here:1"):
        rendered([{"role": "user", "content": ""}, {"role": "assistant", "content": ""}], tokenizer)
    with pytest.raises(DataError, match="here:1: .*chat template"):
        rendered(TURNS, tokenizer)


@pytest.mark.parametrize("make", [plain, lambda: marked("content")])
def test_a_greeting_is_not_trained_on(make: Any) -> None:
    """Nobody had asked: the target did not choose it."""
    greeting = {"role": "assistant", "content": "Welcome!"}
    for before in ([], TURNS[:1]):
        ids, mask = rendered([*before, greeting, *TURNS[1:3]], make())
        trained = [token for token, kept in zip(ids, mask, strict=True) if kept]
        assert make().decode(trained) == "I am Bob.<|im_end|>"
