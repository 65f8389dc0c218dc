"""Recurrent PPO for vectors: memory, masks, both kinds of actions; environments that need it."""

import dataclasses
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from probe_cases import learn_probe
from probes import GAMMA
from table import SCRIPTS
from torch import nn
from torch.distributions import Categorical, Normal

from cleanrl_utils.environments.making import make
from cleanrl_utils.environments.memory import TMaze
from cleanrl_utils.running.evaluation import import_script
from cleanrl_utils.speed.sequences import run_sequences

script = import_script("ppo_recurrent")
OURS = "cleanrl_utils.environments.memory"
MASKED = "cleanrl_utils.environments.examples:MostlyInvalid-v0"
QUICK = "--num-envs 4 --num-steps 16 --num-minibatches 2 --total-timesteps 256 --checkpoints 0"


def agent_of(num_obs: int, actions: gym.Space, cell: str = "gru") -> Any:
    torch.manual_seed(0)
    space = gym.spaces.Box(-1, 1, (num_obs,), np.float32)
    envs = type("Envs", (), {"single_observation_space": space, "single_action_space": actions})
    return script.Agent(envs, script.Args(cell=cell))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_sequences_in_one_call_are_the_loop_over_steps(kind: type) -> None:
    torch.manual_seed(0)
    num_steps, num_envs = 12, 5
    rnn = kind(3, 4)
    features = torch.randn(num_steps, num_envs, 3, requires_grad=True)
    first = torch.rand(num_steps, num_envs) < 0.3
    first[:, 1] = False  # one environment continues its episode to the end
    first[0, 2] = first[-1, 3] = True
    begin = torch.randn(1 if kind is nn.GRU else 2, num_envs, 4)

    state = begin
    rows = []
    for t in range(num_steps):
        state = state * ~first[t].unsqueeze(-1)
        row, state = rnn(features[t : t + 1], state if kind is nn.GRU else state.split(1))
        state = state if kind is nn.GRU else torch.cat(state)
        rows.append(row[0])
    wanted = torch.stack(rows)
    weights = torch.randn_like(wanted)
    gradient = torch.autograd.grad((wanted * weights).sum(), features)[0]

    hidden, last = run_sequences(rnn, features, begin, first)
    torch.testing.assert_close(hidden, wanted)
    torch.testing.assert_close(last, state)
    found = torch.autograd.grad((hidden * weights).sum(), features)[0]
    torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_new_episode_begins_without_memory(cell: str) -> None:
    agent = agent_of(3, gym.spaces.Box(-1, 1, (2,), np.float32), cell)
    obs = torch.randn(2, 3)
    state = torch.randn_like(agent.initial_state(2))
    first = torch.tensor([True, False])
    actions, after = agent.act(obs, state, first)
    fresh_actions, fresh = agent.act(obs, agent.initial_state(2), first)
    assert torch.equal(after[:, 0], fresh[:, 0]) and torch.equal(actions[0], fresh_actions[0])
    assert not torch.equal(after[:, 1], fresh[:, 1])
    assert len(after) == (1 if cell == "gru" else 2)


def test_log_probabilities_of_discrete_actions_with_masks() -> None:
    agent = agent_of(2 + 3, gym.spaces.Discrete(3))
    hidden = torch.randn(4, 5, 64)
    mask = torch.tensor([1.0, 0.0, 1.0])
    obs = torch.cat([torch.randn(4, 5, 2), mask.expand(4, 5, 3)], -1)
    actions = 2 * torch.randint(2, (4, 5))
    logprob, entropy, value = agent.get_logprob_entropy_value(hidden, obs, actions)
    valid = Categorical(logits=agent.actor(hidden)[..., [0, 2]])  # as if there were only these
    torch.testing.assert_close(logprob, valid.log_prob(actions // 2))
    torch.testing.assert_close(entropy, valid.entropy())
    torch.testing.assert_close(value, agent.critic(hidden)[..., 0])
    # the mask decides what is valid, and nothing else
    unmasked = torch.cat([obs[..., :2], torch.ones(4, 5, 3)], -1)
    state, first = agent.initial_state(5), torch.ones(4, 5, dtype=torch.bool)
    assert torch.equal(*(agent.remember(x, state, first)[0] for x in (obs, unmasked)))
    assert all((agent.act(obs[0], state, first[0], greedy=False)[0] != 1).all() for _ in range(20))


def test_log_probabilities_of_continuous_actions() -> None:
    agent = agent_of(3, gym.spaces.Box(-1, 1, (2,), np.float32))
    agent.logstd.data = torch.tensor([0.5, -1.0])
    hidden, actions = torch.randn(4, 5, 64), torch.randn(4, 5, 2)
    policy = Normal(agent.actor(hidden), agent.logstd.exp())
    logprob, entropy, _ = agent.get_logprob_entropy_value(hidden, torch.zeros(4, 5, 3), actions)
    torch.testing.assert_close(logprob, policy.log_prob(actions).sum(-1))
    torch.testing.assert_close(entropy, policy.entropy().sum(-1))


@pytest.mark.parametrize("env_id", [f"{OURS}:TMaze-v0", f"{OURS}:PendulumNoVel-v1", MASKED])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_the_first_gradient_finds_the_policy_that_acted(env_id: str, cell: str, train) -> None:
    """The ratio is 1 before the first gradient step if the update sees the same past and masks."""
    flags = f"--env-id {env_id} --cell {cell} {QUICK} --num-minibatches 1 --update-epochs 1"
    rows = train("ppo_recurrent", f"{flags} --learning-rate 0.01 --no-anneal-lr").rows()
    divergences = [value for _, tag, value in rows if tag.endswith("approx_kl")]
    assert len(divergences) == 8 and np.allclose(divergences, 0, atol=1e-5)
    assert {value for _, tag, value in rows if tag == "losses/clipfrac"} == {0.0}


def test_it_remembers_across_rollouts(train) -> None:
    """The cue is four steps back, in another rollout; chance solves half of twenty episodes."""
    flags = f"--env-id probes:ProbeMemory-v0 --gamma {GAMMA} --num-envs 64 --num-steps 4"
    flags += " --num-minibatches 2 --learning-rate 0.005 --reward-scale 1 --save-model"
    flags += " --eval-episodes 20 --checkpoints 2"
    done = train("ppo_recurrent", f"{flags} --total-timesteps 25600")
    returns = [value for _, tag, value in done.rows() if tag == "eval/episodic_return"]
    assert len(returns) >= 1 and np.mean(returns) == 1


def test_invalid_actions_are_never_taken(train) -> None:
    """The environment raises an error if they are, in training and in evaluation."""
    done = train("ppo_recurrent", f"--env-id {MASKED} {QUICK} --save-model --eval-episodes 2")
    assert done.variables["agent"].num_obs == 80


def test_it_learns_values_and_continuous_actions(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (row,) = [row for row in SCRIPTS if row.name == "ppo_recurrent"]
    row = dataclasses.replace(row, probe_suffix="Continuous", discrete=False)
    assert learn_probe(row, "Both") < 1


def test_rewards_are_scaled(train) -> None:
    flags = f"--env-id probes:ProbeConstant-v0 {QUICK} --gamma 0"
    ones = train("ppo_recurrent", flags + " --reward-scale 3").variables["returns"]
    assert np.allclose(ones[ones > 2.5], 3)
    assert (ones > 2.5).sum() == ones.numel() / 2  # every other step is a reset


BAD = {
    "--num-minibatches 3": "--num-minibatches must divide --num-envs",
    "--cell rnn": "--cell",
    "--compile": "--compile",
    "--env-id probes:ProbeOddMultiDiscrete-v0": "this script needs Discrete or Box",
    f"--env-id {OURS}:TMaze-v0 --env-kwargs length=0": "length must be at least 1",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_line(flags: str, train, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        train("ppo_recurrent", f"--num-envs 4 {flags}")
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and len(lines) == 1 and BAD[flags] in lines[0], lines


# -- environments -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["CartPoleNoVel-v1", "PendulumNoVel-v1", "TMaze-v0"])
def test_the_environments_keep_the_rules(name: str) -> None:
    env = make(f"{OURS}:{name}")
    assert env.reset(seed=1)[0] in env.observation_space
    assert env.step(env.action_space.sample())[0] in env.observation_space
    if name == "TMaze-v0":  # the others are Gymnasium's
        check_env(env.unwrapped, skip_render_check=True)


@pytest.mark.parametrize("name, kept", [("CartPole", [0, 2]), ("Pendulum", [0, 1])])
def test_only_the_velocities_are_missing(name: str, kept: list[int]) -> None:
    whole, part = make(f"{name}-v1"), make(f"{OURS}:{name}NoVel-v1")
    assert part.observation_space.shape == (2,)
    assert np.array_equal(whole.reset(seed=3)[0][kept], part.reset(seed=3)[0])
    steps = 0
    done = False
    while not done:
        action = whole.action_space.sample() if name == "Pendulum" else steps % 2
        wanted = whole.step(action)
        found = part.step(action)
        assert np.array_equal(wanted[0][kept], found[0]) and wanted[1:4] == found[1:4]
        done = wanted[2] or wanted[3]
        steps += 1
    assert steps == 200 or name == "CartPole"


def test_the_way_to_turn_is_shown_once() -> None:
    env = TMaze(length=3)
    shown = set()
    for seed in range(8):
        obs, _ = env.reset(seed=seed)
        right = obs[1] == 1
        shown.add(bool(right))
        assert obs.tolist() == [not right, right, 1, 0]
        for action in (1, 2, 0, 0):  # turning in the corridor does nothing
            obs, reward, terminated, truncated, _ = env.step(action)
            assert obs.tolist() == [0, 0, 1, 0] and not (reward or terminated or truncated)
        assert env.step(0)[0].tolist() == [0, 0, 0, 1]  # the junction
        assert env.step(0)[0].tolist() == [0, 0, 0, 1]  # its wall
        turn = int(seed % 2) + 1
        _, reward, terminated, truncated, _ = env.step(turn)
        assert terminated and not truncated and reward == (turn == (2 if right else 1))
        assert env.render().shape == (48, 64, 3)
    assert shown == {True, False}
    env.reset(seed=1)
    ends = [env.step(1)[3] for _ in range(30)]
    assert ends == [False] * 29 + [True]
