"""CrossQ, SAC with batch renormalisation and without target networks, for continuous actions.

    python cleanrl/crossq_continuous_action.py --env-id Humanoid-v4

Papers: https://arxiv.org/abs/1902.05605, https://arxiv.org/abs/1702.03275 (renormalisation).
Every detail with its reason: docs/rl-algorithms/crossq.md
"""

import math
from collections.abc import Callable
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
from cleanrl_utils.running.losses import Losses, Means, squared_error
from cleanrl_utils.running.run import LargeArgs, Run, parse_args, require
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share
from cleanrl_utils.speed.graphs import accelerate, capture
from cleanrl_utils.speed.inference import PolicyOnDevice
from cleanrl_utils.speed.matmul import fast_matmul


@dataclass
class Args(LargeArgs):
    env_id: str = "Hopper-v4"
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
    batch_size: Count = 256
    """number of transitions per gradient step"""
    learning_starts: Natural = 5_000
    """number of steps with random actions before the first gradient step"""
    policy_lr: NonNegative = 1e-3
    """learning rate of the policy"""
    q_lr: NonNegative = 1e-3
    """learning rate of the critics and the entropy coefficient"""
    policy_frequency: Count = 3
    """update the policy every this many steps"""
    critic_width: Count = 2048
    """width of the hidden layers of the critics"""
    alpha: NonNegative = 0.2
    """entropy coefficient (temperature), used only with --no-autotune"""
    autotune: bool = True
    """tune the entropy coefficient towards a target entropy"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_iterations = self.total_timesteps // self.num_envs
        require(self.num_iterations > 0, "--total-timesteps must be at least --num-envs")
        enough = self.learning_starts >= self.num_envs  # for the first batch to be drawn from
        require(enough, f"--learning-starts must be at least --num-envs, {self.num_envs}")
        require(self.alpha > 0, f"--alpha must be above 0, got {self.alpha}")  # its log is kept


def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment; the first of them may be filmed."""

    def thunk() -> gym.Env:
        env = make(env_id, video_folder if capture_video and idx == 0 else None, **env_kwargs)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        if len(env.observation_space.shape or ()) != 1:  # dicts, images: one vector each
            env = gym.wrappers.FlattenObservation(env)
        env.action_space.seed(seed)
        return env

    return thunk


def make_envs(args: Args, video_folder: str) -> gym.vector.VectorEnv:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored."""
    kwargs = args.env_settings | {"capture_video": args.capture_video, "video_folder": video_folder}
    thunks = [make_env(args.env_id, args.seed + i, i, **kwargs) for i in range(args.num_envs)]
    return SyncVectorEnv(thunks)


class BatchRenorm(nn.Module):
    """Batch renormalisation of x, (..., batch, features), with a learned scale and bias.

    Training uses the statistics of the batch, corrected by r and d; acting uses running ones."""

    eps = 1e-3  # some inputs are constant
    warm_up = 100_000  # updates of batch normalisation, until the running statistics are good

    def __init__(self, *shape: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape))
        self.register_buffer("running_mean", torch.zeros(shape))
        self.register_buffer("running_var", torch.ones(shape))
        self.register_buffer("updates", torch.tensor(0))

    def forward(self, x: Tensor, train: bool) -> Tensor:
        running_std = (self.running_var + self.eps).sqrt()
        if not train:
            return (x - self.running_mean) / running_std * self.scale + self.bias
        var, mean = torch.var_mean(x, -2, correction=0, keepdim=True)
        std = (var + self.eps).sqrt()
        with torch.no_grad():  # r and d are constants, at first 1 and 0: batch normalisation
            warm = self.updates >= self.warm_up  # a tensor: a CUDA graph has no branches
            r_max = 1 + 2.0 * warm  # 1 at first, then 3
            d_max = 5.0 * warm  # 0 at first, then 5
            r = (std / running_std).clamp(1 / r_max, r_max)
            d = ((mean - self.running_mean) / running_std).clamp(-d_max, d_max)
            self.running_mean.lerp_(mean, 0.01)  # 1 - momentum
            self.running_var.lerp_(var, 0.01)
            self.updates += 1
        return ((x - mean) / std * r + d) * self.scale + self.bias


# differs from sac_continuous_action.py: normalised; log-probabilities without the scale
class Actor(nn.Module):
    """A Gaussian policy, squashed by tanh into the bounds of each action dimension."""

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__()
        num_obs = envs.single_observation_space.shape[0]
        space = envs.single_action_space
        sizes = [num_obs, 256, 256, 2 * space.shape[0]]  # mean and log of the standard deviation
        self.norms = nn.ModuleList(BatchRenorm(1, size) for size in sizes[:-1])
        self.layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
        low = torch.tensor(space.low, dtype=torch.float32)
        high = torch.tensor(space.high, dtype=torch.float32)
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        self.register_buffer("scale", (high - low) / 2)
        self.register_buffer("bias", (high + low) / 2)

    def forward(self, x: Tensor, train: bool = False) -> tuple[Tensor, Tensor]:
        """Mean and log of the standard deviation, before tanh; the latter within [-5, 2]."""
        for i, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            x = layer(norm(x if i == 0 else x.relu(), train))
        mean, log_std = x.chunk(2, -1)
        return mean, torch.tanh(log_std) * 3.5 - 1.5

    def act(self, obs: Tensor, greedy: bool = True) -> Tensor:
        mean, log_std = self(obs)
        x = mean if greedy else mean + log_std.exp() * torch.randn_like(mean)
        actions = torch.tanh(x) * self.scale + self.bias
        return actions.clamp(self.low, self.high)  # rounding errors could leave the bounds

    def sample(self, obs: Tensor, train: bool = False) -> tuple[Tensor, Tensor]:
        """Actions, through which gradients flow, and the log-probabilities of tanh(x)."""
        mean, log_std = self(obs, train)
        noise = torch.randn_like(mean)
        x = mean + log_std.exp() * noise
        actions = torch.tanh(x) * self.scale + self.bias
        # log N(x; mean, std) - log(1 - tanh(x)^2); softplus keeps it exact where tanh(x) is 1.
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - x - F.softplus(-2 * x))
        return actions, (log_normal - log_slope).sum(-1)


# differs from sac_continuous_action.py: normalised and wider
class Critics(nn.Module):
    """Two Q-functions; batched products make them as fast as one."""

    def __init__(self, envs: gym.vector.VectorEnv, width: int):
        super().__init__()
        num_obs = envs.single_observation_space.shape[0]
        num_actions = envs.single_action_space.shape[0]
        sizes = [num_obs + num_actions, width, width, 1]
        self.norms = nn.ModuleList(BatchRenorm(2, 1, size) for size in sizes[:-1])
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for inputs, outputs in zip(sizes[:-1], sizes[1:], strict=True):
            bound = inputs**-0.5  # as in nn.Linear
            self.weights.append(torch.empty(2, inputs, outputs).uniform_(-bound, bound))
            self.biases.append(torch.empty(2, 1, outputs).uniform_(-bound, bound))

    def forward(self, obs: Tensor, actions: Tensor, train: bool = False) -> Tensor:
        """The Q-values of both, (2, batch)."""
        x = torch.cat([obs, actions], -1).expand(2, -1, -1)
        for i, norm in enumerate(self.norms):
            x = norm(x if i == 0 else x.relu_(), train)
            x = torch.baddbmm(self.biases[i], x, self.weights[i])
        return x.squeeze(-1)


# differs from sac_continuous_action.py: no target networks
class Agent(nn.Module):
    """The networks and the entropy coefficient."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        self.actor = Actor(envs)
        self.critics = Critics(envs, args.critic_width)
        log_alpha = 0.0 if args.autotune else math.log(args.alpha)
        self.log_alpha = nn.Parameter(torch.tensor(log_alpha), requires_grad=args.autotune)
        self.target_entropy = -envs.single_action_space.shape[0]


def gradient_step(loss: Tensor, optimizer: optim.Optimizer) -> None:
    """One gradient step of the optimizer's own parameters."""
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    optimizer.zero_grad()
    loss.backward(inputs=parameters)  # faster: no gradients of other networks' weights
    optimizer.step()


# differs from sac_continuous_action.py: one pass over both halves of the transitions
def update_critics(agent: Agent, optimizer: optim.Optimizer, args: Args, *batch: Tensor) -> Losses:
    """One gradient step of both critics; returns their mean Q-values and their losses."""
    obs, next_obs, actions, rewards, terminated = batch
    with torch.no_grad():
        next_actions, next_logprob = agent.actor.sample(next_obs)
    # One batch of both halves, normalised as a whole, makes target networks unnecessary.
    inputs = torch.cat([obs, next_obs]), torch.cat([actions, next_actions])
    q, next_q = agent.critics(*inputs, train=True).chunk(2, 1)
    # Only termination stops the bootstrap; after truncation, next_obs is the last observation.
    next_value = next_q.detach().amin(0) - agent.log_alpha.detach().exp() * next_logprob
    targets = rewards + args.gamma * (1 - terminated) * next_value
    losses = squared_error(q, targets).mean(1)
    gradient_step(losses.sum(), optimizer)
    qf1_values, qf2_values = q.detach().mean(1)
    qf1_loss, qf2_loss = losses.detach()
    return {
        "losses/qf1_values": qf1_values,
        "losses/qf2_values": qf2_values,
        "losses/qf1_loss": qf1_loss,
        "losses/qf2_loss": qf2_loss,
        "losses/qf_loss": losses.detach().mean(),
    }


# differs from sac_continuous_action.py: one step; the critics use their running statistics
def update_policy(agent: Agent, optimizer: optim.Optimizer, args: Args, *batch: Tensor) -> Losses:
    """One gradient step of the policy, and of the entropy coefficient if it is tuned."""
    obs = batch[0]
    alpha = agent.log_alpha.exp()
    new_actions, logprob = agent.actor.sample(obs, train=True)
    q = agent.critics(obs, new_actions).amin(0)
    actor_loss = (alpha.detach() * logprob - q).mean()
    alpha_loss = -alpha * (logprob.detach().mean() + agent.target_entropy)
    gradient_step(actor_loss + alpha_loss, optimizer)
    losses = {"losses/actor_loss": actor_loss.detach(), "losses/alpha": alpha.detach()}
    return losses | {"losses/alpha_loss": alpha_loss.detach()}


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    device = run.device
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Box, "dqn.py", bounded=True)

    fast_matmul(device)  # on a GPU in TF32
    agent = Agent(envs, args).to(device)
    adam = dict(betas=(0.5, 0.999), fused=True, capturable=device.type == "cuda")
    q_optimizer = optim.Adam(agent.critics.parameters(), args.q_lr, **adam)
    policy_optimizer = optim.Adam(agent.actor.parameters(), args.policy_lr, **adam)
    if args.autotune:
        alpha_adam = {"params": [agent.log_alpha], "lr": args.q_lr, "betas": (0.9, 0.999)}
        policy_optimizer.add_param_group(alpha_adam)
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

        # differs from sac_continuous_action.py: no target networks
        # Learn; a GPU does so while the environments step. Steps are summed over environments, so
        # --num-envs changes neither the number of updates nor their order.
        for global_step in range(steps + 1, steps + args.num_envs + 1):
            if global_step > args.learning_starts:
                learn_q()
                if global_step % args.policy_frequency == 0:
                    learn_policy()
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
