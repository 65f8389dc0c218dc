"""Proximal Policy Optimization (PPO) for Procgen, games whose levels are new each time.

    python cleanrl/ppo_procgen.py --env-id starpilot

Paper: https://arxiv.org/abs/1707.06347. Every detail with its reason: docs/rl-algorithms/ppo.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn, optim

from cleanrl_utils.environments.envpool import Pool, make_one_of_pool
from cleanrl_utils.running.losses import Losses, clip, larger, mean_of, squared_error, stack
from cleanrl_utils.running.run import LargeArgs, Run, parse_args, require
from cleanrl_utils.running.settings import Count, NonNegative, Share
from cleanrl_utils.speed.graphs import accelerate, capture, compile, to_device


@dataclass
class Args(LargeArgs):
    env_id: str = "starpilot"
    """game of Procgen, with easy levels; others by EnvPool's id, e.g. StarpilotHard-v0"""
    total_timesteps: Count = 25_000_000
    """number of environment steps"""
    learning_rate: NonNegative = 5e-4
    """learning rate of Adam"""
    num_envs: Count = 64
    """number of parallel environments"""
    num_steps: Count = 256
    """number of steps per environment in a rollout"""
    anneal_lr: bool = False
    """decrease the learning rate linearly to zero"""
    gamma: Share = 0.999
    """discount factor"""
    gae_lambda: Share = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: Count = 8
    """number of minibatches per epoch"""
    update_epochs: Count = 3
    """number of epochs per update"""
    norm_adv: bool = True
    """normalise advantages per minibatch"""
    clip_coef: NonNegative = 0.2
    """clipping coefficient of the policy objective: the ratio stays within 1 ± this"""
    clip_vloss: bool = True
    """clip the value loss with the same coefficient as the policy objective"""
    ent_coef: NonNegative = 0.01
    """coefficient of the entropy bonus"""
    vf_coef: NonNegative = 0.5
    """coefficient of the value loss"""
    max_grad_norm: NonNegative = 0.5
    """maximum norm of the gradient"""
    target_kl: NonNegative | None = None
    """stop an update after the epoch in which the approximate KL divergence exceeds this"""

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


# differs from ppo_atari_envpool.py: only for evaluation, one of EnvPool's
def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment for evaluation; the first of them may be filmed."""

    def thunk() -> gym.Env:
        folder = video_folder if capture_video and idx == 0 else None
        env = gym.wrappers.RecordEpisodeStatistics(make_one_of_pool(task_of(env_id), folder))
        env.action_space.seed(seed)
        return env

    return thunk


def task_of(env_id: str) -> str:
    """EnvPool's name: starpilot is StarpilotEasy-v0."""
    return env_id if "-v" in env_id else f"{env_id.capitalize()}Easy-v0"


# differs from ppo_atari_envpool.py: Procgen's games
def make_envs(args: Args) -> Pool:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored."""
    envs = Pool(task_of(args.env_id), args.num_envs, args.seed, **args.env_settings)
    space = envs.single_observation_space
    actions = envs.single_action_space
    images = space.dtype == np.uint8 and len(space.shape or ()) == 3
    fits = images and isinstance(actions, gym.spaces.Discrete)
    require(fits, f"--env-id {args.env_id}: this script needs images and discrete actions")
    return envs


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


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


class Residual(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int):
        super().__init__()
        convs = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        self.layers = nn.Sequential(nn.ReLU(), convs[0], nn.ReLU(), convs[1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def impala(channels: int, height: int, width: int) -> nn.Sequential:
    """The larger network of IMPALA, https://arxiv.org/abs/1802.01561, without its LSTM."""
    layers: list[nn.Module] = []
    for outputs in (16, 32, 32):
        conv = nn.Conv2d(channels, outputs, 3, padding=1)
        pool = nn.MaxPool2d(3, stride=2, padding=1)  # halves, and rounds up
        layers += [conv, pool, Residual(outputs), Residual(outputs)]
        channels = outputs
        height = (height + 1) // 2
        width = (width + 1) // 2
    last = nn.Linear(channels * height * width, 256)
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), last, nn.ReLU())


# differs from ppo_atari_envpool.py: IMPALA's residual network
class Agent(nn.Module):
    """Actor and critic, two heads on one residual network."""

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__()
        self.network = impala(*envs.single_observation_space.shape)
        self.critic = layer_init(nn.Linear(256, 1), std=1.0)
        # nearly uniform at first
        self.actor = layer_init(nn.Linear(256, envs.single_action_space.n), std=0.01)

    def forward(self, obs: Tensor) -> tuple[Tensor, ...]:
        """Log-probabilities of all actions, and the value; obs: bytes, (n, 3, 64, 64)."""
        pixels = obs.to(memory_format=torch.channels_last) / 255  # faster in this order
        features = self.network(pixels)
        return self.actor(features).log_softmax(-1), self.critic(features).squeeze(-1)

    def act(self, obs: Tensor, greedy: bool = True) -> Tensor:
        return self.act_logprob_value(obs, greedy)[0]

    def act_logprob_value(self, obs: Tensor, greedy: bool = False) -> tuple[Tensor, ...]:
        """Actions, their log-probabilities and the values."""
        logprobs, value, *_ = self(obs)
        scores = logprobs
        if not greedy:  # Gumbel-max: the argmax of logits plus Gumbel noise is a sample of softmax
            scores = logprobs - torch.empty_like(logprobs).exponential_().log()
        actions = scores.argmax(-1)
        return actions, logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1), value

    def get_value(self, obs: Tensor) -> Tensor:
        return self(obs)[1]

    def get_logprob_entropy_value(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, ...]:
        logprobs, value, *_ = self(obs)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1), entropy, value


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
    run = Run(args, make_env)
    device = run.device
    envs = make_envs(args)

    agent = Agent(envs).to(device)
    lr = torch.tensor(args.learning_rate, device=device)  # a tensor, as CUDA graphs need
    adam = dict(eps=1e-5, fused=True, capturable=device.type == "cuda")  # eps: openai/baselines
    optimizer = optim.Adam(agent.parameters(), lr, **adam)
    return_stats = RunningStats()
    sample = accelerate(torch.no_grad()(agent.act_logprob_value), device, args)
    train = compile(partial(update, agent, optimizer, args), args)

    @partial(capture, device=device, args=args)  # an epoch is one CUDA graph
    def learn(shuffled: Tensor, *batch: Tensor) -> Losses:
        minibatches = zip(*(x[shuffled].split(args.minibatch_size) for x in batch), strict=True)
        return stack([train(*minibatch) for minibatch in minibatches])

    # One rollout, (num_steps, num_envs). values have one row more: what the last action led to.
    shape = (args.num_steps, args.num_envs)
    images = (*shape, *envs.single_observation_space.shape)
    obs = torch.zeros(images, dtype=torch.uint8, device=device)
    actions = torch.zeros(shape, dtype=torch.long, device=device)
    logprobs = torch.zeros(shape, device=device)
    values = torch.zeros(args.num_steps + 1, args.num_envs, device=device)
    record = np.zeros((4, *shape), np.float32)

    discounted = np.zeros_like(record[0])  # returns of the open episodes so far
    state = dict(agent=agent, optimizer=optimizer, returns=return_stats, envs=envs)
    start = run.resume(args.num_iterations, **state)
    for iteration in range(start, args.num_iterations):
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1 - iteration / args.num_iterations))

        # Collect. Log-probabilities and values come with the actions: the network is large.
        for step in range(args.num_steps):
            obs[step] = to_device(envs.obs, device)
            actions[step], logprobs[step], values[step] = sample(obs[step])
            real = ~envs.ended  # the step after an episode's end only resets
            _, reward, term, trunc, infos = envs.step(actions[step].cpu().numpy())
            record[:, step] = reward, term, term | trunc, real
            global_step = iteration * args.batch_size + (step + 1) * args.num_envs
            run.log_episodes(infos, global_step)
        with torch.no_grad():
            values[-1] = agent.get_value(to_device(envs.obs, device))

        # differs from ppo_atari_envpool.py: scales rewards
        # Learn
        rewards, terminated, done, real = torch.as_tensor(record)
        for t in range(args.num_steps):  # discounted[-1] is the last of the rollout before
            discounted[t] = record[0, t] + args.gamma * discounted[t - 1] * record[3, t]
        return_stats.update(torch.as_tensor(discounted)[real > 0])
        rewards = (rewards / return_stats.std).clamp(-10, 10)  # only their size changes, not sign
        old_values = values.cpu()  # small and sequential: advantages are CPU work
        advantages = gae(rewards, old_values, terminated, done, args)
        returns = advantages + old_values[:-1]
        rollout = (obs, actions, logprobs, old_values[:-1], advantages, returns, real)
        batch = [x.flatten(0, 1).to(device) for x in rollout]
        losses = []
        for _ in range(args.update_epochs):
            losses.append(learn(torch.randperm(args.batch_size, device=device), *batch))
            if args.target_kl is not None and losses[-1]["losses/approx_kl"][-1] > args.target_kl:
                break

        residual = (returns - old_values[:-1])[real > 0]
        metrics = {"charts/learning_rate": lr} | mean_of(losses)
        metrics["losses/explained_variance"] = 1 - residual.var() / (returns[real > 0].var() + 1e-8)
        run.log(metrics, global_step)
        run.evaluate(agent, global_step)
        if run.checkpoint(iteration + 1):  # EnvPool cannot be saved: it restarts
            discounted[:] = 0

    run.finish(agent)
