"""Compare sets of runs: is the new version better, worse or the same?

    python -m cleanrl_utils.rlops --exp-names ppo dqn --env-ids CartPole-v1 Acrobot-v1
    python -m cleanrl_utils.rlops --exp-name ppo --tags v1.0.0 my-change --report
    python -m cleanrl_utils.rlops --exp-name ppo --split-by learning-rate
    python -m cleanrl_utils.rlops --results --runs-dir runs --exp-name ppo --fail-on-regression

Each tag, commit and experiment (and each source, if there are several) is a set of runs; the first
set is the baseline. The runs of a set have the same settings and differ only in their seeds;
--where selects runs by their settings. The score of a run is the mean of its last values.

Prints a Markdown table with the scores and with the settings that differ between the sets, draws
learning curves and statistics (PNG and SVG) and, with --report, writes a self-contained web page;
--latex writes the tables for a paper.

--fail-on-regression exits with status 1 if a set is significantly worse than the baseline, across
tasks or on a single task with at least 5 runs: the 95% interval of the difference of the
interquartile means is below zero, the 95% intervals of both sets do not overlap, and the difference
is more than 1% of the baseline's improvement during training.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from cleanrl_utils.analysis.charts import draw
from cleanrl_utils.analysis.comparison import compare, markdown, verdicts
from cleanrl_utils.analysis.latex import write_latex
from cleanrl_utils.analysis.report import write_report
from cleanrl_utils.analysis.sets import SetArgs
from cleanrl_utils.running.settings import parse_command


@dataclass
class RlopsArgs(SetArgs):
    output_filename: str = "compare.png"
    """file for the figure, e.g. .png or .pdf; an SVG is written beside it"""
    report: bool = False
    """also write a web page with interactive curves, beside the figure"""
    latex: bool = False
    """also write the tables of scores as LaTeX (booktabs), beside the figure"""


def main(argv: list[str] | None = None) -> int:
    args = parse_command(RlopsArgs, argv)
    comparison = compare(args)
    worse = verdicts(comparison) if args.fail_on_regression else []
    table = markdown(comparison)
    print(table)
    paths = draw(comparison, Path(args.output_filename))
    if args.report:
        paths.append(write_report(comparison, table, paths[0].with_suffix(".html")))
    if args.latex:
        paths.append(write_latex(comparison, paths[0].with_suffix(".tex")))
    print(f"\n{', '.join(map(str, paths))}")
    for line in worse:
        print(f"regression: {line}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
