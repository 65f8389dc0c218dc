"""Twin Delayed DDPG (TD3) in JAX, for vector observations and continuous actions.

    python cleanrl/td3_continuous_action_jax.py --env-id Hopper-v4

Paper: https://arxiv.org/abs/1802.09477. Every detail with its reason: docs/rl-algorithms/td3.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import Array, random

from cleanrl_utils.environments.making import make, require_spaces
from cleanrl_utils.environments.vector import SyncVectorEnv
from cleanrl_utils.replay.buffers_jax import Batch, ReplayMemory
from cleanrl_utils.running.run import Run, RunArgs, parse_args
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share
from cleanrl_utils.speed.jax_acting import NumpyModel
from cleanrl_utils.speed.jax_learning import BackgroundTraining, steps_per_iteration
from cleanrl_utils.speed.jax_tools import Params, train_state


@dataclass
class Args(RunArgs):
    env_id: str = "Hopper-v4"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 1_000_000
    """number of environment steps"""
    learning_rate: NonNegative = 3e-4
    """learning rate of Adam"""
    num_envs: Count = 1
    """number of parallel environments; other settings count steps summed over environments"""
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
    """update every this many steps of each environment, with one update per step; larger is faster,
    but the policy that acts is older"""
    policy_frequency: Count = 2
    """update the policy and the target networks every this many steps"""
    noise_clip: NonNegative = 0.5
    """bound of the noise on the target policy's actions, relative to half the action range"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.iteration_steps = steps_per_iteration(self, "policy-frequency")
        self.num_iterations = self.total_timesteps // self.iteration_steps
        self.log_every = max(100 // self.iteration_steps, 1)  # iterations in about 100 steps


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


def make_envs(args: Args, video_folder: str) -> gym.vector.VectorEnv:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored."""
    kwargs = args.env_settings | {"capture_video": args.capture_video, "video_folder": video_folder}
    thunks = [make_env(args.env_id, args.seed + i, i, **kwargs) for i in range(args.num_envs)]
    return SyncVectorEnv(thunks)


def mlp(x: Array, *widths: int) -> Array:
    """Dense layers of these widths with ReLU between them, for use in a Flax module. Weights are
    initialised as in torch's nn.Linear: Flax's are larger and saturate the tanh that follows."""
    for i, width in enumerate(widths):
        bound = x.shape[-1] ** -0.5
        uniform = partial(random.uniform, minval=-bound, maxval=bound)
        layer = nn.Dense(width, kernel_init=uniform, bias_init=uniform)
        x = layer(x if i == 0 else nn.relu(x))
    return x


class Actor(nn.Module):
    """A deterministic policy; each dimension of an action has bounds of its own."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @nn.compact
    def __call__(self, obs: Array) -> Array:
        scale = np.subtract(self.high, self.low) / 2
        bias = np.add(self.high, self.low) / 2
        return jnp.tanh(mlp(obs, 256, 256, len(self.low))) * scale + bias

    def act(self, obs: Array, noise: Array) -> Array:
        """Actions with noise, which is relative to half the action range."""
        low = np.array(self.low)
        high = np.array(self.high)
        return (self(obs) + noise * (high - low) / 2).clip(low, high)


class Critic(nn.Module):
    """The Q-function."""

    @nn.compact
    def __call__(self, obs: Array, actions: Array) -> Array:
        x = jnp.concatenate([obs, actions], -1)
        return mlp(x, 256, 256, 1).squeeze(-1)


# Two critics with their own parameters, stacked on axis 0: Q-values are (2, batch_size). Batched
# matrix products make them as fast as one.
Critics = nn.vmap(Critic, {"params": 0}, {"params": True}, in_axes=None, axis_size=2)


class Agent(NumpyModel):
    """The actor as it acts, in training and evaluation, and as it is saved. `compute` evaluates one
    of the actor's methods in NumPy, which is faster than JAX for a few observations."""

    exploration_noise = 0.0

    @classmethod
    def from_args(cls, envs: gym.vector.VectorEnv, args: Args) -> Self:
        space = envs.single_action_space
        agent = cls(Actor(tuple(space.low.tolist()), tuple(space.high.tolist())))
        agent.exploration_noise = args.exploration_noise
        return agent

    def act(self, obs: np.ndarray, greedy: bool = True) -> np.ndarray:
        shape = len(obs), len(self.network.low)
        noise = np.zeros(shape) if greedy else np.random.standard_normal(shape)
        return self.compute("act", obs, self.exploration_noise * noise)


# differs from ddpg_continuous_action_jax.py: two critics
class State(NamedTuple):
    """All that updates change. A TrainState holds parameters and their optimiser's state."""

    actor: TrainState
    critics: TrainState
    target_actor: Params
    target_critics: Params
    key: Array


# differs from ddpg_continuous_action_jax.py: two critics
def init(args: Args, envs: gym.vector.VectorEnv) -> State:
    key, actor_key, critics_key = random.split(random.key(args.seed), 3)
    obs = np.zeros(envs.observation_space.shape)
    actor = Agent.from_args(envs, args).network
    actor_params = actor.init(actor_key, obs)
    adam = optax.adam(args.learning_rate)
    critics = Critics().init(critics_key, obs, np.zeros(envs.action_space.shape))
    return State(
        actor=train_state(actor.apply, actor_params, adam),
        critics=train_state(Critics().apply, critics, adam),
        target_actor=actor_params,
        target_critics=critics,
        key=key,
    )


# differs from ddpg_continuous_action_jax.py: two critics, noise on the target policy's actions
def q_loss(critics: Params, state: State, args: Args, batch: Batch, noise: Array) -> tuple:
    """Sum of both critics' losses, and metrics."""
    # Clipped noise on the target actions averages Q-values over similar actions.
    noise = (args.policy_noise * noise).clip(-args.noise_clip, args.noise_clip)
    target_actor = partial(state.actor.apply_fn, state.target_actor, method="act")
    next_actions = target_actor(batch.next_obs, noise)
    q_values = state.critics.apply_fn
    next_q = q_values(state.target_critics, batch.next_obs, next_actions).min(0)
    # Only termination stops the bootstrap; after truncation, next_obs is the last observation.
    targets = batch.rewards + args.gamma * (1 - batch.terminated) * next_q
    q = q_values(critics, batch.obs, batch.actions)  # (2, batch_size)
    values = q.mean(1)
    losses = jnp.square(q - targets).mean(1)
    metrics = {"losses/qf1_values": values[0], "losses/qf2_values": values[1]}
    metrics |= {"losses/qf1_loss": losses[0], "losses/qf2_loss": losses[1]}
    return losses.sum(), metrics | {"losses/qf_loss": losses.mean()}


# differs from ddpg_continuous_action_jax.py: the first critic alone
def actor_loss(actor: Params, state: State, batch: Batch) -> tuple:
    actions = state.actor.apply_fn(actor, batch.obs)
    loss = -state.critics.apply_fn(state.critics.params, batch.obs, actions)[0].mean()
    return loss, {"losses/actor_loss": loss}


# differs from ddpg_continuous_action_jax.py: two critics, noise on the target policy
def update(args: Args, state: State, batches: list, noise: Array, due: tuple = (1,)) -> tuple:
    """The update for one environment step: the new state, and a dict of metrics per gradient step.

    `noise` is standard normal, (1, batch_size, action dimensions). `due` says whether to update the
    policy and the target networks, and is known when this is compiled."""
    batch, actor_batch = batches  # independent
    (policy_due,) = due
    gradient = jax.grad(q_loss, has_aux=True)
    grads, metrics = gradient(state.critics.params, state, args, batch, noise[0])
    state = state._replace(critics=state.critics.apply_gradients(grads=grads))
    logged = [metrics]
    if policy_due:
        grads, metrics = jax.grad(actor_loss, has_aux=True)(state.actor.params, state, actor_batch)
        state = state._replace(actor=state.actor.apply_gradients(grads=grads))
        logged.append(metrics)
        # target = tau * network + (1 - tau) * target
        soft_update = partial(optax.incremental_update, step_size=args.tau)
        target_actor = soft_update(state.actor.params, state.target_actor)
        target_critics = soft_update(state.critics.params, state.target_critics)
        state = state._replace(target_actor=target_actor, target_critics=target_critics)
    return state, logged


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Box, "dqn_jax.py", bounded=True)

    agent = Agent.from_args(envs, args)
    memory = ReplayMemory(args.buffer_size, envs, collect_steps=args.learn_every)
    init_state = partial(init, args, envs)
    update_state = partial(update, args)
    training = BackgroundTraining(init_state, update_state, memory, args.batch_size, noises=1)
    low = envs.action_space.low
    high = envs.action_space.high
    rng = np.random.default_rng(args.seed)

    envs.reset(seed=args.seed)
    start = run.resume(args.num_iterations, training=training, memory=memory, rng=rng, envs=envs)
    obs = envs.obs
    ended = envs.ended
    for iteration in range(start, args.num_iterations):
        # Start the updates in the background: one per step of this iteration, from transitions of
        # earlier iterations; none before --learning-starts. Steps are summed over environments,
        # so --num-envs changes neither the number of updates nor their order.
        begin = iteration * args.iteration_steps
        end = begin + args.iteration_steps
        steps = range(max(begin, args.learning_starts) + 1, end + 1)
        policy_due = [step % args.policy_frequency == 0 for step in steps]
        agent.params = training.start(policy_due)

        # Meanwhile act with the last policy, at first at random. The step after an episode's end
        # only resets its environment (~ended is False) and is not stored.
        for step in range(begin, end, args.num_envs):
            global_step = step + args.num_envs
            at_random = step < args.learning_starts
            actions = rng.uniform(low, high) if at_random else agent.act(obs, greedy=False)
            actions = actions.astype(np.float32)
            next_obs, rewards, terminated, truncated, infos = envs.step(actions)
            memory.collect(obs, next_obs, actions, rewards, terminated, ~ended)
            obs = next_obs
            ended = terminated | truncated
            run.log_episodes(infos, global_step)

        if (iteration + 1) % args.log_every == 0:
            run.log(training.metrics(), global_step)
        run.evaluate(agent, global_step)
        run.checkpoint(iteration + 1)

    agent.params = training.wait()
    run.finish(agent)
