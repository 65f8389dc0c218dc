"""The module of the run folder: no other module opens its files."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cleanrl_utils.running import folder

ROOT = Path(__file__).resolve().parent.parent
RECORD = {"args": {"exp_name": "ppo", "seed": 1}, "script": "ppo", "command": ["ppo.py"]}


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_record(tmp_path, RECORD)
    synced: list[int] = []
    monkeypatch.setattr(folder.os, "fsync", synced.append)
    folder.write_record(tmp_path, RECORD)
    assert synced, "flushed before it is renamed"

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        folder.write_record(tmp_path, RECORD | {"script": "dqn"})
    assert folder.read_record(tmp_path) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == [folder.RECORD]


@pytest.mark.parametrize(
    "change",
    [
        {"args": None},
        {"args": []},
        {"args": {"exp_name": "ppo"}},
        {"args": {"exp_name": "ppo", "seed": "one"}},
        {"args": {"exp_name": ["ppo"], "seed": 1}},
        {"args": {"exp_name": "ppo", "seed": 1, "env_id": 5}},
        {"script": 3},
        {"command": "ppo.py"},
        {"command": [1, 2]},
    ],
)
def test_only_a_whole_record_is_one(tmp_path: Path, change: dict[str, Any]) -> None:
    assert folder.is_record(RECORD)
    (tmp_path / folder.RECORD).write_text(json.dumps(RECORD | change))
    assert folder.find_record(tmp_path) is None
    with pytest.raises(SystemExit) as stop:
        folder.read_record(tmp_path, "--resume")
    assert stop.value.code == 2


@pytest.mark.parametrize(
    "names",
    [
        {"env_id": "x" * 300},
        {"exp_name": "é" * 200},
        {"runs_dir": "x" * 300},
        {"runs_dir": "new/" + "x" * 300},
        {"env_id": "\0"},
    ],
)
def test_a_name_that_no_folder_can_have_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, names: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    args = {"env_id": "CartPole-v1", "exp_name": "ppo", "seed": 1, "runs_dir": "runs"}
    with pytest.raises(SystemExit) as stop:
        folder.new_folder(SimpleNamespace(**args | names))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert all(flag in said for flag in ("--runs-dir", "--env-id", "--exp-name"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000, "\x00"])
def test_a_damaged_file_is_no_record(tmp_path: Path, text: str) -> None:
    for name in (folder.RECORD, folder.SUMMARY):
        (tmp_path / name).write_text(text)
    assert folder.find_record(tmp_path) is None
    assert folder.read_summary(tmp_path) == {}
    assert folder.can_resume(tmp_path)


def test_new_metrics_come_once_and_a_resumed_run_starts_over(tmp_path: Path) -> None:
    folder.write_record(tmp_path, {**RECORD, "args": {**RECORD["args"], "total_timesteps": 9}})  # type: ignore[dict-item]
    path = tmp_path / folder.METRICS
    metrics = folder.Metrics(tmp_path)
    assert metrics.total == 9 and list(metrics.new()) == []
    path.write_text("step,seconds,tag,value\n1,0.5,a,1.0\n2,1.0,a,2")
    assert list(metrics.new()) == [(1, 0.5, "a", 1.0)]
    with open(path, "a") as file:
        file.write(".5\nhalf a\n")
    assert list(metrics.new()) == [(2, 1.0, "a", 2.5)]
    path.write_text("step,seconds,tag,value\n1,0.5,a,1.0\n")
    assert list(metrics.new()) == [(1, 0.5, "a", 1.0)]
    assert folder.read_metrics(tmp_path).value.tolist() == [1.0]


def test_a_value_that_is_cut_off_is_not_read_as_a_smaller_one(tmp_path: Path) -> None:
    """The last line of a run that writes, or was killed while it wrote."""
    rows = (
        "step,seconds,tag,value\n1,0.1,charts/episodic_return,500.0\n2,0.1,charts/episodic_return,5"
    )
    (tmp_path / "metrics.csv").write_text(rows)
    assert folder.read_metrics(tmp_path).value.tolist() == [500.0]


def test_nobody_else_opens_its_files() -> None:
    names = re.compile(r"""["'/](run\.json|finished\.json|metrics\.csv)["']""")
    paths = [path for path in (ROOT / "cleanrl_utils").rglob("*.py") if path.name != "folder.py"]
    found = {str(p.relative_to(ROOT)) for p in paths if names.search(p.read_text())}
    assert not found
