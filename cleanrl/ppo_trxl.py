"""Proximal Policy Optimization (PPO) with a Transformer-XL as memory of the episode.

    python cleanrl/ppo_trxl.py --env-id MortarMayhem-Grid-v0

Paper: https://arxiv.org/abs/2309.17207. Every detail and its reason: docs/rl-algorithms/ppo-trxl.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from cleanrl_utils.environments.making import make
from cleanrl_utils.environments.vector import AsyncVectorEnv, SyncVectorEnv
from cleanrl_utils.running.losses import Losses, clip, larger, mean_of, squared_error
from cleanrl_utils.running.run import PixelArgs, Run, parse_args, require
from cleanrl_utils.running.settings import Count, NonNegative, Share
from cleanrl_utils.speed.graphs import accelerate

LONGEST = 1024  # steps of an episode that have a learned position of their own


@dataclass
class Args(PixelArgs):
    env_id: str = "MortarMayhem-Grid-v0"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 200_000_000
    """number of environment steps"""
    init_lr: NonNegative = 2.75e-4
    """initial learning rate of AdamW"""
    final_lr: NonNegative = 1e-5
    """final learning rate of AdamW"""
    num_envs: Count = 32
    """number of parallel environments"""
    num_steps: Count = 512
    """number of steps per environment in a rollout"""
    anneal_steps: Count = 32 * 512 * 10_000
    """number of steps over which learning rate and entropy coefficient reach their final values"""
    gamma: Share = 0.995
    """discount factor"""
    gae_lambda: Share = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: Count = 8
    """number of minibatches per epoch"""
    update_epochs: Count = 3
    """number of epochs per update"""
    norm_adv: bool = False
    """normalise advantages per minibatch"""
    clip_coef: NonNegative = 0.1
    """clipping coefficient of the policy objective: the ratio stays within 1 ± this"""
    clip_vloss: bool = True
    """clip the value loss with the same coefficient as the policy objective"""
    init_ent_coef: NonNegative = 0.0001
    """initial coefficient of the entropy bonus"""
    final_ent_coef: NonNegative = 0.000001
    """final coefficient of the entropy bonus"""
    vf_coef: NonNegative = 0.5
    """coefficient of the value loss"""
    max_grad_norm: NonNegative = 0.25
    """maximum norm of the gradient"""
    target_kl: NonNegative | None = None
    """stop an update after the epoch in which the approximate KL divergence exceeds this"""
    trxl_num_layers: Count = 3
    """number of transformer layers"""
    trxl_num_heads: Count = 4
    """number of attention heads per layer"""
    trxl_dim: Count = 384
    """width of the transformer"""
    trxl_memory_length: Count = 119
    """number of past steps that the transformer can attend to"""
    trxl_positional_encoding: Literal["absolute", "learned", ""] = "absolute"
    """positional encoding of remembered steps: absolute (sinusoidal), learned, or '' for none"""
    reconstruction_coef: NonNegative = 0.0
    """coefficient of the observation reconstruction loss, for images only; 0: off"""

    # differs from ppo_atari_lstm.py: the width fits the heads
    def __post_init__(self) -> None:
        super().__post_init__()
        least = 4 if self.num_envs == 1 else 2  # so that at least two steps are not resets
        require(self.num_steps >= least, f"--num-steps must be at least {least}")
        self.batch_size = self.num_envs * self.num_steps
        self.num_iterations = self.total_timesteps // self.batch_size
        batch = f"the batch of --num-envs x --num-steps = {self.batch_size} steps"
        divides = self.num_steps % self.num_minibatches == 0
        require(divides, f"--num-minibatches must divide --num-steps = {self.num_steps}")
        require(self.num_iterations > 0, f"--total-timesteps must be at least {batch}")
        divides = self.trxl_dim % self.trxl_num_heads == 0 and self.trxl_dim % 2 == 0
        require(divides, f"--trxl-dim must be even, and --trxl-num-heads divide {self.trxl_dim}")


# differs from ppo_atari_lstm.py: images or vectors, without Atari's wrappers
def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment; the first of them may be filmed."""

    def thunk() -> gym.Env:
        env = make(env_id, video_folder if capture_video and idx == 0 else None, **env_kwargs)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        shape = env.observation_space.shape or ()
        dtype = env.observation_space.dtype
        fits = len(shape) != 3 or dtype == np.uint8
        require(fits, f"--env-id {env_id}: images must be of bytes, these, {shape}, are {dtype}")
        if len(shape) == 3 and shape[:2] != (84, 84):
            env = gym.wrappers.ResizeObservation(env, (84, 84))
        elif len(shape) not in (1, 3):  # dicts and the like: one vector each
            env = gym.wrappers.FlattenObservation(env)
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


class Layer(nn.Module):
    """Attention to this layer's inputs of earlier steps, then a linear layer."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm_query = nn.LayerNorm(dim)
        self.norm_memory = nn.LayerNorm(dim)
        self.norm = nn.LayerNorm(dim)
        self.query = layer_init(nn.Linear(dim, dim), std=1.0)
        self.key = layer_init(nn.Linear(dim, dim), std=1.0)
        self.value = layer_init(nn.Linear(dim, dim), std=1.0)
        self.out = layer_init(nn.Linear(dim, dim), std=1.0)
        self.linear = layer_init(nn.Linear(dim, dim))

    def forward(self, x: Tensor, memory: Tensor, visible: Tensor) -> Tensor:
        """x is (num_envs, queries, dim), memory (num_envs, keys, dim); `visible` is the attention
        mask, (num_envs, queries, keys). Pre-norm: inputs are normalised, the residual is not."""
        memory = self.norm_memory(memory)
        projections = [self.query(self.norm_query(x)), self.key(memory), self.value(memory)]
        heads = [z.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for z in projections]
        query, key, value = heads  # (num_envs, num_heads, queries or keys, dim / num_heads)
        scores = query @ key.mT / query.shape[-1] ** 0.5  # variance 1
        visible = visible.unsqueeze(1)
        # the last factor: the first step of an episode has no memory to attend to
        weights = scores.masked_fill(~visible, -1e9).softmax(-1) * visible
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        return x + self.linear(self.norm(x)).relu()


# differs from ppo_atari_lstm.py: a transformer over remembered steps
class Agent(nn.Module):
    """Actor and critic, two heads on a transformer, whose input is an encoding of observations.

    Its memory is the inputs of each layer at the last steps, (num_layers, num_envs, steps, dim),
    and the number of steps of each open episode.
    """

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        shape = envs.single_observation_space.shape
        space = envs.single_action_space
        self.images = len(shape) == 3
        self.action_shape = space.shape
        self.sizes = np.ravel(getattr(space, "nvec", getattr(space, "n", 0))).tolist()
        self.encoding = args.trxl_positional_encoding
        self.length = args.trxl_memory_length
        dim = args.trxl_dim
        if self.images:
            conv1 = layer_init(nn.Conv2d(shape[-1], 32, 8, stride=4))
            conv2 = layer_init(nn.Conv2d(32, 64, 4, stride=2))
            conv3 = layer_init(nn.Conv2d(64, 64, 3))
            linear = layer_init(nn.Linear(64 * 7 * 7, dim))
            convs = [conv1, nn.ReLU(), conv2, nn.ReLU(), conv3, nn.ReLU()]
            self.encoder = nn.Sequential(*convs, nn.Flatten(), linear, nn.ReLU())
        else:
            self.encoder = layer_init(nn.Linear(shape[0], dim))
        self.register_buffer("waves", 1e4 ** (-torch.arange(0, dim, 2) / dim), persistent=False)
        if self.encoding == "learned":
            self.learned = nn.Parameter(torch.randn(LONGEST, dim))
        layers = [Layer(dim, args.trxl_num_heads) for _ in range(args.trxl_num_layers)]
        self.layers = nn.ModuleList(layers)
        self.hidden = nn.Sequential(layer_init(nn.Linear(dim, dim)), nn.ReLU())
        self.critic = layer_init(nn.Linear(dim, 1), std=1.0)
        # nearly uniform at first
        self.actor = layer_init(nn.Linear(dim, sum(self.sizes)), std=0.1)
        if args.reconstruction_coef > 0:
            self.decoder = nn.Sequential(  # the encoder backwards
                layer_init(nn.Linear(dim, 64 * 7 * 7)),
                nn.ReLU(),
                nn.Unflatten(1, (64, 7, 7)),
                layer_init(nn.ConvTranspose2d(64, 64, 3)),
                nn.ReLU(),
                layer_init(nn.ConvTranspose2d(64, 32, 4, stride=2)),
                nn.ReLU(),
                layer_init(nn.ConvTranspose2d(32, shape[-1], 8, stride=4)),
            )

    def features(self, obs: Tensor) -> Tensor:
        """Features of vectors, (..., n), or images: bytes, (..., 84, 84, channels)."""
        if not self.images:
            return self.encoder(obs)
        pixels = obs.flatten(0, -4).permute(0, 3, 1, 2)
        return self.encoder(pixels / 255).unflatten(0, obs.shape[:-3])

    def encode(self, positions: Tensor) -> Tensor:
        """The positional encoding of steps of an episode, (..., dim)."""
        if self.encoding == "learned":
            return self.learned[positions.clamp(0, LONGEST - 1)]
        angles = positions.unsqueeze(-1) * self.waves
        return torch.cat([angles.sin(), angles.cos()], -1) * (self.encoding == "absolute")

    def attend(
        self, obs: Tensor, memory: Tensor, positions: Tensor, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Hidden states of some steps of each environment, (num_envs, steps, ...), and the layers'
        inputs, which later steps attend to; `positions` are those of the memory."""
        x = self.features(obs)
        encodings = self.encode(positions)
        inputs = []
        for layer, remembered in zip(self.layers, memory, strict=True):
            inputs.append(x)
            x = layer(x, remembered + encodings, visible)
        return self.hidden(x), torch.stack(inputs)

    def step(self, obs: Tensor, memory: Tensor, position: Tensor, greedy: bool = False) -> tuple:
        """Actions, hidden states and layer inputs of one step, given the memory of those before."""
        ages = torch.arange(self.length, 0, -1, device=obs.device)
        now = position.unsqueeze(1)
        visible = (ages <= now).unsqueeze(1)  # the mask of `window`
        hidden, inputs = self.attend(obs.unsqueeze(1), memory, now - ages, visible)
        logits = self.actor(hidden[:, 0])
        if not greedy:  # Gumbel-max: the argmax of logits plus Gumbel noise is a sample of softmax
            logits = logits - torch.empty_like(logits).exponential_().log()
        actions = torch.stack([x.argmax(-1) for x in logits.split(self.sizes, -1)], -1)
        return actions.view(-1, *self.action_shape), hidden[:, 0], inputs[:, :, 0]

    def initial_state(self, num_envs: int) -> tuple[Tensor, Tensor]:
        shape = (len(self.layers), num_envs, self.length, self.critic.in_features)
        position = torch.zeros(num_envs, dtype=torch.long, device=self.critic.weight.device)
        return torch.zeros(shape, device=position.device), position

    def act(self, obs: Tensor, state: tuple, first: Tensor, greedy: bool = True) -> tuple:
        """Actions and the new state; `first` marks observations that an episode begins with."""
        memory, position = state
        position = position * ~first
        actions, _, inputs = self.step(obs, memory, position, greedy)
        return actions, (torch.cat([memory[:, :, 1:], inputs.unsqueeze(2)], 2), position + 1)

    def get_logprob_entropy_value(self, hidden: Tensor, actions: Tensor) -> tuple[Tensor, ...]:
        """An action of several parts has the sum of their log-probabilities and entropies."""
        logprobs = [x.log_softmax(-1) for x in self.actor(hidden).split(self.sizes, -1)]
        entropy = torch.stack([-(x.exp() * x).sum(-1) for x in logprobs]).sum(0)
        parts = actions.reshape(*hidden.shape[:-1], -1).split(1, -1)
        taken = [x.gather(-1, part) for x, part in zip(logprobs, parts, strict=True)]
        return torch.cat(taken, -1).sum(-1), entropy, self.critic(hidden).squeeze(-1)


def window(steps: Tensor, positions: Tensor, length: int) -> Tensor:
    """Attention mask: the rows of memory that steps of a rollout see, (num_envs, steps, rows).

    In memory, `length` older rows precede the rollout. A step sees as many rows before its own if
    they belong to its episode; `positions` has, for each row, the step of its episode.
    """
    rows = length + steps
    ages = rows.unsqueeze(-1) - torch.arange(positions.shape[1], device=rows.device)
    return (ages > 0) & (ages <= positions.gather(1, rows).clamp(max=length).unsqueeze(-1))


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


# differs from ppo_atari_lstm.py: minibatches with their memory, and a reconstruction loss
def update(
    agent: Agent,
    optimizer: optim.Optimizer,
    args: Args,
    ent_coef: Tensor,
    memory: Tensor,
    positions: Tensor,
    *minibatch: Tensor,
) -> Losses:
    """One gradient step; returns the losses and diagnostics of its minibatch.

    Minibatches are (num_envs, some steps). Their steps attend to the memory of the whole rollout,
    the layers' inputs as they were when it was collected; no gradient goes there.
    """
    obs, actions, logprobs, values, advantages, returns, real, steps = minibatch
    # Means over real transitions: steps that only reset an environment have weight 0.
    weights = real / real.sum().clamp(min=1)
    visible = window(steps, positions, args.trxl_memory_length)
    hidden, _ = agent.attend(obs, memory, positions, visible)
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
    v_loss = (v_error * weights).sum()  # without PPO's factor 0.5
    entropy = (entropy * weights).sum()
    loss = pg_loss - ent_coef * entropy + args.vf_coef * v_loss
    r_loss = torch.zeros_like(loss)
    if args.reconstruction_coef > 0:
        drawn = agent.decoder(hidden.flatten(0, 1)).permute(0, 2, 3, 1).unflatten(0, real.shape)
        error = F.binary_cross_entropy_with_logits(drawn, obs / 255, reduction="none")
        r_loss = (error.mean((2, 3, 4)) * weights).sum()
        loss = loss + args.reconstruction_coef * r_loss
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
        "losses/reconstruction_loss": r_loss,
    }
    return {tag: loss.detach() for tag, loss in losses.items()}


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    device = run.device
    envs = make_envs(args, run.videos)
    known = isinstance(envs.single_action_space, gym.spaces.Discrete | gym.spaces.MultiDiscrete)
    require(known, f"--env-id {args.env_id}: actions must be Discrete or MultiDiscrete")

    agent = Agent(envs, args).to(device)
    require(agent.images or not args.reconstruction_coef, "--reconstruction-coef needs images")
    lr = torch.tensor(args.init_lr, device=device)  # a tensor, as CUDA graphs need
    ent_coef = torch.tensor(args.init_ent_coef, device=device)
    optimizer = optim.AdamW(agent.parameters(), lr, fused=True, capturable=device.type == "cuda")

    # differs from ppo_atari_lstm.py: with the transformer's memory
    # A rollout, (num_steps, num_envs). obs has one row more, for the value after the last step.
    kind = torch.uint8 if agent.images else torch.float32
    obs = torch.zeros(args.num_steps + 1, *envs.observation_space.shape, dtype=kind, device=device)
    shape = (args.num_steps, args.num_envs, *agent.action_shape)
    actions = torch.zeros(shape, dtype=torch.long, device=device)
    record = np.zeros((4, args.num_steps, args.num_envs), np.float32)
    hidden = torch.zeros(args.num_steps + 1, args.num_envs, args.trxl_dim, device=device)
    # Inputs of the layers and positions in episodes: the end of the last rollout, then this one.
    length = args.trxl_memory_length
    rows = (args.num_envs, length + args.num_steps)
    memory = torch.zeros(args.trxl_num_layers, *rows, args.trxl_dim, device=device)
    positions = torch.zeros(rows, dtype=torch.long, device=device)

    sample = accelerate(torch.no_grad()(agent.step), device, args)
    learn = accelerate(
        partial(update, agent, optimizer, args, ent_coef, memory, positions), device, args
    )
    position = np.zeros(args.num_envs, int)  # of the next observation, in its episode
    envs.reset(seed=args.seed)
    state = dict(agent=agent, optimizer=optimizer, envs=envs)
    state |= dict(memory=memory, positions=positions, position=position)
    start = run.resume(args.num_iterations, **state)
    for iteration in range(start, args.num_iterations):
        remaining = max(0, 1 - iteration * args.batch_size / args.anneal_steps)
        lr.fill_(args.final_lr + remaining * (args.init_lr - args.final_lr))
        ent_coef.fill_(args.final_ent_coef + remaining * (args.init_ent_coef - args.final_ent_coef))

        # Collect a rollout. Each step attends to `length` rows of memory and becomes the next row.
        memory[:, :, :length] = memory[:, :, -length:].clone()
        positions[:, :length] = positions[:, -length:].clone()
        episodes = []
        for step in range(args.num_steps):
            row = length + step
            obs[step] = torch.as_tensor(envs.obs)
            positions[:, row] = torch.as_tensor(position)
            past = memory[:, :, step:row]
            actions[step], hidden[step], memory[:, :, row] = sample(
                obs[step], past, positions[:, row]
            )
            real = ~envs.ended  # the step after an episode's end only resets
            _, reward, term, trunc, infos = envs.step(actions[step].cpu().numpy())
            record[:, step] = reward, term, term | trunc, real
            position[:] = np.where(real, position + 1, 0)
            global_step = iteration * args.batch_size + (step + 1) * args.num_envs
            run.log_episodes(infos, global_step)
            if "_episode" in infos:
                episodes.append([infos["episode"][key][infos["_episode"]] for key in "rlt"])
        obs[-1] = torch.as_tensor(envs.obs)
        now = torch.as_tensor(position, device=device)
        _, hidden[-1], _ = sample(obs[-1], memory[:, :, -length:], now)

        # differs from ppo_atari_lstm.py: minibatches of steps of every environment
        # Learn
        rewards, terminated, done, real = torch.as_tensor(record)
        with torch.no_grad():
            logprobs, _, _ = agent.get_logprob_entropy_value(hidden[:-1], actions)
            values = agent.critic(hidden).squeeze(-1).cpu()  # gae is CPU work
        advantages = gae(rewards, values, terminated, done, args)
        returns = advantages + values[:-1]
        rollout = (obs[:-1], actions, logprobs, values[:-1], advantages, returns, real)
        batch = [x.transpose(0, 1).to(device) for x in rollout]
        losses = []
        every_env = torch.arange(args.num_envs, device=device).unsqueeze(1)
        for _ in range(args.update_epochs):
            shuffled = torch.rand(args.num_envs, args.num_steps, device=device).argsort(1)
            for steps in shuffled.split(args.num_steps // args.num_minibatches, 1):
                losses.append(learn(*(x[every_env, steps] for x in batch), steps))
            if args.target_kl is not None and losses[-1]["losses/approx_kl"] > args.target_kl:
                break

        residual = (returns - values[:-1])[real > 0]
        metrics = {"charts/learning_rate": lr, "charts/entropy_coefficient": ent_coef}
        metrics |= mean_of(losses)
        metrics["losses/explained_variance"] = 1 - residual.var() / (returns[real > 0].var() + 1e-8)
        metrics["episode/value_mean"] = values[:-1][real > 0].mean()
        metrics["episode/advantage_mean"] = advantages[real > 0].mean()
        if episodes:  # of this rollout; none may have ended in it
            tags = ("episode/r_mean", "episode/l_mean", "episode/t_mean")
            metrics |= zip(tags, np.concatenate(episodes, 1).mean(1), strict=True)
        run.log(metrics, global_step)
        run.evaluate(agent, global_step)
        run.checkpoint(iteration + 1)

    run.finish(agent)
