"""CrossQ and DroQ: normalisation, the joint pass and dropout against numbers computed apart."""

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import run_script
from torch import Tensor, nn

from cleanrl import crossq_continuous_action as crossq
from cleanrl import droq_continuous_action as droq
from cleanrl_utils.errors import BadInput
from cleanrl_utils.replay.buffers import ReplayBuffer

LOW, HIGH = np.array([-0.4, 0.0, -3.0], np.float32), np.array([0.4, 5.0, -1.0], np.float32)
QUICK = "--env-id Pendulum-v1 --no-cuda --batch-size 8 --learning-starts 40 --buffer-size 100"


class Spaces:
    """What networks need of environments. Each dimension of an action has bounds of its own."""

    single_observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    single_action_space = gym.spaces.Box(LOW, HIGH)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


def batch(n: int = 16) -> tuple[Tensor, ...]:
    """obs, next_obs, actions, rewards, terminated"""
    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    actions = low + (high - low) * torch.rand(n, 3)
    next_obs = 2 + 3 * torch.randn(n, 4)  # of another distribution than obs
    return torch.randn(n, 4), next_obs, actions, torch.randn(n), (torch.rand(n) < 0.5) * 1.0


def make_agent(width: int = 8, warm: bool = False) -> Any:
    """An agent of CrossQ whose running statistics and learned scales are not the initial ones."""
    agent = crossq.Agent(Spaces(), crossq.Args(critic_width=width))
    for norm in norms_of(agent):
        with torch.no_grad():
            norm.scale.uniform_(0.5, 2)
            norm.bias.uniform_(-1, 1)
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
            norm.updates.fill_(100_000 if warm else 0)
    return agent


def norms_of(network: nn.Module) -> list[Any]:
    return [x for x in network.modules() if isinstance(x, crossq.BatchRenorm)]


def frozen(*modules: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that changes nothing, so that gradients can be compared."""
    return torch.optim.SGD([x for module in modules for x in module.parameters()], lr=0.0)


class Renorm:
    """Batch renormalisation of (batch, features) in NumPy, as its paper writes it."""

    def __init__(self, features: int, warm_up: int):
        self.mean = np.zeros(features)
        self.var = np.ones(features)
        self.steps_left = warm_up

    def r_and_d(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.steps_left > 0:
            return np.ones(x.shape[1]), np.zeros(x.shape[1])
        sigma = np.sqrt(self.var + 0.001)
        r = np.sqrt(x.var(0) + 0.001) / sigma
        d = (x.mean(0) - self.mean) / sigma
        return np.minimum(np.maximum(r, 1 / 3), 3), np.minimum(np.maximum(d, -5), 5)

    def normalise(self, x: np.ndarray) -> np.ndarray:
        r, d = self.r_and_d(x)
        y = (x - x.mean(0)) / np.sqrt(x.var(0) + 0.001) * r + d
        self.mean = 0.99 * self.mean + 0.01 * x.mean(0)
        self.var = 0.99 * self.var + 0.01 * x.var(0)
        self.steps_left -= 1
        return y


def shifted_batches(count: int) -> list[np.ndarray]:
    """Batches (6, 5) whose features force r and d to their limits, one of them constant."""
    rng = np.random.default_rng(3)
    scales = np.array([0.01, 1.0, 20.0, 1.5, 0.0])
    shifts = np.array([0.0, 0.5, 3.0, -40.0, 7.0])
    return [shifts + scales * rng.standard_normal((6, 5)) for _ in range(count)]


@pytest.mark.parametrize("stacked", [False, True])
def test_batch_renormalisation_before_and_after_its_warm_up(
    stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossq.BatchRenorm, "warm_up", 3)
    norm = crossq.BatchRenorm(*((2, 1, 5) if stacked else (1, 5))).double()
    references = [Renorm(5, warm_up=3) for _ in range(2 if stacked else 1)]
    limits = set()
    for number, x in enumerate(shifted_batches(6)):
        inputs = np.stack([x, 10 - 2 * x]) if stacked else x  # critics have statistics of their own
        rows = inputs if stacked else [inputs]
        limits |= {float(v) for v in np.ravel(references[0].r_and_d(x)) if number >= 3}
        found = norm(torch.as_tensor(inputs), train=True).detach().numpy()
        wanted = [ref.normalise(row) for ref, row in zip(references, rows, strict=True)]
        np.testing.assert_allclose(found, np.reshape(wanted, found.shape), rtol=1e-6, atol=1e-9)
        if number < 3:  # batch normalisation: the constant feature becomes 0
            assert np.abs(found[..., -1]).max() < 1e-9
            assert np.abs(found.mean(-2)).max() < 1e-9
        means = np.reshape([ref.mean for ref in references], norm.running_mean.shape)
        np.testing.assert_allclose(norm.running_mean.numpy(), means)
    assert {1 / 3, 3.0, -5.0, 5.0} <= limits  # the inputs reach all four limits
    assert norm.updates == 6


def test_renormalisation_begins_after_100_000_updates() -> None:
    norm = crossq.BatchRenorm(1, 5).double()
    x = torch.as_tensor(shifted_batches(1)[0])
    norm.updates.fill_(99_999)
    plain = norm(x, train=True)
    assert plain.mean(0).abs().max() < 1e-9
    renormalised = norm(x, train=True)  # the 100,001st update
    assert norm.updates == 100_001
    assert renormalised.mean(0).abs().max() > 1


def test_renormalised_training_equals_acting_within_the_limits() -> None:
    norm = crossq.BatchRenorm(1, 5).double()
    norm.updates.fill_(100_000)
    x = torch.randn(64, 5, dtype=torch.float64)  # near the running mean 0 and variance 1
    acting = norm(x, train=False)
    assert torch.allclose(norm(x, train=True), acting)


@pytest.mark.parametrize("updates", [0, 100_000])
def test_gradient_of_batch_renormalisation_is_that_of_differences(updates: int) -> None:
    """r and d are constants, mean and variance of the batch are not."""
    x = shifted_batches(1)[0][:, 1:4]
    weights = np.random.default_rng(5).standard_normal(x.shape)
    norm = crossq.BatchRenorm(1, 3).double()
    norm.updates.fill_(updates)
    tensor = torch.as_tensor(x).requires_grad_()
    (norm(tensor, train=True) * torch.as_tensor(weights)).sum().backward()
    assert tensor.grad is not None

    r, d = Renorm(3, warm_up=100_000 - updates).r_and_d(x)

    def loss(x: np.ndarray) -> float:
        y = (x - x.mean(0)) / np.sqrt(x.var(0) + 0.001) * r + d
        return float((weights * y).sum())

    for i in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[i] = 1e-6
        slope = (loss(x + step) - loss(x - step)) / 2e-6
        assert tensor.grad[i].item() == pytest.approx(slope, abs=1e-6)


def test_acting_uses_running_statistics_and_leaves_them() -> None:
    actor = make_agent().actor
    before = {key: x.clone() for key, x in actor.state_dict().items()}
    obs = torch.randn(8, 4)
    with torch.no_grad():
        actions = actor.act(obs)
        alone = torch.cat([actor.act(row[None]) for row in obs])
        assert torch.allclose(actions, alone, atol=1e-6)  # other observations change nothing
        actor.act(obs, greedy=False)
        actor.sample(obs)
        assert same(actor.state_dict(), before)
        assert all(f"norms.{i}.updates" in before for i in range(3))  # saved with the model
        acting, _ = actor(obs)
        training, _ = actor(obs, train=True)
    assert not torch.allclose(acting, training, atol=0.1)


def test_log_probability_is_that_of_actions_within_one() -> None:
    actor = make_agent().actor.double()
    obs = torch.randn(256, 4, dtype=torch.float64)
    with torch.no_grad():
        actions, logprob = actor.sample(obs)
        mean, log_std = actor(obs)
    squashed = torch.distributions.TransformedDistribution(
        torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1),
        [torch.distributions.TanhTransform()],
    )
    unscaled = (actions - actor.bias) / actor.scale
    assert torch.allclose(logprob, squashed.log_prob(unscaled), atol=1e-5)
    assert (actions.numpy() >= LOW).all() and (actions.numpy() <= HIGH).all()


def q_values(critics: Any, x: np.ndarray) -> np.ndarray:
    """Q-values of both critics in training, (2, batch), computed by NumPy; x is (batch, inputs)."""
    rows = []
    for k in range(2):
        y = x.astype(np.float64)
        for i, norm in enumerate(critics.norms):
            y = np.maximum(y, 0) if i else y
            reference = Renorm(y.shape[1], warm_up=100_000 - int(norm.updates))
            reference.mean = norm.running_mean[k, 0].double().numpy()
            reference.var = norm.running_var[k, 0].double().numpy()
            learned = [p[k, 0].detach().double().numpy() for p in (norm.scale, norm.bias)]
            y = reference.normalise(y) * learned[0] + learned[1]
            y = y @ critics.weights[i][k].detach().numpy() + critics.biases[i][k].detach().numpy()
        rows.append(y[:, 0])
    return np.stack(rows)


@pytest.mark.parametrize("warm", [False, True])
def test_critics_learn_from_one_pass_over_both_halves(
    warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, statistics and gradients of update_critics; targets are constants."""
    agent = make_agent(warm=warm)
    args = crossq.Args(gamma=0.9)
    transitions = batch()
    obs, next_obs, actions, rewards, terminated = transitions
    noise = torch.randn(16, 3)
    monkeypatch.setattr(torch, "randn_like", lambda x: noise)
    with torch.no_grad():
        agent.log_alpha.fill_(-0.7)
        next_actions, logprob = agent.actor.sample(next_obs)
    rows = torch.cat([torch.cat([obs, actions], 1), torch.cat([next_obs, next_actions], 1)])
    q = q_values(agent.critics, rows.numpy())
    next_value = q[:, 16:].min(0) - math.exp(-0.7) * logprob.numpy()
    targets = rewards.numpy() + 0.9 * (1 - terminated.numpy()) * next_value
    wanted = ((q[:, :16] - targets) ** 2).mean(1)

    # gradients with these targets as numbers
    inputs = torch.cat([obs, next_obs]), torch.cat([actions, next_actions])
    agent_state = {key: x.clone() for key, x in agent.state_dict().items()}
    joint = agent.critics(*inputs, train=True)[:, :16]
    loss = (joint - torch.as_tensor(targets, dtype=torch.float32)).square().mean(1).sum()
    gradients = torch.autograd.grad(loss, list(agent.critics.parameters()))
    agent.load_state_dict(agent_state)

    losses = crossq.update_critics(agent, frozen(agent.critics), args, *transitions)
    found = [losses["losses/qf1_loss"].item(), losses["losses/qf2_loss"].item()]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    for parameter, gradient in zip(agent.critics.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-3, atol=1e-4)
    was = agent_state["critics.norms.0.running_mean"]
    now = agent.critics.norms[0].running_mean
    assert torch.allclose(now, 0.99 * was + 0.01 * rows.mean(0), atol=1e-6)
    assert all(x.grad is None for x in agent.actor.parameters())


def test_each_update_changes_the_statistics_of_its_own_network() -> None:
    agent = make_agent()
    critics = {key: x.clone() for key, x in agent.critics.state_dict().items()}
    actor = {key: x.clone() for key, x in agent.actor.state_dict().items()}
    transitions = batch()
    crossq.update_critics(agent, frozen(agent.critics), crossq.Args(), *transitions)
    assert all(norm.updates == 1 for norm in norms_of(agent.critics))
    assert same(agent.actor.state_dict(), actor)

    agent.critics.load_state_dict(critics)
    optimizer = torch.optim.Adam([*agent.actor.parameters(), agent.log_alpha], 1e-3)
    crossq.update_policy(agent, optimizer, crossq.Args(), *transitions)
    assert all(norm.updates == 1 for norm in norms_of(agent.actor))
    assert same(agent.critics.state_dict(), critics)
    assert not same(agent.actor.state_dict(), actor)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[key], b[key]) for key in b)


def test_policy_loss_is_that_of_the_smaller_critic_as_it_acts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = make_agent()
    obs = batch()[0]
    noise = torch.randn(16, 3)
    monkeypatch.setattr(torch, "randn_like", lambda x: noise)
    state = {key: x.clone() for key, x in agent.state_dict().items()}
    with torch.no_grad():
        actions, logprob = agent.actor.sample(obs, train=True)
        wanted = (logprob - agent.critics(obs, actions).amin(0)).mean()  # alpha = 1
    agent.load_state_dict(state)
    found = crossq.update_policy(agent, frozen(agent.actor), crossq.Args(), obs)
    assert found["losses/actor_loss"].item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("module", [crossq, droq], ids=["crossq", "droq"])
def test_the_policy_climbs_its_critics_and_leaves_their_weights(module: Any) -> None:
    small = {"critic_width": 64} if module is crossq else {}
    args = module.Args(autotune=False, alpha=1e-6, **small)
    agent = module.Agent(Spaces(), args)
    before = [x.clone() for x in agent.critics.parameters()]
    optimizer = torch.optim.Adam(agent.actor.parameters(), 1e-3)
    obs = torch.randn(256, 4)

    def value() -> float:
        with torch.no_grad():
            return agent.critics(obs, agent.actor.act(obs)).mean().item()

    start = value()
    for _ in range(40):
        module.update_policy(agent, optimizer, args, obs)
    assert value() > start + 1e-3
    assert all(torch.equal(a, b) for a, b in zip(before, agent.critics.parameters(), strict=True))


@pytest.mark.parametrize("module", [crossq, droq], ids=["crossq", "droq"])
def test_updates_never_ask_for_a_value(module: Any) -> None:
    """Tensors without values cannot answer: what runs here can be a CUDA graph."""
    args = module.Args()
    agent: Any = module.Agent(Spaces(), args).to("meta")
    transitions = [x.to("meta") for x in batch()]
    next_actions = agent.actor.sample(transitions[1]) if module is droq else ()
    module.update_critics(agent, frozen(agent.critics), args, *transitions, *next_actions)
    module.update_policy(agent, frozen(agent.actor), args, *transitions)
    agent.actor.act(transitions[0], greedy=False)


@pytest.fixture(scope="module")
def crossq_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("crossq"))
        flags = f"{QUICK} --total-timesteps 100 --critic-width 8 --checkpoints 0"
        return run_script("crossq_continuous_action", flags).variables


def test_the_policy_has_a_third_of_the_updates(crossq_run: dict[str, Any]) -> None:
    agent = crossq_run["agent"]
    assert [norm.updates.item() for norm in agent.critics.norms] == [60] * 3
    assert [norm.updates.item() for norm in agent.actor.norms] == [20] * 3
    assert not any("target" in key for key in agent.state_dict())


def test_adam_of_the_networks_forgets_faster_than_that_of_the_temperature(
    crossq_run: dict[str, Any],
) -> None:
    groups = crossq_run["q_optimizer"].param_groups + crossq_run["policy_optimizer"].param_groups
    assert [group["betas"] for group in groups] == [(0.5, 0.999), (0.5, 0.999), (0.9, 0.999)]
    assert [group["lr"] for group in groups] == [1e-3] * 3


def layer_normalised_q(critics: Any, x: np.ndarray) -> np.ndarray:
    """Q-values of both critics of DroQ without dropout, (2, batch), computed by NumPy."""
    rows = []
    for k in range(2):
        weights = [p[k].detach().double().numpy() for p in critics.weights]
        biases = [p[k].detach().double().numpy() for p in critics.biases]
        y = x.astype(np.float64)
        for i in range(2):
            y = y @ weights[i] + biases[i]
            y = (y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + 1e-5)
            y = y * critics.norm_scales[i][k].detach().numpy()
            y = np.maximum(y + critics.norm_biases[i][k].detach().numpy(), 0)
        rows.append((y @ weights[2] + biases[2])[:, 0])
    return np.stack(rows)


def make_droq(dropout: float) -> Any:
    agent = droq.Agent(Spaces(), droq.Args(dropout=dropout))
    with torch.no_grad():
        for x in [*agent.critics.norm_scales, *agent.critics.norm_biases]:
            x.uniform_(0.5, 2)
    return agent


def test_critics_of_droq_normalise_before_their_activation() -> None:
    critics = make_droq(dropout=0.0).critics
    obs, _, actions, *_ = batch()
    found = critics(obs, actions).detach().numpy()
    wanted = layer_normalised_q(critics, torch.cat([obs, actions], 1).numpy())
    assert found.shape == (2, 16)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_dropout_is_before_the_normalisation_of_critics_and_targets() -> None:
    agent = make_droq(dropout=0.25)
    seen = []

    def layer_norm(x: Tensor, shape: Any) -> Tensor:
        seen.append(x)
        return x

    obs, _, actions, *_ = batch(200)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "layer_norm", layer_norm)
        for critics in (agent.critics, agent.target_critics):
            critics(obs, actions)
    assert len(seen) == 4
    for x in seen:
        assert (x == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)
    with torch.no_grad():
        twice = [agent.target_critics(obs, actions) for _ in range(2)]
    assert not torch.equal(*twice)


def test_the_policy_of_droq_climbs_the_mean_of_both_critics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = make_droq(dropout=0.0)
    obs = batch()[0]
    noise = torch.randn(16, 3)
    monkeypatch.setattr(torch, "randn_like", lambda x: noise)
    with torch.no_grad():
        actions, logprob = agent.actor.sample(obs)
        wanted = (logprob - agent.critics(obs, actions).mean(0)).mean()  # alpha = 1
    found = droq.update_policy(agent, frozen(agent.actor), droq.Args(), obs)
    assert found["losses/actor_loss"].item() == pytest.approx(wanted.item(), rel=1e-5)


def test_targets_of_droq_have_the_smaller_critic_and_the_entropy() -> None:
    agent = make_droq(dropout=0.0)
    args = droq.Args(gamma=0.9)
    obs, next_obs, actions, rewards, terminated = batch()
    with torch.no_grad():
        agent.log_alpha.fill_(-0.7)
        for x in agent.target_critics.parameters():  # the critics are others
            x.add_(0.1 * torch.randn_like(x))
        next_actions, logprob = agent.actor.sample(next_obs)
    rows = torch.cat([obs, actions], 1).numpy()
    next_rows = torch.cat([next_obs, next_actions], 1).numpy()
    next_q = layer_normalised_q(agent.target_critics, next_rows).min(0)
    next_value = next_q - math.exp(-0.7) * logprob.numpy()
    targets = rewards.numpy() + 0.9 * (1 - terminated.numpy()) * next_value
    wanted = ((layer_normalised_q(agent.critics, rows) - targets) ** 2).mean(1)

    transitions = obs, next_obs, actions, rewards, terminated, next_actions, logprob
    losses = droq.update_critics(agent, frozen(agent.critics), args, *transitions)
    found = [losses["losses/qf1_loss"].item(), losses["losses/qf2_loss"].item()]
    np.testing.assert_allclose(found, wanted, rtol=1e-3)


def test_droq_updates_its_critics_and_targets_often_and_its_policy_once_per_step(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = []  # of what is sampled from the replay memory
    sample = ReplayBuffer.sample

    def remember(memory: ReplayBuffer, batch_size: int) -> Any:
        sizes.append(batch_size)
        return sample(memory, batch_size)

    monkeypatch.setattr(ReplayBuffer, "sample", remember)
    flags = f"{QUICK} --total-timesteps 50 --tau 1 --checkpoints 0"
    variables = run_script("droq_continuous_action", flags).variables
    assert sizes == [20 * 8, 8] * 10  # the critics' batches, then the policy's
    assert adam_steps(variables["q_optimizer"]) == {200}
    assert adam_steps(variables["policy_optimizer"]) == {10}
    agent = variables["agent"]
    assert same(agent.critics.state_dict(), agent.target_critics.state_dict())


def adam_steps(optimizer: torch.optim.Optimizer) -> set[int]:
    return {int(state["step"]) for state in optimizer.state.values()}


def test_dropping_all_units_is_refused() -> None:
    with pytest.raises(BadInput) as refused:
        droq.Args(dropout=1.0)
    assert "--dropout" in refused.value.message
