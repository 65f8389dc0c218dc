"""Tables and lists of all scripts: the overview, the list of algorithms, the scripts of a page."""

import re
import statistics
from pathlib import Path

from cleanrl_utils.pages.diffs import diff_size
from cleanrl_utils.pages.results import Group
from cleanrl_utils.pages.scripts import ROOT, Script

DOCS = ROOT / "docs"
Scripts = dict[str, Script]
OVERVIEW = ["script", "observations, actions", "environments", "backend", "features", "lines"]
OVERVIEW += ["steps/s", "results"]


def overview_table(scripts: Scripts, groups: list[Group]) -> str:
    """A table of all scripts: spaces, environments, features, speed, results."""
    rows = [f"| {' | '.join(OVERVIEW)} |", "|-" * len(OVERVIEW) + "|"]
    for script in scripts.values():
        mine = [group for group in groups if group.script == script.name]
        count = "not yet"
        if mine:
            environments = len({group.env_id for group in mine})
            count = f"{environments} ({sum(len(group.runs) for group in mine)})"
        cells = [f"[`{script.name}.py`](../source/{script.name}.md)", script.spaces]
        cells += [script.families, "JAX" if script.jax else "torch", script.features]
        cells += [str(script.lines), speed_of(mine), f"[{count}](../{script.page})"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def speed_of(groups: list[Group]) -> str:
    """Median steps per second of these runs, of those on a GPU if there are any."""
    if not groups:
        return ""
    on_gpu = [group for group in groups if not group.on_cpu]
    speed = statistics.median(group.speed() for group in on_gpu or groups)
    return f"{speed:,.0f} {'GPU' if on_gpu else 'CPU'}"


def scripts_table(shown: list[Script], scripts: Scripts, source: str = "../source/") -> str:
    """The scripts of a page, with links to their code and to the difference from a relative."""
    rows = ["| script | what it is | observations, actions |", "|-|-|-|"]
    for script in shown:
        read = f"[code]({source}{script.name}.md)"
        if script.relative:
            removed, added = diff_size(scripts[script.relative].source, script.source)
            diff = f"{source}{script.name}-diff.md"
            read += f", [diff from `{script.relative}.py`]({diff}) (−{removed}&nbsp;+{added})"
        rows.append(f"| `{script.name}.py`<br>{read} | {script.title} | {script.spaces} |")
    return "\n".join(rows)


def by_page(scripts: Scripts) -> dict[str, list[Script]]:
    """The scripts of each algorithm's page."""
    found: dict[str, list[Script]] = {}
    for script in scripts.values():
        found.setdefault(script.page, []).append(script)
    return found


def page_title(page: str, docs: Path = DOCS) -> str:
    return (docs / page).read_text().splitlines()[0].removeprefix("# ")


def algorithm_cards(scripts: Scripts) -> str:
    """Every algorithm with its scripts, as a grid of cards."""
    cards = []
    for page, mine in by_page(scripts).items():
        long, short = split_title(page_title(page))
        code = ", ".join(f"[`{script.name}`](source/{script.name}.md)" for script in mine)
        cards.append(f"-   **[{short}]({page})** {long}\n\n    {code}")
    return '<div class="cards" markdown>\n\n' + "\n\n".join(cards) + "\n\n</div>"


def split_title(title: str) -> tuple[str, str]:
    """Split `Deep Q-Network (DQN)` into (Deep Q-Network, DQN)."""
    match = re.fullmatch(r"(.+) \((.+)\)", title)
    return (match[1], match[2]) if match else ("", title)


def readme_table(scripts: Scripts) -> str:
    """A table of algorithms and their scripts, for the README."""
    rows = ["| algorithm | scripts |", "|-|-|"]
    for page, mine in by_page(scripts).items():
        names = ", ".join(f"[`{script.name}.py`](cleanrl/{script.name}.py)" for script in mine)
        rows.append(f"| [{page_title(page)}](docs/{page}) | {names} |")
    return "\n".join(rows)
