"""Uploads and downloads of models, against a fake hub."""

import json
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import pytest
import yaml
from conftest import ROOT
from hub import Hub, command

from cleanrl import ppo
from cleanrl_utils import huggingface
from cleanrl_utils.running import checkpoint, evaluation

ENV_ID = "CartPole-v1"


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with an untrained model, which is fast to make."""
    folder = tmp_path / "runs" / f"{ENV_ID}__ppo__3__1700000000"
    folder.mkdir(parents=True)
    args = ppo.Args(exp_name="ppo", env_id=ENV_ID, seed=3, cuda=False, save_model=True)
    args.hf_entity, args.wandb_entity = "somebody", "hush"
    envs = gym.vector.SyncVectorEnv([ppo.make_env(ENV_ID, 3, 0, False, "")])
    evaluation.save_model(folder / "ppo.cleanrl_model", ppo.Agent(envs), args, "ppo")
    envs.close()
    record = {
        "args": vars(args),
        "script": "ppo",
        "script_path": "cleanrl/ppo.py",
        "command": ["ppo.py", "--no-cuda", "--seed", "3", "--hf-entity", "somebody"],
        "git": {"commit": "d" * 40, "dirty": False},
    }
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "finished.json").write_text(json.dumps({"eval_returns": [10.0, 20.0, 30.0]}))
    rows = "".join(f"{i},{i / 10},charts/episodic_return,{i / 2}\n" for i in range(1, 50))
    (folder / "metrics.csv").write_text("step,seconds,tag,value\n" + rows)
    film = folder / "videos" / "evaluation"
    film.mkdir(parents=True)
    (film / "episode-0.mp4").write_bytes(b"a film")
    return folder


def returns(printed: str) -> list[str]:
    return re.findall(r"episodic_return=(\S+)", printed)


def test_a_model_goes_to_the_hub_and_comes_back(hub: Hub, run: Path, tmp_path: Path) -> None:
    done = command("huggingface", f"{run} --hf-entity somebody", hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert hub.tokens == {"Bearer dummy"}
    (name,) = hub.repositories
    files = hub.repositories[name]
    assert name == "somebody/CartPole-v1-ppo-seed3"
    assert set(files) == {"ppo.cleanrl_model", "README.md", "curve.png", "replay.mp4"}
    assert files["ppo.cleanrl_model"] == (run / "ppo.cleanrl_model").read_bytes()
    assert files["curve.png"].startswith(b"\x89PNG") and files["replay.mp4"] == b"a film"

    _, front, card = files["README.md"].decode().split("---\n", 2)
    about = yaml.safe_load(front)
    assert about["library_name"] == "cleanrl" and ENV_ID in about["tags"]
    (metric,) = about["model-index"][0]["results"][0]["metrics"]
    assert metric["type"] == "mean_reward" and metric["value"] == "20.00 +/- 8.16"
    assert "python cleanrl/ppo.py --no-cuda --seed 3\n" in card
    assert "| learning_rate | 0.00025 |" in card
    assert "**20.00** (standard deviation 8.16; 3 episodes" in card
    assert "dddddddddddd" in card and "replay.mp4" in card and "hush" not in card

    # a second time replaces it; then it plays as the file here does
    assert command("huggingface", f"{run} --hf-entity somebody", hub, tmp_path).returncode == 0
    flags = f"--exp-name ppo --env-id {ENV_ID} --seed 3 --eval-episodes 4"
    theirs = command("enjoy", f"{flags} --hf-entity somebody", hub, tmp_path, token="")
    ours = command("enjoy", f"{flags} --run {run}", hub, tmp_path)
    assert theirs.returncode == 0, theirs.stderr
    assert returns(theirs.stdout) == returns(ours.stdout) and len(returns(ours.stdout)) == 4
    # what was fetched once is there without the hub
    hub.shutdown()
    hub.server_close()
    again = command("enjoy", f"{flags} --hf-repository {name}", hub, tmp_path)
    assert returns(again.stdout) == returns(ours.stdout), again.stderr


def test_code_from_the_hub_is_shown_and_not_run(hub: Hub, run: Path, tmp_path: Path) -> None:
    text = (ROOT / "cleanrl" / "ppo.py").read_text()
    text = text.replace("import torch\n", "import torch\nopen('ran', 'w').close()\n", 1)
    (run / "ppo.py").write_text(text)
    (run / "changes.diff").write_text("a diff\n")
    done = command("huggingface", f"{run} --hf-entity somebody", hub, tmp_path)
    assert done.returncode == 0 and "ppo.py, changes.diff" in done.stderr, done.stderr
    (files,) = hub.repositories.values()
    assert files["ppo.py"].decode() == text and files["changes.diff"] == b"a diff\n"
    card = files["README.md"].decode()
    assert "git apply changes.diff\npython cleanrl/ppo.py" in card and "--trust-remote-code" in card

    flags = f"--exp-name ppo --env-id {ENV_ID} --seed 3 --eval-episodes 2 --hf-entity somebody"
    done = command("enjoy", flags, hub, tmp_path)
    assert done.returncode == 0 and len(returns(done.stdout)) == 2, done.stderr
    assert re.search(r"code: \S+/ppo.py differs from cleanrl/ppo.py; not run", done.stderr)
    assert not (tmp_path / "ran").exists()
    trusted = command("enjoy", f"{flags} --trust-remote-code", hub, tmp_path)
    assert returns(trusted.stdout) == returns(done.stdout), trusted.stderr
    assert (tmp_path / "ran").exists()


def test_a_module_that_a_model_of_the_hub_names_is_not_imported(
    hub: Hub, run: Path, tmp_path: Path
) -> None:
    about, state = checkpoint.load(run / "ppo.cleanrl_model")
    about["args"]["env_id"] = "evilmod:X-v0"
    checkpoint.save(run / "ppo.cleanrl_model", state, about)
    (tmp_path / "evilmod.py").write_text("open('imported', 'w').close()\n")
    hub.repositories["x/y"] = {"ppo.cleanrl_model": (run / "ppo.cleanrl_model").read_bytes()}
    done = command("enjoy", "--hf-repository x/y", hub, tmp_path)
    assert done.returncode == 2 and "add --env-id evilmod:X-v0" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "imported").exists()


def test_a_training_shares_its_model_when_it_ends(hub: Hub, tmp_path: Path) -> None:
    flags = f"--env-id {ENV_ID} --total-timesteps 1024 --no-cuda --eval-episodes 2 --seed 5"
    done = command("cleanrl/ppo.py", f"{flags} --upload-model --hf-entity me", hub, tmp_path)
    assert done.returncode == 0, done.stderr
    files = hub.repositories["me/CartPole-v1-ppo-seed5"]
    (run,) = (tmp_path / "runs").iterdir()
    assert files["ppo.cleanrl_model"] == (run / "ppo.cleanrl_model").read_bytes()
    played = json.loads((run / "finished.json").read_text())["eval_returns"]
    assert f"**{sum(played) / 2:.2f}** (standard deviation " in files["README.md"].decode()
    # without a hub the run is complete, and the command that uploads it later is printed
    done = command("cleanrl/ppo.py", f"{flags} --upload-model", "http://127.0.0.1:9", tmp_path)
    assert "cleanrl_utils.huggingface" in done.stderr
    assert len(list((tmp_path / "runs").glob("*/finished.json"))) == 2


class Malicious:
    def __reduce__(self) -> tuple:
        return (os.mkdir, ("unpickled",))


def test_a_pickle_on_the_hub_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["x/CartPole-v1-ppo-seed1"] = {"ppo.cleanrl_model": pickle.dumps(Malicious())}
    done = command("enjoy", "--hf-entity x", hub, tmp_path)
    assert done.returncode == 2 and "not a CleanRL file" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize(
    "module, flags, token, message",
    [
        ("enjoy", "--hf-entity nobody", "dummy", "no such repository"),
        ("enjoy", "--hf-repository x/empty", "dummy", "has no such file"),
        ("enjoy", "--run RUN --eval-episodes 0", "dummy", "--eval-episodes must be at least 1"),
        ("enjoy", "--run RUN --eval-episodes -3", "dummy", "--eval-episodes must be at least 1"),
        ("enjoy", "--run RUN --seed -1", "dummy", "--seed must not be negative"),
        ("huggingface", "RUN", "", "cannot be uploaded: not logged in to the hub"),
        ("huggingface", "nowhere", "dummy", "not the folder of a run"),
    ],
)
def test_errors_are_one_line(
    hub: Hub, run: Path, tmp_path: Path, module: str, flags: str, token: str, message: str
) -> None:
    hub.repositories["x/empty"] = {}
    done = command(module, flags.replace("RUN", str(run)), hub, tmp_path, token)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("module, flags", [("enjoy", "--hf-entity x"), ("huggingface", "RUN")])
def test_without_a_network_it_says_so(run: Path, tmp_path: Path, module: str, flags: str) -> None:
    nobody = "http://127.0.0.1:9"  # a port at which nothing answers
    done = command(module, flags.replace("RUN", str(run)), nobody, tmp_path)
    assert done.returncode == 2 and "the hub cannot be reached" in done.stderr, done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error")]) == 1


def test_names_of_repositories() -> None:
    args = {"env_id": "dm_control/cartpole-balance-v0", "exp_name": "ppo", "seed": 1}
    name = "dm_control-cartpole-balance-v0-ppo-seed1"
    assert huggingface.repository_name(args, "me") == f"me/{name}"
    assert huggingface.repository_name(args) == name
