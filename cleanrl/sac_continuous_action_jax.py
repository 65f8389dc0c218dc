"""Soft Actor-Critic (SAC) in JAX, for vector observations and continuous actions.

    python cleanrl/sac_continuous_action_jax.py --env-id Hopper-v4

Papers: https://arxiv.org/abs/1801.01290, https://arxiv.org/abs/1812.05905 (tuned temperature).
Every detail with its reason: docs/rl-algorithms/sac.md
"""

import math
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
from cleanrl_utils.speed.jax_acting import NumpyModel
from cleanrl_utils.speed.jax_learning import BackgroundTraining, steps_per_iteration
from cleanrl_utils.speed.jax_tools import Params, train_state


@dataclass
class Args(RunArgs):
    env_id: str = "Hopper-v4"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 1_000_000
    """number of environment steps"""
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
    learning_starts: Natural = 5_000
    """number of steps with random actions before the first gradient step"""
    learn_every: Count = 8
    """update every this many steps of each environment, with one update per step; larger is faster,
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

    # differs from td3_continuous_action_jax.py: checks --alpha
    def __post_init__(self) -> None:
        super().__post_init__()
        self.iteration_steps = steps_per_iteration(
            self, "policy-frequency", "target-network-frequency"
        )
        self.num_iterations = self.total_timesteps // self.iteration_steps
        self.log_every = max(100 // self.iteration_steps, 1)  # iterations in about 100 steps
        require(self.alpha > 0, f"--alpha must be above 0, got {self.alpha}")  # stored as its log


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


# differs from td3_continuous_action_jax.py: a squashed Gaussian
class Actor(nn.Module):
    """A Gaussian policy, squashed by tanh into the bounds of each action dimension."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @nn.compact
    def __call__(self, obs: Array) -> tuple[Array, Array]:
        """Mean and log standard deviation of the Gaussian; the latter is within [-5, 2]."""
        mean, log_std = jnp.split(mlp(obs, 256, 256, 2 * len(self.low)), 2, -1)
        return mean, jnp.tanh(log_std) * 3.5 - 1.5

    def sample(self, obs: Array, noise: Array) -> tuple[Array, Array]:
        """Actions and their log-probabilities, reparameterised: `noise` is standard normal."""
        mean, log_std = self(obs)
        x = mean + jnp.exp(log_std) * noise
        scale = np.subtract(self.high, self.low) / 2
        bias = np.add(self.high, self.low) / 2
        # log p(a) = log N(x; mean, std) - log da/dx, where da/dx = scale * (1 - tanh(x)^2).
        # log(1 - tanh(x)^2) = 2 * (log(2) + x - softplus(2x)), exact where tanh(x) rounds to 1.
        logprob = 2 * nn.softplus(2 * x) - 2 * x - log_std - 0.5 * jnp.square(noise)
        constants = np.log(scale) + 2 * math.log(2) + 0.5 * math.log(2 * math.pi)
        return jnp.tanh(x) * scale + bias, logprob.sum(-1) - constants.sum()

    def act(self, obs: Array, noise: Array) -> Array:
        """Actions for the environment, clipped because rounding may exceed the bounds."""
        actions, _ = self.sample(obs, noise)
        return actions.clip(np.array(self.low), np.array(self.high))


class Critic(nn.Module):
    """The Q-function."""

    @nn.compact
    def __call__(self, obs: Array, actions: Array) -> Array:
        x = jnp.concatenate([obs, actions], -1)
        return mlp(x, 256, 256, 1).squeeze(-1)


# Two critics with their own parameters, stacked on axis 0: Q-values are (2, batch_size). Batched
# matrix products make them as fast as one.
Critics = nn.vmap(Critic, {"params": 0}, {"params": True}, in_axes=None, axis_size=2)


# differs from td3_continuous_action_jax.py: samples with noise
class Agent(NumpyModel):
    """The actor as it acts, in training and evaluation, and as it is saved. `compute` evaluates one
    of the actor's methods in NumPy, which is faster than JAX for a few observations."""

    @classmethod
    def from_args(cls, envs: gym.vector.VectorEnv, args: Args) -> Self:
        space = envs.single_action_space
        return cls(Actor(tuple(space.low.tolist()), tuple(space.high.tolist())))

    def act(self, obs: np.ndarray, greedy: bool = True) -> np.ndarray:
        shape = len(obs), len(self.network.low)
        noise = np.zeros(shape) if greedy else np.random.standard_normal(shape)
        return self.compute("act", obs, noise)


# differs from td3_continuous_action_jax.py: an entropy coefficient, no target policy
class State(NamedTuple):
    """All that updates change. A TrainState holds parameters and their optimiser's state."""

    actor: TrainState
    critics: TrainState
    target_critics: Params
    temperature: TrainState  # alpha, the entropy coefficient, as log_alpha
    key: Array


# differs from td3_continuous_action_jax.py: an entropy coefficient, no target policy
def init(args: Args, envs: gym.vector.VectorEnv) -> State:
    key, actor_key, critics_key = random.split(random.key(args.seed), 3)
    obs = np.zeros(envs.observation_space.shape)
    actor = Agent.from_args(envs, args).network
    critics = Critics().init(critics_key, obs, np.zeros(envs.action_space.shape))
    temperature = {"log_alpha": jnp.float32(0.0 if args.autotune else math.log(args.alpha))}
    alpha_lr = args.q_lr if args.autotune else 0.0  # 0 keeps --alpha
    return State(
        actor=train_state(actor.apply, actor.init(actor_key, obs), optax.adam(args.policy_lr)),
        critics=train_state(Critics().apply, critics, optax.adam(args.q_lr)),
        target_critics=critics,
        temperature=train_state(None, temperature, optax.adam(alpha_lr)),
        key=key,
    )


# differs from td3_continuous_action_jax.py: targets with the policy's entropy
def q_loss(critics: Params, state: State, args: Args, batch: Batch, noise: Array) -> tuple:
    """Sum of both critics' losses, and metrics."""
    sample = partial(state.actor.apply_fn, state.actor.params, method="sample")
    next_actions, next_logprob = sample(batch.next_obs, noise)
    q_values = state.critics.apply_fn
    next_q = q_values(state.target_critics, batch.next_obs, next_actions).min(0)
    next_value = next_q - jnp.exp(state.temperature.params["log_alpha"]) * next_logprob
    # Only termination stops the bootstrap; after truncation, next_obs is the last observation.
    targets = batch.rewards + args.gamma * (1 - batch.terminated) * next_value
    q = q_values(critics, batch.obs, batch.actions)  # (2, batch_size)
    values = q.mean(1)
    losses = jnp.square(q - targets).mean(1)
    metrics = {"losses/qf1_values": values[0], "losses/qf2_values": values[1]}
    metrics |= {"losses/qf1_loss": losses[0], "losses/qf2_loss": losses[1]}
    return losses.sum(), metrics | {"losses/qf_loss": losses.mean()}


def policy_loss(params: tuple, state: State, batch: Batch, noise: Array) -> tuple:
    """Sum of the losses of actor and temperature, and metrics. One gradient serves both, since
    neither loss has a gradient with respect to the other's parameters."""
    actor, temperature = params
    alpha = jnp.exp(temperature["log_alpha"])
    new_actions, logprob = state.actor.apply_fn(actor, batch.obs, noise, method="sample")
    q = state.critics.apply_fn(state.critics.params, batch.obs, new_actions).min(0)
    actor_loss = (jax.lax.stop_gradient(alpha) * logprob - q).mean()
    target_entropy = -batch.actions.shape[1]  # -1 per action dimension
    alpha_loss = -alpha * (jax.lax.stop_gradient(logprob).mean() + target_entropy)
    metrics = {"losses/actor_loss": actor_loss, "losses/alpha": alpha}
    return actor_loss + alpha_loss, metrics | {"losses/alpha_loss": alpha_loss}


# differs from td3_continuous_action_jax.py: several policy steps, and the entropy coefficient
def update(args: Args, state: State, batches: list, noise: Array, due: tuple = (1, 1)) -> tuple:
    """The update for one environment step: the new state, and a dict of metrics per gradient step.

    `noise` is standard normal, (1 + policy_frequency, batch_size, action dimensions). `due` says
    whether to update the policy and the target critics, and is known when this is compiled."""
    batch, policy_batch = batches  # independent; all policy steps below use the second
    policy_due, target_due = due
    gradient = jax.grad(q_loss, has_aux=True)
    grads, metrics = gradient(state.critics.params, state, args, batch, noise[0])
    state = state._replace(critics=state.critics.apply_gradients(grads=grads))
    logged = [metrics]
    if policy_due:
        gradient = jax.grad(policy_loss, has_aux=True)
        for policy_noise in noise[1:]:  # policy_frequency times: once per step since the last time
            params = state.actor.params, state.temperature.params
            grads, metrics = gradient(params, state, policy_batch, policy_noise)
            actor = state.actor.apply_gradients(grads=grads[0])
            temperature = state.temperature.apply_gradients(grads=grads[1])
            state = state._replace(actor=actor, temperature=temperature)
            logged.append(metrics)
    if target_due:  # target = tau * network + (1 - tau) * target
        target = optax.incremental_update(state.critics.params, state.target_critics, args.tau)
        state = state._replace(target_critics=target)
    return state, logged


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Box, "dqn_jax.py", bounded=True)

    agent = Agent.from_args(envs, args)
    memory = ReplayMemory(args.buffer_size, envs, collect_steps=args.learn_every)
    noises = 1 + args.policy_frequency  # per update: one for the critics, one per policy step
    init_state = partial(init, args, envs)
    update_state = partial(update, args)
    training = BackgroundTraining(init_state, update_state, memory, args.batch_size, noises=noises)
    low = envs.action_space.low
    high = envs.action_space.high
    rng = np.random.default_rng(args.seed)

    envs.reset(seed=args.seed)
    start = run.resume(args.num_iterations, training=training, memory=memory, rng=rng, envs=envs)
    obs = envs.obs
    ended = envs.ended
    for iteration in range(start, args.num_iterations):
        # differs from td3_continuous_action_jax.py: target networks have their own schedule
        # Start the updates in the background: one per step of this iteration, from transitions of
        # earlier iterations; none before --learning-starts. Steps are summed over environments,
        # so --num-envs changes neither the number of updates nor their order.
        begin = iteration * args.iteration_steps
        end = begin + args.iteration_steps
        steps = range(max(begin, args.learning_starts) + 1, end + 1)
        policy_due = [step % args.policy_frequency == 0 for step in steps]
        target_due = [step % args.target_network_frequency == 0 for step in steps]
        agent.params = training.start(policy_due, target_due)

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
