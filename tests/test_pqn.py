"""PQN in torch: its targets, exploration, networks, and probes in place of EnvPool's games."""

import inspect
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from probes import see_each_picture_once
from torch import nn, optim

from cleanrl import pqn, pqn_atari_envpool, pqn_atari_envpool_lstm
from cleanrl_utils.environments import envpool as envs_module
from cleanrl_utils.running.evaluation import import_script

SCRIPTS = [pqn, pqn_atari_envpool, pqn_atari_envpool_lstm]
LEFT_AND_RIGHT = type("Envs", (), {"single_action_space": gym.spaces.Discrete(2)})


def column(numbers: list[float]) -> torch.Tensor:
    """The rollout of one environment."""
    return torch.tensor(numbers, dtype=torch.float32).unsqueeze(1)


def returns_of(*rollout: list[float], **settings: float) -> list[float]:
    args = pqn.Args(**settings)
    return pqn.q_lambda_returns(*map(column, rollout), args).squeeze(1).tolist()


# -- Q(lambda) ---------------------------------------------------------------------------------


def test_q_lambda_returns_are_those_computed_by_hand() -> None:
    """gamma 0.5, lambda 0.5; values[t + 1] is max Q of what step t led to. From the last step back:

    7: 32 + 0.5 * 6                                    = 35    the rollout ends: max Q alone
    6: 16 + 0.5 * (0.5 * 35 + 0.5 * 3)                 = 25.5
    5: resets, whatever it returns
    4: 4 + 0.5 * 10, truncated: max Q of its last obs  = 9     nothing of the steps after it
    3: 8 + 0.5 * (0.5 * 9 + 0.5 * 4)                   = 11.25
    2: resets
    1: 2, terminated                                   = 2     neither bootstrap nor step 2
    0: 1 + 0.5 * (0.5 * 2 + 0.5 * 8)                   = 3.5
    """
    rewards = [1.0, 2, 500, 8, 4, 500, 16, 32]
    terminated = [0.0, 1, 0, 0, 0, 0, 0, 0]
    done = [0.0, 1, 0, 0, 1, 0, 0, 0]
    values = [700.0, 8, 900, 800, 4, 10, 600, 3, 6]
    found = returns_of(rewards, values, terminated, done, gamma=0.5, q_lambda=0.5)
    real = [0, 1, 3, 4, 6, 7]
    assert [found[t] for t in real] == [3.5, 2, 11.25, 9, 25.5, 35]


def test_the_step_before_the_last_bootstraps_from_the_state_between_them() -> None:
    """1 + 0.5 * (0.5 * (1 + 0.5 * 8) + 0.5 * 4) = 3.25: the 4 is of the state it led to."""
    found = returns_of([1, 1], [99, 4, 8], [0, 0], [0, 0], gamma=0.5, q_lambda=0.5)
    assert found == [3.25, 5]


def test_lambda_zero_is_one_step_and_lambda_one_is_the_whole_return() -> None:
    rollout = [1, 2, 4], [99, 10, 20, 30], [0, 0, 1], [0, 0, 1]
    assert returns_of(*rollout, gamma=0.5, q_lambda=0) == [6, 12, 4]
    assert returns_of(*rollout, gamma=0.5, q_lambda=1) == [3, 4, 4]


@pytest.mark.parametrize("q_lambda", [0, 0.65, 1])
def test_q_lambda_returns_are_those_of_jax(q_lambda: float) -> None:
    pytest.importorskip("gymnax")
    import jax.numpy as jnp

    from cleanrl import pqn_jax
    from cleanrl_utils.environments.jax_envs import Step

    rng = np.random.default_rng(0)
    rewards = rng.standard_normal((20, 7)).astype(np.float32)
    values = rng.standard_normal((21, 7)).astype(np.float32)
    done = rng.random((20, 7)) < 0.3
    terminated = done & (rng.random((20, 7)) < 0.5)
    ends = terminated.astype(np.float32), done.astype(np.float32)
    rollout = map(torch.as_tensor, (rewards, values, *ends))
    found = pqn.q_lambda_returns(*rollout, pqn.Args(q_lambda=q_lambda))
    step = Step(None, *map(jnp.asarray, (rewards, *ends)), None, None)
    args = pqn_jax.Args(q_lambda=q_lambda, reward_scale=1)
    wanted = pqn_jax.q_lambda_returns(step, jnp.asarray(values[1:]), args)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


# -- acting and learning -----------------------------------------------------------------------


def test_epsilon_is_the_probability_of_a_random_action() -> None:
    torch.manual_seed(0)
    q_values = torch.tensor([0.0, 0, 1, 0]).expand(40_000, 4)
    for epsilon in (0.0, 0.3, 1.0):
        actions = pqn.epsilon_greedy(q_values, torch.tensor(epsilon))
        shares = actions.bincount(minlength=4) / len(actions)
        wanted = torch.full((4,), epsilon / 4)
        wanted[2] += 1 - epsilon
        torch.testing.assert_close(shares, wanted, atol=0.01, rtol=0)


def test_epsilon_and_learning_rate_fall(train) -> None:
    flags = "--num-envs 1 --num-steps 10 --num-minibatches 1 --update-epochs 1"
    flags += " --total-timesteps 80 --start-e 1 --end-e 0.2 --exploration-fraction 0.5"
    done = train("pqn", f"{flags} --learning-rate 0.008")
    rows = done.rows()
    epsilons = [value for _, tag, value in rows if tag == "charts/epsilon"]
    assert epsilons == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0.2])
    rates = [value for _, tag, value in rows if tag == "charts/learning_rate"]
    assert rates == pytest.approx([0.008, 0.007, 0.006, 0.005, 0.004, 0.003, 0.002, 0.001])
    assert isinstance(done.variables["optimizer"], optim.RAdam)


def small_network() -> pqn.QNetwork:
    torch.manual_seed(0)
    envs: Any = LEFT_AND_RIGHT()
    envs.single_observation_space = gym.spaces.Box(-1, 1, (3,))
    return pqn.QNetwork(envs)


def test_reset_steps_and_actions_not_taken_teach_nothing() -> None:
    gradients = []
    for garbage in (0.0, 1e3):
        network = small_network()
        optimizer = optim.RAdam(network.parameters(), torch.tensor(0.0))
        obs = torch.tensor([[1.0, 2, 3], [3, 2, 1], [garbage] * 3])
        q_values = network(obs)[:, 1].detach()
        returns = q_values + torch.tensor([1, 2, garbage])
        actions = torch.ones(3, dtype=torch.long)
        real = torch.tensor([1.0, 1, 0])
        losses = pqn.update(
            network, optimizer, pqn.Args(max_grad_norm=1e9), obs, actions, returns, real
        )
        assert losses["losses/td_loss"] == pytest.approx(2.5)  # (1 + 4) / 2
        assert losses["losses/q_values"] == pytest.approx(q_values[:2].mean())
        # half the squared error: its derivative is the mean error
        assert network[-1].bias.grad.tolist() == pytest.approx([0, -1.5])
        gradients.append([parameter.grad.clone() for parameter in network.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_the_gradient_is_clipped() -> None:
    network = small_network()
    optimizer = optim.RAdam(network.parameters(), torch.tensor(0.0))
    batch = torch.ones(2, 3), torch.zeros(2, dtype=torch.long), torch.full((2,), 1e4), torch.ones(2)
    pqn.update(network, optimizer, pqn.Args(), *batch)
    norms = [parameter.grad.norm() for parameter in network.parameters()]
    assert torch.stack(norms).norm() == pytest.approx(10, rel=1e-3)


# -- networks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_layernorm_is_between_every_hidden_layer_and_its_relu(script: Any) -> None:
    network = small_network() if script is pqn else script.QNetwork(LEFT_AND_RIGHT)
    layers = list(getattr(network, "network", network))
    weighted = [i for i, layer in enumerate(layers) if isinstance(layer, nn.Linear | nn.Conv2d)]
    hidden = weighted if hasattr(network, "network") else weighted[:-1]
    for i in hidden:
        norm, relu = layers[i + 1 : i + 3]
        assert isinstance(norm, nn.LayerNorm) and isinstance(relu, nn.ReLU)
        images = type(norm).__name__ == "ChannelNorm"
        assert images == isinstance(layers[i], nn.Conv2d)
    assert sum(isinstance(layer, nn.LayerNorm) for layer in layers) == len(hidden)


def test_images_are_normalised_over_the_channels_at_each_position() -> None:
    torch.manual_seed(0)
    norm = pqn_atari_envpool.ChannelNorm(5)
    x = torch.randn(2, 5, 3, 4).to(memory_format=torch.channels_last)
    found = norm(x)
    wanted = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(found, wanted)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_packed_episodes_have_the_q_values_of_acting_step_by_step() -> None:
    torch.manual_seed(0)
    num_steps, num_envs = 12, 5
    q_network = pqn_atari_envpool_lstm.QNetwork(LEFT_AND_RIGHT)
    obs = torch.randint(256, (num_steps, num_envs, 1, 84, 84), dtype=torch.uint8)
    first = torch.rand(num_steps, num_envs) < 0.3
    begin = state = torch.randn(2, num_envs, 128) * ~first[0].unsqueeze(-1)
    seen = torch.zeros(num_steps, num_envs, 2)
    with torch.no_grad():
        for t in range(num_steps):
            seen[t], state = q_network.step(obs[t], state, first[t])
        for columns in (torch.arange(num_envs), torch.tensor([3, 1])):
            steps, states, sizes = pqn_atari_envpool_lstm.pack(first, begin, columns)
            q_values = q_network(obs.flatten(0, 1)[steps], states, sizes)
            torch.testing.assert_close(q_values, seen.flatten(0, 1)[steps], atol=1e-4, rtol=1e-4)


def test_what_is_shared_with_ppo_is_the_same() -> None:
    """The nearest relatives, which sync compares, are those of PQN."""
    pairs = [
        ("ppo_atari_envpool", pqn_atari_envpool, ["make_env", "make_envs", "name_of_game"]),
        ("ppo_atari_lstm", pqn_atari_envpool_lstm, ["pack"]),
    ]
    for name, script, functions in pairs:
        for function in functions:
            theirs = inspect.getsource(getattr(import_script(name), function))
            assert inspect.getsource(getattr(script, function)) == theirs


# -- probes as EnvPool would step them ---------------------------------------------------------


class ProbePool(gym.vector.SyncVectorEnv):
    """Probes of images in place of games, with EnvPool's interface."""

    def __init__(self, task: str, num_envs: int, seed: int, stack_num: int = 4, **rules: bool):
        assert rules == {"episodic_life": True, "reward_clip": True}
        self.first_seed = seed
        gray = gym.spaces.Box(0, 255, (84, 84), np.uint8)

        def one() -> gym.Env:
            env = gym.make(f"probes:Probe{task.removesuffix('-v5')}Pixels-v0")
            env = gym.wrappers.TransformObservation(env, lambda pixels: pixels[..., 0], gray)
            return gym.wrappers.FrameStackObservation(env, stack_num)

        super().__init__([one] * num_envs)

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset(seed=self.first_seed)

    def step(self, actions: Any) -> Any:
        *rest, infos = super().step(actions)
        infos["elapsed_step"] = np.array([env.unwrapped.t for env in self.envs])
        return *rest, infos


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs_module, "make_pool", ProbePool)
    see_each_picture_once(monkeypatch)


PROBE = "--gamma 0.8 --num-minibatches 1 --learning-rate 0.001 --checkpoints 0"


def best_values(variables: dict[str, Any], cues: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """The best actions of first observations and their Q-values."""
    q_network = variables["q_network"]
    frames = variables["obs"].shape[2]
    obs = torch.zeros(len(cues), frames, 84, 84, dtype=torch.uint8)
    for row, cue in zip(obs, cues, strict=True):
        row[..., :42] = int(127.5 - 127.5 * cue)
        row[..., 42:] = int(127.5 + 127.5 * cue)
    with torch.no_grad():
        if hasattr(q_network, "step"):
            first = torch.ones(len(cues), dtype=torch.bool)
            q_values, _ = q_network.step(obs, q_network.initial_state(len(cues)), first)
        else:
            q_values = q_network(obs)
    best, actions = q_values.max(-1)
    return best, actions


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_it_finds_the_best_actions_and_their_values(script: Any, train, probes: None) -> None:
    name = script.__name__.split(".")[-1]
    done = train(
        name, f"--env-id Both-v5 --total-timesteps 800 --num-envs 4 --num-steps 10 {PROBE}"
    )
    values, actions = best_values(done.variables, [-1, 1])
    assert actions.tolist() == [0, 1]
    assert values.tolist() == pytest.approx([1, 1], abs=0.1)
    assert isinstance(done.variables["optimizer"], optim.RAdam)


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_truncated_episodes_bootstrap(script: Any, train, probes: None) -> None:
    """1 / (1 - gamma) = 5; it would be 3.4 if they did not."""
    name = script.__name__.split(".")[-1]
    flags = "--total-timesteps 1400 --num-envs 4 --num-steps 10"
    done = train(name, f"--env-id Truncation-v5 {flags} {PROBE}")
    values, _ = best_values(done.variables, [1])
    assert values.item() == pytest.approx(5, rel=0.1)


def test_only_the_lstm_remembers(train, probes: None) -> None:
    """The last of five actions must repeat the cue of the first: chance is a return of 0.5."""
    flags = f"--env-id Memory-v5 {PROBE} --num-envs 16 --num-steps 12 --no-anneal-lr"
    done = train("pqn_atari_envpool_lstm", f"{flags} --total-timesteps 5760 --update-epochs 8")
    returns = [value for _, tag, value in done.rows() if tag == "charts/episodic_return"]
    assert np.mean(returns[-100:]) > 0.9
    # An episode takes five steps, the sixth resets; what follows it is the first of the next one.
    assert np.array_equal(np.flatnonzero(done.variables["first"][:, 0]) % 6, [0, 0, 0])
    assert np.array_equal(np.flatnonzero(done.variables["real"][:, 0] == 0), [5, 11])

    done = train("pqn_atari_envpool", f"{flags} --total-timesteps 1920 --update-epochs 2")
    returns = [value for _, tag, value in done.rows() if tag == "charts/episodic_return"]
    assert 0.3 < np.mean(returns[-100:]) < 0.7


def test_new_games_after_a_checkpoint_begin_without_memory(train, probes: None) -> None:
    flags = "--env-id Lengths-v5 --num-envs 2 --num-steps 8 --num-minibatches 1 --update-epochs 1"
    last = partial(train, "pqn_atari_envpool_lstm")
    done = last(f"{flags} --total-timesteps 16 --checkpoints 0").variables
    assert not done["first"][-1].any()  # the games go on
    done = last(f"{flags} --total-timesteps 32 --checkpoints 2").variables
    assert done["first"][0].all() and not done["states"][0].any()


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, flags, says",
    [
        ("pqn", "--num-envs 3 --num-steps 5", "--num-minibatches must divide the batch"),
        ("pqn", "--total-timesteps 100", "--total-timesteps must be at least"),
        ("pqn", "--env-id Pendulum-v1", "use sac_continuous_action.py"),
        ("pqn_atari_envpool", "--num-minibatches 3", "--num-minibatches must divide the batch"),
        ("pqn_atari_envpool_lstm", "--num-envs 6", "--num-minibatches must divide --num-envs"),
        ("pqn_atari_envpool_lstm", "--compile", "--compile is not for this script"),
    ],
)
def test_what_cannot_be_is_one_line(name: str, flags: str, says: str, train, capfd) -> None:
    with pytest.raises(SystemExit) as stop:
        train(name, flags)
    lines = capfd.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and len(lines) == 1 and says in lines[0], lines
