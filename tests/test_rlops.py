"""Comparing sets of runs: the statistics computed in another way, the command, its page."""

import json
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import Finished
from fake_runs import make_run

from cleanrl_utils import reproduce, results, rlops
from cleanrl_utils.analysis import stats
from cleanrl_utils.analysis.comparison import compare
from cleanrl_utils.analysis.sets import SetArgs
from cleanrl_utils.enjoy import EnjoyArgs, find_model

CHROMIUM = Path("/usr/bin/chromium")
RETURN = results.RETURN


def normal(seed: int, mean: float, std: float, sizes: Sequence[int]) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.normal(mean, std, size) for size in sizes]


# -- statistics -------------------------------------------------------------------------------


def test_interquartile_mean_and_its_interval_are_scipys() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    for size in (3, 4, 7, 10, 40):
        (x,) = normal(size, 0, 1, [size])
        assert stats.iqm(x) == pytest.approx(scipy_stats.trim_mean(x, 0.25))
    (x,) = normal(1, 5, 1, [12])
    trim = lambda x, axis: scipy_stats.trim_mean(x, 0.25, axis=axis)  # noqa: E731
    theirs = scipy_stats.bootstrap(
        (x,), trim, vectorized=True, n_resamples=20_000, method="percentile", rng=0
    ).confidence_interval
    assert stats.interval(stats.bootstrap_iqm([x])) == pytest.approx(tuple(theirs), abs=0.02)


def test_every_task_counts_the_same() -> None:
    a, b = np.array([1.0, 2.0, 3.0, 4.0]), np.array([11.0, 12.0])
    even = [a, np.repeat(b, 2)]  # the same two tasks, with equally many runs
    assert stats.set_iqm([a, b]) == pytest.approx(stats.set_iqm(even))
    levels = np.array([2.5, 11.5])
    assert stats.profile([a, b], levels) == pytest.approx([0.75, 0.25])
    # resampling is within tasks: all runs of a task the same leaves nothing to vary
    assert np.ptp(stats.bootstrap_iqm([np.full(5, 1.0), np.full(5, 9.0)], resamples=100)) == 0


def test_probability_of_improvement_is_that_of_all_pairs() -> None:
    def share_of_wins(old_scores: np.ndarray, new_scores: np.ndarray) -> float:
        """Over all pairs of runs; a tie is half a win."""
        new_scores = new_scores[:, None]
        return ((new_scores > old_scores) + (new_scores == old_scores) / 2).mean()

    old = normal(0, 0, 1, [5, 7])
    new = normal(1, 0.5, 1, [6, 4])
    old[0][0] = new[0][0]  # a tie
    value, (low, high) = stats.improvement(old, new)
    by_task = [share_of_wins(a, b) for a, b in zip(old, new, strict=True)]
    assert value == pytest.approx(np.mean(by_task))
    random = np.random.default_rng(5)
    resampled = []
    for _ in range(3000):
        by_task = []
        for a, b in zip(old, new, strict=True):
            drawn_old = random.choice(a, len(a))
            drawn_new = random.choice(b, len(b))
            by_task.append(share_of_wins(drawn_old, drawn_new))
        resampled.append(np.mean(by_task))
    assert (low, high) == pytest.approx(tuple(np.quantile(resampled, [0.025, 0.975])), abs=0.02)


def test_profile_interval_holds_the_profile() -> None:
    runs, levels = normal(3, 0, 1, [10, 6]), np.linspace(-1, 1, 9)
    low, high = stats.profile_interval(runs, levels)
    assert (low <= stats.profile(runs, levels)).all() and (
        stats.profile(runs, levels) <= high
    ).all()
    assert (high - low).max() > 0.1


def test_a_planted_regression_is_found_and_identical_code_is_not_flagged() -> None:
    for seed in range(20):
        old = normal(seed, 100, 3, [10])
        assert not stats.regressed(old, normal(seed + 100, 100, 3, [10]), 0.0, seed, 5000)
        assert stats.regressed(old, normal(seed + 200, 90, 3, [10]), 0.0, seed, 5000)
        assert not stats.regressed(old, normal(seed + 300, 110, 3, [10]), 0.0, seed, 5000)


def test_fifty_thousand_resamples_take_no_time() -> None:
    runs = normal(0, 1, 0.1, [10, 10, 10])
    began = time.process_time()
    assert len(stats.bootstrap_iqm(runs)) == 50_000
    assert time.process_time() - began < 3  # 0.3 s on an idle machine


# -- the command ------------------------------------------------------------------------------


@pytest.fixture
def two_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs tagged v1 and v2, which is 10% worse; two tasks, five seeds each."""
    monkeypatch.chdir(tmp_path)
    for seed in range(1, 6):
        for env_id, level in (("CartPole-v1", 400.0), ("Acrobot-v1", 90.0)):
            make_run(tmp_path / "runs", seed, level, env_id, tags=["v1"])
            make_run(tmp_path / "runs", seed, 0.9 * level, env_id, tags=["v2"], commit="b" * 40)
    return tmp_path


def test_table_pictures_and_exit_status(two_versions: Path, capsys: pytest.CaptureFixture) -> None:
    flags = "--exp-name ppo --tags v1 v2 --env-ids CartPole-v1 Acrobot-v1"
    flags += " --output-filename out/compare.png --scan-history --metric-last-n-average-window 100"
    assert rlops.main([*flags.split(), "--fail-on-regression"]) == 1
    printed = capsys.readouterr()
    assert "v2 is worse than v1 across tasks, on CartPole-v1, on Acrobot-v1" in printed.err
    assert "| CartPole-v1 | 39" in printed.out or "| CartPole-v1 | 40" in printed.out
    assert "interquartile mean" in printed.out and "P(improvement)" in printed.out
    assert (two_versions / "out/compare.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (two_versions / "out/compare.svg").read_text()
    # the other way round, v2 is better than the baseline
    assert rlops.main(["--tags", "v2", "v1", "--fail-on-regression"]) == 0
    # so are the sets made by commit: the same runs, the same verdict
    assert rlops.main(["--commits", "aaaa", "bbbb", "--fail-on-regression"]) == 1


def scores(printed: str) -> list[float]:
    (line,) = [line for line in printed.splitlines() if line.startswith("| CartPole-v1")]
    return [float(cell.split()[0]) for cell in line.split("|")[2:-1] if cell.strip() != "-"]


def test_the_window_and_the_metric_are_used(
    two_versions: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = two_versions / "runs/CartPole-v1__ppo__1__v1"
    table = results.read_metrics(folder)
    values = table[table.tag == RETURN].value
    flags = ["--tags", "v1", "--env-ids", "CartPole-v1"]
    for window in (1, 150):
        rlops.main([*flags, "--metric-last-n-average-window", str(window)])
        mean = scores(capsys.readouterr().out)[0]
        runs = [run for run in results.find_runs("runs") if "v1" in run.record["tags"]]
        runs = [run for run in runs if run.record["args"]["env_id"] == "CartPole-v1"]
        tables = [run.metrics() for run in runs]
        ends = [t[t.tag == RETURN].value.to_numpy()[-window:].mean() for t in tables]
        assert mean == pytest.approx(np.mean(ends), abs=0.01)
    assert len(values) == 200
    rlops.main([*flags, "--metric", "losses/value_loss", "--metric-last-n-average-window", "1"])
    assert scores(capsys.readouterr().out) == [pytest.approx(0.02)]


def test_what_does_not_count_is_said(two_versions: Path, capsys: pytest.CaptureFixture) -> None:
    make_run(two_versions / "runs", 9, 100.0, tags=["v2"], finished=False)
    make_run(two_versions / "runs", 9, 100.0, tags=["v4"], name="other", gamma=0.5)
    make_run(two_versions / "more", 9, 100.0)
    Path("a-file").write_text("")
    assert rlops.main(["--tags", "v1", "v2"]) == 0
    assert "v2: 1 unfinished run: CartPole-v1__ppo__9__v2; left out" in capsys.readouterr().err
    for flags, message in [
        ("--tags v1 v2 --fail-on-regression", "1 unfinished run"),
        ("--tags v1 --fail-on-regression", "needs two sets"),
        ("--tags v1 v3", "error: runs: no run with tag v3\n"),
        ("--exp-name dqn", "error: runs: no run of dqn\n"),
        (
            "--exp-name ppo --commits fff --env-ids A-v0 B-v0",
            "error: runs: no run of ppo of commit fff on A-v0 or B-v0\n",
        ),
        (
            "--runs-dir runs more --where gamma=0.5",
            "error: more: no run with --where gamma=0.5\n",
        ),
        ("--tags v1 --metric charts/nothing", "no finished run that logged charts/nothing"),
        ("--runs-dir nowhere", "--runs-dir nowhere: no such folder"),
        ("--tags v1 --metric-last-n-average-window 0", "at least 1"),
        ("--tags v1 --output-filename a-file/x.png", "cannot be written"),
    ]:
        with pytest.raises(SystemExit) as stop:
            rlops.main(flags.split())
        assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "record", ["[]", '{"args": {}}', '{"args": [], "script": "ppo", "command": []}']
)
def test_folders_that_are_no_runs_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, record: str
) -> None:
    monkeypatch.chdir(tmp_path)
    odd = tmp_path / "runs/odd"
    odd.mkdir(parents=True)
    (odd / "run.json").write_text(record)
    commands: dict[str, Callable] = {
        "rlops": lambda: rlops.main(["--runs-dir", str(odd)]),
        "enjoy": lambda: find_model(EnjoyArgs(runs_dir=str(odd))),
        "results": lambda: results.add([str(odd)], tmp_path / "committed"),
        "reproduce": lambda: reproduce.main([str(odd), "--all-flags"]),
    }
    for name, command in commands.items():
        with pytest.raises(SystemExit) as stop:
            command()
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said.count("\n") == 1 and str(odd) in said, name
    run = make_run(tmp_path / "runs", 1, 100.0)
    assert [found.folder for found in results.find_runs("runs")] == [Path("runs", run.name)]


def test_one_broken_task_among_many_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in range(1, 6):
        for i in range(6):
            make_run(tmp_path / "runs", seed, 100.0, f"Task{i}-v0", tags=["v1"])
            level = 50.0 if i == 2 else 100.0
            make_run(tmp_path / "runs", seed, level, f"Task{i}-v0", tags=["v2"])
    assert rlops.main(["--tags", "v1", "v2", "--fail-on-regression"]) == 1
    assert "v2 is worse than v1 on Task2-v0\n" in capsys.readouterr().err


def test_too_few_runs_are_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        make_run(tmp_path / "runs", seed, 100.0, exp_name="ppo")
        make_run(tmp_path / "runs", seed, 50.0, exp_name="other")
    with pytest.raises(SystemExit) as stop:
        rlops.main(["--exp-names", "ppo", "other", "--fail-on-regression"])
    assert stop.value.code == 2 and "too few runs: " in capsys.readouterr().err


def test_runs_of_a_real_training(
    train: Callable[..., Finished], capsys: pytest.CaptureFixture
) -> None:
    """PPO that hardly learns is worse than PPO, and PPO is not worse than itself."""
    flags = "--no-cuda --total-timesteps 4096 --learning-rate 0.003 --num-steps 64 --seed"
    for seed in (1, 2, 3, 4, 5):
        train("ppo", f"{flags} {seed}")
        train("ppo", f"{flags} {seed} --exp-name lame --learning-rate 1e-9")
    judge = "--fail-on-regression --metric-last-n-average-window 20"
    assert rlops.main(f"--exp-names ppo lame {judge}".split()) == 1
    assert "lame is worse than ppo" in capsys.readouterr().err
    assert rlops.main(f"--exp-names lame ppo {judge}".split()) == 0


def test_new_runs_against_committed_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in range(1, 6):
        make_run(tmp_path / "old", seed, 100.0)
        make_run(tmp_path / "runs", seed, 80.0)
    results.add(["old"], tmp_path / "committed")
    flags = "--results-dir committed --runs-dir runs --exp-name ppo --fail-on-regression"
    assert rlops.main(flags.split()) == 1
    assert "runs is worse than committed results" in capsys.readouterr().err
    first, second = (results.find_runs(name) for name in ("old", "runs"))
    expected = [np.mean([results.summary(r)["final_return"] for r in s]) for s in (first, second)]
    rlops.main(flags.replace("--fail-on-regression", "").split())
    assert scores(capsys.readouterr().out) == pytest.approx(expected, abs=0.02)


def test_parquet_has_every_value(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for seed in (1, 2, 3):
        make_run(tmp_path / "runs", seed, 100.0 * seed, losses=10 * seed)
    runs = results.find_runs(tmp_path / "runs")
    path = tmp_path / "out/all.parquet"
    assert len(results.export(path, [str(tmp_path / "runs")])) == 3 * 200 + 60
    table = pd.read_parquet(path)
    for run in runs:
        mine = table[table.run == run.folder.name][["step", "seconds", "tag", "value"]]
        assert mine.astype({"tag": str}).to_numpy().tolist() == (
            run.metrics().astype({"tag": str}).to_numpy().tolist()
        )
    assert set(table.seed) == {1, 2, 3} and set(table.env_id) == {"CartPole-v1"}
    results.add([str(tmp_path / "runs")], tmp_path / "committed")
    results.export(path, folder=tmp_path / "committed")
    curves = pd.read_parquet(path)
    assert len(curves) == 300 and {"commit", "hardware", "versions", "command"} <= set(curves)


def test_parquet_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("pyarrow")
    make_run(tmp_path / "runs", 1, 100.0)
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file/x.parquet", Path("/proc/x.parquet")):
        with pytest.raises(SystemExit) as stop:
            results.export(path, [str(tmp_path / "runs")])
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said.count("\n") == 1
        assert said.startswith(f"error: --output {path}: cannot be written")


def test_two_sets_of_ten_large_runs_are_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in range(1, 11):
        for tag in ("v1", "v2"):
            folder = make_run(tmp_path / "runs", seed, 100.0, tags=[tag], losses=100)
            with open(folder / "metrics.csv", "a") as file:
                for i in range(25_000):
                    file.write(f"{10_000 + i},{20 + i / 1000:.3f},losses/entropy,{i / 7!r}\n")
            assert (folder / "metrics.csv").stat().st_size > 1_000_000
    words = ["-m", "cleanrl_utils.rlops", "--tags", "v1", "v2", "--report", "--fail-on-regression"]
    began = time.monotonic()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    assert seconds < 20 * 3  # 20 s on an idle machine; tests share theirs
    assert (tmp_path / "compare.html").stat().st_size < 2_000_000


class FakeWandb(types.ModuleType):
    """A fake of wandb's public API that records its calls."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.asked: list[Any] = []

    def Api(self, timeout: int) -> "FakeWandb":  # noqa: N802
        return self

    def runs(self, path: str, filters: dict) -> list[Any]:
        self.asked.append((path, filters))
        made = []
        for tag, level in (("pr-299", 100.0), ("rlops-pilot", 100.0)):
            for seed in (1, 2, 3):
                rows = [
                    {RETURN: level + seed + i / 100, "global_step": i, "_runtime": i / 10}
                    for i in range(1, 201)
                ]
                made.append(
                    types.SimpleNamespace(
                        name=f"{tag}-{seed}",
                        config={"exp_name": "ddpg", "env_id": "Hopper-v2", "seed": seed},
                        tags=[tag],
                        commit="c" * 40,
                        state="finished",
                        scan_history=lambda keys, rows=rows: self.asked.append("scan") or rows,
                        history=lambda samples, keys, pandas, rows=rows: rows[::10],
                    )
                )
        return made


def test_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    flags = "--exp-name ddpg --wandb-project-name cleanrl --wandb-entity openrlbenchmark"
    flags += " --tags pr-299 rlops-pilot --env-ids Hopper-v2 --output-filename compare.png"
    flags += " --scan-history --metric-last-n-average-window 100 --report"
    assert rlops.main(flags.split()) == 0
    printed = capsys.readouterr().out
    assert "| Hopper-v2 | 103.50 ± 1.00 (3) | 103.50 ± 1.00 (3) |" in printed
    path, filters = fake.asked[0]
    assert path == "openrlbenchmark/cleanrl" and fake.asked.count("scan") == 6
    assert {"tags": {"$in": ["pr-299", "rlops-pilot"]}} in filters["$and"]
    monkeypatch.setattr(fake, "runs", lambda *a, **k: 1 / 0)
    with pytest.raises(SystemExit) as stop:
        rlops.main(flags.split())
    assert stop.value.code == 2 and "cannot be read" in capsys.readouterr().err


# -- sets that cannot be compared ---------------------------------------------------------------


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_runs_with_different_settings_are_no_set(
    own_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    for seed in (1, 2, 3):
        make_run(own_folder, seed, 100.0, name=f"long-{seed}", total_timesteps=40_000, gamma=0.9)
    for seed in (1, 2):
        make_run(own_folder, seed, 50.0, name=f"short-{seed}", total_timesteps=20_000, gamma=0.9)
    with pytest.raises(SystemExit) as stop:
        rlops.main(["--exp-name", "ppo"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert "ppo on CartPole-v1: 5 runs with different settings" in said
    assert "(--total-timesteps 20000 or 40000); choose with --where total-timesteps=40000" in said
    assert "--split-by total-timesteps" in said and "gamma" not in said
    # the two ways out that the line names
    assert rlops.main(["--exp-name", "ppo", "--where", "total-timesteps=4e4"]) == 0
    assert "(3)" in capsys.readouterr().out
    assert rlops.main(["--exp-name", "ppo", "--split-by", "total-timesteps"]) == 0
    printed = capsys.readouterr().out
    assert "|  | total-timesteps=20000 | total-timesteps=40000 |" in printed
    assert scores(printed) == [pytest.approx(50, rel=0.1), pytest.approx(100, rel=0.1)]
    assert "| --total-timesteps | 20000 | 40000 |" in printed


def test_a_set_can_be_of_runs_that_were_not_lengthened(
    own_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    longer = {"lengthened": [{"at_step": 5_000, "from": 5_000, "to": 10_000}]}
    for seed in (1, 2, 3):
        make_run(own_folder, seed, 100.0 if seed < 3 else 50.0, more=longer if seed == 3 else {})
    with pytest.raises(SystemExit):
        rlops.main([])
    assert "choose with --where lengthened=unset" in capsys.readouterr().err
    assert rlops.main(["--where", "lengthened=unset"]) == 0
    assert "(2)" in capsys.readouterr().out
    assert rlops.main(["--split-by", "lengthened"]) == 0
    assert "lengthened=5000-to-10000-at-5000 | lengthened=unset" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--where gamma=0.5", "--where gamma=0.5: no such run; runs have 0.9"),
        ("--where gama=0.9", "--where gama: no run has this setting"),
        ("--where gamma", "--where takes NAME=VALUE, not gamma"),
        ("--split-by gama", "--split-by gama: no run has this setting"),
    ],
)
def test_a_setting_that_no_run_has_is_one_line(
    own_folder: Path, capsys: pytest.CaptureFixture, flags: str, message: str
) -> None:
    make_run(own_folder, 1, 100.0, gamma=0.9)
    with pytest.raises(SystemExit) as stop:
        rlops.main(flags.split())
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and message in said


def test_runs_of_different_length_are_no_set(
    own_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    make_run(own_folder, 1, 100.0, losses=10)
    make_run(own_folder, 2, 100.0, losses=10, episodes=100)
    with pytest.raises(SystemExit) as stop:
        rlops.main(["--exp-name", "ppo"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "runs end at different steps (5,000 to 10,000)" in said
    assert rlops.main(["--exp-name", "ppo", "--unfinished"]) == 0
    assert "runs end at different steps (5,000 to 10,000)" in capsys.readouterr().err


def test_settings_that_differ_between_sets_are_shown(
    own_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    for seed in (1, 2):
        for task, steps in (("A-v0", 100), ("B-v0", 200)):
            make_run(own_folder, seed, 100.0, task, "old", code="1111", gamma=0.9, n=steps)
            new = {"gamma": 0.99, "n": steps, "noise": True}
            make_run(own_folder, seed, 100.0, task, "new", code=f"222{seed}", **new)
    assert rlops.main(["--exp-names", "old", "new", "--report"]) == 0
    printed = capsys.readouterr()
    assert "| differs between the sets | old | new |" in printed.out
    assert "| --gamma | 0.9 | 0.99 |" in printed.out
    assert "| code | 1111 | 2221, 2222 |" in printed.out
    assert "| --n |" not in printed.out, "the same on each task"
    assert "Only new has the settings --noise." in printed.out
    assert "new: runs of different code: 2221 (2 runs), 2222 (2 runs)" in printed.err
    assert "old: settings differ between tasks: --n" in printed.err
    assert "| --gamma | 0.9 | 0.99 |" in Path("compare.html").read_text()


def test_the_module_of_an_environment_is_no_other_version_of_the_code(
    own_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    for seed in (1, 2):
        make_run(own_folder, seed, 100.0, "A-v0", code="1111")
        make_run(own_folder, seed, 100.0, "mine:B-v0", code="2222")
    assert rlops.main(["--exp-name", "ppo"]) == 0
    assert "different code" not in capsys.readouterr().err
    make_run(own_folder, 3, 100.0, "mine:B-v0", code="3333")
    assert rlops.main(["--exp-name", "ppo"]) == 0
    said = capsys.readouterr().err
    assert "ppo: runs of different code: 2222 (2 runs), 3333 (1 run)" in said


def test_earlier_committed_results_have_the_flags_of_their_commands(
    own_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    for seed in (1, 2):
        make_run(own_folder, seed, 100.0, gamma=0.9, learning_rate=0.1)
    results.add([str(own_folder)], Path("committed"))
    path = Path("committed/ppo.json")
    facts = json.loads(path.read_text())
    for fact in facts:
        del fact["settings"], fact["code"], fact["episodes"]
        fact["command"] = f"python cleanrl/ppo.py --gamma 0.5 --seed {fact['seed']}"
    path.write_text(json.dumps(facts))
    assert rlops.main(["--results-dir", "committed", "--runs-dir", "runs"]) == 0
    printed = capsys.readouterr().out
    assert "| --gamma | 0.5 | 0.9 |" in printed and "learning-rate" not in printed
    assert "committed results: only the flags of the commands are recorded." in printed


def test_equal_settings_are_said(two_versions: Path, capsys: pytest.CaptureFixture) -> None:
    for path in two_versions.glob("runs/*/run.json"):
        path.write_text(path.read_text().replace("b" * 40, "a" * 40))
    assert rlops.main(["--tags", "v1", "v2"]) == 0
    assert "Settings and code are the same in all sets." in capsys.readouterr().out


@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_few_seeds_carry_a_caution(
    own_folder: Path, capsys: pytest.CaptureFixture, seeds: int
) -> None:
    for seed in range(1, seeds + 1):
        make_run(own_folder, seed, 100.0, exp_name="old")
        make_run(own_folder, seed, 200.0, exp_name="new")
    assert rlops.main(["--exp-names", "old", "new"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ("| interquartile mean", "| difference", "| P(improvement)")
    uncertain = [line for line in lines if line.startswith(names)]
    assert len(uncertain) == 3
    caution = {1: "(caution: one seed, no interval)", 3: "(caution: only 3 seeds)", 5: ""}[seeds]
    for line in uncertain:
        assert caution in line and ("caution" in line) == bool(caution)
        assert ("[" in line) == (seeds > 1)
    (task,) = [line for line in lines if line.startswith("| CartPole-v1")]
    assert ("±" in task) == (seeds > 1)


def test_the_output_says_what_scores_and_intervals_are(
    own_folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib.pyplot as plt

    for seed in (1, 2, 3):
        for name, level in (("old", 100.0), ("new", 98.0)):
            make_run(own_folder, seed, level, exp_name=name)
    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    flags = "--exp-names old new --metric-last-n-average-window 50 --output-filename a.pdf"
    assert rlops.main(flags.split()) == 0
    printed = capsys.readouterr().out
    assert "A run's score is the mean of its last 50 values." in printed
    assert "95% intervals: stratified bootstrap over seeds" in printed
    assert b"/Type3" not in Path("a.pdf").read_bytes()

    (figure,) = drawn
    curves, _, profile, means = figure.axes
    assert curves.get_legend().get_title().get_text() == "mean ± standard deviation (seeds)"
    assert "95% interval" in profile.get_title() and "95% interval" in means.get_title()
    assert means.title.get_window_extent().x1 <= figure.bbox.x1
    low, high = means.get_xlim()
    bars = [bar.get_bbox() for bar in means.patches]
    assert low < min(bar.x0 for bar in bars) and high > max(bar.x1 for bar in bars)


@pytest.mark.parametrize("episodes", [(200, 200), (200, 100)])
def test_learning_across_tasks_is_drawn(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, episodes: tuple[int, int]
) -> None:
    """The artificial runs learn at a constant rate and are done after half of their steps."""
    import matplotlib.pyplot as plt

    for seed in (1, 2, 3):
        for task, number in zip(("A-v0", "B-v0"), episodes, strict=True):
            make_run(own_folder, seed, 100.0, task, exp_name="old", episodes=number)
            make_run(own_folder, seed, 50.0, task, exp_name="new", episodes=number)
    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    flags = ["--exp-names", "old", "new", "--metric-last-n-average-window", "20"]
    assert rlops.main(flags) == 0
    steps, minutes = drawn[0].axes[4:6]
    assert steps.get_title() == "2 tasks: interquartile mean, 95% interval"
    same = episodes[0] == episodes[1]
    assert steps.get_xlabel() == ("steps" if same else "% of a task's steps")
    assert minutes.get_xlabel() == ("minutes" if same else "% of a task's minutes")
    for axis in (steps, minutes):
        old, new = axis.lines
        end = old.get_xdata()[-1]
        expected = {0.25: (0.5, 0.25), 0.75: (1.0, 0.5), 1.0: (1.0, 0.5)}
        for share, scores in expected.items():
            found = [np.interp(share * end, *line.get_data()) for line in (old, new)]
            np.testing.assert_allclose(found, scores, atol=0.08)
        band = axis.collections[0].get_paths()[0].vertices
        assert band[:, 1].min() < old.get_ydata().min() and band[:, 1].max() > 1


def test_scores_of_committed_results_count_from_the_first_point(own_folder: Path) -> None:
    """A point of a committed curve is already a mean over episodes: ten are a tenth of the run."""
    for seed in (1, 2, 3):
        make_run(own_folder, seed, 100.0, episodes=1000)
    results.add([str(own_folder)], Path("committed"))
    c = compare(SetArgs(results=True, results_dir="committed"))
    (final,) = c.scores[0]
    assert c.units[0] > 0.97 * final.mean()  # the artificial runs start at 0


def test_tables_as_latex(own_folder: Path, capsys: pytest.CaptureFixture) -> None:
    for seed in range(1, 6):
        make_run(own_folder, seed, -100.0, exp_name="old")
        make_run(own_folder, seed, -120.0, exp_name="new_50%")
    flags = "--exp-names old new_50% --output-filename out/a.pdf --latex"
    assert rlops.main(flags.split()) == 0
    assert "out/a.pdf, out/a.svg, out/a.tex" in capsys.readouterr().out
    scores, statistics = Path("out/a.tex").read_text().split("\n\n")
    assert r"\caption{charts/episodic\_return: mean $\pm$ sample standard" in scores
    lines = scores.splitlines()
    assert r" & old & new\_50\% \\" in lines and r"\begin{tabular}{lcc}" in lines
    (row,) = [line for line in lines if line.startswith("CartPole-v1 & ")]
    assert row.count("$-$") == 2 and row.count(r" $\pm$ ") == 2 and row.endswith(r"(5) \\")
    assert r"(95\% intervals: stratified bootstrap" in statistics
    assert r"difference &  & $-$" in statistics


def test_a_run_without_a_finished_episode_is_left_out(
    own_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    make_run(own_folder, 1, 100.0)
    make_run(own_folder, 2, 100.0, episodes=0)
    results.add([str(own_folder)], Path("committed"))
    for source in [], ["--results-dir", "committed"]:
        assert rlops.main(["--exp-name", "ppo", *source]) == 0
        assert "CartPole-v1__ppo__2__aaa left out: no finished episode" in capsys.readouterr().err


# -- the page ---------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1200, 360])
def test_the_page_works_in_a_browser(two_versions: Path, width: int) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    evil = two_versions / "runs/CartPole-v1__ppo__1__v1/run.json"
    record = json.loads(evil.read_text())
    record["tags"].append("</script><script>document.title='broken'</script>")
    evil.write_text(json.dumps(record))
    assert rlops.main(["--tags", "v1", "v2", "--report"]) == 0
    said: list[str] = []
    requests: list[str] = []
    with playwright.sync_playwright() as p:
        options = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = p.chromium.launch(executable_path=str(CHROMIUM), args=options)
        context = browser.new_context(offline=True, viewport={"width": width, "height": 800})
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(f"file://{two_versions}/compare.html")
        curves = page.locator(".chart path.curve")
        assert page.title() == "Comparison of runs"
        assert page.locator(".chart").count() == 2 and curves.count() == 4
        assert page.locator("#summary td", has_text="CartPole-v1").count() == 1
        # a click hides a set, another shows it
        page.locator("#legend button", has_text="v2").click()
        assert curves.count() == 2 and curves.first.get_attribute("data-group") == "v1"
        page.locator("#legend button", has_text="v2").click()
        assert curves.count() == 4
        # a run that is hidden leaves the mean of its set
        cartpole = page.locator(".chart", has_text="CartPole-v1")
        mean = cartpole.locator("path.curve").first
        before = mean.get_attribute("d")
        page.locator("#single summary").click()
        page.locator("#runs button", has_text="CartPole-v1__ppo__1__v1").click()
        assert mean.get_attribute("d") != before
        page.locator("#all").click()
        assert mean.get_attribute("d") == before
        # every run on its own, another metric, time instead of steps, other smoothing
        page.locator("#group").select_option("run")
        assert curves.count() == 20
        page.locator("#group").select_option("seed")
        assert curves.count() == 10
        page.locator("#group").select_option("set")
        page.locator("#smooth").fill("0.9")
        assert mean.get_attribute("d") != before
        page.locator("#axis").select_option("minutes")
        assert cartpole.locator("text", has_text="minutes").count() == 1
        page.locator("#metric").select_option("losses/value_loss")
        assert curves.count() == 4
        # hovering names values
        page.locator(".chart svg").first.hover()
        tip = page.locator(".chart .tip").first
        assert tip.is_visible() and "v1:" in tip.inner_text() and "v2:" in tip.inner_text()
        # nothing sticks out sideways, also on a phone
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()
    assert said == [] and all(url.startswith(("file:", "data:")) for url in requests)
