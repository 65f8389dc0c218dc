"""Comparison of sets of runs: normalised scores, tables, and regressions."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cleanrl_utils.analysis import stats
from cleanrl_utils.analysis.grouping import ABSENT, count, flag_name
from cleanrl_utils.analysis.sets import RunSet, SetArgs, find_sets
from cleanrl_utils.analysis.sources import OneRun
from cleanrl_utils.analysis.tables import LAST, say
from cleanrl_utils.analysis.tables import markdown_row as row
from cleanrl_utils.errors import require

ENOUGH = 5  # seeds: with fewer, intervals and probabilities are shown with a caution
FEWEST = 5  # runs of a set that --fail-on-regression needs
FEWEST_PER_TASK = 3  # and of each task
TOLERANCE = 0.01  # normalised score: a smaller loss is no regression


@dataclass
class Comparison:
    """Sets of runs and, on the tasks that all sets have, their normalised scores."""

    args: SetArgs
    sets: list[RunSet]
    tasks: list[str]  # of any set
    shared: list[str]  # of every set
    scores: list[list[np.ndarray]]  # by set, by shared task
    units: list[float]  # by shared task: one of normalised score

    @property
    def normalised(self) -> list[list[np.ndarray]]:
        return [[self.normalise(i, x) for i, x in enumerate(scores)] for scores in self.scores]

    def normalise(self, task: int, values: np.ndarray) -> np.ndarray:
        """Returns on a shared task as normalised scores: 1 is the mean score of the first set."""
        return 1 + (values - self.scores[0][task].mean()) / self.units[task]

    @property
    def labels(self) -> list[str]:
        return [s.label for s in self.sets]

    def fewest_seeds(self, *numbers: int) -> int:
        """The smallest number of seeds per shared task in these sets."""
        return min(len(scores) for number in numbers for scores in self.normalised[number])


def compare(args: SetArgs) -> Comparison:
    """Find the sets and normalise their scores on the tasks that all have."""
    sets = find_sets(args)
    shared = common_tasks(sets, args)
    tasks = list(args.env_ids) or sorted({run.env_id for s in sets for run in s.runs})
    tasks = [task for task in tasks if any(s.on(task) for s in sets)]
    scores = [[scores_of(s, task, args) for task in shared] for s in sets]
    units = [scale(sets[0].on(task), scores[0][i], args) for i, task in enumerate(shared)]
    return Comparison(args, sets, tasks, shared, scores, units)


def common_tasks(sets: list[RunSet], args: SetArgs) -> list[str]:
    """The tasks on which every set has runs, in the order of --env-ids."""
    have = [set(s.tasks()) for s in sets]
    every = args.env_ids or sorted(set.union(*have))
    for s, tasks in zip(sets, have, strict=True):
        missing = [task for task in every if task not in tasks]
        if missing:
            message = f"{s.label} has no run of {', '.join(missing)}"
            require(not args.fail_on_regression, f"--fail-on-regression: {message}")
            say(f"{message}: left out of the statistics across tasks")
    return [task for task in every if all(task in tasks for tasks in have)]


def scores_of(runs: RunSet, task: str, args: SetArgs) -> np.ndarray:
    window = args.metric_last_n_average_window
    return np.array([run.score(args.metric, window) for run in runs.on(task)])


def scale(runs: Iterable[OneRun], scores: np.ndarray, args: SetArgs) -> float:
    """The improvement of the baseline on a task, which normalises the scores of all sets.

    At least the standard deviation of its runs, so that a task without any learning does not
    amplify noise.
    """
    starts = []
    for run in runs:
        values = run.curves[args.metric].values
        episodes = max(1, min(10, len(values) // 10))
        first = episodes if run.final is None else 1  # committed: the mean of many episodes
        starts.append(values[:first].mean())
    return float(max(abs(scores.mean() - np.mean(starts)), scores.std(), 1e-9))


# -- the tables --------------------------------------------------------------------------------


def markdown(c: Comparison) -> str:
    """Scores by task, statistics across tasks, and the settings in which the sets differ."""
    parts = [score_table(c)]
    if c.shared:
        parts.append(across_tasks(c))
    if len(c.sets) > 1:
        parts.append(settings_table(c))
    return "\n\n".join(filter(None, parts))


def score_table(c: Comparison) -> str:
    """Mean and standard deviation of each set on each task."""
    head = ["", *c.labels]
    about = f"**{c.args.metric}**: mean ± sample standard deviation over seeds (number of seeds)."
    about += f" A run's score is the mean of its last {last_values(c)} values."
    lines = [about, "", row(head), row(["-"] * len(head))]
    for task in c.tasks:
        cells = [cell(scores_of(s, task, c.args)) for s in c.sets]
        lines.append(row([task, *cells]))
    cells = []
    for s in c.sets:
        minutes = [run.curves[c.args.metric].seconds[-1] / 60 for run in s.runs]
        cells.append(f"{np.median(minutes):.1f}")
    lines.append(row(["median minutes per run", *cells]))
    return "\n".join(lines)


def last_values(c: Comparison) -> str:
    """How many values a run's score is the mean of; committed results have their own number."""
    window = c.args.metric_last_n_average_window
    numbers = {window if run.final is None else LAST for s in c.sets for run in s.runs}
    return " or ".join(map(str, sorted(numbers)))


def cell(scores: np.ndarray) -> str:
    return f"{stats.mean_and_std(scores)} ({len(scores)})" if len(scores) else "-"


def across_tasks(c: Comparison) -> str:
    """Interquartile means, differences and probabilities of improvement, with 95% intervals."""
    head = ["", *c.labels]
    about = f"Across {count(len(c.shared), 'task')}"
    about += " (95% intervals: stratified bootstrap over seeds):"
    about += " 0 is a task's return at the start, 1 the first set's final mean."
    lines = [about, "", row(head), row(["-"] * len(head))]
    cells = []
    for i, runs in enumerate(c.normalised):
        bounds = stats.interval(stats.bootstrap_iqm(runs, i))
        cells.append(f"{stats.set_iqm(runs):.3f} {with_caution(bounds, c.fewest_seeds(i))}")
    lines.append(row(["interquartile mean", *cells]))
    if len(c.sets) == 1:
        return "\n".join(lines)
    differences = []
    probabilities = []
    base = c.normalised[0]
    for i, new in enumerate(c.normalised[1:]):
        seeds = c.fewest_seeds(0, i + 1)
        difference, bounds = stats.difference(base, new, i)
        differences.append(f"{difference:+.3f} {with_caution(bounds, seeds)}")
        probability, bounds = stats.improvement(base, new, i)
        probabilities.append(f"{probability:.2f} {with_caution(bounds, seeds)}")
    lines.append(row(["difference", "", *differences]))
    lines.append(row(["P(improvement)", "", *probabilities]))
    return "\n".join(lines)


def with_caution(bounds: tuple[float, float], seeds: int) -> str:
    """An interval, with a caution if there are few seeds; one seed has no interval."""
    if seeds == 1:
        return "(caution: one seed, no interval)"
    text = f"[{bounds[0]:.3f}, {bounds[1]:.3f}]"
    return f"{text} (caution: only {seeds} seeds)" if seeds < ENOUGH else text


def settings_table(c: Comparison) -> str:
    """The settings in which the sets differ on the same task, and the versions of the code."""
    incomplete = [s.label for s in c.sets if not all(run.all_settings for run in s.runs)]
    rows = []
    only: dict[str, list[str]] = {}  # settings that some sets do not have, by the labels of others
    for name in setting_names(c):
        have = [s.label for s in c.sets if any(name in run.settings for run in s.runs)]
        if len(have) == len(c.sets):
            if differs_on_a_task(c, name):
                rows.append([flag_name(name), *(value_in(s, name) for s in c.sets)])
        elif not incomplete:
            only.setdefault(", ".join(have), []).append(flag_name(name))
    codes = [codes_of(s) for s in c.sets]
    if len(set(codes)) > 1:
        rows.append(["code", *codes])

    parts = []
    if rows:
        head = ["differs between the sets", *c.labels]
        parts.append("\n".join(row(cells) for cells in [head, ["-"] * len(head), *rows]))
    elif not only:
        parts.append("Settings and code are the same in all sets.")
    if only:
        lines = []
        for labels, names in only.items():
            lines.append(f"Only {labels} has the settings {', '.join(names)}.")
        parts.append("\n".join(lines))
    if incomplete:
        parts.append(f"{', '.join(incomplete)}: only the flags of the commands are recorded.")
    return "\n\n".join(parts)


def setting_names(c: Comparison) -> list[str]:
    """The settings that any run has, in the order in which they are found."""
    names: dict[str, None] = {}
    for s in c.sets:
        for run in s.runs:
            names.update(dict.fromkeys(run.settings))
    return list(names)


def codes_of(s: RunSet) -> str:
    """The versions of the code in a set."""
    return ", ".join(dict.fromkeys(run.code or "unknown" for run in s.runs))


def differs_on_a_task(c: Comparison, name: str) -> bool:
    """Whether sets have different values of a setting on the same task."""
    for task in c.tasks:
        firsts = [s.on(task)[0] for s in c.sets if s.on(task)]
        if len({run.settings.get(name, ABSENT) for run in firsts}) > 1:
            return True
    return False


def value_in(s: RunSet, name: str) -> str:
    """The value of a setting in a set; if it depends on the task, each value with its tasks."""
    values: dict[str, list[str]] = {}
    for task in s.tasks():
        values.setdefault(s.on(task)[0].settings.get(name, ABSENT), []).append(task)
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} ({', '.join(tasks)})" for value, tasks in values.items())


# -- regressions -------------------------------------------------------------------------------


def verdicts(c: Comparison) -> list[str]:
    """A line for each set that is worse than the first: across tasks, or on a single task.

    Single tasks are tested, too, because an interquartile mean ignores one broken task among many.
    Too few runs are an error.
    """
    require(len(c.sets) > 1, "--fail-on-regression needs two sets of runs, see --help")
    for s, scores in zip(c.sets, c.scores, strict=True):
        fewest = min(map(len, scores))
        total = sum(map(len, scores))
        require(
            fewest >= FEWEST_PER_TASK and total >= FEWEST,
            f"--fail-on-regression: {s.label} has too few runs: {total} in all, {fewest} on one"
            f" task; needed are {FEWEST} in all and {FEWEST_PER_TASK} on each task",
        )
    base = c.normalised[0]
    found = []
    for label, new in zip(c.labels[1:], c.normalised[1:], strict=True):
        worse = ["across tasks"] if stats.regressed(base, new, TOLERANCE) else []
        for task, a, b in zip(c.shared, base, new, strict=True):
            if min(len(a), len(b)) < FEWEST:
                say(f"{label}: fewer than {FEWEST} runs on {task}: this task is not tested alone")
            elif stats.regressed([a], [b], TOLERANCE, resamples=10_000):
                worse.append(f"on {task}")
        if worse:
            found.append(f"{label} is worse than {c.labels[0]} {', '.join(worse)}")
    return found
