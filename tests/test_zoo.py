"""The zoo: adding models, listing them, and playing each of those in the repository."""

import json
from pathlib import Path

import pytest

from cleanrl_utils import zoo
from cleanrl_utils.enjoy import EnjoyArgs, enjoy, locate
from cleanrl_utils.errors import BadInput
from cleanrl_utils.running import zoo as kept_models

NAMES = [kept.name for kept in kept_models.read_zoo()]
TRAIN = "--total-timesteps 512 --num-envs 2 --num-steps 64 --save-model --eval-episodes 2"


def test_a_run_is_added_listed_and_played_by_name(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    where = tmp_path / "zoo"
    run = train("ppo", TRAIN).folder
    kept = zoo.add(run, where)
    assert kept.name == "ppo__CartPole-v1"
    summary = json.loads((run / "finished.json").read_text())
    assert kept.episodic_return == pytest.approx(sum(summary["eval_returns"]) / 2, abs=0.01)
    assert kept.episodes == 2
    assert kept_models.read_zoo(where) == [kept]
    assert "ppo__CartPole-v1" in zoo.show(where)
    monkeypatch.setattr(
        "cleanrl_utils.enjoy.find_kept", lambda name: kept_models.find_kept(name, where)
    )
    played = enjoy(EnjoyArgs(path="ppo__CartPole-v1", eval_episodes=2))
    assert len(played) == 2
    assert "replaces" not in capsys.readouterr().out
    zoo.add(run, where)
    assert f"replaces a model with {kept.episodic_return:g}" in capsys.readouterr().out
    assert len(kept_models.read_zoo(where)) == 1


def test_an_unknown_action_is_one_line_that_names_the_others(monkeypatch, capsys) -> None:
    """Also where the error is as wide as the terminal."""
    for columns in range(60, 90):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(BadInput) as stop:
            zoo.main(["show"])
        assert stop.value.message == "action must be one of 'list', 'add', got 'show'"


def test_an_unknown_name_is_one_line_with_the_nearest_names(capfd) -> None:
    with pytest.raises(BadInput) as bad:
        locate(EnjoyArgs(path="ppo__CartPol-v1"))
    said = capfd.readouterr().err
    assert bad.value.code == 2 and said.count("\n") == 1
    assert "did you mean ppo__CartPole-v1" in said and "cleanrl_utils.zoo list" in said
    with pytest.raises(BadInput):
        locate(EnjoyArgs(path="runs/nothing"))
    assert "no such folder or file" in capfd.readouterr().err


def test_what_cannot_be_kept_is_one_line(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    where = tmp_path / "zoo"
    with pytest.raises(BadInput):
        zoo.add(tmp_path / "nothing", where)
    run = train("ppo", TRAIN).folder
    capfd.readouterr()
    monkeypatch.setattr(zoo, "LIMIT", 1000)
    with pytest.raises(BadInput):
        zoo.add(run, where)
    assert "the zoo would have" in capfd.readouterr().err
    assert not list(where.glob("*"))
    (run / "ppo.cleanrl_model").unlink()
    with pytest.raises(BadInput):
        zoo.add(run, where)
    assert "train with --save-model" in capfd.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_every_model_of_the_zoo_plays(name: str) -> None:
    assert len(enjoy(EnjoyArgs(path=name, eval_episodes=1))) == 1


def test_the_zoo_is_small_and_each_model_has_facts() -> None:
    models = {path.stem: path.stat().st_size for path in kept_models.ZOO.glob("*.cleanrl_model")}
    assert sorted(models) == sorted(NAMES)
    assert sum(models.values()) <= zoo.LIMIT
