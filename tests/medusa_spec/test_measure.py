from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_spec import measure
from medusa_spec.comparison import Comparison
from medusa_spec.config import MedusaConfig
from medusa_spec.errors import ConfigError
from medusa_spec.heads import HeadsConfig
from medusa_spec.measure import WARM_UP_TOKENS, compare, cut_after_eos
from medusa_spec.prompts import Prompt
from medusa_spec.stats import DecodingStats
from medusa_spec.testing import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id


class Clock:
    """A clock that only fakes move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeTarget:
    """Says `answer`; every token takes `per_token` on the clock."""

    def __init__(self, clock: Clock, answer: str, per_token: float, log: list[Any]) -> None:
        self.clock, self.answer, self.per_token, self.log = clock, answer, per_token, log
        self.device, self.dtype, self.name = torch.device("cpu"), torch.float64, "hf"
        self.generation_config = SimpleNamespace(eos_token_id=EOS)

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, **arguments: Any) -> Any:
        self.log.append((self.name, TOKENIZER.decode(input_ids[0]), max_new_tokens, arguments))
        answer = torch.tensor([TOKENIZER(self.answer)["input_ids"][:max_new_tokens]])
        self.clock.now += answer.shape[1] * self.per_token
        return torch.cat([input_ids, answer], dim=1)


class FakeMedusa(FakeTarget):
    """The same, twice as fast with a draft; counts as the decoding loop does."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.target = self
        self.drafter, self.medusa_config = SimpleNamespace(name="heads"), None
        self.speculation = SimpleNamespace(mode="auto")
        self.last_stats = DecodingStats()

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, **arguments: Any) -> Any:
        plain, self.mode = arguments.pop("draft_nodes") == 0, arguments.pop("speculation", None)
        self.name = "plain" if plain else "tree"
        start, speed = self.clock.now, 1 if plain else 2
        output = super().generate(input_ids, max_new_tokens, **arguments)
        new = output.shape[1] - input_ids.shape[1]
        self.clock.now = start + (self.clock.now - start) / speed
        self.last_stats = DecodingStats(
            new_tokens=new, requests=1, passes=4, drafted_passes=0 if plain else 4,
            accepted=0 if plain else 6, accepted_by_depth=[] if plain else [4, 2],
            offered_by_depth=[] if plain else [4, 4], pass_sizes=Counter({1 if plain else 8: 4}),
        )  # fmt: skip
        self.last_stats.seconds["verify"] = 4.0 if plain else 6.0
        self.last_stats.seconds["draft"] = 0.0 if plain else 1.0
        return output


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure.time, "perf_counter", clock)
    return clock


def _compare(clock: Clock, prompts: Any, *, hf_answer: str = "yes it is", **options: Any) -> Any:
    log: list[Any] = []
    hf = FakeTarget(clock, hf_answer, 4.0, log)
    ours = FakeMedusa(clock, "yes it is", 2.0, log)
    return compare(ours, hf, TOKENIZER, prompts, **options), log  # type: ignore[arg-type]


def test_speeds_ratios_and_equality_are_those_of_the_arms(clock: Clock) -> None:
    comparison, _ = _compare(clock, ["a", "b", "c"], max_new_tokens=64)
    assert comparison.arms == ("hf", "plain", "tree")
    assert comparison.tokens_per_second("hf") == pytest.approx(1 / 4)
    assert comparison.tokens_per_second("tree") == pytest.approx(1)
    assert comparison.speedup("tree", "hf") == pytest.approx((4, 4, 4))
    assert comparison.speedup("tree", "plain").value == pytest.approx(2)
    assert comparison.speedup("plain", "hf").value == pytest.approx(2)
    assert comparison.equality("tree", "hf") == (3, 3, ())


def test_differing_outputs_are_found_where_they_part(clock: Clock) -> None:
    comparison, _ = _compare(clock, ["a", "b"], hf_answer="yes it was")
    assert comparison.equality("tree", "hf") == (0, 2, (7, 7))
    assert comparison.equality("tree", "plain").equal == 2


def test_arms_alternate_prompt_by_prompt_and_their_order_rotates(clock: Clock) -> None:
    _, log = _compare(clock, ["a", "b", "c", "d"], warm_up=False)
    order = [name for name, *_ in log]
    assert [order[start : start + 3] for start in (0, 3, 6, 9)] == [
        ["hf", "plain", "tree"],
        ["plain", "tree", "hf"],
        ["tree", "hf", "plain"],
        ["hf", "plain", "tree"],
    ]


def test_warm_up_runs_every_arm_and_is_not_counted(clock: Clock) -> None:
    with_it, log = _compare(clock, ["a"], max_new_tokens=64)
    without, short_log = _compare(clock, ["a"], max_new_tokens=64, warm_up=False)
    assert [(name, most) for name, _, most, _ in log[:3]] == [
        ("hf", WARM_UP_TOKENS), ("plain", WARM_UP_TOKENS), ("tree", WARM_UP_TOKENS),
    ]  # fmt: skip
    assert (len(log), len(short_log)) == (6, 3)
    assert with_it.records == without.records


def test_tokens_are_counted_up_to_and_including_eos(clock: Clock) -> None:
    comparison, _ = _compare(clock, ["a"], hf_answer=f"yes{TOKENIZER.eos_token} and more")
    assert comparison.records[0].runs["hf"].tokens == (*TOKENIZER("yes")["input_ids"], EOS)


def test_any_of_several_eos_ids_ends_the_count() -> None:
    assert cut_after_eos([5, 6, 7, 8], frozenset({7, 6})) == (5, 6)
    assert cut_after_eos([5, 6], frozenset()) == (5, 6)


def test_eos_given_for_generation_outranks_the_models_own(clock: Clock) -> None:
    last = TOKENIZER("e")["input_ids"][0]
    comparison, _ = _compare(clock, ["a"], eos_token_id=[last])
    assert TOKENIZER.decode(comparison.records[0].runs["tree"].tokens) == "ye"


def test_all_arms_get_equal_arguments_and_equal_random_states(clock: Clock) -> None:
    seen: dict[str, Any] = {}

    def watch(arm: str, index: int, prompt: Prompt) -> dict[str, Any]:
        return {"temperature": 0.5 + index}

    class Sampling(FakeMedusa):
        def generate(self, input_ids: torch.Tensor, max_new_tokens: int, **rest: Any) -> Any:
            seen[f"{'plain' if rest['draft_nodes'] == 0 else 'tree'}"] = torch.rand(3).tolist()
            return super().generate(input_ids, max_new_tokens, **rest)

    log: list[Any] = []
    model: Any = Sampling(clock, "yes", 1.0, log)
    compare(model, None, TOKENIZER, ["a", "b"], warm_up=False, watch=watch, do_sample=True, top_k=5)
    assert seen["plain"] == seen["tree"]
    assert [arguments["temperature"] for *_, arguments in log] == [0.5, 0.5, 1.5, 1.5]
    assert all(arguments["do_sample"] and arguments["top_k"] == 5 for *_, arguments in log)


def test_decoding_is_greedy_unless_asked_otherwise(clock: Clock) -> None:
    _, log = _compare(clock, ["a"])
    assert all(arguments["do_sample"] is False for *_, arguments in log)


def test_later_turns_follow_the_same_answer_in_every_arm(clock: Clock) -> None:
    talk = Prompt(messages=({"role": "user", "content": "first"},), later_turns=("second",))
    comparison, log = _compare(clock, [talk], hf_answer="no", warm_up=False)
    texts = {text for _, text, *_ in log[3:]}
    assert len(log) == 6 and len(texts) == 1
    assert "<|im_start|>assistant\nno<|im_end|>\n<|im_start|>user\nsecond<|im_end|>" in texts.pop()
    record = comparison.records[0]
    assert TOKENIZER.decode(record.runs["tree"].tokens) == "yes it is" * 2
    assert record.tree_stats.passes == 8
    assert record.runs["hf"].seconds == pytest.approx(4 * 4.0)


def test_categories_are_the_prompts_own_or_those_given(clock: Clock) -> None:
    prompt = Prompt(messages=({"role": "user", "content": "x"},), category="maths")
    assert _compare(clock, [prompt, "y"])[0].categories == ("maths", "")
    assert _compare(clock, [prompt, "y"], categories=["a", "b"])[0].categories == ("a", "b")


def test_without_a_baseline_only_own_arms_are_compared(clock: Clock) -> None:
    model: Any = FakeMedusa(clock, "yes", 1.0, [])
    comparison = compare(model, None, TOKENIZER, ["a"])
    assert isinstance(comparison, Comparison)
    assert comparison.pairs == (("tree", "plain"),)


def test_progress_is_told_after_each_prompt(clock: Clock) -> None:
    told: list[tuple[int, int]] = []
    _compare(clock, ["a", "b"], on_prompt=lambda done, of: told.append((done, of)))
    assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("prompts", "options", "name"),
    [
        ([], {}, "prompts"),
        (["a"], {"categories": ["x", "y"]}, "categories"),
        (["a"], {"max_new_tokens": 0}, "max_new_tokens"),
        (["a"], {"draft_nodes": 0}, "draft_nodes"),
        (["a"], {"streamer": None}, "streamer"),
        (["a"], {"num_return_sequences": 2}, "num_return_sequences"),
    ],
)
def test_unusable_arguments_are_named(clock: Clock, prompts: list[str], options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        _compare(clock, prompts, **options)


def test_heads_of_another_chat_template_are_told(clock: Clock) -> None:
    heads = HeadsConfig(hidden_size=8, vocab_size=300)
    model: Any = FakeMedusa(clock, "yes", 1.0, [])
    model.medusa_config = MedusaConfig(heads=heads, chat_template_hash="0" * 16)
    with pytest.warns(UserWarning, match=f"template {'0' * 16}, this tokenizer has"):
        compare(model, None, TOKENIZER, ["a"])
    compare(model, None, TOKENIZER, ["a"], chat_template=False)
    model.drafter.name = "ngram"
    compare(model, None, TOKENIZER, ["a"])


def test_prompts_are_laid_out_with_their_tools(clock: Clock) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + str(
        tokenizer.chat_template
    )
    tool = {"type": "function", "function": {"name": "weather"}}
    log: list[Any] = []
    model: Any = FakeMedusa(clock, "yes", 1.0, log)
    prompts = [Prompt(messages=({"role": "user", "content": "Q"},), tools=tools) for tools in ((tool,), ())]
    compare(model, None, tokenizer, prompts, warm_up=False)
    assert ["weather" in text for _, text, *_ in log] == [True, True, False, False]
