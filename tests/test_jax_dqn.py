"""DQN and C51 in JAX: they are those of torch, and so is their memory of frames."""

import warnings
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flax")
import jax
import jax.numpy as jnp
import torch
from batches import PIXELS, VECTORS, make_batch
from episodes import FRAMES, STACK, Episodes, everything, pictures
from gymnasium.spaces import Discrete

from cleanrl import c51, c51_atari, c51_atari_jax, c51_jax, dqn, dqn_atari, dqn_atari_jax, dqn_jax
from cleanrl_utils.errors import BadInput
from cleanrl_utils.evals.dqn_jax_eval import evaluate
from cleanrl_utils.replay import buffers_jax
from cleanrl_utils.replay.buffers import FrameReplayBuffer
from cleanrl_utils.replay.buffers_jax import Batch, FrameMemory
from cleanrl_utils.running.evaluation import build
from cleanrl_utils.speed.jax_tools import Packing, dense_inference

TWINS = {
    "dqn": (dqn, dqn_jax, VECTORS),
    "c51": (c51, c51_jax, VECTORS),
    "dqn_atari": (dqn_atari, dqn_atari_jax, PIXELS),
    "c51_atari": (c51_atari, c51_atari_jax, PIXELS),
}
twins = pytest.mark.parametrize("torch_module, module, envs", TWINS.values(), ids=TWINS)


def to_flax(network: torch.nn.Module, arrays: list[torch.Tensor]) -> dict[str, Any]:
    """Weights of torch's network, or their gradients, as Flax has them: channels last."""
    kinds = [type(layer).__name__ for layer in network if hasattr(layer, "weight")]
    layers: dict[str, Any] = {}
    for i, kind in enumerate(kinds):
        weight, bias = (x.detach().numpy() for x in arrays[2 * i : 2 * i + 2])
        if kind == "Conv2d":
            layers[f"Conv_{i}"] = {"kernel": weight.transpose(2, 3, 1, 0), "bias": bias}
            continue
        if i and kinds[i - 1] == "Conv2d":  # its inputs were (channels, height, width)
            weight = weight.reshape(-1, 64, 7, 7).transpose(0, 2, 3, 1).reshape(len(weight), -1)
        layers[f"Dense_{i - kinds.count('Conv2d')}"] = {"kernel": weight.T, "bias": bias}
    return {"params": layers}


@twins
def test_loss_and_gradient_are_those_of_torch(
    torch_module: ModuleType, module: ModuleType, envs: Any
) -> None:
    torch.manual_seed(0)
    network, target = (build(torch_module.QNetwork, envs, torch_module.Args()) for _ in range(2))
    settings: dict[str, Any] = {"gamma": 0.9}
    if hasattr(network, "atoms"):  # all but sure of one action's value, and against some of another
        settings["min_probability"] = 1e-5
        bias, number = list(network.parameters())[-1].data, len(network.atoms)
        bias[3] += 20
        bias[number : 2 * number : 3] -= 20
    still = torch.optim.SGD(network.parameters(), lr=0.0)
    batch = make_batch(envs)
    wanted = torch_module.update(
        network, target, still, torch_module.Args(**settings), *map(torch.as_tensor, batch)
    )

    learner = module.Learner(module.Args(**settings, buffer_size=10), envs)
    params = to_flax(network, list(network.parameters()))
    train = learner.init()._replace(
        target_network=learner.packing.pack(to_flax(target, list(target.parameters())))
    )
    grads, found = jax.jit(jax.grad(learner.get_loss, has_aux=True))(params, train, batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    gradients: list[Any] = [x.grad for x in network.parameters()]

    def check(a: Any, b: Any) -> None:  # within 1e-5 of the largest number of each array
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=1e-5)

    jax.tree.map(check, grads, to_flax(network, gradients))


@twins
def test_actions_are_those_of_torch_and_initial_weights_flaxs(
    torch_module: ModuleType, module: ModuleType, envs: Any
) -> None:
    network = build(torch_module.QNetwork, envs, torch_module.Args())
    obs = make_batch(envs).obs
    twin = module.make_network(envs, module.Args())
    with torch.no_grad():
        wanted = network.act(torch.as_tensor(obs))
    params = to_flax(network, list(network.parameters()))
    assert (module.Agent(twin, params).act(obs) == wanted.numpy()).all()
    fresh = jax.jit(twin.init)(jax.random.key(0), obs)

    def check(ours: Any, theirs: Any) -> None:  # a variance of 1 / inputs, torch's is a third
        assert ours.shape == theirs.shape
        if ours.ndim == 1:
            assert not ours.any()
        else:
            inputs = ours.size // ours.shape[-1]
            assert np.std(ours) == pytest.approx(inputs**-0.5, rel=0.15)

    jax.tree.map(check, fresh, params)


def test_projection_of_a_case_computed_by_hand() -> None:
    atoms = jnp.array([-1.0, 0.0, 1.0])
    probs = jnp.array([[0.2, 0.3, 0.5], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    returns = jnp.array(
        [
            [-0.75, 0.25, 1.25],  # between atoms, and beyond the last one
            [1.0, 1.0, 1.0],  # an episode that ended with reward 1
            [-7.0, 0.0, 0.0],  # beyond the first one
        ]
    )
    # -0.75: 0.75 of 0.2 to -1, the rest to 0; 0.25: 0.75 of 0.3 to 0, the rest to 1
    wanted = [[0.15, 0.05 + 0.225, 0.075 + 0.5], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    np.testing.assert_allclose(c51_jax.project(probs, returns, atoms), wanted, atol=1e-6)


@pytest.mark.parametrize("script", [c51_jax, c51_atari_jax])
def test_mass_on_an_atom_stays_there(script) -> None:
    """Reward 0 and gamma 1 map the atoms onto themselves, however often."""
    atoms = jnp.linspace(-10, 10, 51)
    first = jax.nn.softmax(jax.random.uniform(jax.random.key(0), (8, 51)))
    project = lambda _, probs: script.project(probs, jnp.tile(atoms, (8, 1)), atoms)  # noqa: E731
    probs = jax.lax.fori_loop(0, 1000, project, first)
    assert abs(probs - first).max() < 1e-6


def test_a_gradient_step_is_adams_and_the_target_moves_by_tau() -> None:
    learner = dqn_jax.Learner(dqn_jax.Args(tau=0.25, batch_size=16, buffer_size=10), VECTORS)
    memory, batch = learner.memory, make_batch(VECTORS, 2)
    replay = memory.insert(memory.init(), memory.page(*batch, [True, False]))  # one to draw from
    train, sums = jax.jit(learner.learn)(learner.init(), jnp.zeros((2, 2)), replay)
    repeated = Batch(*(np.repeat(x[:1], 16, 0) for x in batch))
    gradient = jax.jit(jax.grad(learner.get_loss, has_aux=True))
    grads, losses = gradient(learner.params, train, repeated)

    def check(new: Any, old: Any, g: Any) -> None:
        # Adam's first step goes by the learning rate, whatever the gradient's size
        wanted = old - learner.args.learning_rate * g / (np.abs(g) + 1e-8)
        np.testing.assert_allclose(new, wanted, atol=1e-5)

    jax.tree.map(check, learner.packing.unpack(train.q_network), learner.params, grads)
    np.testing.assert_allclose(sums, [losses, [1, 1]], rtol=1e-5)
    (ours,), (before,) = train.q_network.values(), train.target_network.values()
    (after,) = learner.update_target(train).target_network.values()
    np.testing.assert_allclose(after, 0.25 * ours + 0.75 * before, atol=1e-6)


@pytest.mark.parametrize("module", [dqn_jax, c51_jax], ids=["dqn", "c51"])
def test_numpy_computes_what_flax_does(module: ModuleType) -> None:
    network, obs = module.make_network(VECTORS, module.Args()), make_batch(VECTORS).obs
    params = network.init(jax.random.key(0), obs)
    packing = Packing(params)
    forward = dense_inference(network, packing)
    wanted = network.apply(params, obs)
    found = forward(packing.pack(params), obs)
    assert type(found) is np.ndarray
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, atol=1e-5)
    many = np.repeat(obs, 2, 0)  # more than a few: by the program
    np.testing.assert_allclose(forward(packing.pack(params), many)[::2], wanted, atol=1e-5)
    if module is c51_jax:
        best = network.apply(params, obs, method="act")
        assert (c51_jax.best_actions(found, network.atoms) == best).all()


@pytest.mark.parametrize("num_envs, capacity", [(1, 7), (3, 40)])
def test_frames_are_those_of_torch(num_envs: int, capacity: int, monkeypatch) -> None:
    """The same insertions, around the ring and with resets by hand: the same transitions."""
    theirs, episodes = (
        FrameReplayBuffer(capacity, FRAMES, Discrete(5), num_envs),
        Episodes(num_envs),
    )
    spaces: Any = SimpleNamespace(num_envs=num_envs, single_observation_space=FRAMES)
    memory = FrameMemory(capacity, spaces)
    replay = memory.init()
    insert, cut = jax.jit(memory.insert, donate_argnums=0), jax.jit(memory.cut, donate_argnums=0)
    # draws each transition once, and then again
    in_turn = lambda key, shape, size: jnp.arange(*shape) % size  # noqa: E731
    monkeypatch.setattr(buffers_jax, "draw", in_turn)
    sample = jax.jit(partial(memory.sample, batch_size=capacity))
    rng = np.random.default_rng(0)
    for turn in range(4 * capacity // num_envs):
        if turn % 9 == 8:
            episodes.reset()
            theirs.cut()
            replay = cut(replay)
        obs, next_obs, _, rewards, terminated, real = episodes.step()
        actions = rng.integers(5, size=num_envs)
        step = (pictures(obs), pictures(next_obs), actions, rewards, terminated, real)
        theirs.add(*step)
        replay = insert(replay, memory.page(*step))
        if len(theirs) == 0:
            continue
        wanted, found = everything(theirs), sample(replay, jax.random.key(0))
        for ours, want in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(ours[: len(theirs)], want)
    assert turn > 3 * memory.num_turns - STACK  # it went around


def test_a_full_memory_of_frames_stays_in_place() -> None:
    memory = FrameMemory(1000, PIXELS)
    replay = memory.init()
    page = memory.page(*make_batch(PIXELS, 2), np.ones(2))
    program = jax.jit(memory.insert, donate_argnums=0).lower(replay, page).compile()
    used = program.memory_analysis()
    assert used.temp_size_in_bytes < replay.frames.nbytes / 100
    assert used.alias_size_in_bytes >= replay.frames.nbytes


def test_too_small_a_memory_is_refused() -> None:
    with pytest.raises(BadInput) as refused:
        FrameMemory(9, PIXELS)
    assert "--buffer-size 9" in refused.value.message and "10" in refused.value.message


def test_samples_are_uniform() -> None:
    memory, episodes = (
        FrameMemory(60, SimpleNamespace(num_envs=3, single_observation_space=FRAMES)),
        Episodes(3),
    )
    replay, insert = memory.init(), jax.jit(memory.insert)
    for _ in range(50):
        obs, next_obs, _, rewards, terminated, real = episodes.step()
        step = (pictures(obs), pictures(next_obs), np.zeros(3), rewards, terminated, real)
        replay = insert(replay, memory.page(*step))
    number = 20_000
    drawn = np.asarray(memory.sample(replay, jax.random.key(0), number).rewards)
    _, counts = np.unique(drawn, return_counts=True)
    _, first, last = replay.counters
    assert len(counts) == last - first  # each of them, and nothing else
    assert np.abs(counts - counts.mean()).max() < 5 * counts.mean() ** 0.5


@pytest.mark.parametrize("num_envs", [1, 4, 7])
def test_updates_do_not_depend_on_the_number_of_environments(num_envs: int, train) -> None:
    """280 steps: gradient steps at 60, 65, ..., 280."""
    flags = f"--total-timesteps 280 --num-envs {num_envs} --learning-starts 56 --train-frequency 5"
    flags += " --target-network-frequency 20 --batch-size 8 --checkpoints 1"
    done = train("dqn_jax", flags)
    moments = done.variables["train"].moments
    assert int(moments[0].count) == len(range(60, 281, 5))
    rows = done.rows()
    assert [row[0] for row in rows if row[1] == "losses/td_loss"] == [100, 200]
    # each environment's every step is remembered, but not the one after each end, which only reset
    ends = [row[0] for row in rows if row[1] == "charts/episodic_return"]
    assert int(done.variables["replay"].added) == 280 - sum(end < 280 for end in ends)


def test_a_saved_model_is_evaluated(train) -> None:
    done = train("dqn_jax", "--total-timesteps 50 --learning-starts 20 --save-model")
    (model,) = done.folder.glob("*.cleanrl_model")
    scores = evaluate(
        model,
        dqn_jax.make_env,
        "CartPole-v1",
        3,
        "x",
        dqn_jax.Agent,
        epsilon=1.0,
        capture_video=False,
    )
    assert len(scores) == 3 and 5 < np.mean(scores) < 100  # random play lasts some 20 steps


def test_environments_in_processes_are_not_forked_from_jax() -> None:
    """JAX warns of deadlocks at a fork; and a process of its own plays the same game."""
    jnp.zeros(1).block_until_ready()
    seen = []
    for async_envs in (False, True):
        args = dqn_atari_jax.Args(env_id="probes:ProbeCuePixels-v0", async_envs=async_envs)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            envs = dqn_atari_jax.make_envs(args, "")
        assert not [x for x in warned if "fork" in str(x.message)]
        seen.append([envs.reset(seed=1)[0], *envs.step(np.zeros(1, np.int64))[:2]])
        envs.close()
    for one, other in zip(*seen, strict=True):
        np.testing.assert_array_equal(one, other)
