"""Deep Q-Network (DQN) in JAX, for vector observations and discrete actions.

    python cleanrl/dqn_jax.py --env-id CartPole-v1

Paper: https://doi.org/10.1038/nature14236. Every detail with its reason: docs/rl-algorithms/dqn.md
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
from cleanrl_utils.running.run import Run, RunArgs, parse_args, require
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share
from cleanrl_utils.speed.jax_learning import Training
from cleanrl_utils.speed.jax_tools import FlaxModel, Params


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 500_000
    """number of environment steps"""
    learning_rate: NonNegative = 2.5e-4
    """learning rate of Adam"""
    num_envs: Count = 1
    """number of parallel environments; other settings count steps summed over environments"""
    buffer_size: Count = 10_000
    """number of transitions in the replay memory"""
    gamma: Share = 0.99
    """discount factor"""
    tau: Share = 1.0
    """coefficient of the soft update of the target network: 1 copies the network"""
    target_network_frequency: Count = 500
    """update the target network every this many steps"""
    batch_size: Count = 128
    """number of transitions per gradient step"""
    start_e: Share = 1
    """probability of a random action at the start (epsilon)"""
    end_e: Share = 0.05
    """probability of a random action at the end of exploration (epsilon)"""
    exploration_fraction: Share = 0.5
    """fraction of --total-timesteps over which epsilon falls from --start-e to --end-e"""
    learning_starts: Natural = 10_000
    """number of steps before the first gradient step"""
    train_frequency: Count = 10
    """number of steps per gradient step"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_iterations = self.total_timesteps // self.num_envs
        require(self.num_iterations > 0, "--total-timesteps must be at least --num-envs")
        enough = self.learning_starts >= self.num_envs  # for the first batch to be drawn from
        require(enough, f"--learning-starts must be at least --num-envs, {self.num_envs}")


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


class QNetwork(nn.Module):
    """Q-values of all actions."""

    num_actions: int

    @nn.compact
    def __call__(self, obs: Array) -> Array:
        x = nn.relu(nn.Dense(120)(obs))
        x = nn.relu(nn.Dense(84)(x))
        return nn.Dense(self.num_actions)(x)

    def act(self, obs: Array) -> Array:
        return self(obs).argmax(-1)  # the training loop explores


def make_network(envs: gym.vector.VectorEnv, args: Args) -> QNetwork:
    return QNetwork(int(envs.single_action_space.n))


class Agent(FlaxModel):
    """The agent as model files hold it and evaluations play it."""

    @classmethod
    def from_args(cls, envs: gym.vector.VectorEnv, args: Args) -> Self:
        return cls(make_network(envs, args), {})  # load_state_dict brings the rest


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """From `start` at step 0 to `end` at step `duration`, and `end` from there on."""
    return end if step >= duration else start + (end - start) * step / duration


class State(NamedTuple):
    """Everything that learning changes."""

    q_network: TrainState  # parameters and their optimiser
    target_network: Params
    key: Array


def init(args: Args, envs: gym.vector.VectorEnv) -> State:
    network = make_network(envs, args)
    key = random.key(args.seed)
    params = network.init(key, np.zeros(envs.observation_space.shape, np.float32))
    adam = optax.adam(args.learning_rate)
    adam = optax.flatten(adam)  # one vector is faster than many small arrays
    q_network = TrainState.create(apply_fn=network.apply, params=params, tx=adam)
    return State(q_network, params, random.fold_in(key, 1))


def get_loss(params: Params, state: State, args: Args, batch: Batch) -> tuple[Array, dict]:
    """The loss, and metrics."""
    # Only termination stops the bootstrap; after truncation, next_obs is the last observation.
    q_network = state.q_network.apply_fn
    best_next = q_network(state.target_network, batch.next_obs).max(1)
    td_target = batch.rewards + args.gamma * best_next * (1 - batch.terminated)
    q_values = q_network(params, batch.obs)
    q_values = jnp.take_along_axis(q_values, batch.actions[:, None], 1).squeeze(1)
    td_loss = jnp.square(q_values - td_target).mean()
    return td_loss, {"losses/td_loss": td_loss, "losses/q_values": q_values.mean()}


def update(args: Args, state: State, batch: Batch) -> tuple[State, list[dict]]:
    """One gradient step, and its metrics."""
    gradient = jax.grad(get_loss, has_aux=True)
    grads, metrics = gradient(state.q_network.params, state, args, batch)
    return state._replace(q_network=state.q_network.apply_gradients(grads=grads)), [metrics]


def update_target(args: Args, state: State) -> State:
    """target = tau * network + (1 - tau) * target"""
    target = optax.incremental_update(state.q_network.params, state.target_network, args.tau)
    return state._replace(target_network=target)


def greedy_actions(state: State, obs: Array) -> Array:
    return state.q_network.apply_fn(state.q_network.params, obs, method="act")


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Discrete, "sac_continuous_action_jax.py")

    agent = Agent.from_args(envs, args)
    memory = ReplayMemory(args.buffer_size, envs)
    init_state = partial(init, args, envs)
    update_state = partial(update, args)
    training = Training(init_state, update_state, memory, args.batch_size)
    act = training.policy(greedy_actions)
    target_update = partial(update_target, args)
    rng = np.random.default_rng(args.seed)
    actions = np.zeros(args.num_envs, dtype=np.int64)

    envs.reset(seed=args.seed)
    start = run.resume(args.num_iterations, training=training, memory=memory, rng=rng, envs=envs)
    obs = envs.obs
    ended = envs.ended
    for iteration in range(start, args.num_iterations):
        # Act. Environments explore independently of each other.
        exploring = args.exploration_fraction * args.total_timesteps  # steps
        epsilon = linear_schedule(args.start_e, args.end_e, exploring, iteration * args.num_envs)
        explore = rng.random(args.num_envs) < epsilon
        if not explore.all():
            actions[:] = act(obs)
        if explore.any():
            actions[explore] = rng.integers(envs.single_action_space.n, size=explore.sum())

        # Learn; a GPU computes while the environments step. Steps are summed over environments, so
        # --num-envs changes neither the number of updates nor their order.
        first_step = iteration * args.num_envs + 1
        for global_step in range(first_step, first_step + args.num_envs):
            learning = global_step > args.learning_starts
            if learning and global_step % args.train_frequency == 0:
                training.update()
            if learning and global_step % args.target_network_frequency == 0:
                training.change(target_update)
            if global_step % 100 == 0:
                run.log(training.metrics(), global_step)

        # Step the environments. A step that only reset one of them is not stored.
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        memory.add(obs, next_obs, actions, rewards, terminated, ~ended)
        obs = next_obs
        ended = terminated | truncated
        run.log_episodes(infos, global_step)
        if run.evaluation_due(global_step):
            agent.params = training.state.q_network.params
            run.evaluate(agent, global_step)
        run.checkpoint(iteration + 1)

    agent.params = training.state.q_network.params
    run.finish(agent)
