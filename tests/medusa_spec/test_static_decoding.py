"""The law again, in steps of fixed shape: what they decode is what the target says, token for token, in float64."""

import copy
import pickle
import threading
from types import SimpleNamespace

import accelerate
import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from medusa_spec import MedusaModel, NgramDrafter, static_buckets, static_decoding
from medusa_spec.acceptance import EXACT_SAMPLING
from medusa_spec.errors import ConfigError
from medusa_spec.static_decoding import StaticSteps, plain_draft, reason_against
from medusa_spec.static_step import StaticStep
from medusa_spec.tree import TreeTemplate, chain, shape_of

NEW = 40
TREE = TreeTemplate(paths=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)))
SHAPES = {"chain": chain(4), "bush": shape_of((-1, 0, 1, 2, 0, 4, 1, 3)), "star": shape_of((-1, 0, 0, 0))}
EAGER = "eager steps were asked for"


def plain(model, ids, **kwargs):
    return model.generate(ids, do_sample=False, **{"max_new_tokens": NEW, **kwargs})


def wrapped(model, drafter, mode="eager"):
    out = MedusaModel(model, drafter=drafter, probe=False)
    out.steps.mode = mode
    return out


def knowing(lookup, model, text, shape, wrong=0):
    """A drafter that has seen how the target says this text [1, T]."""
    with torch.no_grad():
        states = model(text, output_hidden_states=True).hidden_states[-1][0]
    return lookup(states, text[0], shape, wrong)


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(static_buckets, "SMALLEST_CAPACITY", 16)
    monkeypatch.setattr(static_decoding, "LONGEST_RESERVE", 8)


@pytest.mark.parametrize("length", [1, 9, 23])
def test_greedy_with_heads_equals_plain_greedy(any_model, prompt, length):
    ids = prompt(length, seed=length)
    answer = plain(any_model, ids)
    model = MedusaModel(any_model, probe=False, tree=TREE)
    model.steps.mode = "eager"
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
    assert model.graph_reason == EAGER
    assert set(model.last_stats.pass_sizes) == {9}


@pytest.mark.parametrize("wrong", [0, 3], ids=["always-right", "sometimes-right"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gpt-oss"])
def test_greedy_through_any_fixed_tree_equals_plain_greedy(make_model, lookup, prompt, name, shape, wrong):
    model, ids = make_model(name), prompt(9)
    answer = plain(model, ids)
    steps = wrapped(model, knowing(lookup, model, answer, shape, wrong))
    assert torch.equal(steps.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
    assert steps.graph_reason == EAGER
    assert steps.last_stats.mu > 0
    if not wrong:
        assert steps.last_stats.tau >= shape.max_depth  # all but the last pass gain D + 1


def test_counters_are_those_of_the_ordinary_loop(llama, lookup, prompt):
    ids = prompt(9)
    drafter = knowing(lookup, llama, plain(llama, ids), SHAPES["bush"], wrong=4)
    model, found = wrapped(llama, drafter), []
    for mode in ("off", "eager"):
        model.steps.mode = mode
        model.generate(ids, do_sample=False, max_new_tokens=NEW)
        stats = dict(vars(model.last_stats))
        assert stats.pop("seconds")["verify"] > 0
        found.append(stats)
    assert found[0] == found[1]
    assert len(found[0]["accepted_by_depth"]) > 1


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 8, 13])
def test_exactly_as_many_tokens_as_asked(llama, lookup, prompt, new):
    ids = prompt(6)
    answer = plain(llama, ids)
    model = wrapped(llama, knowing(lookup, llama, answer, chain(4)))
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=new), answer[:, : 6 + new])
    assert model.last_stats.new_tokens == sum(model.last_stats.spans) == new


def test_every_eos_id_cuts_inside_an_accepted_path_and_what_was_read_behind_it_is_forgotten(llama, lookup, prompt):
    ids = prompt(6)
    answer = plain(llama, ids)
    model, cuts = wrapped(llama, knowing(lookup, llama, answer, chain(4))), set()
    for place in range(6, 30):
        arguments = {"eos_token_id": [int(answer[0, place]), 127], "return_dict_in_generate": True}
        expected = model.target.generate(ids, do_sample=False, max_new_tokens=NEW, **arguments)
        out = model.generate(ids, do_sample=False, max_new_tokens=NEW, **arguments)
        assert torch.equal(out.sequences, expected.sequences)
        cuts.add(model.last_stats.spans[-1])
        assert out.cache.get_seq_length() == expected.cache.get_seq_length() == out.sequences.shape[1] - 1
        for own, other in zip(out.cache.layers, expected.cache.layers, strict=True):
            assert torch.allclose(own.keys, other.keys, rtol=1e-9, atol=1e-9)
            assert torch.allclose(own.values, other.values, rtol=1e-9, atol=1e-9)
    assert len(cuts) > 2


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3", "gpt-oss"])
def test_a_conversation_goes_on_in_the_user_s_cache(make_model, prompt, name):
    model = make_model(name)

    def talk(generate):
        cache, text, lengths = DynamicCache(config=model.config), prompt(7), []
        for turn, new in enumerate((12, 5, 20)):
            text = generate(text, do_sample=False, max_new_tokens=new, cache=cache)
            lengths.append(cache.get_seq_length())
            text = torch.cat([text, prompt(4, seed=turn)], dim=1)
        return text, lengths

    expected = talk(model.generate)
    steps = MedusaModel(model, probe=False, tree=TREE)
    steps.steps.mode = "eager"
    found = talk(steps.generate)
    assert torch.equal(found[0], expected[0]) and found[1] == expected[1] and steps.graph_reason == EAGER


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gpt-oss"])
def test_capacity_grows_in_the_middle_of_a_text(make_model, lookup, prompt, name, small_buckets):
    model, ids = make_model(name), prompt(5)
    answer = plain(model, ids, max_new_tokens=120)
    steps = wrapped(model, knowing(lookup, model, answer, SHAPES["bush"], wrong=3))
    assert torch.equal(steps.generate(ids, do_sample=False, max_new_tokens=120), answer)
    capacities = [bucket.step.cache.capacity for bucket in steps.steps.buckets.kept()]
    assert capacities == [32, 64, 128, 256][-len(capacities) :] and len(capacities) >= 3
    assert steps.last_stats.mu > 0 and steps.graph_reason == EAGER


def test_where_positions_end_the_ordinary_loop_goes_on(make_model, lookup, prompt):
    model, ids = make_model("gpt2", max_position_embeddings=32), prompt(5)
    answer = plain(model, ids, max_new_tokens=27)
    steps = wrapped(model, knowing(lookup, model, answer, chain(3), wrong=3))
    assert torch.equal(steps.generate(ids, do_sample=False, max_new_tokens=27), answer)
    assert steps.graph_reason == "the target's positions end before the tree does"
    sizes = steps.last_stats.pass_sizes
    assert sizes[4] > 1 and sum(size * count for size, count in sizes.items()) < 4 * steps.last_stats.passes


def test_plain_decoding_is_a_step_of_one_node(any_model, prompt):
    ids = prompt(8)
    answer = plain(any_model, ids)
    model = wrapped(any_model, NgramDrafter())
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW, draft_nodes=0), answer)
    assert model.last_stats.pass_sizes == {1: NEW - 1} and model.graph_reason == EAGER


def test_draft_nodes_chooses_a_smaller_step(llama, prompt):
    ids = prompt(8)
    answer = plain(llama, ids)
    model = MedusaModel(llama, probe=False, tree=TREE)
    model.steps.mode = "eager"
    for nodes in (8, 3, 8):
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW, draft_nodes=nodes), answer)
        assert set(model.last_stats.pass_sizes) == {nodes + 1}
    assert len(model.steps.buckets) == 2
    assert len({id(bucket.step.cache) for bucket in model.steps.buckets.kept()}) == 1


def test_streamers_and_criteria_see_every_token_and_none_behind_the_last(llama, lookup, prompt):
    ids, asked, put = prompt(6), [], []
    answer = plain(llama, ids)

    class Never(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            asked.append(input_ids[0].tolist())
            return torch.tensor([input_ids.shape[1] >= 6 + 17])

    streamer = SimpleNamespace(put=lambda tokens: put.extend(tokens.flatten().tolist()), end=lambda: put.append("end"))
    model = wrapped(llama, knowing(lookup, llama, answer, chain(4)))
    settings = {"do_sample": False, "max_new_tokens": NEW, "stopping_criteria": StoppingCriteriaList([Never()])}
    out = model.generate(ids, streamer=streamer, **settings)
    assert torch.equal(out, answer[:, : 6 + 17]) and model.graph_reason == EAGER
    assert asked == [answer[0, : 6 + n].tolist() for n in range(1, 18)]
    assert put == [*answer[0, : 6 + 17].tolist(), "end"]


def test_steps_are_read_one_late_and_made_no_further_than_that(llama, lookup, prompt, monkeypatch):
    ids, log = prompt(6), []
    answer = plain(llama, ids)
    model = wrapped(llama, knowing(lookup, llama, answer, chain(2), wrong=4))
    made, take = StaticStep.__call__, static_decoding.LateReader.take
    monkeypatch.setattr(StaticStep, "__call__", lambda self: log.append("step") or made(self))
    monkeypatch.setattr(static_decoding.LateReader, "take", lambda self: log.append("read") or take(self))
    said = answer[0, 6:].tolist()
    eos = next(token for place, token in enumerate(said) if place > 12 and token not in said[:place])
    model.generate(ids, do_sample=False, max_new_tokens=NEW, eos_token_id=eos)
    passes = model.last_stats.passes
    assert log.count("read") == passes and log.count("step") == passes + 1
    assert log == ["step", *["step", "read"] * passes]
    log.clear()
    model.generate(ids, do_sample=False, max_new_tokens=NEW, draft_nodes=0)
    assert log.count("step") == log.count("read") == NEW - 1  # every step gains a token: the last is known beforehand


# --- as graphs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window", "gemma2", "gemma3", "gpt2", "gpt-neox", "phi3"])
def test_recorded_steps_equal_plain_greedy(make_model, prompt, cuda_stand_in, name):
    model, answers = make_model(name), {}
    for seed in (0, 1):
        answers[seed] = plain(model, prompt(9 + seed, seed))
    steps = MedusaModel(model, probe=False, tree=TREE)
    steps.steps.mode = "graph"
    for seed, answer in answers.items():
        assert torch.equal(steps.generate(prompt(9 + seed, seed), do_sample=False, max_new_tokens=NEW), answer)
        assert steps.graph_reason is None
    assert cuda_stand_in.log.count("record") == 1  # the second text replays the first one's recording
    assert cuda_stand_in.log.count("replay") >= steps.last_stats.passes


def test_a_recording_is_made_anew_for_a_larger_capacity(llama, lookup, prompt, cuda_stand_in, small_buckets):
    ids = prompt(5)
    answer = plain(llama, ids, max_new_tokens=120)
    model = wrapped(llama, knowing(lookup, llama, answer, SHAPES["bush"], wrong=3), mode="graph")
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=120), answer)
    assert model.graph_reason is None and model.last_stats.mu > 0
    assert cuda_stand_in.log.count("record") == len(model.steps.buckets) >= 3


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_what_cannot_be_recorded_runs_without_and_says_why(make_model, prompt, cuda_stand_in, name):
    model, ids = make_model(name), prompt(9)  # eager experts ask the host who goes where
    answer = plain(model, ids)
    steps = MedusaModel(model, probe=False, tree=TREE)
    steps.steps.mode = "graph"
    for _ in range(2):
        assert torch.equal(steps.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
        assert steps.graph_reason.startswith("it cannot be recorded: RuntimeError: aten::")
        assert set(steps.last_stats.pass_sizes) == {9}
    assert "record" not in cuda_stand_in.log and "replay" not in cuda_stand_in.log


def test_a_step_that_fails_leaves_the_text_to_the_ordinary_loop(llama, prompt, cuda_stand_in, monkeypatch):
    ids = prompt(9)
    answer = plain(llama, ids)
    model = MedusaModel(llama, probe=False, tree=TREE)
    model.steps.mode = "graph"

    def fail(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(StaticStep, "__call__", fail)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
    assert model.graph_reason == "a step of fixed shape failed: OutOfMemoryError: CUDA out of memory"


@pytest.mark.parametrize("failing", [False, True], ids=["wrong", "failing"])
def test_passes_that_would_be_wrong_are_not_used(llama, prompt, monkeypatch, failing):
    def probe(backbone, backend):
        asked.append(backend)
        if failing:
            raise RuntimeError("no kernel")
        return "passes of fixed shape differ"

    ids, asked = prompt(9), []
    answer = plain(llama, ids)
    monkeypatch.setattr(static_decoding, "static_probe", probe)
    model = MedusaModel(llama, probe=False, tree=TREE)
    model.steps.mode = "eager"
    for _ in range(2):
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
        expected = (
            "a pass of fixed shape failed: RuntimeError: no kernel" if failing else "passes of fixed shape differ"
        )
        assert model.graph_reason == expected
    assert asked == [None]


def test_recordings_follow_weights_that_were_moved_and_heads_that_were_trained(llama, prompt, cuda_stand_in):
    ids = prompt(9)
    model = MedusaModel(llama, probe=False, tree=TREE)
    model.steps.mode = "graph"
    records = []
    for change in ("nothing", "nothing", "weights", "heads"):
        if change == "weights":
            llama.model.layers[0].mlp.up_proj.weight.data = llama.model.layers[0].mlp.up_proj.weight.data * 1.5
        if change == "heads":
            with torch.no_grad():
                model.heads.heads[0].blocks[0].linear.weight.add_(0.1)
        out = model.generate(ids, do_sample=False, max_new_tokens=NEW)
        records.append(cuda_stand_in.log.count("record"))
        assert torch.equal(out, plain(model.target, ids)) and model.graph_reason is None
    assert records == [1, 1, 2, 3]


def test_a_cast_target_is_recorded_anew(llama, prompt, cuda_stand_in):
    model = MedusaModel(llama, probe=False, tree=TREE)
    model.steps.mode = "graph"
    for dtype in (torch.float64, torch.float32, torch.float64):
        model.to(dtype)
        out = model.generate(prompt(9), do_sample=False, max_new_tokens=12)
        assert model.graph_reason is None
        if dtype == torch.float64:
            assert torch.equal(out, plain(model.target, prompt(9), max_new_tokens=12))
    assert cuda_stand_in.log.count("record") == 3


def test_few_recordings_are_kept(llama, prompt):
    model = MedusaModel(llama, probe=False, tree=TREE)
    model.steps.mode = "eager"
    for nodes in range(1, 8):
        model.generate(prompt(5), do_sample=False, max_new_tokens=4, draft_nodes=nodes)
    sizes = [bucket.step.tree.shape.size for bucket in model.steps.buckets.kept()]
    assert sizes == [5, 6, 7, 8]
    model.detach()
    assert not model.steps.buckets


def test_copies_and_pickles_record_anew(llama, prompt, cuda_stand_in):
    model = MedusaModel(llama, probe=False, tree=TREE)
    model.steps.mode = "graph"
    answer = model.generate(prompt(9), do_sample=False, max_new_tokens=12)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.steps.mode == "graph" and not again.steps.buckets
        assert torch.equal(again.generate(prompt(9), do_sample=False, max_new_tokens=12), answer)
        assert again.graph_reason is None


# --- when ------------------------------------------------------------------------------------------------------------


def test_on_a_cpu_the_ordinary_loop_is_the_default(llama, prompt):
    model = MedusaModel(llama, probe=False, tree=TREE)
    assert model.graph_reason == "nothing was decoded yet"
    model.generate(prompt(5), do_sample=False, max_new_tokens=4)
    assert model.graph_reason == "the target is on cpu; graphs are CUDA's"
    model.steps.mode = "off"
    model.generate(prompt(5), do_sample=False, max_new_tokens=4)
    assert model.graph_reason == "switched off"
    model.steps.mode = "fast"
    with pytest.raises(ConfigError, match="mode must be one of .*'eager'.* got 'fast'"):
        model.generate(prompt(5), do_sample=False, max_new_tokens=4)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"do_sample": True}, "exact_sampling with processors or scores"),
        ({"repetition_penalty": 1.3}, "greedy with processors or scores"),
        ({"output_scores": True, "return_dict_in_generate": True}, "greedy with processors or scores"),
        ({"drafter": NgramDrafter()}, "no fixed shape"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else ",".join(value),
)
def test_what_steps_cannot_do_the_ordinary_loop_does(llama, prompt, arguments, reason):
    ids = prompt(9)
    torch.manual_seed(5)
    kept = {name: value for name, value in arguments.items() if name != "drafter"}
    answer = llama.generate(ids, **{"do_sample": False, "max_new_tokens": NEW, **kept})
    model = MedusaModel(llama, probe=False, tree=TREE)
    model.steps.mode = "eager"
    torch.manual_seed(5)
    out = model.generate(ids, **{"do_sample": False, "max_new_tokens": NEW, **arguments})
    assert torch.equal(getattr(out, "sequences", out), getattr(answer, "sequences", answer))
    assert reason in model.graph_reason


def stub(**changes):
    """A request and a backbone that nothing speaks against, but for the changes."""
    row = SimpleNamespace(batched_choice=changes.get("batched_choice", True), rule=EXACT_SAMPLING)
    request = {"rows": [row] * changes.get("row_count", 1)}
    backbone = {"rescales_positions": False, "vocab_size": 8, "ids_below": 8, "device": torch.device("cpu")}
    backbone |= {"spread": None, "route": SimpleNamespace(name="attention interface")}
    parts = [{name: changes.get(name, value) for name, value in part.items()} for part in (request, backbone)]
    return [SimpleNamespace(**part) for part in parts]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"batched_choice": False}, "token by token"),
        ({"row_count": 2}, "a batch of 2 rows"),
        ({"rescales_positions": True}, "rescaled"),
        ({"route": SimpleNamespace(name="4-D mask")}, "route '4-D mask'"),
        ({"vocab_size": 9}, "no input embedding"),
        ({"spread": "the target is spread over 2 devices"}, "2 devices"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_reasons_are_given_in_words(change, words):
    reason = reason_against(*stub(**change), plain_draft())
    assert reason is None if words is None else words in reason


def test_a_draft_without_a_fixed_shape_and_autocast_are_reasons():
    assert reason_against(*stub(), None) == "the drafter's trees have no fixed shape"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in reason_against(*stub(), plain_draft())


def test_rescaled_positions_are_seen(make_model):
    for rope, seen in (({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, True), (None, False)):
        extra = {} if rope is None else {"rope_parameters": rope}
        model = MedusaModel(make_model("llama", **extra), drafter="ngram", probe=False)
        assert model.backbone.rescales_positions is seen
        model.detach()


def test_weights_that_hooks_move_are_a_reason(make_model, prompt):
    model = make_model("llama", dtype=torch.float32)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    steps = MedusaModel(model, probe=False, tree=TREE)
    steps.steps.mode = "eager"
    steps.generate(prompt(5), do_sample=False, max_new_tokens=4)
    assert steps.graph_reason == "the target's weights are moved or dispatched by hooks"


def test_a_target_on_several_devices_is_a_reason(llama):
    model = MedusaModel(llama, drafter="ngram", probe=False)
    assert model.backbone.spread is None
    llama.model.layers[1].to("meta")
    assert model.backbone.spread == "the target is spread over 2 devices"


def test_a_second_thread_takes_the_ordinary_loop(llama, prompt):
    ids, reasons = prompt(9), []
    answer = plain(llama, ids)
    model = MedusaModel(llama, probe=False, tree=TREE)
    model.steps.mode = "eager"

    class Other(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if not reasons:
                reasons.append(None)
                thread = threading.Thread(target=self.decode)
                thread.start()
                thread.join()
            return torch.tensor([False])

        def decode(self):
            out = model.generate(ids, do_sample=False, max_new_tokens=NEW)
            reasons.append((model.graph_reason, torch.equal(out, answer)))

    out = model.generate(ids, do_sample=False, max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([Other()]))
    assert torch.equal(out, answer)
    assert len(reasons) == 2 and reasons[1][1]


def test_processors_are_no_greedy_choice(llama, prompt):
    model = MedusaModel(llama, probe=False, tree=TREE)
    model.steps.mode = "eager"
    seen = []

    def processor(ids, scores):
        seen.append(ids.shape[1])
        return scores

    model.generate(prompt(5), do_sample=False, max_new_tokens=6, logits_processor=LogitsProcessorList([processor]))
    assert seen == [5, 6, 7, 8, 9, 10] and "processors" in model.graph_reason


def test_modes_are_kept_by_copies():
    steps = StaticSteps("eager")
    steps.backend = "masked"
    again = pickle.loads(pickle.dumps(steps))
    assert (again.mode, again.backend, again.reason) == ("eager", "masked", "nothing was decoded yet")
