"""Random Network Distillation (RND): PPO with an intrinsic reward, for games of sparse rewards.

    python cleanrl/ppo_rnd_envpool.py --env-id MontezumaRevenge-v5

Paper: https://arxiv.org/abs/1810.12894. Every detail with its reason: docs/rl-algorithms/ppo-rnd.md
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
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share
from cleanrl_utils.speed.graphs import capture, compile, to_device
from cleanrl_utils.speed.inference import PolicyOnDevice

STICKY = 0.25  # probability that a frame repeats the last action (sticky actions)


@dataclass
class Args(LargeArgs):
    env_id: str = "MontezumaRevenge-v5"
    """id of the game, one of EnvPool's Atari games"""
    total_timesteps: Count = 2_000_000_000
    """number of environment steps"""
    learning_rate: NonNegative = 1e-4
    """learning rate of Adam"""
    num_envs: Count = 128
    """number of parallel environments"""
    num_steps: Count = 128
    """number of steps per environment in a rollout"""
    anneal_lr: bool = True
    """decrease the learning rate linearly to zero"""
    gamma: Share = 0.999
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
    ent_coef: NonNegative = 0.001
    """coefficient of the entropy bonus"""
    vf_coef: NonNegative = 0.5
    """coefficient of the value loss"""
    max_grad_norm: NonNegative = 0.5
    """maximum norm of the gradient"""
    target_kl: NonNegative | None = None
    """stop an update after the epoch in which the approximate KL divergence exceeds this"""
    update_proportion: Share = 0.25
    """fraction of each minibatch that trains the predictor network"""
    int_coef: NonNegative = 1.0
    """coefficient of the intrinsic advantage"""
    ext_coef: NonNegative = 2.0
    """coefficient of the extrinsic advantage"""
    int_gamma: Share = 0.99
    """discount factor of the intrinsic reward"""
    num_iterations_obs_norm_init: Natural = 50
    """number of rollouts with random actions that initialise the observation statistics"""

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


# differs from ppo_atari_envpool.py: sticky actions
def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment for evaluation, with EnvPool's rules and images."""

    def thunk() -> gym.Env:
        game = f"ALE/{name_of_game(env_id)}-v5"
        rules = {"frameskip": 1, "obs_type": "grayscale", "repeat_action_probability": STICKY}
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


# differs from ppo_atari_envpool.py: sticky actions
def make_envs(args: Args) -> Pool:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored.

    A lost life is such an end; the step after it goes on with the game.
    """
    game = f"{name_of_game(args.env_id)}-v5"
    learner = {"episodic_life": True, "reward_clip": True}  # infos hold the true game
    sticky = {"repeat_action_probability": STICKY}
    return Pool(game, args.num_envs, args.seed, **learner, **sticky, **args.env_settings)


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class RunningStats(nn.Module):
    """Running mean and standard deviation, saved in checkpoints and models."""

    def __init__(self, *shape: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("std", torch.ones(shape))
        self.register_buffer("count", torch.tensor(0.0, dtype=torch.float64))

    def update(self, x: Tensor) -> None:
        """Add a batch of shape (n, *shape) to the statistics (Chan, Golub and LeVeque, 1979)."""
        self.count += len(x)
        weight = len(x) / self.count
        var, mean = torch.var_mean(x, 0, correction=0)
        delta = mean - self.mean
        self.mean += weight * delta
        var = (1 - weight) * self.std.square() + weight * (var + (1 - weight) * delta.square())
        self.std.copy_(var.sqrt().clamp(min=1e-4))  # no division by 0


def convolutions(frames: int, activation: nn.Module) -> list[nn.Module]:
    """The convolutional layers of DQN's Nature paper; they have 3,136 outputs."""
    conv1 = layer_init(nn.Conv2d(frames, 32, 8, stride=4))
    conv2 = layer_init(nn.Conv2d(32, 64, 4, stride=2))
    conv3 = layer_init(nn.Conv2d(64, 64, 3))
    return [conv1, activation, conv2, activation, conv3, activation, nn.Flatten()]


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


# differs from ppo_atari_envpool.py: two value heads, and the networks of the intrinsic reward
class Agent(nn.Module):
    """Actor and critic on one network, and two networks whose difference is the intrinsic reward.

    The target is a random function of a frame. The predictor learns it from the frames that were
    visited, so its error is large where a frame is new.
    """

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__()
        self.network = nn.Sequential(
            *convolutions(4, nn.ReLU()),
            layer_init(nn.Linear(64 * 7 * 7, 256)),
            nn.ReLU(),
            layer_init(nn.Linear(256, 448)),
            nn.ReLU(),
        )
        extra = Residual(layer_init(nn.Linear(448, 448), std=0.1), nn.ReLU())
        # two values of each observation: of the extrinsic and of the intrinsic rewards
        self.critic = nn.Sequential(extra, layer_init(nn.Linear(448, 2), std=0.01))
        # nearly uniform at first
        output = layer_init(nn.Linear(448, envs.single_action_space.n), std=0.01)
        self.actor = nn.Sequential(layer_init(nn.Linear(448, 448), std=0.01), nn.ReLU(), output)

        target = [*convolutions(1, nn.LeakyReLU()), layer_init(nn.Linear(64 * 7 * 7, 512))]
        self.target = nn.Sequential(*target).requires_grad_(False)
        self.predictor = nn.Sequential(
            *convolutions(1, nn.LeakyReLU()),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
            layer_init(nn.Linear(512, 512)),
            nn.ReLU(),
            layer_init(nn.Linear(512, 512)),
        )
        self.frame_stats = RunningStats(84, 84)
        self.curiosity_stats = RunningStats()

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

    def prediction_error(self, frames: Tensor) -> Tensor:
        """Squared error of the predictor in each of 512 features; frames: bytes, (..., 84, 84)."""
        normalised = (frames - self.frame_stats.mean) / self.frame_stats.std
        pixels = normalised.clamp(-5, 5).flatten(0, -3).unsqueeze(1)
        error = (self.predictor(pixels) - self.target(pixels)).square()
        return error.unflatten(0, frames.shape[:-2])


def discounted_sums(rewards: Tensor, before: Tensor, gamma: float) -> Tensor:
    """Discounted sums of each environment's past rewards; their scale is that of returns."""
    sums = torch.empty_like(rewards)
    last = before
    for t in range(len(rewards)):
        sums[t] = last = rewards[t] + gamma * last
    return sums


# differs from ppo_atari_envpool.py: two streams of rewards
def gae(
    rewards: Tensor, values: Tensor, terminated: Tensor, done: Tensor, gamma: Tensor, args: Args
) -> Tensor:
    """Advantages of a rollout; all are (num_steps, num_envs, 2), values have one row more."""
    # A truncated episode bootstraps from its last observation, which is in the next row.
    delta = rewards + gamma * values[1:] * (1 - terminated) - values[:-1]
    decay = gamma * args.gae_lambda * (1 - done)  # the sum stops at the end of an episode
    advantages = torch.empty_like(delta)
    last = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        advantages[t] = last = delta[t] + decay[t] * last
    return advantages


# differs from ppo_atari_envpool.py: two value losses and the predictor's loss
def update(agent: Agent, optimizer: optim.Optimizer, args: Args, *minibatch: Tensor) -> Losses:
    """One gradient step; returns the losses and diagnostics of its minibatch."""
    obs, frames, actions, logprobs, values, advantages, returns, real = minibatch
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
    # The intrinsic return does not end with an episode: reset steps count for its value.
    v_loss = 0.5 * ((v_error[:, 0] * weights).sum() + v_error[:, 1].mean())
    entropy = (entropy * weights).sum()
    chosen = (torch.rand_like(real) < args.update_proportion).float()
    fwd_error = agent.prediction_error(frames).mean(-1)
    fwd_loss = (fwd_error * chosen).sum() / chosen.sum().clamp(min=1)
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss + fwd_loss
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
        "losses/fwd_loss": fwd_loss,
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

    # differs from ppo_atari_envpool.py: two streams of rewards
    # A rollout, (num_steps, num_envs). obs has one row more, for the value after the last step.
    shape = (args.num_steps + 1, args.num_envs, *envs.single_observation_space.shape)
    obs = torch.zeros(shape, dtype=torch.uint8, device=device)
    actions = np.zeros((args.num_steps, args.num_envs), np.int64)
    record = np.zeros((4, args.num_steps, args.num_envs), np.float32)
    # Two rewards, extrinsic and intrinsic: only the return of the first ends with an episode.
    gamma = torch.tensor([args.gamma, args.int_gamma])
    episodic = torch.tensor([1.0, 0.0])
    coefs = torch.tensor([args.ext_coef, args.int_coef])
    last_sums = torch.zeros(args.num_envs)  # discounted sums of past intrinsic rewards

    state = dict(agent=agent, optimizer=optimizer, last_sums=last_sums, envs=envs)
    start = run.resume(args.num_iterations, **state)
    if start == 0:  # random steps initialise the observation statistics
        warm_up = args.num_iterations_obs_norm_init
        run.say(f"{warm_up * args.batch_size:,} random steps come first, for statistics of frames")
        for _ in range(warm_up):
            for step in range(args.num_steps):
                action = np.random.randint(envs.single_action_space.n, size=args.num_envs)
                obs[step] = to_device(envs.step(action)[0], device)
            agent.frame_stats.update(obs[:-1, :, -1].flatten(0, 1).float())
        envs.restart()
    for iteration in range(start, args.num_iterations):
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1 - iteration / args.num_iterations))

        # differs from ppo_atari_envpool.py: notes where games ended
        # Collect a rollout. Only actions are needed now; the rest is computed in one batch below.
        games = []  # that ended: at which step of the run, and where in the rollout
        for step in range(args.num_steps):
            obs[step] = policy.start(envs.obs)  # the same observations, on the device
            actions[step] = policy.result()
            real = ~envs.ended  # the step after an episode's end only resets
            _, reward, term, trunc, infos = envs.step(actions[step])
            record[:, step] = reward, term, term | trunc, real
            global_step = iteration * args.batch_size + (step + 1) * args.num_envs
            run.log_episodes(infos, global_step, average=20)
            if "_episode" in infos:
                games += [(global_step, step, i) for i in np.flatnonzero(infos["_episode"])]
        obs[-1] = to_device(envs.obs, device)

        # differs from ppo_atari_envpool.py: intrinsic rewards and their advantages
        # Learn
        rewards, terminated, done, real = torch.as_tensor(record)
        frames = obs[1:, :, -1]  # the newest of what each action led to
        taken = torch.as_tensor(actions, device=device)
        with torch.no_grad():
            logprobs, _, values = agent.get_logprob_entropy_value(obs[:-1], taken)
            values = torch.cat([values, agent.get_value(obs[-1:])]).cpu()  # gae is CPU work
            curiosity = agent.prediction_error(frames).sum(-1).cpu() / 2
        at_end = [curiosity[step, i].item() for _, step, i in games]
        run.log_columns([game[0] for game in games], {"charts/episode_curiosity_reward": at_end})
        sums = discounted_sums(curiosity, last_sums, args.int_gamma)
        last_sums.copy_(sums[-1])
        agent.curiosity_stats.update(sums.flatten().to(device))
        agent.frame_stats.update(frames.flatten(0, 1).float())
        rewards = torch.stack([rewards, curiosity / agent.curiosity_stats.std.cpu()], -1)
        terminated = terminated.unsqueeze(-1) * episodic
        done = done.unsqueeze(-1) * episodic
        advantages = gae(rewards, values, terminated, done, gamma, args)
        returns = advantages + values[:-1]
        advantages = advantages @ coefs
        rollout = (obs[:-1], frames, taken, logprobs, values[:-1], advantages, returns, real)
        batch = [x.flatten(0, 1).to(device) for x in rollout]
        losses = []
        for _ in range(args.update_epochs):
            losses.append(learn(torch.randperm(args.batch_size, device=device), *batch))
            if args.target_kl is not None and losses[-1]["losses/approx_kl"][-1] > args.target_kl:
                break

        extrinsic = returns[..., 0][real > 0]
        residual = extrinsic - values[:-1, ..., 0][real > 0]
        metrics = {"charts/learning_rate": lr} | mean_of(losses)
        metrics["losses/explained_variance"] = 1 - residual.var() / (extrinsic.var() + 1e-8)
        run.log(metrics, global_step)
        run.evaluate(agent, global_step)
        run.checkpoint(iteration + 1)  # EnvPool cannot be saved: it restarts

    run.finish(agent)
