"""Environments on the GPU for torch: resets, and the choice of the package."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("brax")
import jax
import jax.numpy as jnp
import torch
from conftest import ROOT

from cleanrl_utils.environments import torch_envs as envs_torch
from cleanrl_utils.environments.jax_envs import Brax
from cleanrl_utils.errors import BadInput
from cleanrl_utils.running import checkpoint


class Clock:
    """The observation is the time, plus a hundred per episode."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    EPISODE_LENGTH, stagger = 5, Brax.stagger

    def reset(self, key):
        state = jnp.float32(100) * jax.random.randint(key, (), 1, 50), jnp.float32(0)
        return state, jnp.stack(state)

    def step(self, key, state, action):
        """Terminates after 3 steps if the action is negative, else is truncated after 5."""
        state = state[0], state[1] + 1
        terminated = (state[1] >= 3) & (action[0] < 0)
        return state, jnp.stack(state), action[0], terminated, (state[1] >= 5) & ~terminated


@pytest.fixture
def envs(monkeypatch) -> envs_torch.BraxTensors:
    monkeypatch.setattr(envs_torch.Brax, "make", lambda name: Clock())
    return envs_torch.BraxTensors("Ant", 2, torch.device("cpu"))


def play(envs: envs_torch.BraxTensors, steps: int) -> tuple[list, dict]:
    """First columns of all observations, and the outcomes by name."""
    actions, seen, starts = torch.tensor([[-0.5], [0.5]]), [], [envs.observe()[:, 0].tolist()]
    for _ in range(steps):
        obs, outcome = envs.step(actions.clone())
        seen.append(outcome.clone())
        starts.append(obs[:, 0].tolist())
    return starts, dict(zip(envs_torch.OUTCOME, torch.stack(seen, 1), strict=True))


def test_the_step_after_an_end_only_resets(envs) -> None:
    envs.reset(seed=1)
    starts, rows = play(envs, 9)
    # The second one's time is 2 when it begins, so that not all are truncated together.
    ends = [[0, 0, 1, 0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0, 1]]
    assert rows["done"].T.tolist() == ends
    assert rows["terminated"].T.tolist() == [ends[0], [0] * 9]
    assert rows["real"].T.tolist() == [[1, 1, 1, 0, 1, 1, 1, 0, 1], [1, 1, 1, 0, 1, 1, 1, 1, 1]]
    assert rows["reward"][:, 0].tolist() == [-0.5, -0.5, -0.5, 0, -0.5, -0.5, -0.5, 0, -0.5]
    assert rows["episodic_return"][2, 0] == -1.5 and rows["episodic_return"][8, 1] == 2.5
    assert rows["episodic_length"][2, 0] == 3 and rows["episodic_length"][8, 1] == 5
    # Only these two and another of the first are whole episodes.
    assert torch.isnan(rows["episodic_return"]).sum() == 18 - 3
    first = [s[0] for s in starts]  # the last observation is the ended episode's, then a fresh one
    assert first[0] == first[3] != first[4] == first[7]
    envs.reset(seed=1)
    assert envs.observe()[:, 0].tolist() == starts[0]


def test_environments_go_on_from_a_checkpoint(envs, tmp_path: Path) -> None:
    envs.reset(seed=1)
    play(envs, 18)  # fresh starts are drawn anew every 16 steps
    checkpoint.save(tmp_path / "c", {"envs": envs})
    wanted = play(envs, 20)
    envs.reset(seed=2)
    checkpoint.restore(envs, checkpoint.load(tmp_path / "c")[1]["envs"])
    starts, rows = play(envs, 20)
    assert starts == wanted[0]
    for name, row in rows.items():
        torch.testing.assert_close(row, wanted[1][name], rtol=0, atol=0, equal_nan=True)


def test_nothing_is_copied(envs) -> None:
    envs.reset(seed=1)
    obs, outcome = envs.step(torch.zeros(2, 1))
    assert [x.unsafe_buffer_pointer() for x in envs.kept] == [obs.data_ptr(), outcome.data_ptr()]


def test_names_of_tasks() -> None:
    names = [envs_torch.brax_name(task) for task in ("Ant", "Humanoid", "Cartpole", "HalfCheetah")]
    assert names == ["ant", "humanoid", "inverted_pendulum", "halfcheetah"]
    with pytest.raises(BadInput):
        envs_torch.brax_name("ShadowHand")


def test_isaac_gym_is_used_where_it_is_installed(monkeypatch) -> None:
    """A fake with Isaac Gym's interface: episodes end at their third step."""

    class Simulation:
        observation_space, action_space = np.zeros(1), np.zeros(1)
        time = torch.zeros(1)

        def reset(self):
            return {"obs": self.time[:, None].clone()}

        def step(self, actions):
            self.time = torch.where(self.time == 3, 0, self.time + 1)
            obs, done = {"obs": self.time[:, None].clone()}, (self.time == 3).long()
            return obs, torch.ones(1), done, {"time_outs": done}

    module, made = ModuleType("isaacgymenvs"), []
    module.make = lambda **settings: made.append(settings) or Simulation()
    monkeypatch.setitem(sys.modules, "isaacgymenvs", module)
    monkeypatch.setattr(envs_torch, "HAS_ISAAC_GYM", True)
    said = []
    args = SimpleNamespace(capture_video=False)
    run = SimpleNamespace(args=args, device=torch.device("cpu"), say=said.append)
    envs = envs_torch.make_tensor_envs("Ant", 1, 7, run)
    assert said == ["Ant: from Isaac Gym"] and made[0]["task"] == "Ant" and made[0]["seed"] == 7
    envs.reset(seed=1)
    outcomes = torch.stack([envs.step(torch.zeros(1, 1))[1][:, 0] for _ in range(5)])
    assert outcomes[:, 0].tolist() == [1, 1, 1, 0, 1]  # rewards
    assert outcomes[:, 1].tolist() == [0, 0, 0, 0, 0]  # its time was over: no termination
    assert outcomes[:, 2].tolist() == [0, 0, 1, 0, 0]
    assert outcomes[:, 3].tolist() == [1, 1, 1, 0, 1]
    assert outcomes[2, 4:].tolist() == [3, 3] and outcomes[4, 5] == 1

    filmed = []
    old_gym = ModuleType("gym.wrappers")
    old_gym.RecordVideo = lambda envs, folder, **_: filmed.append(folder) or envs
    monkeypatch.setitem(sys.modules, "gym", ModuleType("gym"))
    monkeypatch.setitem(sys.modules, "gym.wrappers", old_gym)
    run.args = SimpleNamespace(capture_video=True, record_video_step_frequency=10)
    run.videos = "runs/a run/videos"
    envs_torch.make_tensor_envs("Ant", 1, 7, run)
    assert filmed == [run.videos]


def test_the_originals_path_leads_to_the_script(tmp_path: Path) -> None:
    name = "ppo_continuous_action_isaacgym"
    command = [sys.executable, str(ROOT / "cleanrl" / name / f"{name}.py"), "--env-id", "Nothing"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: --env-id Nothing"), done.stderr


def test_checkpoints_of_brax_may_hold_returns_that_are_not_known_yet(train) -> None:
    """Staggered episodes have no return at first: NaN, which is no reason to stop."""
    flags = "--env-id inverted_pendulum --num-envs 4 --num-steps 8 --num-minibatches 2"
    done = train("ppo_continuous_action_brax_jax", f"{flags} --total-timesteps 128 --checkpoints 2")
    assert (done.folder / "checkpoint.safetensors").exists()
