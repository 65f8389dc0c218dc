"""Soft Actor-Critic (SAC) for vector observations and continuous actions.

    python cleanrl/sac_continuous_action.py --env-id Hopper-v4

Papers: https://arxiv.org/abs/1801.01290, https://arxiv.org/abs/1812.05905 (tuned temperature).
Every detail with its reason: docs/rl-algorithms/sac.md
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
from cleanrl_utils.running.metrics import Means
from cleanrl_utils.running.run import Run, TorchArgs, parse_args, require
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share


@dataclass
class Args(TorchArgs):
    env_id: str = "Hopper-v4"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 1_000_000
    """number of environment steps"""
    num_envs: Count = 1
    """number of parallel environments; other settings count steps of single environments"""
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
    q_lr: NonNegative = 1e-3
    """learning rate of the critics and the entropy coefficient"""
    policy_frequency: Count = 2
    """update the policy every this many steps, as many times (TD3's delay, compensated)"""
    target_network_frequency: Count = 1
    """update the target network every this many steps"""
    alpha: NonNegative = 0.2
    """entropy coefficient (temperature), used only with --no-autotune"""
    autotune: bool = True
    """tune the entropy coefficient towards a target entropy"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_turns = self.total_timesteps // self.num_envs
        require(self.num_turns > 0, "--total-timesteps must be at least --num-envs")
        starts = self.num_envs  # the first gradient step needs something to learn from
        require(self.learning_starts >= starts, f"--learning-starts must be at least {starts}")
        require(self.alpha > 0, f"--alpha must be above 0, got {self.alpha}")  # its log is kept


# same as ppo.py
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


# same as ppo.py
def make_envs(args: Args, video_folder: str) -> gym.vector.VectorEnv:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored."""

    def one(i: int) -> Callable:
        seed = args.seed + i
        return make_env(args.env_id, seed, i, args.capture_video, video_folder, **args.env_settings)

    return SyncVectorEnv([one(i) for i in range(args.num_envs)])


class Actor(nn.Module):
    """A Gaussian, squashed by tanh into the action space: each dimension has bounds of its own."""

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__()
        space, width = envs.single_action_space, 256
        self.network = nn.Sequential(
            nn.Linear(envs.single_observation_space.shape[0], width),
            nn.ReLU(inplace=True),
            nn.Linear(width, width),
            nn.ReLU(inplace=True),
            nn.Linear(width, 2 * space.shape[0]),  # means, and the logarithms of deviations
        )
        low, high = (torch.tensor(x, dtype=torch.float32) for x in (space.low, space.high))
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        self.register_buffer("scale", (high - low) / 2)
        self.register_buffer("bias", (high + low) / 2)
        log_norm = (self.scale.log() + 2 * math.log(2) + 0.5 * math.log(2 * math.pi)).sum()
        self.register_buffer("log_norm", log_norm)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log of the standard deviation, before tanh; the latter within [-5, 2]."""
        mean, log_std = self.network(obs).chunk(2, -1)
        return mean, torch.tanh(log_std) * 3.5 - 1.5

    def act(self, obs: Tensor, greedy: bool = True) -> Tensor:
        mean, log_std = self(obs)
        x = mean if greedy else mean + log_std.exp() * torch.randn_like(mean)
        actions = torch.tanh(x) * self.scale + self.bias
        return actions.clamp(self.low, self.high)  # rounding must not leave the bounds either

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Actions that gradients flow through, and the logarithms of their densities."""
        mean, log_std = self(obs)
        noise = torch.randn_like(log_std)
        x = torch.addcmul(mean, log_std.exp(), noise)
        # p(a) = p(x) / (da/dx) with da/dx = scale * (1 - tanh(x)^2); the logarithm of the latter is
        # 2 log(2) + 2 x - 2 softplus(2 x), which stays exact where tanh is 1 in float32; torch's
        # softplus with beta 2 is half of softplus(2 x)
        logprob = 4 * F.softplus(x, beta=2) - torch.add(log_std, x, alpha=2)
        logprob = torch.addcmul(logprob, noise, noise, value=-0.5)
        actions = torch.addcmul(self.bias, torch.tanh(x), self.scale)
        return actions, logprob.sum(-1) - self.log_norm


# same as td3_continuous_action.py
class Critics(nn.Module):
    """Two Q-functions; each layer is one batched product, so they cost the calls of one."""

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__()
        num_obs, num_actions = envs.single_observation_space.shape, envs.single_action_space.shape
        sizes = [num_obs[0] + num_actions[0], 256, 256, 1]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for inputs, outputs in zip(sizes[:-1], sizes[1:], strict=True):
            bound = inputs**-0.5  # as nn.Linear has it
            self.weights.append(torch.empty(2, inputs, outputs).uniform_(-bound, bound))
            self.biases.append(torch.empty(2, 1, outputs).uniform_(-bound, bound))

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Both values of each pair: (2, batch)."""
        x = torch.cat([obs, actions], -1).expand(2, -1, -1)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x if i == 0 else x.relu_(), weight)
        return x.squeeze(-1)


class Agent(nn.Module):
    """Everything that learns, and the slow copies that targets are computed with."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        self.actor, self.critics = Actor(envs), Critics(envs)
        self.target_critics = deepcopy(self.critics).requires_grad_(False)
        log_alpha = 0.0 if args.autotune else math.log(args.alpha)
        self.log_alpha = nn.Parameter(torch.tensor(log_alpha), requires_grad=args.autotune)
        self.target_entropy = -envs.single_action_space.shape[0]


# same as ddpg_continuous_action.py
def descend(loss: Tensor, optimizer: optim.Optimizer) -> None:
    """One step down the loss for the optimizer's own parameters, whatever else it depends on."""
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    for x, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        x.grad = gradient.contiguous()  # as Adam wants it; cuDNN may lay it out otherwise
    optimizer.step()


# same as ddpg_continuous_action.py
@torch.no_grad()
def update_target(network: nn.Module, target_network: nn.Module, tau: float) -> None:
    """target = tau * network + (1 - tau) * target, all parameters at once"""
    torch._foreach_lerp_(list(target_network.parameters()), list(network.parameters()), tau)


def update_critics(agent: Agent, optimizer: optim.Optimizer, args: Args, *batch: Tensor) -> Tensor:
    """One gradient step of both critics; returns their values, losses and mean loss."""
    obs, next_obs, actions, rewards, terminated = batch
    with torch.no_grad():
        # Only termination ends the sum of rewards; a truncated episode's next_obs is its own last.
        next_actions, next_logprob = agent.actor.sample(next_obs)
        next_q = agent.target_critics(next_obs, next_actions).amin(0)
        next_value = next_q - agent.log_alpha.exp() * next_logprob
        targets = rewards + args.gamma * (1 - terminated) * next_value
    q = agent.critics(obs, actions)
    losses = (q - targets).square().mean(1)
    descend(losses.sum(), optimizer)
    return torch.cat([q.mean(1), losses, losses.mean(0, keepdim=True)]).detach()


def update_policy(agent: Agent, optimizer: optim.Optimizer, args: Args, *batch: Tensor) -> Tensor:
    """Gradient steps of the policy, and of the temperature if it is tuned: as many as the steps
    since the last time."""
    obs, losses = batch[0], []
    for _ in range(args.policy_frequency):
        alpha = agent.log_alpha.exp()
        new_actions, logprob = agent.actor.sample(obs)
        q = agent.critics(obs, new_actions).amin(0)
        actor_loss = (alpha.detach() * logprob - q).mean()
        alpha_loss = -alpha * (logprob.detach().mean() + agent.target_entropy)
        descend(actor_loss + alpha_loss, optimizer)
        losses.append(torch.stack([actor_loss, alpha, alpha_loss]).detach())
    return torch.stack(losses).mean(0)


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    device = run.device
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Box, "dqn.py", bounded=True)

    torch.set_float32_matmul_precision("high")  # TF32 on GPUs that have it
    agent = Agent(envs, args).to(device)
    adam = dict(fused=True, capturable=device.type == "cuda")
    q_optimizer = optim.Adam(agent.critics.parameters(), args.q_lr, **adam)
    policy_optimizer = optim.Adam(agent.actor.parameters(), args.policy_lr, **adam)
    if args.autotune:
        policy_optimizer.add_param_group({"params": [agent.log_alpha], "lr": args.q_lr})
    memory = make_memory(ReplayBuffer, envs, args, device)
    sample = partial(memory.sample, args.batch_size)
    q_tags = ["qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss"]
    q_losses = Means(*(f"losses/{tag}" for tag in q_tags))
    policy_losses = Means("losses/actor_loss", "losses/alpha", "losses/alpha_loss")
    policy = run.oracle(torch.no_grad()(partial(agent.actor.act, greedy=False)))
    q_update = partial(update_critics, agent, q_optimizer, args)
    learn_q = run.accelerate(q_update, sample, q_losses)
    policy_update = partial(update_policy, agent, policy_optimizer, args)
    learn_policy = run.accelerate(policy_update, sample, policy_losses)
    follow = run.accelerate(partial(update_target, agent.critics, agent.target_critics, args.tau))
    low, high = envs.action_space.low, envs.action_space.high
    rng = np.random.default_rng(args.seed)

    learners = dict(agent=agent, q_optimizer=q_optimizer, policy_optimizer=policy_optimizer)
    logs = dict(q_losses=q_losses, policy_losses=policy_losses)
    envs.reset(seed=args.seed)
    start = run.resume(args.num_turns, **learners, memory=memory, **logs, rng=rng, envs=envs)
    obs, ended = envs.obs, envs.ended
    for turn in range(start, args.num_turns):
        # Act: at random at first. Later a GPU is asked, but not waited for yet.
        at_random = turn * args.num_envs < args.learning_starts
        if not at_random:
            policy.ask(obs)

        # Learn, while a GPU can do so beside the environments' next step. Each environment's step
        # is counted, so that --num-envs changes neither the number of updates nor their order.
        for global_step in range(turn * args.num_envs + 1, (turn + 1) * args.num_envs + 1):
            if global_step > args.learning_starts:
                learn_q()
                if global_step % args.policy_frequency == 0:
                    learn_policy()
                if global_step % args.target_network_frequency == 0:
                    follow()
            if global_step % 100 == 0:
                run.log(q_losses.take() | policy_losses.take(), global_step)

        # Step, and remember it unless it only reset an environment whose episode had ended.
        actions = rng.uniform(low, high).astype(np.float32) if at_random else policy.answer()
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        memory.add(obs, next_obs, actions, rewards, terminated, ~ended)
        obs, ended = next_obs, terminated | truncated
        run.log_episodes(infos, global_step)
        run.evaluate(agent.actor, global_step)
        run.checkpoint(turn + 1)

    run.finish(agent.actor)
