"""The tuner on real runs: settings reach the runs, trials are pruned, studies continue."""

import json
import shlex
import socket
import statistics
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

optuna = pytest.importorskip("optuna")

from optuna.trial import TrialState  # noqa: E402

from cleanrl_utils import results  # noqa: E402
from cleanrl_utils import tuner as tuner_module  # noqa: E402
from cleanrl_utils.analysis.study import requeue  # noqa: E402
from cleanrl_utils.tuner import RunFailed, Tuner, as_flags, check_settings  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


def make_tuner(params_fn: Any, **changes: Any) -> Tuner:
    settings = dict(
        script=str(ROOT / "cleanrl/ppo.py"),
        metric="charts/episodic_return",
        metric_last_n_average_window=50,
        target_scores={"CartPole-v1": [0, 500]},
        params_fn=params_fn,
        study_name="test",
    )
    return Tuner(**(settings | changes))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_documented_example(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The example of the documentation with fewer steps; two trials in parallel."""
    tuner = Tuner(
        script=str(ROOT / "cleanrl/ppo.py"),
        metric="charts/episodic_return",
        metric_last_n_average_window=50,
        direction="maximize",
        aggregation_type="average",
        target_scores={
            "CartPole-v1": [0, 500],
            "Acrobot-v1": [-500, 0],
        },
        params_fn=lambda trial: {
            "learning-rate": trial.suggest_loguniform("learning-rate", 0.0003, 0.003),
            "num-minibatches": trial.suggest_categorical("num-minibatches", [1, 2, 4]),
            "update-epochs": trial.suggest_categorical("update-epochs", [1, 2, 4, 8]),
            "num-steps": trial.suggest_categorical("num-steps", [16, 32, 64, 128]),
            "vf-coef": trial.suggest_uniform("vf-coef", 0, 5),
            "max-grad-norm": trial.suggest_uniform("max-grad-norm", 0, 5),
            "total-timesteps": 10_000,
            "num-envs": 16,
        },
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5),
        sampler=optuna.samplers.TPESampler(),
        study_name="example",
        workers=2,
    )
    study = tuner.tune(num_trials=2, num_seeds=1, fresh_seeds=2)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2
    assert study.trials[1].datetime_start < study.trials[0].datetime_complete, "not side by side"
    for trial in study.trials:
        records = list(tmp_path.glob(f"runs/.tuner/example/trial_{trial.number:04}/*/run.json"))
        assert len(records) == 2
        for path in records:
            used = json.loads(path.read_text())["args"]
            for name, value in trial.params.items():
                assert used[name.replace("-", "_")] == value, name
        returns = [final_return(path.parent) for path in sorted(records)]  # Acrobot, CartPole
        assert trial.value == pytest.approx(((returns[0] + 500) / 500 + returns[1] / 500) / 2)
        assert 10_000 - 2048 <= trial.user_attrs["steps"] / 2 <= 10_000
    assert results.find_runs("runs") == [], "trials are no ordinary runs"
    # the winner ran again on seeds that no trial used, and that score is reported
    fresh = []
    for seed in (1, 2):
        folder = tmp_path / f"runs/.tuner/example/trial_{study.best_trial.number:04}_fresh"
        paths = sorted(folder.glob(f"*__{seed}__*/run.json"))
        returns = [final_return(path.parent) for path in paths]
        fresh.append(((returns[0] + 500) / 500 + returns[1] / 500) / 2)
        used = json.loads(paths[0].read_text())["args"]
        assert used["learning_rate"] == study.best_params["learning-rate"] and used["seed"] == seed
    said = capsys.readouterr().out
    score = f"{statistics.mean(fresh):.3f} ± {statistics.stdev(fresh):.3f}"
    assert f"{score} over 2 fresh seeds (1, 2): the number to report" in said
    assert "on the seeds used for tuning (biased upwards: the best of 2 trials)" in said
    (command,) = [line for line in said.splitlines() if "cleanrl_utils.benchmark" in line]
    words = shlex.split(command)
    inner = shlex.split(words[words.index("--command") + 1])
    assert f"--learning-rate={study.best_params['learning-rate']}" in inner
    page = (tmp_path / "runs/.tuner/example/report.html").read_text()
    assert (
        score in page
        and page.count("plotly.js v") == 1
        and page.count('class="plotly-graph-div"') >= 4
    )
    # the same call again has nothing left to do
    before = sorted(tmp_path.glob("runs/.tuner/example/*/*/run.json"))
    again = make_tuner(tuner.params_fn, study_name="example", target_scores=tuner.target_scores)
    assert len(again.tune(num_trials=2, num_seeds=1, fresh_seeds=2).trials) == 2
    assert sorted(tmp_path.glob("runs/.tuner/example/*/*/run.json")) == before
    assert score in capsys.readouterr().out


def finished_trial(tuner: Tuner, num_seeds: int) -> Any:
    trial = tuner.study.ask()
    trial.set_user_attr("params", {"learning-rate": 0.1})
    trial.set_user_attr("seeds", num_seeds)
    return tuner.study.tell(trial, 1.0)


class FakeTraining:
    """A run that ends at once; its score is its seed. Seed 6 fails."""

    seeds: list[int] = []

    def __init__(self, script: str, params: Any, env_id: str, seed: int, *_: Any):
        self.seed = seed
        self.seeds.append(seed)

    def look(self) -> bool:
        return False

    def result(self) -> list[float]:
        if self.seed == 6:
            raise RunFailed("A-v0, seed 6, ended with status 1")
        return [float(self.seed)]

    def stop(self) -> None:
        pass


def test_fresh_seeds_are_those_of_no_trial(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(FakeTraining, "seeds", [])
    monkeypatch.setattr(tuner_module, "Training", FakeTraining)
    tuner = make_tuner(dict, target_scores={"A-v0": None}, workers=2)
    best = finished_trial(tuner, num_seeds=4)
    tuner.conclude(2, 0)
    said = capsys.readouterr().out
    assert FakeTraining.seeds == [] and "fresh seed" not in said
    assert "--env-id A-v0 --seed 4\n" in said  # the command uses no seed of a trial, either
    tuner.target_scores = {"A-v0": None, "B-v0": None}
    assert "--start-seed 4 --num-seeds 2" in tuner.command({}, 2)
    tuner.target_scores = {"A-v0": None}
    tuner.conclude(2, 2)  # an earlier call had used four seeds
    assert FakeTraining.seeds == [4, 5]
    assert "4.500 ± 0.707 over 2 fresh seeds (4, 5)" in capsys.readouterr().out
    tuner.conclude(2, 3)  # two of them are known; the third fails
    assert FakeTraining.seeds == [4, 5, 6]
    said = capsys.readouterr().out
    assert "FAILED on a fresh seed: A-v0, seed 6, ended with status 1" in said
    assert "4.500 ± 0.707 over 2 of the fresh seeds 4, 5, 6" in said
    assert tuner.fresh_scores(best) == {4: {"A-v0": 4.0}, 5: {"A-v0": 5.0}}


def final_return(folder: Path) -> float:
    rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    values = [float(row[3]) for row in rows if row[2] == "charts/episodic_return"]
    return sum(values[-50:]) / len(values[-50:])


def test_a_run_is_pruned_while_it_trains(tmp_path: Path) -> None:
    hopeless = optuna.pruners.ThresholdPruner(lower=10.0)
    params = {"total-timesteps": 400_000, "checkpoints": 0}
    stale = (
        tmp_path / "runs/.tuner/test/trial_0000/CartPole-v1__0.folder"
    )  # of a study that was deleted
    stale.parent.mkdir(parents=True)
    stale.write_text("nowhere")
    study = make_tuner(lambda trial: params, pruner=hopeless).tune(num_trials=1, num_seeds=2)
    (trial,) = study.trials
    assert trial.state == TrialState.PRUNED
    assert list(trial.intermediate_values) == [1]
    assert 40_000 <= trial.user_attrs["steps"] < 200_000, "one tenth, and what came until we looked"
    (run,) = tmp_path.glob("runs/.tuner/test/trial_0000/*/run.json")
    assert not (run.parent / "finished.json").exists()


def test_a_failed_run_is_a_failed_trial(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def crash(trial: Any) -> dict[str, Any]:
        trial.suggest_float("learning-rate", 1e-4, 1e-3)
        return {"no-such-flag": 1}

    with pytest.raises(SystemExit, match="every trial failed") as stop:
        make_tuner(crash).tune(num_trials=5, num_seeds=1)
    log = tmp_path / "runs/.tuner/test/trial_0000/CartPole-v1__0.txt"
    assert "\n" not in str(stop.value.code) and str(stop.value.code).endswith(f"; see {log}")
    assert "--no-such-flag is not a flag" in log.read_text()
    study = optuna.load_study(study_name="test", storage="sqlite:///cleanrl_hpopt.db")
    assert [trial.state for trial in study.trials] == [TrialState.FAIL] * tuner_module.GIVE_UP
    assert "--no-such-flag is not a flag" in study.trials[0].user_attrs["error"]
    assert all(trial.value is None for trial in study.trials)


def test_the_only_trial_failed_and_so_did_the_call() -> None:
    with pytest.raises(SystemExit, match="error: every trial failed; the first: CartPole-v1"):
        make_tuner(lambda trial: {"no-such-flag": 1}).tune(num_trials=1, num_seeds=1)


def test_a_score_that_is_not_a_number_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverges(*_: Any) -> Generator[None, None, float]:
        yield
        return float("nan")

    monkeypatch.setattr(Tuner, "one_run", diverges)
    with pytest.raises(SystemExit, match="its score is NaN; see runs/.tuner/test/trial_0000"):
        make_tuner(lambda trial: {}).tune(num_trials=1, num_seeds=1)


def test_a_value_that_did_not_arrive_is_a_failure(tmp_path: Path) -> None:
    record = {"args": {"learning_rate": 0.25, "anneal_lr": False, "ids": [0, 1]}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    check_settings({"learning-rate": 0.25, "anneal-lr": False, "ids": (0, 1)}, tmp_path)
    for params in ({"learning-rate": 0.5}, {"anneal-lr": True}, {"ids": [0]}, {"gamma": 1.0}):
        with pytest.raises(RunFailed):
            check_settings(params, tmp_path)


def test_settings_become_flags() -> None:
    params = {"learning-rate": 1e-05, "anneal_lr": False, "target-kl": None, "device-ids": [0, 1]}
    words = ["--learning-rate=1e-05", "--anneal-lr=False", "--target-kl=None"]
    assert as_flags(params) == [*words, "--device-ids", "0", "1"]
    code = "import sys; from cleanrl.ppo import *; print(parse_args(Args, sys.argv[1:]))"
    flags = [sys.executable, "-c", code, *words]
    done = subprocess.run(flags, capture_output=True, text=True, check=True)
    assert "learning_rate=1e-05" in done.stdout and "anneal_lr=False" in done.stdout
    assert "target_kl=None" in done.stdout


def test_trials_of_a_tuner_that_was_killed_are_queued_again() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    tuner = make_tuner(lambda trial: {"gamma": trial.suggest_float("gamma", 0.9, 0.99)})
    lost = tuner.study.ask()
    tuner.params_fn(lost)
    lost.set_user_attr("process", [socket.gethostname(), dead.pid])
    elsewhere = tuner.study.ask()
    elsewhere.set_user_attr("process", ["another-machine", dead.pid])
    tuner.requeue_dead_trials()
    states = [trial.state for trial in tuner.study.trials]
    assert states == [TrialState.FAIL, TrialState.RUNNING, TrialState.WAITING]
    assert tuner.params_fn(tuner.study.ask()) == {"gamma": lost.params["gamma"]}


def test_two_tuners_queue_a_dead_trial_once() -> None:
    """The second one has read the trials before the first one wrote that it failed."""
    tuner = make_tuner(dict)
    tuner.study.ask()
    (seen,) = tuner.study.get_trials()
    for _ in range(2):
        requeue(tuner.study, seen)
    assert [trial.state.name for trial in tuner.study.trials] == ["FAIL", "WAITING"]


def test_scores_are_joined_as_asked() -> None:
    tasks = {"A-v0": [0, 10], "B-v0": [-5, 5]}
    tuner = make_tuner(dict, target_scores=tasks, aggregation_type="min")
    assert tuner.score([100.0] + [5.0] * 50, "A-v0") == 0.5  # the last 50 only
    assert tuner.trial_score([[0.5, 0.2], [0.9, 1.0]]) == pytest.approx((0.2 + 0.9) / 2)
    with pytest.raises(SystemExit):
        make_tuner(dict, target_scores={"A-v0": None, "B-v0": [0, 1]})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"target_scores": {"A-v0": [5, 5]}}, "target_scores of A-v0"),
        ({"target_scores": {"A-v0": [0, 1, 2]}}, "target_scores of A-v0"),
        ({"target_scores": {"A-v0": ["0", 1]}}, "target_scores of A-v0"),
        ({"target_scores": {"A-v0": [0, float("nan")]}}, "target_scores of A-v0"),
        ({"target_scores": {"A-v0": 5}}, "target_scores of A-v0"),
        ({"direction": "up"}, "direction must be maximize or minimize, not up"),
        ({"storage": "foo"}, "storage is not a database URL"),
        ({"storage": "postgresql://host:secret/optuna"}, "storage is not a database URL"),
        ({"storage": "foo://x"}, "the storage cannot be used"),
        ({"storage": "redis://x"}, "the storage cannot be used"),
        ({"storage": "sqlite:///no/such/folder/x.db"}, "the storage cannot be used"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"metric_last_n_average_window": 0}, "metric_last_n_average_window must be at least 1"),
        ({"num_trials": 0}, "num_trials must be at least 1"),
        ({"num_seeds": 0}, "num_seeds must be at least 1"),
        ({"fresh_seeds": -1}, "fresh_seeds must not be negative"),
    ],
)
def test_what_cannot_be_used_is_one_line_before_any_trial(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    numbers = {name: changes.get(name, 1) for name in ("num_trials", "num_seeds", "fresh_seeds")}
    settings = {name: value for name, value in changes.items() if name not in numbers}
    with pytest.raises(SystemExit) as stop:
        make_tuner(dict, **settings).tune(**numbers)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and "cret" not in said
    assert said.startswith("error: Tuner: ") and message in said
    assert not (tmp_path / "runs").exists()


def scores_one(*_: Any) -> Generator[None, None, float]:
    yield
    return 1.0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"direction": "minimize"}, "has direction maximize, this call minimize"),
        ({"target_scores": {"A-v0": [0, 2]}}, "has target_scores {'A-v0': [0.0, 1.0]}, this call"),
        ({"metric": "eval/mean_return"}, "has metric charts/episodic_return, this call eval/"),
    ],
)
def test_a_study_with_other_scores_is_not_continued(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(Tuner, "objective", scores_one)
    monkeypatch.setattr(Tuner, "conclude", lambda *numbers: None)
    settings: dict[str, Any] = {"target_scores": {"A-v0": [0, 1]}}
    make_tuner(dict, **settings).tune(num_trials=1, num_seeds=1)
    make_tuner(dict, **settings).tune(num_trials=2, num_seeds=1)
    with pytest.raises(SystemExit) as stop:
        make_tuner(dict, **settings | changes).tune(num_trials=3, num_seeds=1)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and message in said


def steps_of_16_or_32(trial: Any) -> dict[str, Any]:
    steps = trial.suggest_categorical("num-steps", [16, 32])
    return {
        "num-steps": steps,
        "gamma": trial.suggest_float("gamma", 0.9, 1),
        "total-timesteps": 64,
    }


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda trial: {"num-steps": trial.suggest_categorical("num-steps", [16, 64])},
            "has num-steps one of 16, 32, this call one of 16, 64: use another study_name",
        ),
        (
            lambda trial: {"gamma": trial.suggest_float("gamma", 0.9, 1, log=True)},
            "has gamma a float from 0.9 to 1.0, this call a float from 0.9 to 1.0, log=True: use",
        ),
        (lambda trial: {"total_timesteps": 128}, "has total-timesteps 64, this call 128: use"),
        (lambda trial: {}, "has total-timesteps 64, this call unset: use another study_name"),
    ],
)
def test_a_study_with_other_parameters_is_not_continued(
    change: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(Tuner, "one_run", scores_one)
    make_tuner(steps_of_16_or_32).tune(num_trials=1, num_seeds=1, fresh_seeds=0)
    make_tuner(
        lambda trial: {"gamma": trial.suggest_float("gamma", 0, 1), "total-timesteps": 64}
    ).tune(num_trials=2, num_seeds=1, fresh_seeds=0)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        make_tuner(change).tune(num_trials=3, num_seeds=1)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and message in said


def test_a_study_of_runs_of_different_lengths_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length is a parameter, or follows from one."""
    monkeypatch.setattr(Tuner, "one_run", scores_one)

    def lengths(trial: Any) -> dict[str, Any]:
        thousands = trial.suggest_int("thousands", 1, 1000)
        return {"total_timesteps": 1000 * thousands}

    def named(trial: Any) -> dict[str, Any]:
        return {"total_timesteps": trial.suggest_int("total_timesteps", 1, 10**9)}

    for params_fn in (lengths, named):
        for trials in (2, 4):
            tuner = make_tuner(params_fn, study_name=params_fn.__name__)
            tuner.tune(num_trials=trials, num_seeds=1, fresh_seeds=0)
        assert len(tuner.study.trials) == 4


def test_a_continued_study_tries_new_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler with a seed would begin with the same settings in every call."""
    monkeypatch.setattr(Tuner, "one_run", scores_one)
    for trials in (2, 4):
        tuner = make_tuner(
            lambda trial: {"gamma": trial.suggest_float("gamma", 0.9, 0.99)},
            sampler=optuna.samplers.TPESampler(seed=1),
        )
        tuner.tune(num_trials=trials, num_seeds=1, fresh_seeds=0)
    assert len({trial.params["gamma"] for trial in tuner.study.trials}) == 4


def test_a_script_that_was_edited_during_a_study_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(Tuner, "one_run", scores_one)
    script = tmp_path / "x.py"
    for text, said in (("a = 1", False), ("a = 1  # one", False), ("a = 2", True), ("a = 2", True)):
        script.write_text(text)
        make_tuner(lambda trial: {}, script=str(script)).tune(
            num_trials=1, num_seeds=1, fresh_seeds=0
        )
        note = "x.py, or what it imports, has changed during study test: its trials may not be"
        assert (note in capsys.readouterr().out) == said


def test_ctrl_c_is_one_line_and_the_trial_is_queued_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupted(*_: Any) -> Generator[None, None, float]:
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr(Tuner, "one_run", interrupted)
    tuner = make_tuner(steps_of_16_or_32)
    with pytest.raises(SystemExit) as stop:
        tuner.tune(num_trials=1, num_seeds=1)
    assert stop.value.code == 130
    hint = "the same call with study_name='test' continues the study"
    assert capsys.readouterr().err == f"\ninterrupted; {hint}\n"
    assert [trial.state.name for trial in tuner.study.trials] == ["FAIL", "WAITING"]


def test_the_tuner_is_no_command(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "cleanrl_utils.tuner", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.startswith("error: the tuner is used in Python")


def test_settings_that_the_tuner_sets_itself_are_refused(capsys: pytest.CaptureFixture) -> None:
    for name in ("seed", "env-id", "runs_dir"):
        with pytest.raises(SystemExit) as stop:
            make_tuner(lambda trial, name=name: {name: 1}).tune(num_trials=1, num_seeds=1)
        assert stop.value.code == 2
        assert f"error: Tuner: params_fn sets {name}, " in capsys.readouterr().err


def test_numbers_of_numpy_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuner, "one_run", scores_one)
    params = {"num-envs": np.int64(4), "learning-rate": np.float32(0.5)}
    study = make_tuner(lambda trial: params).tune(1, 1, 0)
    assert study.trials[0].user_attrs["params"] == {"num-envs": 4, "learning-rate": 0.5}


def test_the_password_of_a_storage_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner_module, "open_study", lambda *args, **settings: None)
    tuner = make_tuner(dict, storage="postgresql+psycopg://me:secret@host/optuna")
    assert "secret" not in tuner.storage and "host/optuna" in tuner.storage
