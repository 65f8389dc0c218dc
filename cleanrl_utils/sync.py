"""Keep the blocks that must be identical across scripts identical.

    python -m cleanrl_utils.sync          # check: exit status 1 and a list if any block has drifted
    python -m cleanrl_utils.sync --fix    # copy every such block over from its origin

A function, class or method that a script takes over unchanged stands below the line
`# same as ppo.py`; the origin is the one of the same name in cleanrl/ppo.py.
"""

import argparse
import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "cleanrl"
FOLDERS = [SCRIPTS, ROOT / "docs" / "examples"]
MARK = re.compile(r"^\s*# same as (\w+)\.py\s*$")


@dataclass
class Block:
    """Lines `start` to `end` of a file (1-based, inclusive), decorators included."""

    start: int
    end: int
    text: str


def blocks(source: str) -> dict[str, Block]:
    """Every function, class and method of a file, by name: `gae`, `Agent`, `Agent.act`."""
    lines = source.splitlines()
    found = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                end = node.end_lineno or start
                text = "\n".join(lines[start - 1 : end])
                found[prefix + node.name] = Block(start, end, text)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(source).body, "")
    return found


@dataclass
class Copy:
    """A marked block and its wanted text (None: the origin has no such block)."""

    path: Path
    line: int
    name: str
    origin: str
    block: Block | None
    wanted: str | None

    @property
    def drifted(self) -> bool:
        return self.block is None or self.wanted is None or self.block.text != self.wanted

    def __str__(self) -> str:
        where = f"{self.path.name}:{self.line}: {self.name or 'nothing to copy here'}"
        return f"{where} " + (
            f"has drifted from {self.origin}.py" if self.wanted else f"is not in {self.origin}.py"
        )


def copies(path: Path) -> list[Copy]:
    """All marked blocks of a file."""
    source = path.read_text()
    here = {block.start: (name, block) for name, block in blocks(source).items()}
    found = []
    for number, line in enumerate(source.splitlines(), 1):
        if mark := MARK.match(line):
            name, block = here.get(number + 1, ("", None))
            origin = path.with_name(f"{mark[1]}.py")
            origin = origin if origin.exists() else SCRIPTS / origin.name
            there = blocks(origin.read_text()) if origin.exists() else {}
            wanted = there[name].text if name in there else None
            found.append(Copy(path, number, name, mark[1], block, wanted))
    return found


def fix(path: Path) -> int:
    """Copy drifted blocks, last first so that line numbers stay valid; returns their number."""
    fixed = 0
    for copy in reversed(copies(path)):
        if copy.drifted and copy.block and copy.wanted:
            lines = path.read_text().splitlines()
            lines[copy.block.start - 1 : copy.block.end] = copy.wanted.splitlines()
            path.write_text("\n".join(lines) + "\n")
            fixed += 1
    return fixed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="copy drifted blocks from their origin")
    parser.add_argument("--folder", type=Path, help="folder of scripts to check instead of all")
    options = parser.parse_args()
    folders = [options.folder] if options.folder else FOLDERS
    paths = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    if options.fix:
        for _ in range(3):  # an origin may itself be a copy
            for path in paths:
                if count := fix(path):
                    print(f"{path.name}: {count} block{'s' * (count > 1)} copied")
    everything = [copy for path in paths for copy in copies(path)]
    drifted = [copy for copy in everything if copy.drifted]
    for copy in drifted:
        print(copy, file=sys.stderr)
    print(f"{len(everything)} shared blocks in {len(paths)} scripts, {len(drifted)} drifted")
    sys.exit(bool(drifted))


if __name__ == "__main__":
    main()
