"""Policies and Q-networks that act in NumPy compute what torch would, or are left to torch."""

import random
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cleanrl import ppo, ppo_continuous_action
from cleanrl_utils.running import rng
from cleanrl_utils.speed.acting import Sampler
from cleanrl_utils.speed.inference import PolicyOnDevice, inference

CPU = torch.device("cpu")


def sampler_args(num_envs: int, compile: bool = False) -> SimpleNamespace:
    both = dict(cudagraphs=True, torch_deterministic=True)
    return SimpleNamespace(num_envs=num_envs, compile=compile, **both)


def small_agents() -> list[nn.Module]:
    """Agents of PPO for discrete and for continuous actions, of different weights."""
    spaces = dict(single_observation_space=SimpleNamespace(shape=(5,)))
    discrete = SimpleNamespace(**spaces, single_action_space=SimpleNamespace(n=3))
    vectors = SimpleNamespace(**spaces, single_action_space=SimpleNamespace(shape=(2,)))
    continuous = ppo_continuous_action.Agent(vectors)
    continuous.obs_stats.update(3 + 2 * torch.randn(100, 5))
    return [ppo.Agent(discrete), continuous]


@pytest.mark.parametrize("which, compile", [(0, False), (1, False), (1, True)])
def test_rollouts_act_in_numpy_as_torch_does(which: int, compile: bool, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    agent = small_agents()[which]
    sample = Sampler(agent, CPU, sampler_args(4, compile))
    assert sample.in_numpy
    for seed in range(3):
        obs = np.random.default_rng(seed).standard_normal((4, 5)).astype(np.float32)
        torch.manual_seed(seed)
        actions = sample(obs)
        torch.manual_seed(seed)
        with torch.no_grad():
            expected = agent.act(torch.from_numpy(obs), greedy=False).numpy()
            np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-5)
            for parameter in agent.parameters():  # as an optimizer does
                parameter += 0.1 * torch.randn_like(parameter)
        assert actions.dtype == expected.dtype


def test_rollouts_of_other_networks_act_in_torch() -> None:
    agent = small_agents()[0]
    assert Sampler(agent, CPU, sampler_args(9)).in_numpy is None
    agent.actor = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))
    sample = Sampler(agent, CPU, sampler_args(4))
    assert sample.in_numpy is None
    assert sample(np.zeros((4, 5), np.float32)).shape == (4,)


class Unusual(nn.Module):
    """Policies that a user may write."""

    def __init__(self, policy: Callable[[Tensor], Tensor]):
        super().__init__()
        self.network = nn.Linear(5, 6)
        self.policy = policy

    def forward(self, obs: Tensor) -> Tensor:
        return self.policy(self.network(obs))


def fill_first(x: Tensor) -> Tensor:
    noise = torch.empty_like(x)
    noise.exponential_()
    return x + noise


def bound_in_place(x: Tensor) -> Tensor:
    x[:, 1:].clamp_(-0.1, 0.1)
    return x


def residual(x: Tensor) -> Tensor:
    return x + nn.functional.relu_(x)


@pytest.mark.parametrize(
    "policy",
    [
        *(fill_first, bound_in_place, residual),
        *(lambda x: x.clamp(0.0), lambda x: x.clamp(None, 0.0), lambda x: x.argmax()),
        *(lambda x: x.softmax(-1, torch.float64), lambda x: x.argmax(-1, True)),
        *(lambda x: x[:, x.argmax(-1)], lambda x: x.unflatten(-1, (2, 3))),
        lambda x: x + torch.empty_like(x).exponential_(2.0),
    ],
)
def test_unusual_networks_compute_what_torch_does(policy: Callable[[Tensor], Tensor]) -> None:
    network = Unusual(policy)
    compute = inference(network, CPU, sampler_args(2))
    obs = np.random.default_rng(1).standard_normal((2, 5)).astype(np.float32)
    torch.manual_seed(1)
    found = compute(obs)
    torch.manual_seed(1)
    with torch.no_grad():
        expected = network(torch.from_numpy(obs)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_layers_with_hooks_act_in_torch() -> None:
    network = Unusual(torch.tanh)
    network.network = nn.utils.spectral_norm(network.network)
    compute = inference(network, CPU, sampler_args(2))
    obs = np.random.default_rng(1).standard_normal((2, 5)).astype(np.float32)
    with torch.no_grad():
        network.network.weight_orig += 1.0  # as an optimizer changes it
        network.eval()  # in training mode, each call changes the weights
        expected = network(torch.from_numpy(obs)).numpy()
    np.testing.assert_allclose(compute(obs), expected, rtol=1e-5)


def double_in_place(x: Tensor) -> Tensor:
    same = x
    x *= 2
    return same


def bernoulli(probability: float) -> bool:
    return bool(torch.rand(()) < probability)


@pytest.mark.parametrize(
    "policy",
    [
        *(double_in_place, lambda x: x + torch.is_grad_enabled()),
        *(lambda x: x * random.random(), lambda x: x * float(np.random.rand())),
        *(lambda x: x * torch.rand(()).item(), lambda x: x if bernoulli(0.5) else x * 2.0),
    ],
)
def test_each_call_is_as_in_torch(policy: Callable[[Tensor], Tensor]) -> None:
    network = Unusual(policy)
    compute = inference(network, CPU, sampler_args(2))
    obs = torch.ones(2, 5)
    for seed in range(5):
        rng.seed_everything(seed)
        found = compute(obs.numpy())
        rng.seed_everything(seed)
        with torch.no_grad():
            np.testing.assert_allclose(found, network(obs), rtol=1e-5)


class Remembering(nn.Module):
    """A network that changes its attributes in each forward pass."""

    def __init__(self, remember: Callable[[nn.Module, Tensor], Any]):
        super().__init__()
        self.network = nn.Linear(5, 5)
        self.remember = remember
        self.hidden = torch.zeros(2, 5)
        self.seen: list[Tensor] = []
        self.calls = 0

    def forward(self, obs: Tensor) -> Tensor:
        x = self.network(obs)
        self.remember(self, x)
        return x + self.calls


def recur(module: Any, x: Tensor) -> None:
    module.hidden = (x + module.hidden).tanh()


def store(module: Any, x: Tensor) -> None:
    module.features = x


def count(module: Any, x: Tensor) -> None:
    module.calls += 1


def append(module: Any, x: Tensor) -> None:
    module.seen.append(x)


@pytest.mark.parametrize("remember", [recur, store, count, append])
def test_networks_that_change_their_attributes_act_in_torch(remember: Callable) -> None:
    network = Remembering(remember)
    expected = deepcopy(network)
    compute = inference(network, CPU, sampler_args(2))
    for _ in range(3):
        obs = torch.randn(2, 5)
        with torch.no_grad():
            np.testing.assert_allclose(compute(obs.numpy()), expected(obs))
    assert network.calls == expected.calls and len(network.seen) == len(expected.seen)
    assert torch.equal(network.hidden, expected.hidden)
    assert hasattr(network, "features") == (remember is store)


class Scaled(nn.Module):
    """A policy with settings that training may change."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(5, 3), nn.Tanh())
        self.register_buffer("mean", torch.zeros(5))
        self.scale = 1.0

    def forward(self, obs: Tensor) -> Tensor:
        x = self.network(obs - self.mean) * self.scale
        return x + 1.0 if self.training else x

    def act(self, obs: Tensor, greedy: bool = True) -> Tensor:
        return self(obs)


def other_vector(module: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(2 * vector, module.parameters())


def other_layer(module: Any) -> None:
    module.network[0] = nn.Linear(5, 3)


def other_weight(module: Any) -> None:
    module.network[0].weight = nn.Parameter(torch.randn(3, 5))


def other_buffer(module: Any) -> None:
    module.mean = module.mean + 1.0


def other_scale(module: Any) -> None:
    module.scale = 0.5


def add_hook(module: Any) -> None:
    module.network[1].register_forward_hook(lambda layer, inputs, output: 2 * output)


def load_other_tensors(module: nn.Module) -> None:
    state = {name: x + 1.0 for name, x in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


@pytest.mark.parametrize(
    "change",
    [
        *(other_vector, other_layer, other_weight, other_buffer, other_scale, add_hook),
        *(load_other_tensors, nn.Module.eval),
    ],
)
def test_actions_follow_changes_of_the_agent(change: Callable[[nn.Module], Any]) -> None:
    agent = Scaled()
    compute = inference(agent, CPU, sampler_args(2))
    sample = Sampler(agent, CPU, sampler_args(2))
    assert sample.in_numpy and not isinstance(compute, PolicyOnDevice)
    obs = torch.randn(2, 5)
    with torch.no_grad():
        before = agent(obs)
        change(agent)
        sample.fetch()
        expected = agent(obs)
    assert not torch.allclose(before, expected, rtol=1e-3)
    np.testing.assert_allclose(compute(obs.numpy()), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sample(obs.numpy()), expected, rtol=1e-5, atol=1e-6)


def test_numpy_leaves_other_types_than_float32_to_torch() -> None:
    agent = Scaled()
    agent.mean = torch.arange(5)
    assert Sampler(agent, CPU, sampler_args(2)).in_numpy is None
    assert Sampler(Scaled().double(), CPU, sampler_args(2)).in_numpy is None
