"""Compare sets of runs: is the new version better, worse or the same?

    python -m cleanrl_utils.rlops --exp-names ppo dqn --env-ids CartPole-v1 Acrobot-v1
    python -m cleanrl_utils.rlops --exp-name ppo --tags v1.0.0 my-change --report
    python -m cleanrl_utils.rlops --results --runs-dir runs --exp-name ppo --fail-on-regression

Every tag, commit and experiment name (and every place to read from, if there are several) makes a
set of runs; the first set is the baseline. A run's score is the mean of its last values. Prints a
Markdown table, draws learning curves and statistics (PNG and SVG) and, with --report, writes one
web page that needs no network. --fail-on-regression ends with exit status 1 if a set is worse than
the baseline beyond doubt, across tasks or on one of them (given 5 runs of it): the 95% interval of
the difference of their interquartile means is below zero, their own 95% intervals do not overlap,
and the difference is more than 1% of what the baseline learned.
"""

import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cleanrl_utils import results
from cleanrl_utils.analysis import stats
from cleanrl_utils.analysis.palette import COLORS
from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running.settings import parse_command

RETURN = results.RETURN

POINTS = 100  # of a curve in the figure
REPORT_POINTS = 200  # of each curve in the web page
FEWEST = 5  # runs of a set that a verdict needs, and
FEWEST_PER_TASK = 3
TOLERANCE = 0.01  # of what the baseline learned: less than that is no regression
TEMPLATE = Path(__file__).with_name("rlops_report.html")
CHART = Path(__file__).with_name("chart.js")


@dataclass
class RlopsArgs:
    exp_names: tuple[str, ...] = ()
    """experiments to compare; --exp-name is the same"""
    exp_name: str = ""
    """one experiment"""
    tags: tuple[str, ...] = ()
    """tags to compare: runs that WANDB_TAGS or the benchmark gave them"""
    commits: tuple[str, ...] = ()
    """commits to compare, or their first letters"""
    env_ids: tuple[str, ...] = ()
    """tasks; unset: all that the sets have in common"""
    runs_dir: tuple[str, ...] = ()
    """folders with runs; unset: runs, if no other source is named"""
    results: bool = False
    """read the committed results of benchmark/results"""
    results_dir: str = ""
    """committed results in another folder; implies --results"""
    wandb_project_name: str = ""
    """read the runs of this Weights & Biases project"""
    wandb_entity: str = ""
    """team or user of that project; unset: your own"""
    scan_history: bool = False
    """read every value from Weights & Biases, not a sample of 10,000; run folders are read whole"""
    metric: str = RETURN
    """metric that is compared; more is better"""
    metric_last_n_average_window: int = 100
    """a run's score is the mean of so many last values of the metric"""
    unfinished: bool = False
    """count runs that have not finished, too"""
    output_filename: str = "compare.png"
    """picture to write; the same as SVG is written beside it"""
    report: bool = False
    """also write a web page with interactive curves, beside the picture"""
    fail_on_regression: bool = False
    """exit with status 1 if a set is worse than the first one"""

    def __post_init__(self) -> None:
        self.exp_names = tuple(dict.fromkeys(filter(None, (*self.exp_names, self.exp_name))))
        self.results = self.results or bool(self.results_dir)
        if not (self.runs_dir or self.results or self.wandb_project_name):
            self.runs_dir = ("runs",)
        window = self.metric_last_n_average_window
        require(window >= 1, f"--metric-last-n-average-window must be at least 1, got {window}")


@dataclass
class Curve:
    """Values of one metric of one run, in the order of steps."""

    steps: np.ndarray
    seconds: np.ndarray
    values: np.ndarray


@dataclass
class OneRun:
    name: str
    source: str
    exp_name: str
    env_id: str
    seed: int
    commit: str
    tags: tuple[str, ...]
    finished: bool = True
    curves: dict[str, Curve] = field(default_factory=dict)
    final: float | None = None  # where the source keeps the score itself
    load: Any = None  # what the curves are read from

    def score(self, metric: str, window: int) -> float:
        if self.final is not None:
            return self.final
        return float(self.curves[metric].values[-window:].mean())


@dataclass
class RunSet:
    label: str
    runs: list[OneRun]

    def on(self, env_id: str) -> list[OneRun]:
        return [run for run in self.runs if run.env_id == env_id]


# -- where runs come from ---------------------------------------------------------------------


def runs_of_folder(folder: str) -> list[OneRun]:
    """Who the runs are; their metrics are read when it is known which ones are wanted."""
    require(Path(folder).is_dir(), f"--runs-dir {folder}: no such folder")
    found = []
    for run in results.find_runs(folder):
        args, record = run.record["args"], run.record
        about = (args["exp_name"], args.get("env_id", ""), args["seed"])
        commit, tags = record.get("git", {}).get("commit", ""), tuple(record.get("tags", []))
        name = run.folder.name
        found.append(OneRun(name, folder, *about, commit, tags, run.finished, load=run))
    return found


def read_folders(runs: Sequence[OneRun]) -> None:
    mine = [run for run in runs if isinstance(run.load, results.RunFolder)]
    for run, table in zip(mine, results.read_all([run.load for run in mine]), strict=True):
        codes = table.tag.cat.codes.to_numpy()
        order = np.argsort(codes, kind="stable")
        columns = [table[name].to_numpy()[order] for name in ("step", "seconds", "value")]
        edges = np.searchsorted(codes[order], np.arange(len(table.tag.cat.categories) + 1))
        for tag, start, end in zip(table.tag.cat.categories, edges, edges[1:], strict=False):
            if end > start:
                run.curves[tag] = Curve(*(column[start:end] for column in columns))


def runs_of_results(folder: str) -> list[OneRun]:
    """Committed results: their curves are short, their scores exact (of the last 100 episodes)."""
    place = Path(folder) if folder else results.COMMITTED
    table, found = results.load(folder=place), []
    for name, rows in table.groupby("run"):
        first = rows.iloc[0]
        tags = tuple(tag for tag in str(first.tags).split(",") if tag)
        about = (first.exp_name, first.env_id, int(first.seed), first.commit, tags)
        values = (rows[c].to_numpy() for c in ("step", "seconds", "episodic_return"))
        run = OneRun(
            str(name), "committed results", *about, curves={results.RETURN: Curve(*values)}
        )
        run.final = float(first.final_return)
        found.append(run)
    return found


def runs_of_wandb(args: RlopsArgs) -> list[OneRun]:
    """Runs of a Weights & Biases project that can belong to a set."""
    try:
        import wandb
    except ImportError:
        raise BadInput("--wandb-project-name needs the package wandb: pip install wandb") from None
    wanted: list[dict[str, Any]] = []
    for key, values in (("exp_name", args.exp_names), ("env_id", args.env_ids)):
        wanted += [{f"config.{key}": {"$in": list(values)}}] if values else []
    wanted += [{"tags": {"$in": list(args.tags)}}] if args.tags else []
    path = "/".join(filter(None, (args.wandb_entity, args.wandb_project_name)))
    keys, found = [args.metric, "global_step", "_runtime"], []
    try:
        for run in wandb.Api(timeout=30).runs(path, filters={"$and": wanted} if wanted else {}):
            config = run.config
            if "exp_name" not in config or "env_id" not in config:
                continue
            scan = args.scan_history
            rows = (
                run.scan_history(keys=keys)
                if scan
                else run.history(samples=10_000, keys=keys, pandas=False)
            )
            columns = np.array([[row[key] for key in keys] for row in rows], float).reshape(-1, 3)
            about = (config["exp_name"], config["env_id"], int(config.get("seed", 0)))
            state = (run.commit or "", tuple(run.tags), run.state == "finished")
            one = OneRun(run.name, path, *about, *state)
            if len(columns):
                one.curves[args.metric] = Curve(columns[:, 1], columns[:, 2], columns[:, 0])
            found.append(one)
    except Exception as error:  # of many kinds: no account, no network, no such project
        text = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(f"--wandb-project-name {path}: cannot be read ({text[:200]})") from None
    return found


# -- from runs to sets ------------------------------------------------------------------------


def find_sets(args: RlopsArgs) -> list[RunSet]:
    """Every combination of source, experiment, tag and commit is a set, in the order of flags."""
    found: list[OneRun] = runs_of_results(args.results_dir) if args.results else []
    sources = ["committed results"] if args.results else []
    for folder in args.runs_dir:
        found, sources = found + runs_of_folder(folder), [*sources, folder]
    if args.wandb_project_name:
        found += runs_of_wandb(args)
        sources.append("/".join(filter(None, (args.wandb_entity, args.wandb_project_name))))
    if args.env_ids:
        found = [run for run in found if run.env_id in args.env_ids]
    names = args.exp_names
    if not (names or args.tags or args.commits or len(sources) > 1):  # nothing said: by experiment
        names = tuple(sorted({run.exp_name for run in found}))
        require(
            bool(names), f"{', '.join(sources)}: no run{' of these tasks' * bool(args.env_ids)}"
        )
    sets = []
    choices = (tuple(sources), names or (None,), args.tags or (None,), args.commits or (None,))
    for choice in itertools.product(*choices):
        source, name, tag, commit = choice
        mine = [
            run
            for run in found
            if run.source == source
            and name in (None, run.exp_name)
            and (tag is None or tag in run.tags)
            and (
                commit is None
                or (run.commit and commit[: len(run.commit)] == run.commit[: len(commit)])
            )
        ]
        differs = [str(x) for x, options in zip(choice, choices) if len(options) > 1]
        label = ", ".join(differs) or str(name or tag or commit or source)
        require(bool(mine), f"no run for {label}{f' on {args.env_ids}' if args.env_ids else ''}")
        sets.append(RunSet(label, choose(mine, label, args)))
    read_folders([run for s in sets for run in s.runs])
    for s in sets:
        for run in [run for run in s.runs if args.metric not in run.curves]:
            s.runs.remove(run)
            say(f"{s.label}: {run.name} never logged {args.metric}: left out")
        require(bool(s.runs), f"{s.label}: no finished run that logged {args.metric}")
    return sets


def choose(runs: list[OneRun], label: str, args: RlopsArgs) -> list[OneRun]:
    """The runs of a set that count: finished ones, and of a seed that ran twice the newest."""
    counted = {}
    for run in runs:
        if run.finished or args.unfinished:
            counted[run.env_id, run.seed] = run
    dropped = sum(run.finished or args.unfinished for run in runs) - len(counted)
    if dropped:
        say(f"{label}: {dropped} earlier runs of the same tasks and seeds left out")
    lost = [r for r in runs if not r.finished and (r.env_id, r.seed) not in counted]
    if lost:
        names = ", ".join(run.name for run in lost[:3]) + (", ..." if len(lost) > 3 else "")
        message = f"{label}: {len(lost)} runs have not finished: {names}"
        require(not args.fail_on_regression, f"--fail-on-regression: {message}")
        say(f"{message}; left out (--unfinished counts them)")
    require(bool(counted), f"{label}: no finished run (--unfinished counts the others)")
    return list(counted.values())


def say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def common_tasks(sets: list[RunSet], args: RlopsArgs) -> list[str]:
    """Tasks that every set has runs of, in the order asked for."""
    have = [{run.env_id for run in s.runs} for s in sets]
    every = args.env_ids or sorted(set.union(*have))
    for s, tasks in zip(sets, have, strict=True):
        if missing := [task for task in every if task not in tasks]:
            message = f"{s.label} has no run of {', '.join(missing)}"
            require(not args.fail_on_regression, f"--fail-on-regression: {message}")
            say(f"{message}: left out of what is said across tasks")
    return [task for task in every if all(task in tasks for tasks in have)]


# -- what is said about them ------------------------------------------------------------------


@dataclass
class Comparison:
    """Sets and, where they share tasks, their scores on one scale."""

    args: RlopsArgs
    sets: list[RunSet]
    tasks: list[str]  # all
    shared: list[str]  # those that every set has
    scores: list[list[np.ndarray]]  # by set, by shared task
    normalised: list[list[np.ndarray]]

    @property
    def labels(self) -> list[str]:
        return [s.label for s in self.sets]


def compare(args: RlopsArgs) -> Comparison:
    sets = find_sets(args)
    shared = common_tasks(sets, args)
    tasks = list(args.env_ids) or sorted({run.env_id for s in sets for run in s.runs})
    tasks = [task for task in tasks if any(s.on(task) for s in sets)]
    scores = [[scores_of(s, task, args) for task in shared] for s in sets]
    scales = [scale(sets[0].on(task), scores[0][i], args) for i, task in enumerate(shared)]
    normalised = [
        [
            1 + (x - base.mean()) / unit
            for x, base, unit in zip(mine, scores[0], scales, strict=True)
        ]
        for mine in scores
    ]
    return Comparison(args, sets, tasks, shared, scores, normalised)


def scores_of(runs: RunSet, task: str, args: RlopsArgs) -> np.ndarray:
    window = args.metric_last_n_average_window
    return np.array([run.score(args.metric, window) for run in runs.on(task)])


def scale(runs: Iterable[OneRun], scores: np.ndarray, args: RlopsArgs) -> float:
    """How much the baseline learned on a task: what makes scores of different tasks comparable.

    Never less than the spread of its runs, so that a task on which nothing was learned does not
    blow noise up.
    """
    starts = []
    for run in runs:
        values = run.curves[args.metric].values
        starts.append(values[: max(1, min(10, len(values) // 10))].mean())
    return float(max(abs(scores.mean() - np.mean(starts)), scores.std(), 1e-9))


def markdown(c: Comparison) -> str:
    head = ["", *c.labels]
    lines = [f"**{c.args.metric}**, mean ± std of the runs' last values", ""]
    lines += [row(head), row(["-"] * len(head))]
    for task in c.tasks:
        cells = [scores_of(s, task, c.args) for s in c.sets]
        lines.append(row([task, *(cell(x) for x in cells)]))
    minutes = [[r.curves[c.args.metric].seconds[-1] / 60 for r in s.runs] for s in c.sets]
    lines.append(row(["minutes per run", *(f"{np.mean(m):.1f}" for m in minutes)]))
    if not c.shared:
        return "\n".join(lines)
    lines += ["", f"Across {len(c.shared)} task{'s' * (len(c.shared) > 1)} (95% intervals):"]
    lines[-1] += " 0 is a task's return at the start, 1 the first set's final mean."
    samples = [stats.bootstrap_iqm(runs, i) for i, runs in enumerate(c.normalised)]
    iqms = [f"{stats.set_iqm(r):.3f} {ci(s)}" for r, s in zip(c.normalised, samples, strict=True)]
    lines += ["", row(head), row(["-"] * len(head)), row(["interquartile mean", *iqms])]
    if len(c.sets) > 1:
        base, others = c.normalised[0], c.normalised[1:]
        differences = [stats.difference(base, new, i) for i, new in enumerate(others)]
        better = [stats.improvement(base, new, i) for i, new in enumerate(others)]
        lines.append(row(["difference", "", *(f"{d:+.3f} {text(i)}" for d, i in differences)]))
        lines.append(row(["P(improvement)", "", *(f"{p:.2f} {text(i)}" for p, i in better)]))
    return "\n".join(lines)


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def cell(scores: np.ndarray) -> str:
    return f"{scores.mean():.2f} ± {scores.std():.2f} ({len(scores)})" if len(scores) else "-"


def text(bounds: tuple[float, float]) -> str:
    return f"[{bounds[0]:.3f}, {bounds[1]:.3f}]"


def ci(samples: np.ndarray) -> str:
    return text(stats.interval(samples))


def verdicts(c: Comparison) -> list[str]:
    """A line for each regression: across tasks, and on each task that has runs enough.

    Each task is judged, too, since an interquartile mean does not see one that broke among many.
    Refuses to judge on too few runs.
    """
    require(len(c.sets) > 1, "--fail-on-regression needs two sets of runs, see --help")
    for s, scores in zip(c.sets, c.scores, strict=True):
        fewest, total = min(map(len, scores)), sum(map(len, scores))
        require(
            fewest >= FEWEST_PER_TASK and total >= FEWEST,
            f"--fail-on-regression: {s.label} has too few runs to judge ({total}, at least"
            f" {fewest} per task); it takes {FEWEST_PER_TASK} per task and {FEWEST} in all",
        )
    base, found = c.normalised[0], []
    for label, new in zip(c.labels[1:], c.normalised[1:], strict=True):
        where = ["across tasks"] if stats.regressed(base, new, TOLERANCE) else []
        for task, a, b in zip(c.shared, base, new, strict=True):
            if min(len(a), len(b)) < FEWEST:
                say(f"{label}: fewer than {FEWEST} runs on {task}: not judged on its own")
            elif stats.regressed([a], [b], TOLERANCE, resamples=10_000):
                where.append(f"on {task}")
        if where:
            found.append(f"{label} is worse than {c.labels[0]} {', '.join(where)}")
    return found


# -- pictures ---------------------------------------------------------------------------------


def thin(
    x: np.ndarray, values: np.ndarray, end: float, points: int
) -> tuple[np.ndarray, np.ndarray]:
    """A curve in equal spans of x up to `end`: (middle, mean value) of those that have values."""
    span = np.clip((x / max(end, 1e-9) * points).astype(int), 0, points - 1)
    counts = np.bincount(span, minlength=points)
    seen = counts > 0
    at = np.bincount(span, x, points)[seen] / counts[seen]
    return at, np.bincount(span, values, points)[seen] / counts[seen]


def mean_curve(
    runs: list[OneRun], metric: str, axis: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x, mean, std) over runs, as far as the shortest of them goes."""
    curves = [run.curves[metric] for run in runs]
    unit = 60.0 if axis == "seconds" else 1.0
    xs = [np.asarray(getattr(curve, axis), float) / unit for curve in curves]
    grid = np.linspace(max(x[0] for x in xs), min(x[-1] for x in xs), POINTS)
    rows = [np.interp(grid, *thin(x, curve.values, x[-1], POINTS)) for x, curve in zip(xs, curves)]
    return grid, np.mean(rows, axis=0), np.std(rows, axis=0)


def draw(c: Comparison, path: Path) -> list[Path]:
    """One row per task, by steps and by time; below, what is said across tasks."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = len(c.tasks) + bool(c.shared)
    figure, axes = plt.subplots(rows, 2, figsize=(11, 3.4 * rows), dpi=110, squeeze=False)
    for task, pair in zip(c.tasks, axes, strict=False):
        for axis, by in zip(pair, ("steps", "seconds"), strict=True):
            for s, color in zip(c.sets, itertools.cycle(COLORS)):
                if runs := s.on(task):
                    x, mean, std = mean_curve(runs, c.args.metric, by)
                    axis.plot(x, mean, color=color, label=f"{s.label} ({len(runs)})")
                    axis.fill_between(x, mean - std, mean + std, color=color, alpha=0.15, lw=0)
            axis.set(xlabel="steps" if by == "steps" else "minutes", title=task)
            axis.grid(alpha=0.3)
        pair[0].set_ylabel(c.args.metric.removeprefix("charts/"))
        pair[0].legend(fontsize=8)
    if c.shared:
        draw_statistics(c, axes[-1])
    figure.tight_layout()
    picture = path if path.suffix else path.with_suffix(".png")
    paths = [picture] + ([picture.with_suffix(".svg")] if picture.suffix != ".svg" else [])
    for target in paths:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(target)
        except (OSError, ValueError) as error:
            raise BadInput(f"--output-filename {target}: cannot be written ({error})") from None
    plt.close(figure)
    return paths


def draw_statistics(c: Comparison, axes: Any) -> None:
    every = np.concatenate([x for runs in c.normalised for x in runs])
    levels = np.linspace(every.min() - 1e-6, every.max(), 101)
    for i, (runs, color) in enumerate(zip(c.normalised, itertools.cycle(COLORS))):
        axes[0].step(levels, stats.profile(runs, levels), color=color, label=c.labels[i])
        band = stats.profile_interval(runs, levels)
        axes[0].fill_between(levels, *band, color=color, alpha=0.15, lw=0, step="pre")
        low, high = stats.interval(stats.bootstrap_iqm(runs, i))
        axes[1].barh(i, high - low, left=low, color=color, alpha=0.4)
        axes[1].plot([stats.set_iqm(runs)] * 2, [i - 0.4, i + 0.4], color=color)
    axes[0].set(title="performance profile", xlabel="normalised score", ylabel="runs above it")
    axes[0].grid(alpha=0.3)
    axes[1].set(title="interquartile mean, 95% interval", xlabel="normalised score")
    axes[1].set_yticks(range(len(c.labels)), c.labels)
    axes[1].invert_yaxis()
    axes[1].use_sticky_edges = False  # the shortest bar needs its margin, too
    axes[1].grid(alpha=0.3, axis="x")


def report(c: Comparison, table: str, path: Path) -> Path:
    """One web page with everything in it: no network, no library."""
    runs: list[dict[str, Any]] = []
    for s in c.sets:
        for run in s.runs:
            curves = {}
            for tag, curve in run.curves.items():
                steps, values = thin(curve.steps, curve.values, curve.steps[-1], REPORT_POINTS)
                _, seconds = thin(curve.steps, curve.seconds, curve.steps[-1], REPORT_POINTS)
                if np.isfinite(values).all():
                    curves[tag] = [short(steps, 0), short(seconds / 60, 3), short(values)]
            about = {"set": s.label, "run": run.name, "task": run.env_id, "seed": run.seed}
            about |= {"experiment": run.exp_name, "commit": run.commit[:12]}
            runs.append({**about, "tags": ", ".join(run.tags), "curves": curves})
    data = {"metric": c.args.metric, "colors": COLORS, "runs": runs, "table": table}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    page = TEMPLATE.read_text(encoding="utf-8")
    page = page.replace('"CHART"', CHART.read_text(encoding="utf-8"), 1).replace('"DATA"', text, 1)
    path.write_text(page, encoding="utf-8")
    return path


def short(values: np.ndarray, decimals: int | None = None) -> list[float]:
    """Numbers with as many digits as a screen can show."""
    if decimals is not None:
        values = np.round(values.astype(float), decimals)
        return (values.astype(int) if decimals == 0 else values).tolist()
    return [float(f"{value:.5g}") for value in values]


def main(argv: list[str] | None = None) -> int:
    args = parse_command(RlopsArgs, argv)
    c = compare(args)
    worse = verdicts(c) if args.fail_on_regression else []
    table = markdown(c)
    print(table)
    paths = draw(c, Path(args.output_filename))
    if args.report:
        paths.append(report(c, table, paths[0].with_suffix(".html")))
    print(f"\n{', '.join(map(str, paths))}")
    for line in worse:
        print(f"regression: {line}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
