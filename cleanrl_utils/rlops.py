"""Compare sets of runs: is the new version better, worse or the same?

    python -m cleanrl_utils.rlops --exp-names ppo dqn --env-ids CartPole-v1 Acrobot-v1
    python -m cleanrl_utils.rlops --exp-name ppo --tags v1.0.0 my-change --report
    python -m cleanrl_utils.rlops --exp-name ppo --split-by learning-rate
    python -m cleanrl_utils.rlops --results --runs-dir runs --exp-name ppo --fail-on-regression

Every tag, commit and experiment name (and every place to read from, if there are several) makes a
set of runs; the first set is the baseline. Runs of a set have the same settings and differ by their
seeds; --where chooses among others. A run's score is the mean of its last values. Prints a Markdown
table, with the settings that differ between the sets, draws learning curves and statistics (PNG and
SVG) and, with --report, writes one web page that needs no network. --fail-on-regression ends with
exit status 1 if a set is worse than the baseline beyond doubt, across tasks or on one of them
(given 5 runs of it): the 95% interval of the difference of their interquartile means is below zero,
their own 95% intervals do not overlap, and the difference is more than 1% of what the baseline
learned.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from cleanrl_utils.analysis.charts import draw
from cleanrl_utils.analysis.comparison import compare, markdown, verdicts
from cleanrl_utils.analysis.report import write_report
from cleanrl_utils.analysis.sets import SetArgs
from cleanrl_utils.running.settings import parse_command


@dataclass
class RlopsArgs(SetArgs):
    output_filename: str = "compare.png"
    """picture to write; the same as SVG is written beside it"""
    report: bool = False
    """also write a web page with interactive curves, beside the picture"""


def main(argv: list[str] | None = None) -> int:
    args = parse_command(RlopsArgs, argv)
    comparison = compare(args)
    worse = verdicts(comparison) if args.fail_on_regression else []
    table = markdown(comparison)
    print(table)
    paths = draw(comparison, Path(args.output_filename))
    if args.report:
        paths.append(write_report(comparison, table, paths[0].with_suffix(".html")))
    print(f"\n{', '.join(map(str, paths))}")
    for line in worse:
        print(f"regression: {line}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
