"""Robust Policy Optimization (RPO): PPO whose update adds noise to the mean action.

    python cleanrl/rpo_continuous_action.py --env-id dm_control/walker-walk-v0

Paper: https://arxiv.org/abs/2212.07536. Every detail with its reason: docs/rl-algorithms/rpo.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import e, log, pi
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn, optim

from cleanrl_utils.environments.making import make, require_spaces
from cleanrl_utils.environments.vector import SyncVectorEnv
from cleanrl_utils.running.losses import Losses, clip, larger, mean_of, squared_error, stack
from cleanrl_utils.running.run import Run, TorchArgs, parse_args, require
from cleanrl_utils.running.settings import Count, NonNegative, Share
from cleanrl_utils.speed.acting import Sampler
from cleanrl_utils.speed.graphs import capture, compile


@dataclass
class Args(TorchArgs):
    env_id: str = "HalfCheetah-v4"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 8_000_000
    """number of environment steps"""
    learning_rate: NonNegative = 3e-4
    """learning rate of Adam"""
    num_envs: Count = 1
    """number of parallel environments"""
    num_steps: Count = 2048
    """number of steps per environment in a rollout"""
    anneal_lr: bool = True
    """decrease the learning rate linearly to zero"""
    gamma: Share = 0.99
    """discount factor"""
    gae_lambda: Share = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: Count = 32
    """number of minibatches per epoch"""
    update_epochs: Count = 10
    """number of epochs per update"""
    norm_adv: bool = True
    """normalise advantages per minibatch"""
    clip_coef: NonNegative = 0.2
    """clipping coefficient of the policy objective: the ratio stays within 1 ± this"""
    clip_vloss: bool = True
    """clip the value loss with the same coefficient as the policy objective"""
    ent_coef: NonNegative = 0.0
    """coefficient of the entropy bonus"""
    vf_coef: NonNegative = 0.5
    """coefficient of the value loss"""
    max_grad_norm: NonNegative = 0.5
    """maximum norm of the gradient"""
    target_kl: NonNegative | None = None
    """stop an update after the epoch in which the approximate KL divergence exceeds this"""
    rpo_alpha: NonNegative = 0.5
    """the update adds uniform noise in [-alpha, alpha] to the mean action; 0 is PPO"""

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


def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment; the first of them may be filmed."""

    def thunk() -> gym.Env:
        env = make(env_id, video_folder if capture_video and idx == 0 else None, **env_kwargs)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        if len(env.observation_space.shape or ()) != 1:  # dicts, images: one vector each
            env = gym.wrappers.FlattenObservation(env)
        if isinstance(env.action_space, gym.spaces.Box):  # the learner keeps what it sampled
            env = gym.wrappers.ClipAction(env)
        env.action_space.seed(seed)
        return env

    return thunk


def make_envs(args: Args, video_folder: str) -> gym.vector.VectorEnv:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored."""
    kwargs = args.env_settings | {"capture_video": args.capture_video, "video_folder": video_folder}
    thunks = [make_env(args.env_id, args.seed + i, i, **kwargs) for i in range(args.num_envs)]
    return SyncVectorEnv(thunks)


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, outputs: int, std: float) -> nn.Sequential:
    first = layer_init(nn.Linear(inputs, 64))
    second = layer_init(nn.Linear(64, 64))
    last = layer_init(nn.Linear(64, outputs), std)
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


# differs from ppo_continuous_action.py: uniform noise on the mean in the update
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

    def get_logprob_entropy_value(
        self, obs: Tensor, actions: Tensor, alpha: float = 0.0
    ) -> tuple[Tensor, ...]:
        obs = self.normalise(obs)
        mean = self.actor(obs)
        mean = mean + torch.empty_like(mean).uniform_(-alpha, alpha)  # alpha is 0 except in update
        z = (actions - mean) / self.logstd.exp()  # of an independent Gaussian
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


# differs from ppo_continuous_action.py: passes the noise's range
def update(agent: Agent, optimizer: optim.Optimizer, args: Args, *minibatch: Tensor) -> Losses:
    """One gradient step; returns the losses and diagnostics of its minibatch."""
    obs, actions, logprobs, values, advantages, returns, real = minibatch
    # Means over real transitions: steps that only reset an environment have weight 0.
    weights = real / real.sum().clamp(min=1)
    newlogprob, entropy, newvalue = agent.get_logprob_entropy_value(obs, actions, args.rpo_alpha)
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
    run = Run(args, make_env)
    device = run.device
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Box, "ppo.py")

    agent = Agent(envs).to(device)
    lr = torch.tensor(args.learning_rate, device=device)  # a tensor, as CUDA graphs need
    adam = dict(eps=1e-5, fused=True, capturable=device.type == "cuda")  # eps: openai/baselines
    optimizer = optim.Adam(agent.parameters(), lr, **adam)
    return_stats = RunningStats()
    sample = Sampler(agent, device, args)
    train = compile(partial(update, agent, optimizer, args), args)

    @partial(capture, device=device, args=args)  # an epoch is one CUDA graph
    def learn(shuffled: Tensor, *batch: Tensor) -> Losses:
        minibatches = zip(*(x[shuffled].split(args.minibatch_size) for x in batch), strict=True)
        return stack([train(*minibatch) for minibatch in minibatches])

    # A rollout, (num_steps, num_envs). obs has one row more, for the value after the last step.
    obs = np.zeros((args.num_steps + 1, *envs.observation_space.shape), np.float32)
    actions = np.zeros((args.num_steps, *envs.action_space.shape), np.float32)
    record = np.zeros((4, args.num_steps, args.num_envs), np.float32)
    discounted = np.zeros_like(record[0])  # returns of the open episodes so far
    envs.reset(seed=args.seed)
    state = dict(agent=agent, optimizer=optimizer, envs=envs)
    state |= dict(returns=return_stats, discounted=discounted)
    start = run.resume(args.num_iterations, **state)
    for iteration in range(start, args.num_iterations):
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1 - iteration / args.num_iterations))

        # Collect a rollout. Only actions are needed now; the rest is computed in one batch below.
        sample.fetch()
        for step in range(args.num_steps):
            obs[step] = envs.obs
            actions[step] = sample(obs[step])
            real = ~envs.ended  # the step after an episode's end only resets
            _, reward, term, trunc, infos = envs.step(actions[step])
            record[:, step] = reward, term, term | trunc, real
            global_step = iteration * args.batch_size + (step + 1) * args.num_envs
            run.log_episodes(infos, global_step)
        obs[-1] = envs.obs

        # Learn
        rewards, terminated, done, real = torch.as_tensor(record)
        for t in range(args.num_steps):  # discounted[-1] is the last of the rollout before
            discounted[t] = record[0, t] + args.gamma * discounted[t - 1] * record[3, t]
        return_stats.update(torch.as_tensor(discounted)[real > 0])
        rewards = (rewards / return_stats.std).clamp(-10, 10)  # only their size changes
        seen = torch.as_tensor(obs, device=device)
        taken = torch.as_tensor(actions, device=device)
        with torch.no_grad():
            logprobs, _, values = agent.get_logprob_entropy_value(seen[:-1], taken)
            values = torch.cat([values, agent.get_value(seen[-1:])]).cpu()  # gae is CPU work
        advantages = gae(rewards, values, terminated, done, args)
        returns = advantages + values[:-1]
        rollout = (seen[:-1], taken, logprobs, values[:-1], advantages, returns, real)
        batch = [x.flatten(0, 1).to(device) for x in rollout]
        losses = []
        for _ in range(args.update_epochs):
            losses.append(learn(torch.randperm(args.batch_size, device=device), *batch))
            if args.target_kl is not None and losses[-1]["losses/approx_kl"][-1] > args.target_kl:
                break
        agent.obs_stats.update(seen[:-1].flatten(0, 1))  # the update used the old ones

        residual = (returns - values[:-1])[real > 0]
        metrics = {"charts/learning_rate": lr} | mean_of(losses)
        metrics["losses/explained_variance"] = 1 - residual.var() / (returns[real > 0].var() + 1e-8)
        run.log(metrics, global_step)
        run.evaluate(agent, global_step)
        run.checkpoint(iteration + 1)

    run.finish(agent)
