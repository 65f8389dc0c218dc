"""Twin Delayed DDPG (TD3) for vector observations and continuous actions.

    python cleanrl/td3_continuous_action.py --env-id Hopper-v4

Paper: https://arxiv.org/abs/1802.09477. Every detail with its reason: docs/rl-algorithms/td3.md
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn, optim

from cleanrl_utils.environments.making import make, require_spaces
from cleanrl_utils.environments.vector import SyncVectorEnv
from cleanrl_utils.replay.buffers import ReplayBuffer, make_memory
from cleanrl_utils.running.losses import Losses, Means, squared_error
from cleanrl_utils.running.run import Run, TorchArgs, parse_args, require
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share
from cleanrl_utils.speed.graphs import accelerate, capture
from cleanrl_utils.speed.inference import PolicyOnDevice
from cleanrl_utils.speed.matmul import fast_matmul


@dataclass
class Args(TorchArgs):
    env_id: str = "Hopper-v4"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 1_000_000
    """number of environment steps"""
    learning_rate: NonNegative = 3e-4
    """learning rate of Adam"""
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
    policy_noise: NonNegative = 0.2
    """standard deviation of the noise on the target policy's actions, relative to half the action
    range"""
    exploration_noise: NonNegative = 0.1
    """standard deviation of the exploration noise, relative to half the action range"""
    learning_starts: Natural = 25_000
    """number of steps with random actions before the first gradient step"""
    policy_frequency: Count = 2
    """update the policy and the target networks every this many steps"""
    noise_clip: NonNegative = 0.5
    """bound of the noise on the target policy's actions, relative to half the action range"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_iterations = self.total_timesteps // self.num_envs
        require(self.num_iterations > 0, "--total-timesteps must be at least --num-envs")
        enough = self.learning_starts >= self.num_envs  # for the first batch to be drawn from
        require(enough, f"--learning-starts must be at least --num-envs, {self.num_envs}")


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


class Actor(nn.Module):
    """A deterministic policy; each dimension of an action has its own bounds."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        num_obs = envs.single_observation_space.shape[0]
        space = envs.single_action_space
        self.network = nn.Sequential(
            nn.Linear(num_obs, 256),
            nn.ReLU(inplace=True),
            nn.Linear(256, 256),
            nn.ReLU(inplace=True),
            nn.Linear(256, space.shape[0]),
            nn.Tanh(),
        )
        self.exploration_noise = args.exploration_noise
        low = torch.tensor(space.low, dtype=torch.float32)
        high = torch.tensor(space.high, dtype=torch.float32)
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        self.register_buffer("scale", (high - low) / 2)
        self.register_buffer("bias", (high + low) / 2)

    def forward(self, obs: Tensor) -> Tensor:
        return self.network(obs) * self.scale + self.bias

    def act(self, obs: Tensor, greedy: bool = True) -> Tensor:
        actions = self(obs)
        if not greedy:  # independent noise for each environment
            noise = self.exploration_noise * torch.randn_like(actions)
            actions = actions + noise * self.scale
        return actions.clamp(self.low, self.high)


class Critics(nn.Module):
    """Two Q-functions; batched products make them as fast as one."""

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__()
        num_obs = envs.single_observation_space.shape[0]
        num_actions = envs.single_action_space.shape[0]
        sizes = [num_obs + num_actions, 256, 256, 1]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for inputs, outputs in zip(sizes[:-1], sizes[1:], strict=True):
            bound = inputs**-0.5  # as in nn.Linear
            self.weights.append(torch.empty(2, inputs, outputs).uniform_(-bound, bound))
            self.biases.append(torch.empty(2, 1, outputs).uniform_(-bound, bound))

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """The Q-values of both, (2, batch)."""
        x = torch.cat([obs, actions], -1).expand(2, -1, -1)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x if i == 0 else x.relu_(), weight)
        return x.squeeze(-1)


# differs from ddpg_continuous_action.py: two critics
class Agent(nn.Module):
    """All networks: those that are trained, and their target networks."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        self.actor = Actor(envs, args)
        self.critics = Critics(envs)
        self.target_actor = deepcopy(self.actor).requires_grad_(False)
        self.target_critics = deepcopy(self.critics).requires_grad_(False)


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


def smoothed_actions(actor: Actor, obs: Tensor, args: Args) -> Tensor:
    """The actor's actions with clipped noise: it smooths narrow peaks of the Q-functions."""
    actions = actor(obs)
    noise = args.policy_noise * torch.randn_like(actions)
    noise = noise.clamp(-args.noise_clip, args.noise_clip) * actor.scale
    return (actions + noise).clamp(actor.low, actor.high)


def update_critics(agent: Agent, optimizer: optim.Optimizer, args: Args, *batch: Tensor) -> Losses:
    """One gradient step of both critics; returns their mean Q-values and their losses."""
    obs, next_obs, actions, rewards, terminated = batch
    with torch.no_grad():
        # Only termination stops the bootstrap; after truncation, next_obs is the last observation.
        next_actions = smoothed_actions(agent.target_actor, next_obs, args)
        next_q = agent.target_critics(next_obs, next_actions).amin(0)
        targets = rewards + args.gamma * (1 - terminated) * next_q
    q = agent.critics(obs, actions)
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


# differs from ddpg_continuous_action.py: the first critic alone
def update_policy(agent: Agent, optimizer: optim.Optimizer, args: Args, *batch: Tensor) -> Losses:
    """One gradient step of the policy and a soft update of all target networks."""
    obs = batch[0]
    loss = -agent.critics(obs, agent.actor(obs))[0].mean()
    gradient_step(loss, optimizer)
    update_target(agent.actor, agent.target_actor, args.tau)
    update_target(agent.critics, agent.target_critics, args.tau)
    return {"losses/actor_loss": loss.detach()}


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    device = run.device
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Box, "dqn.py", bounded=True)

    fast_matmul(device)  # on a GPU in TF32
    agent = Agent(envs, args).to(device)
    adam = dict(lr=args.learning_rate, fused=True, capturable=device.type == "cuda")
    q_optimizer = optim.Adam(agent.critics.parameters(), **adam)
    policy_optimizer = optim.Adam(agent.actor.parameters(), **adam)
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
