"""Random Network Distillation: curiosity over time, without ends, and that it finds what is far."""

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from probes import see_each_picture_once
from torch import optim

from cleanrl_utils.environments import envpool as envs_module
from cleanrl_utils.running.evaluation import import_script

pytest.importorskip("cv2")
SPACES = SimpleNamespace(single_action_space=gym.spaces.Discrete(3))


class Corridor:
    """As EnvPool would step it: one of two actions goes on, `length` times, the other one leads
    back to the start. Only the end is rewarded. The farther, the brighter."""

    length, limit = 16, 40
    single_observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    single_action_space = gym.spaces.Discrete(2)

    def __init__(self, task: str, num_envs: int, seed: int, **settings: Any):
        assert settings["repeat_action_probability"] == 0.25
        self.at = np.zeros(num_envs, int)

    def observe(self) -> np.ndarray:
        colours = (self.at * 255 // self.length).astype(np.uint8)
        return np.broadcast_to(colours[:, None, None, None], (len(colours), 4, 84, 84)).copy()

    def reset(self) -> tuple[np.ndarray, dict]:
        self.at[:] = 0
        self.time, self.over = np.zeros_like(self.at), np.zeros_like(self.at, bool)
        return self.observe(), {}

    def step(self, actions: np.ndarray) -> tuple:
        right = actions == 1
        begin = self.over  # the step after an end only resets
        self.at = np.where(right & ~begin, self.at + 1, 0)
        self.time = np.where(begin, 0, self.time + 1)
        terminated, truncated = self.at == self.length, self.time == self.limit
        self.over = terminated | truncated
        reward = terminated.astype(np.float32)
        infos = {"reward": reward, "terminated": terminated, "elapsed_step": self.time}
        return self.observe(), reward, terminated, truncated & ~terminated, infos

    def close(self) -> None:
        pass


EXPLORE = (
    "--num-envs 8 --num-steps 20 --total-timesteps 1280 --num-minibatches 1 --clip-coef 0.2"
    " --num-iterations-obs-norm-init 2 --learning-rate 0.001 --no-anneal-lr --no-norm-adv"
    " --gamma 0.95 --int-gamma 0.95 --torch-threads 1 --checkpoints 1"
)


def test_curiosity_finds_what_chance_does_not(train, monkeypatch) -> None:
    """By chance one needs 65,536 attempts; there are about a thousand."""
    see_each_picture_once(monkeypatch)
    monkeypatch.setattr(envs_module, "make_pool", Corridor)
    found = {}
    for coef in (0, 1):
        done = train("ppo_rnd_envpool", f"{EXPLORE} --int-coef {coef}")
        found[coef] = sum(x for _, tag, x in done.rows() if tag == "charts/episodic_return")
    assert found[0] == 0 and found[1] > 10

    ends = [x for _, tag, x in done.rows() if tag == "charts/episode_curiosity_reward"]
    assert ends and max(ends[-10:]) < max(ends) / 2

    # What was seen is known by now, what was never seen is not.
    monkeypatch.undo()
    agent, colours = done.variables["agent"], np.array([0, 111, 239])
    frames = torch.as_tensor(colours[:, None, None] * np.ones((1, 84, 84)), dtype=torch.uint8)
    noise = torch.randint(256, (1, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        errors = agent.prediction_error(torch.cat([frames, noise])).mean(-1)
    assert errors[3] > 5 * errors[:3].max()


def test_sums_of_curiosity_run_over_time_in_each_environment() -> None:
    module = import_script("ppo_rnd_envpool")
    rewards, before = torch.tensor([[1.0, 10], [2, 20], [3, 30]]), torch.tensor([4.0, 8])
    sums = module.discounted_sums(rewards, before, 0.5)
    assert sums.tolist() == [[3, 14], [3.5, 27], [4.75, 43.5]]


def test_the_game_ends_where_curiosity_goes_on() -> None:
    """Three steps of reward 1, the second one ends; the last value is 8 in both streams."""
    module = import_script("ppo_rnd_envpool")
    rewards, values = torch.ones(3, 1, 2), torch.zeros(4, 1, 2)
    values[3] = 8
    ends = torch.tensor([0.0, 1, 0])[:, None, None] * torch.tensor([1.0, 0])
    args = SimpleNamespace(gae_lambda=1.0)
    gamma = torch.tensor([0.5, 0.25])
    found = module.gae(rewards, values, ends, ends, gamma, args)[:, 0]
    assert found[:, 0].tolist() == [1.5, 1, 5]
    assert found[:, 1].tolist() == [1 + 0.25 * (1 + 0.25 * 3), 1 + 0.25 * 3, 3]


def learn(real: float, **settings: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The losses of one step, and how far each part of the agent moved."""
    module = import_script("ppo_rnd_envpool")
    torch.manual_seed(1)
    args = module.Args(ent_coef=0.0, **settings)
    agent = module.Agent(SPACES)
    optimizer = optim.SGD(agent.parameters(), 0.1)
    before = {name: x.clone() for name, x in agent.named_parameters()}
    obs, n = torch.randint(256, (6, 4, 84, 84), dtype=torch.uint8), 6
    actions, zeros, ones = torch.zeros(n, dtype=torch.long), torch.zeros(n), torch.ones(n)
    returns = torch.stack([ones * 3, ones * 5], 1)
    batch = (obs, obs[:, -1], actions, zeros, returns * 0, torch.arange(n) - 2.5, returns)
    losses = module.update(agent, optimizer, args, *batch, ones * real)
    moved: dict[str, float] = {}
    for name, x in agent.named_parameters():
        part = name.split(".")[0]
        moved[part] = max(moved.get(part, 0), (x - before[name]).abs().max().item())
    return losses, moved


def test_the_predictor_learns_from_its_share_and_the_target_never() -> None:
    losses, moved = learn(real=1, update_proportion=1.0)
    assert losses["losses/fwd_loss"] > 0.1 and moved["predictor"] > 0 and moved["target"] == 0
    losses, moved = learn(real=1, update_proportion=0.0)
    assert losses["losses/fwd_loss"] == 0 and moved["predictor"] == 0 and moved["actor"] > 0


def test_a_reset_teaches_the_value_of_curiosity_alone() -> None:
    both, one = learn(real=1)[0], learn(real=0)[0]
    assert both["losses/value_loss"] == pytest.approx((9 + 25) / 2, rel=0.1)  # values are near 0
    assert (
        one["losses/value_loss"] == pytest.approx(25 / 2, rel=0.1)
        and one["losses/policy_loss"] == 0
    )


def test_statistics_begin_with_random_steps(train, monkeypatch) -> None:
    """Three rollouts of them, then one of the training's own; curiosity is scaled by its sums."""
    see_each_picture_once(monkeypatch)
    seen: list[np.ndarray] = []

    class Watched(Corridor):
        def step(self, actions: np.ndarray) -> tuple:
            result = super().step(actions)
            seen.append(result[0][:, -1].astype(float))
            return result

    monkeypatch.setattr(envs_module, "make_pool", Watched)
    flags = "--num-envs 4 --num-steps 5 --total-timesteps 20 --num-iterations-obs-norm-init 3"
    done = train("ppo_rnd_envpool", f"{flags} --torch-threads 1 --update-epochs 1")
    frames = np.concatenate(seen)
    stats = done.variables["agent"].frame_stats
    assert len(frames) == 4 * 5 * 4 == stats.count
    assert np.allclose(stats.mean, frames.mean(0), atol=1e-3)
    assert np.allclose(stats.std, frames.std(0), atol=1e-3)
    curious = done.variables["curiosity"]
    sums = curious.clone()
    for t in range(1, 5):
        sums[t] += 0.99 * sums[t - 1]
    scale = done.variables["agent"].curiosity_stats
    assert scale.std.item() == pytest.approx(sums.std(correction=0).item(), rel=1e-4)
    assert torch.equal(done.variables["last_sums"], sums[-1])
    rewards = done.variables["rewards"][..., 1]
    assert torch.allclose(rewards, curious / scale.std)
