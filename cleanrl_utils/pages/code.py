"""Source code as HTML: highlighted, numbered lines with notes."""

import html
import re
from collections.abc import Iterator

Columns = dict[int, set[int]]  # the marked columns of each line


def highlight(source: str, marked: Columns | None = None) -> list[str]:
    """The lines of a Python file as HTML, in the colours of the site."""
    from pygments.lexers import PythonLexer
    from pygments.token import STANDARD_TYPES

    lines = [""]
    column = 0
    for kind, text in PythonLexer(stripnl=False).get_tokens(source):
        while kind not in STANDARD_TYPES:
            kind = kind.parent
        for part in re.split(r"(\n)", text):
            if part == "\n":
                lines.append("")
                column = 0
                continue
            columns = (marked or {}).get(len(lines) - 1, set())
            for piece in pieces(part, column, columns):
                escaped = html.escape(piece, quote=False)
                code = f'<span class="{STANDARD_TYPES[kind]}">{escaped}</span>'
                lines[-1] += f"<mark>{code}</mark>" if column in columns else code
                column += len(piece)
    return lines[: len(source.splitlines())]


def pieces(text: str, column: int, marked: set[int]) -> Iterator[str]:
    """Split a text that starts in this column where marked columns start and end."""
    start = 0
    for i in range(1, len(text) + 1):
        if i == len(text) or (column + i in marked) != (column + i - 1 in marked):
            yield text[start:i]
            start = i


def line_html(number: int, code: str, anchor: bool = True, style: str = "") -> str:
    """A numbered line; with `anchor`, it can be linked to."""
    name = f' id="L{number}"' if anchor else ""
    href = f' href="#L{number}"' if anchor else ""
    link = f'<a class="number"{href} data-no="{number}" aria-hidden="true" tabindex="-1"></a>'
    return f'<div class="line{style}"{name}>{link}{code or " "}</div>'


def source_html(source: str, notes: dict[int, list[str]]) -> str:
    """A file with its notes, each after its line; notes.js puts them beside it on wide screens."""
    out = []
    for number, code in enumerate(highlight(source), 1):
        out.append(line_html(number, code, style=" noted" if number in notes else ""))
        out += [note_html(number, note) for note in notes.get(number, [])]
    return f'<div class="highlight source">{"".join(out)}</div>'


def note_html(line: int, note: str) -> str:
    link = f'<a class="at" href="#L{line}">line {line}</a>'
    return f'<div class="note" data-line="{line}">{link} {note}</div>'
