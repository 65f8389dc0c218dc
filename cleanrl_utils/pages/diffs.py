"""Side-by-side diffs of scripts."""

import difflib
import re
from collections.abc import Sequence

from cleanrl_utils.pages.code import Columns, highlight, line_html
from cleanrl_utils.pages.scripts import Script

CONTEXT = 3  # equal lines shown around a difference
SIMILAR = 0.5  # least similarity of two lines for their different words to be marked
Block = tuple[str, int, int, int, int]  # kind; lines of the left file, lines of the right file


def diff_blocks(left: list[str], right: list[str]) -> Sequence[Block]:
    return difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes()


def diff_size(left: str, right: str) -> tuple[int, int]:
    """(lines only in the left file, lines only in the right file)."""
    blocks = diff_blocks(left.splitlines(), right.splitlines())
    changed = [block for block in blocks if block[0] != "equal"]
    removed = sum(block[2] - block[1] for block in changed)
    added = sum(block[4] - block[3] for block in changed)
    return removed, added


def changed_words(left: list[str], right: list[str]) -> tuple[Columns, Columns]:
    """The columns in which a replaced line differs from its replacement, if they are similar."""
    marked: tuple[Columns, Columns] = {}, {}
    for kind, i1, i2, j1, j2 in diff_blocks(left, right):
        if kind != "replace":
            continue
        for i, j in zip(range(i1, i2), range(j1, j2), strict=False):
            words = [re.findall(r"\w+|\s+|.", line) for line in (left[i], right[j])]
            matcher = difflib.SequenceMatcher(None, words[0], words[1], autojunk=False)
            if matcher.ratio() < SIMILAR:
                continue
            changed = [block for block in matcher.get_opcodes() if block[0] != "equal"]
            removed = [(block[1], block[2]) for block in changed]
            added = [(block[3], block[4]) for block in changed]
            marked[0].setdefault(i, set()).update(columns_of(words[0], removed))
            marked[1].setdefault(j, set()).update(columns_of(words[1], added))
    return marked


def columns_of(words: list[str], spans: list[tuple[int, int]]) -> set[int]:
    """The columns that these spans of words cover."""
    starts = [0]
    for word in words:
        starts.append(starts[-1] + len(word))
    return {column for first, last in spans for column in range(starts[first], starts[last])}


def diff_html(left: Script, right: Script) -> str:
    """Both files side by side; on narrow screens as one column, with equal lines once."""
    left_lines = left.source.splitlines()
    right_lines = right.source.splitlines()
    marked = changed_words(left_lines, right_lines)
    code = [highlight(left.source, marked[0]), highlight(right.source, marked[1])]

    def column(side: int, start: int, end: int, style: str) -> str:
        numbered = zip(range(start + 1, end + 1), code[side][start:end], strict=True)
        rows = "".join(line_html(n, line, anchor=False, style=style) for n, line in numbered)
        return f'<div class="side{" second" * side}">{rows}</div>'

    def pair(kind: str, i1: int, i2: int, j1: int, j2: int) -> str:
        equal = kind == "equal"
        both = column(0, i1, i2, "" if equal else " gone")
        both += column(1, j1, j2, "" if equal else " new")
        return f'<div class="pair {kind}">{both}</div>'

    out = [f'<div class="pair names"><div>{left.name}.py</div><div>{right.name}.py</div></div>']
    blocks = diff_blocks(left_lines, right_lines)
    for number, (kind, i1, i2, j1, j2) in enumerate(blocks):
        before = CONTEXT if number else 0
        after = CONTEXT if number < len(blocks) - 1 else 0
        if kind != "equal" or i2 - i1 <= before + after + CONTEXT:
            out.append(pair(kind, i1, i2, j1, j2))
            continue
        if before:
            out.append(pair(kind, i1, i1 + before, j1, j1 + before))
        hidden = pair(kind, i1 + before, i2 - after, j1 + before, j2 - after)
        summary = f"{i2 - i1 - before - after} equal lines"
        out.append(f"<details><summary>{summary}</summary>{hidden}</details>")
        if after:
            out.append(pair(kind, i2 - after, i2, j2 - after, j2))
    # <section>, because the search plugin takes the end of an inner <div> for the end of this one.
    return f'<section class="highlight diff" data-search-exclude>{"".join(out)}</section>'
