"""Committed results of our own runs, in benchmark/results: NAME.csv (curves), NAME.json (facts)."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from cleanrl_utils.analysis import grouping
from cleanrl_utils.analysis.tables import (
    RunFolder,
    curve,
    fact_settings,
    find_all,
    groups,
    read_many,
    say,
    summary,
)
from cleanrl_utils.errors import BadInput, missing_package, require

COMMITTED = Path(__file__).resolve().parent.parent.parent / "benchmark" / "results"
CURVE = ["step", "episodic_return", "seconds"]
SHOWN = 4  # settings that the error for other settings names


def add(where: list[str], folder: Path = COMMITTED, replace: bool = False) -> list[str]:
    """Add finished runs to the committed results; returns their names.

    A run takes the place of an earlier one of its seed. All runs of a script on an environment have
    the same settings: `replace` removes those that have others, otherwise nothing is added.
    """
    in_clone = folder.parent.is_dir()  # an installed package has no benchmark/
    require(in_clone, f"{folder.parent}: no such folder; results are added in a clone of CleanRL")
    folder.mkdir(exist_ok=True)
    runs = [run for run in find_all(where) if run.finished]
    require(bool(runs), f"{', '.join(where)}: no finished run found")
    files: dict[str, tuple[list[dict], pd.DataFrame]] = {}
    for exp_name in sorted({run.record["args"]["exp_name"] for run in runs}):
        mine = [run for run in runs if run.record["args"]["exp_name"] == exp_name]
        files[exp_name] = merge(folder / f"{exp_name}.json", mine, replace)
    for exp_name, (facts, points) in files.items():  # only if all runs can be added
        (folder / f"{exp_name}.json").write_text(json.dumps(facts, indent=1) + "\n")
        points.to_csv(folder / f"{exp_name}.csv", index=False)
    kept = {fact["run"] for facts, _ in files.values() for fact in facts}
    names = [run.folder.name for run in runs if run.folder.name in kept]
    for facts, _ in files.values():
        note_code(facts, names)
    return names


def note_code(facts: list[dict], names: list[str]) -> None:
    """Print which added runs have uncommitted changes or are of other code than their group."""
    for fact in facts:
        if fact["run"] in names and fact["dirty"]:
            say(f"{fact['run']}: of code with changes that were not committed")
    for group in groups(pd.DataFrame(facts)):
        if group.runs.run.isin(names).any():
            for note in group.notes():
                say(note)


def merge(path: Path, runs: list[RunFolder], replace: bool) -> tuple[list[dict], pd.DataFrame]:
    """The facts and the curves of the results at `path` together with those of new runs."""
    facts = json.loads(path.read_text()) if path.exists() else []
    curves: dict[str, pd.DataFrame] = {}  # by name of the run
    if facts:
        curves |= dict(list(pd.read_csv(path.with_suffix(".csv")).groupby("run")))
    for run in runs:
        fact = summary(run)
        others = [old for old in facts if different_settings(old, fact)]
        require(replace or not others, f"{fact['run']}: {explain(fact, others)}")
        facts = [old for old in facts if old not in others and not same_seed(old, fact)]
        facts.append(fact)
        keys = {name: fact[name] for name in ("script", "env_id", "seed", "run")}
        curves[fact["run"]] = curve(run).assign(**keys)[[*keys, *CURVE]]
    facts.sort(key=lambda fact: (fact["env_id"], fact["seed"], fact["run"]))
    return facts, pd.concat([curves[fact["run"]] for fact in facts if fact["run"] in curves])


def same_seed(old: dict, new: dict) -> bool:
    return (old["env_id"], old["seed"]) == (new["env_id"], new["seed"])


def different_settings(old: dict, new: dict) -> bool:
    """Whether two runs on the same environment must not be averaged."""
    if old["env_id"] != new["env_id"]:
        return False
    old_key = grouping.settings_key(fact_settings(old))
    new_key = grouping.settings_key(fact_settings(new))
    return old_key != new_key


def explain(fact: dict, others: list[dict]) -> str:
    """Why a run cannot be added to others; empty if there are none."""
    if not others:
        return ""
    new = fact_settings(fact)
    old = fact_settings(others[0])
    values = []
    for name in grouping.differing([new, old]):
        now = new.get(name, grouping.ABSENT)
        before = old.get(name, grouping.ABSENT)
        values.append(f"{grouping.flag_name(name)} {now} instead of {before}")
    if len(values) > SHOWN:
        values = [*values[:SHOWN], f"and {len(values) - SHOWN} more"]
    there = f"{others[0]['run']}, also of {fact['exp_name']} on {fact['env_id']}"
    hint = "use --replace to remove runs with those, or another --exp-name"
    return f"differs from {there} ({', '.join(values)}); {hint}"


def load(exp_name: str | None = None, folder: Path = COMMITTED) -> pd.DataFrame:
    """The committed curves; each point has the facts of its run: commit, hardware, command."""
    paths = sorted(folder.glob(f"{exp_name or '*'}.json"))
    require(bool(paths), f"{folder}: no results of {exp_name or 'any script'}")
    tables = []
    for path in paths:
        facts = pd.DataFrame(json.loads(path.read_text()))
        facts = facts[[c for c in facts if c not in ("script", "env_id", "seed", "seconds")]]
        tables.append(pd.read_csv(path.with_suffix(".csv")).merge(facts, on="run"))
    return pd.concat(tables, ignore_index=True)


def facts(exp_name: str | None = None, folder: Path = COMMITTED) -> pd.DataFrame:
    """The committed facts, one row per run."""
    paths = sorted(folder.glob(f"{exp_name or '*'}.json"))
    return pd.DataFrame([fact for path in paths for fact in json.loads(path.read_text())])


def export(path: Path, where: Sequence[str] = (), folder: Path = COMMITTED) -> pd.DataFrame:
    """Write Parquet: the committed curves, or every logged value of the runs at `where`."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise missing_package("pyarrow", "plot") from None
    if where:
        runs = find_all(where)
        require(bool(runs), f"{', '.join(where)}: no run found")
        data = read_many(runs)
    else:
        data = load(folder=folder)
        for column in data.columns.intersection(["versions", "settings", "greedy_returns"]):
            data[column] = data[column].map(json.dumps, na_action="ignore")  # of different lengths
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        data.to_parquet(path, index=False)
    except OSError as error:
        raise BadInput(f"--output {path}: cannot be written ({error})") from None
    return data
