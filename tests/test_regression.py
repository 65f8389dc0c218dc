"""The regression suite: a planted loss is found, identical code is not flagged."""

from pathlib import Path

import numpy as np
import pytest
from fake_runs import make_run

from cleanrl_utils import regression
from cleanrl_utils.analysis import committed
from cleanrl_utils.errors import BadInput, Stopped

NAMES = [task.name for task in regression.TASKS]
SPREAD = 0.03  # relative standard deviation over seeds; the baseline has 0.08


def draw(random: np.random.Generator, factor: float = 1.0) -> list[np.ndarray]:
    return [factor * random.normal(1, SPREAD, task.seeds) for task in regression.TASKS]


def test_a_planted_loss_of_ten_percent_is_found_and_identical_code_is_not_flagged() -> None:
    random = np.random.default_rng(1)
    found = sum(
        bool(regression.regressions(draw(random), draw(random, 0.9), NAMES)) for _ in range(10)
    )
    false = sum(bool(regression.regressions(draw(random), draw(random), NAMES)) for _ in range(10))
    assert (found, false) == (10, 0)


def test_a_broken_task_is_named() -> None:
    random = np.random.default_rng(2)
    old = draw(random)
    new = draw(random)
    new[1] = new[1] * 0.5
    assert NAMES[1] in regression.regressions(old, new, NAMES)


def test_a_gain_and_a_loss_below_the_threshold_are_no_regressions() -> None:
    random = np.random.default_rng(3)
    old = [np.linspace(0.99, 1.01, task.seeds) for task in regression.TASKS]
    assert regression.regressions(old, [x * 0.96 for x in old], NAMES) == []
    assert regression.regressions(old, [x * 1.3 for x in old], NAMES) == []
    assert len(regression.regressions(old, draw(random, 0.8), NAMES)) > 0


def make_runs(folder: Path, factor: float = 1.0, **settings: int) -> None:
    """Runs of all tasks with some noise; the fake returns are about `target`."""
    for task in regression.TASKS:
        for seed in range(1, task.seeds + 1):
            target = 100 * factor + task.worst
            name = f"{task.script}-{task.env_id}-{seed}"
            same = {"exp_name": task.exp_name, "env_id": task.env_id}
            make_run(folder, seed, target, name=name, **same, **settings)


@pytest.mark.parametrize("factor, status", [(1.0, 0), (0.7, 1)])
def test_new_runs_are_compared_with_the_committed_ones(
    factor: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    make_runs(tmp_path / "old")
    committed.add([str(tmp_path / "old")], tmp_path / "baseline")
    monkeypatch.setattr(regression, "BASELINE", tmp_path / "baseline")
    monkeypatch.setattr(regression.scores_of_baseline, "__defaults__", (tmp_path / "baseline",))
    monkeypatch.setattr(regression, "train", lambda args: make_runs(Path(args.runs_dir), factor))
    assert regression.main(["--runs-dir", str(tmp_path / "new")]) == status
    said = capsys.readouterr()
    assert all(name in said.out for name in NAMES) and "note:" not in said.err
    assert ("regression: all tasks together" in said.err) == bool(status)


def test_settings_that_are_not_those_of_the_baseline_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    make_runs(tmp_path / "old", num_envs=4)
    committed.add([str(tmp_path / "old")], tmp_path / "baseline")
    monkeypatch.setattr(regression, "BASELINE", tmp_path / "baseline")
    monkeypatch.setattr(regression, "train", lambda args: make_runs(tmp_path / "new", num_envs=8))
    monkeypatch.setattr(regression, "report", lambda base, new: ("", []))
    assert regression.main(["--runs-dir", str(tmp_path / "new")]) == 0
    notes = [f"note: {name}: num_envs is 8, and 4 in the baseline" for name in NAMES]
    assert capsys.readouterr().err.splitlines() == notes


def test_without_a_baseline_nothing_is_trained(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(regression, "BASELINE", tmp_path / "regression")
    monkeypatch.setattr(regression, "train", lambda args: pytest.fail("it trained"))
    with pytest.raises(BadInput):
        regression.main([])
    said = "error: benchmark/regression has no runs: make a baseline with --update\n"
    assert capfd.readouterr().err == said


def test_a_run_that_fails_stops_the_suite(tmp_path: Path, monkeypatch, capfd) -> None:
    broken = regression.Task("ppo", "CartPole-v1", 1, "--no-such-flag")
    monkeypatch.setattr(regression, "TASKS", [broken])
    with pytest.raises(Stopped) as stop:
        regression.main(["--update", "--runs-dir", str(tmp_path / "runs"), "--workers", "1"])
    assert stop.value.code == 1
    assert "--no-such-flag is not a flag" in capfd.readouterr().err


def test_the_committed_baseline_finds_every_planted_loss() -> None:
    base = regression.scores_of_baseline()
    assert regression.check(base, loss=0.0) == (0, 10)
    assert regression.check(base, loss=0.1) == (10, 10)
