"""Run: what it writes, which input it refuses, and that runs resume."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from conftest import ROOT, Killed

from cleanrl_utils import reproduce, results
from cleanrl_utils.errors import BadInput
from cleanrl_utils.running import checkpoint, rng
from cleanrl_utils.running.help import title_of
from cleanrl_utils.running.run import Run
from cleanrl_utils.running.settings import TorchArgs, parse_args

PPO = [sys.executable, str(ROOT / "cleanrl" / "ppo.py")]
SHORT = ["--total-timesteps", "4096", "--num-steps", "64", "--save-model", "--eval-episodes", "1"]


def run_ppo(*flags: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([*PPO, *flags], cwd=cwd, capture_output=True, text=True, timeout=300)


# -- command lines ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, field, value",
    [
        (["--cuda", "False"], "cuda", False),
        (["--no-cuda"], "cuda", False),
        (["--cuda=false"], "cuda", False),
        (["--capture_video"], "capture_video", True),
        (["--capture-video", "True"], "capture_video", True),
        (["--seed", "1e3"], "seed", 1000),
        (["--checkpoints", "1e2"], "checkpoints", 100),
        (["--checkpoints", "None"], "checkpoints", None),
        (["--seed", "4294967295"], "seed", 2**32 - 1),
        (["--wandb_project_name=x"], "wandb_project_name", "x"),
    ],
)
def test_ways_to_write_a_flag(words: list[str], field: str, value: object) -> None:
    assert getattr(parse_args(TorchArgs, words), field) == value


NO_RECORDS = {
    "odd_list": "[]",
    "odd_text": "{",
    "odd_empty": '{"args": {}}',
    "odd_args": '{"args": [], "script": "ppo", "command": []}',
    "odd_script": '{"args": {"exp_name": "ppo", "seed": 1}, "command": []}',
}
BAD_INPUT = {
    "--env-id CartPol-v1": ["--env-id", "CartPole-v1"],
    "--env-id Pendulum-v1": ["ppo_continuous_action.py"],
    "--env-id Breakot-v4": ["--env-id", "Breakout-v4"],
    "--num-minibatches 3": ["--num-minibatches", "512"],
    "--total-timesteps 100": ["--total-timesteps", "512"],
    "--num-envs 0": ["--num-envs", "at least 1"],
    "--num-steps 1": ["--num-steps", "at least 2"],
    "--num-envs 1 --num-steps 3": ["--num-steps", "at least 4"],
    "--env-id probes:ProbeOddFromOne-v0": ["start at 1", "actions from 0"],
    "--env-id probes:ProbeOddMultiDiscrete-v0": ["MultiDiscrete", "needs Discrete"],
    "--learning-rat 1": ["--learning-rat", "--learning-rate"],
    "--seed one": ["--seed", "one"],
    "--seed -1": ["--seed", "negative"],
    "--seed 4294967296": ["--seed", "below 4294967296"],
    "--seed 99999999999999999999": ["--seed", "below 4294967296", "99999999999999999999"],
    "--cuda perhaps": ["--cuda", "perhaps"],
    "--checkpoints 1.5": ["--checkpoints takes a whole number, not 1.5"],
    "--target-kl x": ["--target-kl takes a number, not x"],
    "--num-envs foo": ["--num-envs", "foo", "whole number"],
    "--num-envs 1.5": ["--num-envs", "1.5", "whole number"],
    "--learning-rate x": ["--learning-rate", "x"],
    "--learning-rate nan": ["--learning-rate", "nan"],
    "--learning-rate -1": ["--learning-rate", "at least 0"],
    "--gamma 2": ["--gamma", "from 0 to 1"],
    "--clip-coef -0.1": ["--clip-coef", "at least 0"],
    "--exp-name a/b": ["--exp-name", "/"],
    "--env-kwargs max_episode_steps=0": ["--env-kwargs", "max_episode_steps", "positive"],
    "--env-kwargs --resume=nowhere": ["--resume nowhere: not the folder of a run"],
    "--env-kwargs gravity=1 --env-kwargs length=2": ["--env-kwargs is given twice"],
    "--env-id faulty:WithStatistics-v0": ["--env-id", "leave out that wrapper"],
    "--env-id faulty:NoSize-v0": ["--env-id", "no fixed size"],
    "--capture-video --env-id faulty:NoPictures-v0": ["--capture-video", "render_mode"],
    "--capture-video --env-id faulty:NoRenderModes-v0": ["--capture-video", "rgb_array"],
    "--runs-dir some_file": ["--runs-dir some_file"],
    "--resume nowhere": ["--resume nowhere"],
    **{f"--resume {name}": [f"--resume {name}: not the folder of a run"] for name in NO_RECORDS},
    "--env-id nowhere:Thing-v0": ["nowhere"],
    "--env-id :Thing-v0": ["--env-id :Thing-v0", "module:Id"],
    "--env-id a/b/c-v0": ["--env-id", "Malformed"],
    "--env-id Hopper-v2": ["use Hopper-v4 or Hopper-v5"],
    "--env-id Pusher-v4": ["use Pusher-v5"],
    "--upload-model --save-model": ["--upload-model: not logged in", "HF_TOKEN"],
}


@pytest.mark.parametrize("flags", BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(flags: str, train, capfd, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    Path("some_file").write_text("")
    for name, text in NO_RECORDS.items():
        Path(name).mkdir()
        Path(name, "run.json").write_text(text)
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as stop:
        train("ppo", flags, "some/runs") if "runs-dir" not in flags else train(
            "ppo", "", "some_file"
        )
    assert stop.value.code == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    for words in BAD_INPUT[flags]:
        assert words in lines[0]
    from cleanrl_utils.running.folder import remove_if_empty

    for folder in list(Path("some").rglob("*"))[::-1]:  # what atexit does at the end of a process
        remove_if_empty([folder])
    remove_if_empty([Path("some")])
    assert sorted(Path().rglob("*")) == before


def test_bad_input_ends_the_process_with_2_and_leaves_no_folder(tmp_path: Path) -> None:
    done = run_ppo("--env-id", "NoSuchThing-v7", cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error, text, login",
    [
        ("UsageError", "No API key configured. Use `wandb login` to log in.", True),
        ("AuthenticationError", "API key must have 40+ characters,\n has 3", True),
        ("CommError", "project name is too long", False),
    ],
)
def test_tracking_that_fails_is_one_line_and_leaves_nothing(
    error: str, text: str, login: bool, train, monkeypatch, capfd
) -> None:
    wandb = pytest.importorskip("wandb")

    def init(**settings: Any) -> None:
        raise getattr(wandb.errors, error)(text)

    monkeypatch.setattr(wandb, "init", init)
    for name in ("ppo", "ppo_jax"):
        with pytest.raises(SystemExit) as stop:
            train(name, "--track" + " --num-seeds 3" * (name == "ppo_jax"), name)
        (line,) = capfd.readouterr().err.strip().splitlines()
        assert stop.value.code == 2 and ("WANDB_MODE=offline" in line) == login
        assert list(Path(name).iterdir()) == []


def test_the_demo_refuses_what_ppo_does_not_know(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cleanrl_utils.demo", "--nope"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "--nope" in done.stderr and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_demo_explains_itself_and_plays_nothing(tmp_path: Path, flag: str) -> None:
    command = [sys.executable, "-m", "cleanrl_utils.demo", flag]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("Train PPO on CartPole, play")
    assert "--learning-rate" in done.stdout and "training:" not in done.stdout
    assert done.stderr == "" and list(tmp_path.iterdir()) == []


def test_the_demo_plays_the_run_it_has_trained(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cleanrl_utils.demo", "--runs-dir", "elsewhere"]
    command += ["--total-timesteps", "512", "--eval-episodes", "1", "--seed", "3"]
    screen = ("DISPLAY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR", "SDL_VIDEODRIVER")
    env = {name: value for name, value in os.environ.items() if name not in screen}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=300, env=env
    )
    assert done.returncode == 0, done.stderr
    assert "XDG_RUNTIME_DIR" not in done.stderr and "error" not in done.stderr
    (run,) = (tmp_path / "elsewhere").iterdir()
    assert (run / "curve.png").exists() and list(tmp_path.glob(f"videos/{run.name}-enjoy/*.mp4"))


@pytest.mark.parametrize("model", ["ppo__CartPole-v1", "ppo_jax__Acrobot-v1"])
def test_videos_need_no_screen(model: str, tmp_path: Path) -> None:
    """SDL would print an error on a machine without one."""
    screen = ("DISPLAY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR", "SDL_VIDEODRIVER")
    env = {name: value for name, value in os.environ.items() if name not in screen}
    command = [sys.executable, "-m", "cleanrl_utils.enjoy", model]
    command += ["--eval-episodes", "1", "--capture-video"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=300, env=env
    )
    assert done.returncode == 0 and done.stderr == "" and list(tmp_path.glob("videos/*/*.mp4"))


def test_a_missing_package_is_not_taken_for_an_old_version(tmp_path: Path) -> None:
    script = str(ROOT / "cleanrl" / "ppo_continuous_action.py")
    code = "import runpy, sys; sys.modules['mujoco'] = None; sys.argv = sys.argv[1:]"
    code += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    for env_id in ("HalfCheetah-v4", "Hopper-v5"):
        words = [sys.executable, "-c", code, script, "--env-id", env_id]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 2, done.stderr
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
        assert "mujoco is not installed" in line and "requirements-mujoco" in line


def test_an_environment_s_own_error_is_shown(train, capfd) -> None:
    with pytest.raises(SystemExit) as stop:
        train("ppo", "--env-id faulty:NoLevel-v0")
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and "the level file is missing" in line


def test_a_missing_package_names_its_extra(train, monkeypatch, capfd) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(SystemExit) as stop:
        train("ppo", "--env-id ALE/Breakout-v5")
    assert stop.value.code == 2 and "requirements-atari.txt" in capfd.readouterr().err


def test_every_flag_is_explained(capsys) -> None:
    with pytest.raises(SystemExit):
        parse_args(TorchArgs, ["-h"])
    text = capsys.readouterr().out
    with pytest.raises(SystemExit):
        parse_args(TorchArgs, ["--help"])
    assert text == capsys.readouterr().out
    for name in (
        "--exp-name",
        "--track",
        "--resume",
        "--checkpoints",
        "--eval-frequency",
        "--compile",
    ):
        assert name in text
    for field in TorchArgs.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in text


@dataclass
class OwnArgs(TorchArgs):
    level: Literal[0, 1, 2] = 1
    """how hard it is"""


def test_the_choices_of_an_own_setting_may_be_numbers(capsys) -> None:
    with pytest.raises(SystemExit):
        parse_args(OwnArgs, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--level how hard it is (one of 0, 1, 2; default: 1)" in text


@dataclass
class Untitled(TorchArgs):
    depth: int = 1
    """number of layers"""


@pytest.mark.parametrize("cls, title", [(TorchArgs, "torch"), (Untitled, "Untitled")])
def test_a_group_of_flags_has_a_short_title(cls: type, title: str) -> None:
    assert title_of(cls) == title


@pytest.mark.parametrize(
    "words, message",
    [
        (["--gama", "1"], "error: --gama is not a flag; did you mean --gamma?"),
        (["--seed"], "error: --seed needs a value"),
        (["3"], "error: unexpected: 3; flags begin with --, and --help lists them"),
        (["--backend", "mpi"], "error: --backend must be one of 'gloo', 'nccl', got 'mpi'"),
    ],
)
def test_a_mistyped_command_is_one_line(words: list[str], message: str) -> None:
    script = str(ROOT / "cleanrl" / "ppo_atari_multigpu.py")
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == f"{message}\n"


# -- kill and resume ----------------------------------------------------------------------------


def test_resume_refuses_changed_settings_and_finished_runs(train, capfd) -> None:
    done = train("ppo", " ".join(SHORT))
    for flags, words in [("--gamma 0.5", "--gamma was 0.99, now 0.5"), ("", "is finished")]:
        with pytest.raises(SystemExit) as stop:
            train("ppo", f"--resume {done.folder} {flags}")
        assert stop.value.code == 2 and words in capfd.readouterr().err


@pytest.mark.parametrize("script", ["ppo", "ppo_jax"])  # the second logs in another thread
def test_a_loss_that_is_not_finite_stops_the_run(script: str, train, capfd) -> None:
    flags = "--total-timesteps 4096 --num-steps 64 --learning-rate 1e30 --no-anneal-lr"
    with pytest.raises(SystemExit) as stop:
        train(script, flags)
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 1 and line.startswith("error: losses/") and "at step" in line


EDITED = """
import sys
import numpy as np
from cleanrl import ppo

class Args(ppo.Args):
    pass

args = ppo.parse_args(Args, sys.argv[2:])
run = ppo.Run(args, ppo.make_env)
for iteration in range(run.resume(4, state=np.zeros(1)), int(sys.argv[1])):
    run.log({"charts/learning_rate": 0.1}, 10 * (iteration + 1))
    run.checkpoint(iteration + 1)
if int(sys.argv[1]) == 4:
    run.finish(None)
"""


def test_a_run_that_is_resumed_with_edited_code_says_so(tmp_path: Path) -> None:
    def run(text: str, *words: str) -> str:
        (tmp_path / "mine.py").write_text(text)
        command = [sys.executable, "mine.py", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    run(EDITED, "2")
    (folder,) = tmp_path.glob("runs/*")
    assert "note:" not in run(f"# a comment\n{EDITED}", "3", "--resume", f"{folder}")
    said = run(EDITED.replace("0.1", "0.2"), "4", "--resume", f"{folder}")
    assert "note: the code has changed; the run uses the new code from step 30 on" in said
    record = json.loads((folder / "run.json").read_text())
    (edit,) = record["edited"]
    assert edit["at_step"] == 30 and edit["code"] != record["code"]
    assert "0.1" in (folder / "mine_until_30.py").read_text()
    assert "0.2" in (folder / "mine.py").read_text()
    (summary,) = [results.summary(run) for run in results.find_runs(folder)]
    assert summary["code"] == f"{record['code'][:12]}+{edit['code'][:12]}"
    lines = reproduce.commands(record, run=folder)
    assert "# --resume continued the run at step 30 with other code." in lines


def test_runs_on_an_edited_environment_are_of_other_code(train) -> None:
    text = "import gymnasium as gym\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
    text += "gym.register('OwnPole-v0', CartPoleEnv, max_episode_steps=500)\n"
    for line in ("", "SIZE = 2\n"):
        Path("own_pole.py").write_text(text + line)
        train("ppo", "--env-id own_pole:OwnPole-v0 --total-timesteps 512 --checkpoints 0")
    assert len({results.summary(run)["code"] for run in results.find_runs("runs")}) == 2


def test_two_runs_in_one_second_have_their_own_folders(train, monkeypatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    folders = {train("ppo", "--total-timesteps 512").folder for _ in range(2)}
    assert len(folders) == 2


# -- files --------------------------------------------------------------------------------------


def test_checkpoint_round_trip_is_exact(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1))
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    numbers = np.random.default_rng(3)
    state = {
        "net": net,
        "opt": optimizer,
        "rng": numbers,
        "x": (1, [2.5, None, "a"]),
        "z": np.arange(3),
    }
    checkpoint.save(tmp_path / "c", state, {"hello": 1})
    wanted = numbers.random()
    metadata, saved = checkpoint.load(tmp_path / "c")
    net2, rng2 = torch.nn.Linear(3, 2), np.random.default_rng(0)
    rate2 = torch.tensor(0.5)
    optimizer2 = torch.optim.Adam(net2.parameters(), lr=rate2)
    checkpoint.restore(net2, saved["net"])
    checkpoint.restore(optimizer2, saved["opt"])
    checkpoint.restore(rng2, saved["rng"])
    assert metadata == {"hello": 1} and saved["x"] == (1, [2.5, None, "a"])
    assert torch.equal(net.weight, net2.weight) and rng2.random() == wanted
    for one, two in zip(optimizer.state.values(), optimizer2.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)
    # in the same tensor: on a GPU it stays there, where CUDA graphs read it
    assert rate2 == torch.tensor(0.1) and optimizer2.param_groups[0]["lr"] is rate2


def test_a_gpu_s_checkpoint_goes_on_without_one(tmp_path: Path) -> None:
    def make(**flags: bool) -> tuple:
        net = torch.nn.Linear(3, 2)
        return net, torch.optim.Adam(net.parameters(), torch.tensor(0.1), fused=True, **flags)

    net, optimizer = make()
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["capturable"] = True  # what a GPU's optimiser is made with
    streams = rng.get_state() | {"cuda": [torch.get_rng_state()]}
    checkpoint.save(tmp_path / "c", {"opt": optimizer, "rng": streams})
    _, saved = checkpoint.load(tmp_path / "c")
    net2, optimizer2 = make()
    checkpoint.restore(optimizer2, saved["opt"])
    if not torch.cuda.is_available():
        rng.set_state(saved["rng"])
    net2(torch.ones(1, 3)).sum().backward()
    optimizer2.step()
    assert optimizer2.state[net2.weight]["step"] == 2
    assert optimizer2.param_groups[0]["capturable"] is False


def test_jax_state_round_trip(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    tree = {"w": jax.numpy.arange(4.0), "key": jax.random.key(3), "n": (jax.numpy.int32(2),)}
    tree |= {"i": 5, "x": np.arange(3)}
    checkpoint.save(tmp_path / "c", {"train": tree})
    _, saved = checkpoint.load(tmp_path / "c")
    fresh = {"w": jax.numpy.zeros(4), "key": jax.random.key(0), "n": (jax.numpy.int32(0),)}
    fresh |= {"i": 0, "x": np.zeros(3, int)}
    again = checkpoint.restore(fresh, saved["train"])
    assert (again["w"] == tree["w"]).all() and again["n"][0] == 2
    assert again["i"] == 5 and again["x"].tolist() == [0, 1, 2]
    assert jax.random.uniform(again["key"]) == jax.random.uniform(tree["key"])


def test_foreign_cut_off_and_changed_files_are_refused(tmp_path: Path, capsys) -> None:
    path = tmp_path / "model"
    checkpoint.save(path, {"w": np.arange(1000.0)}, {"a": 1})
    good = path.read_bytes()
    torch.save({"w": 1}, tmp_path / "pickle")
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(2)}, tmp_path / "foreign")
    changed = bytearray(good)
    changed[-100] ^= 1
    bad = {"cut": good[:-50], "short": good[:20], "empty": b"", "changed": bytes(changed)}
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    for name in [*bad, "pickle", "foreign", "absent"]:
        with pytest.raises(BadInput) as stop:
            checkpoint.load(tmp_path / name)
        assert (
            stop.value.code == 2 and name in stop.value.message and "\n" not in stop.value.message
        )


def test_a_pickle_in_place_of_a_model_is_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):  # noqa: ANN204
            return os.mkdir, (str(tmp_path / "sprung"),)

    torch.save(Trap(), tmp_path / "x.cleanrl_model")
    from cleanrl_utils.running.evaluation import load_model

    with pytest.raises(BadInput):
        load_model(tmp_path / "x.cleanrl_model")
    assert not (tmp_path / "sprung").exists()


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    checkpoint.save(tmp_path / "c", {"x": 1})

    def no_replace(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", no_replace)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path / "c", {"x": 2})
    assert checkpoint.load(tmp_path / "c")[1] == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


# -- trackers, tools ----------------------------------------------------------------------------


def test_tensorboard_has_what_the_csv_has(train) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = train("ppo", "--total-timesteps 2048")
    events = EventAccumulator(str(done.folder), {"scalars": 0}).Reload()
    for tag in ("charts/episodic_return", "losses/value_loss"):
        wanted = [(step, np.float32(value)) for step, t, value in done.rows() if t == tag]
        assert [(e.step, np.float32(e.value)) for e in events.Scalars(tag)] == wanted
    assert "hyperparameters/text_summary" in events.Tags()["tensors"]


def test_what_has_no_checkpoints_is_not_resumed(train, capfd) -> None:
    done = train("ppo", "--total-timesteps 1024 --checkpoints 0")
    (done.folder / "finished.json").unlink()
    before = (done.folder / "metrics.csv").read_bytes()
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        train("ppo", f"--resume {done.folder}")
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and "--checkpoints 0" in line
    assert (done.folder / "metrics.csv").read_bytes() == before


def test_an_evaluation_ends_where_an_episode_does_not(train, monkeypatch, capfd) -> None:
    from cleanrl_utils.running import evaluation

    monkeypatch.setattr(evaluation, "MAX_EPISODE_STEPS", 50)
    flags = "--env-id CliffWalking-v1 --total-timesteps 1024 --save-model --eval-episodes 3"
    done = train("ppo", flags)
    summary = json.loads((done.folder / "finished.json").read_text())
    assert "3 of 3 episodes did not end in 50 steps" in capfd.readouterr().err
    assert summary["eval_lengths"] == [50] * 3 and max(summary["eval_returns"]) <= -50


def test_evaluations_are_in_eval_mode(train, tmp_path: Path) -> None:
    """No dropout, and they do not change what training-mode calls of spectral_norm change."""
    from cleanrl_utils.running.evaluation import as_policy, load_model, play

    code = (ROOT / "cleanrl" / "ppo.py").read_text()
    layers = "nn.Sequential(first, nn.Tanh(), second, "
    assert layers in code
    normalised = "nn.utils.parametrizations.spectral_norm(second)"
    mine = tmp_path / "my_ppo.py"
    others = f"nn.Sequential(first, nn.Tanh(), {normalised}, nn.Dropout(0.2), "
    mine.write_text(code.replace(layers, others))
    script = str(mine.with_suffix(""))
    flags = "--total-timesteps 2048 --checkpoints 0"
    plain = train(script, flags)
    done = train(
        script, flags + " --eval-frequency 512 --eval-episodes 2 --save-model", "evaluated"
    )
    assert done.curve() == plain.curve()
    assert all(part.training for part in done.variables["agent"].modules())
    agent, args, module = load_model(done.folder / "my_ppo.cleanrl_model", mine)
    seed = done.variables["run"].eval_seed
    returns = play(as_policy(agent), module.make_env, args.env_id, 2, seed, False, "")
    assert returns == json.loads((done.folder / "finished.json").read_text())["eval_returns"]


def test_killed_before_its_first_checkpoint_it_has_one_curve(train, monkeypatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags, log = "--total-timesteps 4096 --checkpoints 1", Run.log

    def killed(run: Run, metrics: Any, step: int) -> None:
        log(run, metrics, step)
        if step == 2048:
            run._close()
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Run, "log", killed)
        train("ppo", flags)
    (folder,) = Path("runs").iterdir()
    done = train("ppo", f"--resume {folder}")
    events = EventAccumulator(str(done.folder), {"scalars": 0}).Reload()
    steps = [event.step for event in events.Scalars("losses/value_loss")]
    assert steps == list(range(512, 4097, 512))


def test_wandb_offline_and_only_when_asked(tmp_path: Path) -> None:
    code = "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    code += "; print('wandb' in sys.modules)"
    flags = ["--total-timesteps", "1024", "--runs-dir", "plain"]
    plain = [sys.executable, "-c", f"import sys; sys.argv={[PPO[1], *flags]!r}; {code}"]
    done = subprocess.run(plain, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
    done = run_ppo(*flags[:2], "--track", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("runs/*/wandb/offline-run-*/*.wandb"))
    one, two = (rows_of(tmp_path, name) for name in ("plain", "runs"))
    assert one == two


def rows_of(folder: Path, runs_dir: str) -> list[list[str]]:
    (path,) = folder.glob(f"{runs_dir}/*/metrics.csv")
    rows = [[r["step"], r["tag"], r["value"]] for r in csv.DictReader(open(path))]
    return [row for row in rows if row[1] != "charts/SPS"]


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT as a terminal does")
def test_ctrl_c_in_python_i_leaves_the_variables_to_look_at(tmp_path: Path) -> None:
    command = [sys.executable, "-i", PPO[1], "--total-timesteps", "10000000"]
    child = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background jobs ignore the signal, and so would their children
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    while not any("value_loss" in path.read_text() for path in tmp_path.glob("runs/*/metrics.csv")):
        time.sleep(0.1)
        assert child.poll() is None, child.communicate()
    child.send_signal(signal.SIGINT)
    look = "print(advantages.shape, rewards.shape, args.num_envs, isinstance(losses, list))\n"
    look += "print(agent.actor[0].weight.grad is not None)\n"
    out, err = child.communicate(look, timeout=200)
    assert "torch.Size([128, 4]) torch.Size([128, 4]) 4 True" in out, err


def test_enjoy_plays_a_run(train, capsys) -> None:
    from cleanrl_utils.enjoy import EnjoyArgs, enjoy

    done = train("ppo", " ".join(SHORT))
    by_folder = enjoy(EnjoyArgs(run=str(done.folder), eval_episodes=3, capture_video=True))
    by_name = enjoy(EnjoyArgs(exp_name="ppo", env_id="CartPole-v1", seed=1, eval_episodes=3))
    assert len(by_folder) == 3 and by_folder == by_name
    out = capsys.readouterr().out
    assert "over 3 episodes" in out and "±" not in out and list(Path("videos").rglob("*.mp4"))
    with pytest.raises(BadInput):
        enjoy(EnjoyArgs(exp_name="ppo", env_id="Acrobot-v1"))
    with pytest.raises(BadInput, match="2"):
        enjoy(EnjoyArgs(run=str(done.folder), env_id="Acrobot-v1"))
    assert "was trained on CartPole-v1 and plays only that" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["dqn", "td3_continuous_action"])
def test_enjoy_explores_if_asked(name: str, train) -> None:
    from cleanrl_utils.enjoy import EnjoyArgs, enjoy

    steps = "--total-timesteps 300 --learning-starts 299 --buffer-size 300 --save-model"
    loud = "--end-e 1" if name == "dqn" else "--exploration-noise 1 --env-id Pendulum-v1"
    folder = str(train(name, f"{steps} {loud}").folder)
    first, again, loudly = (
        enjoy(EnjoyArgs(run=folder, eval_episodes=3, capture_video=False, greedy=greedy))
        for greedy in (True, True, False)
    )
    assert first == again != loudly


def test_results_of_runs_as_tables(train, tmp_path: Path) -> None:
    done = train("ppo", "--total-timesteps 4096")
    (run,) = results.find_runs("runs")
    assert {"step", "seconds", "tag", "value"} == set(run.metrics().columns)
    names = results.add(["runs"], tmp_path / "kept")
    assert names == [done.folder.name] == results.add(["runs"], tmp_path / "kept")
    kept = results.load(folder=tmp_path / "kept")
    assert set(kept.run) == {done.folder.name} and kept.step.max() == 4096 and len(kept) <= 100
    returns = [value for _, tag, value in done.rows() if tag == "charts/episodic_return"]
    facts = json.loads((tmp_path / "kept" / "ppo.json").read_text())[0]
    assert facts["final_return"] == pytest.approx(np.mean(returns[-100:]), abs=1e-3)
    assert facts["command"].startswith("python cleanrl/ppo.py") and facts["versions"]["torch"]
    there = {"script": "ppo", "command": ["ppo.py", "--seed", "2", "--runs-dir", "/here", "--cuda"]}
    assert results.command(there) == "python cleanrl/ppo.py --seed 2 --cuda"
    assert results.plot(run, tmp_path / "curve.png").stat().st_size > 1000


def test_sync_finds_and_mends_drift(tmp_path: Path) -> None:
    """Equal by default; a difference is marked, and a mark is a difference."""
    (tmp_path / "ppo.py").write_text(
        "def f(x):\n    return x + 1\n\n\ndef g(x):\n    return 1\n\n\n"
        'if __name__ == "__main__":\n    # Learn from it\n    print(1)\n'
    )
    variant = tmp_path / "ppo_two.py"
    variant.write_text(
        "def f(x):\n    return x + 2\n\n\n"
        "# differs from ppo.py: returns 2\ndef g(x):\n    return 2\n\n\n"
        'if __name__ == "__main__":\n    # Learn from it\n    print(2)\n'
    )
    sync = [sys.executable, "-m", "cleanrl_utils.sync", "--folder", str(tmp_path)]
    found = subprocess.run(sync, capture_output=True, text=True)
    assert found.returncode == 1 and "ppo_two.py:1: f has drifted from ppo.py" in found.stderr
    assert "# Learn from it has drifted" in found.stderr and ": g has" not in found.stderr
    assert subprocess.run([*sync, "--fix"], capture_output=True).returncode == 0
    mended = variant.read_text()
    assert "return x + 1" in mended and "print(1)" in mended and "return 2" in mended
    variant.write_text(mended.replace("return 2", "return 1"))
    found = subprocess.run(sync, capture_output=True, text=True)
    assert found.returncode == 1 and "g is marked, but equal to ppo.py" in found.stderr


def test_the_scripts_are_in_sync() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cleanrl_utils.sync"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_compiled_and_eager_updates_agree(train) -> None:
    flags = "--total-timesteps 1024 --num-steps 64 --save-model --eval-episodes 1"
    one, two = train("ppo", flags, "eager"), train("ppo", flags + " --compile", "compiled")
    for (step, tag, a), (step2, tag2, b) in zip(one.rows(), two.rows(), strict=True):
        assert (step, tag) == (step2, tag2)
        if tag.startswith("losses/"):
            assert a == pytest.approx(b, rel=1e-3, abs=1e-4)


def test_cartpole_is_solved(train) -> None:
    done = train("ppo", "--total-timesteps 100000 --save-model --learning-rate 0.001")
    summary = json.loads((done.folder / "finished.json").read_text())
    assert np.mean(summary["eval_returns"]) >= 475


def test_the_summary_says_how_many_episodes_its_return_is_the_mean_of(train) -> None:
    done = train("ppo", "--total-timesteps 4096")
    returns = [value for _, tag, value in done.rows() if tag == "charts/episodic_return"]
    summary = json.loads((done.folder / "finished.json").read_text())
    assert len(returns) > 100 and summary["last_episodes"] == 100
    assert summary["episodic_return"] == pytest.approx(np.mean(returns[-100:]))


def test_observations_of_whole_numbers_are_played_too(train) -> None:
    """FrozenLake's observation is a number, which becomes a vector of integers."""
    flags = "--env-id FrozenLake-v1 --total-timesteps 512 --num-steps 32 --save-model"
    done = train("ppo", f"{flags} --eval-episodes 2")
    assert len(json.loads((done.folder / "finished.json").read_text())["eval_returns"]) == 2


def test_an_environment_of_the_past_is_named_with_its_successor(train) -> None:
    with pytest.raises(BadInput) as stop:
        train("ppo", "--env-id Taxi-v3")
    assert "Taxi-v4" in stop.value.message
