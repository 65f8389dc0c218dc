"""The rooms of cleanrl_utils import downwards only, and no module is too long to read."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

# From the lowest to the highest; rooms on one line do not know each other.
LEVELS = [
    {"errors"},
    {"speed"},
    {"running"},
    {"environments", "replay"},
    {"launching", "analysis"},
    {"pages"},
    {"commands"},
]
LONGEST = 450  # lines of a module

PACKAGE = ROOT / "cleanrl_utils"
PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imports(path: Path) -> Iterator[str]:
    """The modules of this package that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in PATHS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cleanrl_utils"):
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in PATHS else str(node.module)


GRAPH = {name: set(imports(path)) - {name} for name, path in PATHS.items()}


def room(module: str) -> str:
    parts = module.split(".")
    if parts[1:] == ["errors"]:
        return "errors"
    known = set().union(*LEVELS)
    return parts[1] if len(parts) > 1 and parts[1] in known else "commands"


def level(module: str) -> int:
    return next(i for i, rooms in enumerate(LEVELS) if room(module) in rooms)


def cycle(name: str, path: tuple[str, ...]) -> tuple[str, ...]:
    for other in GRAPH[name]:
        if other in path:
            return (*path[path.index(other) :], other)
        if found := cycle(other, (*path, other)):
            return found
    return ()


@pytest.mark.parametrize("name", sorted(GRAPH))
def test_no_module_is_in_a_cycle(name: str) -> None:
    assert not cycle(name, (name,))


@pytest.mark.parametrize("name", sorted(GRAPH))
def test_rooms_import_downwards(name: str) -> None:
    for other in GRAPH[name]:
        same = room(name) == room(other)
        assert same or level(other) < level(name), f"{name} imports {other}"


@pytest.mark.parametrize("name", sorted(GRAPH))
def test_a_module_can_be_read_in_one_go(name: str) -> None:
    assert len(PATHS[name].read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("name", ["buffers", "atari_wrappers", "run", "envs", "evaluate", "evals"])
def test_known_imports_still_work(name: str) -> None:
    assert f"cleanrl_utils.{name}" in PATHS
