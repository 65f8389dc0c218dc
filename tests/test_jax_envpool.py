"""PPO on EnvPool in JAX: the loss of its torch twin, the scan's rollout, masks and true scores."""

from functools import partial

import numpy as np
import pytest

pytest.importorskip("envpool")
import jax
import jax.numpy as jnp
import torch

from cleanrl import ppo_atari_envpool as twin
from cleanrl import ppo_atari_envpool_xla_jax as loop
from cleanrl import ppo_atari_envpool_xla_jax_scan as scan


def params_of(agent: twin.Agent) -> dict:
    """The twin's weights: of convolutions in the order of patches, of the rest channels last."""
    params = {}
    for i, (at, stride) in enumerate([(0, 4), (2, 2), (4, 1)]):
        kernel = agent.network[at].weight.detach().numpy()
        outputs, inputs, size, _ = kernel.shape
        cut = kernel.reshape(outputs, inputs, size // stride, stride, size // stride, stride)
        kernel = cut.transpose(2, 4, 3, 5, 1, 0).reshape(-1, outputs)
        params[f"Dense_{i}"] = kernel, agent.network[at].bias
    linear = agent.network[7].weight.detach().numpy().reshape(512, 64, 7, 7)
    params["Dense_3"] = linear.transpose(2, 3, 1, 0).reshape(-1, 512), agent.network[7].bias
    for name in ("actor", "critic"):
        head = getattr(agent, name)
        params[name] = head.weight.detach().numpy().T, head.bias
    return {k: {"kernel": w, "bias": b.detach().numpy()} for k, (w, b) in params.items()}


class FourActions:
    class single_action_space:  # noqa: N801
        n = 4


@pytest.fixture
def minibatch() -> tuple[np.ndarray, ...]:
    rng, n = np.random.default_rng(0), 12
    obs = rng.integers(0, 256, (n, 4, 84, 84), dtype=np.uint8)
    logprobs, values, advantages, returns = rng.standard_normal((4, n)).astype(np.float32)
    real = (np.arange(n) % 4 > 0).astype(np.float32)
    return obs, rng.integers(0, 4, n), logprobs * 0.1 - 1.4, values, advantages, returns, real


@pytest.mark.parametrize(
    "flags", [{"clip_vloss": True}, {"clip_vloss": False, "norm_adv": False, "clip_coef": 0.05}]
)
def test_loss_and_gradient_are_those_of_the_torch_twin(flags: dict, minibatch) -> None:
    torch.manual_seed(0)
    agent = twin.Agent(FourActions())
    params = params_of(agent)
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.0)
    args = twin.Args(max_grad_norm=1e9, **flags)
    losses = twin.update(agent, optimizer, args, *map(torch.as_tensor, minibatch))
    gradient = jax.jit(jax.grad(loop.get_loss, has_aux=True), static_argnums=1)
    grads, found = gradient(params, Frozen(**flags), minibatch)
    np.testing.assert_allclose(found, torch.stack(list(losses.values())), atol=1e-5)
    for parameter in agent.parameters():
        parameter.data = parameter.grad
    for wanted, leaf in zip(jax.tree.leaves(params_of(agent)), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(leaf, wanted, atol=1e-5)


class Frozen(loop.Args):
    """Settings that jit takes as a constant."""

    __hash__ = object.__hash__


def test_a_step_that_only_resets_teaches_nothing(minibatch) -> None:
    params = loop.init_params(4, seed=1)
    gradient = jax.jit(jax.grad(loop.get_loss, has_aux=True), static_argnums=1)
    wanted = gradient(params, Frozen(), minibatch)
    obs, actions, logprobs, values, advantages, returns, real = minibatch
    masked = real == 0
    actions[masked], advantages[masked], returns[masked] = 3, 100.0, -100.0
    found = gradient(params, Frozen(), minibatch)
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def scripted(handle, action):
    """Two lives of one game end at steps 2 and 5; the next game's time is over at step 8."""
    t = handle[0] + 1
    obs = jnp.full((1, 4, 84, 84), t, jnp.uint8)
    life, over, time = ((t == at)[None] for at in (2, 5, 8))
    resets = (t == 3) | (t == 6)
    reward = jnp.where(resets, 0, 5)[None].astype(jnp.float32)
    infos = {"reward": reward, "terminated": over.astype(int), "elapsed_step": t[None]}
    return handle + 1, (obs, jnp.clip(reward, 0, 1), life | over, time, infos)


@pytest.mark.parametrize("script", [loop, scan])
def test_masks_and_true_scores(script) -> None:
    args = script.Args(num_envs=1, num_steps=9, num_minibatches=1)
    params, obs = loop.init_params(4, seed=1), jnp.zeros((1, 4, 84, 84), jnp.uint8)
    handle, none = jnp.zeros(1, jnp.int32), jnp.zeros(1)
    games = script.Games(handle, jax.random.key(0), obs, none > 0, none)
    step_envs = jax.jit(partial(loop.play, scripted)) if script is loop else scripted
    games, step = script.collect(step_envs, args, params, games)
    at = np.arange(1, 10)
    assert step.seen[0][:, 0, 0, 0, 0].tolist() == list(range(9))
    assert (step.real[:, 0] == ~np.isin(at, [3, 6, 9])).all()  # each follows an end
    assert (step.done[:, 0] == np.isin(at, [2, 5, 8])).all()
    assert (step.terminated[:, 0] == np.isin(at, [2, 5])).all()  # time is not up because one dies
    returns = step.episodic_return[:, 0]
    assert (~np.isnan(returns) == np.isin(at, [5, 8])).all()  # of games, not of lives
    assert (returns[4], returns[7]) == (20, 10)  # unclipped


def over_at_the_limit(handle, action):
    """EnvPool's word for a game that is over exactly at the time limit: truncated."""
    yes, no = jnp.ones(1, bool), jnp.zeros(1, bool)
    infos = {"reward": jnp.ones(1), "terminated": jnp.ones(1, int), "elapsed_step": handle + 1}
    return handle + 1, (jnp.zeros((1, 4, 84, 84), jnp.uint8), jnp.ones(1), no, yes, infos)


@pytest.mark.parametrize("script", [loop, scan])
def test_a_game_over_exactly_at_the_time_limit_is_terminated(script) -> None:
    """So nothing is bootstrapped from what comes after it."""
    params, obs = loop.init_params(4, seed=1), jnp.zeros((1, 4, 84, 84), jnp.uint8)
    none = jnp.zeros(1)
    games = script.Games(none, jax.random.key(0), obs, none > 0, none)
    games, step = script.play(over_at_the_limit, params, games, None)
    assert step.terminated.tolist() == [True] and step.done.tolist() == [True]
    assert step.episodic_return.tolist() == [1] and games.score.tolist() == [0]


def test_advantages_go_on_over_a_time_limit_only() -> None:
    args = loop.Args(gamma=0.5, gae_lambda=1.0)
    zeros, ones = np.zeros((3, 1), np.float32), np.ones((3, 1), np.float32)
    values = np.array([[0.0], [0.0], [8.0], [4.0]], np.float32)
    at = np.array([[0.0], [1.0], [0.0]], np.float32)  # the second step ends an episode
    ends = partial(loop.Step, (), ones, real=ones, episodic_return=zeros, episodic_length=zeros)
    dies, cut = ends(terminated=at, done=at), ends(terminated=zeros, done=at)
    assert loop.gae(dies, values, args)[:, 0].tolist() == [1.5, 1.0, -5.0]
    assert loop.gae(cut, values, args)[:, 0].tolist() == [3.5, 5.0, -5.0]


def test_a_scan_is_a_loop(train) -> None:
    flags = "--env-id Breakout-v5 --total-timesteps 80 --num-envs 2 --num-steps 40"
    flags += " --num-minibatches 2 --update-epochs 2"
    done = [train(f"ppo_atari_envpool_xla_jax{end}", flags, end or "loop") for end in ("", "_scan")]
    one, other = (jax.tree.leaves(d.variables["train"]["params"]) for d in done)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    first = jax.tree.leaves(loop.init_params(4, seed=1))
    assert any(np.abs(a - b).max() > 1e-4 for a, b in zip(first, one, strict=True))  # it learnt

    for run in done:  # the keys of acting and of shuffling are never the same
        key = run.variables["train"]["key"]
        for _ in range(40):
            key, _ = jax.random.split(key)
            assert key != run.variables["games"].key
