"""The table of speeds: benchmark/speed.csv, as benchmark/speed.py writes it."""

import csv
from collections.abc import Iterable
from pathlib import Path

from cleanrl_utils.pages.scripts import ROOT

FIGURES = ROOT / "benchmark" / "speed.csv"
LIBRARIES = {"stable_baselines3": "SB3", "sb3_contrib": "SB3-Contrib", "sbx": "SBX"}
LIMITS = {"limit": "of the<br>environment", "learning": "of<br>learning"}
HEADER = ["script", "environment", "steps/s", "times as<br>fast as"]
MEMORY = {"memory_mb": "memory<br>(MB)", "gpu_memory_mb": "GPU memory<br>(MB)"}
OPTIONAL = LIMITS | MEMORY  # columns that a table has only if one of its rows has a value
NOTHING = "Nothing is measured yet."


def speed_tables(figures: Path = FIGURES) -> str:
    """A table of scripts for each hardware."""
    if not figures.exists():
        return NOTHING
    rows = list(csv.DictReader(figures.read_text().splitlines()))
    tables = []
    for hardware in sorted({row["hardware"] for row in rows}):
        mine = [row for row in rows if row["hardware"] == hardware]
        measured = {x: title for x, title in OPTIONAL.items() if any(int(row[x]) for row in mine)}
        header = [*HEADER, *measured.values()]
        lines = [f"| {' | '.join(header)} |", "|-" * len(header) + "|"]
        lines += [table_row(row, measured) for row in mine]
        tables.append(f"**{hardware}**\n\n" + "\n".join(lines))
    return "\n\n".join(tables)


def table_row(row: dict[str, str], measured: Iterable[str]) -> str:
    """A script's speed beside other libraries, its share of what its environment and its learning
    reach alone, and the memory it uses."""
    speed = int(row["steps_per_second"])
    compiled = " --compile" if "--compile" in row["flags"].split() else ""
    cells = [f"`{row['script']}{compiled}`", f"`{row['env_id'].split(':')[-1]}`", f"{speed:,}"]
    cells.append(compared(row))
    for column in measured:
        value = int(row[column])
        share = f"{speed / value:.0%}" if value else ""
        cells.append(share if column in LIMITS else f"{value:,}")
    return f"| {' | '.join(cells)} |"


def compared(row: dict[str, str]) -> str:
    """How many times as fast as each library that was measured in turns with the script."""
    speed = int(row["steps_per_second"])
    ratios = []
    for library, name in LIBRARIES.items():
        if peer := int(row[library]):
            ratios.append(f"{name} {speed / peer:.2f}")
    return "<br>".join(ratios)
