"""Which module of cleanrl_utils imports which: no cycles, and rooms import downwards only."""

from pathlib import Path

from cleanrl_utils.running import source

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cleanrl_utils"
BELOW = {  # what each room may import, besides itself and errors.py
    "running": {"speed", "environments"},
    "launching": {"running"},
}


def graph() -> dict[Path, set[Path]]:
    """Every module with those of cleanrl_utils that it imports, in functions as well."""
    edges: dict[Path, set[Path]] = {}
    for path in PACKAGE.rglob("*.py"):
        found: set[Path] = set()
        for name in source.imports(path):
            if name.startswith("cleanrl_utils."):
                found |= set(source.find_module(name)[-1:])
        edges[path] = {other for other in found if other.name != "__init__.py"} - {path}
    return edges


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def test_no_cycles() -> None:
    edges = graph()
    left = set(edges)
    while True:
        free = {path for path in left if not edges[path] & left}
        if not free:
            break
        left -= free
    assert not left, sorted(str(path.relative_to(ROOT)) for path in left)


def test_rooms_import_downwards_only() -> None:
    for path, others in graph().items():
        for other in others:
            if room(path) in BELOW and other.name != "errors.py":
                allowed = BELOW[room(path)] | {room(path)}
                assert room(other) in allowed, f"{path} imports {other}"
