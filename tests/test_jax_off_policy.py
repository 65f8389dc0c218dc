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
from cleanrl_utils.speed.jax_tools import Packing, in_turn, means, repetition

LOW, HIGH = np.array([-0.4, 0.0, -3.0], np.float32), np.array([0.4, 5.0, -1.0], np.float32)
SPACES: Any = SimpleNamespace(
    num_envs=2,
    single_observation_space=gym.spaces.Box(-1, 1, (4,), np.float32),
    single_action_space=gym.spaces.Box(LOW, HIGH),
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
    values = {name: to_flax(critics), f"target_{name}": to_flax(targets)}
    if module is sac_jax:
        agent.log_alpha.data.fill_(-1.2)
        values["policy"] = {"actor": to_flax(agent.actor), "log_alpha": np.float32(-1.2)}
    else:
        values |= {"actor": to_flax(agent.actor), "target_actor": to_flax(other.actor)}
    nothing = dict.fromkeys(module.Train._fields)
    train = jax.tree.map(jnp.array, module.Train(**(nothing | values)))
    learner = module.Learner(module.Args(), SPACES)
    gradient = jax.grad(learner.q_loss, has_aux=True)
    more = () if module is ddpg_jax else (noise,)
    q_found = gradient(getattr(train, name), train, Batch(*batch), *more)
    if module is sac_jax:
        gradient = jax.grad(learner.policy_loss, has_aux=True)
        found = gradient(train.policy, train, Batch(*batch), noise)
    else:
        gradient = jax.grad(learner.actor_loss, has_aux=True)
        found = gradient(train.actor, train, Batch(*batch))

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
        wanted = {"actor": wanted, "log_alpha": agent.log_alpha.grad.numpy()}
    q_losses = torch.stack(list(losses.values())).numpy()
    assert_same(q_found, (to_flax(critics, q_gradients), q_losses))
    of_policy = torch.stack(list(policy_losses.values())).numpy()
    assert_same(found, (wanted, of_policy.reshape(found[1].shape)))


@scripts
def test_actions_fill_the_bounds_of_each_dimension_and_stay_inside(module: ModuleType) -> None:
    settings = {} if module is sac_jax else {"exploration_noise": 0.5}
    args = module.Args(**settings)
    agent = module.Agent.from_args(SPACES, args)
    assert agent.actor.low == tuple(LOW.tolist()) and agent.actor.high == tuple(HIGH.tolist())
    agent.params = agent.actor.init(jax.random.key(0), np.zeros((1, 4)))
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
    agent.params = agent.actor.init(jax.random.key(0), obs)
    assert np.abs(agent.act(1e6 * obs)).max() == np.float32(bound)
    assert np.abs(agent.act(1e6 * obs, greedy=False)).max() <= np.float32(bound)
    envs.close()


@scripts
def test_evaluation_has_no_noise_and_environments_have_their_own(module: ModuleType) -> None:
    learner, train, _ = init(module)
    params = train.policy["actor"] if module is sac_jax else train.actor
    agent, obs = module.Agent(learner.actor, params), np.zeros((2, 4))  # both see the same
    actions, greedy = agent.act(obs, greedy=False), agent.act(obs)
    assert (actions[0] != actions[1]).all()
    assert (greedy[0] == greedy[1]).all()


@scripts
def test_agents_in_numpy_are_the_actors_in_flax(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, train, _ = init(module)
    params = train.policy["actor"] if module is sac_jax else train.actor
    agent, rng = module.Agent(learner.actor, jax.device_get(params)), np.random.default_rng(1)
    obs, noise = rng.standard_normal((2, 4)), rng.standard_normal((2, 3))
    monkeypatch.setattr(np.random, "standard_normal", lambda shape: noise.reshape(shape))
    if module is sac_jax:
        sample = partial(agent.actor.apply, params, obs, method="sample")
        assert_same(agent.act(obs, greedy=False), sample(noise)[0])
        mean, _ = agent.actor.apply(params, obs)
        assert_same(agent.act(obs), jnp.tanh(mean) * (HIGH - LOW) / 2 + (HIGH + LOW) / 2)
    else:
        said = agent.actor.apply(params, obs)
        assert_same(agent.act(obs), said)
        noisy = (said + 0.1 * noise * (HIGH - LOW) / 2).clip(LOW, HIGH)
        assert_same(agent.act(obs, greedy=False), noisy)


@scripts
def test_networks_start_as_those_of_torch_do(module: ModuleType) -> None:
    """Uniform within 1 / sqrt(inputs), biases as well; two critics are not the same twice."""
    train = init(module)[1]
    critics = train.critic if module is ddpg_jax else train.critics
    for i, inputs in enumerate([4 + 3, 256, 256]):
        for x in critics["params"][f"Dense_{i}"].values():
            assert np.abs(x).max() <= inputs**-0.5
            if x.size > 100:
                assert np.std(x) == pytest.approx((3 * inputs) ** -0.5, rel=0.1)
    if module is not ddpg_jax:
        first, second = critics["params"]["Dense_1"]["kernel"]
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1


def init(module: ModuleType, **settings: Any) -> tuple[Any, Any, Any]:
    """Learner, its state, and memory of one step."""
    learner = module.Learner(module.Args(buffer_size=10, batch_size=4, **settings), SPACES)
    memory, obs = learner.memory, np.ones((2, 4), np.float32)
    page = memory.page(obs, obs, np.stack([LOW, HIGH]), [1, 2], [False, True], [True, True])
    train = jax.jit(learner.init)(obs)
    return learner, train, memory.insert(memory.init(), jnp.array(page))


def one_chance(learner: Any, replay: Any, seed: int) -> Any:
    """What one update leaves to chance."""
    drawn = learner.chance(replay, jax.random.key(seed), 1)
    return jax.tree.map(lambda x: x[0], drawn)


@scripts
def test_policy_and_targets_move_when_told_to(module: ModuleType) -> None:
    learner, train, replay = init(module, tau=0.25)
    nothing = jnp.zeros((2, len(module.TAGS)))
    name = "critic" if module is ddpg_jax else "critics"
    target, policy = f"target_{name}", "policy" if module is sac_jax else "actor"
    flags = 2 if module is sac_jax else 1  # update the policy; move the targets
    update = jax.jit(learner.update, static_argnums=(4, 5)[:flags])
    chance = one_chance(learner, replay, 0)

    new, losses = update(replay, train, nothing, chance, *[True] * flags)
    wanted = jax.tree.map(
        lambda a, b: 0.75 * a + 0.25 * b, getattr(train, name), getattr(new, name)
    )
    assert_same(getattr(new, target), wanted)
    for moving in (name, policy):
        moved = jax.tree.map(
            lambda a, b: (a != b).any(), getattr(train, moving), getattr(new, moving)
        )
        assert all(jax.tree.leaves(moved))
    counts = dict(zip(module.TAGS, np.asarray(losses[1]), strict=True))
    assert counts["losses/qf1_loss"] == 1
    assert counts["losses/actor_loss"] == (2 if module is sac_jax else 1)

    new, losses = update(replay, train, nothing, chance, *[False] * flags)
    assert_same(getattr(new, target), getattr(train, target))
    assert_same(getattr(new, policy), getattr(train, policy))
    assert "losses/actor_loss" not in means(module.TAGS, losses)


@pytest.mark.parametrize("autotune", [True, False])
def test_temperature_is_tuned_or_fixed(autotune: bool) -> None:
    learner, train, replay = init(sac_jax, autotune=autotune, alpha=0.3)
    before = float(train.policy["log_alpha"])
    assert before == pytest.approx(0.0 if autotune else np.log(0.3))
    losses = jnp.zeros((2, len(sac_jax.TAGS)))
    update = jax.jit(learner.update, static_argnums=(4, 5))
    for turn in range(5):
        chance = one_chance(learner, replay, turn)
        train, losses = update(replay, train, losses, chance, True, True)
    # the first policies are all but random, more so than wanted: the temperature falls
    assert (float(train.policy["log_alpha"]) < before - 0.005) == autotune
    if not autotune:
        assert means(sac_jax.TAGS, losses)["losses/alpha"] == pytest.approx(0.3)


def test_memory_holds_the_newest_real_steps_and_nothing_else() -> None:
    spaces: Any = SimpleNamespace(
        num_envs=3,
        single_observation_space=gym.spaces.Box(-1, 1, (2,)),
        single_action_space=gym.spaces.Discrete(99),
    )
    memory, rng = ReplayMemory(10, spaces), np.random.default_rng(0)
    replay, insert, seen = memory.init(), jax.jit(memory.insert, donate_argnums=0), []
    for turn in range(9):
        number = np.arange(3.0) + 3 * turn  # of a step: it is in all its parts
        real = rng.random(3) < 0.6
        obs = np.stack([number, -number], 1)
        page = memory.page(obs, obs + 0.5, number, number / 2, number % 2 == 0, real)
        pages = memory.pages(2)  # of which the second stays as it is: nothing to remember
        pages[0] = page
        replay = insert(replay, page if turn % 2 else pages)
        seen += number[real].tolist()
        batch = memory.sample(replay, jax.random.key(turn), 500)
        assert sorted(set(batch.actions.tolist())) == seen[-10:]
    assert batch.actions.dtype == jnp.int32 and len(seen) > 10
    number = np.asarray(batch.actions)
    np.testing.assert_array_equal(batch.obs, np.stack([number, -number], 1))
    np.testing.assert_array_equal(batch.next_obs, batch.obs + 0.5)
    np.testing.assert_array_equal(batch.rewards, number / 2)
    np.testing.assert_array_equal(batch.terminated, number % 2 == 0)
    counts = np.bincount(number)[np.bincount(number) > 0]
    assert counts.min() > 25  # of 50 on average: drawn uniformly
    replay = insert(replay, memory.pages(3))
    assert int(replay.added) == len(seen)


def test_memory_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_jax, "free_host_memory", lambda: 2**20)
    for capacity, reason in ((1_000_000, "--buffer-size to at most"), (1, "--num-envs")):
        with pytest.raises(BadInput) as error:
            ReplayMemory(capacity, SPACES)
        assert reason in error.value.message


def test_packing_gives_back_the_tree_in_few_arrays() -> None:
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
    few = Packing({"a": tree["a"], "b": tree["b"]})
    assert set(numbers) == set(few.types)
    jax.tree.map(
        np.testing.assert_array_equal, few.fetch(numbers), {"a": tree["a"], "b": tree["b"]}
    )
    back = packing.unpack(vectors)
    assert back.pop("c") == tree.pop("c")
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    assert back["b"][0].dtype == jnp.int32


@scripts
def test_a_call_of_the_learner_is_the_updates_of_its_turns(module: ModuleType) -> None:
    """From few arrays, as on a GPU: what it does to them is what the updates do to the tree."""
    learner, train, replay = init(module)
    nothing, packing = jnp.zeros((2, len(module.TAGS))), Packing(train)
    flags = 2 if module is sac_jax else 1
    due = ((False,) * flags, (True,) * flags) * 3  # a loop of two
    pages = learner.memory.pages(3)
    pages[1] = 0.5  # one turn that was real, of both environments
    rows = jnp.array(pages[1])
    update = jax.jit(learner.update, static_argnums=(4, 5)[:flags])
    wanted, sums, after = train, nothing, learner.memory.insert(replay, rows)
    key, chance_key = jax.random.split(train.key)
    chances = jax.jit(learner.chance, static_argnums=2)(after, chance_key, 6)
    for i, which in enumerate(due):
        chance = jax.tree.map(lambda x, i=i: x[i], chances)
        wanted, sums = update(after, wanted, sums, chance, *which)
    actor_of = (lambda x: x.policy["actor"]) if module is sac_jax else (lambda x: x.actor)
    actor_packing = Packing(actor_of(train))

    @partial(jax.jit, static_argnums=4, donate_argnums=(0, 2))  # as the scripts have it on a GPU
    def program(vectors: Any, *rest: Any) -> tuple:
        new, losses, replay = learner.learn(packing.unpack(vectors), *rest)
        return packing.pack(new), losses, replay, actor_packing.pack(actor_of(new))

    vectors, losses, replay, actor = program(packing.pack(train), nothing, replay, pages, due)
    found, actor = packing.unpack(vectors), actor_packing.fetch(actor)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(actor))
    assert_same(actor, actor_of(wanted))
    assert_same(found._replace(key=None), wanted._replace(key=None))
    assert found.key == key
    for x in jax.tree.leaves(chances):  # each update has its own
        assert len({str(np.asarray(one)) for one in x}) == 6
    assert_same(losses, sums)
    assert int(replay.added) == 4 and np.asarray(losses[1]).max() == 6


@pytest.mark.parametrize(
    "due", [(), (1,), (1, 2) * 4, (1, 1, 2, 1), (3, 3, 3), (1, 2, 1, 2, 1, 3), (2, 1, 1, 1, 1)]
)
def test_in_turn_takes_each_in_its_turn(due: tuple[int, ...]) -> None:
    """Digits tell their order and number, whether it is a loop or not."""
    step = lambda digits, seen, x, which: (10 * digits + which, 10 * seen + x)  # noqa: E731
    which, xs = tuple((digit,) for digit in due), jnp.arange(len(due))
    loop = jax.jit(partial(in_turn, step), static_argnums=1)
    carry = loop((jnp.int32(0), jnp.int32(0)), which, xs)
    assert [f"{x:08}" for x in carry] == [f"{''.join(map(str, d)):0>8}" for d in (due, xs)]


@pytest.mark.parametrize(
    "parts, found",
    [
        ("a", (1, 1)),
        ("ab" * 4, (2, 4)),
        ("aab" * 2 + "c", (3, 2)),
        ("aaaab", (1, 4)),
        ("abc", (1, 1)),
    ],
)
def test_a_long_call_is_compiled_as_a_short_loop(parts: str, found: tuple[int, int]) -> None:
    assert repetition(tuple(parts)) == found


@scripts
def test_what_acts_must_do_what_learns_says(module: ModuleType) -> None:
    """Agent.act repeats Actor in NumPy: who changes one of them alone is told."""
    learner, train, _ = init(module)
    params = jax.device_get(train.policy["actor"] if module is sac_jax else train.actor)
    agent = module.Agent(learner.actor, params)
    assert learner.agrees_with(agent)
    name = "sample" if module is sac_jax else "act"
    setattr(agent, name, lambda *inputs: 0.9 * getattr(module.Agent, name)(agent, *inputs))
    assert not learner.agrees_with(agent)


@scripts
def test_frequencies_that_do_not_fit_a_call_are_refused(module: ModuleType) -> None:
    """They would make many long programs to compile."""
    for fitting in (1, 4, 8, 80):
        module.Args(policy_frequency=fitting)
    with pytest.raises(BadInput) as error:
        module.Args(policy_frequency=3)
    assert "--policy-frequency" in error.value.message and "--learn-every" in error.value.message
