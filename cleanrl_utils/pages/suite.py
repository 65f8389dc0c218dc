"""The MinAtar suite: all seeds of all games of `benchmark/results` on one page."""

import numpy as np

from cleanrl_utils.analysis import stats
from cleanrl_utils.analysis.palette import colors
from cleanrl_utils.pages import svg
from cleanrl_utils.pages.results import Group, curves_of, figure, provenance

SCRIPTS = ["ppo_jax", "pqn_jax"]
# (0, 1) of the normalised score: a random player's mean return; a fixed level, the better script's
# mean of ten seeds after 5 million steps, so that new runs do not move the scale.
LEVELS = {
    "Asterix-MinAtar": (0.49, 51.7),
    "Breakout-MinAtar": (0.41, 26.9),
    "Freeway-MinAtar": (0.39, 63.9),
    "SpaceInvaders-MinAtar": (4.14, 159.2),
}
GAMES = list(LEVELS)
POINTS = 100
RESAMPLES = 10_000
Suite = dict[str, dict[str, Group]]  # by script and game


def choose(groups: list[Group]) -> Suite:
    """The groups of the length that every script has on every game, with the most seeds."""
    by_steps: dict[int, Suite] = {}
    for group in groups:
        if group.name in SCRIPTS and group.env_id in GAMES:
            games = by_steps.setdefault(group.steps, {}).setdefault(group.name, {})
            games[group.env_id] = group
    complete = {steps: suite for steps, suite in by_steps.items() if is_complete(suite)}
    if not complete:
        return {}
    best = max(complete, key=lambda steps: (fewest_seeds(complete[steps]), steps))
    return {script: complete[best][script] for script in SCRIPTS}


def is_complete(suite: Suite) -> bool:
    """Whether every script has played every game."""
    return all(len(suite.get(script, {})) == len(GAMES) for script in SCRIPTS)


def fewest_seeds(suite: Suite) -> int:
    return min(group.seeds for games in suite.values() for group in games.values())


def finals(group: Group) -> np.ndarray:
    return np.array(group.column("final_return"), float)


def normalised(games: dict[str, Group]) -> list[np.ndarray]:
    """The final returns by game, 0 for a random player and 1 for the game's fixed level."""
    scores = []
    for game, (zero, one) in LEVELS.items():
        scores.append((finals(games[game]) - zero) / (one - zero))
    return scores


def suite_page(groups: list[Group]) -> tuple[str, str, str, str]:
    """Markdown before the charts, the charts as HTML, Markdown after them, and provenance."""
    suite = choose(groups)
    if not suite:
        return "No complete set of runs is in `benchmark/results` yet.", "", "", ""
    used = [suite[script][game] for game in GAMES for script in SCRIPTS]
    return summary(suite), charts(suite), game_table(suite), provenance(used)


def summary(suite: Suite) -> str:
    """A sentence about the runs, and the statistics across games."""
    groups = [group for games in suite.values() for group in games.values()]
    seeds = sorted({group.seeds for group in groups})
    many = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    runs = sum(len(group.runs) for group in groups)
    steps = groups[0].steps
    lines = [f"{runs} runs: {len(GAMES)} games, {many} seeds each, {steps:,} steps per run."]
    lines += ["", "| | interquartile mean | mean | optimality gap |", "|-|-|-|-|"]
    scores = {script: normalised(suite[script]) for script in SCRIPTS}
    for script in SCRIPTS:
        runs_of = scores[script]
        bounds = stats.interval(stats.bootstrap_iqm(runs_of, resamples=RESAMPLES))
        gap, gap_bounds = stats.optimality_gap(runs_of, resamples=RESAMPLES)
        mean = np.mean([x.mean() for x in runs_of])
        cells = [f"`{script}.py`", with_interval(stats.set_iqm(runs_of), bounds), f"{mean:.3f}"]
        lines.append(f"| {' | '.join([*cells, with_interval(gap, gap_bounds)])} |")
    first, second = SCRIPTS
    chance, bounds = stats.improvement(scores[first], scores[second], resamples=RESAMPLES)
    better = with_interval(chance, bounds, 2)
    sentence = f"A run of `{second}.py` scores more than a run of `{first}.py` on the same game"
    return "\n".join([*lines, "", f"{sentence} with probability {better}."])


def with_interval(value: float, bounds: tuple[float, float], digits: int = 3) -> str:
    return f"{value:.{digits}f} [{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]"


def charts(suite: Suite) -> str:
    """Intervals, performance profiles, and one chart per game with its tolerance band."""
    tints = dict(zip(SCRIPTS, colors(len(SCRIPTS)), strict=True))
    means = []
    gaps = []
    for script in SCRIPTS:
        runs = normalised(suite[script])
        bounds = stats.interval(stats.bootstrap_iqm(runs, resamples=RESAMPLES))
        means.append(svg.Interval(script, tints[script], stats.set_iqm(runs), *bounds))
        gap, bounds = stats.optimality_gap(runs, resamples=RESAMPLES)
        gaps.append(svg.Interval(script, tints[script], gap, *bounds))
    score = "normalised score"
    out = [svg.interval_chart("Interquartile mean, 95% intervals", means, score)]
    out.append(svg.interval_chart("Optimality gap, 95% intervals (less is better)", gaps, score))
    out.append(
        svg.line_chart("Performance profiles", profiles(suite, tints), score, "fraction of runs")
    )
    for game in GAMES:
        lines = [tolerance_line(script, suite[script][game], tints[script]) for script in SCRIPTS]
        out.append(svg.line_chart(game, lines, "steps", "episodic return"))
    key = svg.legend([f"{script}.py" for script in SCRIPTS], list(tints.values()))
    return f'<div class="suite">{key}<div class="charts">{"".join(out)}</div></div>'


def profiles(suite: Suite, tints: dict[str, str]) -> list[svg.Line]:
    scores = {script: normalised(suite[script]) for script in SCRIPTS}
    highest = max(x.max() for runs in scores.values() for x in runs)
    levels = np.linspace(0, highest * 1.02, 121)
    lines = []
    for script, runs in scores.items():
        band = stats.profile_interval(runs, levels)
        lines.append(
            svg.Line(script, tints[script], levels, stats.profile(runs, levels), *band, steps=True)
        )
    return lines


def tolerance_line(script: str, group: Group, color: str) -> svg.Line:
    """The median run and the tolerance band of a game's learning curves."""
    curves = curves_of(group)
    end = min(curve[0][-1] for curve in curves)
    x = np.linspace(0, end, POINTS + 1)[1:]
    rows = np.sort([np.interp(x, curve[0], curve[2]) for curve in curves], axis=0)
    k, _ = stats.tolerance(len(rows))
    return svg.Line(script, color, x, np.median(rows, axis=0), rows[k - 1], rows[-k])


def game_table(suite: Suite) -> str:
    """Final returns by game: mean ± standard deviation, interquartile mean, tolerance interval."""
    lines = ["| game | script | mean ± std | interquartile mean | tolerance interval | seeds |"]
    lines.append("|-|-|-|-|-|-|")
    for game in GAMES:
        for script in SCRIPTS:
            group = suite[script][game]
            scores = np.sort(finals(group))
            bounds = stats.interval(stats.bootstrap_iqm([scores], resamples=RESAMPLES))
            k, share = stats.tolerance(len(scores))
            band = f"{scores[k - 1]:.1f} to {scores[-k]:.1f} ({share:.0%})"
            mean = figure(scores.mean(), scores.std(ddof=1) if len(scores) > 1 else None)
            middle = with_interval(float(stats.iqm(scores)), bounds, 1)
            cells = [f"`{game}`", f"`{script}.py`", mean, middle, band, str(group.seeds)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
