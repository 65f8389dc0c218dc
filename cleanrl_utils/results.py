"""Read runs as tables, and keep compact curves of our own runs in benchmark/results.

python -m cleanrl_utils.results show runs           # one line per run
python -m cleanrl_utils.results add runs            # finished runs into benchmark/results
python -m cleanrl_utils.results plot runs/NAME      # its learning curve as a picture
python -m cleanrl_utils.results export              # benchmark/results as one Parquet file
python -m cleanrl_utils.results export runs         # every logged value of all runs as Parquet

from cleanrl_utils import results
results.load()                                # committed curves, one row per point
results.read_metrics("runs/NAME")             # every logged value of one run
results.read_many(results.find_runs("runs"))  # ... of many, with the run each belongs to
"""

import argparse
import json
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cleanrl_utils.errors import BadInput, missing_package, require
from cleanrl_utils.running.folder import is_record

COMMITTED = Path(__file__).resolve().parent.parent / "benchmark" / "results"
POINTS = 100  # of a committed curve
RETURN = "charts/episodic_return"
LAST = 100  # episodes that count for a run's final return


@dataclass
class RunFolder:
    folder: Path
    record: dict[str, Any]

    @property
    def finished(self) -> bool:
        return (self.folder / "finished.json").exists()

    def metrics(self) -> pd.DataFrame:
        return read_metrics(self.folder)


def find_runs(where: str | Path) -> list[RunFolder]:
    """Every run at or below a folder, oldest first."""
    found = []
    for path in Path(where).rglob("run.json"):
        try:
            record = json.loads(path.read_text())
        except ValueError:
            raise BadInput(f"{path}: not readable as JSON") from None
        if is_record(record):
            found.append(RunFolder(path.parent, record))
    return sorted(found, key=lambda run: (run.record.get("started", ""), run.folder.name))


def read_metrics(folder: str | Path) -> pd.DataFrame:
    """All logged values of a run: columns step, seconds, tag, value."""
    path = Path(folder) / "metrics.csv"
    require(path.exists(), f"{path}: no such file")
    table = pd.read_csv(path, dtype={"tag": "category"}, on_bad_lines="skip")
    return table.dropna()  # a run that is being written may end in half a line


def read_all(runs: Sequence[RunFolder]) -> Iterable[pd.DataFrame]:
    """The metrics of many runs, in their order, read at once: the parser needs no Python lock."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        yield from pool.map(RunFolder.metrics, runs)


def read_many(runs: Sequence[RunFolder]) -> pd.DataFrame:
    """All logged values of many runs; before the columns of one: run, exp_name, env_id, seed."""
    require(bool(runs), "no runs to read")
    tables, counts = list(read_all(runs)), []
    tags = sorted(set().union(*(table.tag.cat.categories for table in tables)))
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


def summary(run: RunFolder, tag: str = RETURN) -> dict[str, Any]:
    """One row about a run: who it is, how long it took, how it ended."""
    metrics = run.metrics()
    returns = metrics.loc[metrics.tag == tag, "value"].to_numpy()
    args, record = run.record["args"], run.record
    hardware = record.get("hardware", {})
    return {
        "script": record["script"],
        "exp_name": args["exp_name"],
        "env_id": args.get("env_id", ""),
        "seed": args["seed"],
        "steps": int(metrics.step.max()) if len(metrics) else 0,
        "seconds": round(float(metrics.seconds.max()), 1) if len(metrics) else 0.0,
        "final_return": round(float(returns[-LAST:].mean()), 3) if len(returns) else np.nan,
        "best_return": round(best_window(returns), 3) if len(returns) else np.nan,
        "commit": record.get("git", {}).get("commit", "")[:12],
        "dirty": record.get("git", {}).get("dirty", False),
        "hardware": "{device} ({cpu}, {cores} cores)".format(**hardware) if hardware else "",
        "command": command(record),
        "tags": ",".join(record.get("tags", [])),
        "versions": {
            k: v for k, v in record.get("versions", {}).items() if k.lower() in KEY_VERSIONS
        },
        "run": run.folder.name,
    }


def command(record: dict[str, Any]) -> str:
    """How to do a run again, wherever it was kept."""
    words = " ".join(["python", f"cleanrl/{record['script']}.py", *record["command"][1:]])
    return re.sub(r" --runs[-_]dir[ =]\S+", "", words)


KEY_VERSIONS = {
    "python",
    "torch",
    "jax",
    "gymnasium",
    "numpy",
    "ale-py",
    "envpool",
    "mujoco",
    "brax",
    "gymnax",
}


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


def add(where: list[str], folder: Path = COMMITTED) -> list[str]:
    """Put finished runs into the committed results: NAME.csv (curves) and NAME.json (facts)."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [run for place in where for run in find_runs(place) if run.finished]
    require(bool(runs), f"{', '.join(where)}: no finished run there")
    names = []
    for exp_name in sorted({run.record["args"]["exp_name"] for run in runs}):
        facts_path, curves_path = folder / f"{exp_name}.json", folder / f"{exp_name}.csv"
        facts = json.loads(facts_path.read_text()) if facts_path.exists() else []
        curves = pd.read_csv(curves_path) if curves_path.exists() else pd.DataFrame()
        mine = [run for run in runs if run.record["args"]["exp_name"] == exp_name]
        for run in mine:
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


CURVE = ["step", "episodic_return", "seconds"]


def load(exp_name: str | None = None, folder: Path = COMMITTED) -> pd.DataFrame:
    """The committed curves, each point with the facts of its run: commit, hardware, command."""
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
        require(bool(runs), f"{', '.join(where)}: no run there")
        data = read_many(runs)
    else:
        data = load(folder=folder)
        data["versions"] = data.versions.map(json.dumps)  # runs have different packages
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        data.to_parquet(path, index=False)
    except OSError as error:
        raise BadInput(f"--output {path}: cannot be written ({error})") from None
    return data


def table(facts: pd.DataFrame) -> str:
    """Mean ± std of the final return over seeds, as Markdown."""
    lines = [
        "| script | environment | return | best | seeds | steps | minutes |",
        "|-|-|-|-|-|-|-|",
    ]
    for (name, env_id, steps), group in facts.groupby(["exp_name", "env_id", "steps"]):
        final, best = group.final_return, group.best_return
        lines.append(
            f"| {name} | {env_id} | {final.mean():.2f} ± {final.std(ddof=0):.2f}"
            f" | {best.mean():.2f} | {len(group)} | {steps:,} | {group.seconds.mean() / 60:.1f} |"
        )
    return "\n".join(lines)


def plot(run: RunFolder, path: Path) -> Path:
    """The run's learning curve: every episode as a dot, the mean of the last 20 as a line."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

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
    figure.savefig(path)
    plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["show", "add", "plot", "export"])
    parser.add_argument(
        "where", nargs="*", help="folders of runs, or folders that hold such folders"
    )
    parser.add_argument("--output", default="results.parquet", help="file that export writes")
    options = parser.parse_args()
    if options.action == "export":
        data = export(Path(options.output), options.where)
        print(f"{options.output}: {len(data):,} rows")
        return
    require(bool(options.where), f"{options.action} needs a folder, e.g. runs")
    if options.action == "add":
        names = add(options.where)
        print(f"{len(names)} runs added to {COMMITTED.parent.name}/{COMMITTED.name}")
        return
    runs = [run for place in options.where for run in find_runs(place)]
    require(bool(runs), f"{', '.join(options.where)}: no run there")
    if options.action == "plot":
        for run in runs:
            print(plot(run, run.folder / "curve.png"))
    else:
        print(table(pd.DataFrame([summary(run) for run in runs])))


if __name__ == "__main__":
    main()
