"""A worker process as the conductor sees it: asked one request at a time, stopped while it is not asked."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_spec.machine import LoadWatch

WORKER = Path(__file__).with_name("peers_worker.py")


class PeerError(RuntimeError):
    """A worker that does not work; the message says how it ended."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to decode and how its worker is started.

    Attributes:
        name: Family, and after a dash what it drafts with; the family's name alone decodes plainly.
        label: The same for people.
        module: File with `load`.
        settings: For `load`.
        python: That runs it.
        environment: All of it.
    """

    name: str
    label: str
    module: Path
    settings: dict[str, Any]
    python: str
    environment: dict[str, str]

    @property
    def family(self) -> str:
        """Ways of one family have one plain way."""
        return self.name.split("-")[0]


class Worker:
    """Starts a way's process and waits until it has loaded.

    An idle engine may keep cores busy with waiting, so the whole group of processes is stopped by signal while it is
    not asked. It stays in the conductor's session: should the conductor be killed, the kernel ends stopped groups.

    Args:
        way: What to start.
        log: File for what it prints.
        timeout: Seconds that loading, or one answer, may take.

    Raises:
        PeerError: If it ends, or is not ready in time.
    """

    def __init__(self, way: Way, log: Path, timeout: float) -> None:
        self.way, self.log, self.timeout = way, log, timeout
        self._seconds = 0.0
        command = [way.python, str(WORKER), str(way.module), json.dumps(way.settings)]
        with open(log, "wb") as told:
            self.process = subprocess.Popen(
                command,
                env=way.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=told,
                preexec_fn=_in_a_group,
            )
        try:
            self.facts: dict[str, Any] = self._answer()["facts"]
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        """Tokens, seconds and counters of one request.

        Raises:
            PeerError: If no answer comes.
        """
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps({"ids": ids, "max_new_tokens": max_new_tokens}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; how is told below
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def cpu_seconds(self) -> float:
        """Seconds of CPU that its processes have used; what it was when they were last seen, if they have ended."""
        self._seconds = max(self._seconds, sum(_group_seconds(self.process.pid)))
        return self._seconds

    def close(self) -> None:
        """Ends it, and waits."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):  # it has ended; macOS says it is not permitted
            pass

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], self.timeout)
        if not ready:
            raise PeerError(f"gave no answer in {self.timeout:.0f} s; see {self.log}")
        line = self.process.stdout.readline()
        if not line:
            raise PeerError(f"{_ending(self.process.wait())}: {_last_words(self.log)}")
        return dict(json.loads(line))


class Load:
    """How many cores work of others kept busy since it was made: neither this process's nor the workers'."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.workers = list(workers)
        self.watch, self.before = LoadWatch(), self._used()

    def others(self) -> float | None:
        """Cores, on average; None if unknown."""
        found, used = self.watch.others(), self._used()
        if found is None or not Path("/proc/self/stat").exists():
            return None
        return max(found - (used - self.before) / (time.perf_counter() - self.watch.started), 0.0)

    def _used(self) -> float:
        return sum(worker.cpu_seconds() for worker in self.workers)


def _in_a_group() -> None:
    os.setpgrp()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # with it the kernel ends stopped groups; `nohup` has it ignored


def _group_seconds(group: int) -> Iterable[float]:
    """Seconds of CPU of every process in a group, and of its children that have ended, by Linux's count."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = file.read_text().rsplit(")", 1)[1].split()
        except OSError:  # ended meanwhile
            continue
        if int(words[2]) == group:
            yield sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with {code}"
    hint = ", as this processor lacks what it was built for" if -code == signal.SIGILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


def _last_words(log: Path) -> str:
    """The last line of a log, and where the rest is."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:300] if lines else 'no words'} ({log})"


def clean_environment(threads: int, **more: str) -> dict[str, str]:
    """This process's environment with so many threads."""
    numbers = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return dict(os.environ) | numbers | {"TOKENIZERS_PARALLELISM": "false"} | more


def foreign_environment(threads: int, **more: str) -> dict[str, str]:
    """The same for another environment's Python, which must not find this one's packages."""
    found = clean_environment(threads, **more)
    return {name: value for name, value in found.items() if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"}
