"""Tables of runs, and the committed results of our own runs in benchmark/results.

    python -m cleanrl_utils.results show runs        # a table, one row per group of equal settings
    python -m cleanrl_utils.results add runs         # add finished runs to benchmark/results
    python -m cleanrl_utils.results plot runs/NAME   # draw its learning curve
    python -m cleanrl_utils.results export           # benchmark/results as one Parquet file
    python -m cleanrl_utils.results export runs      # every logged value of all runs as Parquet

In Python:

    from cleanrl_utils import results
    results.load()                                # committed curves, one row per point
    results.read_metrics("runs/NAME")             # every logged value of one run
    results.read_many(results.find_runs("runs"))  # ... of many runs
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd
from tyro.conf import Positional

from cleanrl_utils.analysis.charts import plot
from cleanrl_utils.analysis.committed import COMMITTED, add, export, facts, load
from cleanrl_utils.analysis.tables import (
    LAST,
    RETURN,
    RunFolder,
    best_window,
    command,
    curve,
    find_all,
    find_runs,
    read_all,
    read_many,
    read_metrics,
    say,
    summary,
    table,
)
from cleanrl_utils.errors import require
from cleanrl_utils.running.settings import parse_command

__all__ = ["COMMITTED", "LAST", "RETURN", "RunFolder", "add", "best_window", "command", "curve"]
__all__ += ["export", "facts", "find_runs", "load", "plot", "read_all", "read_many"]
__all__ += ["read_metrics", "summary", "table"]


@dataclass
class ResultsArgs:
    action: Positional[Literal["show", "add", "plot", "export"]]
    """show a table, add to benchmark/results, plot curves, or export to Parquet"""
    where: Positional[tuple[str, ...]] = ()
    """folders of runs, or folders that contain them"""
    output: str = "results.parquet"
    """export: file to write"""
    replace: bool = False
    """add: remove runs of the same script and environment that have other settings"""


def main(argv: list[str] | None = None) -> None:
    args = parse_command(ResultsArgs, argv)
    if args.action == "export":
        data = export(Path(args.output), args.where)
        print(f"{args.output}: {len(data):,} rows")
        return
    require(bool(args.where), f"{args.action} needs a folder, e.g. runs")
    if args.action == "add":
        names = add(list(args.where), replace=args.replace)
        print(f"{len(names)} runs added to {COMMITTED.parent.name}/{COMMITTED.name}")
        return
    runs = find_all(args.where)
    require(bool(runs), f"{', '.join(args.where)}: no run found")
    if args.action == "plot":
        plotted = [run for run in runs if (run.metrics().tag == RETURN).any()]
        for run in runs:
            if run not in plotted:
                say(f"{run.folder}: no finished episode to plot")
        for run in plotted:
            print(plot(run, run.folder / "curve.png"))
        return
    print(table(pd.DataFrame([summary(run) | {"finished": run.finished} for run in runs])))


if __name__ == "__main__":
    main()
