"""SimBaV2: SAC with networks on the unit sphere, for vector observations and continuous actions.

    python cleanrl/simbav2_continuous_action.py --env-id Hopper-v4

Paper: https://arxiv.org/abs/2502.15280. Every detail with its reason: docs/rl-algorithms/simbav2.md
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
import torch.nn.functional as F
from torch import Tensor, nn, optim

from cleanrl_utils.environments.making import make, require_spaces
from cleanrl_utils.environments.vector import SyncVectorEnv
from cleanrl_utils.replay.buffers import ReplayBuffer, make_memory
from cleanrl_utils.running.losses import Losses, Means
from cleanrl_utils.running.run import LargeArgs, Run, parse_args, require
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share
from cleanrl_utils.speed.graphs import accelerate, capture
from cleanrl_utils.speed.inference import PolicyOnDevice
from cleanrl_utils.speed.matmul import fast_matmul


@dataclass
class Args(LargeArgs):
    env_id: str = "Hopper-v4"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 1_000_000
    """number of environment steps"""
    num_envs: Count = 1
    """number of parallel environments; other settings count steps summed over environments"""
    buffer_size: Count = 1_000_000
    """number of transitions in the replay memory"""
    buffer_device: Literal["auto", "cpu", "cuda"] = "auto"
    """device of the replay memory; auto: the networks' device, if it has room"""
    gamma: Share = 0.995
    """discount factor"""
    tau: Share = 0.005
    """coefficient of the soft update of the target network: 1 copies the network"""
    batch_size: Count = 256
    """number of transitions per gradient step"""
    learning_starts: Natural = 5_000
    """number of steps with random actions before the first gradient step"""
    learning_rate: NonNegative = 1e-4
    """learning rate of Adam"""
    final_lr: NonNegative = 5e-5
    """final learning rate of Adam, reached linearly from --learning-rate"""
    alpha: NonNegative = 0.01
    """initial entropy coefficient (temperature); --no-autotune keeps it"""
    autotune: bool = True
    """tune the entropy coefficient towards a target entropy"""
    critic_width: Count = 512
    """width of the hidden layers of the critics"""
    max_return: NonNegative = 5.0
    """largest absolute return after rewards are scaled; the atoms span this range of returns"""

    # differs from sac_continuous_action.py: checks --max-return
    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_iterations = self.total_timesteps // self.num_envs
        require(self.num_iterations > 0, "--total-timesteps must be at least --num-envs")
        enough = self.learning_starts >= self.num_envs  # for the first batch to be drawn from
        require(enough, f"--learning-starts must be at least --num-envs, {self.num_envs}")
        require(self.alpha > 0, f"--alpha must be above 0, got {self.alpha}")  # its log is kept
        require(self.max_return > 0, f"--max-return must be above 0, got {self.max_return}")


# differs from sac_continuous_action.py: actions between -1 and 1
def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment; the first of them may be filmed."""

    def thunk() -> gym.Env:
        env = make(env_id, video_folder if capture_video and idx == 0 else None, **env_kwargs)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        if len(env.observation_space.shape or ()) != 1:  # dicts, images: one vector each
            env = gym.wrappers.FlattenObservation(env)
        if isinstance(env.action_space, gym.spaces.Box) and env.action_space.is_bounded():
            env = gym.wrappers.RescaleAction(env, -1, 1)  # the entropy then has the same units
        env.action_space.seed(seed)
        return env

    return thunk


def make_envs(args: Args, video_folder: str) -> gym.vector.VectorEnv:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored."""
    kwargs = args.env_settings | {"capture_video": args.capture_video, "video_folder": video_folder}
    thunks = [make_env(args.env_id, args.seed + i, i, **kwargs) for i in range(args.num_envs)]
    return SyncVectorEnv(thunks)


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


def unit_weights(networks: int, inputs: int, outputs: int) -> nn.Parameter:
    """Weights of a layer of several networks: orthogonal, and each unit's of length 1."""
    matrices = [nn.init.orthogonal_(torch.empty(inputs, outputs)) for _ in range(networks)]
    return nn.Parameter(F.normalize(torch.stack(matrices), dim=1))


def factors(networks: int, units: int, value: float) -> nn.Parameter:
    """A learned factor for each unit of a layer."""
    return nn.Parameter(torch.full((networks, 1, units), value))


class Block(nn.Module):
    """A residual block on the unit sphere: x moves towards the output of an MLP."""

    def __init__(self, networks: int, width: int, num_blocks: int):
        super().__init__()
        self.weight1 = unit_weights(networks, width, 4 * width)
        self.scaler = factors(networks, 4 * width, (2 / (4 * width)) ** 0.5)
        self.weight2 = unit_weights(networks, 4 * width, width)
        self.alpha = factors(networks, width, width**-0.5)  # a small number: learns faster in Adam
        self.alpha_scale = width**0.5 / (num_blocks + 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x @ self.weight1 * self.scaler).relu() + 1e-8  # never the zero vector
        y = F.normalize(hidden @ self.weight2, dim=-1)
        return F.normalize(torch.lerp(x, y, self.alpha * self.alpha_scale), dim=-1)


class Network(nn.Module):
    """Several networks at once, with two heads in all: (batch, inputs) -> (2, batch, outputs)."""

    def __init__(self, networks: int, inputs: int, width: int, num_blocks: int, outputs: int):
        super().__init__()
        self.embedding_weight = unit_weights(networks, inputs + 1, width)
        self.embedding_scaler = factors(networks, width, (2 / width) ** 0.5)
        blocks = [Block(networks, width, num_blocks) for _ in range(num_blocks)]
        self.blocks = nn.Sequential(*blocks)
        self.head_weight1 = unit_weights(2, width, width)
        self.head_scaler = factors(2, width, 1.0)
        self.head_weight2 = unit_weights(2, width, outputs)
        self.bias = nn.Parameter(torch.zeros(2, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 1), value=3.0)  # c_shift: the direction then shows the length of x
        x = F.normalize(x, dim=-1) @ self.embedding_weight * self.embedding_scaler
        x = self.blocks(F.normalize(x, dim=-1))  # (networks, batch, width)
        return x @ self.head_weight1 * self.head_scaler @ self.head_weight2 + self.bias

    @torch.no_grad()
    def normalise_weights(self) -> None:
        """Back onto the unit sphere, after a gradient step."""
        for name, x in self.named_parameters():
            if "weight" in name:
                x.div_(x.norm(dim=1, keepdim=True))


# differs from sac_continuous_action.py: on the unit sphere; normalises observations
class Actor(Network):
    """A Gaussian policy, squashed by tanh; its heads are mean and log of the standard deviation."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        num_obs = envs.single_observation_space.shape[0]
        num_actions = envs.single_action_space.shape[0]
        super().__init__(1, num_obs, 128, 1, num_actions)
        self.obs_stats = RunningStats(num_obs)
        self.register_buffer("reward_scale", torch.tensor(1.0))  # rewards are divided by it

    def normalise(self, obs: Tensor) -> Tensor:
        return (obs - self.obs_stats.mean) / self.obs_stats.std

    def act(self, obs: Tensor, greedy: bool = True) -> Tensor:
        obs = self.normalise(obs)
        return torch.tanh(self(obs)[0]) if greedy else self.sample(obs)[0]

    def explore(self, obs: Tensor) -> Tensor:
        """Sample actions in training; the observations enter the statistics."""
        self.obs_stats.update(obs)
        return self.act(obs, greedy=False)

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Actions for normalised observations, and their log-probabilities."""
        mean, log_std = self(obs)
        log_std = torch.tanh(log_std) * 6 - 4  # within [-10, 2]
        noise = torch.randn_like(mean)
        x = mean + log_std.exp() * noise
        # log p(a) = log N(x; mean, std) - log(1 - tanh(x)^2), exact where tanh(x) rounds to 1
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - x - F.softplus(-2 * x))
        return torch.tanh(x), (log_normal - log_slope).sum(-1)


# differs from sac_continuous_action.py: distributions of the return, on the unit sphere
class Critics(Network):
    """Two distributions of the scaled return; batched products make them as fast as one."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        inputs = envs.single_observation_space.shape[0] + envs.single_action_space.shape[0]
        super().__init__(2, inputs, args.critic_width, 2, 101)
        self.register_buffer("atoms", torch.linspace(-args.max_return, args.max_return, 101))

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Log-probabilities of the atoms, (2, batch, atoms), and Q-values, (2, batch)."""
        logprobs = super().forward(torch.cat([obs, actions], -1)).log_softmax(-1)
        return logprobs, (logprobs.exp() * self.atoms).sum(-1)


# differs from sac_continuous_action.py: networks with settings; half the target entropy
class Agent(nn.Module):
    """All networks: those that are trained, and their target networks."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        self.actor = Actor(envs, args)
        self.critics = Critics(envs, args)
        self.target_critics = deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(args.alpha).log(), requires_grad=args.autotune)
        self.target_entropy = -envs.single_action_space.shape[0] / 2


def project(probs: Tensor, returns: Tensor, atoms: Tensor) -> Tensor:
    """Split each probability between the two atoms around its return; both are (batch, atoms)."""
    spacing = atoms[1] - atoms[0]
    returns = returns.clamp(atoms[0], atoms[-1])
    # share = max(0, 1 - |return - atom| / spacing), (batch, returns, atoms); large, so in place
    share = (returns.unsqueeze(-1) - atoms).abs_().div_(-spacing).add_(1).clamp_(min=0)
    return share.mul_(probs.unsqueeze(-1)).sum(1)


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


# differs from sac_continuous_action.py: cross-entropy to a projected distribution
def update_critics(agent: Agent, optimizer: optim.Optimizer, args: Args, *batch: Tensor) -> Losses:
    """One gradient step of both critics; returns their mean Q-value and their mean loss."""
    obs, next_obs, actions, rewards, terminated = batch
    obs = agent.actor.normalise(obs)
    next_obs = agent.actor.normalise(next_obs)
    rewards = rewards / agent.actor.reward_scale
    with torch.no_grad():
        # Only termination stops the bootstrap; after truncation, next_obs is the last observation.
        next_actions, next_logprob = agent.actor.sample(next_obs)
        next_logprobs, next_q = agent.target_critics(next_obs, next_actions)
        first_is_lower = (next_q[0] <= next_q[1])[:, None]
        next_probs = torch.where(first_is_lower, next_logprobs[0], next_logprobs[1]).exp()
        next_values = agent.critics.atoms - (agent.log_alpha.exp() * next_logprob)[:, None]
        returns = rewards[:, None] + args.gamma * (1 - terminated[:, None]) * next_values
        target_probs = project(next_probs, returns, agent.critics.atoms)
    logprobs, q = agent.critics(obs, actions)
    losses = -(target_probs * logprobs).sum(-1).mean(1)
    gradient_step(losses.sum(), optimizer)
    agent.critics.normalise_weights()
    update_target(agent.critics, agent.target_critics, args.tau)
    return {"losses/qf_values": q.detach().mean(), "losses/qf_loss": losses.detach().mean()}


# differs from sac_continuous_action.py: one step, on normalised observations
def update_policy(agent: Agent, optimizer: optim.Optimizer, args: Args, *batch: Tensor) -> Losses:
    """One gradient step of the policy, and of the entropy coefficient if it is tuned."""
    obs = agent.actor.normalise(batch[0])
    alpha = agent.log_alpha.exp()
    new_actions, logprob = agent.actor.sample(obs)
    q = agent.critics(obs, new_actions)[1].amin(0)
    actor_loss = (alpha.detach() * logprob - q).mean()
    alpha_loss = -alpha * (logprob.detach().mean() + agent.target_entropy)
    gradient_step(actor_loss + alpha_loss, optimizer)
    agent.actor.normalise_weights()
    losses = {"losses/actor_loss": actor_loss.detach(), "losses/alpha": alpha.detach()}
    return losses | {"losses/alpha_loss": alpha_loss.detach()}


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    device = run.device
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Box, "dqn.py", bounded=True)

    fast_matmul(device)  # on a GPU in TF32
    agent = Agent(envs, args).to(device)
    lr = torch.tensor(args.learning_rate, device=device)  # a tensor, as CUDA graphs need
    adam = dict(lr=lr, fused=True, capturable=device.type == "cuda")
    q_optimizer = optim.Adam(agent.critics.parameters(), **adam)
    policy_optimizer = optim.Adam(agent.actor.parameters(), **adam)
    if args.autotune:
        policy_optimizer.add_param_group({"params": [agent.log_alpha]})
    memory = make_memory(ReplayBuffer, envs, args, device)
    policy = PolicyOnDevice(agent.actor.explore, device, args)
    train_q = accelerate(partial(update_critics, agent, q_optimizer, args), device, args)
    train_policy = accelerate(partial(update_policy, agent, policy_optimizer, args), device, args)
    losses = Means()

    @partial(capture, device=memory.device, args=args)  # sampling, too, if the memory is on the GPU
    def learn() -> None:
        batch = memory.sample(args.batch_size).to(device)
        losses.add(train_policy(*batch) | train_q(*batch))

    rng = np.random.default_rng(args.seed)
    return_stats = RunningStats()
    returns = np.zeros(args.num_envs)  # of the open episodes so far, discounted
    largest = np.zeros(())  # of all absolute returns

    envs.reset(seed=args.seed)
    state = dict(agent=agent, q_optimizer=q_optimizer, policy_optimizer=policy_optimizer)
    state |= dict(memory=memory, losses=losses, rng=rng, envs=envs)
    state |= dict(return_stats=return_stats, returns=returns, largest=largest)
    start = run.resume(args.num_iterations, **state)
    obs = envs.obs
    ended = envs.ended
    for iteration in range(start, args.num_iterations):
        steps = iteration * args.num_envs  # so far
        progress = iteration / args.num_iterations
        lr.fill_(args.learning_rate + progress * (args.final_lr - args.learning_rate))

        # A GPU starts to compute actions; also where random ones are used, for the statistics.
        policy.start(obs)

        # differs from sac_continuous_action.py: every network learns in every step
        # Learn; a GPU does so while the environments step. Steps are summed over environments, so
        # --num-envs changes neither the number of updates nor their order.
        for global_step in range(steps + 1, steps + args.num_envs + 1):
            if global_step > args.learning_starts:
                learn()
            if global_step % 100 == 0:
                run.log(losses.take(), global_step)

        # differs from sac_continuous_action.py: random actions replace those of the policy
        # Step the environments; a step that only reset one of them is not stored.
        real = ~ended
        actions = policy.result()
        if steps < args.learning_starts:
            actions = rng.uniform(-1, 1, actions.shape).astype(np.float32)
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        memory.add(obs, next_obs, actions, rewards, terminated, real)
        obs = next_obs
        ended = terminated | truncated

        # Scale rewards by the SD of returns, or by more, so that no return exceeds --max-return.
        returns[:] = rewards + args.gamma * returns * real  # a reset step starts a new return
        if real.any():
            return_stats.update(torch.as_tensor(returns[real]))
        largest.fill(max(largest, abs(returns).max()))
        agent.actor.reward_scale.fill_(max(return_stats.std.item(), largest / args.max_return))
        run.log_episodes(infos, global_step)
        run.evaluate(agent.actor, global_step)
        run.checkpoint(iteration + 1)

    run.finish(agent.actor)
