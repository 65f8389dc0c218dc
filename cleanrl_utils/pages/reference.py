"""Tables of flags and metrics, and installation commands."""

import logging
import re

from cleanrl_utils.pages.results import indent
from cleanrl_utils.pages.scripts import ROOT, SHARED, Flag, Script, shared_flags

METRICS = ROOT / "docs" / "get-started" / "metrics.md"
log = logging.getLogger("mkdocs.hooks.cleanrl")


def flag_table(flags: list[Flag]) -> str:
    return "\n".join(["| flag | default | meaning |", "|-|-|-|", *(flag.row() for flag in flags)])


def shared_flag_tables() -> str:
    """The flags that scripts inherit, a section for each class."""
    flags = shared_flags().items()
    return "\n\n".join(f"### {SHARED[name]}\n\n{flag_table(own)}" for name, own in flags)


def flag_tables(scripts: list[Script]) -> str:
    """The flags of each script, collapsed."""
    title = '??? note "Flags of `{}.py`, beside the shared ones"\n\n'
    tables = [title.format(x.name) + indent(flag_table(x.flags)) for x in scripts]
    return "\n\n".join(tables)


def metric_meanings() -> dict[str, str]:
    return dict(re.findall(r"^\| `([\w/-]+)` \| (.+) \|$", METRICS.read_text(), re.M))


def metric_table(scripts: list[Script]) -> str:
    """The metrics of these scripts, with their meanings from get-started/metrics.md."""
    meanings = metric_meanings()
    tags: dict[str, list[str]] = {}
    for script in scripts:
        for tag in script.tags:
            tags.setdefault(tag, []).append(script.name)
    rows = ["| tag | meaning |", "|-|-|"]
    for tag, names in tags.items():
        if tag not in meanings:
            log.warning(f"get-started/metrics.md does not explain {tag} of {names[0]}.py")
            continue
        some = ", ".join(f"`{name}.py`" for name in names)
        only = "" if len(names) == len(scripts) else f" ({some})"
        rows.append(f"| `{tag}` | {meanings[tag]}{only} |")
    return "\n".join(rows)


def install_tabs(family: str) -> str:
    """The commands that install a family of environments, in one tab per tool."""
    extras = {"dm_control": "mujoco dm_control"}.get(family, family)
    pins = f"requirements/requirements-{family}.txt"
    ways = {
        "pip": f"pip install -r {pins}",
        "uv": f"uv pip install -r {pins}",
        "poetry": f'poetry install -E "{extras}"',
        "make": f"make install-{family}",
    }
    tab = '=== "{}"\n\n    ```bash\n    {}\n    ```'
    return "\n\n".join(tab.format(tool, command) for tool, command in ways.items())
