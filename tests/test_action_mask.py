"""ppo_action_mask.py: where masks come from, and the policy over valid actions."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from cleanrl import ppo_action_mask
from cleanrl_utils.environments.masks import MaskInObservation
from cleanrl_utils.speed.numpy_networks import numpy_method

DOCUMENTED = (
    "--env-id cleanrl_utils.environments.examples:MostlyInvalid-v0 --gamma 0.4"
    " --total-timesteps 5000 --num-steps 250 --learning-rate 3e-3 --no-anneal-lr"
    " --update-epochs 10 --num-minibatches 20 --gae-lambda 0"
)


class Masks(gym.Env):
    """Two actions of three and two choices; an invalid one is an error, the best valid one counts.

    `source` says where the masks are: in the observation, in infos, in a method, or as a tuple.
    """

    metadata = {"render_modes": []}

    def __init__(self, source: str, broken: str = "", render_mode: str | None = None):
        self.source = source
        self.broken = broken
        self.action_space = gym.spaces.MultiDiscrete([3, 2])
        seen = gym.spaces.Box(-1, 1, (2,), np.float32)
        mask = gym.spaces.MultiBinary(5)
        both = gym.spaces.Dict(observation=seen, action_mask=mask)
        self.observation_space: gym.Space = both if source == "observation" else seen
        if source == "method":
            self.action_masks = lambda: self.mask

    def observe(self, ended: bool = False) -> tuple[Any, dict]:
        heads = [np.ones(3, np.int8), np.ones(2, np.int8)]
        heads[0][self.np_random.integers(3)] = 0
        heads[1][self.np_random.integers(2)] = 0
        if ended or (self.broken == "empty" and self.t == 2):
            heads[1][:] = 0  # no valid action: after the end, none is needed
        if ended:
            heads[0][:] = 0
        self.heads = heads
        self.mask = np.concatenate(heads)
        if self.broken == "short" and self.t == 2:
            self.mask = self.mask[:4]
        obs = np.array([1, -0.5], np.float32)
        if self.source == "observation":
            return {"observation": obs, "action_mask": self.mask}, {}
        info = {"infos": {"action_mask": self.mask}, "tuple": {"action_mask": tuple(heads)}}
        if ended and self.source == "infos":
            return obs, {}  # some environments give none at the end
        return obs, info.get(self.source, {})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe()

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        best = [np.flatnonzero(head)[-1] for head in self.heads]
        valid = [head[choice] for head, choice in zip(self.heads, action, strict=True)]
        assert all(valid), "an invalid action"
        self.t += 1
        obs, info = self.observe(ended=self.t == 4)
        return obs, float(np.mean(action == best)), self.t == 4, False, info


gym.register("Masks-v0", Masks)
SOURCES = ["observation", "infos", "tuple", "method"]


@pytest.mark.parametrize("source", SOURCES)
def test_a_mask_is_the_end_of_the_observation(source: str) -> None:
    env = MaskInObservation(gym.make("Masks-v0", source=source))
    assert env.observation_space.shape == (7,)
    obs, _ = env.reset(seed=1)
    for _ in range(4):
        assert obs.dtype == np.float32 and obs in env.observation_space
        assert obs.tolist() == [1, -0.5, *np.concatenate(env.unwrapped.heads)]
        heads = env.unwrapped.heads
        obs, _, terminated, _, _ = env.step([np.argmax(head) for head in heads])
    assert terminated and obs.tolist() == [1, -0.5, 1, 1, 1, 1, 1]  # all zeros, or none given


@pytest.mark.parametrize("source", SOURCES)
def test_masks_of_every_source_hold_in_training_and_evaluation(source: str, train) -> None:
    flags = f"--env-id test_action_mask:Masks-v0 --env-kwargs source={source} --gamma 0.5"
    flags += " --total-timesteps 4096 --num-steps 64 --learning-rate 0.01 --ent-coef 0"
    done = train("ppo_action_mask", f"{flags} --save-model --eval-episodes 5 --eval-frequency 2048")
    assert [v for _, tag, v in done.rows() if tag == "eval/episodic_return"][-5:] == [4.0] * 5
    assert done.variables["actions"].shape == (64, 4, 2)


def test_a_mask_may_come_from_a_wrapper_and_under_another_name() -> None:
    class ValidActions(gym.Wrapper):
        def valid_action_mask(self) -> list[bool]:
            return [True, False]

    env = gym.wrappers.TimeLimit(ValidActions(gym.make("CartPole-v1")), 5)
    obs, _ = MaskInObservation(env).reset(seed=1)
    assert obs[4:].tolist() == [1, 0]


@pytest.mark.parametrize(
    "flags, status, says",
    [
        ("--env-id CartPole-v1", 2, "CartPole-v1 has no action masks"),
        (
            "--env-id Pendulum-v1",
            2,
            "needs Discrete or MultiDiscrete: use ppo_continuous_action.py",
        ),
        ("--env-id probes:ProbeOddFromOne-v0", 2, "start at 1"),
        ("--env-kwargs source=infos broken=empty", 1, "no valid action in head 1"),
        ("--env-kwargs source=method broken=short", 1, "4 entries: its 5 actions"),
    ],
)
def test_missing_and_wrong_masks_are_one_line(flags, status, says, train, capfd) -> None:
    flags = flags if "--env-id" in flags else f"--env-id test_action_mask:Masks-v0 {flags}"
    with pytest.raises(SystemExit) as stop:
        train("ppo_action_mask", f"{flags} --total-timesteps 512")
    lines = [x for x in capfd.readouterr().err.splitlines() if x.startswith("error: ")]
    assert stop.value.code == status and len(lines) == 1 and says in lines[0], lines


def make_agent(source: str = "infos") -> ppo_action_mask.Agent:
    args = ppo_action_mask.Args(env_id="Masks-v0", env_kwargs=[f"source={source}"])
    torch.manual_seed(1)
    agent = ppo_action_mask.Agent(ppo_action_mask.make_envs(args, ""))
    torch.nn.init.normal_(agent.actor[-1].weight)  # far from uniform
    return agent


def test_probabilities_and_entropy_are_those_of_the_valid_actions() -> None:
    agent = make_agent()
    mask = torch.tensor([1.0, 0, 1, 1, 1])
    obs = torch.cat([torch.tensor([0.3, -0.8]), mask])
    actions = torch.tensor([2, 0])
    logprob, entropy, value = agent.get_logprob_entropy_value(obs[None], actions[None])
    logits = agent.actor(obs[:2])
    heads = [Categorical(logits=logits[[0, 2]]), Categorical(logits=logits[3:])]
    torch.testing.assert_close(
        logprob[0], heads[0].log_prob(torch.tensor(1)) + heads[1].log_prob(actions[1])
    )
    torch.testing.assert_close(entropy[0], heads[0].entropy() + heads[1].entropy())
    torch.testing.assert_close(value, agent.critic(obs[None, :2])[:, 0])


def test_invalid_actions_get_no_gradient_and_no_probability() -> None:
    agent = make_agent()
    obs = torch.tensor([[0.3, -0.8, 1, 0, 1, 0, 1]]).repeat(500, 1)
    sampled = agent.act(obs, greedy=False)
    assert set(sampled[:, 0].tolist()) == {0, 2} and set(sampled[:, 1].tolist()) == {1}
    logprob, entropy, _ = agent.get_logprob_entropy_value(obs, sampled)
    (logprob + entropy).sum().backward()
    bias = agent.actor[-1].bias.grad
    assert (bias[[1, 3]] == 0).all() and (bias[[0, 2]] != 0).all() and bias.isfinite().all()
    only = torch.tensor([[0.3, -0.8, 0, 1, 0, 0, 1]])  # one valid action: no entropy, no gradient
    agent.zero_grad()
    logprob, entropy, _ = agent.get_logprob_entropy_value(only, agent.act(only))
    (logprob + entropy).sum().backward()
    assert logprob.item() == entropy.item() == 0 and not agent.actor[-1].bias.grad.any()


def test_numpy_acts_as_torch_does() -> None:
    """A single discrete action is computed by NumPy in the rollout."""
    args = ppo_action_mask.Args(env_id="probes:ProbeBothMasked-v0")
    envs = ppo_action_mask.make_envs(args, "")
    obs, _ = envs.reset(seed=1)
    agent = ppo_action_mask.Agent(envs)
    greedy = numpy_method(agent, "act", greedy=True)
    sample = numpy_method(agent, "act", greedy=False)
    assert greedy is not None and sample is not None
    assert greedy(obs).tolist() == agent.act(torch.as_tensor(obs)).tolist()
    taken = np.stack([sample(obs) for _ in range(100)])
    for row, actions in zip(obs, taken.T, strict=True):
        assert set(actions.tolist()) == set(np.flatnonzero(row[1:]).tolist())


def test_a_mask_changes_nothing_but_the_policy() -> None:
    """The network does not see the mask, only its policy is restricted by it."""
    agent = make_agent()
    few, all_valid = torch.tensor([[0.3, -0.8, 1, 0, 1, 0, 1], [0.3, -0.8, 1, 1, 1, 1, 1]])
    assert agent.get_value(few) == agent.get_value(all_valid)
    torch.testing.assert_close(agent.get_logits(all_valid), agent.actor(all_valid[:2]))


def test_the_known_test_of_masking(train) -> None:
    """80 actions, 60 of them invalid: at least 90 of 100 after 5,000 steps."""
    done = train("ppo_action_mask", f"{DOCUMENTED} --save-model --eval-episodes 20")
    returns = [value for _, tag, value in done.rows() if tag == "eval/episodic_return"]
    assert len(returns) == 20 and np.mean(returns) >= 90
