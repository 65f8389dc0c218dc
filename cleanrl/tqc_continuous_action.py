"""Truncated Quantile Critics (TQC) for vector observations and continuous actions.

    python cleanrl/tqc_continuous_action.py --env-id Humanoid-v4

Paper: https://arxiv.org/abs/2005.04269. Every detail with its reason: docs/rl-algorithms/tqc.md
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from cleanrl_utils.environments.making import make, require_spaces
from cleanrl_utils.environments.vector import SyncVectorEnv
from cleanrl_utils.replay.buffers import ReplayBuffer, make_memory
from cleanrl_utils.running.losses import Losses, Means
from cleanrl_utils.running.run import LargeArgs, Run, parse_args, require
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share
from cleanrl_utils.speed.graphs import accelerate, capture
from cleanrl_utils.speed.inference import PolicyOnDevice
from cleanrl_utils.speed.matmul import fast_matmul


@dataclass
class Args(LargeArgs):
    env_id: str = "Humanoid-v4"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 1_000_000
    """number of environment steps"""
    num_envs: Count = 1
    """number of parallel environments; other settings count steps summed over environments"""
    buffer_size: Count = 1_000_000
    """number of transitions in the replay memory"""
    buffer_device: Literal["auto", "cpu", "cuda"] = "auto"
    """device of the replay memory; auto: the networks' device, if it has room"""
    gamma: Share = 0.99
    """discount factor"""
    tau: Share = 0.005
    """coefficient of the soft update of the target network: 1 copies the network"""
    batch_size: Count = 256
    """number of transitions per gradient step"""
    learning_starts: Natural = 5_000
    """number of steps with random actions before the first gradient step"""
    policy_lr: NonNegative = 3e-4
    """learning rate of the policy"""
    q_lr: NonNegative = 3e-4
    """learning rate of the critics and the entropy coefficient"""
    alpha: NonNegative = 0.2
    """entropy coefficient (temperature), used only with --no-autotune"""
    autotune: bool = True
    """tune the entropy coefficient towards a target entropy"""
    n_critics: Count = 5
    """number of critics"""
    critic_width: Count = 512
    """width of the hidden layers of the critics"""
    n_quantiles: Count = 25
    """number of quantiles of the return distribution"""
    top_quantiles_to_drop_per_net: Natural = 2
    """number of largest quantiles per critic that the target drops; more: less overestimation"""

    # differs from sac_continuous_action.py: checks the number of dropped quantiles
    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_iterations = self.total_timesteps // self.num_envs
        require(self.num_iterations > 0, "--total-timesteps must be at least --num-envs")
        enough = self.learning_starts >= self.num_envs  # for the first batch to be drawn from
        require(enough, f"--learning-starts must be at least --num-envs, {self.num_envs}")
        require(self.alpha > 0, f"--alpha must be above 0, got {self.alpha}")  # its log is kept
        some_left = self.top_quantiles_to_drop_per_net < self.n_quantiles
        require(some_left, "--top-quantiles-to-drop-per-net must be below --n-quantiles")


# differs from sac_continuous_action.py: actions between -1 and 1
def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment; the first of them may be filmed."""

    def thunk() -> gym.Env:
        env = make(env_id, video_folder if capture_video and idx == 0 else None, **env_kwargs)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        if len(env.observation_space.shape or ()) != 1:  # dicts, images: one vector each
            env = gym.wrappers.FlattenObservation(env)
        if isinstance(env.action_space, gym.spaces.Box) and env.action_space.is_bounded():
            env = gym.wrappers.RescaleAction(env, -1, 1)  # the entropy then has the same units
        env.action_space.seed(seed)
        return env

    return thunk


def make_envs(args: Args, video_folder: str) -> gym.vector.VectorEnv:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored."""
    kwargs = args.env_settings | {"capture_video": args.capture_video, "video_folder": video_folder}
    thunks = [make_env(args.env_id, args.seed + i, i, **kwargs) for i in range(args.num_envs)]
    return SyncVectorEnv(thunks)


class Actor(nn.Module):
    """A Gaussian policy, squashed by tanh into the bounds of each action dimension."""

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__()
        num_obs = envs.single_observation_space.shape[0]
        space = envs.single_action_space
        self.network = nn.Sequential(
            nn.Linear(num_obs, 256),
            nn.ReLU(inplace=True),
            nn.Linear(256, 256),
            nn.ReLU(inplace=True),
            nn.Linear(256, 2 * space.shape[0]),  # mean and log of the standard deviation
        )
        low = torch.tensor(space.low, dtype=torch.float32)
        high = torch.tensor(space.high, dtype=torch.float32)
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        self.register_buffer("scale", (high - low) / 2)
        self.register_buffer("bias", (high + low) / 2)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log of the standard deviation, before tanh; the latter within [-5, 2]."""
        mean, log_std = self.network(obs).chunk(2, -1)
        return mean, torch.tanh(log_std) * 3.5 - 1.5

    def act(self, obs: Tensor, greedy: bool = True) -> Tensor:
        mean, log_std = self(obs)
        x = mean if greedy else mean + log_std.exp() * torch.randn_like(mean)
        actions = torch.tanh(x) * self.scale + self.bias
        return actions.clamp(self.low, self.high)  # rounding errors could leave the bounds

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Actions, through which gradients flow, and their log-probabilities."""
        mean, log_std = self(obs)
        noise = torch.randn_like(mean)
        x = mean + log_std.exp() * noise
        actions = torch.tanh(x) * self.scale + self.bias
        # log p(a) = log N(x; mean, std) - log da/dx, where da/dx = scale * (1 - tanh(x)^2). Written
        # with softplus, log(1 - tanh(x)^2) stays exact where tanh(x) rounds to 1.
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = self.scale.log() + 2 * (math.log(2) - x - F.softplus(-2 * x))
        return actions, (log_normal - log_slope).sum(-1)


# differs from sac_continuous_action.py: several critics of several quantiles each, three layers
class Critics(nn.Module):
    """Quantile functions of the return; batched products make them as fast as one."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        num_obs = envs.single_observation_space.shape[0]
        num_actions = envs.single_action_space.shape[0]
        sizes = [num_obs + num_actions, *[args.critic_width] * 3, args.n_quantiles]
        self.number = args.n_critics
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for inputs, outputs in zip(sizes[:-1], sizes[1:], strict=True):
            bound = inputs**-0.5  # as in nn.Linear
            self.weights.append(torch.empty(self.number, inputs, outputs).uniform_(-bound, bound))
            self.biases.append(torch.empty(self.number, 1, outputs).uniform_(-bound, bound))

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """The quantiles of all critics, (critics, batch, quantiles)."""
        x = torch.cat([obs, actions], -1).expand(self.number, -1, -1)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x if i == 0 else x.relu_(), weight)
        return x


# differs from sac_continuous_action.py: critics with settings
class Agent(nn.Module):
    """All networks: those that are trained, and their target networks."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        self.actor = Actor(envs)
        self.critics = Critics(envs, args)
        self.target_critics = deepcopy(self.critics).requires_grad_(False)
        log_alpha = 0.0 if args.autotune else math.log(args.alpha)
        self.log_alpha = nn.Parameter(torch.tensor(log_alpha), requires_grad=args.autotune)
        self.target_entropy = -envs.single_action_space.shape[0]


def gradient_step(loss: Tensor, optimizer: optim.Optimizer) -> None:
    """One gradient step of the optimizer's own parameters."""
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    optimizer.zero_grad()
    loss.backward(inputs=parameters)  # faster: no gradients of other networks' weights
    optimizer.step()


@torch.no_grad()
def update_target(network: nn.Module, target_network: nn.Module, tau: float) -> None:
    """target = tau * network + (1 - tau) * target, all parameters at once"""
    torch._foreach_lerp_(list(target_network.parameters()), list(network.parameters()), tau)


def truncate(quantiles: Tensor, drop_per_net: int) -> Tensor:
    """Pool the quantiles of all critics, (critics, batch, quantiles), and drop the largest ones."""
    pooled = quantiles.transpose(0, 1).flatten(1).sort(1).values  # (batch, critics * quantiles)
    return pooled[:, : pooled.shape[1] - drop_per_net * len(quantiles)]


def quantile_huber_loss(quantiles: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of every quantile, (critics, batch, quantiles), against every target, (batch,
    targets). The quantile of fraction tau has that fraction of the targets below it."""
    n = quantiles.shape[-1]
    tau = (torch.arange(n, device=quantiles.device) + 0.5) / n
    delta = targets.unsqueeze(1) - quantiles.unsqueeze(-1)  # (critics, batch, quantiles, targets)
    huber = F.huber_loss(delta, torch.zeros_like(delta), reduction="none")
    return (abs(tau.unsqueeze(-1) - (delta < 0).float()) * huber).mean()


# differs from sac_continuous_action.py: targets are quantiles, of which the largest are dropped
def update_critics(agent: Agent, optimizer: optim.Optimizer, args: Args, *batch: Tensor) -> Losses:
    """One gradient step of all critics; returns their mean Q-value and their loss."""
    obs, next_obs, actions, rewards, terminated = batch
    with torch.no_grad():
        # Only termination stops the bootstrap; after truncation, next_obs is the last observation.
        next_actions, next_logprob = agent.actor.sample(next_obs)
        next_quantiles = agent.target_critics(next_obs, next_actions)
        next_quantiles = truncate(next_quantiles, args.top_quantiles_to_drop_per_net)
        next_values = next_quantiles - (agent.log_alpha.exp() * next_logprob).unsqueeze(1)
        discount = args.gamma * (1 - terminated)
        targets = rewards.unsqueeze(1) + discount.unsqueeze(1) * next_values
    quantiles = agent.critics(obs, actions)
    loss = quantile_huber_loss(quantiles, targets)
    gradient_step(loss, optimizer)
    return {"losses/qf_values": quantiles.detach().mean(), "losses/qf_loss": loss.detach()}


# differs from sac_continuous_action.py: one step, which maximises the mean of all quantiles
def update_policy(agent: Agent, optimizer: optim.Optimizer, args: Args, *batch: Tensor) -> Losses:
    """One gradient step of the policy, and of the entropy coefficient if it is tuned."""
    obs = batch[0]
    alpha = agent.log_alpha.exp()
    new_actions, logprob = agent.actor.sample(obs)
    q = agent.critics(obs, new_actions).mean((0, 2))  # no quantile is dropped
    actor_loss = (alpha.detach() * logprob - q).mean()
    alpha_loss = -alpha * (logprob.detach().mean() + agent.target_entropy)
    gradient_step(actor_loss + alpha_loss, optimizer)
    return {
        "losses/actor_loss": actor_loss.detach(),
        "losses/alpha": alpha.detach(),
        "losses/alpha_loss": alpha_loss.detach(),
    }


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    device = run.device
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Box, "dqn.py", bounded=True)

    fast_matmul(device)  # on a GPU in TF32
    agent = Agent(envs, args).to(device)
    adam = dict(fused=True, capturable=device.type == "cuda")
    q_optimizer = optim.Adam(agent.critics.parameters(), args.q_lr, **adam)
    policy_optimizer = optim.Adam(agent.actor.parameters(), args.policy_lr, **adam)
    if args.autotune:
        policy_optimizer.add_param_group({"params": [agent.log_alpha], "lr": args.q_lr})
    memory = make_memory(ReplayBuffer, envs, args, device)
    policy = PolicyOnDevice(partial(agent.actor.act, greedy=False), device, args)
    train_q = accelerate(partial(update_critics, agent, q_optimizer, args), device, args)
    train_policy = accelerate(partial(update_policy, agent, policy_optimizer, args), device, args)
    q_losses = Means()
    policy_losses = Means()

    @partial(capture, device=memory.device, args=args)  # sampling, too, if the memory is on the GPU
    def learn_q() -> None:
        batch = memory.sample(args.batch_size).to(device)
        q_losses.add(train_q(*batch))

    @partial(capture, device=memory.device, args=args)
    def learn_policy() -> None:
        batch = memory.sample(args.batch_size).to(device)
        policy_losses.add(train_policy(*batch))

    targets = partial(update_target, agent.critics, agent.target_critics, args.tau)
    update_targets = accelerate(targets, device, args)
    low = envs.action_space.low
    high = envs.action_space.high
    rng = np.random.default_rng(args.seed)

    envs.reset(seed=args.seed)
    state = dict(agent=agent, q_optimizer=q_optimizer, policy_optimizer=policy_optimizer)
    state |= dict(memory=memory, q_losses=q_losses, policy_losses=policy_losses, rng=rng, envs=envs)
    start = run.resume(args.num_iterations, **state)
    obs = envs.obs
    ended = envs.ended
    for iteration in range(start, args.num_iterations):
        steps = iteration * args.num_envs  # so far

        # Choose actions: random ones at first, then the policy's, which a GPU starts to compute.
        at_random = steps < args.learning_starts
        if not at_random:
            policy.start(obs)

        # differs from sac_continuous_action.py: every network learns in every step
        # Learn; a GPU does so while the environments step. Steps are summed over environments, so
        # --num-envs changes neither the number of updates nor their order.
        for global_step in range(steps + 1, steps + args.num_envs + 1):
            if global_step > args.learning_starts:
                learn_q()
                learn_policy()
                update_targets()
            if global_step % 100 == 0:
                run.log(q_losses.take() | policy_losses.take(), global_step)

        # Step the environments; a step that only reset one of them is not stored.
        actions = rng.uniform(low, high).astype(np.float32) if at_random else policy.result()
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        memory.add(obs, next_obs, actions, rewards, terminated, ~ended)
        obs = next_obs
        ended = terminated | truncated
        run.log_episodes(infos, global_step)
        run.evaluate(agent.actor, global_step)
        run.checkpoint(iteration + 1)

    run.finish(agent.actor)
