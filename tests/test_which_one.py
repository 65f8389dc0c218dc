"""The page that compares algorithms for continuous control, from made-up results."""

import json

import pytest

from cleanrl_utils.pages import results, which_one
from cleanrl_utils.pages.results import Group

SAC = "sac_continuous_action"
PPO = "ppo_continuous_action"


def group(script: str, env_id: str, steps: int, seeds: int = 1, name: str = "") -> Group:
    runs = [{"run": f"{name or script}{i}", "seed": i, "hardware": "a GPU"} for i in range(seeds)]
    return Group(name or script, script, env_id, steps, runs)


@pytest.fixture(autouse=True)
def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """SAC's return is the step, PPO's the step / 10; SAC makes 100 steps a minute, PPO 1,000."""

    def curves_of(group: Group) -> list[results.Curve]:
        steps = list(range(100, group.steps + 1, 100))
        fast = group.script == PPO
        found = []
        for run in group.runs:
            minutes = [step / (1000 if fast else 100) for step in steps]
            found.append(
                [steps, minutes, [step / (10 if fast else 1) + run["seed"] for step in steps]]
            )
        return found

    for module in (results, which_one):
        monkeypatch.setattr(module, "curves_of", curves_of)


def test_the_longest_runs_of_each_algorithm_meet_where_two_have_run() -> None:
    groups = [group(SAC, "Ant-v4", 500), group(SAC, "Ant-v4", 1000), group(PPO, "Ant-v4", 3000)]
    groups += [group(SAC, "Hopper-v4", 1000), group("dqn", "Hopper-v4", 1000)]
    groups += [group(SAC, "Ant-v4", 2000, name="sac_small")]  # other settings: not compared
    groups += [group(PPO, "Hopper-v4", 1000, name="ppo_small")]
    found = which_one.contests(groups)
    assert list(found) == ["Ant-v4"]
    assert [(name, x.steps) for name, x in found["Ant-v4"].items()] == [(SAC, 1000), (PPO, 3000)]


def test_returns_are_those_after_equal_steps_and_equal_minutes() -> None:
    found = which_one.contests([group(SAC, "Ant-v4", 1000, seeds=2), group(PPO, "Ant-v4", 3000)])
    steps, minutes = (
        which_one.table(found, which_one.STEPS),
        which_one.table(found, which_one.MINUTES),
    )
    assert steps.splitlines()[0] == "| environment | steps | PPO | SAC |"
    row = "| `Ant-v4` | 1,000 | 100.00 | 1,000.50\u00a0±\u00a00.71 |"
    assert steps.splitlines()[-1] == row
    # all of PPO's 3,000 steps took 3 minutes, in which SAC made 300
    assert minutes.splitlines()[-1] == "| `Ant-v4` | 3.0 | 300.00 | 300.50\u00a0±\u00a00.71 |"


def test_a_run_that_logged_later_counts_with_its_first_return() -> None:
    assert which_one.return_at([[100, 200], [1, 2], [7, 8]], which_one.STEPS, 50) == 7
    assert which_one.return_at([[100, 200], [1, 2], [7, 8]], which_one.STEPS, 199) == 7
    assert which_one.return_at([[100, 200], [1, 2], [7, 8]], which_one.STEPS, 200) == 8


def test_lines_have_the_names_of_algorithms_and_the_rest_is_named() -> None:
    found = which_one.contests([group(SAC, "Ant-v4", 1000), group(PPO, "Ant-v4", 3000)])
    data = json.loads(which_one.chart(found).split(">", 2)[2].split("</script>")[0])
    assert [line["name"] for line in data["charts"][0]["lines"]] == ["SAC", "PPO"]
    assert len(data["colors"]) == 2
    missing = which_one.missing(found)
    assert "TQC" in missing and "SAC" not in missing
    assert which_one.hardware(found) == "- PPO: a GPU\n- SAC: a GPU"
    everyone = [group(script, "Ant-v4", 500) for script in which_one.ALGORITHMS]
    assert which_one.missing(which_one.contests(everyone)) == ""
