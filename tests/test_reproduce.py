"""The commands that reproduce prints, on a real run."""

import csv
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cleanrl_utils import reproduce, results
from cleanrl_utils.running import folder

ROOT = Path(__file__).resolve().parent.parent


def metrics(folder: Path) -> list[tuple[str, ...]]:
    with open(folder / "metrics.csv") as file:
        return [
            (r["step"], r["tag"], r["value"]) for r in csv.DictReader(file) if "SPS" not in r["tag"]
        ]


@pytest.mark.parametrize("option", [[], ["--all-flags"]])
def test_the_printed_command_repeats_the_run(
    train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture, option: list[str]
) -> None:
    flags = "--cuda False --total-timesteps 1024 --learning-rate 1e-3 --seed 7 --no-anneal-lr"
    first = train("ppo", flags).folder
    capsys.readouterr()
    assert reproduce.main([str(first), *option]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("git checkout ") for line in lines)
    (pins,) = [line for line in lines if "gymnasium==" in line]
    assert " torch==" in pins and "+" not in pins and "cleanrl==" not in pins
    words = shlex.split(lines[-1])
    assert words[0].endswith("bin/python") and words[1] == "cleanrl/ppo.py"
    assert not any(word.startswith(("--runs-dir", "--resume")) for word in words)
    words = [sys.executable, str(ROOT / words[1]), *words[2:]]
    (tmp_path / "again").mkdir()
    subprocess.run(words, cwd=tmp_path / "again", check=True, capture_output=True, timeout=200)
    (again,) = (tmp_path / "again/runs").iterdir()
    assert metrics(again) == metrics(first) and len(metrics(first)) > 20


def test_a_run_started_beside_its_script_names_the_path_in_the_repository(tmp_path: Path) -> None:
    words = ["ppo.py", "--total-timesteps", "512", "--runs-dir", str(tmp_path)]
    command = [sys.executable, *words]
    subprocess.run(command, cwd=ROOT / "cleanrl", check=True, capture_output=True, timeout=200)
    (run,) = results.find_runs(tmp_path)
    assert run.record["script_path"] == "ppo.py"
    assert results.command(run.record) == "python cleanrl/ppo.py --total-timesteps 512"
    assert " cleanrl/ppo.py --total" in reproduce.commands(run.record, run=run.folder)[-1]


def test_what_cannot_be_repeated_is_said(tmp_path: Path) -> None:
    record = {"args": {}, "script": "ppo", "command": ["ppo.py"], "git": {}}
    assert "commit is unknown" in "\n".join(reproduce.commands(record))
    record["git"] = {"commit": "abc", "dirty": True}
    assert "not committed" in "\n".join(reproduce.commands(record))
    record["args"] = {"env_id": "my_package.envs:My-v0"}
    line = "# The module my_package.envs of the environment must be on PYTHONPATH."
    assert line in reproduce.commands(record)
    record["args"] = {"env_id": "cleanrl_utils.environments.examples:LookAndListen-v0"}
    assert "PYTHONPATH" not in "\n".join(reproduce.commands(record))
    words = ["--a", "1", "--runs_dir", "x", "--resume=y", "--b=-2"]
    assert folder.drop_flags(words, reproduce.PER_RUN) == ["--a", "1", "--b=-2"]
    with pytest.raises(SystemExit) as stop:
        reproduce.main([str(tmp_path)])
    assert stop.value.code == 2


def test_a_script_in_a_repository_of_its_own_gets_the_library_of_its_run(tmp_path: Path) -> None:
    head = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    record = {"args": {}, "script": "mine", "command": ["mine.py"], "git": {}}
    record["library"] = {"commit": commit, "dirty": False}
    lines = reproduce.commands(record)
    checkout = "\n".join(line for line in lines if line == "set -e" or "git" in line)
    for _ in range(2):  # the same commands again
        subprocess.run(["bash", "-c", checkout], cwd=tmp_path, check=True, capture_output=True)
    (install,) = [line for line in lines if "requirements.txt" in line]
    there = install.replace(f"../{reproduce.VENV}/bin/python -m pip install -r", "test -f")
    assert there != install
    subprocess.run(["bash", "-c", there], cwd=tmp_path, check=True)
