"""SAC, TD3 and DDPG in JAX: they are those of torch, and their replay memory is one."""

from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flax")
import gymnasium as gym
import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from cleanrl import ddpg_continuous_action as ddpg
from cleanrl import ddpg_continuous_action_jax as ddpg_jax
from cleanrl import sac_continuous_action as sac
from cleanrl import sac_continuous_action_jax as sac_jax
from cleanrl import td3_continuous_action as td3
from cleanrl import td3_continuous_action_jax as td3_jax
from cleanrl_utils.errors import BadInput
from cleanrl_utils.replay import buffers_jax
from cleanrl_utils.replay.buffers_jax import Batch, ReplayMemory
from cleanrl_utils.speed.jax_acting import translate
from cleanrl_utils.speed.jax_learning import (
    BackgroundTraining,
    Packing,
    repetition,
    scan_updates,
)

LOW, HIGH = np.array([-0.4, 0.0, -3.0], np.float32), np.array([0.4, 5.0, -1.0], np.float32)
SPACES: Any = SimpleNamespace(
    num_envs=2,
    single_observation_space=gym.spaces.Box(-1, 1, (4,), np.float32),
    single_action_space=gym.spaces.Box(LOW, HIGH),
    observation_space=gym.spaces.Box(-1, 1, (2, 4), np.float32),
    action_space=gym.spaces.Box(np.stack([LOW, LOW]), np.stack([HIGH, HIGH])),
)
TWINS = [(sac, sac_jax), (td3, td3_jax), (ddpg, ddpg_jax)]
twins = pytest.mark.parametrize("torch_module, module", TWINS, ids=["sac", "td3", "ddpg"])
scripts = pytest.mark.parametrize("module", [twin for _, twin in TWINS], ids=["sac", "td3", "ddpg"])


def to_flax(network: torch.nn.Module, values: list[Tensor] | None = None) -> dict[str, Any]:
    """Weights of one of torch's networks, or their gradients, as Flax has them."""
    arrays = [x.detach().numpy() for x in values or network.parameters()]
    if isinstance(network, sac.Critics | td3.Critics):  # three weights, then three biases
        layers = [(arrays[i], arrays[i + 3][:, 0]) for i in range(3)]
    else:
        layers = [(arrays[2 * i].T, arrays[2 * i + 1]) for i in range(3)]
    return {"params": {f"Dense_{i}": {"kernel": w, "bias": b} for i, (w, b) in enumerate(layers)}}


def assert_same(found: Any, wanted: Any) -> None:
    """Within 1e-5, relative to the largest number of each array."""

    def check(a: Any, b: Any) -> None:
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=1e-5)

    jax.tree.map(check, found, wanted)


@twins
def test_loss_and_gradient_are_those_of_torch(
    torch_module: ModuleType, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same weights, batch and noise."""
    rng, n = np.random.default_rng(1), 64
    noise = rng.standard_normal((n, 3)).astype(np.float32)
    batch = [*rng.standard_normal((2, n, 4)), rng.uniform(LOW, HIGH, (n, 3))]
    batch += [rng.standard_normal(n), rng.random(n) < 0.5]
    batch = [x.astype(np.float32) for x in batch]
    monkeypatch.setattr(torch, "randn_like", lambda x: torch.as_tensor(noise))
    torch.manual_seed(1)
    args = torch_module.Args(tau=0.0)
    agent, other = torch_module.Agent(SPACES, args), torch_module.Agent(SPACES, args)
    name = "critic" if module is ddpg_jax else "critics"
    critics, targets = getattr(agent, name), getattr(other, name)
    setattr(agent, f"target_{name}", targets)
    agent.target_actor = other.actor

    # JAX first: torch's networks will hold gradients in the end
    jax_args = module.Args()
    state = module.init(jax_args, SPACES)
    values = {name: getattr(state, name).replace(params=to_flax(critics))}
    values |= {f"target_{name}": to_flax(targets)}
    values |= {"actor": state.actor.replace(params=to_flax(agent.actor))}
    if module is sac_jax:
        agent.log_alpha.data.fill_(-1.2)
        temperature = {"log_alpha": np.float32(-1.2)}
        values |= {"temperature": state.temperature.replace(params=temperature)}
    else:
        values |= {"target_actor": to_flax(other.actor)}
    state = jax.tree.map(jnp.array, state._replace(**values))
    more = () if module is ddpg_jax else (noise,)
    gradient = jax.grad(module.q_loss, has_aux=True)
    q_found = gradient(getattr(state, name).params, state, jax_args, Batch(*batch), *more)
    if module is sac_jax:
        gradient = jax.grad(module.policy_loss, has_aux=True)
        params = state.actor.params, state.temperature.params
        found = gradient(params, state, Batch(*batch), noise)
    else:
        gradient = jax.grad(module.actor_loss, has_aux=True)
        found = gradient(state.actor.params, state, Batch(*batch))

    tensors = [torch.as_tensor(x) for x in batch]
    update = ddpg.update_critic if module is ddpg_jax else torch_module.update_critics
    frozen = torch.optim.SGD(critics.parameters(), lr=0.0)
    losses = update(agent, frozen, args, *tensors)
    q_gradients = [x.grad.clone() for x in critics.parameters()]
    frozen = torch.optim.SGD(agent.actor.parameters(), lr=0.0)
    if module is sac_jax:
        frozen.add_param_group({"params": [agent.log_alpha]})
    policy_losses = torch_module.update_policy(agent, frozen, args, *tensors)
    wanted: Any = to_flax(agent.actor, [x.grad for x in agent.actor.parameters()])
    if module is sac_jax:
        wanted = wanted, {"log_alpha": agent.log_alpha.grad.numpy()}
    assert_same(q_found, (to_flax(critics, q_gradients), as_numpy(losses)))
    assert_same(found, (wanted, as_numpy(policy_losses)))


def as_numpy(losses: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in losses.items()}


@scripts
def test_actions_fill_the_bounds_of_each_dimension_and_stay_inside(module: ModuleType) -> None:
    settings = {} if module is sac_jax else {"exploration_noise": 0.5}
    args = module.Args(**settings)
    agent = module.Agent.from_args(SPACES, args)
    assert agent.network.low == tuple(LOW.tolist()) and agent.network.high == tuple(HIGH.tolist())
    agent.params = agent.network.init(jax.random.key(0), np.zeros((1, 4)))
    obs = 100 * np.random.default_rng(1).standard_normal((4096, 4))  # far out: tanh saturates
    for greedy in (True, False):
        actions = agent.act(obs, greedy)
        assert actions.dtype == np.float32
        assert (actions >= LOW).all() and (actions <= HIGH).all()
        assert np.allclose(actions.min(0), LOW, atol=1e-3)
        assert np.allclose(actions.max(0), HIGH, atol=1e-3)


@scripts
@pytest.mark.parametrize(
    "env_id, bound", [("Humanoid-v4", 0.4), ("Pusher-v5", 2.0), ("InvertedPendulum-v4", 3.0)]
)
def test_bounds_other_than_one(module: ModuleType, env_id: str, bound: float) -> None:
    pytest.importorskip("mujoco")
    args = module.Args(env_id=env_id, num_envs=3)
    envs = module.make_envs(args, "")
    agent = module.Agent.from_args(envs, args)
    obs, _ = envs.reset(seed=1)
    agent.params = agent.network.init(jax.random.key(0), obs)
    assert np.abs(agent.act(1e6 * obs)).max() == np.float32(bound)
    assert np.abs(agent.act(1e6 * obs, greedy=False)).max() <= np.float32(bound)
    envs.close()


@scripts
def test_evaluation_has_no_noise_and_environments_have_their_own(module: ModuleType) -> None:
    agent, obs = make_agent(module), np.zeros((2, 4))  # both see the same
    actions, greedy = agent.act(obs, greedy=False), agent.act(obs)
    assert (actions[0] != actions[1]).all()
    assert (greedy[0] == greedy[1]).all()


def make_agent(module: ModuleType) -> Any:
    args = module.Args()
    agent = module.Agent.from_args(SPACES, args)
    agent.params = module.init(args, SPACES).actor.params
    return agent


@scripts
def test_agents_act_as_the_actors_say(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, rng = make_agent(module), np.random.default_rng(1)
    obs, noise = rng.standard_normal((2, 4)), rng.standard_normal((2, 3))
    monkeypatch.setattr(np.random, "standard_normal", lambda shape: noise.reshape(shape))
    actor, params = agent.network, agent.params
    if module is sac_jax:
        sample = partial(actor.apply, params, obs, method="sample")
        assert_same(agent.act(obs, greedy=False), sample(noise)[0])
        mean, _ = actor.apply(params, obs)
        assert_same(agent.act(obs), jnp.tanh(mean) * (HIGH - LOW) / 2 + (HIGH + LOW) / 2)
    else:
        said = actor.apply(params, obs)
        assert_same(agent.act(obs), said)
        noisy = (said + 0.1 * noise * (HIGH - LOW) / 2).clip(LOW, HIGH)
        assert_same(agent.act(obs, greedy=False), noisy)


@scripts
def test_acting_is_left_to_numpy(module: ModuleType) -> None:
    """An actor that NumPy cannot compute would be compiled: correct, but slower."""
    agent = make_agent(module)
    inputs = agent.params, np.zeros((2, 4), np.float32), np.zeros((2, 3))
    assert translate(
        jax.make_jaxpr(partial(agent.network.apply, method="act"))(*inputs), len(inputs) - 1
    )


@scripts
def test_networks_start_as_those_of_torch_do(module: ModuleType) -> None:
    """Uniform within 1 / sqrt(inputs), biases as well; two critics are not the same twice."""
    state = module.init(module.Args(), SPACES)
    critics = (state.critic if module is ddpg_jax else state.critics).params
    for i, inputs in enumerate([4 + 3, 256, 256]):
        for x in critics["params"][f"Dense_{i}"].values():
            assert np.abs(x).max() <= inputs**-0.5
            if x.size > 100:
                assert np.std(x) == pytest.approx((3 * inputs) ** -0.5, rel=0.1)
    if module is not ddpg_jax:
        first, second = critics["params"]["Dense_1"]["kernel"]
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1


def make_batches() -> list[Batch]:
    """Two batches of two transitions."""
    obs = np.ones((2, 4), np.float32)
    actions = np.stack([LOW, HIGH])
    batch = Batch(obs, obs, actions, np.array([1.0, 2.0]), np.array([0.0, 1.0]))
    return [batch, batch]


def make_noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((3, 2, 3)).astype(np.float32)


@scripts
def test_policy_and_targets_move_when_they_are_due(module: ModuleType) -> None:
    args = module.Args(tau=0.25)
    state = module.init(args, SPACES)
    name = "critic" if module is ddpg_jax else "critics"
    target = f"target_{name}"
    flags = 2 if module is sac_jax else 1  # policy; targets
    update = jax.jit(partial(module.update, args), static_argnums=3)

    def params(state: Any, name: str) -> Any:
        found = getattr(state, name)
        return getattr(found, "params", found)

    new, logged = update(state, make_batches(), make_noise(0), (True,) * flags)
    wanted = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, params(state, name), params(new, name))
    assert_same(params(new, target), wanted)
    for moving in (name, "actor"):
        moved = jax.tree.map(
            lambda a, b: (a != b).any(), params(state, moving), params(new, moving)
        )
        assert all(jax.tree.leaves(moved))
    assert sum("losses/qf1_loss" in metrics for metrics in logged) == 1
    policy_steps = sum("losses/actor_loss" in metrics for metrics in logged)
    assert policy_steps == (2 if module is sac_jax else 1)

    new, logged = update(state, make_batches(), make_noise(0), (False,) * flags)
    assert_same(params(new, target), params(state, target))
    assert_same(params(new, "actor"), params(state, "actor"))
    assert not any("losses/actor_loss" in metrics for metrics in logged)


@pytest.mark.parametrize("autotune", [True, False])
def test_temperature_is_tuned_or_fixed(autotune: bool) -> None:
    args = sac_jax.Args(autotune=autotune, alpha=0.3)
    state = sac_jax.init(args, SPACES)
    before = float(state.temperature.params["log_alpha"])
    assert before == pytest.approx(0.0 if autotune else np.log(0.3))
    update = jax.jit(partial(sac_jax.update, args), static_argnums=3)
    for i in range(5):
        state, logged = update(state, make_batches(), make_noise(i), (True, True))
    # the first policies are all but random, more so than wanted: the temperature falls
    assert (float(state.temperature.params["log_alpha"]) < before - 0.005) == autotune
    if not autotune:
        assert float(logged[-1]["losses/alpha"]) == pytest.approx(0.3)


def test_memory_holds_the_newest_real_steps_and_nothing_else() -> None:
    spaces: Any = SimpleNamespace(
        num_envs=3,
        single_observation_space=gym.spaces.Box(-1, 1, (2,)),
        single_action_space=gym.spaces.Discrete(99),
    )
    memory, rng = ReplayMemory(10, spaces, collect_steps=2), np.random.default_rng(0)
    insert, seen = jax.jit(memory.insert), []
    for step in range(9):
        number = np.arange(3.0) + 3 * step  # of a transition: it is in all its fields
        real = rng.random(3) < 0.6
        obs = np.stack([number, -number], 1)
        fields = obs, obs + 0.5, number, number / 2, number % 2 == 0, real
        if step % 2:
            memory.add(*fields)
        else:  # the second of two steps is missing: nothing to remember
            memory.collect(*fields)
            memory.replay = insert(memory.replay, memory.take_collected())
        seen += number[real].tolist()
        batch = memory.sample(memory.replay, jax.random.key(step), 500)
        assert sorted(set(batch.actions.tolist())) == seen[-10:]
    assert batch.actions.dtype == jnp.int32 and len(seen) > 10
    number = np.asarray(batch.actions)
    np.testing.assert_array_equal(batch.obs, np.stack([number, -number], 1))
    np.testing.assert_array_equal(batch.next_obs, batch.obs + 0.5)
    np.testing.assert_array_equal(batch.rewards, number / 2)
    np.testing.assert_array_equal(batch.terminated, number % 2 == 0)
    counts = np.bincount(number)[np.bincount(number) > 0]
    assert counts.min() > 25  # of 50 on average: drawn uniformly
    replay = insert(memory.replay, memory.take_collected())
    assert int(replay.added) == len(seen)


def test_memory_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_jax, "free_host_memory", lambda: 2**20)
    for capacity, reason in ((1_000_000, "--buffer-size to at most"), (1, "--num-envs")):
        with pytest.raises(BadInput) as error:
            ReplayMemory(capacity, SPACES)
        assert reason in error.value.message


def test_packing_gives_back_the_tree_from_few_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Packing, "enabled_by_default", staticmethod(lambda: True))
    key = jax.random.key(3)
    tree = {
        "a": jnp.arange(6.0).reshape(2, 3),
        "b": (jnp.int32(2**30 + 1), jnp.float32(7)),
        "c": key,
    }
    packing = Packing(tree)
    vectors = packing.pack(tree)
    assert len(vectors) == 3
    numbers = {kind: x for kind, x in vectors.items() if not kind.startswith("key")}
    without_key = Packing({"a": tree["a"], "b": tree["b"]})
    assert set(numbers) == set(without_key.types)
    fetched = without_key.fetch(numbers)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(fetched))
    jax.tree.map(np.testing.assert_array_equal, fetched, {"a": tree["a"], "b": tree["b"]})
    back = packing.unpack(vectors)
    assert back.pop("c") == tree.pop("c")
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    assert back["b"][0].dtype == jnp.int32


@scripts
@pytest.mark.parametrize("packed", [False, True], ids=["cpu", "gpu"])
def test_training_in_the_background_makes_the_updates_one_by_one(
    module: ModuleType, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six of them, from packed arrays as on a GPU or not: each with a batch and noise of its own;
    then it is saved and loaded."""
    monkeypatch.setattr(Packing, "enabled_by_default", staticmethod(lambda: packed))
    args = module.Args(batch_size=4, tau=0.25)
    noises = {sac_jax: 3, td3_jax: 1, ddpg_jax: 0}[module]
    flags = 2 if module is sac_jax else 1
    functions = partial(module.init, args, SPACES), partial(module.update, args)
    memory = ReplayMemory(20, SPACES, collect_steps=3)
    training = BackgroundTraining(*functions, memory, args.batch_size, noises)
    rng = np.random.default_rng(1)

    def collect() -> None:
        obs, next_obs = rng.standard_normal((2, 2, 4))
        memory.collect(obs, next_obs, np.stack([LOW, HIGH]), rng.random(2), [0, 1], [1, 1])

    for _ in range(3):
        collect()
    state = jax.jit(functions[0])()
    replay = memory.insert(memory.replay, jnp.array(memory.state_dict()["collected"]))
    key, draw_key = jax.random.split(state.key)
    indices, noise = training._draw_many(replay, draw_key, 6)
    assert len({str(np.asarray(x)) for x in indices}) == 6
    assert noises == 0 or len({str(np.asarray(x)) for x in noise}) == 6
    update = jax.jit(functions[1], static_argnums=3)
    all_logged = []
    for i in range(6):
        batches = [memory.gather(replay, rows) for rows in indices[i]]
        state, logged = update(state, batches, noise[i], (i % 2 == 1,) * flags)
        all_logged += logged

    due = [i % 2 == 1 for i in range(6)]
    before = training.start(*[due] * flags)
    assert_same(before, jax.jit(functions[0])().actor.params)
    collect()  # meanwhile
    params = training.wait()
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(params))
    assert_same(params, state.actor.params)
    assert int(memory.replay.added) == 6
    found = training.state
    assert found.key == key
    assert_same(found._replace(key=None), state._replace(key=None))

    other_memory = ReplayMemory(20, SPACES, collect_steps=3)
    other = BackgroundTraining(*functions, other_memory, args.batch_size, noises)
    other.load_state_dict(training.state_dict())
    other_memory.load_state_dict(memory.state_dict())
    losses = training.metrics()
    assert losses == other.metrics()
    for name, mean in losses.items():
        values = [float(metrics[name]) for metrics in all_logged if name in metrics]
        assert mean == pytest.approx(np.mean(values), rel=1e-4)
    assert training.metrics() == {}
    for x in (training, other):
        x.start(*[due] * flags)
    jax.tree.map(np.testing.assert_array_equal, training.wait(), other.wait())


@pytest.mark.parametrize(
    "due", [(), (1,), (1, 2) * 4, (1, 1, 2, 1), (3, 3, 3), (1, 2, 1, 2, 1, 3), (2, 1, 1, 1, 1)]
)
def test_updates_are_made_in_order(due: tuple[int, ...]) -> None:
    """Digits tell their order and number, whether it is a loop or not."""
    step = lambda digits, seen, x, due: (10 * digits + due, 10 * seen + x)  # noqa: E731
    xs = jnp.arange(len(due))
    loop = jax.jit(partial(scan_updates, step), static_argnums=1)
    carry = loop((jnp.int32(0), jnp.int32(0)), due, xs)
    assert [f"{x:08}" for x in carry] == [f"{''.join(map(str, d)):0>8}" for d in (due, xs)]


@pytest.mark.parametrize(
    "due, found",
    [
        ("a", (1, 1)),
        ("ab" * 4, (2, 4)),
        ("aab" * 2 + "c", (3, 2)),
        ("aaaab", (1, 4)),
        ("abc", (1, 1)),
    ],
)
def test_many_updates_are_compiled_as_a_short_loop(due: str, found: tuple[int, int]) -> None:
    assert repetition(tuple(due)) == found


@scripts
def test_frequencies_that_do_not_fit_an_iteration_are_refused(module: ModuleType) -> None:
    """They would make many long programs to compile."""
    for fitting in (1, 4, 8, 80):
        module.Args(policy_frequency=fitting)
    with pytest.raises(BadInput) as error:
        module.Args(policy_frequency=3)
    assert "--policy-frequency" in error.value.message and "--learn-every" in error.value.message
