"""Chat templates in the styles in use: the mask is the answers and their ends of turn, to the token.

Each style stands here twice, as a template and as what a person would lay out by hand.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from medusa_spec.errors import DataError
from medusa_spec.finetune.chat import Rendered, has_generation_marks, render
from medusa_spec.finetune.records import parse_record
from medusa_spec.finetune.template_fit import MERGED

Pieces = list[tuple[str, bool]]
"""Text, and whether it is trained on."""


def chatml(turns: Sequence[dict[str, Any]]) -> Pieces:
    pieces: Pieces = []
    for turn in turns:
        calls = "".join(
            f"\n<tool_call>{json.dumps(call['function'], ensure_ascii=False)}</tool_call>"
            for call in turn.get("tool_calls", ())
        )
        pieces += [(f"<|im_start|>{turn['role']}\n", False)]
        pieces += [(f"{turn['content']}{calls}<|im_end|>", turn["role"] == "assistant"), ("\n", False)]
    return pieces


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def llama3(turns: Sequence[dict[str, Any]]) -> Pieces:
    pieces: Pieces = [("<|begin_of_text|>", False)]
    for turn in turns:
        role = "ipython" if turn["role"] == "tool" else turn["role"]
        said = turn["content"].strip()
        for call in turn.get("tool_calls", ()):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            said = f'{{"name": "{call["function"]["name"]}", "parameters": {arguments}}}'
        pieces += [(f"<|start_header_id|>{role}<|end_header_id|>\n\n", False)]
        pieces += [(f"{said}<|eot_id|>", turn["role"] == "assistant")]
    return pieces


LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{% if m.role != 'assistant' %}{{ (m.content | trim) + '<|eot_id|>' }}{% else %}{% generation %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    '{{ \'{"name": "\' + f.name + \'", "parameters": \' + (f.arguments | tojson) + "}" }}'
    "{% else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def mistral(turns: Sequence[dict[str, Any]]) -> Pieces:
    pieces: Pieces = [("<s>", False)]
    for turn in turns:
        if turn["role"] == "user":
            pieces += [(f"[INST] {turn['content']} [/INST]", False)]
        elif turn["role"] == "tool":
            pieces += [(f"[TOOL_RESULTS]{turn['content']}[/TOOL_RESULTS]", False)]
        elif "tool_calls" in turn:
            calls = [call["function"] for call in turn["tool_calls"]]
            pieces += [(f"[TOOL_CALLS]{json.dumps(calls, ensure_ascii=False)}</s>", True)]
        else:
            pieces += [(f" {turn['content']}</s>", True)]
    return pieces


MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('Only user, assistant and tool roles are supported!') }}"
    "{% elif m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls %}{% generation %}{{ '[TOOL_CALLS]' }}"
    "{{ m.tool_calls | map(attribute='function') | list | tojson }}{{ '</s>' }}{% endgeneration %}"
    "{% else %}{% generation %}{{ ' ' + m.content + '</s>' }}{% endgeneration %}{% endif %}{% endfor %}"
)


def gemma(turns: Sequence[dict[str, Any]]) -> Pieces:
    pieces: Pieces = [("<bos>", False)]
    for turn in turns:
        role = "model" if turn["role"] == "assistant" else turn["role"]
        pieces += [(f"<start_of_turn>{role}\n", False)]
        pieces += [(f"{turn['content'].strip()}<end_of_turn>", role == "model"), ("\n", False)]
    return pieces


GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ (m.content | trim) + '<end_of_turn>' }}{% endgeneration %}"
    "{{ '\n' }}{% else %}{{ (m.content | trim) + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def phi(turns: Sequence[dict[str, Any]]) -> Pieces:
    pieces: Pieces = []
    for turn in turns:
        pieces += [(f"<|{turn['role']}|>\n", False), (f"{turn['content']}<|end|>", turn["role"] == "assistant")]
        pieces += [("\n", False)]
    return [*pieces, ("<|endoftext|>", False)]


PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Style:
    """A style, its special tokens (the last one is the tokenizer's EOS) and where generation stops."""

    template: str
    by_hand: Callable[[Sequence[dict[str, Any]]], Pieces]
    special: tuple[str, ...]
    ends: tuple[str, ...]
    calls: bool = False
    system: bool = True


STYLES = {
    "chatml": Style(
        template=CHATML, by_hand=chatml, special=("<|im_start|>", "<|im_end|>"), ends=("<|im_end|>",), calls=True
    ),
    "llama3": Style(
        template=LLAMA3,
        by_hand=llama3,
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
        ends=("<|end_of_text|>", "<|eot_id|>"),
        calls=True,
    ),
    "mistral": Style(
        template=MISTRAL,
        by_hand=mistral,
        special=("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
        ends=("</s>",),
        calls=True,
        system=False,
    ),
    "gemma": Style(
        template=GEMMA,
        by_hand=gemma,
        special=("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
        ends=("<eos>", "<end_of_turn>"),
        system=False,
    ),
    "phi": Style(
        template=PHI,
        by_hand=phi,
        special=("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"),
        ends=("<|endoftext|>", "<|end|>"),
    ),
}


def tokenizer_of(style: Style, *, marked: bool) -> PreTrainedTokenizerBase:
    """One token a byte, and the style's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={character: place for place, character in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(style.special))
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=style.special[-1], bos_token=style.special[0])
    marks = () if marked else ("{% generation %}", "{% endgeneration %}")
    template = style.template
    for mark in marks:
        template = template.replace(mark, "")
    fast.chat_template = template
    return fast


TOKENIZERS = {
    (name, marked): tokenizer_of(style, marked=marked) for name, style in STYLES.items() for marked in (False, True)
}
EACH = pytest.mark.parametrize(("name", "marked"), TOKENIZERS)


def rendered(name: str, marked: bool, record: dict[str, Any]) -> Rendered:
    tokenizer = TOKENIZERS[name, marked]
    assert has_generation_marks(tokenizer) == marked
    ends = tokenizer.convert_tokens_to_ids(list(STYLES[name].ends))
    return render(parse_record(record, "here:1"), tokenizer, frozenset(ends))


def laid_out(name: str, turns: Sequence[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    """Ids and mask by hand; the tokenizer is byte-level, so pieces can be encoded one by one."""
    ids: list[int] = []
    mask: list[bool] = []
    for text, trained in STYLES[name].by_hand(turns):
        piece = TOKENIZERS[name, False](text, add_special_tokens=False)["input_ids"]
        ids += piece
        mask += [trained] * len(piece)
    return ids, mask


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>[]|"), max_size=8)
ROUND = st.tuples(WORDS, WORDS, st.booleans(), st.dictionaries(st.sampled_from(["città", "n"]), WORDS, max_size=2))


@EACH
@given(st.lists(ROUND, min_size=1, max_size=3), st.booleans(), WORDS.filter(str.strip))
def test_the_mask_is_exactly_what_the_assistant_wrote(
    name: str, marked: bool, rounds: list[tuple[str, str, bool, dict[str, str]]], with_system: bool, system: str
) -> None:
    style = STYLES[name]
    turns: list[dict[str, Any]] = []
    if with_system and style.system:
        turns.append({"role": "system", "content": system})
    for question, answer, calls, arguments in rounds:
        turns.append({"role": "user", "content": question})
        if calls and style.calls:
            call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
            turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
            turns.append({"role": "tool", "content": question})
        turns.append({"role": "assistant", "content": answer})
    result = rendered(name, marked, {"messages": turns})
    assert (result.input_ids, result.mask) == laid_out(name, turns)
    assert (result.answers, result.rewritten, result.notes) == (len(result.spans), 0, ())


def asked(*answers: dict[str, Any]) -> list[dict[str, Any]]:
    turns = []
    for number, answer in enumerate(answers):
        turns += [{"role": "user", "content": f"Q{number}"}, {"role": "assistant", **answer}]
    return turns


@EACH
def test_answers_of_weight_nought_are_read_and_not_trained_on(name: str, marked: bool) -> None:
    turns = asked({"content": "A0"}, {"content": "A1", "weight": 0}, {"content": "A2", "weight": 1})
    result = rendered(name, marked, {"messages": turns})
    ids, mask = laid_out(name, turns)
    tokenizer = TOKENIZERS[name, marked]
    assert result.input_ids == ids and result.weightless == 1 and len(result.spans) == 2
    text = tokenizer.decode([t for t, kept in zip(ids, result.mask, strict=True) if kept])
    assert "A0" in text and "A1" not in text and "A2" in text
    assert sum(result.mask) == sum(mask) * 2 / 3


@EACH
def test_a_system_turn_is_kept_or_merged_and_never_lost(name: str, marked: bool) -> None:
    turns = [{"role": "system", "content": "Be brief."}, *asked({"content": "A", "weight": 1}, {"content": "B"})]
    result = rendered(name, marked, {"messages": turns})
    if STYLES[name].system:
        assert (result.input_ids, result.mask) == laid_out(name, turns) and result.notes == ()
        return
    merged = [{"role": "user", "content": "Be brief.\n\nQ0"}, *turns[2:]]
    assert (result.input_ids, result.mask) == laid_out(name, merged) and result.notes == (MERGED,)


@pytest.mark.parametrize("name", ["gemma", "phi"])
def test_a_template_that_leaves_out_tool_calls_is_refused(name: str) -> None:
    call = {"name": "find", "arguments": {"a": 1}}
    turns = asked({"content": "", "tool_calls": [call]})
    with pytest.raises(DataError, match="here:1: .*the call of 'find' is left out"):
        rendered(name, False, {"messages": turns})


def test_roles_that_do_not_alternate_are_refused_where_the_template_says_so() -> None:
    turns = [{"role": "user", "content": "Q"}, *asked({"content": "A"})]
    with pytest.raises(DataError, match="here:1: .*must alternate"):
        rendered("gemma", False, {"messages": turns})
    assert sum(rendered("chatml", False, {"messages": turns}).mask) == 2


@EACH
def test_the_end_of_an_answer_is_one_token_however_many_the_template_puts(name: str, marked: bool) -> None:
    result = rendered(name, marked, {"messages": asked({"content": "A"})})
    ends = set(TOKENIZERS[name, marked].convert_tokens_to_ids(list(STYLES[name].ends)))
    assert sum(token in ends for token, kept in zip(result.input_ids, result.mask, strict=True) if kept) == 1
