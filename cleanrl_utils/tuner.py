"""Find one set of hyperparameters that does well on several tasks, with Optuna.

    import optuna
    from cleanrl_utils.tuner import Tuner

    tuner = Tuner(
        script="cleanrl/ppo.py",
        metric="charts/episodic_return",
        metric_last_n_average_window=50,
        direction="maximize",
        aggregation_type="average",
        target_scores={"CartPole-v1": [0, 500], "Acrobot-v1": [-500, 0]},
        params_fn=lambda trial: {
            "learning-rate": trial.suggest_float("learning-rate", 3e-4, 3e-3, log=True),
            "total-timesteps": 100_000,
        },
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5),
        sampler=optuna.samplers.TPESampler(),
        study_name="ppo",
    )
    tuner.tune(num_trials=100, num_seeds=3)

A trial is a run per seed and task, one after the other; `workers` trials run side by side. While a
run trains, its metrics are read, and it is ended as soon as the pruner says that its trial will not
win. The same call with the same `study_name` goes on with that study, also from other machines that
share `storage` (any database URL of Optuna's, e.g. postgresql+psycopg://user@host/optuna).
"""

import html
import json
import math
import os
import shlex
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from cleanrl_utils.errors import BadInput, missing_package, require
from cleanrl_utils.launching import jobs
from cleanrl_utils.launching.jobs import Metrics, Process
from cleanrl_utils.running.settings import flag

try:
    import optuna
    from optuna.trial import FrozenTrial, Trial, TrialState
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import (
        ArgumentError,
        IntegrityError,
        NoSuchModuleError,
        OperationalError,
        ProgrammingError,
    )
except ImportError:
    raise missing_package("optuna", "optuna") from None

AGGREGATIONS: dict[str, Callable] = {
    "average": statistics.fmean,
    "median": statistics.median,
    "max": max,
    "min": min,
}
POLL = 0.1  # seconds between two looks at the runs
GIVE_UP = 3  # when so many trials fail and none does not, the call itself must be wrong


class RunFailed(Exception):
    """A child did not do what its trial asked for; the trial has no score."""


class AnyTrial:
    """Optuna's trial, and the names that suggestions had in its earlier versions."""

    def __init__(self, trial: Trial):
        self._trial = trial

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trial, name)

    def suggest_uniform(self, name: str, low: float, high: float) -> float:
        return self._trial.suggest_float(name, low, high)

    def suggest_loguniform(self, name: str, low: float, high: float) -> float:
        return self._trial.suggest_float(name, low, high, log=True)

    def suggest_discrete_uniform(self, name: str, low: float, high: float, q: float) -> float:
        return self._trial.suggest_float(name, low, high, step=q)


class Tuner:
    """See the module's docstring.

    `target_scores` gives for each task the scores that count as 0 and 1, or None if there is one
    task only. A run's score is the mean of the last `metric_last_n_average_window` values of
    `metric`; a trial's score joins its tasks by `aggregation_type` and is the mean over seeds.
    A run reports `reports` times to the pruner. `wandb_kwargs` (project, entity) tracks every run.
    """

    def __init__(
        self,
        script: str,
        metric: str,
        target_scores: Mapping[str, list[float] | tuple[float, float] | None],
        params_fn: Callable[[Any], Mapping[str, Any]],
        direction: Literal["maximize", "minimize"] = "maximize",
        aggregation_type: str = "average",
        metric_last_n_average_window: int = 50,
        sampler: Any = None,
        pruner: Any = None,
        storage: str = "sqlite:///cleanrl_hpopt.db",
        study_name: str = "",
        wandb_kwargs: Mapping[str, Any] | None = None,
        workers: int = 1,
        reports: int = 10,
        runs_dir: str = "runs",
    ):
        require(Path(script).is_file(), f"Tuner: there is no script {script}")
        choices = ", ".join(AGGREGATIONS)
        require(aggregation_type in AGGREGATIONS, f"Tuner: aggregation_type is one of {choices}")
        known = direction in ("maximize", "minimize")
        require(known, f"Tuner: direction is maximize or minimize, not {direction}")
        at_least_one("workers", workers)
        at_least_one("metric_last_n_average_window", metric_last_n_average_window)
        require(len(target_scores) > 0, "Tuner: target_scores names no task")
        for env_id, target in target_scores.items():
            require(
                target is None or is_range(target),
                f"Tuner: target_scores of {env_id} are two different numbers, not {target}",
            )
        plain = any(target is None for target in target_scores.values())
        require(
            not plain or len(target_scores) == 1,
            "Tuner: several tasks need target_scores like [low, high], to be comparable",
        )
        self.script, self.metric, self.target_scores = script, metric, dict(target_scores)
        self.params_fn, self.aggregate = params_fn, AGGREGATIONS[aggregation_type]
        self.window, self.reports, self.workers = metric_last_n_average_window, reports, workers
        self.study_name = study_name or f"tuner_{int(time.time())}"
        self.folder = Path(runs_dir) / self.study_name
        self.wandb_kwargs = dict(wandb_kwargs or {})
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # we say it in fewer lines
        self.study = open_study(
            storage,
            study_name=self.study_name,
            direction=direction,
            sampler=sampler,
            pruner=pruner or optuna.pruners.NopPruner(),
        )
        self.storage = make_url(storage).render_as_string(hide_password=True)

    # -- the study --------------------------------------------------------------------------

    def tune(self, num_trials: int, num_seeds: int) -> optuna.Study:
        """Bring the study to `num_trials` trials; returns it."""
        at_least_one("num_trials", num_trials)
        at_least_one("num_seeds", num_seeds)
        self.bury_dead_trials()
        done = len(self.counted())
        old = f", {done} of its {num_trials} trials are there already" if done else ""
        print(f"study {self.study_name} in {self.storage}{old}", flush=True)
        left, failures = num_trials - done, list[str]()
        active: list[tuple[Trial, Generator[None, None, float]]] = []
        try:
            while left > 0 or active:
                while left > 0 and len(active) < self.workers:
                    if len(self.counted(TrialState.RUNNING)) >= num_trials:
                        left = 0  # other machines do the rest
                        break
                    trial = self.study.ask()
                    trial.set_user_attr("process", [socket.gethostname(), os.getpid()])
                    active.append((trial, self.objective(trial, num_seeds)))
                    left -= 1
                for trial, steps in list(active):
                    outcome = self.advance(trial, steps)
                    if outcome is None:
                        continue
                    active.remove((trial, steps))
                    self.say(outcome)
                    if outcome.state == TrialState.FAIL:
                        failures.append(outcome.user_attrs["error"])
                if len(failures) >= GIVE_UP and not self.counted():
                    break
                time.sleep(POLL)
        finally:
            for trial, steps in active:  # interrupted: the next call begins with them
                steps.close()
                self.again(trial)
        if failures and not self.counted():
            raise SystemExit(f"error: every trial failed; the first: {failures[0]}")
        self.conclude(num_seeds)
        return self.study

    def counted(self, *more: TrialState) -> list[FrozenTrial]:
        """Trials that count towards num_trials: those that failed do not."""
        states = (TrialState.COMPLETE, TrialState.PRUNED, *more)
        return self.study.get_trials(deepcopy=False, states=states)

    def bury_dead_trials(self) -> None:
        """A tuner that was killed here left trials that still count as running."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            host, process = trial.user_attrs.get("process", ["", 0])
            if host == socket.gethostname() and not is_alive(process):
                self.again(trial)

    def again(self, trial: Trial | FrozenTrial) -> None:
        """Give up a trial that was interrupted, and queue its settings for a new one."""
        self.study.tell(trial.number, state=TrialState.FAIL)
        self.study.enqueue_trial(trial.params)

    def advance(self, trial: Trial, steps: Generator[None, None, float]) -> FrozenTrial | None:
        """Look at a trial once; if it has ended, say so to Optuna and return it."""
        try:
            next(steps)
            return None
        except StopIteration as end:
            return self.study.tell(trial, end.value)
        except optuna.TrialPruned:
            return self.study.tell(trial, state=TrialState.PRUNED)
        except RunFailed as error:
            trial.set_user_attr("error", str(error))
            return self.study.tell(trial, state=TrialState.FAIL)

    def say(self, trial: FrozenTrial) -> None:
        how = f"{trial.value:.4g}" if trial.state == TrialState.COMPLETE else ""
        if trial.state == TrialState.PRUNED:
            last = max(trial.intermediate_values.items())[1]
            how = f"pruned at {last:.4g} after {trial.user_attrs['steps']:,} steps"
        if trial.state == TrialState.FAIL:
            how = f"FAILED: {trial.user_attrs['error']}"
        best = self.best()
        if best is not None and best.number != trial.number:
            how += f"; best is {best.value:.4g} of trial {best.number}"
        print(f"trial {trial.number}: {how}", flush=True)

    def best(self) -> FrozenTrial | None:
        try:
            return self.study.best_trial
        except ValueError:
            return None

    # -- one trial --------------------------------------------------------------------------

    def objective(self, trial: Trial, num_seeds: int) -> Generator[None, None, float]:
        """Run by run to the trial's score; yields while a run trains."""
        params = dict(self.params_fn(AnyTrial(trial)))
        trial.set_user_attr("params", params)
        trial.set_user_attr("steps", 0)
        scores: list[list[float]] = []
        for seed in range(num_seeds):
            scores.append([])
            for env_id in self.target_scores:
                score = yield from self.one_run(trial, params, env_id, seed, scores)
                scores[-1].append(score)
        score = self.join(scores)
        if math.isnan(score):
            where = self.folder / f"trial_{trial.number:04}"
            raise RunFailed(f"its score is not a number; see {where}")
        return score

    def join(self, scores: list[list[float]]) -> float:
        return statistics.fmean(self.aggregate(tasks) for tasks in scores if tasks)

    def one_run(
        self,
        trial: Trial,
        params: dict[str, Any],
        env_id: str,
        seed: int,
        earlier: list[list[float]],
    ) -> Generator[None, None, float]:
        """Train once, reporting to the pruner on the way; returns the normalised score."""
        where = self.folder / f"trial_{trial.number:04}"
        where.mkdir(parents=True, exist_ok=True)
        place = (where / f"{env_id.split(':')[-1].replace('/', '-')}__{seed}.folder").resolve()
        place.unlink(missing_ok=True)  # of an earlier study of this name
        words = [sys.executable, self.script, *as_flags(params), "--env-id", env_id]
        words += ["--seed", str(seed), "--runs-dir", str(where)]
        env = jobs.environment() | {"CLEANRL_FOLDER_FILE": str(place)}
        if self.wandb_kwargs:
            words.append("--track")
            words += ["--wandb-project-name", self.wandb_kwargs.get("project", "cleanRL")]
            if entity := self.wandb_kwargs.get("entity"):
                words += ["--wandb-entity", entity]
            env["WANDB_RUN_GROUP"] = self.study_name
        log = place.with_suffix(".txt")
        process = Process(words, env, log)
        before, first = trial.user_attrs["steps"], sum(map(len, earlier)) * self.reports
        metrics, values, reported, last_step = None, list[tuple[int, float]](), 0, 0
        try:
            while True:
                ended = process.poll() is not None  # looked at first: then all it wrote is read
                if metrics is None and place.exists() and place.read_text():
                    folder = place.parent / place.read_text()
                    check_settings(params | {"seed": seed, "env-id": env_id}, folder)
                    metrics = Metrics(folder)
                for step, _, tag, value in metrics.new() if metrics else ():
                    last_step = step if not tag.startswith("eval/") else last_step
                    if tag == self.metric:
                        values.append((step, value))
                total = metrics.total if metrics else 0
                while total and (reported + 1) * total <= last_step * self.reports:
                    reported += 1
                    so_far = [v for step, v in values if step * self.reports <= reported * total]
                    if not so_far:
                        continue
                    now = [*earlier[:-1], [*earlier[-1], self.score(so_far, env_id)]]
                    trial.report(self.join(now), first + reported)
                    if trial.should_prune():
                        raise optuna.TrialPruned
                if ended:
                    break
                yield
        finally:
            jobs.stop([process])
            trial.set_user_attr("steps", before + last_step)
        status = process.poll()
        if status != 0:
            how = f"ended with status {status}: {last_line(log)}"
            raise RunFailed(f"{env_id}, seed {seed}, {how}; see {log}")
        if not values:
            raise RunFailed(f"{env_id}, seed {seed}, logged no {self.metric}; see {log}")
        return self.score([value for _, value in values], env_id)

    def score(self, values: list[float], env_id: str) -> float:
        """The mean of the last values, as a fraction of the way between the target scores."""
        mean = statistics.fmean(values[-self.window :])
        target = self.target_scores[env_id]
        return mean if target is None else (mean - target[0]) / (target[1] - target[0])

    # -- the end ----------------------------------------------------------------------------

    def conclude(self, num_seeds: int) -> None:
        """The best settings as a command, and a page with Optuna's plots."""
        best = self.best()
        if best is None:
            print("no trial came to its end: there is no best one")
            return
        command = self.command(best.user_attrs["params"], num_seeds)
        print(f"best: {best.value:.4g}, trial {best.number}. To run it:\n  {command}")
        page = self.folder / "report.html"
        page.write_text(self.page(best, command))
        print(f"plots: {page}", flush=True)

    def command(self, params: Mapping[str, Any], num_seeds: int) -> str:
        words = ["python", self.script, *as_flags(params)]
        if len(self.target_scores) == 1:
            return shlex.join([*words, "--env-id", *self.target_scores])
        tool = ["python", "-m", "cleanrl_utils.benchmark", "--env-ids", *self.target_scores]
        tool += ["--command", shlex.join(words), "--num-seeds", str(num_seeds), "--workers", "1"]
        return shlex.join(tool)

    def page(self, best: FrozenTrial, command: str) -> str:
        """One self-contained page: plotly's code once, then the figures."""
        counts = {state: 0 for state in TrialState}
        for trial in self.study.get_trials(deepcopy=False):
            counts[trial.state] += 1
        facts = ", ".join(f"{n} {state.name.lower()}" for state, n in counts.items() if n)
        title = html.escape(f"Study {self.study_name}")
        parts = [f"<!doctype html><meta charset='utf-8'><title>{title}</title>"]
        parts += ["<style>body{font:16px sans-serif;margin:2em}pre{white-space:pre-wrap}</style>"]
        parts += [f"<h1>{title}</h1><p>{facts}. Best: {best.value:.6g}, trial {best.number}.</p>"]
        parts += [f"<pre>{html.escape(command)}</pre>"]
        for number, figure in enumerate(figures(self.study)):
            # The first figure brings plotly along; a page must not need the network.
            parts.append(figure.to_html(full_html=False, include_plotlyjs=number == 0))
        return "\n".join(parts)


def at_least_one(name: str, number: int) -> None:
    require(number >= 1, f"Tuner: {name} must be at least 1, got {number}")


def is_range(target: Any) -> bool:
    """Whether these are two different numbers."""
    if not isinstance(target, list | tuple) or len(target) != 2:
        return False
    numbers = all(isinstance(end, Real) and math.isfinite(end) for end in target)
    return numbers and target[0] != target[1]


def open_study(storage: str, **settings: Any) -> optuna.Study:
    """The study, new or old; of several machines that begin at once, one makes the tables."""
    try:
        make_url(storage)
    except (ArgumentError, ValueError):  # which may show a part of the password
        raise BadInput(
            "Tuner: storage is not a database URL like sqlite:///cleanrl_hpopt.db"
        ) from None
    for last in (False, False, False, True):
        try:
            return optuna.create_study(storage=storage, load_if_exists=True, **settings)
        except (IntegrityError, ProgrammingError, OperationalError) as error:
            if last:
                reason = str(error.orig).strip().splitlines()[0]
                raise BadInput(f"Tuner: the storage cannot be used: {reason}") from None
            time.sleep(1)
        except (NoSuchModuleError, ImportError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise BadInput(f"Tuner: the storage cannot be used: {reason}") from None
    raise AssertionError


def figures(study: optuna.Study) -> list[Any]:
    """What Optuna can draw of this study: plots that need more trials than it has are left out."""
    from optuna import importance, visualization

    def importances(study: optuna.Study) -> Any:
        evaluator = importance.PedAnovaImportanceEvaluator()  # needs no further package
        return visualization.plot_param_importances(study, evaluator=evaluator)

    drawn = []
    plots = [visualization.plot_optimization_history, visualization.plot_intermediate_values]
    plots += [importances, visualization.plot_slice, visualization.plot_parallel_coordinate]
    for plot in [*plots, visualization.plot_timeline]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                drawn.append(plot(study))
        except (ValueError, RuntimeError):
            continue
    return drawn


def as_flags(params: Mapping[str, Any]) -> list[str]:
    """Settings as words of a command line: {"learning-rate": 0.1} as --learning-rate=0.1."""
    words = []
    for name, value in params.items():
        if isinstance(value, list | tuple):
            words += [flag(name), *map(str, value)]
        else:
            words.append(f"{flag(name)}={value}")
    return words


def check_settings(params: Mapping[str, Any], folder: Path) -> None:
    """Every value that was sampled must be the one the run says it uses."""
    recorded = json.loads((folder / "run.json").read_text())["args"]
    for name, value in params.items():
        found = recorded.get(name.replace("-", "_"), "nothing")
        same = list(found) == list(value) if isinstance(value, list | tuple) else found == value
        if not same:
            path = folder / "run.json"
            raise RunFailed(f"{flag(name)} was to be {value!r}, is {found!r}; see {path}")


def last_line(log: Path) -> str:
    return jobs.tail(log, 1).strip()


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
