"""The table of speeds: benchmark/speed.csv, as benchmark/speed.py writes it."""

import csv
from pathlib import Path

from cleanrl_utils.pages.scripts import ROOT

FIGURES = ROOT / "benchmark" / "speed.csv"
LIBRARIES = {"stable_baselines3": "SB3", "sb3_contrib": "SB3-Contrib", "sbx": "SBX"}
LIMITS = {"limit": "of the environment", "learning": "of learning"}
HEADER = ["script", "environment", "steps/s", "times as fast as", *LIMITS.values()]
MEMORY = {"memory_mb": "memory (MB)", "gpu_memory_mb": "GPU memory (MB)"}
NOTHING = "Nothing is measured yet."


def speed_tables(figures: Path = FIGURES) -> str:
    """A table of scripts for each hardware."""
    if not figures.exists():
        return NOTHING
    rows = list(csv.DictReader(figures.read_text().splitlines()))
    tables = []
    for hardware in sorted({row["hardware"] for row in rows}):
        mine = [row for row in rows if row["hardware"] == hardware]
        memory = [column for column in MEMORY if any(int(row[column]) for row in mine)]
        header = [*HEADER, *(MEMORY[column] for column in memory)]
        lines = [f"| {' | '.join(header)} |", "|-" * len(header) + "|"]
        lines += [table_row(row, memory) for row in mine]
        tables.append(f"**{hardware}**\n\n" + "\n".join(lines))
    return "\n\n".join(tables)


def table_row(row: dict[str, str], memory: list[str]) -> str:
    """A script's speed beside other libraries, its share of what its environment and its learning
    reach alone, and the memory it uses."""
    speed = int(row["steps_per_second"])
    limits = [int(row[column]) for column in LIMITS]
    compiled = " --compile" if "--compile" in row["flags"].split() else ""
    cells = [f"`{row['script']}{compiled}`", f"`{row['env_id'].split(':')[-1]}`", f"{speed:,}"]
    cells += [compared(row), *(f"{speed / limit:.0%}" if limit else "" for limit in limits)]
    cells += [f"{int(row[column]):,}" for column in memory]
    return f"| {' | '.join(cells)} |"


def compared(row: dict[str, str]) -> str:
    """How many times as fast as each library that was measured in turns with the script."""
    speed = int(row["steps_per_second"])
    ratios = []
    for library, name in LIBRARIES.items():
        if peer := int(row[library]):
            ratios.append(f"{name} {speed / peer:.2f}")
    return "<br>".join(ratios)
