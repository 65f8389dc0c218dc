"""Twin Delayed DDPG (TD3) in JAX, for vector observations and continuous actions.

    python cleanrl/td3_continuous_action_jax.py --env-id Hopper-v4

Paper: https://arxiv.org/abs/1802.09477. Every detail with its reason: docs/rl-algorithms/td3.md
"""

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
    learning_rate: NonNegative = 3e-4
    """learning rate of Adam"""
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
    policy_noise: NonNegative = 0.2
    """standard deviation of the noise on the target policy's actions, relative to half the action
    range"""
    exploration_noise: NonNegative = 0.1
    """standard deviation of the exploration noise, relative to half the action range"""
    learning_starts: Natural = 25_000
    """number of steps with random actions before the first gradient step"""
    learn_every: Count = 8
    """update every this many steps of the environments, with one update per step; larger is faster,
    but the policy that acts is older"""
    policy_frequency: Count = 2
    """update the policy and the target networks every this many steps"""
    noise_clip: NonNegative = 0.5
    """bound of the noise on the target policy's actions, relative to half the action range"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.call_size = self.learn_every * self.num_envs
        self.num_calls = self.total_timesteps // self.call_size
        self.calls_per_log = max(100 // self.call_size, 1)
        call = f"at least --learn-every x --num-envs = {self.call_size}"
        require(self.num_calls > 0, f"--total-timesteps must be {call}")
        require(self.learning_starts >= self.call_size, f"--learning-starts must be {call}")
        require(self.buffer_size >= self.call_size, f"--buffer-size must be {call}")
        fits = self.call_size % self.policy_frequency == 0
        fits |= self.policy_frequency % self.call_size == 0
        what = f"{self.call_size} (--learn-every x --num-envs), or be a multiple of it"
        require(fits, f"--policy-frequency must divide {what}")

    def parts(self, step: int) -> tuple[bool]:
        """Whether the policy takes part in the update that belongs to a step."""
        return (step % self.policy_frequency == 0,)


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


# same as ddpg_continuous_action_jax.py
class Actor(nn.Module):
    """A deterministic policy; each dimension of an action has bounds of its own."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    exploration_noise: float

    @nn.compact
    def __call__(self, obs: Array) -> Array:
        scale, bias = np.subtract(self.high, self.low) / 2, np.add(self.high, self.low) / 2
        return jnp.tanh(mlp(obs, 256, 256, len(self.low), like_torch=True)) * scale + bias


# same as ddpg_continuous_action_jax.py
class Critic(nn.Module):
    """The Q-function."""

    @nn.compact
    def __call__(self, obs: Array, actions: Array) -> Array:
        x = jnp.concatenate([obs, actions], -1)
        return mlp(x, 256, 256, 1, like_torch=True).squeeze(-1)


# Two of them; each layer is one batched product, so they cost the calls of one.
Critics = nn.vmap(Critic, {"params": 0}, {"params": True}, in_axes=None, axis_size=2)


# same as ddpg_continuous_action_jax.py
class Agent(Model):
    """What model files hold and evaluations play."""

    def __init__(self, actor: Actor, params: Params):
        super().__init__(params)
        self.actor = actor
        self.scale = np.subtract(actor.high, actor.low) / 2
        self.bias = np.add(actor.high, actor.low) / 2

    @classmethod
    def from_args(cls, envs: gym.vector.VectorEnv, args: Args) -> Self:
        low, high = envs.single_action_space.low, envs.single_action_space.high
        return cls(Actor(tuple(low.tolist()), tuple(high.tolist()), args.exploration_noise), {})

    def act(self, obs: np.ndarray, greedy: bool = True) -> np.ndarray:
        """What Actor says, in NumPy, and noise."""
        actions = np.tanh(dense(self.params, obs))
        if not greedy:  # noise of its own for each environment
            noise = self.actor.exploration_noise * np.random.standard_normal(actions.shape)
            actions = actions + noise
        actions = actions * self.scale + self.bias
        return actions.clip(self.actor.low, self.actor.high).astype(np.float32)


class Train(NamedTuple):
    """Everything that learning changes."""

    actor: Params
    critics: Params
    target_actor: Params
    target_critics: Params
    actor_moments: Any  # Adam's
    q_moments: Any
    key: Array


TAGS = ["qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss", "actor_loss"]
TAGS = [f"losses/{tag}" for tag in TAGS]


class Learner:
    """Training as pure functions: what they change, they are given and return."""

    def __init__(self, args: Args, envs: gym.vector.VectorEnv):
        self.args, self.memory = args, ReplayMemory(args.buffer_size, envs)
        self.actor: Any = Agent.from_args(envs, args).actor
        self.critics: Any = Critics()
        self.adam = optax.adam(args.learning_rate)

    def init(self, obs: np.ndarray) -> Train:
        key, actor_key, critics_key = random.split(random.key(self.args.seed), 3)
        actor = self.actor.init(actor_key, obs)
        critics = self.critics.init(critics_key, obs, np.zeros((len(obs), len(self.actor.low))))
        moments = self.adam.init(actor), self.adam.init(critics)
        return Train(actor, critics, actor, critics, *moments, key)

    # same as ddpg_continuous_action_jax.py
    def agrees_with(self, agent: Agent) -> bool:
        """Whether the agent does what the actor says: they have to be changed together."""
        obs = np.random.default_rng(1).standard_normal((2, *self.memory.shapes[0]))
        with jax.default_device(jax.devices("cpu")[0]):  # a GPU would round its products
            said = self.actor.apply(agent.params, obs)
        return np.allclose(agent.act(obs), said, rtol=0, atol=1e-3 * agent.scale.max())

    def smoothed_actions(self, actor: Params, obs: Array, noise: Array) -> Array:
        """Actions with clipped noise: a peak of the critics' that few actions reach counts less."""
        low, high = np.array(self.actor.low), np.array(self.actor.high)
        noise = (self.args.policy_noise * noise).clip(-self.args.noise_clip, self.args.noise_clip)
        return (self.actor.apply(actor, obs) + noise * (high - low) / 2).clip(low, high)

    def q_loss(self, critics: Params, train: Train, batch: Batch, noise: Array) -> tuple:
        """Summed loss of both critics; and their values, losses and mean loss."""
        # Only termination ends the sum of rewards; a truncated episode's next_obs is its own last.
        next_actions = self.smoothed_actions(train.target_actor, batch.next_obs, noise)
        next_q = self.critics.apply(train.target_critics, batch.next_obs, next_actions).min(0)
        targets = batch.rewards + self.args.gamma * (1 - batch.terminated) * next_q
        q = self.critics.apply(critics, batch.obs, batch.actions)
        losses = jnp.square(q - targets).mean(1)
        return losses.sum(), jnp.concatenate([q.mean(1), losses, losses.mean(keepdims=True)])

    def actor_loss(self, actor: Params, train: Train, batch: Batch) -> tuple[Array, Array]:
        actions = self.actor.apply(actor, batch.obs)
        loss = -self.critics.apply(train.critics, batch.obs, actions)[0].mean()
        return loss, loss

    def chance(self, replay: Replay, key: Array, number: int) -> tuple[Array, Array]:
        """What so many updates leave to chance: for each two batches, and noise. At once, because
        a GPU takes as long for the random numbers of one update as for those of all."""
        batches_key, noise_key = random.split(key)
        batches = self.memory.choose(replay, batches_key, number, 2, self.args.batch_size)
        shape = number, self.args.batch_size, len(self.actor.low)
        return batches, random.normal(noise_key, shape)

    def update(
        self, replay: Replay, train: Train, sums: Array, chance: tuple, policy: bool
    ) -> tuple:
        """All that one step is worth; whether the policy takes part is known in advance."""
        (rows, actor_rows), noise = chance
        batch = self.memory.take(replay, rows)
        critics, moments, q_losses = descend(
            self.q_loss, self.adam, train.critics, train.q_moments, train, batch, noise
        )
        train = train._replace(critics=critics, q_moments=moments)
        actor_loss = jnp.zeros(())
        if policy:
            batch = self.memory.take(replay, actor_rows)
            actor, moments, actor_loss = descend(
                self.actor_loss, self.adam, train.actor, train.actor_moments, train, batch
            )
            follow = partial(optax.incremental_update, step_size=self.args.tau)
            train = train._replace(actor=actor, actor_moments=moments)
            train = train._replace(target_actor=follow(actor, train.target_actor))
            train = train._replace(target_critics=follow(critics, train.target_critics))
        losses = jnp.append(q_losses, actor_loss)
        return train, sums + jnp.stack([losses, jnp.array([1.0] * 5 + [policy])])

    # same as ddpg_continuous_action_jax.py
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
    packing, actor_packing = Packing(first, few), Packing(first.actor, few)

    @partial(jax.jit, static_argnums=4, donate_argnums=(0, 2))
    def program(vectors: Any, *rest: Any) -> tuple:
        train, losses, replay = learner.learn(packing.unpack(vectors), *rest)
        return packing.pack(train), losses, replay, actor_packing.pack(train.actor)

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
    agent.params = jax.device_get(packing.unpack(train).actor)
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
