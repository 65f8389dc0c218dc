"""Proximal Policy Optimization (PPO) with a GRU or LSTM, for vector observations.

    python cleanrl/ppo_recurrent.py --env-id cleanrl_utils.environments.memory:CartPoleNoVel-v1

Paper: https://arxiv.org/abs/1707.06347. Every detail: docs/rl-algorithms/ppo-recurrent.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import e, log, pi
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn, optim

from cleanrl_utils.environments.making import make, require_spaces
from cleanrl_utils.environments.masks import MaskInObservation
from cleanrl_utils.environments.vector import SyncVectorEnv
from cleanrl_utils.running.losses import Losses, clip, larger, mean_of, squared_error
from cleanrl_utils.running.run import Run, TorchArgs, parse_args, require
from cleanrl_utils.running.settings import Count, NonNegative, Share
from cleanrl_utils.speed.graphs import accelerate
from cleanrl_utils.speed.sequences import run_sequences


@dataclass
class Args(TorchArgs):
    env_id: str = "cleanrl_utils.environments.memory:CartPoleNoVel-v1"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 500_000
    """number of environment steps"""
    cell: Literal["gru", "lstm"] = "gru"
    """kind of recurrent cell"""
    learning_rate: NonNegative = 1e-3
    """learning rate of Adam"""
    num_envs: Count = 16
    """number of parallel environments"""
    num_steps: Count = 128
    """number of steps per environment in a rollout"""
    reward_scale: NonNegative = 0.1
    """factor of the rewards in training; logged returns are not scaled"""
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
    clip_coef: NonNegative = 0.2
    """clipping coefficient of the policy objective: the ratio stays within 1 ± this"""
    clip_vloss: bool = False
    """clip the value loss with the same coefficient as the policy objective"""
    ent_coef: NonNegative = 0.0
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
        self.num_iterations = self.total_timesteps // self.batch_size
        batch = f"the batch of --num-envs x --num-steps = {self.batch_size} steps"
        divides = self.num_envs % self.num_minibatches == 0
        require(divides, f"--num-minibatches must divide --num-envs = {self.num_envs}")
        varies = "the number of episodes, which varies, is a shape in its update"
        require(not self.compile, f"--compile is not for this script: {varies}")
        require(self.num_iterations > 0, f"--total-timesteps must be at least {batch}")


# differs from ppo_atari_lstm.py: vectors; clips continuous actions to their bounds
def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment; the first of them may be filmed."""

    def thunk() -> gym.Env:
        env = make(env_id, video_folder if capture_video and idx == 0 else None, **env_kwargs)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        env = MaskInObservation(env, required=False)  # a vector: the observation, then the mask
        if isinstance(env.action_space, gym.spaces.Box):  # the learner keeps what it sampled
            env = gym.wrappers.ClipAction(env)
        env.action_space.seed(seed)
        return env

    return thunk


# differs from ppo_atari_lstm.py: no processes
def make_envs(args: Args, video_folder: str) -> gym.vector.VectorEnv:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored."""
    kwargs = args.env_settings | {"capture_video": args.capture_video, "video_folder": video_folder}
    thunks = [make_env(args.env_id, args.seed + i, i, **kwargs) for i in range(args.num_envs)]
    return SyncVectorEnv(thunks)


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


# differs from ppo_atari_lstm.py: vectors with a mask; GRU or LSTM; also a Gaussian policy
class Agent(nn.Module):
    """Actor and critic, two heads on a GRU or LSTM; they do not see the mask itself."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        space = envs.single_action_space
        self.discrete = isinstance(space, gym.spaces.Discrete)
        num_actions = space.n if self.discrete else space.shape[0]
        self.num_obs = envs.single_observation_space.shape[0] - self.discrete * num_actions
        self.encoder = layer_init(nn.Linear(self.num_obs, 64))
        self.rnn = nn.GRU(64, 64) if args.cell == "gru" else nn.LSTM(64, 64)
        for name, parameter in self.rnn.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)
        self.critic = layer_init(nn.Linear(64, 1), std=1.0)
        self.actor = layer_init(nn.Linear(64, num_actions), std=0.01)  # nearly uniform at first
        self.logstd = nn.Parameter(torch.zeros(num_actions))  # of continuous actions

    def initial_state(self, num_envs: int) -> Tensor:
        parts = 1 if isinstance(self.rnn, nn.GRU) else 2  # an LSTM also has a cell state
        return torch.zeros(parts, num_envs, 64, device=self.actor.weight.device)

    def remember(self, obs: Tensor, state: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, (num_steps, num_envs, 64), and the last one; zeros where `first`."""
        return run_sequences(self.rnn, self.encoder(obs[..., : self.num_obs]).tanh(), state, first)

    def get_outputs(self, hidden: Tensor, obs: Tensor) -> Tensor:
        """Logits of discrete actions, -1e8 for invalid ones; means of continuous actions."""
        outputs = self.actor(hidden)
        if self.discrete:
            outputs = outputs.masked_fill(obs[..., self.num_obs :] == 0, -1e8)
        return outputs

    def act(self, obs: Tensor, state: Tensor, first: Tensor, greedy: bool = True) -> tuple:
        """Actions and the new state; `first` marks observations that an episode begins with."""
        hidden, state = self.remember(obs.unsqueeze(0), state, first.unsqueeze(0))
        outputs = self.get_outputs(hidden[0], obs)
        if not self.discrete:
            noise = self.logstd.exp() * torch.randn_like(outputs)
            return outputs if greedy else outputs + noise, state
        if not greedy:  # Gumbel-max: the argmax of logits plus Gumbel noise is a sample of softmax
            outputs = outputs - torch.empty_like(outputs).exponential_().log()
        return outputs.argmax(-1), state

    def get_logprob_entropy_value(self, hidden: Tensor, obs: Tensor, actions: Tensor) -> tuple:
        outputs = self.get_outputs(hidden, obs)
        value = self.critic(hidden).squeeze(-1)
        if self.discrete:
            logprobs = outputs.log_softmax(-1)
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            return logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1), entropy, value
        z = (actions - outputs) / self.logstd.exp()  # of an independent Gaussian
        logprob = (-0.5 * z.square() - self.logstd - 0.5 * log(2 * pi)).sum(-1)
        entropy = (self.logstd + 0.5 * log(2 * pi * e)).sum().expand_as(logprob)
        return logprob, entropy, value


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


# differs from ppo_atari_lstm.py: sequences with their observations, which hold the masks
def update(agent: Agent, optimizer: optim.Optimizer, args: Args, *minibatch: Tensor) -> Losses:
    """One gradient step; returns the losses and diagnostics of its minibatch."""
    obs, actions, logprobs, values, advantages, returns, real, state, first = minibatch
    # Means over real transitions: steps that only reset an environment have weight 0.
    weights = real / real.sum().clamp(min=1)
    hidden, _ = agent.remember(obs, state, first)
    newlogprob, entropy, newvalue = agent.get_logprob_entropy_value(hidden, obs, actions)
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
    require_spaces(envs, args.env_id, gym.spaces.Discrete | gym.spaces.Box, "")

    agent = Agent(envs, args).to(device)
    lr = torch.tensor(args.learning_rate, device=device)  # a tensor, as CUDA graphs need
    adam = dict(eps=1e-5, fused=True, capturable=device.type == "cuda")  # eps: openai/baselines
    optimizer = optim.Adam(agent.parameters(), lr, **adam)
    sample = accelerate(torch.no_grad()(partial(agent.act, greedy=False)), device, args)
    learn = partial(update, agent, optimizer, args)  # no graph: shapes vary

    # differs from ppo_atari_lstm.py: vectors, discrete or continuous actions, GRU or LSTM
    # A rollout, (num_steps, num_envs). obs has one row more, for the value after the last step.
    obs = torch.zeros(args.num_steps + 1, *envs.observation_space.shape, device=device)
    kind = torch.long if agent.discrete else torch.float32
    actions = torch.zeros(args.num_steps, *envs.action_space.shape, dtype=kind, device=device)
    record = np.zeros((4, args.num_steps, args.num_envs), np.float32)
    first = torch.ones(obs.shape[:2], dtype=torch.bool, device=device)  # an episode begins
    # states[t] is the recurrent state before obs[t], states[t + 1] the one after it
    states = agent.initial_state(args.num_envs).repeat(args.num_steps + 2, 1, 1, 1)
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

        # differs from ppo_atari_lstm.py: scales rewards, the agent packs the sequences
        # Learn
        rewards, terminated, done, real = torch.as_tensor(record)
        with torch.no_grad():
            hidden = states[1:, 0]
            logprobs, _, _ = agent.get_logprob_entropy_value(hidden[:-1], obs[:-1], actions)
            values = agent.critic(hidden).squeeze(-1).cpu()  # gae is CPU work
        advantages = gae(args.reward_scale * rewards, values, terminated, done, args)
        returns = advantages + values[:-1]
        rollout = (obs[:-1], actions, logprobs, values[:-1], advantages, returns, real)
        batch = [x.to(device) for x in (*rollout, states[0], first[:-1])]
        losses = []
        for _ in range(args.update_epochs):
            shuffled = torch.randperm(args.num_envs)
            for columns in shuffled.split(args.num_envs // args.num_minibatches):
                losses.append(learn(*(x[:, columns] for x in batch)))
            if args.target_kl is not None and losses[-1]["losses/approx_kl"] > args.target_kl:
                break

        residual = (returns - values[:-1])[real > 0]
        metrics = {"charts/learning_rate": lr} | mean_of(losses)
        metrics["losses/explained_variance"] = 1 - residual.var() / (returns[real > 0].var() + 1e-8)
        run.log(metrics, global_step)
        run.evaluate(agent, global_step)
        run.checkpoint(iteration + 1)

    run.finish(agent)
