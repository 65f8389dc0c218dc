"""The code that made a run: its fingerprint, its copy in the run's folder, its uncommitted changes.

A fingerprint is a hash of a script and of all it imports from this project or from its own folder,
at any depth. Comments, docstrings and layout do not count: they cannot change what a run does.
"""

import ast
import hashlib
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from cleanrl_utils.running import folder as run_folder

PROJECT = Path(__file__).resolve().parent.parent.parent
OURS = ("cleanrl", "cleanrl_utils")
LARGEST_DIFF = 2**20  # bytes: a larger one is not kept


def fingerprint(script: Path, modules: Iterable[str] = ()) -> str:
    """A hash of a script, of the modules named, and of what they import; empty without a script."""
    if not script.is_file():
        return ""
    sha = hashlib.sha256()
    for path in sources(script, modules):
        sha.update(f"{path.name} {meaning(path)}\n".encode())
    return sha.hexdigest()[:16]


def sources(script: Path, modules: Iterable[str] = ()) -> list[Path]:
    """The script, then every file that it or one of the modules imports, in a fixed order."""
    script = script.resolve()
    waiting = [script]
    for module in modules:
        waiting += find_module(module, script.parent, Path.cwd())
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for name in imports(path):
            waiting += find_module(name, script.parent, path.parent)
    others = found - {script}
    return [script, *sorted(others, key=lambda path: (path.name, meaning(path)))]


def find_module(name: str, *folders: Path) -> list[Path]:
    """The files of a module of this project, or of one in these folders; its packages' too."""
    parts = name.split(".")
    places = [PROJECT] if parts[0] in OURS else list(dict.fromkeys(folders))
    for place in places:
        files = []
        for depth in range(1, len(parts) + 1):
            base = place.joinpath(*parts[:depth])
            files += [base.with_name(f"{base.name}.py"), base / "__init__.py"]
        if files := [path.resolve() for path in files if path.is_file()]:
            return files
    return []


def imports(path: Path) -> tuple[str, ...]:
    """The names that a file imports, in functions as well; a name from a package counts as one of
    its modules."""
    return read(path.read_bytes())[0]


def meaning(path: Path) -> str:
    """A hash of what a file says to Python: without comments, docstrings and layout."""
    return read(path.read_bytes())[1]


@cache
def read(content: bytes) -> tuple[tuple[str, ...], str]:
    """(names that are imported, hash of the meaning) of a source file."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError):  # not Python that can be read
        return (), hashlib.sha256(content).hexdigest()
    names = tuple(imported(tree))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [line for line in body if not is_text(line)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return names, hashlib.sha256(ast.unparse(tree).encode(errors="replace")).hexdigest()


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = f"{node.module}." if node.module else ""
            yield from (f"{base}{alias.name}" for alias in node.names)


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a docstring, or the one below a setting."""
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def keep(folder: Path, script: Path) -> dict[str, Any]:
    """Put the script and the changes since the commit into a run's folder; what to record of it."""
    if not script.is_file():
        return {}
    shutil.copyfile(script, run_folder.script_path(folder, script.stem))
    if changes := diff(script.resolve().parent):
        (folder / run_folder.CHANGES).write_bytes(changes)
    known = git(script.resolve().parent, "ls-files", "--", script.name)
    return {"code": fingerprint(script), "script_tracked": bool(known)}


def copy(source: Path, target: Path) -> None:
    """Give a run's folder the code that another one keeps."""
    for path in [*source.glob("*.py"), *source.glob(run_folder.CHANGES)]:
        shutil.copyfile(path, target / path.name)


def diff(folder: Path) -> bytes:
    """`git diff HEAD` of the repository that a folder is in; nothing where it is too large."""
    plain = ["--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--no-relative"]
    changes = git(folder, "diff", "HEAD", *plain)
    return changes if len(changes) <= LARGEST_DIFF else b""


def git(folder: Path, *words: str) -> bytes:
    """What a git command prints; nothing where it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
