"""Charts of learning curves: of one run, or of a comparison."""

from pathlib import Path
from typing import Any

import numpy as np

from cleanrl_utils.analysis import stats
from cleanrl_utils.analysis.comparison import ENOUGH, Comparison
from cleanrl_utils.analysis.palette import colors
from cleanrl_utils.analysis.sources import OneRun
from cleanrl_utils.analysis.tables import RETURN, RunFolder
from cleanrl_utils.errors import BadInput

POINTS = 100  # per curve


def plot(run: RunFolder, path: Path) -> Path:
    """Draw a run's learning curve: episodes as dots, the mean of the last 20 as a line."""
    plt = pyplot()
    metrics = run.metrics()
    episodes = metrics[metrics.tag == RETURN]
    args = run.record["args"]
    figure, axis = plt.subplots(figsize=(8, 4.5), dpi=120)
    axis.plot(episodes.step, episodes.value, ".", markersize=2, alpha=0.3, color="tab:blue")
    smooth = episodes.value.rolling(20, min_periods=1).mean()
    axis.plot(episodes.step, smooth, color="tab:blue", label="mean of the last 20 episodes")
    axis.set(xlabel="environment steps", ylabel="episodic return")
    axis.set_title(f"{args['exp_name']} on {args.get('env_id', '')}, seed {args['seed']}")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.tight_layout()
    try:
        figure.savefig(path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        plt.close(figure)
    return path


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams["pdf.fonttype"] = 42  # TrueType: many conferences refuse Type 3 fonts
    return plt


def thin(
    x: np.ndarray, values: np.ndarray, end: float, points: int
) -> tuple[np.ndarray, np.ndarray]:
    """Average a curve in `points` equal spans of x up to `end`; returns means of x and value."""
    span = np.clip((x / max(end, 1e-9) * points).astype(int), 0, points - 1)
    counts = np.bincount(span, minlength=points)
    seen = counts > 0
    at = np.bincount(span, x, points)[seen] / counts[seen]
    return at, np.bincount(span, values, points)[seen] / counts[seen]


def positions(run: OneRun, metric: str, by: str) -> np.ndarray:
    """The steps or minutes of a curve's values."""
    curve = run.curves[metric]
    return curve.steps if by == "steps" else curve.seconds / 60


def common_range(runs: list[OneRun], metric: str, by: str) -> tuple[float, float]:
    """The steps or minutes from which and up to which all runs have values."""
    xs = [positions(run, metric, by) for run in runs]
    return max(x[0] for x in xs), min(x[-1] for x in xs)


def on_grid(runs: list[OneRun], metric: str, by: str, grid: np.ndarray) -> np.ndarray:
    """Smoothed curves at given steps or minutes, (runs, points)."""
    rows = []
    for run in runs:
        x = positions(run, metric, by)
        rows.append(np.interp(grid, *thin(x, run.curves[metric].values, x[-1], POINTS)))
    return np.array(rows)


def draw(c: Comparison, path: Path) -> list[Path]:
    """Draw the curves of each task by steps and by minutes; below, those across tasks and their
    statistics."""
    plt = pyplot()
    rows = len(c.tasks) + bool(c.shared) + (len(c.shared) > 1)
    figure, axes = plt.subplots(rows, 2, figsize=(11, 3.4 * rows), dpi=110, squeeze=False)
    for task, pair in zip(c.tasks, axes, strict=False):
        for axis, by in zip(pair, ("steps", "seconds"), strict=True):
            draw_task(c, task, axis, by)
        pair[0].set_ylabel(c.args.metric.removeprefix("charts/"))
        several = any(len(s.on(task)) > 1 for s in c.sets)
        what = "mean ± standard deviation (seeds)" if several else None
        pair[0].legend(fontsize=8, title=what, title_fontsize=8)
    if len(c.shared) > 1:
        for axis, by in zip(axes[-2], ("steps", "seconds"), strict=True):
            draw_across_tasks(c, axis, by)
    if c.shared:
        draw_statistics(c, axes[-1])
    figure.tight_layout()
    picture = path if path.suffix else path.with_suffix(".png")
    paths = [picture]
    if picture.suffix != ".svg":
        paths.append(picture.with_suffix(".svg"))
    for target in paths:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(target)
        except (OSError, ValueError) as error:
            raise BadInput(f"--output-filename {target}: cannot be written ({error})") from None
    plt.close(figure)
    return paths


def draw_task(c: Comparison, task: str, axis: Any, by: str) -> None:
    """Draw the mean curve of each set, with its standard deviation if it has several seeds."""
    for s, color in zip(c.sets, colors(len(c.sets)), strict=True):
        runs = s.on(task)
        if not runs:
            continue
        x = np.linspace(*common_range(runs, c.args.metric, by), POINTS)
        curves = on_grid(runs, c.args.metric, by, x)
        mean = curves.mean(0)
        axis.plot(x, mean, color=color, label=f"{s.label} ({len(runs)})")
        if len(runs) > 1:
            std = curves.std(0, ddof=1)
            axis.fill_between(x, mean - std, mean + std, color=color, alpha=0.15, lw=0)
    axis.set(xlabel="steps" if by == "steps" else "minutes", title=task)
    axis.grid(alpha=0.3)


def draw_across_tasks(c: Comparison, axis: Any, by: str) -> None:
    """Draw how fast each set learns: its interquartile mean over the shared tasks. Where tasks have
    different lengths, each is stretched to the same one."""
    metric = c.args.metric
    ends = []
    first_shares = []  # of each task's length: before it, some run has no value yet
    for task in c.shared:
        start, end = common_range([run for s in c.sets for run in s.on(task)], metric, by)
        ends.append(max(end, 1e-9))
        first_shares.append(start / ends[-1])
    shares = np.linspace(max(first_shares), 1, POINTS)
    unit = "steps" if by == "steps" else "minutes"
    same_length = max(ends) < 1.01 * min(ends)
    x = shares * min(ends) if same_length else 100 * shares
    for i, (s, color) in enumerate(zip(c.sets, colors(len(c.sets)), strict=True)):
        curves = []
        for number, (task, end) in enumerate(zip(c.shared, ends, strict=True)):
            rows = on_grid(s.on(task), metric, by, shares * end)
            curves.append(c.normalise(number, rows))
        iqm, low, high = stats.iqm_curve(curves, i)
        axis.plot(x, iqm, color=color, label=s.label)
        axis.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
    axis.set(xlabel=unit if same_length else f"% of a task's {unit}", ylabel="normalised score")
    axis.set_title(f"{len(c.shared)} tasks: interquartile mean, 95% interval")
    axis.grid(alpha=0.3)


def draw_statistics(c: Comparison, axes: Any) -> None:
    """Draw the performance profiles and the interquartile means."""
    every = np.concatenate([x for runs in c.normalised for x in runs])
    levels = np.linspace(every.min() - 1e-6, every.max(), 101)
    axes[1].use_sticky_edges = False  # leave a margin beside the bars
    for i, (runs, color) in enumerate(zip(c.normalised, colors(len(c.sets)), strict=True)):
        axes[0].step(levels, stats.profile(runs, levels), color=color, label=c.labels[i])
        band = stats.profile_interval(runs, levels)
        axes[0].fill_between(levels, *band, color=color, alpha=0.15, lw=0, step="pre")
        low, high = stats.interval(stats.bootstrap_iqm(runs, i))
        axes[1].barh(i, high - low, left=low, color=color, alpha=0.4)
        axes[1].plot([stats.set_iqm(runs)] * 2, [i - 0.4, i + 0.4], color=color)
    fewest = c.fewest_seeds(*range(len(c.sets)))
    caution = f"\n(caution: seeds per task: {fewest})" if fewest < ENOUGH else ""
    title = "performance profile, 95% interval"
    axes[0].set(title=title, xlabel="normalised score", ylabel="runs above it")
    axes[0].grid(alpha=0.3)
    axes[1].set(title=f"interquartile mean, 95% interval{caution}", xlabel="normalised score")
    axes[1].set_yticks(range(len(c.labels)), c.labels)
    axes[1].invert_yaxis()
    axes[1].grid(alpha=0.3, axis="x")
