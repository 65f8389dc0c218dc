"""The MinAtar suite's page, and the statistics that only it uses."""

import re
import statistics

import numpy as np
import pytest

from cleanrl_utils.analysis import stats
from cleanrl_utils.pages import results, suite, svg


def test_the_optimality_gap_counts_only_what_is_missing() -> None:
    runs = [np.array([0.5, 1.5]), np.array([1.0, 0.8])]
    gap, (low, high) = stats.optimality_gap(runs)
    assert gap == pytest.approx((0.25 + 0.1) / 2)
    assert low == pytest.approx(0) and high == pytest.approx((0.5 + 0.2) / 2)


def test_tolerance_intervals_have_the_shares_of_wilks() -> None:
    assert stats.tolerance(46) == (1, 0.9)  # the least number for 90% with 95% confidence
    assert stats.tolerance(45)[1] < 0.9
    assert stats.tolerance(93, share=0.95) == (1, 0.95)  # and for 95%
    k, share = stats.tolerance(10)
    assert k == 1 and share == pytest.approx(0.606, abs=1e-3)
    assert stats.tolerance(200)[0] > 1


def test_tolerance_intervals_contain_what_they_claim() -> None:
    random = np.random.default_rng(1)
    for count in (10, 30, 93):
        k, share = stats.tolerance(count)
        uniform = np.sort(random.random((20_000, count)), axis=1)  # a share is a length
        contained = uniform[:, -k] - uniform[:, k - 1] >= share
        assert contained.mean() == pytest.approx(0.95, abs=0.02) or contained.mean() > 0.95


def make_groups(seeds: int, steps: int, scripts: tuple[str, ...]) -> list[results.Group]:
    found = []
    for script in scripts:
        for game in suite.GAMES:
            runs = [{"seed": s, "final_return": 10.0 + s, "run": str(s)} for s in range(seeds)]
            found.append(results.Group(script, script, game, steps, runs))
    return found


def test_the_suite_is_the_complete_length_with_the_most_seeds() -> None:
    both = ("ppo_jax", "pqn_jax")
    ten = make_groups(10, 5_000_000, both)
    thirty = make_groups(30, 10_000_000, both)
    half = make_groups(50, 1_000_000, ("ppo_jax",))
    assert suite.choose([]) == {}
    assert suite.choose(half) == {}
    assert suite.choose(ten + half)["pqn_jax"]["Breakout-MinAtar"].steps == 5_000_000
    assert suite.choose(ten + thirty)["ppo_jax"]["Freeway-MinAtar"].steps == 10_000_000
    assert suite.choose(ten + thirty[:-1])["ppo_jax"]["Freeway-MinAtar"].steps == 5_000_000


def test_the_page_has_intervals_for_every_script_and_game() -> None:
    groups = results.read_groups()
    before, charts, table, origin = suite.suite_page(groups)
    interval = r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]"
    for script in suite.SCRIPTS:
        row = next(line for line in before.splitlines() if line.startswith(f"| `{script}.py`"))
        assert len(re.findall(interval, row)) == 2
    assert "probability" in before
    # two interval charts, the profiles, one chart per game: a band of each script in all of them
    assert charts.count('class="band"') == (3 + len(suite.GAMES)) * len(suite.SCRIPTS)
    assert charts.count("<svg") == 3 + len(suite.GAMES)
    assert "nan" not in charts.lower()
    chosen = suite.choose(groups)
    for game in suite.GAMES:
        assert charts.count(f"<h2>{game}</h2>") == 1
        for script in suite.SCRIPTS:
            group = chosen[script][game]
            mean = statistics.fmean(group.column("final_return"))
            assert f"{mean:,.2f}" in table
    assert "commit" in origin


def test_stairs_keep_their_levels_until_the_next_point() -> None:
    x = np.array([0.0, 1.0, 3.0])
    y = np.array([5.0, 4.0, 2.0])
    rows = svg.stairs(svg.Line("", "", x, y, y, y, steps=True))
    assert rows[:, 0].tolist() == [0, 1, 1, 3, 3, 3]
    assert rows[:, 1].tolist() == [5, 5, 4, 4, 2, 2]


def test_ticks_are_round_and_inside() -> None:
    assert svg.ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert svg.ticks(0.89, 1.02) == pytest.approx([0.9, 0.95, 1.0])
