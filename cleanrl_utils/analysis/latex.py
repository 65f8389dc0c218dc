"""The tables of a comparison as LaTeX, to include in a paper; they need the package booktabs."""

import re
from pathlib import Path

from cleanrl_utils.analysis.comparison import Comparison, across_tasks, score_table

ESCAPED = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    **{character: "\\" + character for character in "&%$#_{}"},
}
SPECIAL = re.compile("|".join(map(re.escape, ESCAPED)))
MINUS = re.compile(r"(?<!\w)-(?=\d)")


def write_latex(c: Comparison, path: Path) -> Path:
    """Write the scores by task and the statistics across tasks, one table each."""
    tables = [score_table(c)] + ([across_tasks(c)] if c.shared else [])
    path.write_text("\n".join(map(as_latex, tables)), encoding="utf-8")
    return path


def as_latex(table: str) -> str:
    """A Markdown table with a line of text above it, which becomes the caption."""
    about, _, head, _, *rows = table.splitlines()
    lines = [" & ".join(map(escaped, cells_of(row))) + r" \\" for row in (head, *rows)]
    columns = "l" + "c" * (len(cells_of(head)) - 1)
    parts = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escaped(about.replace('**', ''))}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        lines[0],
        r"\midrule",
        *lines[1:],
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(parts) + "\n"


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in row.removeprefix("|").removesuffix("|").split(" | ")]


def escaped(text: str) -> str:
    """Text for LaTeX: special characters escaped, negative numbers with a minus sign."""
    return MINUS.sub("$-$", SPECIAL.sub(lambda match: ESCAPED[match.group()], text))
