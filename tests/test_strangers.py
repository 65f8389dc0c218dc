"""Files made by others: they run no code, and damaged ones are refused in one line."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from conftest import ROOT

from cleanrl import dqn, ppo
from cleanrl_utils import enjoy, huggingface, reproduce
from cleanrl_utils.environments.vector import SyncVectorEnv
from cleanrl_utils.running import checkpoint, evaluation, folder
from cleanrl_utils.running.settings import parse_args
from cleanrl_utils.running.stored import restore_settings

ENV_ID = "CartPole-v1"


def save(path: Path, **changes: Any) -> Path:
    """A model of ppo.py that is not trained, with changed metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    envs = gym.vector.SyncVectorEnv([ppo.make_env(ENV_ID, 1, 0, False, "")])
    args = {**asdict(ppo.Args(exp_name="ppo")), **changes.pop("args", {})}
    about = {"script": "ppo", "class": "Agent", "args": args} | changes
    checkpoint.save(path, {"model": ppo.Agent(envs)}, about)
    envs.close()
    return path


def refused(capsys: pytest.CaptureFixture, function: Any, *args: Any, **kwargs: Any) -> str:
    """The one line with which a call is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        function(*args, **kwargs)
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that writes a file when it is imported; returns its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    mark = tmp_path / "imported"
    text = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    text += "import gymnasium as gym\n"
    text += "gym.register('X-v0', 'gymnasium.envs.classic_control:CartPoleEnv',"
    text += " max_episode_steps=500)\n"
    (tmp_path / "evilmod.py").write_text(text)
    monkeypatch.delitem(sys.modules, "evilmod", raising=False)
    return mark


def test_a_model_file_imports_nothing_that_the_user_has_not_named(
    evil: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = save(tmp_path / "x.cleanrl_model", args={"env_id": "evilmod:X-v0"})
    play = enjoy.EnjoyArgs(path=str(path), eval_episodes=1)
    assert "--env-id evilmod:X-v0" in refused(capsys, enjoy.enjoy, play)
    refused(capsys, evaluation.load_model, path)
    outside = save(tmp_path / "elsewhere" / "ppo.cleanrl_model", args={"env_id": "evilmod:X-v0"})
    refused(capsys, enjoy.enjoy, enjoy.EnjoyArgs(path=str(outside.parent), eval_episodes=1))
    assert not evil.exists()
    named = enjoy.EnjoyArgs(path=str(path), eval_episodes=1, env_id="evilmod:X-v0")
    assert len(enjoy.enjoy(named)) == 1 and evil.exists()


def test_a_run_of_ones_own_has_named_its_environment(evil: Path, tmp_path: Path) -> None:
    path = save(tmp_path / "runs" / "mine" / "ppo.cleanrl_model", args={"env_id": "evilmod:X-v0"})
    assert len(enjoy.enjoy(enjoy.EnjoyArgs(path=str(path.parent), eval_episodes=1))) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"script": 3},
        {"script": "os.path"},
        {"script": "../evil"},
        {"script": "x" * 300},  # longer than names of files may be
        {"script": "no_such_script"},
        {"class": None},
        {"class": "Args"},
        {"class": "parse_args"},
        {"class": "NoSuch"},
        {"args": {"env_id": 7}},
        {"args": {"env_id": ""}},
        {"args": {"env_id": "NoSuchGame-v0"}},
        {"args": {"num_envs": "four"}},
        {"args": {"num_envs": -1}},
        {"args": {"seed": None}},
        {"args": {"gamma": [0.9]}},
        {"args": {"anneal_lr": "yes"}},
        {"args": {"env_id": "Acrobot-v1"}},  # other shapes
    ],
)
def test_crafted_metadata_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, changes: dict[str, Any]
) -> None:
    path = save(tmp_path / "x.cleanrl_model", **changes)
    said = refused(capsys, evaluation.load_model, path)
    assert "x.cleanrl_model" in said or "cleanrl/" in said


def test_metadata_of_another_form_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "x.cleanrl_model"
    for about in ({"class": "Agent", "script": "ppo"}, {"class": "Agent", "args": {}}, {}):
        checkpoint.save(path, {"model": {}}, about)
        refused(capsys, evaluation.load_model, path)
    checkpoint.save(path, {"model": 3}, {"class": "Agent", "script": "ppo", "args": {}})
    refused(capsys, evaluation.load_model, path)


def run_folder(tmp_path: Path, **changes: Any) -> Path:
    place = tmp_path / "runs" / "one"
    save(place / "ppo.cleanrl_model")
    record = {
        "args": asdict(ppo.Args(exp_name="ppo", env_id=ENV_ID)),
        "script": "ppo",
        "command": ["ppo.py", "--seed", "1"],
        "git": {"commit": "d" * 40, "dirty": True},
        "versions": {"python": "3.11.2", "torch": "2.0.0"},
    }
    folder.write_record(place, record | changes)
    return place


def test_whole_numbers_above_64_bits_are_floats_where_the_setting_is_one() -> None:
    settings = {"learning_rate": 10**30, "gamma": 1, "target_kl": 10**40, "seed": 3}
    args = restore_settings(ppo.Args, settings, "x")
    kinds = {name: type(getattr(args, name)) for name in settings}
    assert list(kinds.values()) == [float, int, float, int]  # 1 stays 1: a model has the same bytes
    with pytest.raises(SystemExit):  # as inf
        restore_settings(ppo.Args, {"learning_rate": 10**400}, "x")


def test_a_saved_observation_that_does_not_fit_is_refused(capsys) -> None:
    envs = SyncVectorEnv([ppo.make_env(ENV_ID, 1, 0, False, "")])
    envs.reset(seed=1)
    saved = envs.state_dict()
    forged = saved | {"obs": saved["obs"][0, :3]}
    assert "(3,)" in refused(capsys, envs.load_state_dict, forged)
    envs.load_state_dict(saved)
    envs.close()


def test_names_of_scripts_that_no_file_can_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place = run_folder(tmp_path)
    (place / "ppo.py").write_text("# edited")
    for name in ("x" * 300, "\ud800" * 300, "a/b", "a\0b", ""):
        path = save(place / "ppo.cleanrl_model", script=name)
        own = str(tmp_path / "runs")
        play = enjoy.EnjoyArgs(path=str(path), eval_episodes=1, runs_dir=own)
        assert "ppo.cleanrl_model" in refused(capsys, enjoy.enjoy, play)
        folder.write_record(place, {**folder.find_record(run_folder(tmp_path)), "script": name})
        assert folder.find_record(place) is None


def test_a_model_file_in_a_run_is_played_by_the_script_of_the_run(tmp_path: Path) -> None:
    place = run_folder(tmp_path)
    (place / "ppo.py").write_text("# edited")
    best = save(place / "best" / "ppo.cleanrl_model")
    other = save(tmp_path / "runs" / "shared" / "ppo.cleanrl_model")
    for path in (place / "ppo.cleanrl_model", best):
        args = enjoy.EnjoyArgs(path=str(path), runs_dir=str(tmp_path / "runs"))
        model = enjoy.locate(args)
        assert (model.path, model.own) == (path, True)
        assert enjoy.choose_script(model, args) == place / "ppo.py"
    model = enjoy.locate(enjoy.EnjoyArgs(path=str(best), runs_dir=str(tmp_path / "mine")))
    assert not model.own and model.script == place / "ppo.py"
    model = enjoy.locate(enjoy.EnjoyArgs(path=str(other), runs_dir=str(tmp_path / "runs")))
    assert not model.own and model.script is None


def test_a_record_with_other_types_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "dummy")
    args = asdict(ppo.Args(exp_name="ppo", env_id=ENV_ID))
    place = run_folder(tmp_path, args=args | {"num_envs": "four"})
    said = refused(capsys, parse_args, ppo.Args, ["--resume", str(place)])
    assert "num_envs has a wrong value, 'four'" in said
    for bad in ({"args": [1]}, {"args": {"seed": "x"}}, {"script": None}, {"command": [3]}):
        place = run_folder(tmp_path, **bad)
        refused(capsys, parse_args, ppo.Args, ["--resume", str(place)])
        refused(capsys, reproduce.main, [str(place)])
        refused(capsys, huggingface.push_run, place)
    place = run_folder(tmp_path, args={"exp_name": "ppo", "seed": 1})
    refused(capsys, huggingface.push_run, place)


@pytest.mark.parametrize("bad", [None, 3, [1], "x", {"python": None, "torch": 3}])
def test_what_else_a_record_says_stops_nobody(tmp_path: Path, bad: Any) -> None:
    names = ("git", "versions", "hardware", "tags", "script_path", "script_tracked")
    place = run_folder(tmp_path, **dict.fromkeys(names, bad))
    lines = reproduce.commands(folder.read_record(place), run=place)
    assert lines[0] == "set -e" and "--seed 1" in lines[-1]
    assert not any("\n" in line for line in lines)


def test_mutated_files_end_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, evil: Path
) -> None:
    """100 changed model files and 100 changed records: loaded, or one line; nothing imported."""
    dice = random.Random(0)
    values: list[Any] = [None, -1, 10**30, 0.5, "", "evilmod:X-v0", "evilmod", [], {}, [[]], True]
    args = asdict(ppo.Args(exp_name="ppo", env_id=ENV_ID))
    whole = save(tmp_path / "whole.cleanrl_model").read_bytes()
    path = tmp_path / "x.cleanrl_model"
    place = run_folder(tmp_path)
    record = folder.read_record(place)
    for number in range(100):
        if number % 2:
            content = bytearray(whole)
            for _ in range(dice.randrange(1, 4)):
                content[dice.randrange(len(content))] = dice.randrange(256)
            path.write_bytes(bytes(content[: dice.choice([len(content), dice.randrange(4000)])]))
        else:
            name = dice.choice([*args, "script", "class", "args"])
            change = {name: dice.choice(values)}
            save(path, **(change if name in ("script", "class") else {"args": change}))
        name = dice.choice([*record, *args])
        new = dict(record, args=dict(args))
        (new if name in record else new["args"])[name] = dice.choice(values)
        text = json.dumps(new)
        text = text[: dice.choice([len(text), dice.randrange(len(text))])]
        (place / folder.RECORD).write_text(text)
        for function, argument in (
            (evaluation.load_model, (path,)),
            (reproduce.main, ([str(place)],)),
            (parse_args, (ppo.Args, ["--resume", str(place)])),
        ):
            capsys.readouterr()
            try:
                function(*argument)  # type: ignore[operator]
            except SystemExit as stop:
                assert stop.code == 2
                assert capsys.readouterr().err.count("\n") == 1
    assert not evil.exists()


# -- weights of the original -----------------------------------------------------------------------


def test_enjoy_plays_weights_that_the_original_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    envs = gym.vector.SyncVectorEnv([dqn.make_env(ENV_ID, 1, 0, False, "")])
    network = dqn.QNetwork(envs)
    envs.close()
    theirs = {f"network.{name}": x for name, x in network.state_dict().items()}
    torch.save(theirs, tmp_path / "q_network.pth")
    args = enjoy.EnjoyArgs(path="q_network.pth", exp_name="dqn", env_id=ENV_ID, eval_episodes=3)
    played = enjoy.enjoy(args)
    policy = evaluation.as_policy(network)
    assert played == evaluation.play(policy, dqn.make_env, ENV_ID, 3, 1, False, "")
    torch.save({"network.0.weight": torch.zeros(2)}, tmp_path / "q_network.pth")
    assert "not the weights of QNetwork" in refused(capsys, enjoy.enjoy, args)


# -- the script as it ran --------------------------------------------------------------------------


def call(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=240
    )
    return done


def test_a_changed_copy_elsewhere_can_be_played_and_reproduced(tmp_path: Path) -> None:
    """A script of one's own, in a folder that no repository knows, with a module beside it."""
    mine = tmp_path / "mine"
    mine.mkdir()
    text = (ROOT / "cleanrl" / "ppo.py").read_text()
    text = re.sub(r"\bAgent\b", "MyAgent", text)
    text = text.replace("import torch\n", "import nets\nimport torch\n", 1)
    (mine / "my_ppo.py").write_text(text)
    (mine / "nets.py").write_text("WIDTH = 64\n")
    flags = ["--cuda", "False", "--total-timesteps", "512", "--save-model", "--eval-episodes", "2"]
    done = call("mine/my_ppo.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "my_ppo.py").read_text() == text
    assert folder.read_record(run)["script_tracked"] is False
    done = call("-m", "cleanrl_utils.reproduce", str(run), cwd=tmp_path)
    assert "# The run imports modules that were not committed, nor kept: nets.py.\n" in done.stdout

    (mine / "my_ppo.py").write_text("raise RuntimeError('changed since')\n")
    done = call("-m", "cleanrl_utils.enjoy", str(run), "--eval-episodes", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"code: {run}/my_ppo.py (is not in cleanrl/)" in done.stdout

    # somebody else's folder: its code is named, not run
    theirs = tmp_path / "theirs"
    run.rename(theirs)
    done = call("-m", "cleanrl_utils.enjoy", "theirs", "--eval-episodes", "2", cwd=tmp_path)
    assert done.returncode == 2 and "not run: read it, then add --trust-remote-code" in done.stderr
    words = ["-m", "cleanrl_utils.enjoy", "--run", "theirs", "--eval-episodes", "2"]
    done = call(*words, "--trust-remote-code", cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    done = call("-m", "cleanrl_utils.reproduce", "theirs", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert f"{theirs}/my_ppo.py --cuda False" in lines[-1] and "not committed" in lines[-2]


def test_an_unchanged_copy_elsewhere_is_played_in_the_environment_beside_it(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.copy(ROOT / "cleanrl" / "ppo.py", mine)
    place = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    (mine / "world.py").write_text(f"import gymnasium\ngymnasium.register('W-v0', '{place}')\n")
    flags = ["--env-id", "world:W-v0", "--total-timesteps", "512", "--save-model"]
    done = call("mine/ppo.py", *flags, "--eval-episodes", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    done = call("-m", "cleanrl_utils.enjoy", str(run), "--eval-episodes", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def git(*words: str, cwd: Path) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *words], cwd=cwd, check=True, capture_output=True)


def test_uncommitted_changes_are_kept_and_can_be_restored(tmp_path: Path) -> None:
    script = tmp_path / "ppo.py"
    script.write_text((ROOT / "cleanrl" / "ppo.py").read_text())
    (tmp_path / "data.txt").write_text("one\n")
    git("init", "-q", cwd=tmp_path)
    git("add", ".", cwd=tmp_path)
    git("commit", "-qm", "first", cwd=tmp_path)
    (tmp_path / "data.txt").write_text("two\n")
    flags = ["--cuda", "False", "--total-timesteps", "512", "--checkpoints", "0"]
    done = call("ppo.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    changes = (run / folder.CHANGES).read_text()
    assert "-one" in changes and "+two" in changes
    lines = call("-m", "cleanrl_utils.reproduce", str(run), cwd=tmp_path).stdout.splitlines()
    (apply,) = [line for line in lines if line.startswith("git apply ")]
    git("checkout", "--", "data.txt", cwd=tmp_path)
    subprocess.run(apply, shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "data.txt").read_text() == "two\n"
    assert lines[-1].startswith(".venv-reproduce/bin/python ppo.py --cuda False")

    git("commit", "-qam", "second", cwd=tmp_path)
    (run / folder.CHANGES).unlink()
    done = call("ppo.py", *flags, "--runs-dir", "clean", cwd=tmp_path)
    (clean,) = (tmp_path / "clean").iterdir()
    assert not (clean / folder.CHANGES).exists(), "nothing was changed"
    assert os.listdir(clean).count("ppo.py") == 1
