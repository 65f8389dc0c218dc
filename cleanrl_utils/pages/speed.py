"""The table of speeds: benchmark/speed.csv, as benchmark/speed.py writes it."""

import csv
from pathlib import Path

from cleanrl_utils.pages.scripts import ROOT

FIGURES = ROOT / "benchmark" / "speed.csv"
LIBRARIES = {"stable_baselines3": "SB3", "sb3_contrib": "SB3-Contrib", "sbx": "SBX"}
HEADER = ["script", "environment", "steps/s", "of the environment alone", "memory (MB)"]
HEADER += ["GPU memory (MB)", "times as fast as"]
NOTHING = "Nothing is measured yet."


def speed_tables(figures: Path = FIGURES) -> str:
    """A table of scripts for each hardware."""
    if not figures.exists():
        return NOTHING
    rows = list(csv.DictReader(figures.read_text().splitlines()))
    tables = []
    for hardware in sorted({row["hardware"] for row in rows}):
        mine = [row for row in rows if row["hardware"] == hardware]
        lines = [f"| {' | '.join(HEADER)} |", "|-" * len(HEADER) + "|"]
        lines += [table_row(row) for row in mine]
        tables.append(f"**{hardware}**\n\n" + "\n".join(lines))
    return "\n\n".join(tables)


def table_row(row: dict[str, str]) -> str:
    """A script's speed, its share of what its environment reaches alone, memory, and peers."""
    speed = int(row["steps_per_second"])
    limit = int(row["limit"])
    cells = [f"`{row['script']}`", f"`{row['env_id'].split(':')[-1]}`", f"{speed:,}"]
    cells.append(f"{speed / limit:.0%}" if limit else "")
    for memory in ("memory_mb", "gpu_memory_mb"):
        cells.append(f"{int(row[memory]):,}" if int(row[memory]) else "")
    return f"| {' | '.join([*cells, compared(row)])} |"


def compared(row: dict[str, str]) -> str:
    """How many times as fast as each library that was measured in turns with the script."""
    speed = int(row["steps_per_second"])
    ratios = []
    for library, name in LIBRARIES.items():
        if peer := int(row[library]):
            ratios.append(f"{name} {speed / peer:.2f}")
    return ", ".join(ratios)
