"""Sets of runs to compare. Within a set, the runs of a task differ only in their seeds."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cleanrl_utils.analysis import grouping, sources
from cleanrl_utils.analysis.grouping import ABSENT, count, flag_name
from cleanrl_utils.analysis.sources import OneRun
from cleanrl_utils.analysis.tables import RETURN, say
from cleanrl_utils.errors import BadInput, require

SAME_LENGTH = 1.1  # largest ratio of last steps among runs of one length


@dataclass
class SetArgs:
    exp_names: tuple[str, ...] = ()
    """experiments to compare"""
    exp_name: str = ""
    """a single experiment, as --exp-names"""
    tags: tuple[str, ...] = ()
    """tags to compare, as set by WANDB_TAGS or the benchmark tool"""
    commits: tuple[str, ...] = ()
    """commits to compare, in full or shortened"""
    split_by: tuple[str, ...] = ()
    """settings to compare, one set per value, e.g. --split-by learning-rate"""
    where: tuple[str, ...] = ()
    """use only runs with these settings, e.g. --where total-timesteps=500000 gamma=0.99"""
    env_ids: tuple[str, ...] = ()
    """environments; unset: all that the sets have in common"""
    runs_dir: tuple[str, ...] = ()
    """folders of runs; unset: runs, if no other source is given"""
    results: bool = False
    """use the committed results of benchmark/results"""
    results_dir: str = ""
    """folder of committed results; implies --results"""
    wandb_project_name: str = ""
    """project on Weights & Biases to read runs from"""
    wandb_entity: str = ""
    """team or user on Weights & Biases; unset: your own"""
    scan_history: bool = False
    """read every value from Weights & Biases instead of a sample of 10,000"""
    metric: str = RETURN
    """metric to compare; higher is better"""
    metric_last_n_average_window: int = 100
    """number of last values of the metric whose mean is a run's score"""
    unfinished: bool = False
    """also use unfinished runs, of any length"""
    fail_on_regression: bool = False
    """exit with status 1 if a set is worse than the first one"""

    def __post_init__(self) -> None:
        self.exp_names = tuple(dict.fromkeys(filter(None, (*self.exp_names, self.exp_name))))
        self.results = self.results or bool(self.results_dir)
        if not (self.runs_dir or self.results or self.wandb_project_name):
            self.runs_dir = ("runs",)
        window = self.metric_last_n_average_window
        require(window >= 1, f"--metric-last-n-average-window must be at least 1, got {window}")
        for word in self.where:
            name, _, value = word.partition("=")
            require(bool(name and value), f"--where takes NAME=VALUE, not {word}")


@dataclass
class RunSet:
    """Runs that are compared as one, on one or several tasks."""

    label: str
    runs: list[OneRun]

    def on(self, env_id: str) -> list[OneRun]:
        """The runs on a task."""
        return [run for run in self.runs if run.env_id == env_id]

    def tasks(self) -> list[str]:
        return list(dict.fromkeys(run.env_id for run in self.runs))


def find_sets(args: SetArgs) -> list[RunSet]:
    """Find the sets: one per combination of source, experiment, tag, commit and split setting."""
    found, places = find_everything(args)
    if args.env_ids:
        found = [run for run in found if run.env_id in args.env_ids]
    found = filter_by_settings(found, args.where)
    names = args.exp_names
    if not (names or args.tags or args.commits or args.split_by or len(places) > 1):
        names = tuple(sorted({run.exp_name for run in found}))
        of_tasks = " of these tasks" if args.env_ids else ""
        require(bool(names), f"{', '.join(places)}: no run{of_tasks}")
    choices: list[Sequence[str | None]] = [
        places,
        names or [None],
        args.tags or [None],
        args.commits or [None],
    ]
    split = [name.removeprefix("--").replace("-", "_") for name in args.split_by]
    for name in split:
        choices.append(values_of(found, name, "--split-by"))
    sets = []
    for choice in itertools.product(*choices):
        runs = [run for run in found if belongs(run, choice, split)]
        label = label_of(choice, choices, split)
        if not runs and split:
            continue  # not every combination of values was run
        require(bool(runs), no_run(choice, args))
        sets.append(RunSet(label, choose(runs, label, args)))
    require(bool(sets), "--split-by: no run has these settings")
    sources.read_curves([run for s in sets for run in s.runs])
    for s in sets:
        drop_without_metric(s, args)
        check_length(s, args)
        note_differences(s)
    return sets


def no_run(choice: Sequence[str | None], args: SetArgs) -> str:
    """The error for a set without runs: which source has no run of what."""
    source, exp_name, tag, commit = choice[:4]
    text = f"{source}: no run"
    text += f" of {exp_name}" if exp_name else ""
    text += f" with tag {tag}" if tag else ""
    text += f" of commit {commit}" if commit else ""
    text += f" on {' or '.join(args.env_ids)}" if args.env_ids else ""
    return text + (f" with --where {' '.join(args.where)}" if args.where else "")


def find_everything(args: SetArgs) -> tuple[list[OneRun], list[str]]:
    """All runs of all sources, and the names of the sources."""
    found: list[OneRun] = []
    places: list[str] = []
    if args.results:
        found += sources.runs_of_results(args.results_dir)
        places.append(sources.COMMITTED_RESULTS)
    for folder in args.runs_dir:
        found += sources.runs_of_folder(folder)
        places.append(folder)
    if args.wandb_project_name:
        found += sources.runs_of_wandb(
            args.wandb_project_name,
            args.wandb_entity,
            args.metric,
            args.exp_names,
            args.env_ids,
            args.tags,
            args.scan_history,
        )
        places.append(sources.wandb_path(args.wandb_project_name, args.wandb_entity))
    return found, places


def filter_by_settings(runs: list[OneRun], where: Sequence[str]) -> list[OneRun]:
    """The runs that have all these settings, given as NAME=VALUE."""
    for word in where:
        name, _, value = word.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        values = values_of(runs, name, "--where")
        text = grouping.as_text(value)
        require(text in values, f"--where {word}: no such run; runs have {', '.join(values)}")
        runs = [run for run in runs if run.settings.get(name, ABSENT) == text]
    return runs


def values_of(runs: list[OneRun], name: str, used_in: str) -> tuple[str, ...]:
    """All values of a setting; an error if no run has it, which names the flag `used_in`."""
    values = {run.settings.get(name, ABSENT) for run in runs}
    if values <= {ABSENT}:
        raise BadInput(f"{used_in} {name.replace('_', '-')}: no run has this setting")
    return tuple(grouping.in_order(values))


def belongs(run: OneRun, choice: Sequence[str | None], split: Sequence[str]) -> bool:
    """Whether a run has this source, experiment, tag, commit and these values of split settings."""
    source, name, tag, commit, *values = choice
    if run.source != source or name not in (None, run.exp_name):
        return False
    if tag is not None and tag not in run.tags:
        return False
    if commit is not None:  # either may be shortened
        alike = commit[: len(run.commit)] == run.commit[: len(commit)]
        if not run.commit or not alike:
            return False
    return all(
        run.settings.get(key, ABSENT) == value for key, value in zip(split, values, strict=True)
    )


def label_of(
    choice: Sequence[str | None], choices: Sequence[Sequence[str | None]], split: Sequence[str]
) -> str:
    """The name of a set: the choices in which it differs from other sets."""
    texts: list[str | None] = [*choice[:4]]
    for name, value in zip(split, choice[4:], strict=True):
        texts.append(f"{name.replace('_', '-')}={value}")
    distinct = [str(t) for t, options in zip(texts, choices, strict=True) if len(options) > 1]
    source, exp_name, tag, commit = choice[:4]
    return ", ".join(distinct) or str(exp_name or tag or commit or source)


def choose(runs: list[OneRun], label: str, args: SetArgs) -> list[OneRun]:
    """The runs of a set that count: finished, with equal settings, the newest of each seed."""
    chosen: list[OneRun] = []
    counted = [run for run in runs if run.finished or args.unfinished]
    for task in dict.fromkeys(run.env_id for run in counted):
        mine = [run for run in counted if run.env_id == task]
        check_same_settings(mine, f"{label} on {task}")
        chosen += grouping.newest_per_seed(mine)
    dropped = len(counted) - len(chosen)
    if dropped:
        same_code = {run.code for run in counted} == {run.code for run in chosen}
        other = "" if same_code else ", of other code"
        say(f"{label}: {count(dropped, 'earlier run')} of the same tasks and seeds left out{other}")
    seeds = {(run.env_id, run.seed) for run in chosen}
    lost = [run for run in runs if not run.finished and (run.env_id, run.seed) not in seeds]
    if lost:
        names = ", ".join(run.name for run in lost[:3]) + (", ..." if len(lost) > 3 else "")
        message = f"{label}: {count(len(lost), 'unfinished run')}: {names}"
        require(not args.fail_on_regression, f"--fail-on-regression: {message}")
        say(f"{message}; left out (--unfinished counts them)")
    require(bool(chosen), f"{label}: no finished run (--unfinished counts the others)")
    return chosen


def check_same_settings(runs: list[OneRun], name: str) -> None:
    """Refuse runs that differ in more than their seeds."""
    different = grouping.differing([run.settings for run in runs])
    if not different:
        return
    alternatives = "; ".join(f"{flag_name(n)} {' or '.join(v)}" for n, v in different.items())
    by_settings: dict[object, list[OneRun]] = {}
    for run in runs:
        by_settings.setdefault(grouping.settings_key(run.settings), []).append(run)
    largest = max(by_settings.values(), key=len)[0].settings
    flags = {n: n.replace("_", "-") for n in different}
    where = " ".join(f"{flags[n]}={largest.get(n, ABSENT)}" for n in different)
    raise BadInput(
        f"{name}: {len(runs)} runs with different settings are not one set ({alternatives});"
        f" choose with --where {where}, or compare them with --split-by {' '.join(flags.values())}"
    )


def drop_without_metric(s: RunSet, args: SetArgs) -> None:
    """Leave out runs that never logged the metric, with a note."""
    for run in [run for run in s.runs if args.metric not in run.curves]:
        s.runs.remove(run)
        why = "no finished episode" if args.metric == RETURN else f"never logged {args.metric}"
        say(f"{s.label}: {run.name} left out: {why}")
    require(bool(s.runs), f"{s.label}: no finished run that logged {args.metric}")


def check_length(s: RunSet, args: SetArgs) -> None:
    """Refuse runs of one task that end at different steps, unless unfinished runs count."""
    for task in s.tasks():
        ends = [run.last_step() for run in s.on(task) if run.final is None]
        if not ends or max(ends) <= SAME_LENGTH * min(ends):
            continue
        message = f"{s.label} on {task}: runs end at different steps"
        message += f" ({min(ends):,.0f} to {max(ends):,.0f})"
        require(args.unfinished, f"{message}; --unfinished counts them as they are")
        say(message)


def note_differences(s: RunSet) -> None:
    """Print what differs within a set: versions of the code, and settings between tasks."""
    by_module: dict[str, Counter[str]] = {}  # code includes the module of a task module:Id
    for run in s.runs:
        module = run.env_id.partition(":")[0] if ":" in run.env_id else ""
        by_module.setdefault(module, Counter())[run.code] += 1
    for codes in by_module.values():
        if len(codes) > 1:
            texts = [f"{code or 'unknown'} ({count(n, 'run')})" for code, n in codes.items()]
            say(f"{s.label}: runs of different code: {', '.join(texts)}")
    for run in s.runs:
        if grouping.is_mixed(run.code):
            say(f"{s.label}: {run.name} was resumed with other code")
    firsts = [s.on(task)[0].settings for task in s.tasks()]
    different = grouping.differing(firsts)
    if different:
        names = ", ".join(map(flag_name, different))
        say(f"{s.label}: settings differ between tasks: {names}")
