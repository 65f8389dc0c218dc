"""Proximal Policy Optimization (PPO) for Atari games that EnvPool steps, in C++ threads.

    python cleanrl/ppo_atari_envpool.py --env-id Breakout-v5

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

from cleanrl_utils.environments import atari_wrappers as atari
from cleanrl_utils.environments.envpool import Pool
from cleanrl_utils.environments.making import make
from cleanrl_utils.running.losses import Losses, clip, larger, mean_of, squared_error, stack
from cleanrl_utils.running.run import LargeArgs, Run, parse_args, require
from cleanrl_utils.running.settings import Count, NonNegative, Share
from cleanrl_utils.speed.graphs import capture, compile, to_device
from cleanrl_utils.speed.inference import PolicyOnDevice


@dataclass
class Args(LargeArgs):
    env_id: str = "Breakout-v5"
    """id of the game, one of EnvPool's Atari games"""
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

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 4 if self.num_envs == 1 else 2  # so that at least two steps are not resets
        require(self.num_steps >= least, f"--num-steps must be at least {least}")
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.num_iterations = self.total_timesteps // self.batch_size
        batch = f"the batch of --num-envs x --num-steps = {self.batch_size} steps"
        divides = self.batch_size % self.num_minibatches == 0
        require(divides, f"--num-minibatches must divide {batch}")
        require(self.num_iterations > 0, f"--total-timesteps must be at least {batch}")


# differs from ppo_atari.py: only for evaluation, with EnvPool's rules
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
        env = gym.wrappers.FrameStackObservation(env, 4)
        env.action_space.seed(seed)
        return env

    return thunk


def name_of_game(env_id: str) -> str:
    return env_id.removesuffix("-v5").removesuffix("NoFrameskip-v4")


# differs from ppo_atari.py: EnvPool steps the games
def make_envs(args: Args) -> Pool:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored.

    A lost life is such an end; the step after it goes on with the game.
    """
    game = f"{name_of_game(args.env_id)}-v5"
    learner = {"episodic_life": True, "reward_clip": True}  # infos hold the true game
    return Pool(game, args.num_envs, args.seed, **learner, **args.env_settings)


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Actor and critic, two heads on the convolutional network of DQN's Nature paper."""

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__()
        num_actions = envs.single_action_space.n
        conv1 = layer_init(nn.Conv2d(4, 32, 8, stride=4))
        conv2 = layer_init(nn.Conv2d(32, 64, 4, stride=2))
        conv3 = layer_init(nn.Conv2d(64, 64, 3))
        linear = layer_init(nn.Linear(64 * 7 * 7, 512))
        convs = [conv1, nn.ReLU(), conv2, nn.ReLU(), conv3, nn.ReLU()]
        self.network = nn.Sequential(*convs, nn.Flatten(), linear, nn.ReLU())
        self.critic = layer_init(nn.Linear(512, 1), std=1.0)
        self.actor = layer_init(nn.Linear(512, num_actions), std=0.01)  # small outputs at first

    def features(self, obs: Tensor) -> Tensor:  # bytes, (..., frames, 84, 84)
        pixels = obs.flatten(0, -4).to(memory_format=torch.channels_last)  # faster
        return self.network(pixels / 255).unflatten(0, obs.shape[:-3])

    def act(self, obs: Tensor, greedy: bool = True) -> Tensor:
        logits = self.actor(self.features(obs))
        if not greedy:  # Gumbel-max: the argmax of logits plus Gumbel noise is a sample of softmax
            logits = logits - torch.empty_like(logits).exponential_().log()
        return logits.argmax(-1)

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic(self.features(obs)).squeeze(-1)

    def get_logprob_entropy_value(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, ...]:
        obs = self.features(obs)
        logprobs = self.actor(obs).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        logprob = logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return logprob, entropy, self.critic(obs).squeeze(-1)


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


def update(agent: Agent, optimizer: optim.Optimizer, args: Args, *minibatch: Tensor) -> Losses:
    """One gradient step; returns the losses and diagnostics of its minibatch."""
    obs, actions, logprobs, values, advantages, returns, real = minibatch
    # Means over real transitions: steps that only reset an environment have weight 0.
    weights = real / real.sum().clamp(min=1)
    newlogprob, entropy, newvalue = agent.get_logprob_entropy_value(obs, actions)
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
    envs = make_envs(args)

    agent = Agent(envs).to(device)
    lr = torch.tensor(args.learning_rate, device=device)  # a tensor, as CUDA graphs need
    adam = dict(eps=1e-5, fused=True, capturable=device.type == "cuda")  # eps: openai/baselines
    optimizer = optim.Adam(agent.parameters(), lr, **adam)
    policy = PolicyOnDevice(partial(agent.act, greedy=False), device, args)
    train = compile(partial(update, agent, optimizer, args), args)

    @partial(capture, device=device, args=args)  # an epoch is one CUDA graph
    def learn(shuffled: Tensor, *batch: Tensor) -> Losses:
        minibatches = zip(*(x[shuffled].split(args.minibatch_size) for x in batch), strict=True)
        return stack([train(*minibatch) for minibatch in minibatches])

    # differs from ppo_atari.py: actions stay on the CPU
    # A rollout, (num_steps, num_envs). obs has one row more, for the value after the last step.
    shape = (args.num_steps + 1, args.num_envs, *envs.single_observation_space.shape)
    obs = torch.zeros(shape, dtype=torch.uint8, device=device)
    actions = np.zeros((args.num_steps, args.num_envs), np.int64)
    record = np.zeros((4, args.num_steps, args.num_envs), np.float32)

    state = dict(agent=agent, optimizer=optimizer, envs=envs)
    start = run.resume(args.num_iterations, **state)
    for iteration in range(start, args.num_iterations):
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1 - iteration / args.num_iterations))

        # differs from ppo_atari.py: the GPU gets the frames and returns actions in one graph
        # Collect a rollout. Only actions are needed now; the rest is computed in one batch below.
        for step in range(args.num_steps):
            obs[step] = policy.start(envs.obs)  # the same observations, on the device
            actions[step] = policy.result()
            real = ~envs.ended  # the step after an episode's end only resets
            _, reward, term, trunc, infos = envs.step(actions[step])
            record[:, step] = reward, term, term | trunc, real
            global_step = iteration * args.batch_size + (step + 1) * args.num_envs
            run.log_episodes(infos, global_step, average=20)
        obs[-1] = to_device(envs.obs, device)

        # differs from ppo_atari.py: actions go to the device in one copy
        # Learn
        rewards, terminated, done, real = torch.as_tensor(record)
        taken = torch.as_tensor(actions, device=device)
        with torch.no_grad():
            logprobs, _, values = agent.get_logprob_entropy_value(obs[:-1], taken)
            values = torch.cat([values, agent.get_value(obs[-1:])]).cpu()  # gae is CPU work
        advantages = gae(rewards, values, terminated, done, args)
        returns = advantages + values[:-1]
        rollout = (obs[:-1], taken, logprobs, values[:-1], advantages, returns, real)
        batch = [x.flatten(0, 1).to(device) for x in rollout]
        losses = []
        for _ in range(args.update_epochs):
            losses.append(learn(torch.randperm(args.batch_size, device=device), *batch))
            if args.target_kl is not None and losses[-1]["losses/approx_kl"][-1] > args.target_kl:
                break

        residual = (returns - values[:-1])[real > 0]
        metrics = {"charts/learning_rate": lr} | mean_of(losses)
        metrics["losses/explained_variance"] = 1 - residual.var() / (returns[real > 0].var() + 1e-8)
        run.log(metrics, global_step)
        run.evaluate(agent, global_step)
        run.checkpoint(iteration + 1)  # EnvPool cannot be saved: it restarts

    run.finish(agent)
