"""SimBaV2: unit norms, the projected targets, and the running statistics."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from cleanrl import simbav2_continuous_action as simbav2
from cleanrl_utils.errors import BadInput
from cleanrl_utils.running.evaluation import load_model

QUICK = "--learning-starts 20 --batch-size 8 --critic-width 8 --checkpoints 0"


class Spaces:
    """All that networks ask of environments."""

    single_observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    single_action_space = gym.spaces.Box(-1, 1, (3,), np.float32)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


def make_agent(**settings: Any) -> tuple[Any, Any]:
    args = simbav2.Args(critic_width=16, **settings)
    return simbav2.Agent(Spaces(), args), args


def batch(n: int) -> tuple[Tensor, ...]:
    """obs, next_obs, actions, rewards, terminated"""
    rewards = torch.randn(n)
    terminated = (torch.rand(n) < 0.5).float()
    return torch.randn(n, 4), torch.randn(n, 4), torch.rand(n, 3) * 2 - 1, rewards, terminated


def lengths(network: nn.Module) -> Tensor:
    """The length of the weights of every unit."""
    found = [x.norm(dim=1).flatten() for name, x in network.named_parameters() if "weight" in name]
    assert len(found) == 2 * len(network.blocks) + 3
    return torch.cat(found).detach()


def test_weights_of_every_unit_have_length_1_before_and_after_updates() -> None:
    agent, args = make_agent()
    networks = (agent.actor, agent.critics)
    for network in networks:
        assert torch.allclose(lengths(network), torch.tensor(1.0), atol=1e-5)
    before = [x.clone() for x in agent.parameters()]
    critic_optimizer = optim.Adam(agent.critics.parameters(), 0.1)
    policy_optimizer = optim.Adam([*agent.actor.parameters(), agent.log_alpha], 0.1)
    for _ in range(3):
        simbav2.update_policy(agent, policy_optimizer, args, *batch(16))
        simbav2.update_critics(agent, critic_optimizer, args, *batch(16))
    for network in networks:
        assert torch.allclose(lengths(network), torch.tensor(1.0), atol=1e-5)
    assert all(not torch.equal(x, y) for x, y in zip(before, agent.parameters(), strict=True))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x)


def forward(network: Any, k: int, head: int, x: np.ndarray, width: int, blocks: int) -> np.ndarray:
    """One input through network `k` and head `head`, written as the paper has it."""
    p = {name: x.detach().double().numpy() for name, x in network.named_parameters()}
    h = unit(np.append(x, 3.0)) @ p["embedding_weight"][k]
    h = unit(h * p["embedding_scaler"][k, 0])
    for i in range(blocks):
        y = np.maximum(h @ p[f"blocks.{i}.weight1"][k] * p[f"blocks.{i}.scaler"][k, 0], 0) + 1e-8
        y = unit(y @ p[f"blocks.{i}.weight2"][k])
        alpha = p[f"blocks.{i}.alpha"][k, 0] * width**0.5 / (blocks + 1)
        h = unit((1 - alpha) * h + alpha * y)
    h = h @ p["head_weight1"][head] * p["head_scaler"][head, 0]
    return h @ p["head_weight2"][head] + p["bias"][head, 0]


def test_networks_are_those_of_the_paper_and_share_nothing() -> None:
    agent, _ = make_agent()
    with torch.no_grad():  # away from the first values, which are all equal
        for name, x in agent.named_parameters():
            if "weight" not in name:
                x.mul_(1 + 0.3 * torch.rand_like(x)).add_(0.01 * torch.randn_like(x))
    obs, _, actions, _, _ = batch(5)
    with torch.no_grad():
        heads = agent.actor(obs).numpy()
        logprobs, q = agent.critics(obs, actions)
    both = torch.cat([obs, actions], 1).double().numpy()
    for row in range(5):
        for k in range(2):
            wanted = forward(agent.actor, 0, k, obs[row].double().numpy(), 128, 1)
            np.testing.assert_allclose(heads[k, row], wanted, atol=1e-4)
            logits = torch.tensor(forward(agent.critics, k, k, both[row], 16, 2))
            np.testing.assert_allclose(logprobs[k, row], logits.log_softmax(0), atol=1e-4)
            mean = sum(p * (-5 + 0.1 * i) for i, p in enumerate(logits.softmax(0).tolist()))
            assert q[k, row].item() == pytest.approx(mean, abs=1e-4)


def test_first_values_of_the_learned_factors() -> None:
    agent, _ = make_agent()
    block = agent.critics.blocks[0]
    assert len(agent.critics.blocks) == 2 and len(agent.actor.blocks) == 1
    assert torch.allclose(block.scaler, torch.tensor(2 / 64) ** 0.5)
    assert torch.allclose(block.alpha * block.alpha_scale, torch.tensor(1 / 3))
    assert torch.allclose(block.alpha, torch.tensor(16**-0.5))
    assert torch.allclose(agent.critics.embedding_scaler, torch.tensor(2 / 16) ** 0.5)
    assert (agent.critics.head_scaler == 1).all() and (agent.critics.bias == 0).all()
    assert agent.log_alpha.exp().item() == pytest.approx(0.01)
    assert agent.target_entropy == -1.5


def projected(probs: np.ndarray, returns: np.ndarray, atoms: list[float]) -> np.ndarray:
    """C51's projection by loops."""
    found = np.zeros_like(probs)
    for row in range(len(probs)):
        for p, value in zip(probs[row], returns[row], strict=True):
            position = (min(max(value, atoms[0]), atoms[-1]) - atoms[0]) / (atoms[1] - atoms[0])
            below = min(int(np.floor(position + 1e-9)), len(atoms) - 1)
            share = position - below
            found[row, below] += p * (1 - share)
            found[row, min(below + 1, len(atoms) - 1)] += p * share
    return found


def test_projection_is_that_of_loops() -> None:
    atoms = torch.linspace(-5, 5, 11)
    probs = torch.randn(6, 11).softmax(1)
    returns = 3 * torch.randn(6, 11)
    returns[0] = atoms  # nothing moves
    returns[1] = 100.0  # all of it at the largest atom
    returns[2] = -7.0
    found = simbav2.project(probs, returns, atoms)
    wanted = projected(probs.double().numpy(), returns.double().numpy(), atoms.double().tolist())
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert torch.allclose(found.sum(1), torch.ones(6), atol=1e-5)
    assert torch.allclose(found[0], probs[0], atol=1e-5)
    assert found[1, -1] == pytest.approx(1) and found[2, 0] == pytest.approx(1)


def test_targets_have_the_lower_mean_the_entropy_and_scaled_rewards() -> None:
    agent, args = make_agent(gamma=0.9, autotune=False, alpha=0.2)
    agent.actor.reward_scale.fill_(4.0)
    agent.actor.obs_stats.mean.copy_(torch.randn(4))
    agent.actor.obs_stats.std.copy_(torch.rand(4) + 0.5)
    for name, x in agent.target_critics.named_parameters():
        if "bias" not in name:  # which would make one of them lower everywhere
            x.add_(0.3 * torch.randn_like(x))
    transitions = batch(8)
    obs, next_obs, actions, rewards, terminated = transitions
    mean, std = agent.actor.obs_stats.mean, agent.actor.obs_stats.std
    state = torch.get_rng_state()
    with torch.no_grad():
        next_actions, logprob = agent.actor.sample((next_obs - mean) / std)
        next_logprobs, next_q = agent.target_critics((next_obs - mean) / std, next_actions)
        logprobs = agent.critics((obs - mean) / std, actions)[0].double().numpy()
    assert 0 < (next_q[0] < next_q[1]).sum() < 8  # sometimes the first is lower, sometimes not
    atoms = np.linspace(-5, 5, 101)
    losses = []
    for row in range(8):
        lower = 0 if next_q[0, row] <= next_q[1, row] else 1
        probs = next_logprobs[lower, row].exp().double().numpy()
        go_on = 0.9 * (1 - terminated[row].item())
        values = rewards[row].item() / 4 + go_on * (atoms - 0.2 * logprob[row].item())
        target = projected(probs[None], values[None], atoms.tolist())[0]
        losses.append([-(target * logprobs[k, row]).sum() for k in range(2)])
    torch.set_rng_state(state)
    frozen = optim.SGD(agent.critics.parameters(), lr=0.0)
    found = simbav2.update_critics(agent, frozen, args, *transitions)["losses/qf_loss"].item()
    assert found == pytest.approx(np.mean(losses), rel=1e-4)


def test_log_probabilities_and_bounds_of_the_policy() -> None:
    actor = make_agent()[0].actor.double()
    with torch.no_grad():
        actor.bias.copy_(0.5 * torch.randn_like(actor.bias))
        obs = torch.randn(64, 4, dtype=torch.float64)
        actions, logprob = actor.sample(obs)
        mean, log_std = actor(obs)
    std = (torch.tanh(log_std) * 6 - 4).exp()
    assert std.log().min() >= -10 and std.log().max() <= 2
    squashed = torch.distributions.TransformedDistribution(
        torch.distributions.Independent(torch.distributions.Normal(mean, std), 1),
        [torch.distributions.TanhTransform()],
    )
    assert torch.allclose(logprob, squashed.log_prob(actions), atol=1e-4)
    assert actions.abs().max() <= 1 and actor.act(obs).abs().max() <= 1
    assert torch.equal(actor.act(obs), actor.act(obs))
    assert not torch.equal(actor.act(obs, greedy=False), actor.act(obs, greedy=False))


def test_only_exploring_updates_the_statistics() -> None:
    actor = make_agent()[0].actor
    seen = 5 + 2 * torch.randn(30, 4)
    with torch.no_grad():
        for obs in seen.split(1):
            actor.act(obs)
            actor.act(obs, greedy=False)
            actor.explore(obs)
    assert actor.obs_stats.count == 30
    assert torch.allclose(actor.obs_stats.mean, seen.mean(0), atol=1e-4)
    assert torch.allclose(actor.obs_stats.std, seen.std(0, correction=0), atol=1e-4)
    normalised = actor.normalise(seen)
    assert torch.allclose(normalised.mean(0), torch.zeros(4), atol=1e-4)


@pytest.mark.parametrize("probe, length", [("Both", 1), ("Truncation", 5)])
def test_rewards_are_scaled_by_the_returns_of_real_steps(probe: str, length: int, train) -> None:
    """Reset steps are no transitions, and a return ends with its episode."""
    flags = f"--env-id probes:Probe{probe}Continuous-v0 --gamma 0.9 --max-return 3 {QUICK}"
    done = train("simbav2_continuous_action", f"{flags} --total-timesteps 60 --save-model")
    rewards = done.variables["memory"].state_dict()["rows"][:, -2].tolist()
    assert len(rewards) == 60 * length / (length + 1)  # the others only reset
    returns: list[float] = []
    for step, reward in enumerate(rewards):
        returns.append(reward + (0.9 * returns[-1] if step % length else 0.0))
    wanted = max(np.std(returns), np.abs(returns).max() / 3)
    actor = done.variables["agent"].actor
    assert actor.reward_scale.item() == pytest.approx(wanted, rel=1e-4)
    assert actor.obs_stats.count == 60
    saved = load_model(
        done.folder / "simbav2_continuous_action.cleanrl_model",
        env_id=f"probes:Probe{probe}Continuous-v0",
    )[0]
    for name, x in actor.state_dict().items():
        assert torch.equal(saved.state_dict()[name], x), name


def test_the_learning_rate_falls_linearly(train) -> None:
    flags = f"--env-id Pendulum-v1 --total-timesteps 50 {QUICK} --learning-rate 0.01 --final-lr 0"
    done = train("simbav2_continuous_action", flags)
    assert done.variables["lr"].item() == pytest.approx(0.01 / 50)
    groups = [
        group
        for name in ("q_optimizer", "policy_optimizer")
        for group in done.variables[name].param_groups
    ]
    assert len(groups) == 3 and all(group["lr"] is done.variables["lr"] for group in groups)


def test_impossible_settings_are_refused() -> None:
    for settings, flag in (({"max_return": 0.0}, "--max-return"), ({"alpha": 0.0}, "--alpha")):
        with pytest.raises(BadInput) as refused:
            simbav2.Args(**settings)
        assert flag in refused.value.message
