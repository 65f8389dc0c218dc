"""Algorithms for continuous control, compared after equal steps and after equal minutes."""

import statistics
from collections.abc import Iterable

from cleanrl_utils.pages.results import Curve, Group, charts_html, curves_of, figure

ALGORITHMS = {  # by script
    "ppo_continuous_action": "PPO",
    "td3_continuous_action": "TD3",
    "sac_continuous_action": "SAC",
    "crossq_continuous_action": "CrossQ",
    "droq_continuous_action": "DroQ",
    "tqc_continuous_action": "TQC",
    "simbav2_continuous_action": "SimBaV2",
    "fast_td3_continuous_action_jax": "FastTD3",
}
STEPS, MINUTES = 0, 1  # columns of a curve
Entrants = dict[str, Group]  # by script
NOTHING = "No two of these algorithms have results on the same environment yet."


def contests(groups: Iterable[Group]) -> dict[str, Entrants]:
    """For each environment on which two algorithms or more have run, the longest runs of each.

    Runs with a name of their own (--exp-name) have other settings and are left out."""
    found: dict[str, Entrants] = {}
    for group in groups:
        own_name = group.name != group.script
        if group.script in ALGORITHMS and not own_name and curves_of(group):
            entrants = found.setdefault(group.env_id, {})
            if group.script not in entrants or group.steps > entrants[group.script].steps:
                entrants[group.script] = group
    return {env_id: found[env_id] for env_id in sorted(found) if len(found[env_id]) > 1}


def return_at(curve: Curve, axis: int, limit: float) -> float:
    """The last return that a run logged at or before `limit`; its first one if there is none."""
    before = [value for x, value in zip(curve[axis], curve[-1], strict=True) if x <= limit]
    return before[-1] if before else curve[-1][0]


def score(group: Group, axis: int, limit: float) -> str:
    """Mean ± standard deviation over seeds of the return at `limit`."""
    values = [return_at(curve, axis, limit) for curve in curves_of(group)]
    return figure(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def common_limit(entrants: Entrants, axis: int) -> float:
    """The largest number of steps or minutes that all runs of an environment reach."""
    return min(curve[axis][-1] for group in entrants.values() for curve in curves_of(group))


def table(found: dict[str, Entrants], axis: int) -> str:
    """One row per environment, one column per algorithm that has a result."""
    shown = [x for x in ALGORITHMS if any(x in entrants for entrants in found.values())]
    unit = "steps" if axis == STEPS else "minutes"
    rows = [f"| environment | {unit} | {' | '.join(ALGORITHMS[x] for x in shown)} |"]
    rows.append("|-" * (2 + len(shown)) + "|")
    for env_id, entrants in found.items():
        limit = common_limit(entrants, axis)
        cells = [score(entrants[x], axis, limit) if x in entrants else "" for x in shown]
        at = f"{limit:,.0f}" if axis == STEPS else f"{limit:,.1f}"
        rows.append(f"| `{env_id}` | {at} | {' | '.join(cells)} |")
    return "\n".join(rows)


def hardware(found: dict[str, Entrants]) -> str:
    """The hardware of each algorithm's runs: minutes depend on it."""
    lines = []
    for script, name in ALGORITHMS.items():
        mine = [entrants[script] for entrants in found.values() if script in entrants]
        machines = sorted({x for group in mine for x in group.column("hardware")})
        if machines:
            lines.append(f"- {name}: {'; '.join(machines)}")
    return "\n".join(lines)


def chart(found: dict[str, Entrants]) -> str:
    """One interactive figure of all contests, over steps or minutes."""
    groups = [group for entrants in found.values() for group in entrants.values()]
    return charts_html(groups, {}, labels=ALGORITHMS)


def missing(found: dict[str, Entrants]) -> str:
    """A sentence that names the algorithms without a result on these environments."""
    there = {script for entrants in found.values() for script in entrants}
    names = [name for script, name in ALGORITHMS.items() if script not in there]
    return f"Not yet here: {', '.join(names)}." if names else ""
