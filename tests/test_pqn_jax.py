"""PQN in JAX: its targets, its known values, its network for pictures, many agents at once."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gymnax")
import gymnax
import jax
import jax.numpy as jnp
from conftest import Killed
from test_jax_ppo import Forever, Once, ProbeState

from cleanrl import pqn_jax
from cleanrl_utils.environments.jax_envs import Gymnax, Step, begin
from cleanrl_utils.running.evaluation import load_model


def step_of(rewards: list, terminated: list, done: list) -> Step:
    """A rollout of one environment."""
    columns = [jnp.asarray(x, jnp.float32)[:, None] for x in (rewards, terminated, done)]
    return Step(None, *columns, None, None)


def returns_of(step: Step, next_values: list[float], **settings: float) -> list[float]:
    args = pqn_jax.Args(reward_scale=1, **settings)
    values = jnp.asarray(next_values)[:, None]
    return pqn_jax.q_lambda_returns(step, values, args)[:, 0].tolist()


def test_q_lambda_returns_are_those_computed_by_hand() -> None:
    """gamma 0.5, lambda 0.5; from the last step back:

    5: 32 + 0.5 * 6                                    = 35       the rollout ends: max Q alone
    4: 16, terminated at its time limit as well        = 16       no bootstrap
    3: 8 + 0.5 * (0.5 * 16 + 0.5 * 4)                  = 13
    2: 4 + 0.5 * 10, truncated: max Q of its last obs  = 9        nothing of step 3
    1: 2, terminated                                   = 2        neither bootstrap nor step 2
    0: 1 + 0.5 * (0.5 * 2 + 0.5 * 8)                   = 3.5
    """
    rewards = [1, 2, 4, 8, 16, 32]
    terminated = [0, 1, 0, 0, 1, 0]
    done = [0, 1, 1, 0, 1, 0]
    next_values = [8.0, 100.0, 10.0, 4.0, 1000.0, 6.0]
    found = returns_of(step_of(rewards, terminated, done), next_values, gamma=0.5, q_lambda=0.5)
    assert found == [3.5, 2, 9, 13, 16, 35]


def test_the_step_before_the_last_bootstraps_from_the_state_between_them() -> None:
    """1 + 0.5 * (0.5 * (1 + 0.5 * 8) + 0.5 * 4) = 3.25: the 4 is of the state it led to."""
    step = step_of([1, 1], [0, 0], [0, 0])
    assert returns_of(step, [4.0, 8.0], gamma=0.5, q_lambda=0.5) == [3.25, 5]


def test_lambda_zero_is_one_step_and_lambda_one_is_the_whole_return() -> None:
    step = step_of([1, 2, 4], [0, 0, 1], [0, 0, 1])
    assert returns_of(step, [10.0, 20.0, 30.0], gamma=0.5, q_lambda=0) == [6, 12, 4]
    assert returns_of(step, [10.0, 20.0, 30.0], gamma=0.5, q_lambda=1) == [3, 4, 4]


def test_rewards_are_scaled_for_the_targets_only() -> None:
    step = step_of([1, 2], [0, 1], [0, 1])
    args = pqn_jax.Args(reward_scale=10, gamma=0.5, q_lambda=1)
    assert pqn_jax.q_lambda_returns(step, jnp.zeros((2, 1)), args)[:, 0].tolist() == [20, 20]


@pytest.mark.parametrize(
    "duration, wanted",
    [(4, [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]), (0, [0.2] * 6), (1, [1.0] + [0.2] * 5)],
)
def test_epsilon_falls_linearly(duration: float, wanted: list[float]) -> None:
    found = pqn_jax.linear_schedule(1.0, 0.2, duration, jnp.arange(6))
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Breakout-MinAtar"])
def test_the_network_is_that_of_flax(env_id: str) -> None:
    """LayerNorm over units, in a convolution over channels, before each ReLU."""
    from flax import linen as nn

    env = Gymnax.make(env_id)
    rng = np.random.default_rng(0)
    params = pqn_jax.init_params(env, 1)
    params = {
        k: v + 0.1 * rng.standard_normal(v.shape).astype(np.float32) for k, v in params.items()
    }
    obs = rng.random((2, 5, *env.observation_space.shape)).astype(np.float32)
    picture = obs.ndim == 5

    def norm(x: jax.Array, i: int) -> jax.Array:
        weights = {"params": {"scale": params[f"{i}.scale"], "bias": params[f"{i}.shift"]}}
        return nn.relu(nn.LayerNorm(epsilon=1e-5).apply(weights, x))

    def layer(module: nn.Module, i: int, x: jax.Array, *shape: int) -> jax.Array:
        kernel = params[f"{i}.kernel"]
        weights = {"kernel": kernel.reshape(shape or kernel.shape), "bias": params[f"{i}.bias"]}
        return module.apply({"params": weights}, x)

    x = jnp.asarray(obs)
    if picture:
        x = layer(nn.Conv(16, (3, 3), padding="VALID"), 0, x, 3, 3, obs.shape[-1], 16)
        x = norm(x, 0).reshape(2, 5, -1)
    else:
        x = norm(layer(nn.Dense(256), 0, x), 0)
    x = norm(layer(nn.Dense(128 if picture else 256), 1, x), 1)
    wanted = layer(nn.Dense(env.action_space.n), 2, x)
    np.testing.assert_allclose(pqn_jax.get_q_values(params, obs), wanted, atol=1e-4)


def test_only_the_chosen_action_learns_and_the_loss_is_half_the_squared_error() -> None:
    env = Gymnax.make("CartPole-v1")
    params = pqn_jax.init_params(env, 1)
    obs = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    q_values = np.asarray(pqn_jax.get_q_values(params, obs))[:, 1]
    targets = q_values + np.array([1, 2, 3], np.float32)
    minibatch = obs, np.ones(3, int), targets
    (loss, logged), grads = jax.value_and_grad(pqn_jax.get_loss, has_aux=True)(params, minibatch)
    np.testing.assert_allclose([loss, *logged], [14 / 6, 14 / 3, q_values.mean()], rtol=1e-4)
    np.testing.assert_allclose(grads["2.bias"], [0, -2], atol=1e-4)


def test_the_first_step_of_radam_follows_the_clipped_gradient() -> None:
    """Adam's would have the size of the learning rate in every parameter."""
    params = pqn_jax.init_params(Gymnax.make("CartPole-v1"), 1)
    obs = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    minibatch = obs, np.ones(3, int), np.full(3, 100, np.float32)
    grads = jax.grad(pqn_jax.get_loss, has_aux=True)(params, minibatch)[0]
    norm = np.sqrt(sum(np.square(x).sum() for x in grads.values()))
    assert norm > 10
    args = pqn_jax.Args(max_grad_norm=10)
    moments = pqn_jax.make_optimizer(args).init(params)
    (after, _), _ = pqn_jax.update(args, jnp.float32(0.5), (params, moments), minibatch)
    for name, grad in grads.items():
        np.testing.assert_allclose(after[name], params[name] - 0.5 * 10 / norm * grad, atol=1e-5)


def test_epsilon_is_the_probability_of_a_random_action() -> None:
    env = Gymnax.make("CartPole-v1")
    params = pqn_jax.init_params(env, 1)
    args = pqn_jax.Args(num_envs=64, num_steps=64)
    episodes = begin(env, jax.random.key(0), args.num_envs)
    collect = jax.jit(lambda *x: pqn_jax.collect(env, args, params, episodes, *x)[1][:2])
    for epsilon in (0.0, 0.5, 1.0):
        obs, actions = collect(epsilon, jax.random.key(1))
        greedy = pqn_jax.get_q_values(params, obs).argmax(-1) == actions
        assert greedy.mean() == pytest.approx(1 - epsilon / 2, abs=0.03)
        if epsilon == 1:
            assert actions.mean() == pytest.approx(0.5, abs=0.03)


class Seen(Forever):
    """The observation is 1: of zeros a network whose biases are zero learns little."""

    def reset_env(self, key, params):
        return jnp.ones(1), ProbeState(time=0)

    def observe_time(self, state):
        return jnp.ones(1)


class SeenOnce(Seen, Once):
    pass


gymnax.register("Seen-probe", Seen)
gymnax.register("SeenOnce-probe", SeenOnce)


@pytest.mark.parametrize("env_id, wanted", [("Seen-probe", 10.0), ("SeenOnce-probe", 1.0)])
def test_it_finds_the_known_values(env_id: str, wanted: float, train) -> None:
    flags = (
        "--total-timesteps 25600 --learning-rate 0.003 --num-envs 8 --num-steps 32 --gamma 0.9"
        " --num-minibatches 4 --q-lambda 0.5 --reward-scale 1"
    )
    done = train("pqn_jax", f"--env-id {env_id} {flags}")
    params = jax.tree.map(lambda x: x[0], done.variables["train"]["params"])
    found = pqn_jax.get_q_values(params, jnp.ones((1, 1))).max()
    assert abs(found - wanted) < 0.1 * wanted


def test_seeds_together_learn_from_pictures_and_resume_exactly(train, die_at) -> None:
    flags = "--env-id Breakout-MinAtar --num-seeds 2 --total-timesteps 1024 --num-envs 4"
    flags += " --num-steps 16 --num-minibatches 2 --checkpoints 4 --save-model --eval-episodes 1"
    train("pqn_jax", flags, "whole")
    die_at([10])
    with pytest.raises(Killed):
        train("pqn_jax", flags, "killed")
    first, _ = sorted(Path("killed").iterdir())
    train("pqn_jax", f"--resume {first}")

    def rows(folder: Path) -> list[str]:
        lines = (folder / "metrics.csv").read_text().splitlines()
        fields = [line.split(",") for line in lines]
        return [f"{f[0]},{f[2]},{f[3]}" for f in fields if f[2] != "charts/SPS"]

    whole, resumed = (sorted(Path(name).iterdir()) for name in ("whole", "killed"))
    assert [json.loads((f / "run.json").read_text())["args"]["seed"] for f in whole] == [1, 2]
    assert rows(whole[0]) != rows(whole[1])
    for one, other in zip(whole, resumed, strict=True):
        assert rows(one) == rows(other)
        model = "pqn_jax.cleanrl_model"
        assert (one / model).read_bytes() == (other / model).read_bytes()
        agent, args, _ = load_model(one / model, env_id="Breakout-MinAtar")
        assert agent.act(np.zeros((3, 10, 10, 4), np.float32)).shape == (3,)
        assert args.env_id == "Breakout-MinAtar"


def test_it_needs_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys; sys.modules['torch'] = None; import cleanrl.pqn_jax"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_batch_that_minibatches_do_not_divide_is_named(train, capfd) -> None:
    with pytest.raises(SystemExit) as stop:
        train("pqn_jax", "--num-envs 3 --num-steps 5")
    assert stop.value.code == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert "--num-minibatches must divide" in line
