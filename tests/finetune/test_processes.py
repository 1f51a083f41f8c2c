"""The processes of one run: two of them on this CPU, started by `accelerate launch` and by hand."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config import load_config_from_file
from safetensors.torch import load_file

from medusa_spec.checkpoint import WEIGHTS_NAME
from medusa_spec.errors import ConfigError
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.processes import Processes, everyone, join

MakeConfig = Callable[..., FinetuneConfig]
CommandLine = Callable[..., list[str]]
EXAMPLES = Path(__file__).parents[2] / "examples" / "accelerate"
RUN = ["-m", "medusa_spec"]
SECONDS = 240
"""Far more than it takes: on a busy machine starting torch four times does."""


def test_items_are_shared_out_once_each() -> None:
    for count in (1, 2, 5):
        shares = [Processes(index=index, count=count).share(range(12)) for index in range(count)]
        assert sorted(number for share in shares for number in share) == list(range(12))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_without_a_launcher_there_is_one_that_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")  # as some clusters set it
    assert everyone() == join("cpu") == Processes() and everyone().main
    everyone().wait()


def test_a_launcher_tells_each_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOCAL_RANK", "1"), ("RANK", "5"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    assert everyone() == Processes(index=5, count=8) and not everyone().main
    with pytest.raises(ConfigError, match="device must be a kind like 'cuda'.* for 8 processes, got 'cuda:0'"):
        join("cuda:0")


def test_two_processes_train_what_one_trains(
    finished: FinetuneConfig, command_line: CommandLine, tmp_path: Path
) -> None:
    """By the configuration that is shipped, told to stay on the CPU: states and train are computed by both."""
    settings = yaml.safe_load((EXAMPLES / "several.yaml").read_text()) | {"use_cpu": True, "main_process_port": 0}
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(settings))
    output, alone = tmp_path / "run", Path(finished.output)
    shutil.copytree(alone / "data", output / "data")
    shutil.copy(alone / "data.done.json", output)
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "accelerate.yaml")]
    words = command_line(finished, output=str(output), gradient_accumulation=2)
    done = subprocess.run(
        [sys.executable, *launch, *RUN, *words, "--stage", "states", "--stage", "train"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((output / "train.done.json").read_text())["result"]["processes"] == 2
    for path in (alone / "states").glob("*.safetensors"):
        assert (output / "states" / path.name).read_bytes() == path.read_bytes()
    one, two = (load_file(folder / "train" / WEIGHTS_NAME) for folder in (alone, output))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=2e-7)
    logs = [json.loads((folder / "train" / "history.json").read_text()) for folder in (alone, output)]
    for name in ("loss", "loss_head_2", "grad_norm", "grad_norm_head_1", "learning_rate", "top1_head_0", "decoder_mu"):
        curves = [[(entry["step"], entry[name]) for entry in log if name in entry] for log in logs]
        assert len(curves[0]) == len(curves[1]) > 1
        for (step, value), (other, found) in zip(*curves, strict=True):
            assert step == other and found == pytest.approx(value, rel=2e-4)


def test_when_one_fails_its_error_is_seen_and_the_other_ends(
    make_config: MakeConfig, command_line: CommandLine, tmp_path: Path
) -> None:
    """Without a launcher that would end the other for it: the first reads the data, the second waits for it."""
    words = command_line(make_config(tmp_path / "run", data=(str(tmp_path / "missing.jsonl"),)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    both = [
        subprocess.Popen(
            [sys.executable, *RUN, *words],
            env=os.environ | group | {"RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    errors = [process.communicate(timeout=SECONDS)[1] for process in both]
    assert all(process.returncode != 0 for process in both) and time.monotonic() - began < SECONDS
    assert "missing.jsonl" in errors[0] and "another process of this run has ended" in errors[1]


@pytest.mark.parametrize("name", ["several.yaml", "fsdp.yaml"])
def test_shipped_configurations_are_read_by_accelerate(name: str) -> None:
    config = load_config_from_file(str(EXAMPLES / name))
    assert config.num_processes == 2 and str(config.mixed_precision) == "no"
    text = (EXAMPLES / name).read_text()
    assert f"--config_file examples/accelerate/{name} -m medusa_spec finetune" in text


def test_the_fsdp_configuration_spreads_whole_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the launcher hands it on: by the environment."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", str(EXAMPLES / "fsdp.yaml"), "--num_cpu_threads_per_process", "1", "train.py"]
    given = _validate_launch_command(launch_command_parser().parse_args(words))[0]
    for key, value in prepare_multi_gpu_env(given).items():
        monkeypatch.setenv(key, value)
    assert given.use_fsdp and os.environ["ACCELERATE_USE_FSDP"] == "true"
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.auto_wrap_policy is None and not plugin.reshard_after_forward
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type) and not plugin.cpu_ram_efficient_loading
