"""A fixed regression suite: train a few small tasks and compare them with committed runs.

    make bench-regression                              # some minutes on two cores
    python -m cleanrl_utils.regression                 # the same; exit status 1 on a regression
    python -m cleanrl_utils.regression --check         # how well the test works, from the baseline
    python -m cleanrl_utils.regression --update        # new baseline: benchmark/regression

The score of a run is the mean of its learning curve over steps (area under the curve), relative to
the baseline's mean and to the task's worst return. A task, or all tasks together, has regressed if
the statistics of rlops say so and the loss is more than 5%.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from cleanrl_utils.analysis import committed, grouping, stats, tables
from cleanrl_utils.errors import Stopped, require
from cleanrl_utils.running.settings import parse_command

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "benchmark" / "regression"
SMALLEST = 0.05  # relative loss: a smaller one is no regression
RESAMPLES = 10_000
TRIALS = 10  # of --check


@dataclass(frozen=True)
class Task:
    """A script on an environment, with some seeds; `worst` is a return that learning leaves."""

    script: str
    env_id: str
    seeds: int
    flags: str
    worst: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.script} on {self.env_id}"

    @property
    def exp_name(self) -> str:
        return f"regression_{self.script}"


TASKS = [
    Task("ppo_jax", "CartPole-v1", 32, "--total-timesteps 300000"),
    Task("ppo", "CartPole-v1", 20, "--total-timesteps 100000"),
]
Scores = dict[str, np.ndarray]  # by name of the task


@dataclass
class RegressionArgs:
    check: bool = False
    """train nothing: test the test, with a planted loss and without one, on the baseline's runs"""
    update: bool = False
    """store the new runs as the baseline, in benchmark/regression"""
    seed: int = 1
    """first seed; 1 repeats the runs of the baseline exactly, with the same code and machine"""
    workers: int = 2
    """number of processes at the same time"""
    runs_dir: str = "runs/.regression"
    """folder of the new runs; emptied first"""


# -- training ----------------------------------------------------------------------------------


def commands(task: Task, seed: int, runs_dir: str) -> list[list[str]]:
    """The commands of a task: one per seed, or one for all seeds of a JAX program."""
    script = ROOT / "cleanrl" / f"{task.script}.py"
    words = [sys.executable, str(script), "--env-id", task.env_id, *task.flags.split()]
    words += ["--exp-name", task.exp_name, "--runs-dir", runs_dir, "--no-cuda"]
    words += ["--checkpoints", "0"]
    if task.script == "ppo_jax":
        return [[*words, "--seed", str(seed), "--num-seeds", str(task.seeds)]]
    return [[*words, "--seed", str(seed + i)] for i in range(task.seeds)]


def train(args: RegressionArgs) -> None:
    """Run all commands, `workers` at a time."""
    shutil.rmtree(args.runs_dir, ignore_errors=True)
    jobs = [words for task in TASKS for words in commands(task, args.seed, args.runs_dir)]

    def run(words: list[str]) -> str:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        return "" if done.returncode == 0 else f"{' '.join(words[1:])}: {done.stderr[-300:]}"

    with ThreadPoolExecutor(args.workers) as pool:
        for number, error in enumerate(pool.map(run, jobs), 1):
            if error:
                pool.shutdown(cancel_futures=True)
                raise Stopped(f"a run failed: {error}")
            print(f"{number} of {len(jobs)} commands done", flush=True)


# -- scores ------------------------------------------------------------------------------------


def area(curve: pd.DataFrame) -> float:
    """The mean of a learning curve over steps."""
    return float(curve.episodic_return.mean())


def scores_of_runs(runs_dir: str) -> Scores:
    """The areas of the new runs."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in tables.find_runs(runs_dir):
        settings = run.record["args"]
        key = settings["exp_name"], settings["env_id"]
        found.setdefault(key, []).append(area(tables.curve(run)))
    return {task.name: np.array(found.get((task.exp_name, task.env_id), [])) for task in TASKS}


def scores_of_baseline(folder: Path = BASELINE) -> Scores:
    """The areas of the committed runs."""
    found = {}
    for task in TASKS:
        curves = committed.load(task.exp_name, folder)
        mine = curves[curves.env_id == task.env_id]
        found[task.name] = np.array([area(curve) for _, curve in mine.groupby("run")])
    return found


def note_differences(runs_dir: str, baseline: Path) -> None:
    """Print the settings and versions in which the new runs differ from the baseline."""
    runs = tables.find_runs(runs_dir)
    for task in TASKS:
        new = tables.summary(next(x for x in runs if x.record["args"]["exp_name"] == task.exp_name))
        old = committed.facts(task.exp_name, baseline).iloc[0]
        for kind in ("settings", "versions"):
            for name in grouping.differing([old[kind], new[kind]]):
                before = old[kind].get(name, grouping.ABSENT)
                now = new[kind].get(name, grouping.ABSENT)
                tables.say(f"{task.name}: {name} is {now}, and {before} in the baseline")


def relative(new: Scores, base: Scores) -> list[np.ndarray]:
    """Scores by task: 1 is the baseline's mean, 0 the worst return."""
    worst = {task.name: task.worst for task in TASKS}
    return [(new[n] - worst[n]) / (base[n].mean() - worst[n]) for n in base]


def regressions(
    old: Sequence[np.ndarray], new: Sequence[np.ndarray], names: list[str]
) -> list[str]:
    """The tasks that have regressed, and "all tasks together"."""
    found = []
    for name, a, b in zip(names, old, new, strict=True):
        if stats.regressed([a], [b], SMALLEST, resamples=RESAMPLES):
            found.append(name)
    if stats.regressed(old, new, SMALLEST, resamples=RESAMPLES):
        found.append("all tasks together")
    return found


def report(base: Scores, new: Scores) -> tuple[str, list[str]]:
    """A table of areas under the curve, and what has regressed."""
    old = relative(base, base)
    now = relative(new, base)
    worse = regressions(old, now, list(base))
    lines = ["| area under the curve | baseline | now | change | 95% interval | |", "|-" * 6 + "|"]
    for name, a, b in zip(base, old, now, strict=True):
        change, (low, high) = stats.difference([a], [b], resamples=RESAMPLES)
        cells = [f"{name} ({len(b)} seeds)"]
        cells += [stats.mean_and_std(base[name], 1), stats.mean_and_std(new[name], 1)]
        cells += [f"{change:+.1%}", f"{low:+.1%} to {high:+.1%}"]
        lines.append(tables.markdown_row([*cells, "regression" if name in worse else ""]))
    change, (low, high) = stats.difference(old, now, resamples=RESAMPLES)
    verdict = "regression" if "all tasks together" in worse else ""
    cells = ["all tasks together", "", "", f"{change:+.1%}", f"{low:+.1%} to {high:+.1%}", verdict]
    return "\n".join([*lines, tables.markdown_row(cells)]), worse


# -- the test of the test ----------------------------------------------------------------------


def check(base: Scores, loss: float, trials: int = TRIALS, seed: int = 0) -> tuple[int, int]:
    """(flagged, trials) if `loss` is planted in new runs with the noise of the baseline.

    Both sets of a trial are drawn from the baseline's runs, so they have its spread and its
    outliers, and differ in nothing but the planted loss.
    """
    random = np.random.default_rng(seed)
    pools = relative(base, base)
    flagged = 0
    for _ in range(trials):
        old = [random.choice(pool, len(pool)) for pool in pools]
        new = [random.choice(pool, len(pool)) * (1 - loss) for pool in pools]
        flagged += bool(regressions(old, new, list(base)))
    return flagged, trials


def main(argv: list[str] | None = None) -> int:
    args = parse_command(RegressionArgs, argv)
    require(args.workers >= 1, f"--workers must be at least 1, got {args.workers}")
    known = args.update or any(BASELINE.glob("*.json"))
    require(known, f"benchmark/{BASELINE.name} has no runs: make a baseline with --update")
    if args.check:
        base = scores_of_baseline()
        missed, trials = check(base, loss=0.0)
        found, _ = check(base, loss=0.1)
        print(f"identical code flagged: {missed} of {trials}")
        print(f"planted loss of 10% found: {found} of {trials}")
        return 0 if (missed, found) == (0, trials) else 1
    train(args)
    if args.update:
        shutil.rmtree(BASELINE, ignore_errors=True)
        names = committed.add([args.runs_dir], BASELINE)
        print(f"{len(names)} runs are the new baseline, in benchmark/{BASELINE.name}")
        return 0
    note_differences(args.runs_dir, BASELINE)
    table, worse = report(scores_of_baseline(), scores_of_runs(args.runs_dir))
    print(table)
    for name in worse:
        print(f"regression: {name}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
