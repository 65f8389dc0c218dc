"""The report of a comparison: one self-contained web page."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from cleanrl_utils.analysis.charts import thin
from cleanrl_utils.analysis.comparison import Comparison
from cleanrl_utils.analysis.palette import colors

POINTS = 200  # per curve in the page
TEMPLATE = Path(__file__).with_name("report.html")
CHART = Path(__file__).with_name("chart.js")  # curves as SVG; the documentation uses it, too


def write_report(c: Comparison, table: str, path: Path) -> Path:
    """Write the page; `table` is the Markdown table at its top."""
    runs: list[dict[str, Any]] = []
    for s in c.sets:
        for run in s.runs:
            curves = {}
            for tag, curve in run.curves.items():
                steps, values = thin(curve.steps, curve.values, curve.steps[-1], POINTS)
                _, seconds = thin(curve.steps, curve.seconds, curve.steps[-1], POINTS)
                if np.isfinite(values).all():
                    curves[tag] = [short(steps, 0), short(seconds / 60, 3), short(values)]
            row = {
                "set": s.label,
                "run": run.name,
                "task": run.env_id,
                "seed": run.seed,
                "experiment": run.exp_name,
                "commit": run.commit[:12],
                "tags": ", ".join(run.tags),
                "curves": curves,
            }
            runs.append(row)
    data = {"metric": c.args.metric, "colors": colors(len(runs)), "runs": runs, "table": table}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    page = TEMPLATE.read_text(encoding="utf-8")
    page = page.replace('"CHART"', CHART.read_text(encoding="utf-8"), 1)
    page = page.replace('"DATA"', text, 1)
    path.write_text(page, encoding="utf-8")
    return path


def short(values: np.ndarray, decimals: int | None = None) -> list[float]:
    """Round to this many decimals, or to five significant digits: enough for a screen."""
    if decimals is None:
        return [float(f"{value:.5g}") for value in values]
    rounded = np.round(values.astype(float), decimals)
    return (rounded.astype(int) if decimals == 0 else rounded).tolist()
