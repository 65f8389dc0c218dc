"""ppo_atari_multigpu.py under torchrun, with two real processes on the CPU; GPUs, as far as that
goes without one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

from cleanrl_utils import reproduce
from cleanrl_utils.analysis import grouping, tables
from cleanrl_utils.running import rng
from cleanrl_utils.running.evaluation import import_script

# What each process runs: the script, which says afterwards what it ended with.
RANK = """
import hashlib, json, os, runpy, sys
from torch import distributed
from torch.nn.utils import parameters_to_vector
from cleanrl_utils.running.run import Run

sys.argv, rank, calls = sys.argv[1:], os.environ["RANK"], []
checkpoint, all_reduce = Run.checkpoint, distributed.all_reduce

def dies(run, iteration, **changed):
    if os.environ.get("DIES_AT") == f"{rank} {iteration}":
        raise RuntimeError("the memory of this rank has failed")
    return checkpoint(run, iteration, **changed)

def counted(tensor):
    calls.append(tensor.numel())
    return all_reduce(tensor)

Run.checkpoint, distributed.all_reduce = dies, counted
end = runpy.run_path(sys.argv[0], run_name="__main__")
weights = parameters_to_vector(end["agent"].parameters()).detach().numpy().tobytes()
result = {
    "weights": hashlib.sha256(weights).hexdigest(),
    "actions": end["actions"].tolist(),
    "calls": calls,
    "losses": len(end["losses"]),
}
open(f"rank{rank}.json", "w").write(json.dumps(result))
"""
FLAGS = (
    "--env-id probes:ProbeBothPixels-v0 --local-num-envs 2 --num-steps 8 --total-timesteps 192"
    " --num-minibatches 2 --update-epochs 2 --checkpoints 3 --target-kl 0.5"
)


def torchrun(folder: Path, flags: str, dies_at: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "rank.py").write_text(RANK)
    script = str(ROOT / "cleanrl" / "ppo_atari_multigpu.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return subprocess.run(
        [*command, "rank.py", script, *flags.split()],
        cwd=folder,
        env={**os.environ, "DIES_AT": dies_at},
        capture_output=True,
        text=True,
        timeout=200,
    )


def results(folder: Path) -> list[dict]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_two_ranks_are_one_run_which_ends_with_a_dead_rank_and_resumes(tmp_path: Path) -> None:
    whole = torchrun(tmp_path, f"{FLAGS} --runs-dir whole")
    assert whole.returncode == 0, whole.stderr
    first, second = results(tmp_path)
    assert first["weights"] == second["weights"]
    assert first["actions"] != second["actions"]
    # 6 iterations of 2 epochs of 2 minibatches, each with one message of one size
    assert first["calls"] == second["calls"] == [first["calls"][0]] * 24
    (finished,) = (tmp_path / "whole").rglob("run.json")
    recorded = json.loads(finished.read_text())
    assert tables.command(recorded).startswith("torchrun --standalone --nproc_per_node=2 cleanrl/")
    assert grouping.record_settings(recorded, {})["processes"] == "2"
    line = reproduce.commands(recorded)[-1]
    assert ".venv-reproduce/bin/torchrun --standalone --nproc_per_node=2 cleanrl/" in line

    killed = torchrun(tmp_path, f"{FLAGS} --runs-dir killed", dies_at="1 3")
    assert killed.returncode != 0
    assert "the memory of this rank has failed" in killed.stderr
    (record,) = (tmp_path / "killed").rglob("run.json")
    assert (record.parent / "checkpoint.safetensors").exists()
    assert not (record.parent / "finished.json").exists()

    for rank in (0, 1):
        (tmp_path / f"rank{rank}.json").unlink()
    resumed = torchrun(tmp_path, f"--resume {record.parent}")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumes at step" in resumed.stderr
    assert [r["weights"] for r in results(tmp_path)] == [first["weights"]] * 2
    assert (record.parent / "finished.json").exists()


def test_the_mean_of_the_ranks_gradients_is_the_gradient_of_all_their_steps() -> None:
    module = import_script("ppo_atari_multigpu")
    torch.manual_seed(0)
    args = module.Args(norm_adv=False)
    env = import_script("ppo_atari").make_env("probes:ProbeBothPixels-v0", 1, 0, False, "")()
    agent = module.Agent(type("Envs", (), {"single_action_space": env.action_space}))
    obs = torch.randint(256, (8, 4, 84, 84), dtype=torch.uint8)
    actions, numbers = torch.randint(2, (8,)), torch.randn(4, 8)
    batch = [obs, actions, *numbers, torch.ones(8)]
    halves = [module.gradient(agent, args, *(x[i : i + 4] for x in batch)) for i in (0, 4)]
    whole = module.gradient(agent, args, *batch)
    torch.testing.assert_close((halves[0] + halves[1]) / 2, whole, atol=1e-5, rtol=1e-4)
    assert whole.numel() == sum(p.numel() for p in agent.parameters()) + 6


@pytest.mark.parametrize(
    "flags, complaint",
    [
        ("--device-ids 0 0 1 1", "--device-ids"),
        ("--backend nccl --no-cuda", "--backend"),
        ("--num-minibatches 3", "--num-minibatches"),
        ("--total-timesteps 10", "--total-timesteps"),
    ],
)
def test_settings_that_do_not_fit_are_refused(flags: str, complaint: str, train, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        train("ppo_atari_multigpu", flags)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [0, 1, 3])
def test_random_streams_of_gpus_that_are_gone_are_left_out(gpus: int, monkeypatch) -> None:
    """Saved with two GPUs; `set_rng_state_all` would ask for the second one in vain."""
    found: dict[Any, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    def set_rng_state(stream: Any, gpu: int) -> None:
        assert gpu < gpus, "no such GPU"
        found[gpu] = stream

    monkeypatch.setattr(torch.cuda, "set_rng_state", set_rng_state)
    monkeypatch.setattr(torch.cuda.random, "set_rng_state", set_rng_state)
    rng.set_state(rng.get_state() | {"cuda": ["first", "second"]})
    assert found == dict(list({0: "first", 1: "second"}.items())[:gpus])
