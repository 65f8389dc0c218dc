"""kill -9 at random moments: a run that is resumed after each ends in the same bytes."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, Finished
from table import SHORT_GAMES

KILLS = int(os.environ.get("KILLS", "1"))  # of each script; make test-kills has 5
SCRIPTS = {
    "ppo": "--total-timesteps 12288 --num-steps 64 --checkpoints 24",
    "dqn": "--total-timesteps 6000 --learning-starts 500 --buffer-size 2000 --batch-size 16"
    " --checkpoints 30",
    "sac_continuous_action": "--env-id Pendulum-v1 --total-timesteps 1200 --learning-starts 200"
    " --buffer-size 700 --batch-size 16 --checkpoints 30",
    "ppo_atari": "--env-id BreakoutNoFrameskip-v4 --total-timesteps 320 --num-envs 2 --num-steps 8"
    f" --num-minibatches 1 --update-epochs 1 --torch-threads 1 --checkpoints 20 {SHORT_GAMES}",
}


def start(name: str, flags: str, folder: Path) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "cleanrl" / f"{name}.py"), *flags.split()]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)


def end(child: subprocess.Popen) -> None:
    _, errors = child.communicate()
    assert child.returncode == 0, errors


def folder_of(child: subprocess.Popen, runs: Path) -> Path:
    """The folder of the only run below `runs`, as soon as it trains."""
    while not (found := list(runs.glob("*/metrics.csv"))):
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    return found[0].parent


def written(path: Path) -> int:
    """When the file was written; 0 if there is none."""
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.skipif(os.name != "posix", reason="sends SIGKILL")
@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_at_random_moments_and_resumed_it_ends_in_the_same_bytes(
    name: str, tmp_path: Path
) -> None:
    for package in ("ale_py", "cv2") if "atari" in name else ():
        pytest.importorskip(package)
    flags = f"{SCRIPTS[name]} --save-model --eval-episodes 1"
    child = start(name, f"{flags} --runs-dir whole", tmp_path)
    whole = folder_of(child, tmp_path / "whole")
    began = time.monotonic()
    end(child)
    training = time.monotonic() - began

    again = f"{flags} --runs-dir killed"
    moment = random.Random(name)
    for _ in range(KILLS):
        saved = list(tmp_path.glob("killed/*/checkpoint.safetensors"))
        before = written(saved[0]) if saved else 0
        child = start(name, again, tmp_path)
        run = folder_of(child, tmp_path / "killed")
        while written(run / "checkpoint.safetensors") == before:
            assert child.poll() is None, child.communicate()
            time.sleep(0.001)
        time.sleep(moment.uniform(0, 0.08 * training))  # while it trains, or writes the next one
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert child.returncode == -signal.SIGKILL, "it ended before it was killed"
        again = f"--resume {run}"
    end(start(name, again, tmp_path))
    one, other = Finished(whole, {}), Finished(run, {})
    assert other.model() == one.model() and other.rows() == one.rows()
