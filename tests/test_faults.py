"""Environments, disks and files that fail: one line, and the last good checkpoint is kept."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from cleanrl_utils.environments.failures import all_finite, not_finite
from cleanrl_utils.environments.vector import AsyncVectorEnv, SyncVectorEnv
from cleanrl_utils.errors import Stopped
from cleanrl_utils.running import checkpoint

SMALL = "--num-envs 2 --num-steps 16 --total-timesteps 320 --num-minibatches 1 --checkpoints 10"
VECTORS = [SyncVectorEnv, AsyncVectorEnv]


def only_line(text: str) -> str:
    """The line of an error, which is the last one."""
    lines = text.strip().splitlines()
    assert [line.startswith("error: ") for line in lines].count(True) == 1, text
    assert lines[-1].startswith("error: "), text
    return lines[-1]


# -- environments -------------------------------------------------------------------------------


FAULTS = {
    "Raises": "KeyError: 'no such level'",
    "FailsToReset": "OSError: the simulator is gone",
    "NotFinite": "NaN or infinite",
    "NotFiniteReward": "NaN or infinite",
    "WrongShape": "(3,)",
    "NoReward": "None",
}


def make_odd(name: str, odd: bool) -> gym.Env:
    env = gym.make(f"faulty:{name}-v0" if odd else "CartPole-v1")
    return gym.wrappers.RecordEpisodeStatistics(env)


def step_until_it_fails(vector: Any, name: str) -> Any:
    """Two environments of which the second one fails."""
    envs = vector([partial(make_odd, name, odd) for odd in (False, True)])
    with pytest.raises(Stopped) as stop:
        envs.reset(seed=1)
        for _ in range(100):
            envs.step(np.zeros(2, int))
    envs.close()
    return stop.value


@pytest.mark.filterwarnings("ignore")  # of Gymnasium's own checks
@pytest.mark.parametrize("vector", VECTORS)
@pytest.mark.parametrize("name", FAULTS)
def test_an_environment_that_fails_is_named(vector: Any, name: str, capfd) -> None:
    assert step_until_it_fails(vector, name).code == 1
    said = capfd.readouterr().err
    line = only_line(said)
    assert f"environment 1 ({name}-v0) failed in step" in line and "cleanrl" not in said
    if not (vector is AsyncVectorEnv and name in ("WrongShape", "NoReward")):
        assert FAULTS[name] in line and re.search(r"step \d+ of its game \d+", line)
    shown = name in ("Raises", "FailsToReset")
    assert ("faulty.py" in said) == shown and "gymnasium/" not in said
    if name == "Raises":
        assert "in spoil" in said and "in deeper" in said


@pytest.mark.parametrize("name", ["OldStep", "OldReset", "OldSeed"])
@pytest.mark.parametrize("vector", VECTORS)
def test_an_environment_of_the_old_api_is_told_what_to_change(vector, name: str, capfd) -> None:
    assert step_until_it_fails(vector, name).code == 1
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert f"environment 1 ({name}-v0)" in line and "API of the old gym" in line
    what = "terminated, truncated, info" if name == "OldStep" else "(observation, info)"
    assert what in line


def test_a_worker_that_dies_is_named(capfd) -> None:
    assert step_until_it_fails(AsyncVectorEnv, "Dies").code == 1
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert "environment 1 (Dies-v0) failed in step 7" in line and "killed by SIGKILL" in line


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTS)
def test_a_run_whose_environment_fails_keeps_its_checkpoint(name: str, train, capfd) -> None:
    with pytest.raises(SystemExit) as stop:
        train("ppo", f"--env-id faulty:{name}-v0 {SMALL}")
    line = only_line(capfd.readouterr().err)
    (folder,) = Path("runs").iterdir()
    assert stop.value.code == 1 and FAULTS[name] in line
    assert line.endswith(f"resume from the last checkpoint: python {script_in(line)} {folder}")
    assert checkpoint.load(folder / "checkpoint.safetensors")[0]["step"] >= 64


def script_in(line: str) -> str:
    """Its path depends on where the test runs."""
    return re.findall(r"python (\S+ppo\.py --resume)", line)[0]


def test_large_numbers_are_not_taken_for_infinite_ones() -> None:
    large = np.full((2, 3), 1e30, np.float32)  # whose squares are too large for float32
    assert all_finite(large, np.zeros(2))
    large[1, 2] = np.nan
    assert not all_finite(large, np.zeros(2)) and not_finite(large, np.zeros(2)) == [1]
    nan = np.array([np.nan, 0])
    pictures = np.zeros((2, 3), np.uint8)
    assert not all_finite(pictures, nan) and not_finite(pictures, nan) == [0]


def test_what_is_no_environment_s_fault_keeps_its_traceback() -> None:
    envs = SyncVectorEnv([partial(gym.make, "CartPole-v1")] * 2)
    envs.reset(seed=1)
    with pytest.raises(TypeError):
        envs.step(None)
