"""What TQC, CrossQ, DroQ and SimBaV2 share with SAC: entropy coefficient, schedule of updates."""

from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, optim

from cleanrl import crossq_continuous_action as crossq
from cleanrl import droq_continuous_action as droq
from cleanrl import simbav2_continuous_action as simbav2
from cleanrl import tqc_continuous_action as tqc

MODULES = {"crossq": crossq, "droq": droq, "simbav2": simbav2, "tqc": tqc}
SMALL: dict[str, dict[str, Any]] = {
    "crossq": {"critic_width": 8},
    "droq": {"dropout": 0.0},
    "simbav2": {"critic_width": 8},
    "tqc": {"critic_width": 8},
}
QUICK = "--env-id Pendulum-v1 --no-cuda --batch-size 8 --learning-starts 40 --buffer-size 100"


class Spaces:
    """What networks need of environments."""

    single_observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    single_action_space = gym.spaces.Box(-1, 1, (3,), np.float32)


def make_agent(name: str, **settings: Any) -> tuple[ModuleType, Any, Any]:
    """A script, its agent and settings. The agent's observations are not normalised yet."""
    torch.manual_seed(1)
    module: Any = MODULES[name]
    args = module.Args(**SMALL[name], **settings)
    agent = module.Agent(Spaces(), args)
    if name == "simbav2":
        agent.actor.obs_stats.mean.copy_(torch.randn(4))
        agent.actor.obs_stats.std.copy_(torch.rand(4) + 0.5)
    return module, agent, args


def policy_terms(name: str, agent: Any, obs: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of new actions, and the Q-values that the policy should maximise."""
    if name == "crossq":
        actions, logprob = agent.actor.sample(obs, train=True)
        return logprob, agent.critics(obs, actions).amin(0)
    if name == "simbav2":
        stats = agent.actor.obs_stats
        obs = (obs - stats.mean) / stats.std
        actions, logprob = agent.actor.sample(obs)
        return logprob, agent.critics(obs, actions)[1].amin(0)
    actions, logprob = agent.actor.sample(obs)
    q = agent.critics(obs, actions)
    return logprob, q.mean(0) if name == "droq" else q.mean((0, 2))


@pytest.mark.parametrize("name", MODULES)
def test_losses_of_the_policy_and_of_the_entropy_coefficient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, agent, args = make_agent(name)
    assert agent.log_alpha.exp().item() == pytest.approx(0.01 if name == "simbav2" else 1)
    obs = torch.randn(16, 4)
    noise = torch.randn(16, 3)
    monkeypatch.setattr(torch, "randn_like", lambda x: noise)
    with torch.no_grad():
        agent.log_alpha.fill_(-0.5)
    state = {key: x.clone() for key, x in agent.state_dict().items()}
    with torch.no_grad():
        logprob, q = policy_terms(name, agent, obs)
    agent.load_state_dict(state)
    alpha = np.exp(-0.5)
    entropy = -logprob.mean().item()
    target = -1.5 if name == "simbav2" else -3.0

    optimizer = optim.SGD([*agent.actor.parameters(), agent.log_alpha], lr=1e-3)
    losses = module.update_policy(agent, optimizer, args, obs)
    frequency = getattr(args, "policy_frequency", 1)
    assert frequency == (3 if name == "crossq" else 1)  # else the losses are means of several steps
    wanted = (alpha * logprob - q).mean().item()
    assert losses["losses/actor_loss"].item() == pytest.approx(wanted, rel=1e-4)
    wanted = alpha * (entropy - target)
    assert losses["losses/alpha_loss"].item() == pytest.approx(wanted, rel=1e-4)
    assert (agent.log_alpha.item() < -0.5) == (entropy > target)  # less weight on enough entropy


@pytest.mark.parametrize("name", ["tqc", "simbav2"])
def test_every_network_learns_in_every_step(name: str, train) -> None:
    width = "" if name == "tqc" else "--max-return 3"
    flags = f"{QUICK} --critic-width 8 {width} --total-timesteps 60 --tau 1 --checkpoints 0"
    variables = train(f"{name}_continuous_action", flags).variables
    for optimizer in (variables["q_optimizer"], variables["policy_optimizer"]):
        assert {int(state["step"]) for state in optimizer.state.values()} == {20}
        assert len(optimizer.state) == len([x for g in optimizer.param_groups for x in g["params"]])
    agent = variables["agent"]
    critics = agent.critics.state_dict()  # --tau 1 copies them to the targets
    assert all(torch.equal(x, critics[key]) for key, x in agent.target_critics.state_dict().items())
    if name == "tqc":
        groups = variables["q_optimizer"].param_groups + variables["policy_optimizer"].param_groups
        assert [group["lr"] for group in groups] == [3e-4] * 3


def test_simbav2_updates_the_policy_first_with_the_batch_of_the_critics(train) -> None:
    flags = f"{QUICK} --critic-width 8 --total-timesteps 45 --checkpoints 0"
    learn = train("simbav2_continuous_action", flags).variables["learn"]
    calls = []

    def remember(network: str, *batch: Tensor) -> dict[str, Tensor]:
        calls.append((network, batch))
        return {}

    script = learn.__globals__
    script["losses"].add = lambda losses: None
    script["train_policy"] = lambda *batch: remember("policy", *batch)
    script["train_q"] = lambda *batch: remember("critics", *batch)
    learn()
    assert [network for network, _ in calls] == ["policy", "critics"]
    (_, first), (_, second) = calls
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("name", MODULES)
def test_the_first_actions_are_random(name: str, train) -> None:
    """They cover the range evenly, whatever the policy would do."""
    flags = f"{QUICK} --learning-starts 190 --total-timesteps 195 --buffer-size 200 --checkpoints 0"
    flags += "" if name == "droq" else " --critic-width 8"
    memory = train(f"{name}_continuous_action", flags).variables["memory"]
    actions = memory.state_dict()["rows"][:190, -3].numpy()
    actions = actions / (1 if name in ("tqc", "simbav2") else 2)  # the bounds of Pendulum are ±2
    counts = np.histogram(actions, bins=5, range=(-1, 1))[0]
    assert counts.sum() == 190 and counts.min() > 20  # 38 on average
