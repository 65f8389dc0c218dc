"""The README's table, its caption and its picture of learning curves."""

import re
from pathlib import Path
from typing import Any

from cleanrl_utils.analysis.palette import colors
from cleanrl_utils.pages import films, overview, results
from cleanrl_utils.pages.scripts import read_scripts
from cleanrl_utils.pages.site import agents_caption, shown_groups

MARKED = re.compile(r"(<!-- (?P<name>\w+): .*? -->\n).*?(<!-- end -->)", re.S)
COLUMNS = 3


def fill_readme(text: str) -> str:
    """The README with the generated parts between its marks."""
    made = {
        "scripts": overview.readme_table(read_scripts()),
        "agents": agents_caption(films.read_strip(), "docs/assets"),
    }
    return MARKED.sub(lambda match: f"{match[1]}{made[match['name']]}\n{match[3]}", text)


def draw_curves(path: Path) -> None:
    """Draw our learning curves and the original's results (dashed) on the environments of SHOWN."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    published = results.read_published()
    shown = shown_groups(results.read_groups())
    env_ids = list(dict.fromkeys(group.env_id for group in shown))
    labels = list(dict.fromkeys(short_name(group) for group in shown))
    color = dict(zip(labels, colors(len(labels)), strict=True))
    rows = -(-len(env_ids) // COLUMNS)
    size = (4 * COLUMNS, 2.9 * rows)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=size, squeeze=False)
    for axis in axes.flat[len(env_ids) :]:
        axis.axis("off")
    for axis, env_id in zip(axes.flat, env_ids, strict=False):
        for group in shown:
            if group.env_id == env_id:
                draw_group(axis, group, color[short_name(group)], published)
        axis.set_title(env_id, fontsize=11)
        axis.legend(fontsize=7, loc="best", framealpha=0.6)
        axis.tick_params(labelsize=8)
        axis.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
        axis.xaxis.offsetText.set_fontsize(8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


def short_name(group: results.Group) -> str:
    """The name of a group in the legend, without `continuous_action`."""
    return group.name.replace("_continuous_action", "")


def draw_group(axis: Any, group: results.Group, color: str, published: results.Published) -> None:
    """Draw the mean and, with two seeds or more, the sample standard deviation of a group."""
    import numpy as np

    curves = results.curves_of(group)
    x = np.linspace(0, group.steps, 100)
    y = np.array([np.interp(x, steps, values) for steps, _, values in curves])
    mean = y.mean(0)
    label = f"{short_name(group)} ({len(curves)})"
    axis.plot(x, mean, color=color, linewidth=1.6, label=label)
    if len(curves) > 1:
        std = y.std(0, ddof=1)
        axis.fill_between(x, mean - std, mean + std, color=color, alpha=0.2, linewidth=0)
    for row in published.get((group.script, group.env_id), [])[:1]:
        axis.axhline(float(row["mean"]), color=color, linestyle="--", linewidth=1)
