"""Tune hyperparameters for one or several tasks with Optuna.

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

A trial is one run per seed and task, one after the other; `workers` trials run in parallel. The
tuner reads the metrics of a run while it trains, and stops the trial as soon as the pruner says so.
At the end the best settings run again on fresh seeds, because the score of the best of many trials
is biased upwards. The same call with the same `study_name` continues the study, also on other
machines with the same `storage` (any database URL that Optuna supports, e.g.
postgresql+psycopg://user@host/optuna). Trials are in RUNS_DIR/.tuner/STUDY_NAME, which other tools
skip.
"""

import math
import os
import shlex
import socket
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cleanrl_utils.analysis.grouping import count
from cleanrl_utils.analysis.stats import mean_and_std
from cleanrl_utils.analysis.study import (
    AGGREGATIONS,
    AnyTrial,
    at_least_one,
    check_same_study,
    check_target_scores,
    open_study,
    requeue,
    study_page,
    without_password,
)
from cleanrl_utils.errors import BadInput, interruptible, missing_package, require
from cleanrl_utils.launching.training import (
    RunFailed,
    Training,
    as_flags,
    check_settings,
    is_alive,
)

try:
    import optuna
    from optuna.trial import FrozenTrial, Trial, TrialState
except ImportError:
    raise missing_package("optuna", "optuna") from None

__all__ = ["RunFailed", "Tuner", "as_flags", "check_settings"]

POLL = 0.1  # seconds between two readings of the runs' metrics
GIVE_UP = 3  # stop if the first trials all fail: the call itself must be wrong
HIDDEN = ".tuner"  # folder of all studies, in the folder of runs
OWN = {"seed", "env_id", "runs_dir", "resume"}  # settings that the tuner itself gives every run
FRESH = "fresh_seeds"  # key of the scores on fresh seeds in the study

ActiveTrial = tuple[Trial, Generator[None, None, float]]  # with its objective, see there


class Tuner:
    """See the module's docstring.

    `target_scores` gives for each task the scores that are normalised to 0 and 1, or None for a
    single task. A run's score is the mean of the last `metric_last_n_average_window` values of
    `metric`; a trial's score aggregates its tasks by `aggregation_type` and is the mean over seeds.
    A run reports `reports` times to the pruner. `wandb_kwargs` (project, entity) tracks every run.
    Trials have no checkpoints unless `params_fn` sets them: an interrupted trial is run again.
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
        require(Path(script).is_file(), f"Tuner: script {script}: no such file")
        choices = ", ".join(AGGREGATIONS)
        known = aggregation_type in AGGREGATIONS
        require(known, f"Tuner: aggregation_type must be one of {choices}")
        known = direction in ("maximize", "minimize")
        require(known, f"Tuner: direction must be maximize or minimize, not {direction}")
        at_least_one("workers", workers)
        at_least_one("metric_last_n_average_window", metric_last_n_average_window)
        check_target_scores(target_scores)

        self.script = script
        self.scored = {
            "script": Path(script).name,
            "metric": metric,
            "direction": direction,
            "aggregation_type": aggregation_type,
            "metric_last_n_average_window": metric_last_n_average_window,
            "target_scores": {
                env_id: None if target is None else [float(end) for end in target]
                for env_id, target in target_scores.items()
            },
        }
        self.metric = metric
        self.target_scores = dict(target_scores)
        self.params_fn = params_fn
        self.aggregate = AGGREGATIONS[aggregation_type]
        self.window = metric_last_n_average_window
        self.reports = reports
        self.workers = workers
        self.study_name = study_name or f"tuner_{int(time.time())}"
        self.folder = Path(runs_dir) / HIDDEN / self.study_name
        self.wandb_kwargs = dict(wandb_kwargs or {})

        optuna.logging.set_verbosity(optuna.logging.WARNING)  # we print one line per trial
        self.study = open_study(
            storage,
            study_name=self.study_name,
            direction=direction,
            sampler=sampler,
            pruner=pruner or optuna.pruners.NopPruner(),
        )
        self.storage = without_password(storage)

    # -- the study --------------------------------------------------------------------------

    def tune(self, num_trials: int, num_seeds: int, fresh_seeds: int = 3) -> optuna.Study:
        """Run trials until the study has `num_trials`, then test the best settings.

        They run on `fresh_seeds` seeds that no trial used (0: no test). Returns the study.
        """
        at_least_one("num_trials", num_trials)
        at_least_one("num_seeds", num_seeds)
        require(fresh_seeds >= 0, f"Tuner: fresh_seeds must not be negative, got {fresh_seeds}")
        hint = f"the same call with study_name={self.study_name!r} continues the study"
        with interruptible(hint):
            check_same_study(self.study, self.scored, self.params_fn, self.script)
            self.run_trials(num_trials, num_seeds)
            self.conclude(num_seeds, fresh_seeds)
        return self.study

    def run_trials(self, num_trials: int, num_seeds: int) -> None:
        """Run trials until the study has `num_trials`, those of earlier calls included."""
        self.requeue_dead_trials()
        done = len(self.counted())
        old = f", {done} of its {num_trials} trials are already done" if done else ""
        print(f"study {self.study_name} in {self.storage}{old}", flush=True)
        left = num_trials - done
        failures: list[str] = []
        active: list[ActiveTrial] = []
        try:
            while left > 0 or active:
                while left > 0 and len(active) < self.workers:
                    if len(self.counted(TrialState.RUNNING)) >= num_trials:
                        left = 0  # other machines run the rest
                        break
                    trial = self.study.ask()
                    trial.set_user_attr("process", [socket.gethostname(), os.getpid()])
                    active.append((trial, self.objective(trial, num_seeds)))
                    left -= 1
                for ended in self.collect(active):
                    if ended.state == TrialState.FAIL:
                        failures.append(ended.user_attrs["error"])
                if len(failures) >= GIVE_UP and not self.counted():
                    break
                time.sleep(POLL)
        finally:
            for trial, steps in active:  # interrupted: the next call starts with them
                steps.close()
                requeue(self.study, trial)
        if failures and not self.counted():
            raise SystemExit(f"error: every trial failed; the first: {failures[0]}")

    def counted(self, *more: TrialState) -> list[FrozenTrial]:
        """The trials that count towards num_trials: not those that failed."""
        states = (TrialState.COMPLETE, TrialState.PRUNED, *more)
        return self.study.get_trials(deepcopy=False, states=states)

    def requeue_dead_trials(self) -> None:
        """Requeue the trials of a tuner that was killed on this machine: they count as running."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            host, process = trial.user_attrs.get("process", ["", 0])
            if host == socket.gethostname() and not is_alive(process):
                requeue(self.study, trial)

    def collect(self, active: list[ActiveTrial]) -> list[FrozenTrial]:
        """Check every trial once; remove those that have ended from `active` and return them."""
        all_ended = []
        for trial, steps in list(active):
            ended = self.advance(trial, steps)
            if ended is not None:
                active.remove((trial, steps))
                self.say(ended)
                all_ended.append(ended)
        return all_ended

    def advance(self, trial: Trial, steps: Generator[None, None, float]) -> FrozenTrial | None:
        """Check a trial once; if it has ended, report it to Optuna and return it."""
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
        """Print the result of a trial."""
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
        """Run a trial and return its score; yields while a run trains."""
        params = dict(self.params_fn(AnyTrial(trial)))
        for name, value in params.items():
            own = f"Tuner: params_fn sets {name}, which the tuner itself sets for every run"
            require(name.replace("-", "_") not in OWN, own)
            params[name] = value.item() if isinstance(value, np.generic) else value
        trial.set_user_attr("params", params)
        trial.set_user_attr("steps", 0)
        trial.set_user_attr("seeds", num_seeds)
        scores: list[list[float]] = []
        for seed in range(num_seeds):
            scores.append([])
            for env_id in self.target_scores:
                score = yield from self.one_run(trial, params, env_id, seed, scores)
                scores[-1].append(score)
        score = self.trial_score(scores)
        if math.isnan(score):
            raise RunFailed(f"its score is NaN; see {self.folder_of(trial)}")
        return score

    def trial_score(self, scores: list[list[float]]) -> float:
        """Aggregate scores, by seed and task, over tasks; mean over seeds."""
        return statistics.fmean(self.aggregate(tasks) for tasks in scores if tasks)

    def one_run(
        self,
        trial: Trial,
        params: dict[str, Any],
        env_id: str,
        seed: int,
        earlier: list[list[float]],
    ) -> Generator[None, None, float]:
        """Train once and report to the pruner meanwhile; returns the normalised score."""
        training = self.start(params, env_id, seed, self.folder_of(trial))
        steps_before = trial.user_attrs["steps"]
        reports_before = sum(map(len, earlier)) * self.reports
        reported = 0
        try:
            while True:
                trains = training.look()
                total = training.total
                while total and (reported + 1) * total <= training.last_step * self.reports:
                    reported += 1
                    values = training.values_until(reported * total / self.reports)
                    if not values:
                        continue
                    now = [*earlier[:-1], [*earlier[-1], self.score(values, env_id)]]
                    trial.report(self.trial_score(now), reports_before + reported)
                    if trial.should_prune():
                        raise optuna.TrialPruned
                if not trains:
                    break
                yield
        finally:
            training.stop()
            trial.set_user_attr("steps", steps_before + training.last_step)
        return self.score(training.result(), env_id)

    def folder_of(self, trial: Trial | FrozenTrial) -> Path:
        return self.folder / f"trial_{trial.number:04}"

    def start(self, params: dict[str, Any], env_id: str, seed: int, where: Path) -> Training:
        """Start a run; on W&B, its group is the study."""
        if "checkpoints" not in params:
            params = {**params, "checkpoints": 0}
        words: list[str] = []
        env: dict[str, str] = {}
        if self.wandb_kwargs:
            project = self.wandb_kwargs.get("project", "cleanRL")
            words += ["--track", "--wandb-project-name", project]
            if self.wandb_kwargs.get("entity"):
                words += ["--wandb-entity", self.wandb_kwargs["entity"]]
            env["WANDB_RUN_GROUP"] = self.study_name
        return Training(self.script, params, env_id, seed, where, self.metric, words, env)

    def score(self, values: list[float], env_id: str) -> float:
        """The mean of the last values, normalised by the target scores."""
        mean = statistics.fmean(values[-self.window :])
        target = self.target_scores[env_id]
        return mean if target is None else (mean - target[0]) / (target[1] - target[0])

    # -- the end ----------------------------------------------------------------------------

    def conclude(self, num_seeds: int, fresh_seeds: int) -> None:
        """Test the best settings on fresh seeds, print their command, and write a page of plots."""
        best = self.best()
        if best is None:
            print("no trial has finished: there are no best settings")
            return
        trials = len(self.counted())
        tuned = f"best: trial {best.number}, {best.value:.4g} on the seeds used for tuning"
        tuned += f" (biased upwards: the best of {trials} trials)" if trials > 1 else ""
        print(tuned, flush=True)
        facts = [tuned, *self.run_fresh(best, num_seeds, fresh_seeds)]
        command = self.command(best.user_attrs["params"], num_seeds)
        print(f"To run it:\n  {command}")
        page = self.folder / "report.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(study_page(self.study, facts, command))
        print(f"plots: {page}", flush=True)

    def run_fresh(self, best: FrozenTrial, num_seeds: int, fresh_seeds: int) -> list[str]:
        """Run the best settings on seeds that no trial used; returns the results as lines."""
        if fresh_seeds == 0:
            return ["Not run on fresh seeds."]
        first = self.first_fresh(num_seeds)
        seeds = range(first, first + fresh_seeds)
        scores = self.fresh_scores(best)
        missing = []
        for seed in seeds:
            if seed not in scores:
                missing += [(seed, env_id) for env_id in self.target_scores]
        failures = self.finish_fresh(best, scores, missing)
        known = [self.aggregate(list(scores[seed].values())) for seed in seeds if seed in scores]
        names = ", ".join(map(str, seeds))
        found = [f"FAILED on a fresh seed: {failure}" for failure in failures]
        if known:
            over = f"{count(len(known), 'fresh seed')} ({names})"
            if len(known) < fresh_seeds:
                over = f"{len(known)} of the fresh seeds {names}"
            found.append(f"{mean_and_std(known, 3)} over {over}: the number to report")
        for line in found:
            print(line, flush=True)
        return found

    def first_fresh(self, num_seeds: int) -> int:
        """The first seed that no trial used."""
        used = [trial.user_attrs.get("seeds", 0) for trial in self.study.get_trials(deepcopy=False)]
        return max([num_seeds, *used])

    def fresh_scores(self, best: FrozenTrial) -> dict[int, dict[str, float]]:
        """The stored scores of the best trial on fresh seeds, by seed and task."""
        stored = self.study.user_attrs.get(FRESH, {})
        if stored.get("trial") != best.number:
            return {}
        return {int(seed): tasks for seed, tasks in stored["scores"].items()}

    def finish_fresh(
        self,
        best: FrozenTrial,
        scores: dict[int, dict[str, float]],
        missing: list[tuple[int, str]],
    ) -> list[str]:
        """Do the missing runs, `workers` at a time; adds to `scores`, returns failures."""
        params = best.user_attrs["params"]
        where = self.folder / f"{self.folder_of(best).name}_fresh"
        waiting = list(missing)
        partial: dict[int, dict[str, float]] = {}  # by seed and task, of seeds not yet complete
        failures: list[str] = []
        active: list[tuple[int, str, Training]] = []
        try:
            while waiting or active:
                while waiting and len(active) < self.workers:
                    seed, env_id = waiting.pop(0)
                    active.append((seed, env_id, self.start(params, env_id, seed, where)))
                for run in list(active):
                    seed, env_id, training = run
                    tasks = partial.setdefault(seed, {})
                    try:
                        if training.look():
                            continue
                        tasks[env_id] = self.score(training.result(), env_id)
                    except RunFailed as error:
                        training.stop()
                        failures.append(str(error))
                    active.remove(run)
                    if len(tasks) == len(self.target_scores):
                        scores[seed] = tasks
                        stored = {"trial": best.number, "scores": scores}
                        self.study.set_user_attr(FRESH, stored)
                time.sleep(POLL)
        finally:
            for *_, training in active:  # interrupted
                training.stop()
        return failures

    def command(self, params: Mapping[str, Any], num_seeds: int) -> str:
        """The command that trains with these settings, on seeds that no trial used."""
        words = ["python", self.script, *as_flags(params)]
        first = str(self.first_fresh(num_seeds))
        if len(self.target_scores) == 1:
            return shlex.join([*words, "--env-id", *self.target_scores, "--seed", first])
        tool = ["python", "-m", "cleanrl_utils.benchmark", "--env-ids", *self.target_scores]
        tool += ["--command", shlex.join(words), "--start-seed", first]
        return shlex.join([*tool, "--num-seeds", str(num_seeds), "--workers", "1"])


if __name__ == "__main__":
    raise BadInput("the tuner is used in Python: see docs/advanced/hyperparameter-tuning.md")
