"""Keep what scripts have in common identical.

    python -m cleanrl_utils.sync          # check: exit status 1 and a list if something has drifted
    python -m cleanrl_utils.sync --fix    # copy what has drifted from the script's relative

Being equal is the rule and needs no mark. A function or class with the same name as in the script's
nearest relative (the one that its diff page shows, then that one's relative, and so on) must be
identical to it, unless the line above says how it differs:

    # differs from ppo.py: uniform noise on the mean

The same holds for the paragraphs of a training loop: below the same comment stands the same code.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cleanrl_utils.errors import require
from cleanrl_utils.pages.scripts import ROOT, relatives
from cleanrl_utils.running.settings import parse_command

FOLDERS = [ROOT / "cleanrl", ROOT / "docs" / "examples"]
MARK = re.compile(r"^\s*# differs from (\w+)\.py: \S")
COMMON = {"make_env", "make_envs"}  # what scripts of other families share with ppo.py
FRAMEWORK = re.compile(r"\b(torch|Tensor|nn|optim|jax|jnp|Array|optax|random)\b")


@dataclass
class SyncArgs:
    fix: bool = False
    """copy what has drifted from the script's relative"""
    folder: str | None = None
    """folder of scripts to check; unset: all of this project"""


@dataclass
class Block:
    """Lines `start` to `end` of a file (1-based, inclusive), decorators included."""

    start: int
    end: int
    text: str
    mark: str  # the script that it says it differs from


def blocks(source: str) -> dict[str, Block]:
    """Functions, classes and the checks of the settings, then paragraphs of the loop, by name."""
    lines = source.splitlines()
    found: dict[str, Block] = {}

    def add(name: str, start: int, end: int) -> None:
        mark = MARK.match(lines[start - 2]) if start > 1 else None
        text = "\n".join(lines[start - 1 : end])
        found[name] = Block(start, end, text, mark[1] if mark else "")

    tree = ast.parse(source)
    for node in definitions(tree):
        start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        add(node.name, start, node.end_lineno or start)
    main = next((node.lineno for node in tree.body if isinstance(node, ast.If)), len(lines))
    for name, start, end in paragraphs(lines, main):
        add(name, start, end)
    return found


def definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """All functions and classes, but only the methods of Args: every script has other settings."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            yield from (x for x in node.body if isinstance(x, ast.FunctionDef))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node


def paragraphs(lines: list[str], first: int) -> Iterator[tuple[str, int, int]]:
    """(comment, first line, last line) of what stands below a comment, up to a blank line."""
    number = first
    while number < len(lines):
        if not lines[number].strip().startswith("#") or MARK.match(lines[number]):
            number += 1
            continue
        start = number + 1
        while number < len(lines) and lines[number].strip():
            number += 1
        yield lines[start - 1].strip(), start, number


@dataclass
class Finding:
    path: Path
    block: Block
    name: str
    relative: str
    wanted: str
    what: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.block.start}: {self.name} {self.what} {self.relative}.py"


def check(path: Path, sources: dict[str, str]) -> tuple[int, list[Finding]]:
    """The number of blocks that a script shares with its relatives, and those that drifted."""
    others = [(name, blocks(sources[name])) for name in relatives(path.stem, set(sources))]
    shared = 0
    findings = []
    for name, block in blocks(path.read_text()).items():
        relative, other = nearest(name, others)
        if other is None:
            if block.mark:
                findings.append(Finding(path, block, name, block.mark, "", "is not in"))
            continue
        if relative == "ppo" and not path.stem.startswith("ppo") and name not in COMMON:
            continue
        crosses = ("jax" in path.stem) != ("jax" in relative)
        if crosses and FRAMEWORK.search(other.text):
            continue
        same = block.text == other.text
        shared += same
        if same and block.mark:
            findings.append(Finding(path, block, name, relative, "", "is marked, but equal to"))
        elif not same and block.mark != relative:
            findings.append(Finding(path, block, name, relative, other.text, "has drifted from"))
    return shared, findings


def nearest(name: str, others: list[tuple[str, dict[str, Block]]]) -> tuple[str, Block | None]:
    """The first relative that has a block of this name, and that block."""
    for relative, found in others:
        if name in found:
            return relative, found[name]
    return "", None


def fix(path: Path, findings: list[Finding]) -> None:
    """Copy drifted blocks over, last first so that line numbers stay true."""
    lines = path.read_text().splitlines()
    for finding in sorted(findings, key=lambda finding: -finding.block.start):
        if finding.wanted:
            lines[finding.block.start - 1 : finding.block.end] = finding.wanted.splitlines()
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    args = parse_command(SyncArgs)
    folders = [Path(args.folder)] if args.folder else FOLDERS
    require(folders[0].is_dir(), f"--folder {folders[0]}: no such folder")
    paths = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    for _ in range(4 if args.fix else 1):  # what was copied from may itself have been fixed
        sources = {path.stem: path.read_text() for path in paths}
        results = [check(path, sources) for path in paths]
        drifted = [finding for _, findings in results for finding in findings]
        if args.fix and drifted:
            for path, (_, findings) in zip(paths, results, strict=True):
                fix(path, findings)
    for finding in drifted:
        print(finding, file=sys.stderr)
    shared = sum(count for count, _ in results)
    print(f"{shared} shared blocks in {len(paths)} scripts, {len(drifted)} drifted")
    sys.exit(bool(drifted))


if __name__ == "__main__":
    main()
