"""PPO for continuous actions where simulation stays on the GPU: tensors in, tensors out.

    python cleanrl/ppo_continuous_action_isaacgym.py --env-id Ant

With isaacgym and isaacgymenvs installed, tasks are Isaac Gym's. It is closed, made for Python 3.8
and no longer published, so that path is untested. Otherwise Brax simulates the tasks of the
same names, Ant, Humanoid and Cartpole, and its own; results are of these.
Paper: https://arxiv.org/abs/1707.06347. Every detail with its reason: docs/rl-algorithms/ppo.md
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import e, log, pi

with contextlib.suppress(ImportError):
    import isaacgym  # noqa: F401  it asks to be imported before torch
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn, optim

from cleanrl_utils.environments.jax_envs import Brax, to_gym
from cleanrl_utils.environments.torch_envs import (
    HAS_ISAAC_GYM,
    OUTCOME,
    brax_name,
    make_tensor_envs,
)
from cleanrl_utils.running.losses import Losses, clip, larger, mean_of, squared_error, stack
from cleanrl_utils.running.run import Run, TorchArgs, parse_args, require
from cleanrl_utils.running.settings import Count, NonNegative, Share
from cleanrl_utils.speed.graphs import accelerate, capture, compile


@dataclass
class Args(TorchArgs):
    env_id: str = "Ant"
    """name of the task: Isaac Gym's, or Brax's where Isaac Gym is not installed"""
    total_timesteps: Count = 30_000_000
    """number of environment steps"""
    learning_rate: NonNegative = 0.0026
    """learning rate of Adam"""
    num_envs: Count = 4096
    """number of parallel environments"""
    num_steps: Count = 16
    """number of steps per environment in a rollout"""
    anneal_lr: bool = False
    """decrease the learning rate linearly to zero"""
    gamma: Share = 0.99
    """discount factor"""
    gae_lambda: Share = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: Count = 2
    """number of minibatches per epoch"""
    update_epochs: Count = 4
    """number of epochs per update"""
    norm_adv: bool = True
    """normalise advantages per minibatch"""
    clip_coef: NonNegative = 0.2
    """clipping coefficient of the policy objective: the ratio stays within 1 ± this"""
    clip_vloss: bool = False
    """clip the value loss with the same coefficient as the policy objective"""
    ent_coef: NonNegative = 0.0
    """coefficient of the entropy bonus"""
    vf_coef: NonNegative = 2.0
    """coefficient of the value loss"""
    max_grad_norm: NonNegative = 1.0
    """maximum norm of the gradient"""
    target_kl: NonNegative | None = None
    """stop an update after the epoch in which the approximate KL divergence exceeds this"""
    reward_scaler: float = 1.0
    """factor of the rewards in training; logged returns are not scaled"""
    norm_obs: bool = not HAS_ISAAC_GYM
    """normalise observations by running statistics; off for Isaac Gym's own tasks, which are scaled
    already"""
    record_video_step_frequency: Count = 1464
    """with --capture-video, record a video every this many steps of an environment"""

    # differs from ppo_continuous_action.py: environments without arguments
    def __post_init__(self) -> None:
        super().__post_init__()
        least = 4 if self.num_envs == 1 else 2  # so that at least two steps are not resets
        require(self.num_steps >= least, f"--num-steps must be at least {least}")
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.num_iterations = self.total_timesteps // self.batch_size
        batch = f"the batch of --num-envs x --num-steps = {self.batch_size} steps"
        divides = self.batch_size % self.num_minibatches == 0
        require(divides, f"--num-minibatches must divide {batch}")
        require(self.num_iterations > 0, f"--total-timesteps must be at least {batch}")
        require(not self.env_kwargs, "--env-kwargs: Isaac Gym's environments take no arguments")


# differs from ppo_continuous_action.py: Brax's environment, for evaluation
def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one of Brax's environments to evaluate in; the first may be filmed."""

    def thunk() -> gym.Env:
        video = video_folder if capture_video and idx == 0 else None
        env = gym.wrappers.RecordEpisodeStatistics(to_gym(Brax.make(brax_name(env_id)), video))
        env.action_space.seed(seed)
        return env

    return thunk


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


# differs from ppo_continuous_action.py: 256 units per layer
def mlp(inputs: int, outputs: int, std: float) -> nn.Sequential:
    first = layer_init(nn.Linear(inputs, 256))
    second = layer_init(nn.Linear(256, 256))
    last = layer_init(nn.Linear(256, outputs), std)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


class RunningStats(nn.Module):
    """Running mean and standard deviation, saved in checkpoints and models."""

    def __init__(self, *shape: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("std", torch.ones(shape))
        self.register_buffer("count", torch.tensor(0.0, dtype=torch.float64))

    def update(self, x: Tensor) -> None:
        """Add a batch of shape (n, *shape) to the statistics (Chan, Golub and LeVeque, 1979)."""
        self.count += len(x)
        weight = len(x) / self.count
        var, mean = torch.var_mean(x, 0, correction=0)
        delta = mean - self.mean
        self.mean += weight * delta
        var = (1 - weight) * self.std.square() + weight * (var + (1 - weight) * delta.square())
        self.std.copy_(var.sqrt().clamp(min=1e-4))  # no division by 0


class Agent(nn.Module):
    """Actor and critic, two networks that share nothing."""

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__()
        num_obs = envs.single_observation_space.shape[0]
        num_actions = envs.single_action_space.shape[0]
        self.obs_stats = RunningStats(num_obs)
        self.critic = mlp(num_obs, 1, std=1.0)
        self.actor = mlp(num_obs, num_actions, std=0.01)  # small outputs at first
        self.logstd = nn.Parameter(torch.zeros(num_actions))  # the same in every state

    def normalise(self, obs: Tensor) -> Tensor:
        return ((obs - self.obs_stats.mean) / self.obs_stats.std).clamp(-10, 10)

    def act(self, obs: Tensor, greedy: bool = True) -> Tensor:
        mean = self.actor(self.normalise(obs))
        return mean if greedy else mean + self.logstd.exp() * torch.randn_like(mean)

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic(self.normalise(obs)).squeeze(-1)

    def get_logprob_entropy_value(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, ...]:
        obs = self.normalise(obs)
        z = (actions - self.actor(obs)) / self.logstd.exp()  # of an independent Gaussian
        logprob = (-0.5 * z.square() - self.logstd - 0.5 * log(2 * pi)).sum(-1)
        entropy = (self.logstd + 0.5 * log(2 * pi * e)).sum().expand_as(logprob)
        return logprob, entropy, self.critic(obs).squeeze(-1)


def gae(rewards: Tensor, values: Tensor, terminated: Tensor, done: Tensor, args: Args) -> Tensor:
    """Advantages of a rollout; all are (num_steps, num_envs), values have one row more."""
    # A truncated episode bootstraps from its last observation, which is in the next row.
    delta = rewards + args.gamma * values[1:] * (1 - terminated) - values[:-1]
    decay = args.gamma * args.gae_lambda * (1 - done)  # the sum stops at the end of an episode
    advantages = torch.empty_like(delta)
    last = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        advantages[t] = last = delta[t] + decay[t] * last
    return advantages


def update(agent: Agent, optimizer: optim.Optimizer, args: Args, *minibatch: Tensor) -> Losses:
    """One gradient step; returns the losses and diagnostics of its minibatch."""
    obs, actions, logprobs, values, advantages, returns, real = minibatch
    # Means over real transitions: steps that only reset an environment have weight 0.
    weights = real / real.sum().clamp(min=1)
    newlogprob, entropy, newvalue = agent.get_logprob_entropy_value(obs, actions)
    logratio = newlogprob - logprobs
    ratio = logratio.exp()
    if args.norm_adv:
        centred = advantages - (advantages * weights).sum()
        variance = (centred.square() * real).sum() / (real.sum() - 1).clamp(min=1)
        advantages = centred / (variance.sqrt() + 1e-8)
    clipped_ratio = clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = (larger(-advantages * ratio, -advantages * clipped_ratio) * weights).sum()

    v_error = squared_error(newvalue, returns)
    if args.clip_vloss:
        clipped_value = values + clip(newvalue - values, -args.clip_coef, args.clip_coef)
        v_error = larger(v_error, squared_error(clipped_value, returns))
    v_loss = 0.5 * (v_error * weights).sum()
    entropy = (entropy * weights).sum()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()

    losses = {
        "losses/value_loss": v_loss,
        "losses/policy_loss": pg_loss,
        "losses/entropy": entropy,
        "losses/old_approx_kl": (-logratio * weights).sum(),  # joschu.net/blog/kl-approx.html
        "losses/approx_kl": ((ratio - 1 - logratio) * weights).sum(),
        "losses/clipfrac": (((ratio - 1).abs() > args.clip_coef) * weights).sum(),
    }
    return {tag: loss.detach() for tag, loss in losses.items()}


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, None if HAS_ISAAC_GYM else make_env)
    device = run.device
    envs = make_tensor_envs(args.env_id, args.num_envs, args.seed, run)

    agent = Agent(envs).to(device)
    lr = torch.tensor(args.learning_rate, device=device)  # a tensor, as CUDA graphs need
    adam = dict(eps=1e-5, fused=True, capturable=device.type == "cuda")  # eps: openai/baselines
    optimizer = optim.Adam(agent.parameters(), lr, **adam)
    sample = accelerate(torch.no_grad()(partial(agent.act, greedy=False)), device, args)
    train = compile(partial(update, agent, optimizer, args), args)

    @partial(capture, device=device, args=args)  # an epoch is one CUDA graph
    def learn(shuffled: Tensor, *batch: Tensor) -> Losses:
        minibatches = zip(*(x[shuffled].split(args.minibatch_size) for x in batch), strict=True)
        return stack([train(*minibatch) for minibatch in minibatches])

    # differs from ppo_continuous_action.py: everything stays on the GPU
    # A rollout, (num_steps, num_envs). obs has one row more, for the value after the last step.
    shape = (args.num_steps, args.num_envs)
    num_actions = envs.single_action_space.shape[0]
    num_obs = envs.single_observation_space.shape[0]
    obs = torch.zeros(args.num_steps + 1, args.num_envs, num_obs, device=device)
    actions = torch.zeros(*shape, num_actions, device=device)
    record = torch.zeros(len(OUTCOME), *shape, device=device)

    envs.reset(args.seed)
    state = dict(agent=agent, optimizer=optimizer, envs=envs)
    start = run.resume(args.num_iterations, **state)
    next_obs = envs.observe()
    for iteration in range(start, args.num_iterations):
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1 - iteration / args.num_iterations))

        # Collect a rollout. Nothing leaves the GPU, and the CPU does not wait for it.
        for step in range(args.num_steps):
            obs[step] = next_obs
            action = sample(obs[step])
            actions[step] = action
            next_obs, record[:, step] = envs.step(action)
        obs[-1] = next_obs
        global_step = (iteration + 1) * args.batch_size

        # differs from ppo_continuous_action.py: everything stays on the GPU
        # Learn
        rewards, terminated, done, real, episodic_returns, episodic_lengths = record
        with torch.no_grad():
            logprobs, _, _ = agent.get_logprob_entropy_value(obs[:-1], actions)
            values = agent.get_value(obs)
        advantages = gae(args.reward_scaler * rewards, values, terminated, done, args)
        returns = advantages + values[:-1]
        rollout = (obs[:-1], actions, logprobs, values[:-1], advantages, returns, real)
        batch = [x.flatten(0, 1) for x in rollout]
        losses = []
        for _ in range(args.update_epochs):
            losses.append(learn(torch.randperm(args.batch_size, device=device), *batch))
            if args.target_kl is not None and losses[-1]["losses/approx_kl"][-1] > args.target_kl:
                break
        if args.norm_obs:
            agent.obs_stats.update(obs[:-1].flatten(0, 1))  # the update used the old ones

        residual = (returns - values[:-1])[real > 0]
        metrics = {"charts/learning_rate": lr} | mean_of(losses)
        metrics["losses/explained_variance"] = 1 - residual.var() / (returns[real > 0].var() + 1e-8)
        run.log_rollout(episodic_returns.cpu(), episodic_lengths.cpu(), global_step)
        run.log(metrics, global_step)
        run.evaluate(agent, global_step)
        run.checkpoint(iteration + 1)
        played = (iteration + 1) * args.num_steps
        if args.capture_video and played % args.record_video_step_frequency < args.num_steps:
            run.film(agent)

    run.finish(agent)
