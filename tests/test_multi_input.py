"""ppo_multi_input.py: an encoder for each part of an observation, and several actions."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from cleanrl import ppo_multi_input
from cleanrl_utils.environments.spaces import FlattenParts, count_choices, parts_of
from cleanrl_utils.environments.vector import SyncVectorEnv

BYTES = gym.spaces.Box(0, 255, (6, 5, 3), np.uint8)
CHANNELS_FIRST = gym.spaces.Box(0, 1, (2, 9, 7), np.float32)
GRAY = gym.spaces.Box(0, 255, (8, 4), np.uint8)
VECTOR = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
NESTED = gym.spaces.Tuple(
    (VECTOR, gym.spaces.Dict(b=gym.spaces.Discrete(4), a=BYTES, c=gym.spaces.MultiBinary(2)))
)


class Anything(gym.Env):
    """Random observations and no reward, for any spaces."""

    def __init__(self, seen: gym.Space, actions: gym.Space):
        self.observation_space = seen
        self.action_space = actions

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.shown = self.observation_space.sample()
        return self.shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert action in self.action_space, action
        return self.observation_space.sample(), 0.0, False, True, {}


def make_agent(seen: gym.Space, actions: gym.Space) -> tuple[ppo_multi_input.Agent, Any]:
    envs = gym.vector.SyncVectorEnv([lambda: FlattenParts(Anything(seen, actions))] * 2)
    torch.manual_seed(1)
    return ppo_multi_input.Agent(envs), envs


class Growing(gym.Env):
    """Observations without a fixed shape: one number more with each step."""

    observation_space = gym.spaces.Sequence(gym.spaces.Discrete(9))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.seen: tuple = ()
        return self.seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.seen += (action,)
        return self.seen, 0.0, False, False, {}


def test_observations_without_a_shape_are_those_of_the_last_step() -> None:
    envs = SyncVectorEnv([Growing] * 2)
    assert envs.reset(seed=1)[0] == ((), ())
    assert envs.step(np.array([0, 1]))[0] == ((0,), (1,))
    assert envs.step(np.array([1, 1]))[0] == ((0, 1), (1, 1))


class Reusing(gym.Env):
    """Counts its steps in one array that it returns each time, of more bits than its space has."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, in_dict: bool):
        self.in_dict = in_dict
        self.observation_space = gym.spaces.Dict(x=VECTOR) if in_dict else VECTOR
        self.count = np.zeros(3)

    def seen(self) -> Any:
        return {"x": self.count} if self.in_dict else self.count

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.count[:] = 0
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.count += 1
        steps = self.count[0]
        return self.seen(), float(steps), bool(steps == 3), bool(steps == 3), {}


@pytest.mark.parametrize("in_dict", [False, True])
def test_each_step_returns_arrays_of_its_own(in_dict: bool) -> None:
    envs = SyncVectorEnv([partial(Reusing, in_dict)] * 2)
    envs.reset(seed=1)
    steps = [envs.step(np.zeros(2, int)) for _ in range(4)]  # the last one resets
    for count, (obs, rewards, terminated, truncated, _) in zip([1, 2, 3, 0], steps, strict=True):
        x = obs["x"] if in_dict else obs
        assert x.dtype == np.float32 and (x == count).all() and (rewards == count).all()
        assert (terminated == (count == 3)).all() and (truncated == (count == 3)).all()


def test_parts_are_found_in_the_order_in_which_they_are_flattened() -> None:
    vector, *rest = parts_of(NESTED)
    assert vector == VECTOR and rest == list(NESTED[1].spaces.values())
    assert sum(gym.spaces.flatdim(part) for part in parts_of(NESTED)) == 3 + 4 + 90 + 2


@pytest.mark.parametrize("space", [BYTES, CHANNELS_FIRST, GRAY])
def test_an_encoder_gets_the_picture_that_was_flattened(space: gym.spaces.Box) -> None:
    seen = gym.spaces.Dict(a=VECTOR, b=space)
    agent, envs = make_agent(seen, gym.spaces.Discrete(2))
    obs, _ = envs.reset(seed=1)
    got: list[torch.Tensor] = []
    agent.encoders[1][0].register_forward_hook(lambda module, x, output: got.append(output))
    agent.features(torch.as_tensor(obs))
    picture = envs.envs[0].unwrapped.shown["b"]
    wanted = np.atleast_3d(picture)
    wanted = wanted if space is CHANNELS_FIRST else wanted.transpose(2, 0, 1)
    scale = 1 if space is CHANNELS_FIRST else 255
    np.testing.assert_allclose(got[0][0], wanted / scale, rtol=1e-5)
    np.testing.assert_array_equal(obs[0, :3], envs.envs[0].unwrapped.shown["a"])


def test_each_part_has_an_encoder_of_its_kind() -> None:
    agent, envs = make_agent(NESTED, gym.spaces.Discrete(2))
    kinds = [type(encoder[0]).__name__ for encoder in agent.encoders]
    assert sorted(kinds) == ["Linear", "Linear", "Linear", "Unflatten"]
    obs, _ = envs.reset(seed=1)
    features = agent.features(torch.as_tensor(obs).float()[None])
    assert features.shape == (1, 2, 4 * 64)
    # a change of one part changes the features of its encoder only
    changed = torch.as_tensor(obs).float()
    changed[:, :3] += 1
    different = (agent.features(changed) != features[0]).any(0).view(4, 64).any(1)
    assert different.tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    "actions, choices",
    [
        (gym.spaces.Discrete(3), [3]),
        (gym.spaces.MultiDiscrete([2, 4]), [2, 4]),
        (gym.spaces.MultiDiscrete([[2, 3], [4, 2]]), [2, 3, 4, 2]),
        (gym.spaces.MultiBinary(3), [2, 2, 2]),
        (gym.spaces.MultiBinary((2, 2)), [2, 2, 2, 2]),
    ],
)
def test_several_actions_are_independent(actions: gym.Space, choices: list[int]) -> None:
    agent, envs = make_agent(gym.spaces.Dict(x=VECTOR), actions)
    torch.nn.init.normal_(agent.actor[-1].weight)
    assert count_choices(actions) == choices
    obs = torch.as_tensor(envs.reset(seed=1)[0]).float()
    taken = agent.act(obs, greedy=False)
    assert taken.shape == (2, *actions.shape)
    envs.step(taken.numpy())  # the environments check that they are in their space
    logprob, entropy, _ = agent.get_logprob_entropy_value(obs, taken)
    logits = agent.actor(agent.features(obs)).split(choices, -1)
    heads = [Categorical(logits=x) for x in logits]
    chosen = taken.view(2, len(choices))
    wanted = sum(head.log_prob(chosen[:, i]) for i, head in enumerate(heads))
    torch.testing.assert_close(logprob, wanted)
    torch.testing.assert_close(entropy, sum(head.entropy() for head in heads))
    best = torch.stack([x.argmax(-1) for x in logits], -1)
    assert torch.equal(agent.act(obs).view(2, -1), best)


@pytest.mark.parametrize("actions", ["", "Binary"])
def test_it_reads_picture_and_vector(actions: str, train) -> None:
    env_id = f"cleanrl_utils.environments.examples:LookAndListen{actions}-v0"
    flags = f"--env-id {env_id} --total-timesteps 8192 --learning-rate 0.002 --gamma 0"
    done = train("ppo_multi_input", f"{flags} --num-steps 64 --save-model --eval-episodes 5")
    returns = [value for _, tag, value in done.rows() if tag == "eval/episodic_return"]
    assert np.mean(returns) > 9  # of 10; one part alone is worth at most 7.5, or 8.3 if binary


@pytest.mark.parametrize(
    "name, env_id, says",
    [
        ("ppo_multi_input", "Pendulum-v1", "use ppo_continuous_action.py"),
        ("ppo", "probes:ProbeOddMultiDiscrete-v0", "use ppo_multi_input.py"),
        (
            "dqn",
            "cleanrl_utils.environments.examples:LookAndListenBinary-v0",
            "use ppo_multi_input",
        ),
        (
            "ppo_atari",
            "cleanrl_utils.environments.examples:LookAndListen-v0",
            "use ppo_multi_input",
        ),
        ("ppo_multi_input", "test_multi_input:Words-v0", "observations of Text"),
    ],
)
def test_scripts_that_do_not_fit_name_the_one_that_does(name, env_id, says, train, capfd) -> None:
    with pytest.raises(SystemExit) as stop:
        train(name, f"--env-id {env_id}")
    lines = [x for x in capfd.readouterr().err.splitlines() if x.startswith("error: ")]
    assert stop.value.code == 2 and len(lines) == 1 and says in lines[0], lines


def test_flattened_pictures_of_a_dictionary_are_noted(train, capfd) -> None:
    with pytest.raises(SystemExit):
        train("ppo", "--env-id cleanrl_utils.environments.examples:LookAndListen-v0")
    said = capfd.readouterr().err
    assert "note: " in said and "ppo_multi_input.py has an encoder for each part" in said


words = {"seen": gym.spaces.Dict(x=gym.spaces.Text(5)), "actions": gym.spaces.Discrete(2)}
gym.register("Words-v0", Anything, kwargs=words)
