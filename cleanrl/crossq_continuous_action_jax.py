"""CrossQ in JAX: SAC with batch renormalisation and without target networks.

    python cleanrl/crossq_continuous_action_jax.py --env-id Humanoid-v4

Papers: https://arxiv.org/abs/1902.05605, https://arxiv.org/abs/1702.03275 (renormalisation).
Every detail with its reason: docs/rl-algorithms/crossq.md
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
    batch_size: Count = 256
    """number of transitions per gradient step"""
    learning_starts: Natural = 5_000
    """number of steps with random actions before the first gradient step"""
    learn_every: Count = 6
    """update every this many steps of each environment, with one update per step; larger is faster,
    but the policy that acts is older"""
    policy_lr: NonNegative = 1e-3
    """learning rate of the policy"""
    q_lr: NonNegative = 1e-3
    """learning rate of the critics and the entropy coefficient"""
    policy_frequency: Count = 3
    """update the policy every this many steps"""
    critic_width: Count = 2048
    """width of the hidden layers of the critics"""
    alpha: NonNegative = 0.2
    """entropy coefficient (temperature), used only with --no-autotune"""
    autotune: bool = True
    """tune the entropy coefficient towards a target entropy"""

    # differs from sac_continuous_action_jax.py: one frequency
    def __post_init__(self) -> None:
        super().__post_init__()
        self.iteration_steps = steps_per_iteration(self, "policy-frequency")
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


class BatchRenorm(nn.Module):
    """Batch renormalisation of x, (batch, features); acting uses running statistics."""

    eps = 1e-3  # some inputs are constant
    warm_up = 100_000  # updates of batch normalisation, until the running statistics are good

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, x.shape[-1:])
        running_var = self.variable("batch_stats", "var", jnp.ones, x.shape[-1:])
        updates = self.variable("batch_stats", "updates", jnp.zeros, ())  # so far
        running_std = jnp.sqrt(running_var.value + self.eps)
        if not train:
            return (x - running_mean.value) / running_std * scale + bias
        mean, var = x.mean(0), x.var(0)
        std = jnp.sqrt(var + self.eps)
        warm = updates.value >= self.warm_up  # before, r = 1 and d = 0: batch normalisation
        r_max = 1 + 2.0 * warm  # 1 at first, then 3
        d_max = 5.0 * warm  # 0 at first, then 5
        r = jax.lax.stop_gradient(std / running_std).clip(1 / r_max, r_max)
        d = jax.lax.stop_gradient((mean - running_mean.value) / running_std).clip(-d_max, d_max)
        running_mean.value += 0.01 * (mean - running_mean.value)  # 1 - momentum
        running_var.value += 0.01 * (var - running_var.value)
        updates.value += 1
        return ((x - mean) / std * r + d) * scale + bias


# differs from sac_continuous_action_jax.py: normalises the input of every layer
def mlp(x: Array, train: bool, *widths: int) -> Array:
    """Normalised dense layers with ReLU between them; initial weights as in torch's nn.Linear."""
    for i, width in enumerate(widths):
        bound = x.shape[-1] ** -0.5
        uniform = partial(random.uniform, minval=-bound, maxval=bound)
        layer = nn.Dense(width, kernel_init=uniform, bias_init=uniform)
        x = layer(BatchRenorm()(x if i == 0 else nn.relu(x), train))
    return x


# differs from sac_continuous_action_jax.py: normalised; log-probabilities without the scale
class Actor(nn.Module):
    """A Gaussian policy, squashed by tanh into the bounds of each action dimension."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @nn.compact
    def __call__(self, obs: Array, train: bool = False) -> tuple[Array, Array]:
        """Mean and log standard deviation of the Gaussian; the latter is within [-5, 2]."""
        mean, log_std = jnp.split(mlp(obs, train, 256, 256, 2 * len(self.low)), 2, -1)
        return mean, jnp.tanh(log_std) * 3.5 - 1.5

    def sample(self, obs: Array, noise: Array, train: bool = False) -> tuple[Array, Array]:
        """Actions, reparameterised by `noise`, and the log-probabilities of tanh(x)."""
        mean, log_std = self(obs, train)
        x = mean + jnp.exp(log_std) * noise
        scale = np.subtract(self.high, self.low) / 2
        bias = np.add(self.high, self.low) / 2
        # log N(x; mean, std) - log(1 - tanh(x)^2); softplus keeps it exact where tanh(x) is 1.
        logprob = 2 * nn.softplus(2 * x) - 2 * x - log_std - 0.5 * jnp.square(noise)
        logprob -= 2 * math.log(2) + 0.5 * math.log(2 * math.pi)
        return jnp.tanh(x) * scale + bias, logprob.sum(-1)

    def act(self, obs: Array, noise: Array) -> Array:
        """Actions for the environment, clipped because rounding may exceed the bounds."""
        return self.sample(obs, noise)[0].clip(np.array(self.low), np.array(self.high))


# differs from sac_continuous_action_jax.py: normalised and wider
class Critic(nn.Module):
    """The Q-function."""

    width: int

    @nn.compact
    def __call__(self, obs: Array, actions: Array, train: bool = False) -> Array:
        x = jnp.concatenate([obs, actions], -1)
        return mlp(x, train, self.width, self.width, 1).squeeze(-1)


# Two critics with their own parameters, stacked on axis 0: Q-values are (2, batch_size).
Critics = nn.vmap(Critic, {"params": 0, "batch_stats": 0}, {"params": True}, None, axis_size=2)


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


# differs from sac_continuous_action_jax.py: no target networks
class State(NamedTuple):
    """All that updates change. Parameters include running statistics, whose gradients are zero."""

    actor: TrainState
    critics: TrainState
    temperature: TrainState  # alpha, the entropy coefficient, as log_alpha
    key: Array


# differs from sac_continuous_action_jax.py: Adam's beta1 is 0.5; no target networks
def init(args: Args, envs: gym.vector.VectorEnv) -> State:
    key, actor_key, critics_key = random.split(random.key(args.seed), 3)
    obs = np.zeros(envs.observation_space.shape)
    actor = Agent.from_args(envs, args).network
    critics = Critics(args.critic_width)
    critics_params = critics.init(critics_key, obs, np.zeros(envs.action_space.shape))
    temperature = {"log_alpha": jnp.float32(0.0 if args.autotune else math.log(args.alpha))}
    alpha_lr = args.q_lr if args.autotune else 0.0  # 0 keeps --alpha
    return State(
        actor=train_state(actor.apply, actor.init(actor_key, obs), optax.adam(args.policy_lr, 0.5)),
        critics=train_state(critics.apply, critics_params, optax.adam(args.q_lr, 0.5)),
        temperature=train_state(None, temperature, optax.adam(alpha_lr)),
        key=key,
    )


# differs from sac_continuous_action_jax.py: one pass over both halves of the transitions
def q_loss(critics: Params, state: State, args: Args, batch: Batch, noise: Array) -> tuple:
    """Sum of both critics' losses; changed running statistics, and metrics."""
    sample = partial(state.actor.apply_fn, state.actor.params, method="sample")
    next_actions, next_logprob = sample(batch.next_obs, noise)
    # One batch of both halves, normalised as a whole, makes target networks unnecessary.
    obs = jnp.concatenate([batch.obs, batch.next_obs])
    actions = jnp.concatenate([batch.actions, next_actions])
    both, changed = state.critics.apply_fn(critics, obs, actions, True, mutable="batch_stats")
    q, next_q = jnp.split(both, 2, 1)  # (2, batch_size) each
    next_value = next_q.min(0) - jnp.exp(state.temperature.params["log_alpha"]) * next_logprob
    # Only termination stops the bootstrap; after truncation, next_obs is the last observation.
    targets = batch.rewards + args.gamma * (1 - batch.terminated) * next_value
    values = q.mean(1)
    losses = jnp.square(q - jax.lax.stop_gradient(targets)).mean(1)
    metrics = {"losses/qf1_values": values[0], "losses/qf2_values": values[1]}
    metrics |= {"losses/qf1_loss": losses[0], "losses/qf2_loss": losses[1]}
    return losses.sum(), (changed, metrics | {"losses/qf_loss": losses.mean()})


# differs from sac_continuous_action_jax.py: the critics use their running statistics
def policy_loss(params: tuple, state: State, batch: Batch, noise: Array) -> tuple:
    """Sum of the losses of actor and temperature; changed running statistics, and metrics."""
    actor, temperature = params
    alpha = jnp.exp(temperature["log_alpha"])
    sample = partial(state.actor.apply_fn, method="sample", mutable="batch_stats")
    (new_actions, logprob), changed = sample(actor, batch.obs, noise, True)
    q = state.critics.apply_fn(state.critics.params, batch.obs, new_actions).min(0)
    actor_loss = (jax.lax.stop_gradient(alpha) * logprob - q).mean()
    target_entropy = -batch.actions.shape[1]  # -1 per action dimension
    alpha_loss = -alpha * (jax.lax.stop_gradient(logprob).mean() + target_entropy)
    metrics = {"losses/actor_loss": actor_loss, "losses/alpha": alpha}
    return actor_loss + alpha_loss, (changed, metrics | {"losses/alpha_loss": alpha_loss})


# differs from sac_continuous_action_jax.py: one policy step, no target networks
def update(args: Args, state: State, batches: list, noise: Array, due: tuple = (1,)) -> tuple:
    """The update for one environment step: the new state, and a dict of metrics per gradient step.

    `noise` is (2, batch_size, action dimensions). `due` says whether to update the policy."""
    batch, policy_batch = batches  # independent
    gradient = jax.grad(q_loss, has_aux=True)
    grads, (changed, metrics) = gradient(state.critics.params, state, args, batch, noise[0])
    critics = state.critics.apply_gradients(grads=grads)
    state = state._replace(critics=critics.replace(params={**critics.params, **changed}))
    logged = [metrics]
    if due[0]:
        gradient = jax.grad(policy_loss, has_aux=True)
        params = state.actor.params, state.temperature.params
        grads, (changed, metrics) = gradient(params, state, policy_batch, noise[1])
        actor = state.actor.apply_gradients(grads=grads[0])
        actor = actor.replace(params={**actor.params, **changed})
        temperature = state.temperature.apply_gradients(grads=grads[1])
        state = state._replace(actor=actor, temperature=temperature)
        logged.append(metrics)
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
    training = BackgroundTraining(init_state, update_state, memory, args.batch_size, noises=2)
    low = envs.action_space.low
    high = envs.action_space.high
    rng = np.random.default_rng(args.seed)

    envs.reset(seed=args.seed)
    start = run.resume(args.num_iterations, training=training, memory=memory, rng=rng, envs=envs)
    obs = envs.obs
    ended = envs.ended
    for iteration in range(start, args.num_iterations):
        # differs from sac_continuous_action_jax.py: no target networks
        # Start the updates in the background: one per step of this iteration, from transitions of
        # earlier iterations; none before --learning-starts. Steps are summed over environments,
        # so --num-envs changes neither the number of updates nor their order.
        begin = iteration * args.iteration_steps
        end = begin + args.iteration_steps
        steps = range(max(begin, args.learning_starts) + 1, end + 1)
        agent.params = training.start([step % args.policy_frequency == 0 for step in steps])

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
