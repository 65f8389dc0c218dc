"""Proximal Policy Optimization (PPO) with an LSTM instead of stacked frames.

    python cleanrl/ppo_atari_lstm.py --env-id BreakoutNoFrameskip-v4

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
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from cleanrl_utils.environments import atari_wrappers as atari
from cleanrl_utils.environments.making import is_atari, make, require_spaces
from cleanrl_utils.environments.vector import AsyncVectorEnv, SyncVectorEnv
from cleanrl_utils.running.losses import Losses, clip, larger, mean_of, squared_error
from cleanrl_utils.running.run import PixelArgs, Run, parse_args, require
from cleanrl_utils.running.settings import Count, NonNegative, Share
from cleanrl_utils.speed.graphs import accelerate


@dataclass
class Args(PixelArgs):
    env_id: str = "BreakoutNoFrameskip-v4"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 10_000_000
    """number of environment steps"""
    learning_rate: NonNegative = 2.5e-4
    """learning rate of Adam"""
    num_envs: Count = 8
    """number of parallel environments"""
    num_steps: Count = 128
    """number of steps per environment in a rollout"""
    anneal_lr: bool = True
    """decrease the learning rate linearly to zero"""
    gamma: Share = 0.99
    """discount factor"""
    gae_lambda: Share = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: Count = 4
    """number of minibatches per epoch"""
    update_epochs: Count = 4
    """number of epochs per update"""
    norm_adv: bool = True
    """normalise advantages per minibatch"""
    clip_coef: NonNegative = 0.1
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

    # differs from ppo_atari.py: minibatches of whole environments
    def __post_init__(self) -> None:
        super().__post_init__()
        least = 4 if self.num_envs == 1 else 2  # so that at least two steps are not resets
        require(self.num_steps >= least, f"--num-steps must be at least {least}")
        self.batch_size = self.num_envs * self.num_steps
        self.num_iterations = self.total_timesteps // self.batch_size
        batch = f"the batch of --num-envs x --num-steps = {self.batch_size} steps"
        divides = self.num_envs % self.num_minibatches == 0
        require(divides, f"--num-minibatches must divide --num-envs = {self.num_envs}")
        varies = "the number of episodes, which varies, is a shape in its update"
        require(not self.compile, f"--compile is not for this script: {varies}")
        require(self.num_iterations > 0, f"--total-timesteps must be at least {batch}")


# differs from ppo_atari.py: single frames: the LSTM remembers
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
        env = gym.wrappers.FrameStackObservation(env, 1)
        env.action_space.seed(seed)
        return env

    return thunk


def make_envs(args: Args, video_folder: str) -> gym.vector.VectorEnv:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored."""
    kwargs = args.env_settings | {"capture_video": args.capture_video, "video_folder": video_folder}
    thunks = [make_env(args.env_id, args.seed + i, i, **kwargs) for i in range(args.num_envs)]
    return AsyncVectorEnv(thunks) if args.async_envs else SyncVectorEnv(thunks)


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


# differs from ppo_atari.py: an LSTM behind the convolutional network
class Agent(nn.Module):
    """Actor and critic, two heads on an LSTM behind the convolutional network of DQN.

    The state of the LSTM is one tensor, (2, num_envs, 128): hidden state and cell state.
    """

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__()
        num_actions = envs.single_action_space.n
        conv1 = layer_init(nn.Conv2d(1, 32, 8, stride=4))
        conv2 = layer_init(nn.Conv2d(32, 64, 4, stride=2))
        conv3 = layer_init(nn.Conv2d(64, 64, 3))
        linear = layer_init(nn.Linear(64 * 7 * 7, 512))
        convs = [conv1, nn.ReLU(), conv2, nn.ReLU(), conv3, nn.ReLU()]
        self.network = nn.Sequential(*convs, nn.Flatten(), linear, nn.ReLU())
        self.lstm = nn.LSTM(512, 128)
        for name, parameter in self.lstm.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)
        self.critic = layer_init(nn.Linear(128, 1), std=1.0)
        self.actor = layer_init(nn.Linear(128, num_actions), std=0.01)  # small outputs at first

    def features(self, obs: Tensor) -> Tensor:  # bytes, (..., frames, 84, 84)
        pixels = obs.flatten(0, -4).to(memory_format=torch.channels_last)  # faster
        return self.network(pixels / 255).unflatten(0, obs.shape[:-3])

    def initial_state(self, num_envs: int) -> Tensor:
        return torch.zeros(2, num_envs, 128, device=self.actor.weight.device)

    def act(self, obs: Tensor, state: Tensor, first: Tensor, greedy: bool = True) -> tuple:
        """Actions and the new state; `first` marks observations that an episode begins with."""
        state = state * ~first.unsqueeze(-1)
        hidden, state = self.lstm(self.features(obs).unsqueeze(0), state.split(1))
        logits = self.actor(hidden[0])
        if not greedy:  # Gumbel-max: the argmax of logits plus Gumbel noise is a sample of softmax
            logits = logits - torch.empty_like(logits).exponential_().log()
        return logits.argmax(-1), torch.cat(state)

    def remember(self, obs: Tensor, state: Tensor, sizes: Tensor) -> Tensor:
        """Hidden states of packed episodes that begin in `state`, all at once."""
        packed = PackedSequence(self.features(obs), sizes)
        return self.lstm(packed, state.split(1))[0].data

    def get_logprob_entropy_value(self, hidden: Tensor, actions: Tensor) -> tuple[Tensor, ...]:
        logprobs = self.actor(hidden).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        logprob = logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return logprob, entropy, self.critic(hidden).squeeze(-1)


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


# differs from ppo_atari.py: sequences of one environment each
def update(agent: Agent, optimizer: optim.Optimizer, args: Args, *minibatch: Tensor) -> Losses:
    """One gradient step; returns the losses and diagnostics of its minibatch."""
    obs, actions, logprobs, values, advantages, returns, real, state, sizes = minibatch
    # Means over real transitions: steps that only reset an environment have weight 0.
    weights = real / real.sum().clamp(min=1)
    hidden = agent.remember(obs, state, sizes)
    newlogprob, entropy, newvalue = agent.get_logprob_entropy_value(hidden, actions)
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
    require_spaces(envs, args.env_id, gym.spaces.Discrete, "ppo_continuous_action.py")

    agent = Agent(envs).to(device)
    lr = torch.tensor(args.learning_rate, device=device)  # a tensor, as CUDA graphs need
    adam = dict(eps=1e-5, fused=True, capturable=device.type == "cuda")  # eps: openai/baselines
    optimizer = optim.Adam(agent.parameters(), lr, **adam)
    sample = accelerate(torch.no_grad()(partial(agent.act, greedy=False)), device, args)
    learn = partial(update, agent, optimizer, args)  # no graph: shapes vary

    # differs from ppo_atari.py: with the LSTM's states and episode starts
    # A rollout, (num_steps, num_envs). obs has one row more, for the value after the last step.
    shape = (args.num_steps + 1, *envs.observation_space.shape)
    obs = torch.zeros(shape, dtype=torch.uint8, device=device)
    actions = torch.zeros(args.num_steps, args.num_envs, dtype=torch.long, device=device)
    record = np.zeros((4, args.num_steps, args.num_envs), np.float32)
    first = torch.ones(shape[:2], dtype=torch.bool, device=device)  # an episode begins
    # states[t] is the LSTM's state before obs[t], states[t + 1] the one after it
    states = torch.zeros(args.num_steps + 2, 2, args.num_envs, 128, device=device)

    envs.reset(seed=args.seed)
    state = dict(agent=agent, optimizer=optimizer, envs=envs, first=first, states=states)
    start = run.resume(args.num_iterations, **state)
    for iteration in range(start, args.num_iterations):
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1 - iteration / args.num_iterations))

        # Collect a rollout; it continues the last one, unless an episode begins there.
        first[0] = first[-1]
        states[0] = states[-2] * ~first[-1].unsqueeze(-1)
        for step in range(args.num_steps):
            obs[step] = torch.as_tensor(envs.obs)
            actions[step], states[step + 1] = sample(obs[step], states[step], first[step])
            real = ~envs.ended  # the step after an episode's end only resets
            first[step + 1] = torch.as_tensor(~real)
            _, reward, term, trunc, infos = envs.step(actions[step].cpu().numpy())
            record[:, step] = reward, term, term | trunc, real
            global_step = iteration * args.batch_size + (step + 1) * args.num_envs
            run.log_episodes(infos, global_step)
        obs[-1] = torch.as_tensor(envs.obs)
        _, states[-1] = sample(obs[-1], states[-2], first[-1])

        # differs from ppo_atari.py: minibatches of sequences
        # Learn
        rewards, terminated, done, real = torch.as_tensor(record)
        with torch.no_grad():
            hidden = states[1:, 0]
            logprobs, _, _ = agent.get_logprob_entropy_value(hidden[:-1], actions)
            values = agent.critic(hidden).squeeze(-1).cpu()  # gae is CPU work
        advantages = gae(rewards, values, terminated, done, args)
        returns = advantages + values[:-1]
        rollout = (obs[:-1], actions, logprobs, values[:-1], advantages, returns, real)
        batch = [x.flatten(0, 1).to(device) for x in rollout]
        losses = []
        cuts = first[:-1].cpu()
        for _ in range(args.update_epochs):
            shuffled = torch.randperm(args.num_envs)
            for columns in shuffled.split(args.num_envs // args.num_minibatches):
                indices, state, sizes = pack(cuts, states[0], columns)
                losses.append(learn(*(x[indices] for x in batch), state, sizes))
            if args.target_kl is not None and losses[-1]["losses/approx_kl"] > args.target_kl:
                break

        residual = (returns - values[:-1])[real > 0]
        metrics = {"charts/learning_rate": lr} | mean_of(losses)
        metrics["losses/explained_variance"] = 1 - residual.var() / (returns[real > 0].var() + 1e-8)
        run.log(metrics, global_step)
        run.evaluate(agent, global_step)
        run.checkpoint(iteration + 1)

    run.finish(agent)
