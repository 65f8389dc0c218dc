"""--tuned: the settings it sets, the flags that win, what it refuses, and evidence per entry."""

import dataclasses
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from cleanrl_utils.analysis import committed, grouping, tables
from cleanrl_utils.errors import BadInput
from cleanrl_utils.running import settings, tuned
from cleanrl_utils.running.settings import parse_args

TUNED = tuned.read_tuned()
PAIRS = [(script, env_id) for script, envs in TUNED.items() for env_id in envs]
SEEDS = 3  # that an entry needs
NOT_LEARNING = {"cuda", "torch_threads", "torch_deterministic", "compile", "cudagraphs"}
NOT_LEARNING |= {"buffer_device"}

TOML = """
[ppo.CartPole-v1]
num_steps = 64
learning_rate = 1e-3
anneal_lr = false

[ppo."dm_control/walker-walk-v0"]
num_steps = 32
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text(TOML)
    monkeypatch.setattr(settings, "tuned_flags", lambda *args: tuned.tuned_flags(*args, path))


def parse(script: str, *words: str) -> Any:
    return parse_args(importlib.import_module(f"cleanrl.{script}").Args, list(words))


def test_it_sets_the_settings_of_the_environment_and_says_so(small: None, capfd) -> None:
    args = parse("ppo", "--tuned")
    assert (args.num_steps, args.learning_rate, args.anneal_lr) == (64, 1e-3, False)
    assert args.gamma == 0.99  # the default
    assert args.tuned
    said = capfd.readouterr().err.strip()
    assert said == (
        "--tuned, ppo.py on CartPole-v1: --num-steps 64 --learning-rate 0.001 --no-anneal-lr"
    )
    other = parse("ppo", "--env_id=dm_control/walker-walk-v0", "--tuned", "--env-id", "CartPole-v1")
    assert other.num_steps == 64
    assert parse("ppo", "--env-id", "dm_control/walker-walk-v0", "--tuned").num_steps == 32


@pytest.mark.parametrize("first", [True, False])
def test_explicit_flags_win(first: bool, small: None, capfd) -> None:
    words = ["--num_steps=16", "--anneal-lr"]
    args = parse("ppo", *(words if first else []), "--tuned", *([] if first else words))
    assert (args.num_steps, args.anneal_lr, args.learning_rate) == (16, True, 1e-3)
    said = capfd.readouterr().err
    assert "(not --num-steps, --anneal-lr: given on the command line)" in said


def test_without_it_nothing_changes(small: None, capfd) -> None:
    assert parse("ppo").num_steps == parse("ppo", "--tuned", "--no-tuned").num_steps == 128
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "script, words, message",
    [
        (
            "ppo",
            ["--env-id", "Foo-v1"],
            "--tuned: ppo.py has no tuned settings for Foo-v1, only for CartPole-v1,"
            " dm_control/walker-walk-v0",
        ),
        ("dqn", [], "--tuned: dqn.py has no tuned settings; scripts that have: ppo"),
    ],
)
def test_an_unknown_pair_is_one_line(
    script: str, words: list[str], message: str, small: None, capfd
) -> None:
    with pytest.raises(BadInput) as bad:
        parse(script, "--tuned", *words)
    assert bad.value.code == 2
    assert capfd.readouterr().err == f"error: {message}\n"


def test_a_copy_uses_the_settings_of_the_script_in_its_name() -> None:
    known = {"ppo", "ppo_jax", "ppo_continuous_action", "dqn"}
    assert tuned.script_of("ppo", known) == "ppo"
    assert tuned.script_of("my_ppo", known) == "ppo"
    assert tuned.script_of("ppo_masked", known) == "ppo"
    assert tuned.script_of("ppo_continuous_action_mine", known) == "ppo_continuous_action"
    assert tuned.script_of("ppo_jax", known) == "ppo_jax"
    assert tuned.script_of("ppography", known) == "ppography"


def test_a_copied_script_runs_with_tuned_settings(tmp_path: Path) -> None:
    script, env_id = next(pair for pair in PAIRS if pair[0] == "ppo_jax")
    copy = tmp_path / f"my_{script}.py"
    shutil.copy(ROOT / "cleanrl" / f"{script}.py", copy)
    code = f"import my_{script} as x; print(x.parse_args(x.Args).learning_rate)"
    words = [sys.executable, "-c", code, "--tuned", "--env-id", env_id]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert float(done.stdout) == TUNED[script][env_id]["learning_rate"], done.stderr


def test_a_run_records_what_was_set(train, small: None) -> None:
    run = train("ppo", "--tuned --total-timesteps 512 --num-envs 2")
    record = json.loads((run.folder / "run.json").read_text())
    assert record["args"]["num_steps"] == 64
    assert record["args"]["learning_rate"] == 1e-3
    plain = dict(record["args"], tuned=False)
    assert grouping.compared_settings(plain) == grouping.compared_settings(record["args"])


def test_a_resumed_run_keeps_what_was_set(small: None, capfd, tmp_path: Path) -> None:
    """The benchmark repeats the whole command, --tuned included, when it resumes a run."""

    def store(args: Any) -> None:
        record = {"script": "ppo", "command": ["ppo.py"], "args": dataclasses.asdict(args)}
        (tmp_path / "run.json").write_text(json.dumps(record))

    resume = ["--tuned", "--resume", str(tmp_path)]
    store(parse("ppo", "--tuned", "--gamma", "0.9"))
    args = parse("ppo", *resume)
    assert (args.num_steps, args.gamma, args.tuned) == (64, 0.9, True)
    store(parse("ppo"))
    capfd.readouterr()
    with pytest.raises(BadInput) as bad:
        parse("ppo", *resume)
    assert bad.value.code == 2
    assert capfd.readouterr().err == (
        f"error: --resume {tmp_path} continues a run with its own settings:"
        " --tuned was False, now True\n"
    )


def test_a_run_from_before_the_flag_can_be_resumed(tmp_path: Path) -> None:
    from cleanrl import ppo

    stored = dataclasses.asdict(parse("ppo", "--num-steps", "32"))
    del stored["tuned"]
    record = {"script": "ppo", "command": ["ppo.py"], "args": stored}
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert parse_args(ppo.Args, ["--resume", str(tmp_path)]).num_steps == 32
    del stored["num_steps"]
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(BadInput):
        parse_args(ppo.Args, ["--resume", str(tmp_path)])


# -- the committed file --------------------------------------------------------------------------


@pytest.mark.parametrize("script, env_id", PAIRS)
def test_every_entry_has_three_seeds_of_exactly_these_settings(script: str, env_id: str) -> None:
    args = parse(script, "--tuned", "--env-id", env_id)
    wanted = grouping.compared_settings(dataclasses.asdict(args))
    for name in NOT_LEARNING:
        wanted.pop(name, None)
    facts = committed.facts().to_dict("records")
    seeds = set()
    for fact in facts:
        if (fact["script"], fact["env_id"]) != (script, env_id):
            continue
        found = tables.fact_settings(fact)
        if all(found.get(name) == value for name, value in wanted.items()) and not fact["dirty"]:
            seeds.add(fact["seed"])
    assert len(seeds) >= SEEDS


def test_every_entry_changes_something() -> None:
    for script, env_id in PAIRS:
        default = parse(script, "--env-id", env_id)
        for name, value in TUNED[script][env_id].items():
            assert getattr(default, name) != value, (script, env_id, name)
