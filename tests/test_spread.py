"""No row prints a spread of one seed, and a result below the published one says by how much."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runs import make_run

from cleanrl_utils import results as runs_as_tables
from cleanrl_utils.analysis.comparison import cell, with_caution
from cleanrl_utils.pages import results, scripts, tuned

SPREAD = ("±", "[")
PUBLISHED = results.read_published()
GROUPS = results.read_groups()


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table below its head."""
    return [row[2:-2].split(" | ") for row in table.splitlines() if row.startswith("| ")][1:]


def column(table: str, title: str) -> int:
    return table.splitlines()[0][2:-2].split(" | ").index(title)


def check(table: str, score: str) -> int:
    """Check the score of every row with one seed; returns how many rows have several."""
    several = 0
    for row in cells(table):
        if row[0].endswith("not run yet") or not row[column(table, "seeds")].strip():
            continue
        alone = row[column(table, "seeds")] == "1"
        assert not alone or not any(mark in row[column(table, score)] for mark in SPREAD), row
        several += not alone and "±" in row[column(table, score)]
    return several


def test_no_committed_result_of_one_seed_has_a_spread() -> None:
    every = sorted(GROUPS, key=lambda group: (group.env_id, group.name, group.steps))
    pages = {script.name: script.page for script in scripts.read_scripts().values()}
    assert check(results.everything_table(every, pages, PUBLISHED), "ours") > 20
    for name in {group.script for group in GROUPS}:
        mine = [group for group in GROUPS if group.script == name]
        table, _ = results.results_table(name, mine, {})
        check(table, "ours")
    assert check(tuned.tuned_table(GROUPS), "return") > 5


def make_group(*finals: float, seeds: list[int] | None = None) -> results.Group:
    numbers = seeds or list(range(1, len(finals) + 1))
    found: list[dict[str, Any]] = []
    for seed, final in zip(numbers, finals, strict=True):
        found.append({"seed": seed, "final_return": final})
    return results.Group("ppo", "ppo", "CartPole-v1", 500_000, found)


def test_a_spread_needs_two_seeds_with_a_return() -> None:
    assert make_group(3.0).score() == "3.00"
    assert make_group(3.0, 5.0, seeds=[1, 1]).score() == "4.00"  # one seed, run twice
    assert make_group(3.0, math.nan).score() == "3.00 (1 of 2 seeds finished no episode)"
    assert make_group(3.0, 5.0).score() == "4.00\u00a0±\u00a01.41"


def test_the_tools_print_no_spread_of_one_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs"), 1, 100.0)
    runs_as_tables.main(["show", "runs"])
    assert "±" not in capsys.readouterr().out
    assert "±" not in cell(np.array([3.0]))
    assert "[" not in with_caution((1.0, 2.0), 1)


@pytest.mark.parametrize(
    "final, steps, said",
    [
        (120.0, 1000, ""),
        (100.0, 1000, ""),
        (90.0, 1000, "; **ours is 10.00 lower** (10%)"),
        (90.0, 200, "; **ours is 10.00 lower** (10%), after 20% of the steps"),
    ],
)
def test_a_result_below_the_published_one_says_by_how_much(
    final: float, steps: int, said: str
) -> None:
    group = results.Group("ppo", "ppo", "X-v1", steps, [{"seed": 1, "final_return": final}])
    row = {"mean": "100.0", "std": "", "steps": "1000", "what": "docs", "source": "https://x"}
    assert results.shortfall(group, [row]) == said
    assert results.shortfall(group, []) == ""


def test_pages_say_it_for_every_committed_result() -> None:
    below = 0
    for group in GROUPS:
        there = PUBLISHED.get((group.script, group.env_id), [])
        if not there or not group.column("final_return"):
            continue
        table, _ = results.results_table(group.script, [group], PUBLISHED)
        row = next(line for line in table.splitlines() if f"`{group.env_id}`" in line)
        best = max(float(x["mean"]) for x in there)
        worse = best - np.mean(group.column("final_return")) >= 0.005
        assert ("lower" in row) == worse, row
        below += worse
    assert below > 0
