"""Links from pages to lines of code, and the notes that these links make.

`[text](src:ppo.py#"code")` on a page leads to the one line of cleanrl/ppo.py that holds this code.
The page that shows the file repeats the paragraph as a note about that line.
"""

import html
import re
from dataclasses import dataclass
from pathlib import Path

from cleanrl_utils.pages.scripts import ROOT

LINK = re.compile(
    r'\[(?P<text>[^\]]+)\]\(src:(?P<file>[\w/]+\.py)(?:#"(?P<code>(?:\\"|[^"])+)")?\)', re.S
)
WEB_LINK = re.compile(r"\[([^\]]+)\]\((https?://[^)\s]+)\)")
FENCE = re.compile(r"^(?P<fence>`{3,}).*?^(?P=fence)$", re.S | re.M)
CLOSE = 10  # lines: within this distance a paragraph is shown only once
PARAGRAPH = re.compile(r"\n(?=\n|[-*] |\d+\. |#)")


@dataclass
class Note:
    """A paragraph of a page about a line of code."""

    page: str
    anchor: str
    text: str
    title: str


Notes = dict[str, dict[int, list[Note]]]  # by file and line


def find_line(file: str, code: str | None) -> tuple[str, int]:
    """(page of the file, line); raises LookupError unless the code is there exactly once."""
    path = ROOT / file if "/" in file else ROOT / "cleanrl" / file
    if not path.is_file():
        raise LookupError(f"there is no {file}")
    page = f"source/{file.removesuffix('.py')}.md"
    if code is None:
        return page, 1
    code = code.replace('\\"', '"')
    found = [n for n, line in enumerate(path.read_text().splitlines(), 1) if code in line]
    if len(found) != 1:
        raise LookupError(f"{file} has {len(found)} lines with {code!r}, not one")
    return page, found[0]


def linked_files(folder: Path) -> set[str]:
    """The files outside cleanrl/ that pages link to."""
    texts = [FENCE.sub("", path.read_text()) for path in sorted(folder.rglob("*.md"))]
    files = {link["file"] for text in texts for link in LINK.finditer(text)}
    return {file for file in files if "/" in file and (ROOT / file).is_file()}


def collect_notes(folder: Path) -> Notes:
    """The notes of all pages."""
    notes: Notes = {}
    for path in sorted(folder.rglob("*.md")):
        add_notes(notes, path.read_text(), path.relative_to(folder).as_posix())
    return notes


def add_notes(notes: Notes, markdown: str, page: str) -> None:
    """Add the paragraphs of a page that link to a line; broken links are skipped."""
    from markdown.extensions.toc import slugify, unique

    used: set[str] = set()
    anchor = ""
    title = page
    for block in PARAGRAPH.split(FENCE.sub("", markdown)):
        heading = re.match(r"\s*(#+) (.+)", block)
        if heading:
            anchor = unique(slugify(heading[2].replace("`", ""), "-"), used)
            title = heading[2] if heading[1] == "#" else title
        for link in LINK.finditer(block):
            try:
                _, line = find_line(link["file"], link["code"])
            except LookupError:
                continue  # `Site.resolve` warns
            text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", block.strip())
            note = Note(page, anchor, inline(text), inline(title))
            lines = notes.setdefault(link["file"], {})
            if link["code"] and not is_repeated(note, lines, line):
                lines.setdefault(line, []).append(note)


def is_repeated(note: Note, lines: dict[int, list[Note]], line: int) -> bool:
    """Whether the line has a note of the same section, or a line nearby has the same note."""
    if any((x.page, x.anchor) == (note.page, note.anchor) for x in lines.get(line, [])):
        return True
    return any(note in there for other, there in lines.items() if abs(other - line) <= CLOSE)


def inline(markdown: str) -> str:
    """A paragraph of Markdown as HTML: bold, code and links to the web; other links are text."""
    text = LINK.sub(lambda match: match["text"], markdown)
    text = re.sub(r"\[([^\]]+)\]\((?!https?://)[^)]*\)", r"\1", text)
    text = html.escape(" ".join(text.split()), quote=False)
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return WEB_LINK.sub(r'<a href="\2">\1</a>', text)
