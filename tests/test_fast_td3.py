"""FastTD3 in JAX: its n-step transitions, projection, noise, losses and known values."""

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("brax")
import jax
import jax.numpy as jnp
import torch

from cleanrl import fast_td3_continuous_action_jax as fast_td3
from cleanrl_utils.environments import playground
from cleanrl_utils.environments.jax_envs import Brax, Step, begin
from cleanrl_utils.replay.ring_jax import Ring

SMALL: dict[str, Any] = {"num_envs": 3, "batch_size": 8, "actor_width": 8, "critic_width": 8}
SMALL |= {"buffer_size": 30, "learning_starts": 0, "segment_steps": 10}


class Forever:
    """Reward 1 per step, truncated after 5 steps: the value is 1 / (1 - gamma) = 10, not 4.1."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    EPISODE_LENGTH, stagger = 5, Brax.stagger
    terminates = False

    def reset(self, key):
        cue = jnp.where(jax.random.bernoulli(key), 1.0, -1.0)
        return (cue, jnp.int32(0)), self.observe(cue)

    def observe(self, cue):
        return jnp.ones(1)

    def reward(self, cue, action):
        return jnp.float32(1)

    def step(self, key, state, action):
        cue, time = state[0], state[1] + 1
        ends = time >= self.EPISODE_LENGTH
        flags = (ends & self.terminates, ends & (not self.terminates))
        return (cue, time), self.observe(cue), self.reward(cue, action), *flags

    def render(self, state):
        return np.zeros((8, 8, 3), np.uint8)


class Twice(Forever):
    """Reward 1 in each of two steps, then termination: the value is 1 + gamma at the first."""

    EPISODE_LENGTH, terminates = 2, True


class Both(Forever):
    """The reward depends on cue and action: the best action is half the cue, with value 1."""

    EPISODE_LENGTH, terminates = 1, True

    def observe(self, cue):
        return cue[None]

    def reward(self, cue, action):
        return 1 - 4 * jnp.square(action[0] - cue / 2)


def ring(slots: int, num_envs: int, steps: int, seed: int = 0) -> tuple[Ring, list[dict]]:
    """A memory after so many random steps, and the steps themselves."""
    rng = np.random.default_rng(seed)
    memory = Ring.empty(slots, Forever(), num_envs)
    rows = []
    for _ in range(steps):
        obs, next_obs, actions = rng.standard_normal((3, num_envs, 1)).astype(np.float32)
        rewards = rng.standard_normal(num_envs).astype(np.float32)
        terminated = rng.random(num_envs) < 0.2
        done = terminated | (rng.random(num_envs) < 0.2)
        memory = memory.store(obs, actions, Step(next_obs, rewards, terminated, done, None, None))
        rows.append({"obs": obs, "next_obs": next_obs, "actions": actions, "rewards": rewards})
        rows[-1] |= {"terminated": terminated, "done": done}
    return memory, rows


@pytest.mark.parametrize("steps", [12, 47])  # not full, twice around
@pytest.mark.parametrize("n_step", [1, 3])
def test_n_step_transitions_are_those_of_a_loop(steps: int, n_step: int) -> None:
    memory, rows = ring(20, 3, steps)
    args = fast_td3.Args(**SMALL | {"n_step": n_step, "gamma": 0.9})
    oldest = max(0, steps - 20)
    starts = np.repeat(np.arange(oldest, steps - n_step + 1), 3)
    envs = np.tile(np.arange(3), len(starts) // 3)
    slots = (starts + np.arange(n_step)[:, None]) % 20
    batch = fast_td3.n_step_batch(memory, args, slots, envs)
    for i, (start, env) in enumerate(zip(starts, envs)):
        returns, discount = 0.0, 1.0
        for t in range(start, start + n_step):
            returns += discount * rows[t]["rewards"][env]
            discount *= 0.9
            if rows[t]["done"][env]:
                break
        discount *= 1 - rows[t]["terminated"][env]
        assert batch.obs[i] == rows[start]["obs"][env]
        assert batch.actions[i] == rows[start]["actions"][env]
        assert batch.next_obs[i] == rows[t]["next_obs"][env]  # the real last one if it ended
        np.testing.assert_allclose(batch.returns[i], returns, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(batch.discounts[i], discount, rtol=1e-5)


@pytest.mark.parametrize("steps", [3, 12, 47])
def test_windows_hold_consecutive_steps_and_all_are_drawn(steps: int) -> None:
    memory, _ = ring(20, 3, steps)
    slots, envs = memory.draw(jax.random.key(0), 4000, 3)
    when = np.empty(20, int)  # the step that each slot holds
    when[np.arange(max(0, steps - 20), steps) % 20] = np.arange(max(0, steps - 20), steps)
    times = when[np.asarray(slots)]
    assert (np.diff(times, axis=0) == 1).all()
    assert set(times[0]) == set(range(max(0, steps - 20), steps - 2))
    assert set(envs.tolist()) == {0, 1, 2}


def test_projection_is_that_of_a_loop_and_keeps_the_mean() -> None:
    rng = np.random.default_rng(0)
    atoms = np.linspace(-2, 3, 11, dtype=np.float32)
    probs = rng.dirichlet(np.ones(11), 6).astype(np.float32)
    returns = rng.uniform(-3, 4, (6, 11)).astype(np.float32)
    returns[0] = atoms  # onto the atoms themselves
    wanted = np.zeros((6, 11))
    for i in range(6):
        for j in range(11):
            position = (np.clip(returns[i, j], -2, 3) + 2) / 0.5
            below = min(int(position), 10)
            wanted[i, below] += probs[i, j] * (1 - (position - below))
            if below < 10:
                wanted[i, below + 1] += probs[i, j] * (position - below)
    found = fast_td3.project(probs, returns, atoms)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_allclose(found[0], probs[0], atol=1e-5)
    mean = (probs * returns.clip(-2, 3)).sum(1)
    np.testing.assert_allclose((found * atoms).sum(1), mean, atol=1e-5)


def small_train(args: fast_td3.Args) -> dict:
    actor, critics = fast_td3.init_params(Forever(), args, 1)
    return {"actor": actor, "critics": critics, "target_critics": critics}


def batch_of(args: fast_td3.Args) -> fast_td3.Batch:
    memory, _ = ring(10, 3, 10)
    return fast_td3.n_step_batch(memory, args, *memory.draw(jax.random.key(1), 8, args.n_step))


def test_targets_bootstrap_from_the_smaller_critic_at_smoothed_actions() -> None:
    args = fast_td3.Args(**SMALL | {"v_min": -50.0, "v_max": 50.0, "policy_noise": 0.2})
    train = small_train(args)
    batch = batch_of(args)
    noise = jnp.linspace(-5, 5, 8)[:, None]  # the ends are clipped at 0.5
    targets = fast_td3.get_targets(train, args, batch, noise)
    np.testing.assert_allclose(targets.sum(1), 1, rtol=1e-5)

    smoothing = np.clip(0.2 * np.asarray(noise), -0.5, 0.5)
    actions = np.tanh(forward(train["actor"], batch.next_obs)) + smoothing
    inputs = np.concatenate([batch.next_obs, np.clip(actions, -1, 1)], 1)
    values = []
    for i in range(2):
        logits = forward({name: x[i] for name, x in train["critics"].items()}, inputs)
        probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        values.append(probs @ args.atoms)
    wanted = batch.returns + batch.discounts * np.minimum(*values)
    np.testing.assert_allclose(targets @ args.atoms, wanted, rtol=1e-3, atol=1e-3)


def forward(params: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    for i in range(4):
        x = np.asarray(x) @ params[f"{i}.kernel"] + params[f"{i}.bias"]
        x = np.maximum(x, 0) if i < 3 else x
    return x


def test_losses_are_a_cross_entropy_and_the_smaller_mean() -> None:
    args = fast_td3.Args(**SMALL)
    train = small_train(args)
    batch = batch_of(args)
    targets = np.random.default_rng(0).dirichlet(np.ones(101), 8).astype(np.float32)
    loss, metrics = fast_td3.q_loss(train["critics"], args, batch, targets)
    inputs = np.concatenate([batch.obs, batch.actions], 1)
    losses = []
    for i in range(2):
        logits = forward({name: x[i] for name, x in train["critics"].items()}, inputs)
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        losses.append(-(targets * logprobs).sum(1).mean())
    np.testing.assert_allclose(loss, sum(losses), rtol=1e-4)
    assert metrics["losses/qf1_loss"] != metrics["losses/qf2_loss"]  # two critics, not one twice

    actions = fast_td3.get_actions(train["actor"], batch.obs)
    logits = fast_td3.get_logits(train["critics"], batch.obs, actions)
    means = np.asarray(jax.nn.softmax(logits)) @ args.atoms
    found = fast_td3.actor_loss(train["actor"], train["critics"], args, batch.obs)
    np.testing.assert_allclose(found, -means.min(0).mean(), rtol=1e-4)


def test_the_optimiser_is_that_of_torch() -> None:
    rng = np.random.default_rng(0)
    start = rng.standard_normal(5).astype(np.float32)
    weights = torch.nn.Parameter(torch.tensor(start))
    theirs = torch.optim.AdamW([weights], lr=3e-4, weight_decay=0.1)
    ours = fast_td3.make_optimizer(fast_td3.Args(**SMALL))
    params = jnp.asarray(start)
    state = ours.init(params)
    for _ in range(5):
        grads = rng.standard_normal(5).astype(np.float32)
        weights.grad = torch.tensor(grads)
        theirs.step()
        updates, state = ours.update(jnp.asarray(grads), state, params)
        params = params + updates
    np.testing.assert_allclose(params, weights.detach(), atol=1e-7)


def test_an_update_moves_the_targets_by_tau_twice_and_the_policy_once() -> None:
    args = fast_td3.Args(**SMALL | {"tau": 0.25, "v_min": -50.0, "v_max": 50.0})
    train = with_moments(args, small_train(args))
    train |= {"obs_stats": fast_td3.init_stats(1)}
    memory, _ = ring(10, 3, 10)
    after, metrics = fast_td3.update(args, memory, train, jax.random.key(0))
    counts = [int(after[f"{name}_moments"][0].count) for name in ("critic", "actor")]
    assert counts == [2, 1] and np.isfinite(list(metrics.values())).all()
    name = "3.bias"
    old, new = (np.asarray(x["critics"][name]) for x in (train, after))
    target = np.asarray(after["target_critics"][name])
    # first step: old + d1, target old + d1 / 4; second: target 3/4 of that + 1/4 of the new one
    first = (target - 0.25 * new) / 0.75
    between = old + (first - old) / 0.25
    assert abs(between - old).max() > 1e-4 and abs(new - between).max() > 1e-4
    assert abs(between - old).max() < 1e-3  # one step of Adam: about the learning rate


def with_moments(args: fast_td3.Args, train: dict) -> dict:
    optimizer = fast_td3.make_optimizer(args)
    train |= {"actor_moments": optimizer.init(train["actor"])}
    return train | {"critic_moments": optimizer.init(train["critics"])}


def test_an_update_normalises_what_it_reads_from_the_memory() -> None:
    """A memory of raw observations and their statistics is as good as one of normalised ones."""
    args = fast_td3.Args(**SMALL | {"v_min": -50.0, "v_max": 50.0, "policy_frequency": 1})
    train = with_moments(args, small_train(args))
    memory, _ = ring(10, 3, 10)
    raw = memory._replace(obs=5 + 2 * memory.obs, next_obs=5 + 2 * memory.next_obs)
    plain = fast_td3.init_stats(1)
    moved = plain | {"mean": jnp.full(1, 5.0), "std": jnp.full(1, 2.0)}
    key = jax.random.key(0)
    wanted, metrics = fast_td3.update(args, memory, train | {"obs_stats": plain}, key)
    found, raw_metrics = fast_td3.update(args, raw, train | {"obs_stats": moved}, key)
    for name, value in metrics.items():
        np.testing.assert_allclose(raw_metrics[name], value, rtol=1e-4, atol=1e-5)
    for name in ("actor", "critics"):
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), found[name], wanted[name])


def test_an_iteration_makes_as_many_updates_as_asked() -> None:
    args = fast_td3.Args(**SMALL | {"num_updates": 4})
    env = Forever()
    first = begin(env, jax.random.key(0), 3)
    carry = fast_td3.init(env, args, fast_td3.init_params(env, args, 1), first, jnp.int32(1))
    assert len(set(carry[1][0].state[1].tolist())) == 3  # episodes end at different steps
    stored = int(carry[2].stored)
    (train, _, replay), _ = fast_td3.iterate(env, args, first, carry, None)
    counts = [int(train[f"{name}_moments"][0].count) for name in ("critic", "actor")]
    assert counts == [4, 2] and int(replay.stored) == stored + 1


def test_metrics_are_means_over_all_updates_of_an_iteration(monkeypatch) -> None:
    args = fast_td3.Args(**SMALL | {"num_updates": 4})
    env = Forever()
    first = begin(env, jax.random.key(0), 3)
    carry = fast_td3.init(env, args, fast_td3.init_params(env, args, 1), first, jnp.int32(1))
    losses = []
    q_loss = fast_td3.q_loss

    def recorded(critics: dict, *rest: Any) -> tuple:
        losses.append(q_loss(jax.lax.stop_gradient(critics), *rest)[1]["losses/qf_loss"])
        return q_loss(critics, *rest)

    monkeypatch.setattr(fast_td3, "q_loss", recorded)
    _, (metrics, *_) = fast_td3.iterate(env, args, first, carry, None)
    losses = np.array(losses)
    assert len(set(losses.tolist())) == 4
    np.testing.assert_allclose(metrics["losses/qf_loss"], losses.mean(), rtol=1e-6)


def test_acting_normalises_and_stores_what_was_done() -> None:
    args = fast_td3.Args(**SMALL | {"num_envs": 4, "buffer_size": 40})
    env = Both()
    params = fast_td3.init_params(env, args, 1)
    params[0]["3.bias"][:] = 0.5  # actions that depend on the observation
    params[0]["3.kernel"][:] *= 100
    first = begin(env, jax.random.key(0), 4)
    train, (episodes, _), replay = fast_td3.init(env, args, params, first, jnp.int32(1))
    train["obs_stats"] |= {"mean": jnp.full(1, 3.0), "std": jnp.full(1, 0.5)}
    for scale in (0.0, 9.0):
        carry = train, (episodes, jnp.full(4, scale)), replay
        (after, _, filled), step = fast_td3.collect(env, args, first, carry, None)
        actions = np.asarray(filled.actions[3])
        stats = fast_td3.update_stats(train["obs_stats"], episodes.obs)
        greedy = fast_td3.get_actions(params[0], fast_td3.normalise(stats, episodes.obs))
        assert abs(actions).max() <= 1  # also with much noise
        if scale == 0:
            np.testing.assert_allclose(actions, greedy, rtol=1e-5)
            found = fast_td3.agent_of(after).act(np.asarray(episodes.obs))
            np.testing.assert_allclose(found, greedy, rtol=1e-5)
        cue = np.asarray(episodes.obs[:, 0])
        np.testing.assert_allclose(step.reward, 1 - 4 * (actions[:, 0] - cue / 2) ** 2, rtol=1e-4)


def test_noise_scales_are_redrawn_where_an_episode_ended() -> None:
    args = fast_td3.Args(**SMALL | {"std_min": 0.2, "std_max": 0.3})
    scales = jnp.full(2000, 0.5)
    done = jnp.arange(2000) % 2 == 0
    new = np.asarray(fast_td3.redraw(args, jax.random.key(0), scales, done))
    assert (new[1::2] == 0.5).all()
    assert new[::2].min() >= 0.2 and new[::2].max() <= 0.3 and len(set(new[::2])) > 900
    np.testing.assert_allclose(new[::2].mean(), 0.25, atol=0.005)


def test_collected_actions_have_the_noise_of_their_environment() -> None:
    args = fast_td3.Args(**SMALL | {"num_envs": 400, "buffer_size": 4000, "std_min": 0.0})
    env = Forever()
    params = fast_td3.init_params(env, args, 1)
    first = begin(env, jax.random.key(0), 400)
    train, (episodes, scales), replay = fast_td3.init(env, args, params, first, jnp.int32(1))
    assert int(replay.stored) == args.warmup_steps == 3 and 0 <= scales.min() < scales.max() < 0.4
    scales = jnp.where(jnp.arange(400) < 200, 0.01, 0.2)
    carry = train, (episodes, scales), replay
    (_, (_, after), replay), step = fast_td3.collect(env, args, first, carry, None)
    greedy = np.asarray(fast_td3.get_actions(params[0], jnp.zeros((1, 1))))
    noise = np.asarray(replay.actions[3, :, 0]) - greedy[0, 0]
    assert 0.005 < noise[:200].std() < 0.02 and 0.15 < noise[200:].std() < 0.25
    changed = np.asarray(after != scales)
    assert (changed == np.asarray(step.done)).all() and 0 < changed.sum() < 400


PROBE = (
    "--num-envs 16 --buffer-size 16000 --batch-size 64 --segment-steps 100 --learning-starts 160"
    " --actor-width 32 --critic-width 64 --gamma 0.9 --v-min -20 --v-max 20 --n-atoms 41"
    " --learning-rate 0.002 --weight-decay 0 --total-timesteps 16160"
)


@pytest.mark.parametrize("env, wanted", [(Forever, 10.0), (Twice, 1.9), (Both, 1.0)])
def test_it_finds_the_known_values(env: type, wanted: float, train, monkeypatch) -> None:
    monkeypatch.setattr(playground, "make_physics", lambda env_id: env())
    noise = "--policy-noise 0 --std-min 0.1" if env is Both else ""
    done = train("fast_td3_continuous_action_jax", f"--env-id ant {PROBE} {noise}")
    first, last = (done.variables[name].state[0] for name in ("first", "starts"))
    assert (first != last).any()  # each segment has fresh starts
    state = jax.tree.map(lambda x: x[0], done.variables["train"])
    cues = jnp.array([[-1.0], [1.0]]) if env is Both else jnp.ones((2, 1))
    obs = fast_td3.normalise(state["obs_stats"], cues)
    actions = fast_td3.get_actions(state["actor"], obs)
    logits = fast_td3.get_logits(state["critics"], obs, actions)
    values = (jax.nn.softmax(logits) * done.variables["args"].atoms).sum(-1).min(0)
    if env is Twice:  # both steps look alike: 1 + gamma at the first, 1 at the second
        assert 1 < values[0] < wanted
    else:
        np.testing.assert_allclose(values, wanted, rtol=0.1)
    if env is Both:
        np.testing.assert_allclose(actions[:, 0], [-0.5, 0.5], atol=0.15)


SHORT = (
    "--env-id ant --num-envs 4 --buffer-size 400 --batch-size 8 --segment-steps 10"
    " --learning-starts 20 --actor-width 8 --critic-width 8"
)


def test_a_longer_run_continues_where_a_shorter_one_ended(train, monkeypatch) -> None:
    """Also with two seeds at once, and with the same learning as if it had been long at once."""
    monkeypatch.setattr(playground, "make_physics", lambda env_id: Forever())
    flags = f"{SHORT} --num-seeds 2 --checkpoints 2 --save-model --eval-episodes 1"
    whole = train("fast_td3_continuous_action_jax", f"{flags} --total-timesteps 180", "whole")
    train("fast_td3_continuous_action_jax", f"{flags} --total-timesteps 100", "short")
    first, _ = sorted(Path("short").iterdir())
    longer = train("fast_td3_continuous_action_jax", f"--resume {first} --total-timesteps 180")
    assert longer.curve() == whole.curve()
    assert longer.weights() == whole.weights()
    steps = {step for step, tag, _ in whole.curve() if tag == "losses/actor_loss"}
    assert steps == {60, 100, 140, 180}


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--total-timesteps 59", "--total-timesteps must be at least 60"),
        ("--buffer-size 11", "--buffer-size must be at least --num-envs x --n-step = 12"),
        ("--num-updates 3", "--policy-frequency must divide --num-updates"),
        ("--n-atoms 1", "--n-atoms must be at least 2, got 1"),
        ("--v-min 5 --v-max 5", "--v-min must be below --v-max"),
        ("--std-min 0.5", "--std-min must not exceed --std-max"),
    ],
)
def test_settings_that_do_not_fit_are_named(flags: str, says: str, train, capfd) -> None:
    with pytest.raises(SystemExit) as stop:
        train("fast_td3_continuous_action_jax", f"{SHORT} {flags}")
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and says in line


def test_initial_actions_are_small_and_the_critics_differ() -> None:
    args = fast_td3.Args(**SMALL | {"actor_width": 512, "critic_width": 1024})
    actor, critics = fast_td3.init_params(Forever(), args, 1)
    obs = np.linspace(-3, 3, 50, dtype=np.float32)[:, None]
    assert abs(fast_td3.get_actions(actor, obs)).max() < 0.1
    assert [actor[f"{i}.kernel"].shape for i in range(4)] == [
        (1, 512), (512, 256), (256, 128), (128, 1),
    ]  # fmt: skip
    assert critics["0.kernel"].shape == (2, 2, 1024) and critics["3.kernel"].shape == (2, 256, 101)
    assert not (critics["1.kernel"][0] == critics["1.kernel"][1]).any()
