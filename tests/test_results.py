"""Tables of runs: which runs are averaged, which count, and the notes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from fake_runs import make_run

from cleanrl_utils import reproduce, results, rlops
from cleanrl_utils.analysis import committed, grouping, stats
from cleanrl_utils.analysis.palette import colors
from cleanrl_utils.errors import BadInput


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def show(capsys: pytest.CaptureFixture, *where: str) -> str:
    results.main(["show", *(where or ["runs"])])
    return capsys.readouterr().out


def cells(text: str) -> list[list[str]]:
    """The rows of a Markdown table below its head."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row[2:-2].split(" | ")] for row in rows[2:]]


def test_seeds_are_pooled_and_their_deviation_is_that_of_a_sample(
    capsys: pytest.CaptureFixture,
) -> None:
    for seed in (1, 2, 3):
        same = {"track": seed == 1, "num_seeds": seed, "checkpoints": seed}
        make_run(Path("runs"), seed, 100.0, learning_rate=0.1, **same)
    printed = show(capsys)
    finals = [results.summary(run)["final_return"] for run in results.find_runs("runs")]
    ((script, env_id, score, _, seeds, steps, _),) = cells(printed)
    assert (script, env_id, seeds, steps) == ("ppo", "CartPole-v1", "3", "10,000")
    assert score == f"{np.mean(finals):.2f} ± {np.std(finals, ddof=1):.2f}"
    assert "settings" not in printed and "note:" not in printed


def test_the_time_of_the_final_evaluation_is_not_that_of_training() -> None:
    metrics = make_run(Path("runs"), 1, 100.0) / "metrics.csv"
    (run,) = results.find_runs("runs")
    before = results.summary(run)["seconds"]
    with open(metrics, "a") as file:
        file.write("0,9999.0,eval/episodic_return,100.0\n0,9999.0,eval/episodic_length,100.0\n")
    assert results.summary(run)["seconds"] == before < 100


def test_one_seed_has_no_deviation(capsys: pytest.CaptureFixture) -> None:
    make_run(Path("runs"), 1, 100.0)
    assert "±" not in show(capsys)
    assert stats.mean_and_std([3.0]) == "3.00"
    assert stats.mean_and_std([10.0, 20.0, 30.0]) == "20.00 ± 10.00"


def test_different_settings_are_rows_of_their_own(capsys: pytest.CaptureFixture) -> None:
    for seed in (1, 2):
        for rate in (0.001, 0.01):
            name = f"run-{seed}-{rate}"
            make_run(Path("runs"), seed, 100.0, name=name, learning_rate=rate, gamma=0.99)
    rows = cells(show(capsys))
    assert [(row[4], row[7]) for row in rows] == [
        ("2", "--learning-rate 0.001"),
        ("2", "--learning-rate 0.01"),
    ]


def test_checkpoints_that_restart_environments_matter(capsys: pytest.CaptureFixture) -> None:
    for seed, restarts in ((1, 10), (2, 10), (3, 2)):
        run = make_run(Path("runs"), seed, 100.0)
        (run / "finished.json").write_text(json.dumps({"environment_restarts": restarts}))
    rows = cells(show(capsys))
    assert [(row[4], row[7]) for row in rows] == [
        ("2", "environment restarts 10"),
        ("1", "environment restarts 2"),
    ]


def test_a_seed_counts_once_and_the_newest_run_of_it_does(capsys: pytest.CaptureFixture) -> None:
    make_run(Path("runs"), 0, 100.0, name="first")
    make_run(Path("runs"), 0, 100.0, name="second")
    newest = make_run(Path("runs"), 0, 300.0, name="third")
    printed = show(capsys)
    ((_, _, score, _, seeds, *_),) = cells(printed)
    expected = results.summary(results.find_runs(newest)[0])["final_return"]
    assert seeds == "1" and float(score) == pytest.approx(expected, abs=0.01)
    assert "note: ppo on CartPole-v1: 2 earlier runs of the same seed and settings" in printed


def test_the_newest_run_of_a_seed_counts_in_whatever_folder_it_is(tmp_path: Path) -> None:
    for year, where in ("2025", "old"), ("2026", "new"):
        make_run(Path(where), 1, 100.0, name=where, more={"started": f"{year}-01-01T00:00:00Z"})
    for where in ["old", "new"], ["new", "old"]:
        assert results.add(where, tmp_path / "kept") == ["new"]


def test_a_folder_that_is_not_there_is_named(capsys: pytest.CaptureFixture) -> None:
    make_run(Path("runs"), 1, 100.0)
    with pytest.raises(SystemExit) as stop:
        show(capsys, "runs", "rums")
    assert stop.value.code == 2 and capsys.readouterr().err == "error: rums: no such folder\n"


def test_a_command_can_be_typed_again(tmp_path: Path) -> None:
    words = ["my.py", "--exp-name", "my try", "--runs-dir", "a b", "--seed", "2", "--runs_dir=c"]
    more = {"command": words, "script_path": "mine/my.py"}
    make_run(Path("runs"), 1, 100.0, more=more)
    (run,) = results.find_runs("runs")
    assert results.command(run.record) == "python mine/my.py --exp-name 'my try' --seed 2"


LONGER = {"lengthened": [{"at_step": 5_000, "from": 5_000, "to": 10_000}]}


def test_changes_of_a_library_in_another_checkout_make_a_run_dirty(tmp_path: Path) -> None:
    for dirty in (False, True):
        more = {"library": {"commit": "def", "dirty": dirty}}
        folder = make_run(tmp_path / str(dirty), 1, 10.0, more=more)
        (run,) = results.find_runs(folder)
        assert results.summary(run)["dirty"] is dirty
        said = "\n".join(reproduce.commands(run.record))
        assert "cleanrl_utils was imported from another checkout, at def" in said
        assert ("its uncommitted changes are lost" in said) is dirty


def test_a_lengthened_run_is_no_seed_of_the_ordinary_ones(capsys: pytest.CaptureFixture) -> None:
    for seed in (1, 2, 3):
        more = LONGER if seed == 3 else {}
        make_run(Path("runs"), seed, 100.0, total_timesteps=10_000, more=more)
    printed = show(capsys)
    assert [row[4] for row in cells(printed)] == ["2", "1"]
    assert "lengthened unset" in printed and "lengthened 5000-to-10000-at-5000" in printed


def test_unfinished_runs_and_other_code_are_said(capsys: pytest.CaptureFixture) -> None:
    make_run(Path("runs"), 1, 100.0, code="1111")
    make_run(Path("runs"), 2, 100.0, code="2222")
    make_run(Path("runs"), 3, 100.0, code="2222", finished=False, episodes=80)
    printed = show(capsys)
    first, second = cells(printed)
    assert (first[4], first[7]) == ("2", "") and (second[4], second[7]) == ("1", "not finished")
    assert "its runs are of different code: 1111 (seed 1); 2222 (seed 2)" in printed


def test_runs_that_were_resumed_with_other_code_are_named(capsys: pytest.CaptureFixture) -> None:
    edited = {"edited": [{"at_step": 100, "code": "2222"}]}
    make_run(Path("runs"), 1, 100.0, code="1111", more=edited)
    assert "note: ppo on CartPole-v1: seed 1 was resumed with other code\n" in show(capsys)
    assert rlops.main(["--exp-name", "ppo"]) == 0
    assert "note: ppo: CartPole-v1__ppo__1__aaa was resumed with" in capsys.readouterr().err


def test_earlier_runs_of_other_code_are_said(capsys: pytest.CaptureFixture) -> None:
    make_run(Path("runs"), 1, 100.0, code="1111", name="old")
    make_run(Path("runs"), 1, 100.0, code="2222", name="new")
    assert "same seed and settings not counted, of other code\n" in show(capsys)
    rlops.main(["--exp-name", "ppo"])
    assert "1 earlier run of the same tasks and seeds left out, of other code\n" in (
        capsys.readouterr().err
    )


def test_a_run_without_a_finished_episode_says_so(capsys: pytest.CaptureFixture) -> None:
    make_run(Path("runs"), 1, 100.0, episodes=0)
    assert cells(show(capsys))[0][2] == "no finished episode"
    make_run(Path("runs"), 2, 100.0)
    score = cells(show(capsys))[0][2]
    assert score.endswith("(1 of 2 seeds finished no episode)") and "±" not in score


def test_a_run_without_a_finished_episode_is_not_plotted(capsys: pytest.CaptureFixture) -> None:
    empty = make_run(Path("runs"), 1, 0.0, episodes=0)
    full = make_run(Path("runs"), 2, 100.0)
    results.main(["plot", "runs"])
    said = capsys.readouterr()
    assert said.out == f"{full}/curve.png\n"
    assert said.err == f"note: {empty}: no finished episode to plot\n"
    assert not (empty / "curve.png").exists()


def test_a_curve_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture) -> None:
    run = make_run(Path("runs"), 1, 100.0)
    (run / "curve.png").mkdir()
    with pytest.raises(SystemExit) as stop:
        results.main(["plot", "runs"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.startswith(f"error: {run}/curve.png: cannot be written")


def test_a_run_that_lost_its_metrics_is_left_out(capsys: pytest.CaptureFixture) -> None:
    lost = make_run(Path("runs"), 1, 100.0)
    make_run(Path("runs"), 2, 100.0)
    (lost / "metrics.csv").unlink()
    results.main(["show", "runs"])
    said = capsys.readouterr()
    assert cells(said.out)[0][4] == "1"
    assert said.err == f"note: {lost} left out: it has no metrics.csv\n"


def test_a_run_that_is_added_or_exported_twice_has_one_curve(tmp_path: Path) -> None:
    run = make_run(Path("runs"), 1, 100.0)
    once = len(results.export(tmp_path / "once.parquet", ["runs"]))
    assert len(results.export(tmp_path / "twice.parquet", ["runs", str(run)])) == once
    for place, where in ("once", ["runs"]), ("twice", ["runs", str(run)]):
        results.add(where, tmp_path / place)
    one, other = (results.load(folder=tmp_path / place) for place in ("once", "twice"))
    assert len(one) == len(other)


def test_a_run_and_its_copy_have_one_curve(tmp_path: Path) -> None:
    run = make_run(Path("runs"), 1, 100.0)
    shutil.copytree(run, Path("copies") / run.name)
    results.add(["runs"], tmp_path / "once")
    results.add(["runs", "copies"], tmp_path / "both")
    assert (tmp_path / "both/ppo.csv").read_text() == (tmp_path / "once/ppo.csv").read_text()


def test_what_an_older_result_lacks_is_empty_in_parquet(tmp_path: Path) -> None:
    make_run(Path("runs"), 1, 100.0)
    make_run(Path("runs"), 2, 100.0)
    results.add(["runs"], tmp_path)
    (path,) = tmp_path.glob("*.json")
    facts = json.loads(path.read_text())
    del facts[0]["settings"], facts[0]["greedy_returns"]
    path.write_text(json.dumps(facts))
    results.export(tmp_path / "all.parquet", folder=tmp_path)
    exported = pd.read_parquet(tmp_path / "all.parquet").drop_duplicates("seed").set_index("seed")
    assert pd.isna(exported.greedy_returns[1]) and pd.isna(exported.settings[1])
    assert exported.greedy_returns[2] == "[]" and json.loads(exported.settings[2])


def test_help_shows_commands_as_they_are_typed(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "cleanrl_utils.results"]
    done = subprocess.run([*words, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("Tables of runs, and the committed results")
    assert "\n    python -m cleanrl_utils.results plot runs/NAME " in done.stdout
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stderr.startswith("error: missing: one of show,add,plot,export")
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_a_run_that_is_named_twice_counts_once(capsys: pytest.CaptureFixture) -> None:
    run = make_run(Path("runs"), 1, 100.0)
    assert "not counted" not in show(capsys, "runs", str(run), str(run.resolve()))


def test_trials_of_the_tuner_are_apart(capsys: pytest.CaptureFixture) -> None:
    make_run(Path("runs"), 1, 100.0)
    make_run(Path("runs/.tuner/study/trial_0000"), 0, 100.0)
    assert cells(show(capsys))[0][4] == "1"
    assert len(results.find_runs("runs")) == 1
    assert len(results.find_runs("runs/.tuner")) == len(results.find_runs("runs/.tuner/study")) == 1


def test_a_setting_has_one_spelling() -> None:
    for same in (1_000_000, 1e6, "1e6", "1_000_000", "1000000"):
        assert grouping.as_text(same) == "1000000"
    for text, value in [("True", True), ("True", "true"), ("None", None), ("0 1", [0, 1.0])]:
        assert grouping.as_text(value) == text
    words = "python cleanrl/ppo.py --no-cuda --gamma=0.9 --seed 3 --total-timesteps 5000 --track"
    expected = {"script": "ppo", "cuda": "False", "gamma": "0.9", "steps": "4992"}
    assert grouping.command_settings(words, "ppo", 4992) == expected


def test_every_committed_result_is_one_group_of_seeds() -> None:
    """Otherwise a table of the documentation would average different runs."""
    facts = results.facts()
    rows = cells(results.table(facts))
    assert len(rows) == len(facts.groupby(["exp_name", "env_id"]))
    assert sum(int(row[4]) for row in rows) == len(facts)
    assert "± 0.00" not in " ".join(row[2] for row in rows if row[4] == "1")


def test_committed_facts_keep_the_settings(tmp_path: Path) -> None:
    make_run(Path("runs"), 1, 100.0, learning_rate=0.5, runs_dir="/home/me/runs")
    results.add(["runs"], tmp_path / "kept")
    (fact,) = json.loads((tmp_path / "kept/ppo.json").read_text())
    assert fact["settings"] == {"script": "ppo", "learning_rate": "0.5"}


def test_other_settings_are_not_added_to_a_group(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    make_run(Path("old"), 1, 100.0, name="old-1", learning_rate=0.5)
    make_run(Path("old"), 2, 100.0, name="old-2", learning_rate=0.5)
    results.add(["old"], kept)
    before = {path: path.read_text() for path in kept.iterdir()}
    make_run(Path("new"), 3, 100.0, name="new-3", learning_rate=0.1)
    with pytest.raises(BadInput) as refused:
        results.add(["new"], kept)
    assert refused.value.message == (
        "new-3: differs from old-1, also of ppo on CartPole-v1"
        " (--learning-rate 0.1 instead of 0.5);"
        " use --replace to remove runs with those, or another --exp-name"
    )
    assert before == {path: path.read_text() for path in kept.iterdir()}
    results.add(["new"], kept, replace=True)
    assert set(results.facts(folder=kept).run) == set(results.load(folder=kept).run) == {"new-3"}


def test_runs_of_changed_code_are_named_when_they_are_added(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    make_run(Path("old"), 1, 100.0, code="1111", name="old-1")
    results.add(["old"], tmp_path)
    assert not capsys.readouterr().err
    dirty = {"git": {"commit": "b" * 40, "dirty": True}}
    make_run(Path("new"), 2, 100.0, code="2222", name="new-2", more=dirty)
    results.add(["new"], tmp_path)
    assert capsys.readouterr().err.splitlines() == [
        "note: new-2: of code with changes that were not committed",
        "note: ppo on CartPole-v1: its runs are of different code: 1111 (seed 1); 2222 (seed 2)",
    ]
    make_run(Path("other"), 1, 100.0, env_id="Acrobot-v1", code="3333")
    results.add(["other"], tmp_path)
    assert not capsys.readouterr().err  # about the runs that are added


def test_results_are_not_hidden_in_an_installed_package(tmp_path: Path) -> None:
    make_run(Path("runs"), 1, 100.0)
    with pytest.raises(BadInput):
        results.add(["runs"], tmp_path / "site-packages" / "benchmark" / "results")
    assert not (tmp_path / "site-packages").exists()


def test_settings_are_compared_on_one_task_only() -> None:
    """Thousands of runs are added in seconds: settings are not read where they do not matter."""
    assert not committed.different_settings({"env_id": "A-v0"}, {"env_id": "B-v0"})


def test_of_two_runs_of_a_seed_one_is_added(tmp_path: Path) -> None:
    for name in ("first", "second"):
        make_run(Path("runs"), 1, 100.0, name=name)
    (name,) = results.add(["runs"], tmp_path / "kept")
    assert results.facts(folder=tmp_path / "kept").run.tolist() == [name]


def test_a_newer_run_of_a_seed_takes_its_place(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    for name in ("first", "second"):
        make_run(Path(name), 1, 100.0, name=name)
        results.add([name], kept)
    assert list(results.facts(folder=kept).run) == ["second"]
    assert set(results.load(folder=kept).run) == {"second"}


def test_colours_do_not_repeat() -> None:
    assert len(set(colors(200))) == 200 and colors(3) == colors(200)[:3]


def test_the_command_line() -> None:
    command = [sys.executable, "-m", "cleanrl_utils.results"]
    for flags, message in [
        ("show", "show needs a folder, e.g. runs"),
        ("show nowhere", "nowhere: no such folder"),
        ("draw runs", "draw"),
        ("show --where runs", "--where is not a flag"),
    ]:
        done = subprocess.run([*command, *flags.split()], capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr
