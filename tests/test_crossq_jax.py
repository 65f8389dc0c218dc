"""CrossQ in JAX computes what it computes in torch."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flax")
import gymnasium as gym
import jax
import jax.numpy as jnp
import torch

from cleanrl import crossq_continuous_action as crossq
from cleanrl import crossq_continuous_action_jax as crossq_jax
from cleanrl_utils.errors import BadInput
from cleanrl_utils.replay.buffers_jax import Batch
from cleanrl_utils.speed.jax_acting import translate

LOW, HIGH = np.array([-0.4, 0.0, -3.0], np.float32), np.array([0.4, 5.0, -1.0], np.float32)
SPACES: Any = SimpleNamespace(
    num_envs=2,
    single_observation_space=gym.spaces.Box(-1, 1, (4,), np.float32),
    single_action_space=gym.spaces.Box(LOW, HIGH),
    observation_space=gym.spaces.Box(-1, 1, (2, 4), np.float32),
    action_space=gym.spaces.Box(np.stack([LOW, LOW]), np.stack([HIGH, HIGH])),
)
WIDTH = 16


def to_flax(network: Any, gradients: bool = False) -> dict[str, Any]:
    """Weights and running statistics of a torch network, or their gradients, as Flax has them."""
    get = (lambda x: x.grad.numpy()) if gradients else (lambda x: x.detach().numpy().copy())
    params: dict[str, Any] = {}
    stats: dict[str, Any] = {}
    critics = isinstance(network, crossq.Critics)
    for i, norm in enumerate(network.norms):
        if critics:
            kernel, bias = get(network.weights[i]), get(network.biases[i])[:, 0]
        else:
            kernel, bias = get(network.layers[i].weight).T, get(network.layers[i].bias)
        params[f"Dense_{i}"] = {"kernel": kernel, "bias": bias}
        learned = {"scale": get(norm.scale), "bias": get(norm.bias)}
        params[f"BatchRenorm_{i}"] = {name: rows(x, critics) for name, x in learned.items()}
        if not gradients:
            running = {"mean": norm.running_mean.numpy(), "var": norm.running_var.numpy()}
            stats[f"BatchRenorm_{i}"] = {name: rows(x, critics) for name, x in running.items()}
            count = np.float32(norm.updates)
            stats[f"BatchRenorm_{i}"]["updates"] = np.full(2, count) if critics else count
    return {"params": params} if gradients else {"params": params, "batch_stats": stats}


def rows(x: np.ndarray, critics: bool) -> np.ndarray:
    return x.copy()[:, 0] if critics else x.copy()[0]


def assert_same(found: Any, wanted: Any) -> None:
    """Within 1e-4, relative to the largest number of each array."""

    def check(a: Any, b: Any) -> None:
        np.testing.assert_allclose(a, b, atol=1e-4 * max(np.abs(b).max(), 1e-3), rtol=1e-4)

    jax.tree.map(check, found, wanted)


@pytest.mark.parametrize("updates", [0, 99_999, 100_000])
def test_losses_gradients_and_statistics_are_those_of_torch(
    updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, n = np.random.default_rng(1), 64
    noise = rng.standard_normal((n, 3)).astype(np.float32)
    arrays = [*rng.standard_normal((2, n, 4)), rng.uniform(LOW, HIGH, (n, 3))]
    arrays += [rng.standard_normal(n), rng.random(n) < 0.5]
    arrays = [x.astype(np.float32) for x in arrays]
    arrays[1] = 2 + 3 * arrays[1]
    monkeypatch.setattr(torch, "randn_like", lambda x: torch.as_tensor(noise))
    torch.manual_seed(1)
    args = crossq.Args(critic_width=WIDTH)
    agent: Any = crossq.Agent(SPACES, args)
    agent.log_alpha.data.fill_(-1.2)
    for norm in (x for x in agent.modules() if isinstance(x, crossq.BatchRenorm)):
        with torch.no_grad():
            norm.scale.uniform_(0.5, 2)
            norm.bias.uniform_(-1, 1)
            norm.running_mean.uniform_(-1, 1)  # type: ignore[operator]
            norm.running_var.uniform_(0.5, 2)  # type: ignore[operator]
            norm.updates.fill_(updates)  # type: ignore[operator]

    # JAX first: torch changes its running statistics
    jax_args = crossq_jax.Args(critic_width=WIDTH)
    state = crossq_jax.init(jax_args, SPACES)
    temperature = {"log_alpha": np.float32(-1.2)}
    state = state._replace(
        actor=state.actor.replace(params=to_flax(agent.actor)),
        critics=state.critics.replace(params=to_flax(agent.critics)),
        temperature=state.temperature.replace(params=temperature),
    )
    state = jax.tree.map(jnp.array, state)
    gradient = jax.grad(crossq_jax.q_loss, has_aux=True)
    q_grads, (q_stats, q_metrics) = gradient(
        state.critics.params, state, jax_args, Batch(*arrays), noise
    )
    gradient = jax.grad(crossq_jax.policy_loss, has_aux=True)
    params = state.actor.params, state.temperature.params
    grads, (stats, metrics) = gradient(params, state, Batch(*arrays), noise)
    for zero in (q_grads["batch_stats"], grads[0]["batch_stats"]):
        assert all((x == 0).all() for x in jax.tree.leaves(zero))

    tensors = [torch.as_tensor(x) for x in arrays]
    before = {key: x.clone() for key, x in agent.state_dict().items()}
    frozen = torch.optim.SGD(agent.critics.parameters(), lr=0.0)
    losses = crossq.update_critics(agent, frozen, args, *tensors)
    assert_same(q_grads["params"], to_flax(agent.critics, gradients=True)["params"])
    assert_same(q_stats["batch_stats"], to_flax(agent.critics)["batch_stats"])
    assert_same(q_metrics, {name: np.asarray(x) for name, x in losses.items()})

    agent.load_state_dict(before)
    frozen = torch.optim.SGD([*agent.actor.parameters(), agent.log_alpha], lr=0.0)
    losses = crossq.update_policy(agent, frozen, args, *tensors)
    assert_same(grads[0]["params"], to_flax(agent.actor, gradients=True)["params"])
    assert_same(stats["batch_stats"], to_flax(agent.actor)["batch_stats"])
    assert_same(grads[1]["log_alpha"], agent.log_alpha.grad.numpy())
    assert_same(metrics, {name: np.asarray(x) for name, x in losses.items()})


def make_batch(n: int = 8) -> Batch:
    rng = np.random.default_rng(2)
    obs, next_obs = rng.standard_normal((2, n, 4)).astype(np.float32)
    actions = rng.uniform(LOW, HIGH, (n, 3)).astype(np.float32)
    return Batch(obs, next_obs, actions, np.ones(n, np.float32), np.zeros(n, np.float32))


def test_an_update_stores_statistics_and_changes_the_policy_when_it_is_due() -> None:
    args = crossq_jax.Args(critic_width=WIDTH)
    state = crossq_jax.init(args, SPACES)
    update = jax.jit(partial(crossq_jax.update, args), static_argnums=3)
    noise = np.random.default_rng(3).standard_normal((2, 8, 3)).astype(np.float32)
    batches = [make_batch(), make_batch()]
    new, logged = update(state, batches, noise, (False,))
    assert len(logged) == 1
    assert (new.critics.params["batch_stats"]["BatchRenorm_0"]["updates"] == 1).all()
    assert_same(new.actor.params, state.actor.params)
    rows = np.concatenate([make_batch().obs, make_batch().next_obs])
    found = new.critics.params["batch_stats"]["BatchRenorm_0"]["mean"][:, :4]
    assert_same(found, np.stack(2 * [0.01 * rows.mean(0)]))

    new, logged = update(state, batches, noise, (True,))
    assert len(logged) == 2
    assert new.actor.params["batch_stats"]["BatchRenorm_2"]["updates"] == 1
    moved = jax.tree.map(lambda a, b: (a != b).any(), new.actor.params, state.actor.params)
    assert all(jax.tree.leaves(moved["params"]["Dense_1"]))
    # the first step of Adam is the learning rate, whatever its betas
    step = np.abs(new.actor.params["params"]["Dense_2"]["bias"] - state_bias(state)).max()
    assert step == pytest.approx(1e-3, rel=1e-2)


def test_adam_of_the_networks_forgets_faster_than_that_of_the_temperature() -> None:
    state = crossq_jax.init(crossq_jax.Args(critic_width=WIDTH), SPACES)
    assert state.temperature.params["log_alpha"] == 0  # alpha is 1
    for train, beta1 in ((state.actor, 0.5), (state.critics, 0.5), (state.temperature, 0.9)):
        ones = jax.tree.map(jnp.ones_like, train.params)
        _, moments = train.tx.update(ones, train.opt_state)
        assert all(np.allclose(x, 1 - beta1) for x in jax.tree.leaves(moments[0].mu))
        assert all(np.allclose(x, 1e-3) for x in jax.tree.leaves(moments[0].nu))  # beta2 is 0.999


def test_the_policy_has_a_third_of_the_updates(train) -> None:
    flags = "--env-id Pendulum-v1 --batch-size 8 --learning-starts 42 --total-timesteps 60"
    flags += " --learn-every 3 --critic-width 8 --checkpoints 0"
    done = train("crossq_continuous_action_jax", flags)
    state = done.variables["training"].state
    counts = [
        {float(np.max(x["updates"])) for x in network.params["batch_stats"].values()}
        for network in (state.critics, state.actor)
    ]
    assert counts == [{18}, {6}]


def state_bias(state: Any) -> Any:
    return state.actor.params["params"]["Dense_2"]["bias"]


def test_acting_uses_running_statistics_and_numpy() -> None:
    args = crossq_jax.Args(critic_width=WIDTH)
    agent = crossq_jax.Agent.from_args(SPACES, args)
    agent.params = crossq_jax.init(args, SPACES).actor.params
    obs = np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)
    alone = np.concatenate([agent.act(row[None]) for row in obs])
    np.testing.assert_allclose(agent.act(obs), alone, atol=1e-6)
    inputs = agent.params, obs, np.zeros((2, 3))
    assert translate(jax.make_jaxpr(partial(agent.network.apply, method="act"))(*inputs), 2)


def test_a_frequency_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInput) as refused:
        crossq_jax.Args(learn_every=8)
    assert "--policy-frequency" in refused.value.message
