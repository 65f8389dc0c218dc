"""Soft Actor-Critic (SAC) for Atari games: images and discrete actions.

    python cleanrl/sac_atari.py --env-id BreakoutNoFrameskip-v4

Paper: https://arxiv.org/abs/1910.07207. Every detail with its reason: docs/rl-algorithms/sac.md
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
from torch import Tensor, nn, optim

from cleanrl_utils.environments import atari_wrappers as atari
from cleanrl_utils.environments.making import is_atari, make, require_spaces
from cleanrl_utils.environments.vector import AsyncVectorEnv, SyncVectorEnv
from cleanrl_utils.replay.buffers import FrameReplayBuffer, make_memory
from cleanrl_utils.running.losses import Losses, Means, squared_error
from cleanrl_utils.running.run import PixelArgs, Run, parse_args, require
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share
from cleanrl_utils.speed.graphs import accelerate, capture
from cleanrl_utils.speed.inference import PolicyOnDevice
from cleanrl_utils.speed.matmul import fast_matmul


@dataclass
class Args(PixelArgs):
    env_id: str = "BeamRiderNoFrameskip-v4"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 5_000_000
    """number of environment steps"""
    num_envs: Count = 1
    """number of parallel environments; other settings count steps summed over environments"""
    buffer_size: Count = 1_000_000
    """number of transitions in the replay memory; 1,000,000 take 6.6 GiB"""
    buffer_device: Literal["auto", "cpu", "cuda"] = "auto"
    """device of the replay memory; auto: the networks' device, if it has room"""
    gamma: Share = 0.99
    """discount factor"""
    tau: Share = 1.0
    """coefficient of the soft update of the target network: 1 copies the network"""
    batch_size: Count = 64
    """number of transitions per gradient step"""
    learning_starts: Natural = 20_000
    """number of steps with random actions before the first gradient step"""
    policy_lr: NonNegative = 3e-4
    """learning rate of the policy and the entropy coefficient"""
    q_lr: NonNegative = 3e-4
    """learning rate of the critics"""
    update_frequency: Count = 4
    """update the critics and the policy every this many steps"""
    target_network_frequency: Count = 8_000
    """update the target network every this many steps"""
    alpha: NonNegative = 0.2
    """entropy coefficient (temperature), used only with --no-autotune"""
    autotune: bool = True
    """tune the entropy coefficient towards a target entropy"""
    target_entropy_scale: NonNegative = 0.89
    """target entropy as a fraction of the maximum entropy, that of random actions"""

    # differs from dqn_atari.py: checks --alpha
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
    if is_atari(env_id):  # the wrappers skip frames, not the game; gray is fastest from ALE itself
        env_kwargs = {"frameskip": 1, "obs_type": "grayscale"} | env_kwargs

    def thunk() -> gym.Env:
        env = make(env_id, video_folder if capture_video and idx == 0 else None, **env_kwargs)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        if is_atari(env_id):
            env = atari.NoopReset(env, noop_max=30)
            env = atari.MaxAndSkip(env, skip=4)
            env = atari.EpisodicLife(env)
            env = atari.FireReset(env)  # where a game has FIRE
        else:
            env = atari.Grayscale(env)
        env = atari.ClipReward(env)
        env = gym.wrappers.ResizeObservation(env, (84, 84))
        env = gym.wrappers.FrameStackObservation(env, 4)
        env.action_space.seed(seed)
        return env

    return thunk


def make_envs(args: Args, video_folder: str) -> gym.vector.VectorEnv:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored."""
    kwargs = args.env_settings | {"capture_video": args.capture_video, "video_folder": video_folder}
    thunks = [make_env(args.env_id, args.seed + i, i, **kwargs) for i in range(args.num_envs)]
    return AsyncVectorEnv(thunks) if args.async_envs else SyncVectorEnv(thunks)


def layer_init(layer: nn.Conv2d | nn.Linear) -> nn.Module:
    nn.init.kaiming_normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Network(nn.Sequential):
    """The convolutional network of DQN's Nature paper, with one output per action."""

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(inplace=True),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(inplace=True),
            layer_init(nn.Conv2d(64, 64, 3)),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(inplace=True),
            layer_init(nn.Linear(512, envs.single_action_space.n)),
        )

    def forward(self, obs: Tensor) -> Tensor:
        """obs: bytes, (batch, 4, 84, 84)"""
        return super().forward(obs.to(memory_format=torch.channels_last) / 255)  # faster


class Actor(Network):
    """The policy; its outputs are logits."""

    def act(self, obs: Tensor, greedy: bool = True) -> Tensor:
        logits = self(obs)
        if not greedy:  # Gumbel-max: the argmax of logits plus Gumbel noise is a sample of softmax
            logits = logits - torch.empty_like(logits).exponential_().log()
        return logits.argmax(-1)


class Critics(nn.Module):
    """Two Q-functions."""

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__()
        self.networks = nn.ModuleList([Network(envs), Network(envs)])

    def forward(self, obs: Tensor) -> Tensor:
        """The Q-values of both, (2, batch, actions)."""
        return torch.stack([network(obs) for network in self.networks])


class Agent(nn.Module):
    """All networks: those that are trained, and their target networks."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        self.actor = Actor(envs)
        self.critics = Critics(envs)
        self.target_critics = deepcopy(self.critics).requires_grad_(False)
        log_alpha = 0.0 if args.autotune else math.log(args.alpha)
        self.log_alpha = nn.Parameter(torch.tensor(log_alpha), requires_grad=args.autotune)
        self.target_entropy = args.target_entropy_scale * math.log(envs.single_action_space.n)


def gradient_step(loss: Tensor, optimizer: optim.Optimizer) -> None:
    """One gradient step of the optimizer's own parameters."""
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    optimizer.zero_grad()
    loss.backward(inputs=parameters)  # faster: no gradients of other networks' weights
    optimizer.step()


# differs from dqn_atari.py: all parameters at once, which is faster
@torch.no_grad()
def update_target(network: nn.Module, target_network: nn.Module, tau: float) -> None:
    """target = tau * network + (1 - tau) * target, all parameters at once"""
    torch._foreach_lerp_(list(target_network.parameters()), list(network.parameters()), tau)


def update_critics(agent: Agent, optimizer: optim.Optimizer, args: Args, *batch: Tensor) -> Losses:
    """One gradient step of both critics; returns their mean Q-values and their losses."""
    obs, next_obs, actions, rewards, terminated = batch
    with torch.no_grad():
        # Actions are discrete: the expectation over the policy is a sum, not a sample.
        logprobs = agent.actor(next_obs).log_softmax(-1)
        next_q = agent.target_critics(next_obs).amin(0) - agent.log_alpha.exp() * logprobs
        next_value = (logprobs.exp() * next_q).sum(-1)
        # Only termination stops the bootstrap; after truncation, next_obs is the last observation.
        targets = rewards + args.gamma * (1 - terminated) * next_value
    q = agent.critics(obs).gather(-1, actions.expand(2, -1).unsqueeze(-1)).squeeze(-1)
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


def update_policy(agent: Agent, optimizer: optim.Optimizer, args: Args, *batch: Tensor) -> Losses:
    """One gradient step of the policy, and of the entropy coefficient if it is tuned."""
    obs = batch[0]
    alpha = agent.log_alpha.exp()
    logprobs = agent.actor(obs).log_softmax(-1)
    probs = logprobs.exp()
    with torch.no_grad():
        q = agent.critics(obs).amin(0)
    actor_loss = (probs * (alpha.detach() * logprobs - q)).sum(-1).mean()
    entropy = -(probs * logprobs).sum(-1).mean().detach()
    alpha_loss = alpha * (entropy - agent.target_entropy)
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
    require_spaces(envs, args.env_id, gym.spaces.Discrete, "sac_continuous_action.py")

    fast_matmul(device)  # on a GPU in TF32
    agent = Agent(envs, args).to(device)
    adam = dict(eps=1e-4, fused=True, capturable=device.type == "cuda")
    q_optimizer = optim.Adam(agent.critics.parameters(), args.q_lr, **adam)
    policy_optimizer = optim.Adam(agent.actor.parameters(), args.policy_lr, **adam)
    if args.autotune:
        policy_optimizer.add_param_group({"params": [agent.log_alpha], "lr": args.policy_lr})
    memory = make_memory(FrameReplayBuffer, envs, args, device)
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

        # differs from dqn_atari.py: critics, policy and entropy coefficient
        # Learn; a GPU does so while the environments step. Steps are summed over environments, so
        # --num-envs changes neither the number of updates nor their order.
        for global_step in range(steps + 1, steps + args.num_envs + 1):
            learning = global_step > args.learning_starts
            if learning and global_step % args.update_frequency == 0:
                learn_q()
                learn_policy()
            if learning and global_step % args.target_network_frequency == 0:
                update_targets()
            if global_step % 100 == 0:
                run.log(q_losses.take() | policy_losses.take(), global_step)

        # differs from dqn_atari.py: takes and evaluates the policy's actions
        # Step the environments; a step that only reset one of them is not stored.
        if at_random:
            actions = rng.integers(envs.single_action_space.n, size=args.num_envs)
        else:
            actions = policy.result()
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        memory.add(obs, next_obs, actions, rewards, terminated, ~ended)
        obs = next_obs
        ended = terminated | truncated
        run.log_episodes(infos, global_step)
        run.evaluate(agent.actor, global_step)
        run.checkpoint(iteration + 1)

    run.finish(agent.actor)
