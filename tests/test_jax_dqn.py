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
from cleanrl_utils.replay.buffers_jax import Batch, FrameMemory, ReplayMemory
from cleanrl_utils.running.evaluation import build
from cleanrl_utils.speed.jax_acting import in_numpy, translate
from cleanrl_utils.speed.jax_learning import Packing, Training

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

    args = module.Args(**settings)
    params = to_flax(network, list(network.parameters()))
    target_params = to_flax(target, list(target.parameters()))
    state = module.init(args, envs)._replace(target_network=target_params)
    gradient = jax.grad(lambda *x: module.get_loss(*x[:2], args, *x[2:]), has_aux=True)
    grads, found = jax.jit(gradient)(params, state, batch)
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5)
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


@pytest.mark.parametrize("packed", [False, True])
def test_a_gradient_step_is_adams_and_the_target_moves_by_tau(packed: bool, monkeypatch) -> None:
    """On a GPU, the state is packed."""
    monkeypatch.setattr(Packing, "enabled_by_default", staticmethod(lambda: packed))
    args = dqn_jax.Args(tau=0.25, batch_size=16, buffer_size=10)
    memory, batch = ReplayMemory(args.buffer_size, VECTORS), make_batch(VECTORS, 2)
    memory.add(*batch, [True, False])  # one to draw from
    functions = partial(dqn_jax.init, args, VECTORS), partial(dqn_jax.update, args)
    training = Training(*functions, memory, args.batch_size)
    before = training.state.q_network.params
    act = training.policy(dqn_jax.greedy_actions)
    training.update()
    repeated = Batch(*(np.repeat(x[:1], 16, 0) for x in batch))
    gradient = jax.jit(jax.grad(lambda *x: dqn_jax.get_loss(*x, args, repeated), has_aux=True))
    grads, metrics = gradient(before, dqn_jax.init(args, VECTORS))

    def check(new: Any, old: Any, g: Any) -> None:
        # Adam's first step goes by the learning rate, whatever the gradient's size
        wanted = old - args.learning_rate * g / (np.abs(g) + 1e-8)
        np.testing.assert_allclose(new, wanted, atol=1e-5)

    new = training.state.q_network.params
    jax.tree.map(check, new, before, grads)
    found = training.metrics()
    assert found == pytest.approx({name: float(x) for name, x in metrics.items()}, rel=1e-5)
    assert training.metrics() == {}
    training.change(partial(dqn_jax.update_target, args))
    after = training.state.target_network
    mixed = jax.tree.map(lambda a, b: 0.25 * a + 0.75 * b, new, before)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), after, mixed)
    network = dqn_jax.make_network(VECTORS, args)
    wanted = network.apply(new, batch.obs, method="act")  # the policy is always the newest
    assert (act(batch.obs) == wanted).all()


@pytest.mark.parametrize("module", [dqn_jax, c51_jax], ids=["dqn", "c51"])
def test_numpy_computes_what_flax_does(module: ModuleType) -> None:
    network, obs = module.make_network(VECTORS, module.Args()), make_batch(VECTORS).obs
    first = network.init(jax.random.key(0), obs)
    second = network.init(jax.random.key(1), obs)
    for method in ("__call__", "act"):
        compute = in_numpy(partial(network.apply, method=method))
        for rows, params in [(1, first), (8, first), (8, second), (1, second)]:
            found = compute(params, obs[:rows])
            wanted = network.apply(params, obs[:rows], method=method)
            assert type(found) is np.ndarray and found.dtype == wanted.dtype
            np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_numpy_leaves_what_it_cannot_compute_to_the_compiler() -> None:
    """Only what the result needs counts."""
    x = np.linspace(0.1, 0.9, 6, dtype=np.float32).reshape(2, 3)
    params = {"scale": np.float32(2)}
    used = lambda params, x: jnp.arctan(x) * params["scale"]  # noqa: E731
    assert translate(jax.make_jaxpr(used)(params, x), 1) is None
    np.testing.assert_allclose(in_numpy(used)(params, x), 2 * np.arctan(x), rtol=1e-6)

    def unused(params: Any, x: Any) -> Any:
        jnp.arctan(x)
        return (x @ jnp.ones((3, 2)) + np.arange(2.0)).max(1) * params["scale"]

    assert translate(jax.make_jaxpr(unused)(params, x), 1) is not None
    wanted = 2 * (x.sum(1) + 1)
    np.testing.assert_allclose(in_numpy(unused)(params, x), wanted, rtol=1e-6)
    batched = lambda params, x: jnp.einsum("ij,kj->ik", x, x)  # noqa: E731
    np.testing.assert_allclose(in_numpy(batched)(params, x), x @ x.T, rtol=1e-6)
    cube = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    matrix = np.arange(4, dtype=np.float32).reshape(2, 2)
    middle = lambda matrix, x: jnp.tensordot(x, matrix, ([1], [0]))  # noqa: E731
    wanted = np.tensordot(cube, matrix, ([1], [0]))
    np.testing.assert_allclose(in_numpy(middle)(matrix, cube), wanted)
    one_part = lambda params, x: jnp.split(x, 1, 1)[0] * params["scale"]  # noqa: E731
    assert in_numpy(one_part)(params, x).shape == x.shape

    def loop(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (x * params["scale"], None), x, length=3)[0]

    np.testing.assert_allclose(in_numpy(loop)(params, x), 8 * x, rtol=1e-6)


@pytest.mark.parametrize("num_envs, capacity", [(1, 7), (3, 40)])
def test_frames_are_those_of_torch(num_envs: int, capacity: int, monkeypatch) -> None:
    """The same insertions, around the ring: the same transitions."""
    theirs, episodes = (
        FrameReplayBuffer(capacity, FRAMES, Discrete(5), num_envs),
        Episodes(num_envs),
    )
    spaces: Any = SimpleNamespace(num_envs=num_envs, single_observation_space=FRAMES)
    memory = FrameMemory(capacity, spaces)
    # draws each transition once, and then again
    each_once = lambda key, shape, size: jnp.arange(*shape) % size  # noqa: E731
    monkeypatch.setattr(buffers_jax, "draw", each_once)
    sample = jax.jit(partial(memory.sample, batch_size=capacity))
    rng = np.random.default_rng(0)
    steps = 4 * capacity // num_envs
    for _ in range(steps):
        obs, next_obs, _, rewards, terminated, real = episodes.step()
        actions = rng.integers(5, size=num_envs)
        step = (pictures(obs), pictures(next_obs), actions, rewards, terminated, real)
        theirs.add(*step)
        memory.add(*step)
        if len(theirs) == 0:
            continue
        wanted, found = everything(theirs), sample(memory.replay, jax.random.key(0))
        for ours, want in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(ours[: len(theirs)], want)
    assert steps > 3 * memory.num_steps - STACK  # it went around


def test_a_full_memory_of_frames_stays_in_place() -> None:
    memory = FrameMemory(1000, PIXELS)
    replay = memory.replay
    step = memory.pack(*make_batch(PIXELS, 2), np.ones(2))
    program = jax.jit(memory.insert, donate_argnums=0).lower(replay, step).compile()
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
    for _ in range(50):
        obs, next_obs, _, rewards, terminated, real = episodes.step()
        step = (pictures(obs), pictures(next_obs), np.zeros(3), rewards, terminated, real)
        memory.add(*step)
    replay = memory.replay
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
    q_network = done.variables["training"].state.q_network
    assert q_network.step == q_network.opt_state[0].count == len(range(60, 281, 5))
    rows = done.rows()
    assert [row[0] for row in rows if row[1] == "losses/td_loss"] == [100, 200]
    # each environment's every step is remembered, but not the one after each end, which only reset
    ends = [row[0] for row in rows if row[1] == "charts/episodic_return"]
    assert int(done.variables["memory"].replay.added) == 280 - sum(end < 280 for end in ends)


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
