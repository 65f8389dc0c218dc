"""Parallelised Q-Network (PQN) with an LSTM, for Atari games that EnvPool steps.

    python cleanrl/pqn_atari_envpool_lstm.py --env-id Breakout-v5

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
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from cleanrl_utils.environments import atari_wrappers as atari
from cleanrl_utils.environments.envpool import Pool
from cleanrl_utils.environments.making import make
from cleanrl_utils.running.losses import Losses, mean_of
from cleanrl_utils.running.run import LargeArgs, Run, parse_args, require
from cleanrl_utils.running.settings import Count, NonNegative, Share
from cleanrl_utils.speed.graphs import accelerate, to_device


@dataclass
class Args(LargeArgs):
    env_id: str = "Breakout-v5"
    """id of the game, one of EnvPool's Atari games"""
    total_timesteps: Count = 10_000_000
    """number of environment steps"""
    learning_rate: NonNegative = 2.5e-4
    """learning rate of RAdam"""
    num_envs: Count = 8
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
    max_grad_norm: NonNegative = 0.5
    """maximum norm of the gradient"""
    start_e: Share = 1
    """probability of a random action at the start (epsilon)"""
    end_e: Share = 0.01
    """probability of a random action at the end of exploration (epsilon)"""
    exploration_fraction: Share = 0.1
    """fraction of --total-timesteps over which epsilon falls from --start-e to --end-e"""

    # differs from pqn_atari_envpool.py: minibatches of whole environments
    def __post_init__(self) -> None:
        super().__post_init__()
        self.batch_size = self.num_envs * self.num_steps
        self.num_iterations = self.total_timesteps // self.batch_size
        batch = f"the batch of --num-envs x --num-steps = {self.batch_size} steps"
        divides = self.num_envs % self.num_minibatches == 0
        require(divides, f"--num-minibatches must divide --num-envs = {self.num_envs}")
        varies = "the number of episodes, which varies, is a shape in its update"
        require(not self.compile, f"--compile is not for this script: {varies}")
        require(self.num_iterations > 0, f"--total-timesteps must be at least {batch}")


# differs from pqn_atari_envpool.py: single frames: the LSTM remembers
def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment for evaluation, with EnvPool's rules and images."""

    def thunk() -> gym.Env:
        game = f"ALE/{name_of_game(env_id)}-v5"
        rules = {"frameskip": 1, "obs_type": "grayscale", "repeat_action_probability": 0.0}
        film = video_folder if capture_video and idx == 0 else None
        env = make(game, film, **rules, **env_kwargs)
        env = gym.wrappers.RecordEpisodeStatistics(env)  # of whole games, rewards unclipped
        env = atari.MaxAndSkip(env, skip=4)
        env = atari.EnvPoolLives(env, noop_max=30)
        env = atari.ClipReward(env)
        env = gym.wrappers.ResizeObservation(env, (84, 84))
        env = gym.wrappers.FrameStackObservation(env, 1)
        env.action_space.seed(seed)
        return env

    return thunk


def name_of_game(env_id: str) -> str:
    return env_id.removesuffix("-v5").removesuffix("NoFrameskip-v4")


# differs from pqn_atari_envpool.py: single frames
def make_envs(args: Args) -> Pool:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored.

    A lost life is such an end; the step after it goes on with the game.
    """
    game = f"{name_of_game(args.env_id)}-v5"
    learner = {"episodic_life": True, "reward_clip": True}  # infos hold the true game
    return Pool(game, args.num_envs, args.seed, stack_num=1, **learner, **args.env_settings)


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels at each position of (batch, channels, height, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


# differs from pqn_atari_envpool.py: an LSTM behind the convolutional network
class QNetwork(nn.Module):
    """Q-values of all actions, by an LSTM behind the convolutional network of DQN.

    The state of the LSTM is one tensor, (2, num_envs, 128): hidden state and cell state.
    """

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(1, 32, 8, stride=4)),
            ChannelNorm(32),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            ChannelNorm(64),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3)),
            ChannelNorm(64),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.LayerNorm(512),
            nn.ReLU(),
        )
        self.lstm = nn.LSTM(512, 128)
        for name, parameter in self.lstm.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)
        self.head = layer_init(nn.Linear(128, envs.single_action_space.n), std=1.0)

    def features(self, obs: Tensor) -> Tensor:
        """Features of images: bytes, (..., frames, 84, 84)."""
        pixels = obs.flatten(0, -4).to(memory_format=torch.channels_last)  # faster
        return self.network(pixels / 255).unflatten(0, obs.shape[:-3])

    def initial_state(self, num_envs: int) -> Tensor:
        return torch.zeros(2, num_envs, 128, device=self.head.weight.device)

    def step(self, obs: Tensor, state: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Q-values and the new state; `first` marks observations that an episode begins with."""
        state = state * ~first.unsqueeze(-1)
        hidden, state = self.lstm(self.features(obs).unsqueeze(0), state.split(1))
        return self.head(hidden[0]), torch.cat(state)

    def act(self, obs: Tensor, state: Tensor, first: Tensor, greedy: bool = True) -> tuple:
        q_values, state = self.step(obs, state, first)
        return q_values.argmax(-1), state

    def explore(self, obs: Tensor, state: Tensor, first: Tensor, epsilon: Tensor) -> tuple:
        q_values, state = self.step(obs, state, first)
        return epsilon_greedy(q_values, epsilon), state

    def forward(self, obs: Tensor, state: Tensor, sizes: Tensor) -> Tensor:
        """Q-values of packed episodes that begin in `state`, all at once."""
        packed = PackedSequence(self.features(obs), sizes)
        return self.head(self.lstm(packed, state.split(1))[0].data)


def pack(first: Tensor, state: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences of some environments, split at episode starts and packed for one LSTM call.

    `first` is (num_steps, num_envs), `state` the LSTM's state before the first of these steps.
    Returns the steps of the packed episodes, as indices into the flat rollout, the initial state of
    each episode, and the number of episodes at each time step.
    """
    num_envs = first.shape[1]
    device = state.device
    begins = first[:, columns].T.clone()
    begins[:, 0] = True  # of the rollout, if not of an episode
    steps = torch.arange(first.numel()).view_as(first)[:, columns].T.flatten()
    episodes = steps.tensor_split(begins.flatten().nonzero().flatten()[1:])
    episodes = sorted(episodes, key=len, reverse=True)
    packed = pack_sequence(episodes)
    start = torch.stack([episode[0] for episode in episodes]).to(device)
    # an episode that was open when the rollout began has a state; the others begin with zeros
    state = state[:, start % num_envs] * (start < num_envs).unsqueeze(-1)
    return packed.data.to(device), state, packed.batch_sizes


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


# differs from pqn_atari_envpool.py: sequences of one environment each
def update(
    q_network: QNetwork, optimizer: optim.Optimizer, args: Args, *minibatch: Tensor
) -> Losses:
    """One gradient step; returns its loss and the mean predicted Q-value."""
    obs, actions, returns, real, state, sizes = minibatch
    # Means over real transitions: steps that only reset an environment have weight 0.
    weights = real / real.sum().clamp(min=1)
    q_values = q_network(obs, state, sizes).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
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
    envs = make_envs(args)

    q_network = QNetwork(envs).to(device)
    lr = torch.tensor(args.learning_rate, device=device)  # a tensor, as CUDA graphs need
    epsilon = torch.zeros((), device=device)
    optimizer = optim.RAdam(q_network.parameters(), lr, capturable=device.type == "cuda")
    explore = partial(q_network.explore, epsilon=epsilon)
    sample = accelerate(torch.no_grad()(explore), device, args)
    learn = partial(update, q_network, optimizer, args)  # no graph: shapes vary

    # differs from pqn_atari_envpool.py: with the LSTM's states and episode starts
    # A rollout, (num_steps, num_envs). obs has one row more, for the Q-values after the last step.
    shape = (args.num_steps + 1, args.num_envs, *envs.single_observation_space.shape)
    obs = torch.zeros(shape, dtype=torch.uint8, device=device)
    actions = torch.zeros(args.num_steps, args.num_envs, dtype=torch.long, device=device)
    record = np.zeros((4, args.num_steps, args.num_envs), np.float32)
    first = torch.ones(shape[:2], dtype=torch.bool, device=device)  # an episode begins
    # states[t] is the LSTM's state before obs[t], states[t + 1] the one after it
    states = torch.zeros(args.num_steps + 2, 2, args.num_envs, 128, device=device)

    start = run.resume(args.num_iterations, q_network=q_network, optimizer=optimizer, envs=envs)
    for iteration in range(start, args.num_iterations):
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1 - iteration / args.num_iterations))
        exploring = args.exploration_fraction * args.num_iterations
        epsilon.fill_(linear_schedule(args.start_e, args.end_e, exploring, iteration))

        # Collect a rollout; it continues the last one, unless an episode begins there.
        first[0] = first[-1]
        states[0] = states[-2] * ~first[-1].unsqueeze(-1)
        for step in range(args.num_steps):
            obs[step] = to_device(envs.obs, device)
            actions[step], states[step + 1] = sample(obs[step], states[step], first[step])
            real = ~envs.ended  # the step after an episode's end only resets
            first[step + 1] = torch.as_tensor(~real)
            _, reward, term, trunc, infos = envs.step(actions[step].cpu().numpy())
            record[:, step] = reward, term, term | trunc, real
            global_step = iteration * args.batch_size + (step + 1) * args.num_envs
            run.log_episodes(infos, global_step, average=20)
        obs[-1] = to_device(envs.obs, device)
        _, states[-1] = sample(obs[-1], states[-2], first[-1])

        # differs from pqn_atari_envpool.py: minibatches of sequences
        # Learn
        rewards, terminated, done, real = torch.as_tensor(record)
        with torch.no_grad():
            values = q_network.head(states[1:, 0]).amax(-1).cpu()  # the returns are CPU work
        returns = q_lambda_returns(rewards, values, terminated, done, args)
        rollout = (obs[:-1], actions, returns, real)
        batch = [x.flatten(0, 1).to(device) for x in rollout]
        losses = []
        cuts = first[:-1].cpu()
        for _ in range(args.update_epochs):
            shuffled = torch.randperm(args.num_envs)
            for columns in shuffled.split(args.num_envs // args.num_minibatches):
                indices, state, sizes = pack(cuts, states[0], columns)
                losses.append(learn(*(x[indices] for x in batch), state, sizes))

        metrics = {"charts/learning_rate": lr, "charts/epsilon": epsilon} | mean_of(losses)
        run.log(metrics, global_step)
        run.evaluate(q_network, global_step)
        if run.checkpoint(iteration + 1):  # EnvPool cannot be saved: it restarts
            first[-1] = True

    run.finish(q_network)
