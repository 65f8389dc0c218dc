"""Soft Actor-Critic (SAC) in JAX, for vector observations and continuous actions.

    python cleanrl/sac_continuous_action_jax.py --env-id Hopper-v4

Papers: https://arxiv.org/abs/1801.01290, https://arxiv.org/abs/1812.05905 (tuned temperature).
Every detail with its reason: docs/rl-algorithms/sac.md
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import Array, random

from cleanrl_utils.environments.making import make, require_spaces
from cleanrl_utils.environments.vector import SyncVectorEnv
from cleanrl_utils.replay.buffers_jax import Batch, Replay, ReplayMemory
from cleanrl_utils.running.run import Run, RunArgs, parse_args, require
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share
from cleanrl_utils.speed.jax_tools import (
    Model,
    Packing,
    Params,
    dense,
    descend,
    in_turn,
    means,
    mlp,
)


@dataclass
class Args(RunArgs):
    env_id: str = "Hopper-v4"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 1_000_000
    """number of environment steps"""
    num_envs: Count = 1
    """number of parallel environments; other settings count steps of single environments"""
    buffer_size: Count = 1_000_000
    """number of transitions in the replay memory"""
    gamma: Share = 0.99
    """discount factor"""
    tau: Share = 0.005
    """coefficient of the soft update of the target network: 1 copies the network"""
    batch_size: Count = 256
    """number of transitions per gradient step"""
    learning_starts: Natural = 5_000
    """number of steps with random actions before the first gradient step"""
    learn_every: Count = 8
    """update every this many steps of the environments, with one update per step; larger is faster,
    but the policy that acts is older"""
    policy_lr: NonNegative = 3e-4
    """learning rate of the policy"""
    q_lr: NonNegative = 1e-3
    """learning rate of the critics and the entropy coefficient"""
    policy_frequency: Count = 2
    """update the policy every this many steps, as many times (TD3's delay, compensated)"""
    target_network_frequency: Count = 1
    """update the target network every this many steps"""
    alpha: NonNegative = 0.2
    """entropy coefficient (temperature), used only with --no-autotune"""
    autotune: bool = True
    """tune the entropy coefficient towards a target entropy"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.call_size = self.learn_every * self.num_envs
        self.num_calls = self.total_timesteps // self.call_size
        self.calls_per_log = max(100 // self.call_size, 1)
        call = f"at least --learn-every x --num-envs = {self.call_size}"
        require(self.num_calls > 0, f"--total-timesteps must be {call}")
        require(self.learning_starts >= self.call_size, f"--learning-starts must be {call}")
        require(self.buffer_size >= self.call_size, f"--buffer-size must be {call}")
        for frequency in (self.policy_frequency, self.target_network_frequency):
            fits = self.call_size % frequency == 0 or frequency % self.call_size == 0
            what = f"{self.call_size} (--learn-every x --num-envs), or be a multiple of it"
            require(fits, f"--policy-frequency and --target-network-frequency must divide {what}")
        require(self.alpha > 0, f"--alpha must be above 0, got {self.alpha}")  # its log is kept

    def parts(self, step: int) -> tuple[bool, bool]:
        """Whether policy and targets take part in the update that belongs to a step."""
        return step % self.policy_frequency == 0, step % self.target_network_frequency == 0


# same as ppo.py
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


# same as ppo.py
def make_envs(args: Args, video_folder: str) -> gym.vector.VectorEnv:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored."""
    kwargs = args.env_settings | {"capture_video": args.capture_video, "video_folder": video_folder}
    thunks = [make_env(args.env_id, args.seed + i, i, **kwargs) for i in range(args.num_envs)]
    return SyncVectorEnv(thunks)


class Actor(nn.Module):
    """A Gaussian, squashed by tanh into the action space: each dimension has bounds of its own."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @nn.compact
    def __call__(self, obs: Array) -> tuple[Array, Array]:
        """Mean and log of the standard deviation, before tanh; the latter within [-5, 2]."""
        mean, log_std = jnp.split(mlp(obs, 256, 256, 2 * len(self.low), like_torch=True), 2, -1)
        return mean, jnp.tanh(log_std) * 3.5 - 1.5

    def sample(self, obs: Array, noise: Array) -> tuple[Array, Array]:
        """Actions that gradients flow through, and the logarithms of their densities."""
        mean, log_std = self(obs)
        x = mean + jnp.exp(log_std) * noise
        scale, bias = np.subtract(self.high, self.low) / 2, np.add(self.high, self.low) / 2
        # p(a) = p(x) / (da/dx) with da/dx = scale * (1 - tanh(x)^2); the logarithm of the latter is
        # 2 log(2) + 2 x - 2 softplus(2 x), which stays exact where tanh is 1 in float32
        logprob = 2 * nn.softplus(2 * x) - 2 * x - log_std - 0.5 * jnp.square(noise)
        log_norm = (np.log(scale) + 2 * math.log(2) + 0.5 * math.log(2 * math.pi)).sum()
        return jnp.tanh(x) * scale + bias, logprob.sum(-1) - log_norm


# same as ddpg_continuous_action_jax.py
class Critic(nn.Module):
    """The Q-function."""

    @nn.compact
    def __call__(self, obs: Array, actions: Array) -> Array:
        x = jnp.concatenate([obs, actions], -1)
        return mlp(x, 256, 256, 1, like_torch=True).squeeze(-1)


# Two of them; each layer is one batched product, so they cost the calls of one.
Critics = nn.vmap(Critic, {"params": 0}, {"params": True}, in_axes=None, axis_size=2)


class Agent(Model):
    """What model files hold and evaluations play."""

    # same as ddpg_continuous_action_jax.py
    def __init__(self, actor: Actor, params: Params):
        super().__init__(params)
        self.actor = actor
        self.scale = np.subtract(actor.high, actor.low) / 2
        self.bias = np.add(actor.high, actor.low) / 2

    @classmethod
    def from_args(cls, envs: gym.vector.VectorEnv, args: Args) -> Self:
        low, high = envs.single_action_space.low, envs.single_action_space.high
        return cls(Actor(tuple(low.tolist()), tuple(high.tolist())), {})

    def act(self, obs: np.ndarray, greedy: bool = True) -> np.ndarray:
        noise = (1 - greedy) * np.random.standard_normal((len(obs), len(self.scale)))
        return self.sample(obs, noise)

    def sample(self, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """What Actor samples, in NumPy."""
        mean, log_std = np.split(dense(self.params, obs), 2, -1)
        x = mean + np.exp(np.tanh(log_std) * 3.5 - 1.5) * noise
        actions = np.tanh(x) * self.scale + self.bias  # rounding must not leave the bounds either
        return actions.clip(self.actor.low, self.actor.high).astype(np.float32)


class Train(NamedTuple):
    """Everything that learning changes."""

    policy: Params  # actor, and the logarithm of the temperature
    critics: Params
    target_critics: Params
    policy_moments: Any  # Adam's
    q_moments: Any
    key: Array


TAGS = ["qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss"]
TAGS = [f"losses/{tag}" for tag in (*TAGS, "actor_loss", "alpha", "alpha_loss")]


class Learner:
    """Training as pure functions: what they change, they are given and return."""

    def __init__(self, args: Args, envs: gym.vector.VectorEnv):
        self.args, self.memory = args, ReplayMemory(args.buffer_size, envs)
        self.actor: Any = Agent.from_args(envs, args).actor
        self.critics: Any = Critics()
        self.q_adam, alpha_adam = optax.adam(args.q_lr), optax.adam(args.q_lr * args.autotune)
        each = {"actor": optax.adam(args.policy_lr), "log_alpha": alpha_adam}
        self.policy_adam = optax.multi_transform(each, {name: name for name in each})

    def init(self, obs: np.ndarray) -> Train:
        key, actor_key, critics_key = random.split(random.key(self.args.seed), 3)
        log_alpha = 0.0 if self.args.autotune else math.log(self.args.alpha)
        policy = {"actor": self.actor.init(actor_key, obs), "log_alpha": jnp.float32(log_alpha)}
        critics = self.critics.init(critics_key, obs, np.zeros((len(obs), len(self.actor.low))))
        moments = self.policy_adam.init(policy), self.q_adam.init(critics)
        return Train(policy, critics, critics, *moments, key)

    def agrees_with(self, agent: Agent) -> bool:
        """Whether the agent does what the actor says: they have to be changed together."""
        rng, actions = np.random.default_rng(1), len(self.actor.low)
        obs, noise = rng.standard_normal((2, *self.memory.shapes[0])), rng.standard_normal(actions)
        with jax.default_device(jax.devices("cpu")[0]):  # a GPU would round its products
            said, _ = self.actor.apply(agent.params, obs, noise, method="sample")
        return np.allclose(agent.sample(obs, noise), said, rtol=0, atol=1e-3 * agent.scale.max())

    def q_loss(self, critics: Params, train: Train, batch: Batch, noise: Array) -> tuple:
        """Summed loss of both critics; and their values, losses and mean loss."""
        # Only termination ends the sum of rewards; a truncated episode's next_obs is its own last.
        sample = partial(self.actor.apply, train.policy["actor"], method="sample")
        next_actions, next_logprob = sample(batch.next_obs, noise)
        next_q = self.critics.apply(train.target_critics, batch.next_obs, next_actions).min(0)
        next_value = next_q - jnp.exp(train.policy["log_alpha"]) * next_logprob
        targets = batch.rewards + self.args.gamma * (1 - batch.terminated) * next_value
        q = self.critics.apply(critics, batch.obs, batch.actions)
        losses = jnp.square(q - targets).mean(1)
        return losses.sum(), jnp.concatenate([q.mean(1), losses, losses.mean(keepdims=True)])

    def policy_loss(self, policy: Params, train: Train, batch: Batch, noise: Array) -> tuple:
        """Loss of actor and temperature; each leaves the other alone."""
        alpha, stop = jnp.exp(policy["log_alpha"]), jax.lax.stop_gradient
        sample = partial(self.actor.apply, policy["actor"], method="sample")
        new_actions, logprob = sample(batch.obs, noise)
        q = self.critics.apply(train.critics, batch.obs, new_actions).min(0)
        actor_loss = (stop(alpha) * logprob - q).mean()
        target_entropy = -len(self.actor.low)  # -1 per dimension
        alpha_loss = -alpha * (stop(logprob).mean() + target_entropy)
        return actor_loss + alpha_loss, jnp.stack([actor_loss, alpha, alpha_loss])

    def chance(self, replay: Replay, key: Array, number: int) -> tuple[Array, Array]:
        """What so many updates leave to chance: for each two batches, and noise for the critics and
        for as many steps of the policy as a visit has. At once, because a GPU takes as long for the
        random numbers of one update as for those of all."""
        batches_key, noise_key = random.split(key)
        batches = self.memory.choose(replay, batches_key, number, 2, self.args.batch_size)
        shape = self.args.batch_size, len(self.actor.low)
        return batches, random.normal(noise_key, (number, 1 + self.args.policy_frequency, *shape))

    def update(
        self, replay: Replay, train: Train, sums: Array, chance: tuple, policy: bool, move: bool
    ) -> tuple:
        """All that one step is worth; whether policy takes part and targets move is known before
        the program is compiled."""
        (rows, policy_rows), (noise, *noises) = chance
        batch = self.memory.take(replay, rows)
        state = train.critics, train.q_moments, train, batch, noise
        critics, moments, q_losses = descend(self.q_loss, self.q_adam, *state)
        train = train._replace(critics=critics, q_moments=moments)
        policy_losses, visit = jnp.zeros(3), noises if policy else []
        batch = self.memory.take(replay, policy_rows)
        for noise in visit:  # as many as the steps since the last time
            state = train.policy, train.policy_moments, train, batch, noise
            policy_params, moments, losses = descend(self.policy_loss, self.policy_adam, *state)
            train = train._replace(policy=policy_params, policy_moments=moments)
            policy_losses += losses
        if move:
            targets = optax.incremental_update(critics, train.target_critics, self.args.tau)
            train = train._replace(target_critics=targets)
        losses = jnp.concatenate([q_losses, policy_losses])
        return train, sums + jnp.stack([losses, jnp.array([1.0] * 5 + [len(visit)] * 3)])

    def learn(self, train: Train, sums: Array, replay: Replay, pages: Array, parts: tuple) -> tuple:
        """Remember the turns since the last call, and make an update for each of `parts`."""
        replay = self.memory.insert(replay, pages)
        key, chance_key = random.split(train.key)
        chance = self.chance(replay, chance_key, len(parts))
        state, update = (train._replace(key=key), sums), partial(self.update, replay)
        return *in_turn(update, state, parts, chance), replay


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Box, "dqn_jax.py", bounded=True)

    learner, rng = Learner(args, envs), np.random.default_rng(args.seed)
    agent, memory = Agent(learner.actor, {}), learner.memory
    first = jax.jit(learner.init)(np.zeros(envs.observation_space.shape, np.float32))
    few, no_losses = jax.default_backend() != "cpu", jnp.zeros((2, len(TAGS)))  # see Packing
    packing, actor_packing = Packing(first, few), Packing(first.policy["actor"], few)

    @partial(jax.jit, static_argnums=4, donate_argnums=(0, 2))
    def program(vectors: Any, *rest: Any) -> tuple:
        train, losses, replay = learner.learn(packing.unpack(vectors), *rest)
        return packing.pack(train), losses, replay, actor_packing.pack(train.policy["actor"])

    def learn(*state: Any) -> tuple:
        *state, actor = program(*state)
        return *state, actor_packing.fetch(actor)

    # XLA tells a GPU one kernel after the other: a thread waits for that, while this one acts.
    background = ThreadPoolExecutor(1)
    state: dict[str, Any] = dict(train=packing.pack(first), replay=memory.init())
    state |= dict(losses=no_losses, pages=memory.pages(args.learn_every))
    envs.reset(seed=args.seed)
    start = run.resume(args.num_calls, **state, rng=rng, envs=envs)
    train, replay, losses, pages = (run.state[name] for name in state)
    del state  # a resumed run has read its own: let go of the other memory
    low, high = envs.action_space.low, envs.action_space.high
    agent.params = jax.device_get(packing.unpack(train).policy["actor"])
    require(learner.agrees_with(agent), "Agent.act must do what Actor says: it acts in its place")
    obs, ended = envs.obs, envs.ended
    for call in range(start, args.num_calls):
        # Learn from the turns before, in the background. Each environment's step is counted, so
        # that --num-envs changes neither the number of updates nor their order.
        begin, end = call * args.call_size, (call + 1) * args.call_size
        parts = tuple(map(args.parts, range(max(begin, args.learning_starts) + 1, end + 1)))
        learning = background.submit(learn, train, losses, replay, pages, parts)

        # Meanwhile act: at random at first. A step that only resets is not to be remembered.
        pages = memory.pages(args.learn_every)
        for turn in range(args.learn_every):
            global_step = begin + (turn + 1) * args.num_envs
            if global_step - args.num_envs < args.learning_starts:
                actions = rng.uniform(low, high).astype(np.float32)
            else:
                actions = agent.act(obs, greedy=False)
            next_obs, rewards, terminated, truncated, infos = envs.step(actions)
            pages[turn] = memory.page(obs, next_obs, actions, rewards, terminated, ~ended)
            obs, ended = next_obs, terminated | truncated
            run.log_episodes(infos, global_step)

        train, losses, replay, agent.params = learning.result()
        if (call + 1) % args.calls_per_log == 0:
            run.log(means(TAGS, losses), global_step)
            losses = no_losses
        run.evaluate(agent, global_step)
        run.checkpoint(call + 1, train=train, replay=replay, losses=losses, pages=pages)

    run.finish(agent)
