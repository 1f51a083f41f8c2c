"""The comparison with other engines counts right, keeps idle ways still, and goes on without a way that does not run.

The ways are small fake programs; neither vLLM nor a model is loaded, but for one test of this project's and Hugging
Face's ways on a tiny model.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_spec.figures import Run
from medusa_spec.prompts import as_prompt
from medusa_spec.testing import tiny

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NAMES = ("peers_figures", "peers_process", "peers_table", "peers_ways", "peers_hf", "peers_ours", "peers")
EOS = frozenset({0})
FAKE = """
import os, signal, time

class Fake:
    def __init__(self, settings):
        self.settings, self.facts = settings, {"engine": "fake 1.0"}
        print("engines print as they like")
        if settings.get("illegal"):
            os.kill(os.getpid(), signal.SIGILL)
        if settings.get("spins") and not os.fork():
            while True:  # as an engine's process that waits for work
                pass

    def generate(self, ids, max_new_tokens):
        print("and where they like")
        if self.settings.get("ends_at") in ids:
            raise SystemExit("no memory left")
        with open(self.settings["told"], "a") as told:
            told.write(f"{self.settings['name']} {ids[0]}\\n")
        time.sleep(self.settings.get("sleep", 0))
        return [ids[-1] + 1 + n for n in range(max_new_tokens)]

    def read(self, output):
        counters = {"passes": 2, "gained": 3, "drafts": 2, "accepted": 1} if self.settings.get("drafts") else None
        return {"tokens": output + [0, 99], "counters": counters}

load = Fake
"""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules by name, imported as the program imports them."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def fake(peers: SimpleNamespace, tmp_path: Path) -> Any:
    """Makes a way of a fake program."""
    (tmp_path / "fake.py").write_text(FAKE)

    def make(name: str, **settings: Any) -> Any:
        return peers.peers_process.Way(
            name=name,
            label=name.upper(),
            module=tmp_path / "fake.py",
            settings={"name": name, "told": str(tmp_path / "told")} | settings,
            python=sys.executable,
            environment=dict(os.environ),
        )

    return make


def asked(*texts: str) -> list[tuple[Any, list[int]]]:
    return [(as_prompt(text, category=text[0]), [number, 40 + number]) for number, text in enumerate(texts, 1)]


def test_one_way_is_asked_at_a_time_in_an_order_that_rotates(peers, fake, tmp_path) -> None:
    conductor = peers.peers.Conductor([fake("hf"), fake("vllm-x", drafts=True), fake("ours")], tmp_path, 30)
    try:
        records, _ = peers.peers.measure(conductor, asked("a", "b", "a"), [9, 9], 4, EOS)
    finally:
        conductor.close()
    order = [line.split() for line in (tmp_path / "told").read_text().splitlines()]
    assert [name for name, prompt in order if prompt == "9"] == ["hf", "vllm-x", "ours"]
    assert [name for name, prompt in order if prompt == "2"] == ["vllm-x", "ours", "hf"]
    assert [name for name, prompt in order if prompt == "3"] == ["ours", "hf", "vllm-x"]
    assert [record.category for record in records] == ["a", "b", "a"]
    assert records[0].runs["hf"].tokens == (42, 43, 44, 45, 0), "up to and including EOS"
    assert records[0].counters == {
        "hf": None,
        "vllm-x": {"passes": 2, "gained": 3, "drafts": 2, "accepted": 1},
        "ours": None,
    }


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_way_is_stopped_while_it_is_not_asked_with_all_its_processes(peers, fake, tmp_path) -> None:
    worker = peers.peers_process.Worker(fake("hf", spins=True, sleep=0.3), tmp_path / "log", 30)
    try:
        before = worker.cpu_seconds()
        states = [worker_state(pid) for pid in group_of(worker.process.pid)]
        worker.ask([1], 1)
        spun = worker.cpu_seconds() - before
    finally:
        worker.close()
    assert len(states) == 2 and set(states) == {"T"}
    assert spun > 0.1, "while it is asked its processes run"
    assert group_of(worker.process.pid) == [], "and none is left"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_stopped_way_is_left_behind_when_the_conductor_is_killed(peers, fake, tmp_path) -> None:
    way = fake("hf")
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from pathlib import Path
from peers_process import Way, Worker
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
way = Way(name="hf", label="", module=Path({str(way.module)!r}), settings={way.settings!r}, python=sys.executable,
          environment=dict(os.environ))
print(Worker(way, Path({str(tmp_path / "log")!r}), 30).process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -9
    until = time.monotonic() + 10
    while group_of(int(done.stdout)) and time.monotonic() < until:
        time.sleep(0.05)
    assert group_of(int(done.stdout)) == []


def worker_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def group_of(group: int) -> list[int]:
    """Its processes, but for those that only wait to be buried."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = file.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(words[2]) == group and words[0] != "Z":
            found.append(int(file.parent.name))
    return found


def test_a_way_that_does_not_run_is_left_out_and_the_others_go_on(peers, fake, tmp_path) -> None:
    ways = [fake("hf"), fake("vllm", illegal=True), fake("ours", ends_at=42)]
    conductor = peers.peers.Conductor(ways, tmp_path, 30)
    try:
        records, _ = peers.peers.measure(conductor, asked("a", "b"), [9, 9], 4, EOS)
    finally:
        conductor.close()
    assert [list(record.runs) for record in records] == [["hf"], ["hf"]], "what lasted to the end alone"
    assert "SIGILL, as this processor lacks" in conductor.left_out["VLLM"]
    assert "ended with 1: no memory left" in conductor.left_out["OURS"]


def test_a_way_that_does_not_answer_in_time_is_left_out(peers, fake, tmp_path) -> None:
    conductor = peers.peers.Conductor([fake("hf", sleep=20)], tmp_path, 2)
    try:
        assert conductor.ask(0, [1], 1) == {}
    finally:
        conductor.close()
    assert "gave no answer in 2 s" in conductor.left_out["HF"]


def record(peers: SimpleNamespace, category: str, seconds: dict[str, float], last: dict[str, int]) -> Any:
    runs = {way: Run((1, 2, last.get(way, 3)), some) for way, some in seconds.items()}
    counted = {"passes": 2, "gained": 3, "drafts": 1, "accepted": 1}
    counters = {way: counted if "-" in way else None for way in seconds}
    return peers.peers_figures.Record(name="1", category=category, runs=runs, counters=counters)


@pytest.fixture
def result(peers: SimpleNamespace) -> dict[str, Any]:
    records = [
        record(peers, "chat", {"hf": 3, "vllm": 2, "vllm-ngram": 1.5, "ours": 1, "ours-heads": 0.75}, {"vllm": 4}),
        record(peers, "chat", {"hf": 3, "vllm": 2, "vllm-ngram": 2.5, "ours": 1, "ours-heads": 0.75}, {}),
        record(peers, "rag", {"hf": 3, "vllm": 1, "vllm-ngram": 3.5, "ours": 1, "ours-heads": 1.5}, {}),
    ]
    found = peers.peers_figures.figures(records)
    machine = {"versions": {"torch": "2"}, "cpu": "a cpu", "dtype": "bfloat16", "threads": 2, "cores": 2}
    labels = {name: f"label of {name}" for name in records[0].runs}
    told = {"settings": {"model": "m"}, "machine": machine | {"revision": None}, "busy_cores_elsewhere": 0.0}
    told |= {"engines": {"hf": "transformers 5"}, "labels": labels, "left_out": {"vLLM Medusa": "no heads"}}
    return json.loads(json.dumps(told | found))


def test_ratios_are_to_hugging_face_and_to_the_best_of_vllm_in_each_category(result) -> None:
    chat, rag = result["by_category"]["chat"], result["by_category"]["rag"]
    assert (chat["best_vllm"], rag["best_vllm"], result["all"]["best_vllm"]) == ("vllm", "vllm", "vllm")
    assert chat["ways"]["ours-heads"]["times_hf"]["value"] == pytest.approx(4)
    assert chat["ways"]["ours-heads"]["times_best_vllm"]["value"] == pytest.approx(2 / 0.75)
    assert rag["ways"]["ours-heads"]["times_best_vllm"]["value"] == pytest.approx(1 / 1.5)
    ratio = result["all"]["ways"]["ours-heads"]["times_best_vllm"]
    assert ratio["low"] < ratio["value"] < ratio["high"]
    assert chat["ways"]["hf"]["tokens_per_second"] == pytest.approx(1)


def test_outputs_are_compared_with_the_familys_plain_and_rates_are_of_what_is_told(result) -> None:
    ways = result["all"]["ways"]
    assert ways["vllm-ngram"]["equal_to_own_plain"] == 2 and ways["vllm-ngram"]["equal_to_hf"] == 3
    assert ways["ours-heads"]["equal_to_own_plain"] == 3
    assert (ways["ours-heads"]["mu"], ways["ours-heads"]["tau"]) == (1, 1.5)
    assert (ways["vllm"]["mu"], ways["vllm"]["tau"]) == (None, None)


def test_the_table_shows_each_way_by_category_and_what_was_left_out(peers, result) -> None:
    text = peers.peers_table.table(result)
    assert "Left out: vLLM Medusa: no heads" in text and "The machine was quiet" in text
    for title in ("tokens/s", "times HF generate", "times vLLM's best", "mu"):
        assert any(line.startswith(title) and line.endswith("rag") for line in text.splitlines()), title
    alone = {
        name: {"prompts": 3, "best_vllm": None} | {"ways": {"hf": group["ways"]["hf"] | {"times_best_vllm": None}}}
        for name, group in (("all", result["all"]), *result["by_category"].items())
    }
    without = result | {"all": alone.pop("all"), "by_category": alone}
    assert "vLLM's best" not in peers.peers_table.table(without)


def test_the_picture_is_drawn(peers, result, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    assert peers.peers_table.draw(result, tmp_path / "speeds.png")
    assert (tmp_path / "speeds.png").read_bytes().startswith(b"\x89PNG")


def arguments(peers: SimpleNamespace, *words: str) -> argparse.Namespace:
    return peers.peers._parser().parse_args(["prompts.jsonl", *words])


def test_what_needs_something_that_was_not_given_is_no_way(peers, tmp_path) -> None:
    def names(*words: str) -> list[str]:
        return [way.name for way in peers.peers_ways.ways(arguments(peers, *words), "model", 100)]

    assert names()[:5] == ["hf", "hf-lookup", "hf-early", "ours", "ours-ngram"]
    assert "ours-heads" in names("--heads", "x") and "ours-heads" not in names()
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3}')
    engine = names("--engine-python", "python", "--medusa-heads", str(tmp_path))
    assert [name for name in engine if name.startswith("vllm")] == ["vllm", "vllm-ngram", "vllm-suffix", "vllm-medusa"]
    assert names("--ways", "hf", "ours") == ["hf", "ours"]


def test_the_engines_python_finds_nothing_of_this_environment(peers, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "here")
    found = peers.peers_ways.ways(arguments(peers, "--engine-python", "python"), "model", 100)
    for way in found:
        assert ("PYTHONPATH" in way.environment) == (way.family != "vllm")
        assert way.environment["OMP_NUM_THREADS"] == "2"


def test_programs_for_other_environments_need_nothing_of_this_project() -> None:
    for name in ("peers_worker.py", "peers_vllm.py"):
        source = (BENCHMARKS / name).read_text(encoding="utf-8")
        compile(source, name, "exec")
        assert "medusa_spec" not in source and "torch" not in source


@pytest.mark.parametrize("way", ["hf", "hf-lookup", "ours", "ours-ngram", "ours-heads"])
def test_ways_of_this_environment_say_what_plain_generate_says(peers, way, tmp_path) -> None:
    model = tiny("llama").to(torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    prompt = [5, 17, 80, 3, 5, 17, 80, 3]
    found = peers.peers_ways.ways(arguments(peers, "--ways", way, "--threads", "1"), str(tmp_path), 8)
    settings = found[0].settings if found else {"model": str(tmp_path), "threads": 1, "heads": None, "drafter": "heads"}
    module = peers.peers_hf if way.startswith("hf") else peers.peers_ours
    decoder = module.load(settings)
    told = decoder.read(decoder.generate(prompt, 12))
    assert len(told["tokens"]) == 12
    plain = peers.peers_hf.load({"model": str(tmp_path), "threads": 1, "arguments": {}})
    if way.startswith("hf"):
        assert told["tokens"] == plain.read(plain.generate(prompt, 12))["tokens"]
    counters = told["counters"]
    assert (counters is None) == (way == "hf")
    if counters is not None:
        assert counters["passes"] <= counters["gained"] < 12
