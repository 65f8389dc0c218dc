"""Committed results of our own runs, in benchmark/results: NAME.csv (curves), NAME.json (facts)."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from cleanrl_utils.analysis.tables import curve, find_runs, read_many, summary
from cleanrl_utils.errors import BadInput, missing_package, require

COMMITTED = Path(__file__).resolve().parent.parent.parent / "benchmark" / "results"
CURVE = ["step", "episodic_return", "seconds"]


def add(where: list[str], folder: Path = COMMITTED) -> list[str]:
    """Add finished runs to the committed results; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [run for place in where for run in find_runs(place) if run.finished]
    require(bool(runs), f"{', '.join(where)}: no finished run found")
    names = []
    for exp_name in sorted({run.record["args"]["exp_name"] for run in runs}):
        facts_path = folder / f"{exp_name}.json"
        curves_path = folder / f"{exp_name}.csv"
        facts = json.loads(facts_path.read_text()) if facts_path.exists() else []
        curves = pd.read_csv(curves_path) if curves_path.exists() else pd.DataFrame()
        for run in [run for run in runs if run.record["args"]["exp_name"] == exp_name]:
            fact = summary(run)
            facts = [old for old in facts if old["run"] != fact["run"]] + [fact]
            new = curve(run).assign(script=fact["script"], env_id=fact["env_id"], seed=fact["seed"])
            new = new.assign(run=fact["run"])[["script", "env_id", "seed", "run", *CURVE]]
            old = curves[curves.run != fact["run"]] if len(curves) else curves
            curves = pd.concat([old, new]) if len(old) else new
            names.append(fact["run"])
        facts.sort(key=lambda fact: (fact["env_id"], fact["seed"], fact["run"]))
        facts_path.write_text(json.dumps(facts, indent=1) + "\n")
        curves.sort_values(["env_id", "seed", "run", "step"]).to_csv(curves_path, index=False)
    return names


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
        runs = [run for place in where for run in find_runs(place)]
        require(bool(runs), f"{', '.join(where)}: no run found")
        data = read_many(runs)
    else:
        data = load(folder=folder)
        for column in data.columns.intersection(["versions", "settings"]):
            data[column] = data[column].map(json.dumps)  # runs have different packages and flags
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        data.to_parquet(path, index=False)
    except OSError as error:
        raise BadInput(f"--output {path}: cannot be written ({error})") from None
    return data
