"""What the figures were measured on: versions, threads, revision, and whether it was quiet."""

import os
import platform
import subprocess
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

# From this many cores of foreign work on, timings are not to be trusted: with one of two cores
# busy elsewhere two OpenMP threads were measured to slow each other tenfold.
NOISY_CORES = 0.25
PACKAGES = ("medusa-spec", "torch", "transformers", "peft", "accelerate")


def machine_facts(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Versions, threads, device and revision, ready for JSON."""
    facts: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    facts["versions"] = {name: _version(name) for name in PACKAGES}
    facts["versions"]["torch"] = str(torch.__version__)  # names the build, too
    facts["threads"] = torch.get_num_threads()
    facts["cores"] = os.cpu_count()
    facts["device"] = _device_name(device)
    facts["dtype"] = str(dtype).removeprefix("torch.")
    facts["revision"] = git_revision(Path(__file__).parent)
    return facts


def git_revision(folder: Path) -> str | None:
    """The revision of the source in `folder` ("-dirty" if edited); None if git has it not."""
    # An installed copy may lie inside somebody else's repository: only a tracked file counts.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=12")


def peak_memory_mib(device: torch.device) -> float | None:
    """Largest memory so far: of the device's allocator, or of this process; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if platform.system() == "Darwin" else 2**10)


@dataclass
class LoadWatch:
    """Counts how many cores other programs kept busy since it was made (or None: unknown)."""

    started: float = field(default_factory=lambda: time.perf_counter())
    busy: float | None = field(default_factory=lambda: _busy_seconds())
    own: float = field(default_factory=lambda: time.process_time())

    def others(self) -> float | None:
        """Cores busy with work that is not this process's, on average since the start."""
        wall = max(time.perf_counter() - self.started, 1e-9)
        own = (time.process_time() - self.own) / wall
        busy = _busy_seconds()
        if self.busy is not None and busy is not None:
            return max((busy - self.busy) / wall - own, 0.0)
        if hasattr(os, "getloadavg"):
            return max(os.getloadavg()[0] - own, 0.0)
        return None


def quiet_words(others: float | None) -> str:
    """One sentence on whether the timings can be trusted."""
    if others is None:
        return "Load of other programs: unknown on this system."
    if others < NOISY_CORES:
        return f"The machine was quiet (other programs: {others:.2f} cores)."
    return (
        f"THE MACHINE WAS NOT QUIET: other programs kept {others:.2f} of {os.cpu_count()} cores "
        "busy. Speeds and ratios are not to be trusted; close them and measure again."
    )


def _busy_seconds() -> float | None:
    """Seconds that all cores together have worked since boot, by Linux's count."""
    try:
        line = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    # user, nice, system, (idle, iowait,) irq, softirq, steal; guest time is within user.
    ticks = sum(int(line[place]) for place in (0, 1, 2, 5, 6, 7))
    return ticks / os.sysconf("SC_CLK_TCK")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
