"""The three changes to DQN of docs/examples: small, right, and able to learn."""

import importlib.util
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from batches import VECTORS
from conftest import ROOT
from table import DQN_PROBE

from cleanrl_utils.errors import BadInput
from cleanrl_utils.pages import diffs
from cleanrl_utils.running.evaluation import build

NAMES = ["dqn_double", "dqn_quantile", "dqn_munchausen"]
GAMMA = 0.9


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "examples" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loss_and_networks(name: str, batch: tuple, **settings: Any) -> tuple[float, Any, Any, Any]:
    """The loss of a batch, of a network and a target network whose best actions differ."""
    module = load(name)
    torch.manual_seed(0)
    args = module.Args(gamma=GAMMA, **settings)
    network, target = (build(module.QNetwork, VECTORS, args) for _ in range(2))
    with torch.no_grad():
        for layers in (network, target):
            layers[4].weight.mul_(10)
    still = torch.optim.SGD(network.parameters(), lr=0.0)
    losses = module.update(network, target, still, args, *batch)
    return losses["losses/td_loss"].item(), network, target, args


def make_batch(size: int = 16) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    obs, next_obs = torch.randn(2, size, 4)
    terminated = (torch.arange(size) % 4 == 0).float()
    return obs, next_obs, torch.arange(size) % 3, torch.randn(size), terminated


@pytest.mark.parametrize("name", NAMES)
def test_it_changes_at_most_twenty_lines(name: str) -> None:
    ours = (ROOT / "docs" / "examples" / f"{name}.py").read_text()
    theirs = (ROOT / "cleanrl" / "dqn.py").read_text()

    def code(text: str) -> str:
        without_docstring = re.sub(r'\A""".*?"""\n', "", text, flags=re.S)
        return re.sub(r"^ *#.*\n", "", without_docstring, flags=re.M)

    _, new = diffs.diff_size(code(theirs), code(ours))
    assert new <= 20, new


def test_double_dqn_selects_with_one_network_and_evaluates_with_the_other() -> None:
    batch = obs, next_obs, actions, rewards, terminated = make_batch()
    loss, network, target, _ = loss_and_networks("dqn_double", batch)
    with torch.no_grad():
        best = network(next_obs).argmax(1)
        assert (best != target(next_obs).argmax(1)).any()
        next_value = target(next_obs)[torch.arange(16), best]
        wanted = rewards + GAMMA * next_value * (1 - terminated)
        errors = wanted - network(obs)[torch.arange(16), actions]
    assert loss == pytest.approx(errors.square().mean().item(), rel=1e-5)


def test_quantile_regression_written_out() -> None:
    batch = obs, next_obs, actions, rewards, terminated = make_batch()
    loss, network, target, _ = loss_and_networks("dqn_quantile", batch, n_quantiles=5)
    with torch.no_grad():
        found, later = network(obs).numpy(), target(next_obs).numpy()
    total = 0.0
    for i in range(16):
        best = later[i].mean(-1).argmax()
        for k, quantile in enumerate(found[i, actions[i]]):
            for next_quantile in later[i, best]:
                bootstrap = GAMMA * next_quantile * (1 - terminated[i].item())
                error = rewards[i].item() + bootstrap - quantile
                huber = error**2 / 2 if abs(error) <= 1 else abs(error) - 0.5
                total += abs((k + 0.5) / 5 - (error < 0)) * huber / 5
    assert loss == pytest.approx(total / 16, rel=1e-4)


def test_quantiles_settle_at_the_quantiles_of_the_returns() -> None:
    """Rewards 0, 1, ..., 9 at random: quantiles 0.1, 0.3, ... of their distribution."""
    module = load("dqn_quantile")
    torch.manual_seed(0)
    args = module.Args(n_quantiles=5)
    network, target = (build(module.QNetwork, VECTORS, args) for _ in range(2))
    optimizer = torch.optim.Adam(network.parameters(), 0.003)
    obs = torch.ones(100, 4)
    rewards = torch.arange(10).repeat(10).float()
    batch = (obs, obs, torch.zeros(100, dtype=torch.long), rewards, torch.ones(100))
    for _ in range(600):
        module.update(network, target, optimizer, args, *batch)
    found = network(obs[:1])[0, 0].tolist()
    assert found == pytest.approx([0.5, 2.5, 4.5, 6.5, 8.5], abs=0.75)


def test_munchausen_targets_written_out() -> None:
    batch = obs, next_obs, actions, rewards, terminated = make_batch()
    settings = {"munchausen_tau": 0.1, "munchausen_alpha": 0.8, "munchausen_clip": -0.5}
    loss, network, target, _ = loss_and_networks("dqn_munchausen", batch, **settings)
    with torch.no_grad():
        q_values, now, later = (
            x.double().numpy() for x in (network(obs), target(obs), target(next_obs))
        )
    total, clipped = 0.0, 0
    for i in range(16):
        policy = np.exp(now[i] / 0.1 - now[i].max() / 0.1)
        logprob = np.log(policy[actions[i]] / policy.sum())
        clipped += 0.1 * logprob < -0.5
        next_policy = np.exp(later[i] / 0.1 - later[i].max() / 0.1)
        next_policy /= next_policy.sum()
        value = (next_policy * (later[i] - 0.1 * np.log(next_policy))).sum()
        wanted = rewards[i].item() + 0.8 * max(0.1 * logprob, -0.5)
        wanted += GAMMA * value * (1 - terminated[i].item())
        total += (wanted - q_values[i, actions[i]]) ** 2 / 16
    assert 0 < clipped < 16
    assert loss == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_values_and_actions(name: str, train: Callable) -> None:
    done = train(
        f"../docs/examples/{name}",  # beside the scripts
        f"--env-id probes:ProbeBoth-v0 {DQN_PROBE} --save-model --eval-episodes 5",
    )
    cues = torch.tensor([[-1.0], [1.0]])
    network = done.variables["q_network"]
    assert network.act(cues).tolist() == [0, 1]
    with torch.no_grad():
        values = network(cues)
    best = (values.mean(-1) if name == "dqn_quantile" else values).amax(1)
    assert best.tolist() == pytest.approx([1, 1], abs=0.1)
    assert [v for _, tag, v in done.rows() if tag == "eval/episodic_return"] == [1.0] * 5


@pytest.mark.parametrize("name", ["dqn_double", "dqn_quantile"])
def test_it_bootstraps_where_an_episode_is_truncated(name: str, train: Callable) -> None:
    done = train(
        f"../docs/examples/{name}", f"--env-id probes:ProbeTruncation-v0 --gamma 0.8 {DQN_PROBE}"
    )
    values = done.variables["q_network"](torch.ones(1, 1)).detach()
    value = (values.mean(-1) if name == "dqn_quantile" else values).max()
    assert value.item() == pytest.approx(5, abs=0.5)


def test_munchausen_refuses_a_temperature_of_zero() -> None:
    with pytest.raises(BadInput) as refused:
        load("dqn_munchausen").Args(munchausen_tau=0.0)
    assert refused.value.message == "--munchausen-tau must be above 0"
