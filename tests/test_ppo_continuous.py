"""PPO and RPO for continuous actions: normalisation, clipping, and RPO's blurred means."""

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch

from cleanrl import ppo_continuous_action, rpo_continuous_action
from cleanrl_utils.running.evaluation import load_model

TINY = "--num-envs 2 --num-minibatches 1 --update-epochs 1 --gamma 0.9 --checkpoints 0"


def test_running_statistics_are_those_of_all_batches_together() -> None:
    random = np.random.default_rng(1)
    data = random.normal(50, [0.1, 1, 30], (1000, 3))
    data[600:] -= 20  # the policy has changed, and with it what it sees
    stats = ppo_continuous_action.RunningStats(3)
    for batch in np.split(data, [1, 7, 300, 600]):
        stats.update(torch.as_tensor(batch, dtype=torch.float32))
    np.testing.assert_allclose(stats.mean, data.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats.std, data.std(0), rtol=1e-4)
    assert stats.count == 1000


def test_observations_of_all_environments_are_counted_once(train, monkeypatch) -> None:
    seen: list[np.ndarray] = []

    def observe(probe: probes.Probe) -> np.ndarray:
        seen.append(probe.np_random.normal(5, 2, 1).astype(np.float32))
        return seen[-1]

    monkeypatch.setattr(probes.Probe, "observe", observe)
    env_id = "probes:ProbeTruncationContinuous-v0"
    done = train("ppo_continuous_action", f"--env-id {env_id} --total-timesteps 240 {TINY} "
                 "--num-steps 30 --save-model --eval-episodes 1")  # fmt: skip
    obs = np.concatenate(seen[:240])  # what came after belongs to a rollout that never was
    model = done.folder / "ppo_continuous_action.cleanrl_model"
    agent, *_ = load_model(model, env_id=env_id)
    np.testing.assert_allclose(agent.obs_stats.mean, obs.mean(), rtol=1e-5)
    np.testing.assert_allclose(agent.obs_stats.std, obs.std(), rtol=1e-4)
    far = torch.tensor([[1e6], [-1e6], [obs.mean()]], dtype=torch.float32)
    np.testing.assert_allclose(agent.normalise(far).flatten(), [10, -10, 0], atol=1e-4)


def test_rewards_are_scaled_by_the_returns_without_reset_steps(train) -> None:
    env_id = "probes:ProbeTruncationContinuous-v0"  # 5 steps of reward 1, then a reset step
    flags = f"--env-id {env_id} --total-timesteps 240 --num-steps 30 {TINY}"
    variables = train("ppo_continuous_action", flags).variables
    returns = np.cumsum(0.9 ** np.arange(5))  # 1, 1.9, 2.71 ...
    np.testing.assert_allclose(variables["return_stats"].std, returns.std(), rtol=1e-5)
    assert variables["return_stats"].count == 200
    scaled = variables["rewards"][variables["real"] > 0]
    np.testing.assert_allclose(scaled, 1 / returns.std(), rtol=1e-5)


def test_environments_get_clipped_actions_and_the_learner_unclipped_ones(train, monkeypatch):
    got: list[float] = []
    reward = probes.Action.reward
    monkeypatch.setattr(
        probes.Action, "reward", lambda self, action: got.append(action) or reward(self, action)
    )
    flags = f"--env-id probes:ProbeActionContinuous-v0 --total-timesteps 256 --num-steps 128 {TINY}"
    variables = train("ppo_continuous_action", flags).variables
    actions, real = variables["taken"][..., 0], variables["real"] > 0
    assert actions.abs().max() > 2  # about one in twenty of a standard normal
    np.testing.assert_allclose(sorted(got), sorted(actions[real].clamp(-2, 2).tolist()), rtol=1e-6)


def test_log_probabilities_and_entropy_are_those_of_independent_gaussians() -> None:
    envs = ppo_continuous_action.make_envs(ppo_continuous_action.Args(env_id="Pendulum-v1"), "")
    agent = ppo_continuous_action.Agent(envs)
    agent.logstd.data += 0.3
    obs, actions = torch.randn(5, 2, 3), torch.randn(5, 2, 1)
    logprob, entropy, value = agent.get_logprob_entropy_value(obs, actions)
    wanted = torch.distributions.Normal(agent.act(obs), agent.logstd.exp())
    torch.testing.assert_close(logprob, wanted.log_prob(actions).sum(-1))
    torch.testing.assert_close(entropy, wanted.entropy().sum(-1))
    torch.testing.assert_close(value, agent.get_value(obs))


def test_rpo_blurs_means_uniformly_when_told() -> None:
    envs = rpo_continuous_action.make_envs(rpo_continuous_action.Args(env_id="Pendulum-v1"), "")
    agent = rpo_continuous_action.Agent(envs)
    obs, actions = torch.randn(2000, 3), torch.full((2000, 1), 9.0)
    sharp, *_ = agent.get_logprob_entropy_value(obs, actions)
    blurred, *_ = agent.get_logprob_entropy_value(obs, actions, 0.5)
    # of a unit Gaussian, log p(9) = constant - (9 - mean)**2 / 2
    distance = [torch.sqrt(-2 * (x.detach() + 0.5 * np.log(2 * np.pi))) for x in (sharp, blurred)]
    noise = distance[0] - distance[1]
    assert -0.501 < noise.min() < -0.49 and 0.49 < noise.max() < 0.501
    assert abs(noise.mean()) < 0.05


@pytest.mark.parametrize(
    "script, flags, moved",
    [
        ("ppo_continuous_action", "", False),
        ("rpo_continuous_action", "", True),
        ("rpo_continuous_action", "--rpo-alpha 0", False),
    ],
)
def test_the_first_gradient_step_starts_from_the_policy_that_acted(script, flags, moved, train):
    flags = f"--env-id Pendulum-v1 --total-timesteps 512 --num-steps 64 {TINY} {flags}"
    kl = [value for _, tag, value in train(script, flags).rows() if tag == "losses/approx_kl"]
    assert len(kl) == 4
    assert min(kl) > 0.01 if moved else max(np.abs(kl)) < 1e-6


@pytest.mark.parametrize(
    "env_id, package",
    [
        ("HalfCheetah-v4", "mujoco"),
        ("Pusher-v5", "mujoco"),
        ("dm_control/ball_in_cup-catch-v0", "dm_control"),
        ("dm_control/cartpole-balance-v0", "dm_control"),
        ("dm_control/walker-walk-v0", "dm_control"),
    ],
)
def test_mujoco_and_dm_control_run_and_repeat_themselves(env_id, package, train) -> None:
    pytest.importorskip(package)
    flags = f"--env-id {env_id} --total-timesteps 512 --num-steps 128 {TINY}"
    first, second = (train("ppo_continuous_action", flags, name) for name in ("a", "b"))
    assert first.rows() == second.rows() and len(first.rows()) > 0
    assert np.array_equal(first.variables["obs"], second.variables["obs"])
    assert isinstance(first.variables["envs"].single_action_space, gym.spaces.Box)


def test_discrete_actions_are_sent_to_the_other_script(train, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        train("ppo_continuous_action", "--env-id CartPole-v1")
    assert stopped.value.code == 2 and "use ppo.py" in capsys.readouterr().err
