"""SAC, TD3 and DDPG: the parts that a wrong sign or a wrong shape would spoil quietly."""

import math
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from cleanrl import ddpg_continuous_action as ddpg
from cleanrl import sac_atari
from cleanrl import sac_continuous_action as sac
from cleanrl import td3_continuous_action as td3
from cleanrl_utils.errors import BadInput

LOW, HIGH = np.array([-0.4, 0.0, -3.0], np.float32), np.array([0.4, 5.0, -1.0], np.float32)


class Spaces:
    """All that networks ask of environments. Each dimension of an action has bounds of its own."""

    single_observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    single_action_space = gym.spaces.Box(LOW, HIGH)


class Games:
    single_observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    single_action_space = gym.spaces.Discrete(3)


def batch(n: int = 64) -> tuple[Tensor, ...]:
    """obs, next_obs, actions, rewards, terminated"""
    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    actions = low + (high - low) * torch.rand(n, 3)
    return (
        torch.randn(n, 4),
        torch.randn(n, 4),
        actions,
        torch.randn(n),
        (torch.rand(n) < 0.5) * 1.0,
    )


class Frozen:
    """An optimizer that moves nothing, so that a loss can be looked at."""

    def __new__(cls, module: torch.nn.Module) -> Any:
        return torch.optim.SGD(module.parameters(), lr=0.0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("module", [sac, td3, ddpg], ids=lambda m: m.__name__)
def test_actions_fill_the_bounds_of_each_dimension_and_stay_inside(module: ModuleType) -> None:
    actor = module.Agent(Spaces(), module.Args(**noise(module))).actor
    obs = 100 * torch.randn(4096, 4)  # far out, so that tanh saturates
    with torch.no_grad():
        for greedy in (True, False):
            actions = actor.act(obs, greedy=greedy).numpy()
            assert (actions >= LOW).all() and (actions <= HIGH).all()
            assert np.allclose(actions.min(0), LOW, atol=1e-3)
            assert np.allclose(actions.max(0), HIGH, atol=1e-3)


def noise(module: ModuleType) -> dict[str, float]:
    return {} if module is sac else {"exploration_noise": 0.5}


@pytest.mark.parametrize("module", [sac, td3, ddpg], ids=lambda m: m.__name__)
def test_evaluation_has_no_noise_and_environments_have_their_own(module: ModuleType) -> None:
    actor = module.Agent(Spaces(), module.Args(**noise(module))).actor
    obs = torch.randn(1, 4).expand(8, 4)  # eight environments see the same
    with torch.no_grad():
        assert torch.equal(actor.act(obs), actor.act(obs))
        assert len(actor.act(obs).unique(dim=0)) == 1
        assert len(actor.act(obs, greedy=False).unique(dim=0)) == 8


@pytest.mark.parametrize("module", [td3, ddpg], ids=lambda m: m.__name__)
def test_exploration_noise_is_a_part_of_each_dimensions_range(module: ModuleType) -> None:
    actor = module.Agent(Spaces(), module.Args(exploration_noise=0.1)).actor
    obs = torch.zeros(20_000, 4)
    with torch.no_grad():
        spread = (actor.act(obs, greedy=False) - actor.act(obs)).std(0)
    assert torch.allclose(spread, 0.1 * (torch.tensor(HIGH - LOW) / 2), rtol=0.05)


def test_squashed_log_probability_is_that_of_torch_distributions() -> None:
    actor = sac.Actor(Spaces()).double()
    obs = torch.randn(256, 4, dtype=torch.float64)
    with torch.no_grad():
        actions, logprob = actor.sample(obs)
        mean, log_std = actor(obs)
    affine = torch.distributions.AffineTransform(actor.bias, actor.scale, event_dim=1)
    squashed = torch.distributions.TransformedDistribution(
        torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1),
        [torch.distributions.TanhTransform(), affine],
    )
    assert torch.allclose(logprob, squashed.log_prob(actions), atol=1e-6)
    assert log_std.min() >= -5 and log_std.max() <= 2


def test_squashed_log_probability_is_finite_where_tanh_saturates() -> None:
    actor = sac.Actor(Spaces())
    with torch.no_grad():
        actor.network[-1].bias[:3] = 50.0
    _, logprob = actor.sample(torch.randn(64, 4))
    logprob.sum().backward()
    assert logprob.isfinite().all()
    assert all(x.grad.isfinite().all() for x in actor.parameters())


@pytest.mark.parametrize("module", [sac, td3], ids=lambda m: m.__name__)
def test_twin_critics_are_two_separate_networks(module: ModuleType) -> None:
    critics = module.Critics(Spaces())
    obs, _, actions, _, _ = batch()
    found = critics(obs, actions)
    for k in range(2):
        x = torch.cat([obs, actions], 1)
        for i, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
            x = (x if i == 0 else x.relu()) @ weight[k] + bias[k]
        assert torch.allclose(found[k], x[:, 0], atol=1e-5)
    assert not torch.allclose(found[0], found[1])
    found[0].sum().backward()
    assert all((x.grad[0] != 0).any() and (x.grad[1] == 0).all() for x in critics.parameters())


def targets_of(
    module: ModuleType, agent: Any, args: Any, transitions: tuple[Tensor, ...]
) -> Tensor:
    """The targets a critic's update uses, from the loss of critics that say 0 everywhere."""
    with torch.no_grad():
        for x in (*agent.critics.parameters(),):
            x.zero_()
    losses = module.update_critics(agent, Frozen(agent.critics), args, *transitions)
    both = torch.stack([losses["losses/qf1_loss"], losses["losses/qf2_loss"]])
    return both.sqrt()  # of a single transition: |target|


@pytest.mark.parametrize("module", [sac, td3], ids=lambda m: m.__name__)
def test_targets_take_the_smaller_critic_and_stop_at_termination_only(module: ModuleType) -> None:
    settings = {"autotune": False, "alpha": 1e-9} if module is sac else {"policy_noise": 0.0}
    args = module.Args(gamma=0.9, **settings)
    agent = module.Agent(Spaces(), args)
    with torch.no_grad():
        for x in agent.target_critics.parameters():
            x.zero_()
        agent.target_critics.biases[-1][:, 0, 0] = torch.tensor([7.0, 5.0])
    obs, next_obs, actions, _, _ = batch(1)
    for terminated, wanted in ((0.0, 1 + 0.9 * 5), (1.0, 1.0)):
        transition = (obs, next_obs, actions, torch.ones(1), torch.tensor([terminated]))
        assert torch.allclose(targets_of(module, agent, args, transition), torch.tensor(wanted))


def test_soft_targets_add_the_entropy() -> None:
    args = sac.Args(gamma=0.9, autotune=False, alpha=0.5)
    agent = sac.Agent(Spaces(), args)
    with torch.no_grad():
        for x in agent.target_critics.parameters():
            x.zero_()
    obs, next_obs, actions, _, _ = batch(1)
    transition = (obs, next_obs, actions, torch.full((1,), 9.0), torch.zeros(1))
    state = torch.get_rng_state()
    found = targets_of(sac, agent, args, transition)
    torch.set_rng_state(state)
    logprob = agent.actor.sample(next_obs)[1].item()
    assert torch.allclose(found, torch.tensor(9 - 0.9 * 0.5 * logprob))


def test_smoothing_noise_is_scaled_and_clipped_in_each_dimension() -> None:
    args = td3.Args(policy_noise=0.2, noise_clip=0.5)
    actor = td3.Agent(Spaces(), args).target_actor
    obs, scale = torch.zeros(20_000, 4), torch.tensor(HIGH - LOW) / 2
    clean = actor(obs)
    noise = (td3.smoothed_actions(actor, obs, args) - clean) / scale
    assert torch.allclose(noise.std(0), torch.tensor(0.2), rtol=0.05)
    wild = td3.Args(policy_noise=5.0, noise_clip=0.5)
    noise = (td3.smoothed_actions(actor, obs, wild) - clean) / scale
    assert noise.abs().max() <= 0.5 + 1e-4
    far = td3.smoothed_actions(actor, 1000 * torch.randn(4096, 4), wild).numpy()
    assert (far >= LOW).all() and (far <= HIGH).all()


def temperature_after(
    module: ModuleType, spaces: Any, obs: Tensor, bias: float
) -> tuple[float, float]:
    """log alpha after some updates of a policy that is all but random (bias high) or certain."""
    args = module.Args(policy_lr=0.0, **({"q_lr": 0.01} if module is sac else {}))
    agent = module.Agent(spaces, args)
    with torch.no_grad():
        if module is sac:
            agent.actor.network[-1].bias[3:] = bias
        else:
            agent.actor[-1].weight.zero_()
            agent.actor[-1].bias[0] = bias
    optimizer = torch.optim.Adam([{"params": agent.actor.parameters(), "lr": 0.0}])
    optimizer.add_param_group({"params": [agent.log_alpha], "lr": 0.01})
    for _ in range(5):
        found = module.update_policy(agent, optimizer, args, obs)
    return agent.log_alpha.item(), found["losses/alpha"].item()


@pytest.mark.parametrize("module", [sac, sac_atari], ids=lambda m: m.__name__)
def test_temperature_falls_where_entropy_is_above_its_target_and_rises_below(
    module: ModuleType,
) -> None:
    if module is sac:
        spaces, obs, random, certain = Spaces(), torch.zeros(512, 4), 0.0, -50.0
    else:
        spaces, obs = Games(), torch.zeros(4, 4, 84, 84, dtype=torch.uint8)
        random, certain = 0.0, 50.0
    log_alpha, alpha = temperature_after(module, spaces, obs, random)
    assert log_alpha < -0.04 and alpha == pytest.approx(math.exp(log_alpha + 0.01), abs=0.01)
    assert temperature_after(module, spaces, obs, certain)[0] > 0.04


def test_fixed_temperature_is_the_flags() -> None:
    agent = sac.Agent(Spaces(), sac.Args(autotune=False, alpha=0.3))
    optimizer = torch.optim.Adam(agent.actor.parameters())
    found = sac.update_policy(agent, optimizer, sac.Args(autotune=False), *batch())
    assert found["losses/alpha"] == pytest.approx(0.3) and agent.log_alpha.exp() == pytest.approx(
        0.3
    )


@pytest.mark.parametrize("module", [sac, sac_atari], ids=lambda m: m.__name__)
def test_no_temperature_is_refused(module: ModuleType) -> None:
    with pytest.raises(BadInput) as refused:
        module.Args(autotune=False, alpha=0.0)
    assert "--alpha" in refused.value.message


@pytest.mark.parametrize("module", [sac, td3, ddpg], ids=lambda m: m.__name__)
def test_the_policy_climbs_its_critic_and_leaves_it_alone(module: ModuleType) -> None:
    agent = module.Agent(Spaces(), module.Args())
    critic = agent.critic if module is ddpg else agent.critics
    before = [x.clone() for x in critic.parameters()]
    optimizer = torch.optim.Adam(agent.actor.parameters(), 1e-3)
    transitions = batch(256)
    with torch.no_grad():
        agent.log_alpha.fill_(-20.0) if module is sac else None

    def value() -> float:
        """What the critic thinks of the policy; of two, the one or ones it is told to climb."""
        with torch.no_grad():
            found = critic(
                transitions[0],
                agent.actor(transitions[0])
                if module is not sac
                else agent.actor.act(transitions[0]),
            )
        return (
            (found if module is ddpg else found[0] if module is td3 else found.amin(0))
            .mean()
            .item()
        )

    start = value()
    for _ in range(60):
        module.update_policy(agent, optimizer, module.Args(), *transitions)
    assert value() > start + 1e-3
    assert all(torch.equal(a, b) for a, b in zip(before, critic.parameters(), strict=True))
    assert all(x.grad is None for x in critic.parameters())


@pytest.mark.parametrize("module", [sac, td3, ddpg], ids=lambda m: m.__name__)
def test_targets_follow_by_tau(module: ModuleType) -> None:
    agent = module.Agent(Spaces(), module.Args())
    network, target = (
        (agent.critic, agent.target_critic)
        if module is ddpg
        else (
            agent.critics,
            agent.target_critics,
        )
    )
    with torch.no_grad():
        for x in network.parameters():
            x.add_(1)
    old = [x.clone() for x in target.parameters()]
    module.update_target(network, target, 0.25)
    for was, now, towards in zip(old, target.parameters(), network.parameters(), strict=True):
        assert torch.allclose(now, 0.25 * towards + 0.75 * was)
    module.update_target(network, target, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), target.parameters()))


def test_discrete_policy_loss_is_the_expectation_over_actions() -> None:
    args = sac_atari.Args(autotune=False, alpha=0.5)
    agent = sac_atari.Agent(Games(), args)
    obs = torch.randint(256, (5, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        probs = agent.actor(obs).softmax(-1)
        q = torch.minimum(*agent.critics(obs))
        wanted = sum(p @ (0.5 * p.log() - v) for p, v in zip(probs, q, strict=True)) / 5
    loss = sac_atari.update_policy(agent, Frozen(agent.actor), args, obs)["losses/actor_loss"]
    assert loss == pytest.approx(wanted.item(), rel=1e-4)
