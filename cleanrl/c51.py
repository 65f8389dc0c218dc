"""Categorical DQN (C51) for vector observations and discrete actions.

    python cleanrl/c51.py --env-id CartPole-v1

Paper: https://arxiv.org/abs/1707.06887. Every detail with its reason: docs/rl-algorithms/c51.md
"""

import math
from collections.abc import Callable
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
from cleanrl_utils.running.losses import Losses, Means
from cleanrl_utils.running.run import Run, TorchArgs, parse_args, require
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share
from cleanrl_utils.speed.graphs import accelerate, capture
from cleanrl_utils.speed.inference import inference


@dataclass
class Args(TorchArgs):
    env_id: str = "CartPole-v1"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 500_000
    """number of environment steps"""
    learning_rate: NonNegative = 2.5e-4
    """learning rate of Adam"""
    num_envs: Count = 1
    """number of parallel environments; other settings count steps summed over environments"""
    n_atoms: Count = 101
    """number of atoms of the return distribution"""
    v_min: float = -100
    """smallest atom of the return distribution"""
    v_max: float = 100
    """largest atom of the return distribution"""
    min_probability: Share = 0.0
    """smallest probability that has a gradient in the loss (the original: 1e-5)"""
    buffer_size: Count = 10_000
    """number of transitions in the replay memory"""
    buffer_device: Literal["auto", "cpu", "cuda"] = "auto"
    """device of the replay memory; auto: the networks' device, if it has room"""
    gamma: Share = 0.99
    """discount factor"""
    target_network_frequency: Count = 500
    """update the target network every this many steps"""
    batch_size: Count = 128
    """number of transitions per gradient step"""
    start_e: Share = 1
    """probability of a random action at the start (epsilon)"""
    end_e: Share = 0.05
    """probability of a random action at the end of exploration (epsilon)"""
    exploration_fraction: Share = 0.5
    """fraction of --total-timesteps over which epsilon falls from --start-e to --end-e"""
    learning_starts: Natural = 10_000
    """number of steps before the first gradient step"""
    train_frequency: Count = 10
    """number of steps per gradient step"""

    # differs from dqn.py: the atoms are checked
    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_iterations = self.total_timesteps // self.num_envs
        require(self.num_iterations > 0, "--total-timesteps must be at least --num-envs")
        require(self.n_atoms >= 2, f"--n-atoms must be at least 2, got {self.n_atoms}")
        require(self.v_min < self.v_max, "--v-min must be below --v-max")
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


# differs from dqn.py: a distribution over returns for every action
class QNetwork(nn.Sequential):
    """Q-values of all actions."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        num_obs = envs.single_observation_space.shape[0]
        num_actions = envs.single_action_space.n
        hidden = [nn.Linear(num_obs, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
        super().__init__(*hidden, nn.Linear(84, num_actions * args.n_atoms))
        self.register_buffer("atoms", torch.linspace(args.v_min, args.v_max, args.n_atoms))

    def get_logits(self, obs: Tensor) -> Tensor:  # (batch, actions, atoms)
        return super().forward(obs).unflatten(1, (-1, len(self.atoms)))

    def forward(self, obs: Tensor) -> Tensor:
        return self.get_logits(obs).softmax(-1) @ self.atoms  # means of the distributions

    def act(self, obs: Tensor, greedy: bool = True) -> Tensor:
        return self(obs).argmax(-1)  # the training loop explores


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """From `start` at step 0 to `end` at step `duration`, and `end` from there on."""
    return end if step >= duration else start + (end - start) * step / duration


def project(probs: Tensor, returns: Tensor, atoms: Tensor) -> Tensor:
    """Project a distribution with `probs` at `returns`, both (batch, atoms), onto the atoms: each
    probability is split between the two atoms around its return, in proportion to nearness."""
    last = len(atoms) - 1
    spacing = (atoms[-1] - atoms[0]) / last
    position = ((returns - atoms[0]) / spacing).clamp(0, last)
    nearest = position.round()  # rounding errors must not move mass away from an atom that is met
    position = torch.where(abs(position - nearest) < 1e-4, nearest, position)
    lower = position.long()
    upper = (lower + 1).clamp(max=last)
    share_above = position - lower
    projected = torch.zeros_like(probs).scatter_add_(1, lower, probs * (1 - share_above))
    return projected.scatter_add_(1, upper, probs * share_above)


# differs from dqn.py: cross-entropy to the projected distribution
def update(
    q_network: QNetwork,
    target_network: QNetwork,
    optimizer: optim.Optimizer,
    args: Args,
    *batch: Tensor,
) -> Losses:
    """One gradient step; returns its loss and the mean predicted Q-value."""
    obs, next_obs, actions, rewards, terminated = batch
    atoms = q_network.atoms
    with torch.no_grad():
        next_probs = target_network.get_logits(next_obs).softmax(-1)
        best = (next_probs @ atoms).argmax(1)
        next_probs = next_probs.take_along_dim(best[:, None, None], 1).squeeze(1)
        # Only termination stops the bootstrap; after truncation, next_obs is the last observation.
        returns = rewards[:, None] + args.gamma * (1 - terminated[:, None]) * atoms
        target_probs = project(next_probs, returns, atoms)
    logits = q_network.get_logits(obs).take_along_dim(actions[:, None, None], 1).squeeze(1)
    floor = math.log(max(args.min_probability, 1e-38))  # 1e-38: practically no floor
    logprobs = logits.log_softmax(-1).clamp(min=floor)
    loss = -(target_probs * logprobs).sum(1).mean()  # cross-entropy
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    q_values = logits.detach().softmax(-1) @ atoms
    return {"losses/loss": loss.detach(), "losses/q_values": q_values.mean()}


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    device = run.device
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Discrete, "sac_continuous_action.py")

    q_network = QNetwork(envs, args).to(device)
    target_network = QNetwork(envs, args).to(device)
    target_network.load_state_dict(q_network.state_dict())
    adam = dict(eps=0.01 / args.batch_size, fused=True, capturable=device.type == "cuda")  # paper's
    optimizer = optim.Adam(q_network.parameters(), args.learning_rate, **adam)
    memory = make_memory(ReplayBuffer, envs, args, device)
    q_values = inference(q_network, device, args)
    losses = Means()
    train = accelerate(partial(update, q_network, target_network, optimizer, args), device, args)

    @partial(capture, device=memory.device, args=args)  # sampling, too, if the memory is on the GPU
    def learn() -> None:
        batch = memory.sample(args.batch_size).to(device)
        losses.add(train(*batch))

    rng = np.random.default_rng(args.seed)
    actions = np.zeros(args.num_envs, dtype=np.int64)

    envs.reset(seed=args.seed)
    state = dict(q_network=q_network, target_network=target_network, optimizer=optimizer)
    state |= dict(memory=memory, losses=losses, rng=rng, envs=envs)
    start = run.resume(args.num_iterations, **state)
    obs = envs.obs
    ended = envs.ended
    for iteration in range(start, args.num_iterations):
        steps = iteration * args.num_envs  # so far

        # Act. Each environment explores independently of the others.
        exploring = args.exploration_fraction * args.total_timesteps  # steps
        epsilon = linear_schedule(args.start_e, args.end_e, exploring, steps)
        explore = rng.random(args.num_envs) < epsilon
        if not explore.all():
            actions[:] = q_values(obs).argmax(-1)
        if explore.any():
            actions[explore] = rng.integers(envs.single_action_space.n, size=explore.sum())

        # differs from dqn.py: the target network is copied
        # Learn; a GPU does so while the environments step. Steps are summed over environments, so
        # --num-envs changes neither the number of updates nor their order.
        for global_step in range(steps + 1, steps + args.num_envs + 1):
            learning = global_step > args.learning_starts
            if learning and global_step % args.train_frequency == 0:
                learn()
            if learning and global_step % args.target_network_frequency == 0:
                target_network.load_state_dict(q_network.state_dict())
            if global_step % 100 == 0:
                run.log(losses.take(), global_step)

        # Step the environments; a step that only reset one of them is not stored.
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        memory.add(obs, next_obs, actions, rewards, terminated, ~ended)
        obs = next_obs
        ended = terminated | truncated
        run.log_episodes(infos, global_step)
        run.evaluate(q_network, global_step)
        run.checkpoint(iteration + 1)

    run.finish(q_network)
