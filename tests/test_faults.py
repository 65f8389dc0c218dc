"""Environments, disks and files that fail: one line, and the last good checkpoint is kept."""

import contextlib
import errno
import gc
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT

from cleanrl_utils.environments.failures import all_finite, not_finite
from cleanrl_utils.environments.vector import AsyncVectorEnv, SyncVectorEnv
from cleanrl_utils.errors import Stopped
from cleanrl_utils.running import checkpoint
from cleanrl_utils.running.folder import read_record
from cleanrl_utils.running.run import Run

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
    "OwnEpisode": 'its info has the key "episode"',
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
    said = re.sub(r".*UserWarning: .*\n.*logger.warn.*\n", "", said)  # Gymnasium's, in a process
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


INTERRUPTED_STEP = """
from functools import partial
import gymnasium as gym
from cleanrl_utils.environments.vector import AsyncVectorEnv
if __name__ == "__main__":
    envs = AsyncVectorEnv([partial(gym.make, "CartPole-v1")] * 2)
    envs.reset(seed=1)
    envs.step_async([0, 1])
    raise SystemExit(130)
"""


def test_ctrl_c_during_a_step_ends_the_workers_quietly(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text(INTERRUPTED_STEP)
    words = [sys.executable, str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 130 and done.stderr == ""


@pytest.mark.filterwarnings("error")
def test_an_environment_that_cannot_be_made_leaves_no_workers_to_end() -> None:
    def make() -> gym.Env:
        raise OSError("no such game")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # what earlier tests left behind
    with pytest.raises(OSError, match="no such game"):
        AsyncVectorEnv([make] * 2)
    gc.collect()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTS)
def test_a_run_whose_environment_fails_keeps_its_checkpoint(name: str, train, capfd) -> None:
    with pytest.raises(SystemExit) as stop:
        train("ppo", f"--env-id faulty:{name}-v0 {SMALL}")
    line = only_line(capfd.readouterr().err)
    (folder,) = Path("runs").iterdir()
    assert stop.value.code == 1 and FAULTS[name] in line
    assert line.endswith(f"resume from the last good checkpoint: python {script_in(line)} {folder}")
    assert checkpoint.load(folder / "checkpoint.safetensors")[0]["step"] >= 64


def script_in(line: str) -> str:
    """Its path depends on where the test runs."""
    return re.findall(r"python (\S+ppo\.py --resume)", line)[0]


@pytest.mark.filterwarnings("error")
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


# -- checkpoints --------------------------------------------------------------------------------


OFF_POLICY = "--total-timesteps 350 --learning-starts 100 --buffer-size 1000 --checkpoints 10"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "script, env_id, networks",
    [
        ("dqn", "NotFinite", ["q_network", "target_network", "optimizer"]),
        ("sac_continuous_action", "NotFinitePendulum", ["agent"]),
    ],
)
def test_the_last_good_checkpoint_is_good(
    script: str, env_id: str, networks: list[str], train, monkeypatch, capfd
) -> None:
    """Observations turn NaN at step 200, and nobody notices until the networks have them, too."""
    import faulty

    monkeypatch.setattr(getattr(faulty, env_id), "when", 200)
    monkeypatch.setattr("cleanrl_utils.environments.vector.all_finite", lambda *_: True)
    with pytest.raises(SystemExit) as stop:
        train(script, f"--env-id faulty:{env_id}-v0 {OFF_POLICY} --batch-size 64 --num-envs 1")
    assert stop.value.code == 1 and "last good checkpoint" in only_line(capfd.readouterr().err)
    (path,) = Path("runs").rglob("checkpoint.safetensors")
    about, state = checkpoint.load(path)
    assert about["iteration"] < 350
    assert set(networks) <= set(state)
    for name in set(state) - {"memory", "envs"}:
        assert all(np.isfinite(array).all() for array in arrays_in(state[name])), name


def arrays_in(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(item)
    elif hasattr(value, "shape"):
        array = np.asarray(value)
        yield array if array.dtype.kind == "f" else np.zeros(1)


class Killed(BaseException):
    """Stands for a process that dies."""


@pytest.fixture
def killed(train, monkeypatch) -> Any:
    """killed() makes a run of ppo.py that died after its third checkpoint; returns its folder."""

    def make(runs_dir: str = "runs", flags: str = "") -> Path:
        written, save = [], Run._save

        def dies(run: Run, iteration: int) -> None:
            if len(written) == 3:
                run._close()
                raise Killed
            save(run, iteration)
            written.append(iteration)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Run, "_save", dies)
            train("ppo", f"{SMALL} {flags}", runs_dir)
        (folder,) = Path(runs_dir).iterdir()
        return folder

    return make


def refused(train: Any, folder: Path, capfd: Any) -> str:
    """The line with which a resume of this run is refused."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        train("ppo", f"--resume {folder}")
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert stop.value.code == 2
    return line


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path: Path) -> None:
    """A resume of a run that is still going is refused, and the run does not notice."""
    ppo = [sys.executable, str(ROOT / "cleanrl" / "ppo.py")]
    flags = ["--total-timesteps", "1000000", "--checkpoints", "2000"]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    child = subprocess.Popen([*ppo, *flags], cwd=tmp_path, **quiet)
    try:
        until = time.monotonic() + 100
        while not (saved := list(tmp_path.rglob("checkpoint.safetensors"))):
            assert child.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        folder = saved[0].parent
        words = [*ppo, "--resume", str(folder)]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        (line,) = done.stderr.strip().splitlines()
        assert done.returncode == 2 and "another process is training this run" in line
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_a_process_that_is_gone_holds_no_lock(killed, train) -> None:
    folder = killed()
    assert (train("ppo", f"--resume {folder}").folder / "finished.json").exists()


def test_the_checkpoint_of_another_run_is_refused(killed, train, capfd) -> None:
    """Its arrays have the same names and shapes."""
    one, other = killed("one"), killed("other", "--seed 2")
    shutil.copy(one / "checkpoint.safetensors", other)
    assert "the checkpoint of another run" in refused(train, other, capfd)


@pytest.mark.parametrize("left", [0, 100, None])
def test_metrics_that_were_lost_are_not_made_up(left: int | None, killed, train, capfd) -> None:
    folder = killed()
    metrics = folder / "metrics.csv"
    if left is None:
        metrics.unlink()
    else:
        os.truncate(metrics, left)
    assert "rows are lost" in refused(train, folder, capfd)
    assert metrics.exists() == (left is not None)
    assert left is None or metrics.stat().st_size == left


@pytest.mark.parametrize("lost", [True, False])
def test_a_refused_resume_changes_nothing(lost: bool, train, monkeypatch, capfd) -> None:
    """Else a finished run would count as unfinished, and as lengthened."""
    wandb = pytest.importorskip("wandb")

    def init(**settings: Any) -> None:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", init)
    folder = train("ppo", f"{SMALL} --save-model --eval-episodes 1").folder
    if lost:
        (folder / "metrics.csv").unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        train("ppo", f"--resume {folder} --total-timesteps 640" + " --track" * (not lost))
    line = only_line(capfd.readouterr().err)
    assert stop.value.code == 2 and ("rows are lost" if lost else "--track") in line
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_run_that_begins_again_longer_is_one_of_the_new_length(train) -> None:
    """It was killed before its first checkpoint, and is resumed with more --total-timesteps."""
    folder = train("ppo", SMALL).folder
    (folder / "checkpoint.safetensors").unlink()
    (folder / "finished.json").unlink()
    train("ppo", f"--resume {folder} --total-timesteps 640")
    record = read_record(folder)
    assert record["args"]["total_timesteps"] == 640 and "lengthened" not in record
    assert record["command"][-2:] == ["--total-timesteps", "640"] and "320" not in record["command"]


def test_metrics_are_on_disk_before_the_checkpoint_that_counts_them(train, monkeypatch) -> None:
    synced, save = [], checkpoint.save
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))

    def watched(path: Path, state: Any, about: Any, **rest: Any) -> bool:
        metrics = path.parent / "metrics.csv"
        if path.name == "checkpoint.safetensors":
            assert about["csv_bytes"] == metrics.stat().st_size
            assert synced[-1] == metrics.stat().st_ino
        return save(path, state, about, **rest)

    monkeypatch.setattr(checkpoint, "save", watched)
    train("ppo", SMALL)
    assert synced


def test_what_a_kill_left_half_written_is_removed(killed, train) -> None:
    folder = killed()
    for name in (".checkpoint.safetensors.123.partial", ".run.json.7.partial"):
        (folder / name).write_bytes(b"half")
    train("ppo", f"--resume {folder}")
    assert not list(folder.glob(".*.partial"))


# -- disks --------------------------------------------------------------------------------------


def stopped(train: Any, capfd: Any, flags: str = SMALL) -> str:
    """The line with which a run stops in the middle."""
    with pytest.raises(SystemExit) as stop:
        train("ppo", flags)
    line = only_line(capfd.readouterr().err)
    assert stop.value.code == 1 and not list(Path("runs").rglob(".*.partial"))
    return line


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


WRITERS = {
    "the record": "cleanrl_utils.running.folder.write_record",
    "metrics": "cleanrl_utils.running.metrics.CsvWriter.write",
    "metrics at a checkpoint": "cleanrl_utils.running.metrics.CsvWriter.sync",
    "TensorBoard": "cleanrl_utils.running.metrics.TensorBoardWriter.write",
    "a checkpoint": "cleanrl_utils.running.checkpoint.save_file",
    "the end": "cleanrl_utils.running.folder.write_summary",
}


@pytest.mark.parametrize("what", WRITERS)
def test_a_full_disk_is_one_line(what: str, train, monkeypatch, capfd) -> None:
    monkeypatch.setattr(WRITERS[what], full)
    line = stopped(train, capfd)
    assert "No space left on device" in line
    assert ("resume from the last good checkpoint" in line) == (what == "the end")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Any]:
    """small_disk(size) is a folder on a disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: str) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        with contextlib.suppress(OSError):
            if subprocess.run(words, capture_output=True).returncode == 0:
                return folder
        pytest.skip("only root may mount a disk")

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True)


@pytest.mark.parametrize("size", ["8k", "12k", "40k", "200k"])  # script, record, checkpoints
def test_a_disk_that_is_really_full(size: str, small_disk, tmp_path: Path) -> None:
    runs = small_disk(size) / "runs"
    words = [sys.executable, str(ROOT / "cleanrl" / "ppo.py"), *SMALL.split(), "--runs-dir"]
    words += [str(runs)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    line = only_line(done.stderr)
    assert done.returncode == 1 and "No space left on device" in line and "Trace" not in done.stderr
    assert line.startswith(f"error: {runs}")
    assert not list(runs.rglob(".*.partial"))
    kept = list(runs.rglob("checkpoint.safetensors"))
    assert bool(kept) == (size == "200k") == ("last good checkpoint" in line)
    for path in kept:
        checkpoint.load(path)


def test_a_folder_that_disappears_is_one_line(train, monkeypatch, capfd) -> None:
    save = checkpoint.save

    def too_late(path: Path, *rest: Any, **more: Any) -> bool:
        shutil.rmtree(path.parent)
        return save(path, *rest, **more)

    monkeypatch.setattr(checkpoint, "save", too_late)
    line = stopped(train, capfd)
    assert "cannot be written" in line and "there is no checkpoint yet" in line


@pytest.mark.parametrize("name", ["run.json", "finished.json"])
def test_records_are_written_whole_or_not_at_all(name: str, tmp_path: Path, monkeypatch) -> None:
    from cleanrl_utils.running import folder

    write = folder.write_record if name == "run.json" else folder.write_summary
    write(tmp_path, {"old": 1})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        write(tmp_path, {"new": 2})
    assert folder.read_json(tmp_path / name) == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == [name]


# -- settings that run to no purpose ------------------------------------------------------------


def test_settings_that_lead_nowhere_are_said_and_run(train, capfd) -> None:
    flags = "--total-timesteps 300 --buffer-size 50 --batch-size 64"
    train("dqn", f"{flags} --learning-starts 300")
    said = capfd.readouterr().err
    assert "note: --learning-starts 300 is not reached" in said
    assert "note: --batch-size 64 exceeds --buffer-size 50" in said
    train("dqn", "--total-timesteps 300 --buffer-size 64 --batch-size 64 --learning-starts 299")
    assert "note:" not in capfd.readouterr().err


def test_infos_are_merged_as_in_gymnasium() -> None:
    def step(make_vector: Any) -> dict:
        envs = make_vector([lambda: Informed(0), lambda: Informed(1)])
        envs.reset(seed=1)
        return envs.step(np.zeros(2, np.int64))[4]

    ours, gymnasium = (step(make) for make in (SyncVectorEnv, gym.vector.SyncVectorEnv))
    assert ours.keys() == gymnasium.keys()
    for key, value in gymnasium.items():
        np.testing.assert_equal(ours[key], value)
        assert getattr(ours[key], "dtype", None) == getattr(value, "dtype", None), key


class Informed(gym.Env):
    """Informs about everything that Gymnasium merges in a way of its own."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, index: int):
        self.index = index

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        info: dict[str, Any] = {"x": 0.5 + self.index, "n": 3, "flag": True, "name": "a"}
        info |= {"wide": np.float32(2.5), "array": np.arange(3), "inner": {"y": 1.0}}
        if self.index:
            info["only_one"] = 7
        return np.zeros(2, np.float32), 0.0, False, False, info
