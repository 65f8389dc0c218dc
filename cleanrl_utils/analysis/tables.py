"""Tables of runs: find runs, read their metrics, summarise each, and average over seeds."""

import os
import shlex
import sys
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
FINAL = "eval/episodic_"  # tags of the final evaluation, which is no training
LAST = 100  # episodes that a run's final return is the mean of
POINTS = 100  # per curve
KEY_VERSIONS = {"python", "torch", "jax", "gymnasium", "numpy", "ale-py", "envpool", "mujoco"}
KEY_VERSIONS |= {"brax", "gymnax", "mujoco-mjx", "playground"}


@dataclass
class RunFolder:
    """A run folder and its record."""

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
    """Every run at or below a folder, oldest first.

    Folders whose names begin with a dot are skipped: the trials of the tuner, in runs/.tuner, are
    found only if `where` is such a folder.
    """
    found = run_folder.find_records(where)
    return [RunFolder(folder, record) for folder, record in found]


def find_all(places: Sequence[str]) -> list[RunFolder]:
    """Every run at or below several folders, oldest first, each once; those without metrics are
    left out."""
    for place in places:
        require(Path(place).is_dir(), f"{place}: no such folder")
    every = [run for place in places for run in find_runs(place)]
    found = []
    for run in {run.folder.resolve(): run for run in every}.values():
        if run_folder.has_metrics(run.folder):
            found.append(run)
        else:
            say(f"{run.folder} left out: it has no {run_folder.METRICS}")
    return sorted(found, key=lambda run: run_folder.by_start(run.folder, run.record))


def say(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def read_metrics(folder: str | Path) -> pd.DataFrame:
    """All logged values of a run: columns step, seconds, tag, value."""
    return run_folder.read_metrics(folder)


def read_all(runs: Sequence[RunFolder]) -> Iterable[pd.DataFrame]:
    """The metrics of many runs, in their order; read in threads, as the parser releases the GIL."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        yield from pool.map(RunFolder.metrics, runs)


def read_many(runs: Sequence[RunFolder]) -> pd.DataFrame:
    """All logged values of many runs; the first columns are run, exp_name, env_id, seed."""
    require(bool(runs), "no runs to read")
    tables = list(read_all(runs))
    tags = sorted(set().union(*(table.tag.cat.categories for table in tables)))
    counts = []
    for table in tables:  # the same categories everywhere, so that concat keeps them
        table["tag"] = table.tag.cat.set_categories(tags)
        counts.append(len(table))
    which = np.repeat(np.arange(len(runs)), counts)
    labels = {
        "run": [run.folder.name for run in runs],
        "exp_name": [run.record["args"].get("exp_name") for run in runs],
        "env_id": [run.record["args"].get("env_id") for run in runs],
    }
    table = pd.concat(tables, ignore_index=True)
    for i, (name, values) in enumerate(labels.items()):
        table.insert(i, name, pd.Categorical(pd.Series(values).take(which)))
    table.insert(3, "seed", np.array([run.record["args"].get("seed", 0) for run in runs])[which])
    return table


# -- one run -----------------------------------------------------------------------------------


def summary(run: RunFolder, tag: str = RETURN) -> dict[str, Any]:
    """A row about a run: name, settings, time, returns, and where it ran."""
    metrics = run.metrics()
    returns = metrics.loc[metrics.tag == tag, "value"].to_numpy()
    trained = metrics[~metrics.tag.str.startswith(FINAL)]
    record = run.record
    args = record["args"]
    hardware = record.get("hardware", {})
    git = record.get("git", {})
    library = record.get("library", {})  # if it is of another checkout than the script
    versions = record.get("versions", {})
    greedy = run_folder.read_summary(run.folder).get("eval_returns", [])
    return {
        "script": record["script"],
        "exp_name": args["exp_name"],
        "env_id": args.get("env_id", ""),
        "seed": args["seed"],
        "steps": int(trained.step.max()) if len(trained) else 0,
        "seconds": round(float(trained.seconds.max()), 1) if len(trained) else 0.0,
        "episodes": int(metrics.tag.str.startswith(tag).sum()),  # counts each player's
        "final_return": round(float(returns[-LAST:].mean()), 3) if len(returns) else np.nan,
        "best_return": round(best_window(returns), 3) if len(returns) else np.nan,
        "greedy_returns": [round(float(value), 3) for value in greedy],  # after training
        "commit": git.get("commit", "")[:12],
        "dirty": git.get("dirty", False) or library.get("dirty", False),
        "code": grouping.code_version(record),
        "hardware": "{device} ({cpu}, {cores} cores)".format(**hardware) if hardware else "",
        "command": command(record),
        "settings": run.settings,
        "tags": ",".join(record.get("tags", [])),
        "versions": {k: v for k, v in versions.items() if k.lower() in KEY_VERSIONS},
        "run": run.folder.name,
    }


def command(record: dict[str, Any]) -> str:
    """The command of a run, without --runs-dir."""
    flags = run_folder.drop_flags(record["command"][1:], {"runs_dir"})
    return shlex.join([*run_folder.starter(record), run_folder.recorded_script(record), *flags])


def best_window(returns: np.ndarray) -> float:
    """The highest mean return of LAST consecutive episodes."""
    width = min(LAST, len(returns))
    sums = np.cumsum(np.concatenate([[0.0], returns]))
    return float((sums[width:] - sums[:-width]).max() / width)


def curve(run: RunFolder, tag: str = RETURN, points: int = POINTS) -> pd.DataFrame:
    """A run's learning curve: mean value and last time in each of `points` equal spans of steps."""
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
    """Runs that differ only in their seed, each seed once."""

    exp_name: str
    env_id: str
    finished: bool
    settings: dict[str, str]
    runs: pd.DataFrame
    superseded: int  # earlier runs of the same seeds
    superseded_other_code: bool

    @property
    def name(self) -> str:
        return f"{self.exp_name} on {self.env_id}"

    def final_return(self) -> str:
        """Mean ± sample standard deviation over seeds, and how many seeds finished no episode."""
        known = self.runs.final_return.dropna()
        no_episode = int((self.runs.episodes == 0).sum())
        if no_episode == len(self.runs):
            return "no finished episode"
        text = stats.mean_and_std(known) if len(known) else "-"
        if no_episode:
            text += f" ({no_episode} of {count(len(self.runs), 'seed')} finished no episode)"
        return text

    def best_return(self) -> str:
        known = self.runs.best_return.dropna()
        return f"{known.mean():.2f}" if len(known) else "-"

    def steps(self) -> str:
        shortest = self.runs.steps.min()
        longest = self.runs.steps.max()
        return f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"

    def notes(self) -> list[str]:
        """Notes below the table: runs that were not counted, different versions of the code."""
        found = []
        if self.superseded:
            runs = count(self.superseded, "earlier run")
            other = ", of other code" if self.superseded_other_code else ""
            found.append(f"{self.name}: {runs} of the same seed and settings not counted{other}")
        for run in self.runs.itertuples():
            if grouping.is_mixed(run.code):
                found.append(f"{self.name}: seed {run.seed} was resumed with other code")
        codes = self.runs.groupby("code").seed.apply(list)
        if len(codes) > 1:
            seeds = (f"{code} (seed {', '.join(map(str, x))})" for code, x in codes.items())
            found.append(f"{self.name}: its runs are of different code: {'; '.join(seeds)}")
        return found


def fact_settings(fact: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a row about a run; from its command in older results, which lack them."""
    if isinstance(fact.get("settings"), Mapping):
        return dict(fact["settings"])
    return grouping.command_settings(fact["command"], fact["script"], fact["steps"])


def groups(facts: pd.DataFrame) -> list[Group]:
    """Group rows about runs, oldest first, by their settings; the newest run of a seed counts."""
    facts = facts.copy()
    facts["finished"] = facts.get("finished", True)
    facts["episodes"] = facts.get("episodes", facts.final_return.notna().astype(int))
    if "code" not in facts:
        facts["code"] = None
    by_commit = facts.commit + facts.dirty.map({True: "*", False: ""})
    facts["code"] = facts.code.where(facts.code.notna(), by_commit)
    facts["set"] = [fact_settings(fact) for fact in facts.to_dict("records")]
    facts["key"] = facts["set"].map(grouping.settings_key)
    keys = ["exp_name", "env_id", "finished", "key"]
    found = []
    for (exp_name, env_id, finished, _), mine in facts.groupby(keys, sort=False):
        runs = mine.drop_duplicates("seed", keep="last")
        earlier = len(mine) - len(runs)
        other = not set(mine.code) <= set(runs.code)
        settings = runs["set"].iloc[0]
        found.append(Group(exp_name, env_id, bool(finished), settings, runs, earlier, other))
    return sorted(found, key=lambda group: (group.exp_name, group.env_id, not group.finished))


def what_differs(group: Group, others: Sequence[Group]) -> str:
    """The settings in which a group differs from others of the same name and environment."""
    different = grouping.differing([other.settings for other in others])
    values = [
        f"{grouping.flag_name(n)} {group.settings.get(n, grouping.ABSENT)}" for n in different
    ]
    if not group.finished:
        values.append("not finished")
    return ", ".join(values)


def table(facts: pd.DataFrame) -> str:
    """Final returns over seeds as a Markdown table, a row per group of settings, then notes."""
    every = groups(facts)
    rows = []
    notes = []
    for group in every:
        others = [x for x in every if (x.exp_name, x.env_id) == (group.exp_name, group.env_id)]
        minutes = f"{group.runs.seconds.median() / 60:.1f}"
        seeds = str(len(group.runs))
        scores = [group.final_return(), group.best_return()]
        cells = [group.exp_name, group.env_id, *scores, seeds, group.steps(), minutes]
        rows.append([*cells, what_differs(group, others)])
        notes += group.notes()
    head = ["script", "environment", "return", "best", "seeds", "steps", "minutes", "settings"]
    width = len(head) if any(row[-1] for row in rows) else len(head) - 1
    lines = [markdown_row(cells[:width]) for cells in [head, ["-"] * len(head), *rows]]
    if notes:
        lines += ["", *(f"note: {note}" for note in notes)]
    return "\n".join(lines)


def markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
