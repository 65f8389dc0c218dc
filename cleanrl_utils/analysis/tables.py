"""Runs as tables: find them, read their metrics, summarise each one, and show groups of seeds."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cleanrl_utils.analysis import grouping, stats
from cleanrl_utils.analysis.grouping import count
from cleanrl_utils.errors import require
from cleanrl_utils.running import folder as run_folder

RETURN = "charts/episodic_return"
LAST = 100  # episodes of a run's final return
POINTS = 100  # points of a curve
KEY_VERSIONS = {"python", "torch", "jax", "gymnasium", "numpy", "ale-py", "envpool", "mujoco"}
KEY_VERSIONS |= {"brax", "gymnax"}


@dataclass
class RunFolder:
    folder: Path
    record: dict[str, Any]

    @property
    def finished(self) -> bool:
        return run_folder.is_finished(self.folder)

    @property
    def settings(self) -> dict[str, str]:
        """The settings that can move its learning curve."""
        return grouping.record_settings(self.record, run_folder.read_summary(self.folder))

    def metrics(self) -> pd.DataFrame:
        return read_metrics(self.folder)


def find_runs(where: str | Path) -> list[RunFolder]:
    """Every run at or below a folder, oldest first; trials of the tuner only if `where` is theirs.

    Folders whose names begin with a dot, such as runs/.tuner, are skipped.
    """
    found = run_folder.find_records(where)
    return [RunFolder(folder, record) for folder, record in found]


def read_metrics(folder: str | Path) -> pd.DataFrame:
    """All logged values of a run: columns step, seconds, tag, value."""
    return run_folder.read_metrics(folder)


def read_all(runs: Sequence[RunFolder]) -> Iterable[pd.DataFrame]:
    """The metrics of many runs, in their order, read at once: the parser needs no Python lock."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        yield from pool.map(RunFolder.metrics, runs)


def read_many(runs: Sequence[RunFolder]) -> pd.DataFrame:
    """All logged values of many runs; before the columns of one: run, exp_name, env_id, seed."""
    require(bool(runs), "no runs to read")
    tables = list(read_all(runs))
    tags = sorted(set().union(*(table.tag.cat.categories for table in tables)))
    counts = []
    for table in tables:  # the same categories, so that they stay numbers in the large table
        table["tag"] = table.tag.cat.set_categories(tags)
        counts.append(len(table))
    which = np.repeat(np.arange(len(runs)), counts)
    about = {"run": [run.folder.name for run in runs]}
    about |= {k: [run.record["args"].get(k) for run in runs] for k in ("exp_name", "env_id")}
    table = pd.concat(tables, ignore_index=True)
    for i, (name, values) in enumerate(about.items()):
        table.insert(i, name, pd.Categorical(pd.Series(values).take(which)))
    table.insert(3, "seed", np.array([run.record["args"].get("seed", 0) for run in runs])[which])
    return table


# -- one run -----------------------------------------------------------------------------------


def summary(run: RunFolder, tag: str = RETURN) -> dict[str, Any]:
    """One row about a run: its name and settings, how long it took, its returns."""
    metrics = run.metrics()
    returns = metrics.loc[metrics.tag == tag, "value"].to_numpy()
    record = run.record
    args = record["args"]
    hardware = record.get("hardware", {})
    git = record.get("git", {})
    versions = record.get("versions", {})
    return {
        "script": record["script"],
        "exp_name": args["exp_name"],
        "env_id": args.get("env_id", ""),
        "seed": args["seed"],
        "steps": int(metrics.step.max()) if len(metrics) else 0,
        "seconds": round(float(metrics.seconds.max()), 1) if len(metrics) else 0.0,
        "episodes": int(metrics.tag.str.startswith(tag).sum()),  # of each player, where several
        "final_return": round(float(returns[-LAST:].mean()), 3) if len(returns) else np.nan,
        "best_return": round(best_window(returns), 3) if len(returns) else np.nan,
        "commit": git.get("commit", "")[:12],
        "dirty": git.get("dirty", False),
        "code": grouping.code_version(record),
        "hardware": "{device} ({cpu}, {cores} cores)".format(**hardware) if hardware else "",
        "command": command(record),
        "settings": run.settings,
        "tags": ",".join(record.get("tags", [])),
        "versions": {k: v for k, v in versions.items() if k.lower() in KEY_VERSIONS},
        "run": run.folder.name,
    }


def command(record: dict[str, Any]) -> str:
    """The command of a run, without the folder that it was kept in."""
    words = " ".join(["python", f"cleanrl/{record['script']}.py", *record["command"][1:]])
    return re.sub(r" --runs[-_]dir[ =]\S+", "", words)


def best_window(returns: np.ndarray) -> float:
    """The best mean of LAST episodes in a row."""
    width = min(LAST, len(returns))
    sums = np.cumsum(np.concatenate([[0.0], returns]))
    return float((sums[width:] - sums[:-width]).max() / width)


def curve(run: RunFolder, tag: str = RETURN, points: int = POINTS) -> pd.DataFrame:
    """A run's curve in `points` equal spans of steps: mean value and last time of each."""
    metrics = run.metrics()
    total = metrics.step.max()
    rows = metrics[metrics.tag == tag]
    span = np.ceil(rows.step / total * points).clip(1, points).astype(int)
    means = rows.groupby(span).agg(value=("value", "mean"), seconds=("seconds", "max"))
    return pd.DataFrame(
        {
            "step": (means.index.to_numpy() * total / points).astype(int),
            "episodic_return": means.value.round(4).to_numpy(),
            "seconds": means.seconds.round(1).to_numpy(),
        }
    )


# -- groups of seeds ---------------------------------------------------------------------------


@dataclass
class Group:
    """Runs that differ by their seed alone, each seed once."""

    exp_name: str
    env_id: str
    finished: bool
    settings: dict[str, str]
    runs: pd.DataFrame
    superseded: int  # earlier runs of the same seeds

    @property
    def name(self) -> str:
        return f"{self.exp_name} on {self.env_id}"

    def final_return(self) -> str:
        """Mean ± sample standard deviation over seeds; says how many finished no episode."""
        known = self.runs.final_return.dropna()
        silent = int((self.runs.episodes == 0).sum())
        if silent == len(self.runs):
            return "no finished episode"
        text = stats.mean_and_std(known) if len(known) else "-"
        missing = f" ({silent} of {count(len(self.runs), 'seed')} finished no episode)"
        return text + missing * bool(silent)

    def best_return(self) -> str:
        known = self.runs.best_return.dropna()
        return f"{known.mean():.2f}" if len(known) else "-"

    def steps(self) -> str:
        first, last = self.runs.steps.min(), self.runs.steps.max()
        return f"{last:,}" if first == last else f"{first:,} to {last:,}"

    def notes(self) -> list[str]:
        """What a reader of the row has to know."""
        found = []
        if self.superseded:
            runs = count(self.superseded, "earlier run")
            found.append(f"{self.name}: {runs} of the same seed and settings not counted")
        codes = self.runs.groupby("code").seed.apply(list)
        if len(codes) > 1:
            seeds = (f"{code} (seed {', '.join(map(str, x))})" for code, x in codes.items())
            found.append(f"{self.name}: its runs are of different code: {'; '.join(seeds)}")
        return found


def fact_settings(fact: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a row about a run; earlier results have its command alone."""
    if isinstance(fact.get("settings"), Mapping):
        return dict(fact["settings"])
    return grouping.command_settings(fact["command"], fact["script"], fact["steps"])


def groups(facts: pd.DataFrame) -> list[Group]:
    """Rows about runs, oldest first, grouped by what was set; the newest run of a seed counts."""
    facts = facts.copy()
    facts["finished"] = facts.get("finished", True)
    facts["episodes"] = facts.get("episodes", facts.final_return.notna().astype(int))
    if "code" not in facts:
        facts["code"] = None
    by_commit = facts.commit + facts.dirty.map({True: "*", False: ""})
    facts["code"] = facts.code.where(facts.code.notna(), by_commit)
    facts["set"] = [fact_settings(fact) for fact in facts.to_dict("records")]
    facts["key"] = facts["set"].map(grouping.same)
    keys = ["exp_name", "env_id", "finished", "key"]
    found = []
    for (exp_name, env_id, finished, _), mine in facts.groupby(keys, sort=False):
        runs = mine.drop_duplicates("seed", keep="last")
        earlier = len(mine) - len(runs)
        found.append(Group(exp_name, env_id, bool(finished), runs["set"].iloc[0], runs, earlier))
    return sorted(found, key=lambda group: (group.exp_name, group.env_id, not group.finished))


def what_differs(group: Group, others: Sequence[Group]) -> str:
    """How a group differs from the others of the same name and environment."""
    different = grouping.differing([other.settings for other in others])
    values = [f"{grouping.spelt(n)} {group.settings.get(n, grouping.ABSENT)}" for n in different]
    return ", ".join(values + ["not finished"] * (not group.finished))


def table(facts: pd.DataFrame) -> str:
    """Final returns over seeds as Markdown: a row for each group of settings, then notes."""
    every = groups(facts)
    rows = []
    notes = []
    for group in every:
        others = [x for x in every if (x.exp_name, x.env_id) == (group.exp_name, group.env_id)]
        minutes = f"{group.runs.seconds.mean() / 60:.1f}"
        seeds = str(len(group.runs))
        scores = [group.final_return(), group.best_return()]
        cells = [group.exp_name, group.env_id, *scores, seeds, group.steps(), minutes]
        rows.append([*cells, what_differs(group, others)])
        notes += group.notes()
    head = ["script", "environment", "return", "best", "seeds", "steps", "minutes", "settings"]
    width = len(head) if any(row[-1] for row in rows) else len(head) - 1
    lines = [markdown_row(cells[:width]) for cells in [head, ["-"] * len(head), *rows]]
    return "\n".join([*lines, *([""] if notes else []), *(f"note: {note}" for note in notes)])


def markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
