"""Phasic Policy Gradient (PPG) for Procgen, games whose levels are new each time.

    python cleanrl/ppg_procgen.py --env-id starpilot

Paper: https://arxiv.org/abs/2009.04416. Every detail with its reason: docs/rl-algorithms/ppg.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn, optim

from cleanrl_utils.environments.envpool import Pool, make_one_of_pool
from cleanrl_utils.running.losses import Losses, clip, larger, mean_of, squared_error
from cleanrl_utils.running.run import LargeArgs, Run, parse_args, require
from cleanrl_utils.running.settings import Count, NonNegative, Share
from cleanrl_utils.speed.graphs import accelerate, to_device


@dataclass
class Args(LargeArgs):
    env_id: str = "starpilot"
    """game of Procgen, with easy levels; others by EnvPool's id, e.g. StarpilotHard-v0"""
    total_timesteps: Count = 25_000_000
    """number of environment steps"""
    learning_rate: NonNegative = 5e-4
    """learning rate of Adam"""
    num_envs: Count = 64
    """number of parallel environments"""
    num_steps: Count = 256
    """number of steps per environment in a rollout"""
    anneal_lr: bool = False
    """decrease the learning rate linearly to zero"""
    gamma: Share = 0.999
    """discount factor"""
    gae_lambda: Share = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: Count = 8
    """number of minibatches per epoch"""
    adv_norm_fullbatch: bool = True
    """normalise advantages over the whole rollout"""
    clip_coef: NonNegative = 0.2
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
    n_iteration: Count = 32
    """number of rollouts, each with a policy update, per phase"""
    e_policy: Count = 1
    """number of policy epochs per rollout"""
    v_value: Count = 1
    """number of value function epochs per rollout"""
    e_auxiliary: Count = 6
    """number of epochs of the auxiliary phase"""
    beta_clone: NonNegative = 1.0
    """coefficient of the behavioural cloning loss in the auxiliary phase"""
    num_aux_rollouts: Count = 4
    """number of single-environment rollouts per minibatch of the auxiliary phase (at most all)"""
    n_aux_grad_accum: Count = 1
    """number of minibatches per gradient step of the auxiliary phase (gradient accumulation)"""

    # differs from ppo_procgen.py: phases of several rollouts
    def __post_init__(self) -> None:
        super().__post_init__()
        least = 4 if self.num_envs == 1 else 2  # so that at least two steps are not resets
        require(self.num_steps >= least, f"--num-steps must be at least {least}")
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.num_phases = self.total_timesteps // (self.batch_size * self.n_iteration)
        self.num_iterations = self.num_phases * self.n_iteration
        self.num_rollouts = self.num_envs * self.n_iteration  # of one environment each, in a phase
        self.num_aux_rollouts = min(self.num_aux_rollouts, self.num_rollouts)  # no more than it has
        self.aux_minibatch_size = self.num_aux_rollouts * self.n_aux_grad_accum
        batch = f"the batch of --num-envs x --num-steps = {self.batch_size} steps"
        divides = self.batch_size % self.num_minibatches == 0
        require(divides, f"--num-minibatches must divide {batch}")
        phase = f"a phase of --n-iteration {self.n_iteration} times {batch}"
        require(self.num_phases > 0, f"--total-timesteps must be at least {phase}")
        rollouts = f"a phase's --num-envs x --n-iteration = {self.num_rollouts} rollouts"
        divides = self.num_rollouts % self.aux_minibatch_size == 0
        require(divides, f"--num-aux-rollouts x --n-aux-grad-accum must divide {rollouts}")


def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment for evaluation; the first of them may be filmed."""

    def thunk() -> gym.Env:
        folder = video_folder if capture_video and idx == 0 else None
        env = gym.wrappers.RecordEpisodeStatistics(make_one_of_pool(task_of(env_id), folder))
        env.action_space.seed(seed)
        return env

    return thunk


def task_of(env_id: str) -> str:
    """EnvPool's name: starpilot is StarpilotEasy-v0."""
    return env_id if "-v" in env_id else f"{env_id.capitalize()}Easy-v0"


def make_envs(args: Args) -> Pool:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored."""
    envs = Pool(task_of(args.env_id), args.num_envs, args.seed, **args.env_settings)
    space = envs.single_observation_space
    actions = envs.single_action_space
    images = space.dtype == np.uint8 and len(space.shape or ()) == 3
    fits = images and isinstance(actions, gym.spaces.Discrete)
    require(fits, f"--env-id {args.env_id}: this script needs images and discrete actions")
    return envs


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


class Residual(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int):
        super().__init__()
        convs = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        self.layers = nn.Sequential(nn.ReLU(), convs[0], nn.ReLU(), convs[1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def impala(channels: int, height: int, width: int) -> nn.Sequential:
    """The larger network of IMPALA, https://arxiv.org/abs/1802.01561, without its LSTM."""
    layers: list[nn.Module] = []
    for outputs in (16, 32, 32):
        conv = nn.Conv2d(channels, outputs, 3, padding=1)
        pool = nn.MaxPool2d(3, stride=2, padding=1)  # halves, and rounds up
        layers += [conv, pool, Residual(outputs), Residual(outputs)]
        channels = outputs
        height = (height + 1) // 2
        width = (width + 1) // 2
    last = nn.Linear(channels * height * width, 256)
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), last, nn.ReLU())


def normed(layer: nn.Conv2d | nn.Linear, scale: float) -> nn.Module:
    """Rescale the weights of each output to this norm; biases begin at zero."""
    flat = layer.weight.data.flatten(1)
    flat *= scale / flat.norm(dim=1, keepdim=True)
    nn.init.zeros_(layer.bias)
    return layer


# differs from ppo_procgen.py: a second value head for the auxiliary phase
class Agent(nn.Module):
    """Actor, critic and auxiliary critic, three heads on one residual network.

    The critic's gradient stops at the features. The auxiliary critic's does not: it trains the
    features to predict values, and its own values are not used.
    """

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__()
        self.network = impala(*envs.single_observation_space.shape)
        for layer in self.network:
            if isinstance(layer, nn.Conv2d):
                normed(layer, 1.0)
            elif isinstance(layer, nn.Linear):
                normed(layer, 1.4)
            elif isinstance(layer, Residual):  # six of them, each to add 1 / sqrt(6) by two layers
                for conv in layer.layers[1::2]:
                    normed(conv, 6**-0.25)
        self.actor = normed(nn.Linear(256, envs.single_action_space.n), 0.1)
        self.critic = normed(nn.Linear(256, 1), 0.1)
        self.aux_critic = normed(nn.Linear(256, 1), 0.1)

    def forward(self, obs: Tensor) -> tuple[Tensor, ...]:
        """Log-probabilities of all actions, the value, and the auxiliary critic's value."""
        pixels = obs.to(memory_format=torch.channels_last) / 255  # faster in this order
        features = self.network(pixels)
        value = self.critic(features.detach()).squeeze(-1)
        aux_value = self.aux_critic(features).squeeze(-1)
        return self.actor(features).log_softmax(-1), value, aux_value

    def act(self, obs: Tensor, greedy: bool = True) -> Tensor:
        return self.act_logprob_value(obs, greedy)[0]

    def act_logprob_value(self, obs: Tensor, greedy: bool = False) -> tuple[Tensor, ...]:
        """Actions, their log-probabilities and the values."""
        logprobs, value, *_ = self(obs)
        scores = logprobs
        if not greedy:  # Gumbel-max: the argmax of logits plus Gumbel noise is a sample of softmax
            scores = logprobs - torch.empty_like(logprobs).exponential_().log()
        actions = scores.argmax(-1)
        return actions, logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1), value

    def get_value(self, obs: Tensor) -> Tensor:
        return self(obs)[1]

    def get_logprob_entropy_value(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, ...]:
        logprobs, value, *_ = self(obs)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1), entropy, value


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


# differs from ppo_procgen.py: policy and value function have epochs of their own
def update(
    agent: Agent,
    optimizer: optim.Optimizer,
    args: Args,
    train_policy: bool,
    train_value: bool,
    *minibatch: Tensor,
) -> Losses:
    """One gradient step of policy, value function or both; returns losses and diagnostics."""
    obs, actions, logprobs, values, advantages, returns, real = minibatch
    # Means over real transitions: steps that only reset an environment have weight 0.
    weights = real / real.sum().clamp(min=1)
    newlogprob, entropy, newvalue = agent.get_logprob_entropy_value(obs, actions)
    logratio = newlogprob - logprobs
    ratio = logratio.exp()
    clipped_ratio = clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = (larger(-advantages * ratio, -advantages * clipped_ratio) * weights).sum()

    v_error = squared_error(newvalue, returns)
    if args.clip_vloss:
        clipped_value = values + clip(newvalue - values, -args.clip_coef, args.clip_coef)
        v_error = larger(v_error, squared_error(clipped_value, returns))
    v_loss = 0.5 * (v_error * weights).sum()
    entropy = (entropy * weights).sum()
    # The two losses share no parameters, and Adam skips parameters that have no gradient.
    optimizer.zero_grad()
    if train_policy:
        (pg_loss - args.ent_coef * entropy).backward()
    if train_value:
        (args.vf_coef * v_loss).backward()
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


def aux_update(agent: Agent, optimizer: optim.Optimizer, args: Args, *batch: Tensor) -> Losses:
    """One gradient step on whole rollouts, (n, num_steps), in parts of --num-aux-rollouts."""
    steps = batch[-1].sum().clamp(min=1)
    optimizer.zero_grad()
    losses = []
    for part in zip(*(x.split(args.num_aux_rollouts) for x in batch), strict=True):
        obs, old_logprobs, returns, real = (x.flatten(0, 1) for x in part)
        logprobs, value, aux_value = agent(obs)
        kl = (old_logprobs.exp() * (old_logprobs - logprobs)).sum(-1)  # KL(old || new)
        aux_v_error = 0.5 * (aux_value - returns).square()
        v_error = 0.5 * (value - returns).square()
        errors = torch.stack([kl, aux_v_error, v_error])
        kl_loss, aux_v_loss, v_loss = (errors * real).sum(1) / steps
        (args.beta_clone * kl_loss + aux_v_loss + v_loss).backward()
        losses.append(torch.stack([kl_loss, aux_v_loss, v_loss]).detach())
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    kl_loss, aux_v_loss, v_loss = torch.stack(losses).sum(0)
    return {
        "losses/aux/kl_loss": kl_loss,
        "losses/aux/aux_value_loss": aux_v_loss,
        "losses/aux/real_value_loss": v_loss,
    }


def learn_policy_phase(
    learn: dict[tuple[bool, bool], Callable], batch: list[Tensor], args: Args
) -> Losses:
    """Epochs over one rollout, --e-policy of the policy and --v-value of the value function."""
    policy_losses: list[Losses] = []
    value_losses: list[Losses] = []
    policy_epochs = args.e_policy
    epoch = 0
    while epoch < max(policy_epochs, args.v_value):
        train_policy = epoch < policy_epochs
        train_value = epoch < args.v_value
        shuffled = torch.randperm(args.batch_size, device=batch[0].device)
        losses = []
        for indices in shuffled.split(args.minibatch_size):
            losses.append(learn[train_policy, train_value](*(x[indices] for x in batch)))
        epoch += 1
        if train_value:
            value_losses += losses
        if train_policy:
            policy_losses += losses
            if args.target_kl is not None and losses[-1]["losses/approx_kl"] > args.target_kl:
                policy_epochs = epoch  # the value function goes on
    v_loss = mean_of(value_losses)["losses/value_loss"]
    return mean_of(policy_losses) | {"losses/value_loss": v_loss}


def learn_auxiliary_phase(
    agent: Agent, learn: Callable, obs: np.ndarray, returns: Tensor, real: Tensor, args: Args
) -> Losses:
    """Epochs over all rollouts of a phase, (num_rollouts, num_steps): distil values into the
    features, and keep the policy as it is now."""
    parts = np.split(obs, args.num_rollouts // args.num_aux_rollouts)
    with torch.no_grad():
        old = [agent(to_device(x, returns.device).flatten(0, 1))[0] for x in parts]
    old_logprobs = torch.cat(old).unflatten(0, returns.shape)
    losses = []
    for _ in range(args.e_auxiliary):
        for indices in torch.randperm(args.num_rollouts).split(args.aux_minibatch_size):
            chosen_obs = to_device(obs[indices.numpy()], returns.device)
            rest = [x[indices.to(returns.device)] for x in (old_logprobs, returns, real)]
            losses.append(learn(chosen_obs, *rest))
    return mean_of(losses)


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    device = run.device
    envs = make_envs(args)

    agent = Agent(envs).to(device)
    adam = dict(fused=True, capturable=device.type == "cuda")
    rate = partial(torch.tensor, args.learning_rate, device=device)  # tensors, as CUDA graphs need
    optimizer = optim.Adam(agent.parameters(), rate(), **adam)
    aux_optimizer = optim.Adam(agent.parameters(), rate(), **adam)  # other losses, other moments
    return_stats = RunningStats()
    sample = accelerate(torch.no_grad()(agent.act_logprob_value), device, args)
    learn = {}  # by (train policy, train value function)
    for kind in [(True, True), (True, False), (False, True)]:
        learn[kind] = accelerate(partial(update, agent, optimizer, args, *kind), device, args)
    learn_aux = accelerate(partial(aux_update, agent, aux_optimizer, args), device, args)

    # One rollout, (num_steps, num_envs). values have one row more: what the last action led to.
    shape = (args.num_steps, args.num_envs)
    images = (*shape, *envs.single_observation_space.shape)
    obs = torch.zeros(images, dtype=torch.uint8, device=device)
    actions = torch.zeros(shape, dtype=torch.long, device=device)
    logprobs = torch.zeros(shape, device=device)
    values = torch.zeros(args.num_steps + 1, args.num_envs, device=device)
    record = np.zeros((4, *shape), np.float32)

    # One phase, (num_rollouts, num_steps). Its images are many: they stay bytes and on the CPU.
    phase_shape = (args.num_rollouts, args.num_steps)
    phase_obs = np.zeros((*phase_shape, *images[2:]), np.uint8)
    phase_returns, phase_real = torch.zeros(2, *phase_shape, device=device)

    state = dict(agent=agent, optimizer=optimizer, aux_optimizer=aux_optimizer)
    discounted = np.zeros_like(record[0])  # returns of the open episodes so far
    start = run.resume(args.num_phases, **state, returns=return_stats, envs=envs)
    for iteration in range(start * args.n_iteration, args.num_iterations):
        phase, number = divmod(iteration, args.n_iteration)
        if args.anneal_lr:
            remaining = 1 - iteration / args.num_iterations
            for group in optimizer.param_groups + aux_optimizer.param_groups:
                group["lr"].fill_(remaining * args.learning_rate)

        # differs from ppo_procgen.py: the frames of a phase are kept
        # Collect. Log-probabilities and values come with the actions: the network is large.
        rows = slice(number * args.num_envs, (number + 1) * args.num_envs)
        for step in range(args.num_steps):
            phase_obs[rows, step] = envs.obs
            obs[step] = to_device(envs.obs, device)
            actions[step], logprobs[step], values[step] = sample(obs[step])
            real = ~envs.ended  # the step after an episode's end only resets
            _, reward, term, trunc, infos = envs.step(actions[step].cpu().numpy())
            record[:, step] = reward, term, term | trunc, real
            global_step = iteration * args.batch_size + (step + 1) * args.num_envs
            run.log_episodes(infos, global_step)
        with torch.no_grad():
            values[-1] = agent.get_value(to_device(envs.obs, device))

        # differs from ppo_procgen.py: policy epochs, value epochs and the auxiliary phase
        # Learn
        rewards, terminated, done, real = torch.as_tensor(record)
        for t in range(args.num_steps):  # discounted[-1] is the last of the rollout before
            discounted[t] = record[0, t] + args.gamma * discounted[t - 1] * record[3, t]
        return_stats.update(torch.as_tensor(discounted)[real > 0])
        rewards = (rewards / return_stats.std).clamp(-10, 10)  # only their size changes, not sign
        old_values = values.cpu()  # small and sequential: advantages are CPU work
        advantages = gae(rewards, old_values, terminated, done, args)
        returns = advantages + old_values[:-1]
        phase_returns[rows] = returns.T.to(device)
        phase_real[rows] = real.T.to(device)
        if args.adv_norm_fullbatch:
            kept = advantages[real > 0]
            advantages = (advantages - kept.mean()) / (kept.std() + 1e-8)
        rollout = (obs, actions, logprobs, old_values[:-1], advantages, returns, real)
        batch = [x.flatten(0, 1).to(device) for x in rollout]
        residual = (returns - old_values[:-1])[real > 0]
        metrics = {"charts/learning_rate": optimizer.param_groups[0]["lr"]}
        metrics |= learn_policy_phase(learn, batch, args)
        metrics["losses/explained_variance"] = 1 - residual.var() / (returns[real > 0].var() + 1e-8)
        phase_ends = number == args.n_iteration - 1
        if phase_ends:
            phase_rollouts = (phase_obs, phase_returns, phase_real)
            metrics |= learn_auxiliary_phase(agent, learn_aux, *phase_rollouts, args)
        run.log(metrics, global_step)
        run.evaluate(agent, global_step)
        # Only whole phases are saved. EnvPool cannot be saved: it restarts.
        if phase_ends and run.checkpoint(phase + 1):
            discounted[:] = 0

    run.finish(agent)
