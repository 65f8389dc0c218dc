"""TQC: truncated targets, the quantile Huber loss, and what differs from SAC."""

from typing import Any

import gymnasium as gym
import numpy as np
import probes  # noqa: F401
import pytest
import torch
from torch import Tensor

from cleanrl import tqc_continuous_action as tqc
from cleanrl_utils.errors import BadInput

SMALL: dict[str, Any] = {"n_critics": 3, "n_quantiles": 5, "critic_width": 16}


class Spaces:
    """All that networks ask of environments."""

    single_observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    single_action_space = gym.spaces.Box(-1, 1, (2,), np.float32)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


def batch(n: int) -> tuple[Tensor, ...]:
    """obs, next_obs, actions, rewards, terminated"""
    rewards = torch.randn(n)
    terminated = (torch.rand(n) < 0.5).float()
    return torch.randn(n, 4), torch.randn(n, 4), torch.rand(n, 2) * 2 - 1, rewards, terminated


def truncated(quantiles: np.ndarray, drop_per_net: int) -> list[list[float]]:
    """For each row of the batch the kept quantiles of (critics, batch, quantiles), by loops."""
    kept = []
    for row in range(quantiles.shape[1]):
        pool = sorted(float(x) for critic in quantiles for x in critic[row])
        kept.append(pool[: len(pool) - drop_per_net * len(quantiles)])
    return kept


def huber_loss(quantiles: np.ndarray, targets: Any) -> float:
    """The quantile Huber loss with kappa 1, by loops."""
    losses = []
    for critic in quantiles:
        for row, wanted in zip(critic, targets, strict=True):
            for i, quantile in enumerate(row):
                tau = (2 * i + 1) / (2 * len(row))
                for target in wanted:
                    delta = float(target) - float(quantile)
                    huber = 0.5 * delta**2 if abs(delta) <= 1 else abs(delta) - 0.5
                    losses.append(abs(tau - (1 if delta < 0 else 0)) * huber)
    return sum(losses) / len(losses)


@pytest.mark.parametrize("drop", [0, 1, 4])
def test_the_target_pools_all_critics_and_drops_the_largest_quantiles(drop: int) -> None:
    quantiles = torch.randn(3, 6, 5)
    found = tqc.truncate(quantiles, drop)
    assert found.shape == (6, 3 * (5 - drop))
    np.testing.assert_array_equal(found, np.float32(truncated(quantiles.numpy(), drop)))


def test_the_largest_quantiles_may_all_be_of_one_critic() -> None:
    quantiles = torch.tensor([[[1.0, 2.0]], [[10.0, 20.0]]])  # two critics, a batch of one
    assert tqc.truncate(quantiles, 1).tolist() == [[1.0, 2.0]]


def test_the_quantile_huber_loss_is_that_of_loops() -> None:
    quantiles = 2 * torch.randn(3, 4, 5)
    targets = 2 * torch.randn(4, 7)
    found = tqc.quantile_huber_loss(quantiles, targets).item()
    assert found == pytest.approx(huber_loss(quantiles.numpy(), targets.numpy()), rel=1e-5)


def test_the_loss_is_least_at_the_quantiles_of_the_targets() -> None:
    """For errors far above 1 the loss is that of quantile regression."""
    targets = torch.linspace(0, 100_000, 1001).expand(1, -1)
    quantiles = torch.full((1, 1, 4), 50_000.0, requires_grad=True)
    optimizer = torch.optim.Adam([quantiles], 300)
    for _ in range(500):
        optimizer.zero_grad()
        tqc.quantile_huber_loss(quantiles, targets).backward()
        optimizer.step()
    wanted = [12_500, 37_500, 62_500, 87_500]
    np.testing.assert_allclose(quantiles.detach().flatten(), wanted, atol=1000)


def test_an_update_has_the_loss_of_truncated_soft_targets() -> None:
    args = tqc.Args(gamma=0.9, autotune=False, alpha=0.3, top_quantiles_to_drop_per_net=2, **SMALL)
    agent = tqc.Agent(Spaces(), args)
    for x in agent.target_critics.parameters():
        x.add_(0.3 * torch.randn_like(x))
    transitions = batch(6)
    obs, next_obs, actions, rewards, terminated = transitions
    with torch.no_grad():
        state = torch.get_rng_state()
        next_actions, logprob = agent.actor.sample(next_obs)
        torch.set_rng_state(state)
        kept = truncated(agent.target_critics(next_obs, next_actions).numpy(), 2)
        quantiles = agent.critics(obs, actions).numpy()
    targets = []
    for row in range(6):
        go_on = 0.9 * (1 - terminated[row].item())
        soft = [value - 0.3 * logprob[row].item() for value in kept[row]]
        targets.append([rewards[row].item() + go_on * value for value in soft])
    frozen = torch.optim.SGD(agent.critics.parameters(), lr=0.0)
    found = tqc.update_critics(agent, frozen, args, *transitions)
    assert found["losses/qf_loss"].item() == pytest.approx(huber_loss(quantiles, targets), rel=1e-4)
    assert found["losses/qf_values"].item() == pytest.approx(quantiles.mean(), rel=1e-4)


def test_critics_are_separate_networks() -> None:
    critics = tqc.Critics(Spaces(), tqc.Args(**SMALL))
    obs, _, actions, _, _ = batch(8)
    found = critics(obs, actions)
    for k in range(3):
        x = torch.cat([obs, actions], 1)
        for i, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
            x = (x if i == 0 else x.relu()) @ weight[k] + bias[k]
        assert torch.allclose(found[k], x, atol=1e-5)
    assert len(critics.weights) == 4  # three hidden layers
    found[0].sum().backward()
    assert all((x.grad[0] != 0).any() and (x.grad[1:] == 0).all() for x in critics.parameters())


def test_the_policy_maximises_the_mean_of_all_quantiles() -> None:
    args = tqc.Args(autotune=False, alpha=0.5, **SMALL)
    agent = tqc.Agent(Spaces(), args)
    transitions = batch(32)
    state = torch.get_rng_state()
    with torch.no_grad():
        actions, logprob = agent.actor.sample(transitions[0])
        q = [np.mean(row) for row in agent.critics(transitions[0], actions).numpy().swapaxes(0, 1)]
    torch.set_rng_state(state)
    frozen = torch.optim.SGD(agent.actor.parameters(), lr=0.0)
    found = tqc.update_policy(agent, frozen, args, *transitions)["losses/actor_loss"].item()
    assert found == pytest.approx(float((0.5 * logprob).mean()) - np.mean(q), rel=1e-4)
    optimizer = torch.optim.Adam(agent.actor.parameters(), 3e-3)
    losses = []
    for _ in range(60):
        loss = tqc.update_policy(agent, optimizer, args, *transitions)["losses/actor_loss"]
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.01
    assert all(x.grad is None for x in agent.critics.parameters())


def test_the_environment_gets_actions_in_its_own_bounds() -> None:
    env = tqc.make_env("probes:ProbeBothContinuous-v0", 1, 0, False, "")()
    env.reset(seed=1)
    assert env.action_space.low == -1 and env.action_space.high == 1
    sign = env.unwrapped.sign
    reward = env.step(np.array([1.0], np.float32))[1]  # 2 in the bounds of the probe
    assert reward == pytest.approx(1 - (2 - sign) ** 2)


def test_something_must_be_left_of_the_quantiles() -> None:
    with pytest.raises(BadInput) as refused:
        tqc.Args(n_quantiles=5, top_quantiles_to_drop_per_net=5)
    assert "--top-quantiles-to-drop-per-net" in refused.value.message
    assert tqc.Args(n_quantiles=5, top_quantiles_to_drop_per_net=4).n_quantiles == 5


def test_actions_without_bounds_are_refused(train, capfd) -> None:
    with pytest.raises(SystemExit) as stop:
        train("tqc_continuous_action", "--env-id probes:ProbeOddUnbounded-v0")
    assert stop.value.code == 2 and "without bounds" in capfd.readouterr().err
