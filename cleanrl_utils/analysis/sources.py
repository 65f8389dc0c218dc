"""Sources of runs to compare: run folders, committed results, Weights & Biases."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cleanrl_utils.analysis import committed, grouping, tables
from cleanrl_utils.errors import BadInput, require

COMMITTED_RESULTS = "committed results"


@dataclass
class Curve:
    """Values of one metric of one run, in the order of steps."""

    steps: np.ndarray
    seconds: np.ndarray
    values: np.ndarray


@dataclass
class OneRun:
    """A run from any source."""

    name: str
    source: str
    exp_name: str
    env_id: str
    seed: int
    commit: str
    tags: tuple[str, ...]
    settings: dict[str, str]  # those that can move a learning curve
    code: str = ""  # version of the code
    all_settings: bool = True  # False if only the flags of the command are known
    finished: bool = True
    curves: dict[str, Curve] = field(default_factory=dict)
    final: float | None = None  # the score, if the source has it
    folder: tables.RunFolder | None = None  # to read the curves from

    def score(self, metric: str, window: int) -> float:
        if self.final is not None:
            return self.final
        return float(self.curves[metric].values[-window:].mean())

    def last_step(self) -> float:
        return max(curve.steps[-1] for curve in self.curves.values())


def runs_of_folder(folder: str) -> list[OneRun]:
    """The runs of a folder; `read_curves` reads the metrics of those that are compared."""
    require(Path(folder).is_dir(), f"--runs-dir {folder}: no such folder")
    found = []
    for run in tables.find_all([folder]):
        record = run.record
        args = record["args"]
        found.append(
            OneRun(
                name=run.folder.name,
                source=folder,
                exp_name=args["exp_name"],
                env_id=args.get("env_id", ""),
                seed=args["seed"],
                commit=record.get("git", {}).get("commit", ""),
                tags=tuple(record.get("tags", [])),
                settings=run.settings,
                code=grouping.code_version(record),
                finished=run.finished,
                folder=run,
            )
        )
    return found


def read_curves(runs: Iterable[OneRun]) -> None:
    """Read the metrics of the runs that have a folder."""
    mine = [run for run in runs if run.folder is not None]
    folders = [run.folder for run in mine if run.folder is not None]
    for run, table in zip(mine, tables.read_all(folders), strict=True):
        codes = table.tag.cat.codes.to_numpy()
        order = np.argsort(codes, kind="stable")
        columns = [table[name].to_numpy()[order] for name in ("step", "seconds", "value")]
        edges = np.searchsorted(codes[order], np.arange(len(table.tag.cat.categories) + 1))
        for tag, start, end in zip(table.tag.cat.categories, edges, edges[1:], strict=False):
            if end > start:
                run.curves[tag] = Curve(*(column[start:end] for column in columns))


def runs_of_results(folder: str) -> list[OneRun]:
    """Committed results; curves have few points, scores are of the last 100 episodes."""
    place = Path(folder) if folder else committed.COMMITTED
    curves = {}  # by name of the run; a run without a finished episode has none
    for name, rows in committed.load(folder=place).groupby("run"):
        columns = (rows[column].to_numpy() for column in ("step", "seconds", "episodic_return"))
        curves[name] = {tables.RETURN: Curve(*columns)}
    found = []
    for fact in committed.facts(folder=place).to_dict("records"):
        known = isinstance(fact.get("code"), str)
        found.append(
            OneRun(
                name=fact["run"],
                source=COMMITTED_RESULTS,
                exp_name=fact["exp_name"],
                env_id=fact["env_id"],
                seed=int(fact["seed"]),
                commit=fact["commit"],
                tags=tuple(tag for tag in str(fact["tags"]).split(",") if tag),
                settings=tables.fact_settings(fact),
                code=fact["code"] if known else fact["commit"] + "*" * bool(fact["dirty"]),
                all_settings=isinstance(fact.get("settings"), dict),
                curves=curves.get(fact["run"], {}),
                final=float(fact["final_return"]),
            )
        )
    return found


def runs_of_wandb(
    project: str,
    entity: str,
    metric: str,
    exp_names: Sequence[str] = (),
    env_ids: Sequence[str] = (),
    tags: Sequence[str] = (),
    scan_history: bool = False,
) -> list[OneRun]:
    """The runs of a Weights & Biases project with these experiments, tasks and tags."""
    try:
        import wandb
    except ImportError:
        raise BadInput("--wandb-project-name needs the package wandb: pip install wandb") from None
    wanted = {"config.exp_name": exp_names, "config.env_id": env_ids, "tags": tags}
    conditions = [{key: {"$in": list(values)}} for key, values in wanted.items() if values]
    filters = {"$and": conditions} if conditions else {}
    path = wandb_path(project, entity)
    found = []
    try:
        for run in wandb.Api(timeout=30).runs(path, filters=filters):
            if "exp_name" in run.config and "env_id" in run.config:
                found.append(run_of_wandb(run, path, metric, scan_history))
    except Exception as error:  # no account, no network, no such project, ...
        text = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(f"--wandb-project-name {path}: cannot be read ({text[:200]})") from None
    return found


def run_of_wandb(run: Any, path: str, metric: str, scan_history: bool) -> OneRun:
    """A run of the project at `path`, with its curve of one metric if it logged any value."""
    keys = [metric, "global_step", "_runtime"]
    if scan_history:
        rows = run.scan_history(keys=keys)
    else:
        rows = run.history(samples=10_000, keys=keys, pandas=False)
    points = np.array([[row[key] for key in keys] for row in rows], float).reshape(-1, 3)
    curves = {}
    if len(points):
        values, steps, seconds = points.T
        curves[metric] = Curve(steps, seconds, values)
    config = {name: value for name, value in run.config.items() if not name.startswith("_")}
    return OneRun(
        name=run.name,
        source=path,
        exp_name=config["exp_name"],
        env_id=config["env_id"],
        seed=int(config.get("seed", 0)),
        commit=run.commit or "",
        tags=tuple(run.tags),
        settings=grouping.compared_settings(config),
        code=(run.commit or "")[:12],
        finished=run.state == "finished",
        curves=curves,
    )


def wandb_path(project: str, entity: str) -> str:
    return "/".join(filter(None, (entity, project)))
