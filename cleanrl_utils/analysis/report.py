"""The report of a comparison: one web page with everything in it, no network, no library."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from cleanrl_utils.analysis.charts import thin
from cleanrl_utils.analysis.comparison import Comparison
from cleanrl_utils.analysis.palette import colors

POINTS = 200  # of each curve in the page
TEMPLATE = Path(__file__).with_name("report.html")
CHART = Path(__file__).with_name("chart.js")  # curves as SVG; the documentation uses it, too


def write_report(c: Comparison, table: str, path: Path) -> Path:
    """Write the page; `table` is the Markdown that it begins with."""
    runs: list[dict[str, Any]] = []
    for s in c.sets:
        for run in s.runs:
            curves = {}
            for tag, curve in run.curves.items():
                steps, values = thin(curve.steps, curve.values, curve.steps[-1], POINTS)
                _, seconds = thin(curve.steps, curve.seconds, curve.steps[-1], POINTS)
                if np.isfinite(values).all():
                    curves[tag] = [short(steps, 0), short(seconds / 60, 3), short(values)]
            about = {"set": s.label, "run": run.name, "task": run.env_id, "seed": run.seed}
            about |= {"experiment": run.exp_name, "commit": run.commit[:12]}
            runs.append({**about, "tags": ", ".join(run.tags), "curves": curves})
    data = {"metric": c.args.metric, "colors": colors(len(runs)), "runs": runs, "table": table}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    page = TEMPLATE.read_text(encoding="utf-8")
    page = page.replace('"CHART"', CHART.read_text(encoding="utf-8"), 1).replace('"DATA"', text, 1)
    path.write_text(page, encoding="utf-8")
    return path


def short(values: np.ndarray, decimals: int | None = None) -> list[float]:
    """Numbers with as many digits as a screen can show."""
    if decimals is not None:
        values = np.round(values.astype(float), decimals)
        return (values.astype(int) if decimals == 0 else values).tolist()
    return [float(f"{value:.5g}") for value in values]
