"""The code that made a run: its fingerprint, its copy in the run's folder, its uncommitted changes.

A fingerprint is a hash of a script and of all it imports from this project or from its own folder,
at any depth. Comments, docstrings and blank lines do not count: they cannot change a run.
"""

import ast
import contextlib
import hashlib
import inspect
import io
import os
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from cleanrl_utils.errors import BadInput
from cleanrl_utils.running import folder as run_folder

PROJECT = Path(__file__).resolve().parent.parent.parent
OURS = ("cleanrl", "cleanrl_utils")
COMMIT = "# branch.oid "  # how git status names it
LARGEST_DIFF = 2**20  # bytes: a larger one is not kept


def script_file(cls: type) -> Path:
    """The script that defines `cls`, also if a program such as cProfile runs it as __main__."""
    other_main = cls.__module__ == "__main__" and not hasattr(sys.modules["__main__"], cls.__name__)
    if other_main and sys.argv[0].endswith(".py"):
        return Path(sys.argv[0])
    try:
        return Path(inspect.getfile(cls))
    except (OSError, TypeError):  # pasted into a notebook
        raise BadInput(
            f"{cls.__name__} is in no file: run its script, in a notebook with %run PATH FLAGS"
        ) from None


def fingerprint(script: Path, modules: Iterable[str] = ()) -> str:
    """A hash of a script, of the modules named, and of what they import; empty without a script."""
    if not script.is_file():
        return ""
    sha = hashlib.sha256()
    for path in sources(script, modules):
        sha.update(f"{path.name} {meaning(path)}\n".encode())
    return sha.hexdigest()[:16]


def code_of(script: Path, env_id: str) -> str:
    """The fingerprint of a run: of its script, and of the module of an environment module:Id."""
    return fingerprint(script, modules_of(env_id))


def modules_of(env_id: str) -> list[str]:
    """The module of an environment module:Id; none for other environments."""
    module, colon, _ = env_id.partition(":")
    return [module] if colon else []


def sources(script: Path, modules: Iterable[str] = ()) -> list[Path]:
    """The script, then every file that it or one of the modules imports, in a fixed order."""
    script = script.resolve()
    waiting = [script]
    for module in modules:
        waiting += find_module(module, script.parent, Path.cwd())
    find = cache(find_module)  # most names are imported by many files
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for name in imports(path):
            ours = name.partition(".")[0] in OURS
            waiting += find(name) if ours else find(name, script.parent, path.parent)
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
    """A hash of a file without its comments, docstrings and blank lines."""
    return read(path.read_bytes())[1]


@cache
def read(content: bytes) -> tuple[tuple[str, ...], str]:
    """(names that are imported, hash of the meaning) of a source file."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError):  # not Python that can be read
        return (), hashlib.sha256(content).hexdigest()
    names: list[str] = []
    texts: set[int] = set()  # lines of docstrings
    for node in blocks(tree):
        names += imported(node)
        if isinstance(node, ast.stmt) and is_text(node):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code = without_comments(content, texts)
    return tuple(names), hashlib.sha256(code.encode(errors="replace")).hexdigest()


def without_comments(content: bytes, texts: set[int]) -> str:
    """The lines of a file without comments, blank lines and the lines `texts`.

    Not ast.unparse: each version of Python writes a tree in its own way.
    """
    lines = content.decode(errors="replace").splitlines()
    for token in tokenize.tokenize(io.BytesIO(content).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    kept = [line.rstrip() for number, line in enumerate(lines, 1) if number not in texts]
    return "\n".join(line for line in kept if line)


def blocks(tree: ast.AST) -> Iterator[ast.AST]:
    """The tree and all its statements and clauses; not their expressions, which are most of it."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, part, [])


def imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = f"{node.module}." if node.module else ""
        yield from (f"{base}{alias.name}" for alias in node.names)


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a docstring, or the one below a setting."""
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def other_library(script: Path) -> Path | None:
    """The checkout of a script, if cleanrl_utils is imported from another one."""
    for checkout in script.resolve().parents:
        if (checkout / OURS[1]).is_dir():
            return checkout if checkout != PROJECT else None
    return None


class Repository:
    """What git knows about a script: asked in the background, waited for when it is needed."""

    def __init__(self, script: Path):
        self.script = script.resolve()
        self.folder = self.script.parent
        self._status = git_status(self.folder)
        self._files = Git(self.folder, "ls-files", "-z", "--", "*.py")
        elsewhere = not self.folder.is_relative_to(PROJECT) and (PROJECT / ".git").exists()
        self._library = git_status(PROJECT) if elsewhere else None

    @cached_property
    def state(self) -> dict[str, Any]:
        """Commit of the code; a container without git says it with CLEANRL_COMMIT."""
        if known := commit_of(self._status):
            return known
        commit = os.environ.get("CLEANRL_COMMIT", "")
        return {"commit": commit, "dirty": False} if commit else {}

    @cached_property
    def library(self) -> dict[str, Any]:
        """Commit of cleanrl_utils, if it is imported from another checkout than the script's."""
        return commit_of(self._library) if self._library else {}

    @cached_property
    def committed(self) -> set[Path]:
        """The Python files in the folder of the script, at any depth, that git has."""
        names = self._files.output().decode(errors="surrogateescape").split("\0")
        return {self.folder / name for name in names if name}

    def has_script(self) -> bool:
        return self.script in self.committed

    def path_of_script(self) -> str:
        """The path of the script in the repository; empty if git does not have it."""
        roots = [folder for folder in self.script.parents if (folder / ".git").exists()]
        known = self.has_script() and roots
        return self.script.relative_to(roots[0]).as_posix() if known else ""

    def missing_modules(self, env_id: str) -> list[str]:
        """The modules beside the script that the run imports, and that git does not have."""
        used = sources(self.script, modules_of(env_id))[1:]
        beside = [path for path in used if self.folder in path.parents]
        return [str(x.relative_to(self.folder)) for x in beside if x not in self.committed]

    def diff(self) -> bytes:
        """`git diff HEAD`; nothing where it is too large."""
        if not self.state.get("dirty"):
            return b""
        plain = ["--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--no-relative"]
        changes = Git(self.folder, "diff", "HEAD", *plain).output()
        return changes if len(changes) <= LARGEST_DIFF else b""


def git_status(folder: Path) -> "Git":
    counts = "--no-ahead-behind"  # of commits, which can take long and are not needed
    return Git(folder, "status", "--porcelain=v2", "--branch", counts, "-uno")


def commit_of(status: "Git") -> dict[str, Any]:
    """The commit that git status names, and whether files were changed; empty without a commit."""
    lines = status.output().decode(errors="replace").splitlines()
    told = [line.removeprefix(COMMIT) for line in lines if line.startswith(COMMIT)]
    if not told or told[0] == "(initial)":
        return {}
    return {"commit": told[0], "dirty": any(not line.startswith("#") for line in lines)}


class Git:
    """A git command, started."""

    def __init__(self, folder: Path, *words: str):
        self.process: subprocess.Popen | None = None
        with contextlib.suppress(OSError):  # there is no git
            self.process = subprocess.Popen(
                ["git", *words],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )

    def output(self) -> bytes:
        """What it prints; nothing where it fails."""
        if self.process is None:
            return b""
        try:
            printed, _ = self.process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return b""
        return printed if self.process.returncode == 0 else b""


def keep(folder: Path, script: Path, env_id: str, repository: Repository) -> dict[str, Any]:
    """Put the script and the changes since the commit into a run's folder; what to record of it."""
    if not script.is_file():
        return {}
    shutil.copyfile(script, run_folder.script_path(folder, script.stem))
    if changes := repository.diff():
        (folder / run_folder.CHANGES).write_bytes(changes)
    record: dict[str, Any] = {"code": code_of(script, env_id)}
    record |= {"script_tracked": repository.has_script()}
    if path := repository.path_of_script():
        record["path_in_repository"] = path
    if missing := repository.missing_modules(env_id):
        record["modules_not_committed"] = missing
    return record | ({"library": repository.library} if repository.library else {})


def keep_edited(folder: Path, script: Path, step: int) -> None:
    """Keep the script that continues a run from `step` on; the earlier one stays beside it."""
    kept = run_folder.script_path(folder, script.stem)
    if kept.is_file():
        if kept.read_bytes() == script.read_bytes():
            return
        kept.rename(kept.with_name(f"{script.stem}_until_{step}.py"))
    shutil.copyfile(script, kept)


def copy(source: Path, target: Path) -> None:
    """Give a run's folder the code that another one keeps."""
    for path in [*source.glob("*.py"), *source.glob(run_folder.CHANGES)]:
        shutil.copyfile(path, target / path.name)
