"""Parallelised Q-Network (PQN) for vector observations and discrete actions.

    python cleanrl/pqn.py --env-id CartPole-v1

Paper: https://arxiv.org/abs/2407.04811. Every detail with its reason: docs/rl-algorithms/pqn.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn, optim

from cleanrl_utils.environments.making import make, require_spaces
from cleanrl_utils.environments.vector import SyncVectorEnv
from cleanrl_utils.running.losses import Losses, mean_of, stack
from cleanrl_utils.running.run import Run, TorchArgs, parse_args, require
from cleanrl_utils.running.settings import Count, NonNegative, Share
from cleanrl_utils.speed.graphs import accelerate, capture, compile


@dataclass
class Args(TorchArgs):
    env_id: str = "CartPole-v1"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 500_000
    """number of environment steps"""
    learning_rate: NonNegative = 2.5e-4
    """learning rate of RAdam"""
    num_envs: Count = 4
    """number of parallel environments"""
    num_steps: Count = 128
    """number of steps per environment in a rollout"""
    anneal_lr: bool = True
    """decrease the learning rate linearly to zero"""
    gamma: Share = 0.99
    """discount factor"""
    q_lambda: Share = 0.65
    """lambda of the Q(lambda) returns"""
    num_minibatches: Count = 4
    """number of minibatches per epoch"""
    update_epochs: Count = 4
    """number of epochs per update"""
    max_grad_norm: NonNegative = 10.0
    """maximum norm of the gradient"""
    start_e: Share = 1
    """probability of a random action at the start (epsilon)"""
    end_e: Share = 0.05
    """probability of a random action at the end of exploration (epsilon)"""
    exploration_fraction: Share = 0.5
    """fraction of --total-timesteps over which epsilon falls from --start-e to --end-e"""

    # differs from ppo.py: any number of steps
    def __post_init__(self) -> None:
        super().__post_init__()
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


class QNetwork(nn.Sequential):
    """Q-values of all actions. LayerNorm keeps learning stable without a target network."""

    def __init__(self, envs: gym.vector.VectorEnv):
        num_obs = envs.single_observation_space.shape[0]
        first = layer_init(nn.Linear(num_obs, 120))
        second = layer_init(nn.Linear(120, 84))
        last = layer_init(nn.Linear(84, envs.single_action_space.n), std=1.0)
        hidden = [first, nn.LayerNorm(120), nn.ReLU(), second, nn.LayerNorm(84), nn.ReLU()]
        super().__init__(*hidden, last)

    def act(self, obs: Tensor, greedy: bool = True) -> Tensor:
        return self(obs).argmax(-1)

    def explore(self, obs: Tensor, epsilon: Tensor) -> Tensor:
        return epsilon_greedy(self(obs), epsilon)


def epsilon_greedy(q_values: Tensor, epsilon: Tensor) -> Tensor:
    """The best actions; each is replaced by a random one with probability epsilon."""
    best = q_values.argmax(-1)
    random_actions = torch.randint_like(best, q_values.shape[-1])
    explore = torch.rand_like(q_values[..., 0]) < epsilon
    return torch.where(explore, random_actions, best)


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """From `start` at step 0 to `end` at step `duration`, and `end` from there on."""
    return end if step >= duration else start + (end - start) * step / duration


def q_lambda_returns(
    rewards: Tensor, values: Tensor, terminated: Tensor, done: Tensor, args: Args
) -> Tensor:
    """G_t = r_t + γ (1 - terminated_t) [λ G_{t+1} + (1 - λ) max_a Q(s_{t+1}, a)].

    All are (num_steps, num_envs); values, max_a Q of the observations, have one row more.
    """
    # A truncated episode bootstraps from its last observation alone, which is in the next row.
    lambdas = args.q_lambda * (1 - done)
    discounts = args.gamma * (1 - terminated)
    returns = torch.empty_like(rewards)
    later = values[-1]  # the last step has only its bootstrap
    for t in reversed(range(len(rewards))):
        bootstrap = lambdas[t] * later + (1 - lambdas[t]) * values[t + 1]
        returns[t] = later = rewards[t] + discounts[t] * bootstrap
    return returns


# differs from ppo.py: squared error to the Q(lambda) returns
def update(
    q_network: QNetwork, optimizer: optim.Optimizer, args: Args, *minibatch: Tensor
) -> Losses:
    """One gradient step; returns its loss and the mean predicted Q-value."""
    obs, actions, returns, real = minibatch
    # Means over real transitions: steps that only reset an environment have weight 0.
    weights = real / real.sum().clamp(min=1)
    q_values = q_network(obs).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    td_loss = ((q_values - returns).square() * weights).sum()
    optimizer.zero_grad()
    (0.5 * td_loss).backward()
    nn.utils.clip_grad_norm_(q_network.parameters(), args.max_grad_norm)
    optimizer.step()
    losses = {"losses/td_loss": td_loss, "losses/q_values": (q_values * weights).sum()}
    return {tag: loss.detach() for tag, loss in losses.items()}


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    device = run.device
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Discrete, "sac_continuous_action.py")

    q_network = QNetwork(envs).to(device)
    lr = torch.tensor(args.learning_rate, device=device)  # a tensor, as CUDA graphs need
    epsilon = torch.zeros((), device=device)
    optimizer = optim.RAdam(q_network.parameters(), lr, capturable=device.type == "cuda")
    explore = partial(q_network.explore, epsilon=epsilon)
    sample = accelerate(torch.no_grad()(explore), device, args)
    train = compile(partial(update, q_network, optimizer, args), args)

    @partial(capture, device=device, args=args)  # an epoch is one CUDA graph
    def learn(shuffled: Tensor, *batch: Tensor) -> Losses:
        minibatches = zip(*(x[shuffled].split(args.minibatch_size) for x in batch), strict=True)
        return stack([train(*minibatch) for minibatch in minibatches])

    # A rollout, (num_steps, num_envs). obs has one row more, for the Q-values after the last step.
    obs = torch.zeros(args.num_steps + 1, *envs.observation_space.shape, device=device)
    actions = torch.zeros(args.num_steps, args.num_envs, dtype=torch.long, device=device)
    record = np.zeros((4, args.num_steps, args.num_envs), np.float32)
    envs.reset(seed=args.seed)
    start = run.resume(args.num_iterations, q_network=q_network, optimizer=optimizer, envs=envs)
    for iteration in range(start, args.num_iterations):
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1 - iteration / args.num_iterations))
        exploring = args.exploration_fraction * args.num_iterations
        epsilon.fill_(linear_schedule(args.start_e, args.end_e, exploring, iteration))

        # Collect a rollout. Only actions are needed now; the rest is computed in one batch below.
        for step in range(args.num_steps):
            obs[step] = torch.as_tensor(envs.obs)
            actions[step] = sample(obs[step])
            real = ~envs.ended  # the step after an episode's end only resets
            _, reward, term, trunc, infos = envs.step(actions[step].cpu().numpy())
            record[:, step] = reward, term, term | trunc, real
            global_step = iteration * args.batch_size + (step + 1) * args.num_envs
            run.log_episodes(infos, global_step)
        obs[-1] = torch.as_tensor(envs.obs)

        # differs from ppo.py: Q(lambda) returns, no advantages
        # Learn
        rewards, terminated, done, real = torch.as_tensor(record)
        with torch.no_grad():
            values = q_network(obs).amax(-1).cpu()  # the returns are CPU work
        returns = q_lambda_returns(rewards, values, terminated, done, args)
        rollout = (obs[:-1], actions, returns, real)
        batch = [x.flatten(0, 1).to(device) for x in rollout]
        losses = []
        for _ in range(args.update_epochs):
            losses.append(learn(torch.randperm(args.batch_size, device=device), *batch))

        metrics = {"charts/learning_rate": lr, "charts/epsilon": epsilon} | mean_of(losses)
        run.log(metrics, global_step)
        run.evaluate(q_network, global_step)
        run.checkpoint(iteration + 1)

    run.finish(q_network)
