"""FastTD3: TD3 with a thousand environments and large batches, one program on the accelerator.

    python cleanrl/fast_td3_continuous_action_jax.py --env-id playground/CheetahRun

Paper: https://arxiv.org/abs/2505.22642. Every detail and its reason: docs/rl-algorithms/fast-td3.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, random

from cleanrl_utils.environments.jax_envs import Brax, Episode, Step, advance, begin, to_gym
from cleanrl_utils.environments.playground import add_backend, make_physics
from cleanrl_utils.replay.ring_jax import Ring
from cleanrl_utils.running.runs import Runs, RunsArgs, parse_args, require
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share
from cleanrl_utils.speed.jax_tools import Model, Params, mean_of


@dataclass
class Args(RunsArgs):
    env_id: str = "playground/CheetahRun"
    """name of the environment: Brax's (ant, humanoid, ...) or MuJoCo Playground's
    (playground/CheetahRun, ...)"""
    backend: str = "spring"
    """physics of Brax: spring (fastest), positional, generalized or mjx"""
    total_timesteps: Count = 50_000_000
    """number of environment steps per agent"""
    learning_rate: NonNegative = 3e-4
    """learning rate of AdamW"""
    weight_decay: NonNegative = 0.1
    """weight decay of AdamW"""
    num_envs: Count = 1024
    """number of parallel environments per agent"""
    segment_steps: Count = 500
    """number of steps per environment between two reports: metrics, evaluation, checkpoint"""
    buffer_size: Count = 10_485_760
    """number of transitions in the replay memory"""
    learning_starts: Natural = 10_240
    """number of steps before the first gradient step"""
    batch_size: Count = 32_768
    """number of transitions per gradient step"""
    num_updates: Count = 2
    """number of gradient steps of the critics per step of all environments"""
    policy_frequency: Count = 2
    """update the policy every this many gradient steps of the critics"""
    gamma: Share = 0.97
    """discount factor"""
    n_step: Count = 3
    """number of rewards in an n-step return"""
    tau: Share = 0.1
    """coefficient of the soft update of the target network: 1 copies the network"""
    n_atoms: Count = 101
    """number of atoms of the return distribution"""
    v_min: float = -500
    """smallest atom of the return distribution"""
    v_max: float = 500
    """largest atom of the return distribution"""
    std_min: NonNegative = 0.1
    """smallest standard deviation of an environment's exploration noise"""
    std_max: NonNegative = 0.4
    """largest standard deviation of an environment's exploration noise"""
    policy_noise: NonNegative = 0.1
    """standard deviation of the noise on the target policy's actions, relative to half the action
    range"""
    noise_clip: NonNegative = 0.5
    """bound of the noise on the target policy's actions, relative to half the action range"""
    actor_width: Count = 512
    """width of the actor's first layer; the next two have a half and a quarter of it"""
    critic_width: Count = 1024
    """width of a critic's first layer; the next two have a half and a quarter of it"""

    # differs from ppo_continuous_action_brax_jax.py: a replay memory, first filled without learning
    def __post_init__(self) -> None:
        super().__post_init__()
        self.env_id = add_backend(self.env_id, self.backend)
        self.slots = self.buffer_size // self.num_envs  # of the replay memory, per environment
        # the first window of n steps must be there when learning starts
        self.warmup_steps = max(self.learning_starts // self.num_envs, self.n_step)
        learning_steps = self.total_timesteps - self.num_envs * self.warmup_steps
        self.num_segments = learning_steps // (self.num_envs * self.segment_steps)
        least = self.num_envs * (self.warmup_steps + self.segment_steps)
        enough = f"--total-timesteps must be at least {least}: --learning-starts and one segment"
        require(self.num_segments > 0, f"{enough} of --num-envs x --segment-steps")
        room = f"--num-envs x --n-step = {self.num_envs * self.n_step}"
        require(self.slots >= self.n_step, f"--buffer-size must be at least {room}")
        divides = self.num_updates % self.policy_frequency == 0
        require(divides, "--policy-frequency must divide --num-updates")
        require(self.n_atoms >= 2, f"--n-atoms must be at least 2, got {self.n_atoms}")
        require(self.v_min < self.v_max, "--v-min must be below --v-max")
        require(self.std_min <= self.std_max, "--std-min must not exceed --std-max")

    @property
    def atoms(self) -> np.ndarray:
        return np.linspace(self.v_min, self.v_max, self.n_atoms, dtype=np.float32)


def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment to evaluate in; the first of them may be filmed."""

    def thunk() -> gym.Env:
        video = video_folder if capture_video and idx == 0 else None
        env = gym.wrappers.RecordEpisodeStatistics(to_gym(make_physics(env_id), video))
        env.action_space.seed(seed)
        return env

    return thunk


# differs from ppo_continuous_action_brax_jax.py: an actor and two critics, initialised as in torch
def init_params(env: Brax, args: Args, seed: int) -> tuple[Params, Params]:
    """Parameters of the actor, and of both critics, stacked: their kernels are (2, in, out)."""
    rng = np.random.default_rng(seed)
    num_obs = env.observation_space.shape[0]
    num_actions = env.action_space.shape[0]

    def mlp(inputs: int, width: int, outputs: int, *stack: int) -> dict[str, np.ndarray]:
        params: dict[str, np.ndarray] = {}
        sizes = [inputs, width, width // 2, width // 4, outputs]
        for i in range(4):
            bound = sizes[i] ** -0.5
            kernel = rng.uniform(-bound, bound, (*stack, sizes[i], sizes[i + 1]))
            bias = rng.uniform(-bound, bound, (*stack, 1, sizes[i + 1]))
            params |= {f"{i}.kernel": kernel, f"{i}.bias": bias}
        return params

    actor = mlp(num_obs, args.actor_width, num_actions)
    actor["3.kernel"] = rng.normal(0, 0.01, actor["3.kernel"].shape)  # small actions at first
    actor["3.bias"] = np.zeros_like(actor["3.bias"])
    critics = mlp(num_obs + num_actions, args.critic_width, args.n_atoms, 2)
    return jax.tree.map(np.float32, (actor, critics))


# differs from ppo_continuous_action_brax_jax.py: four layers with ReLU
def mlp(params: Params, x: Array) -> Array:
    for i in range(4):
        x = x @ params[f"{i}.kernel"] + params[f"{i}.bias"]
        x = jax.nn.relu(x) if i < 3 else x
    return x


def get_actions(actor: Params, obs: Array) -> Array:
    return jnp.tanh(mlp(actor, obs))  # actions are in [-1, 1] in all of these environments


def get_logits(critics: Params, obs: Array, actions: Array) -> Array:
    """Logits of both critics' return distributions, (2, batch_size, n_atoms)."""
    return mlp(critics, jnp.concatenate([obs, actions], -1))


def init_stats(*shape: int) -> Params:
    """Mean and standard deviation of everything seen so far."""
    return {"count": jnp.zeros(()), "mean": jnp.zeros(shape), "std": jnp.ones(shape)}


def update_stats(stats: Params, x: Array) -> Params:
    """Add a batch of shape (n, *shape) to the statistics (Chan, Golub and LeVeque, 1979)."""
    count = stats["count"] + len(x)
    weight = len(x) / count
    delta = x.mean(0) - stats["mean"]
    var = weight * (x.var(0) + (1 - weight) * jnp.square(delta))
    std = jnp.sqrt((1 - weight) * jnp.square(stats["std"]) + var)
    std = jnp.maximum(std, 1e-4)  # no division by 0
    return {"count": count, "mean": stats["mean"] + weight * delta, "std": std}


def normalise(stats: Params, obs: Array) -> Array:
    return jnp.clip((obs - stats["mean"]) / stats["std"], -10, 10)


# differs from ppo_continuous_action_brax_jax.py: a deterministic policy
class Agent(Model):
    """The agent as model files hold it and evaluations play it."""

    def act(self, obs: np.ndarray, greedy: bool = True) -> np.ndarray:
        stats = {name: self.params[f"obs.{name}"] for name in ("mean", "std")}
        return np.asarray(get_actions(self.params, normalise(stats, jnp.asarray(obs))))


# differs from ppo_continuous_action_brax_jax.py: the actor alone
def agent_of(train: dict) -> Agent:
    return Agent(train["actor"] | {f"obs.{name}": x for name, x in train["obs_stats"].items()})


class Batch(NamedTuple):
    """n-step transitions, one per row. A target is returns + discounts * Q(next_obs)."""

    obs: Array
    actions: Array
    next_obs: Array
    returns: Array
    discounts: Array  # gamma ** number of rewards, 0 after termination


def n_step_batch(replay: Ring, args: Args, slots: Array, envs: Array) -> Batch:
    """The n-step transitions of windows (n_step, batch_size); an episode's end cuts its window."""
    done = replay.done[slots, envs]
    within = jnp.cumsum(done, 0) - done == 0  # no earlier step of the window ended the episode
    gamma = args.gamma ** jnp.arange(args.n_step)[:, None]
    returns = (gamma * replay.rewards[slots, envs] * within).sum(0)
    length = within.sum(0)
    last = jnp.take_along_axis(slots, length[None] - 1, 0)[0], envs
    # A truncated episode bootstraps from its real last observation, a terminated one does not.
    discounts = args.gamma**length * (1 - replay.terminated[last])
    first = slots[0], envs
    next_obs = replay.next_obs[last]
    return Batch(replay.obs[first], replay.actions[first], next_obs, returns, discounts)


def project(probs: Array, returns: Array, atoms: np.ndarray) -> Array:
    """Project a distribution with `probs` at `returns`, both (batch, atoms), onto the atoms: each
    atom gets the share max(0, 1 - distance / spacing) of each probability."""
    last = len(atoms) - 1
    spacing = (atoms[-1] - atoms[0]) / last
    position = ((returns - atoms[0]) / spacing).clip(0, last)
    distance = jnp.abs(position[:, :, None] - jnp.arange(len(atoms)))
    return (probs[:, :, None] * jnp.maximum(1 - distance, 0)).sum(1)  # one fused reduction


def get_targets(train: dict, args: Args, batch: Batch, noise: Array) -> Array:
    """Distributions of the n-step targets, (batch_size, n_atoms)."""
    # TD3's target policy smoothing: clipped noise on the target actions
    noise = (args.policy_noise * noise).clip(-args.noise_clip, args.noise_clip)
    next_actions = (get_actions(train["actor"], batch.next_obs) + noise).clip(-1, 1)
    logits = get_logits(train["target_critics"], batch.next_obs, next_actions)
    probs = jax.nn.softmax(logits)
    q_values = (probs * args.atoms).sum(-1)  # (2, batch_size)
    smaller = (q_values[0] < q_values[1])[:, None]  # clipped double Q-learning
    next_probs = jnp.where(smaller, probs[0], probs[1])
    returns = batch.returns[:, None] + batch.discounts[:, None] * args.atoms
    return project(next_probs, returns, args.atoms)


def q_loss(critics: Params, args: Args, batch: Batch, targets: Array) -> tuple[Array, dict]:
    """Sum of both critics' cross-entropies to the targets, and metrics."""
    logits = get_logits(critics, batch.obs, batch.actions)
    losses = -(targets * jax.nn.log_softmax(logits)).sum(-1).mean(1)
    values = (jax.nn.softmax(logits) * args.atoms).sum(-1).mean(1)
    metrics = {"losses/qf1_values": values[0], "losses/qf2_values": values[1]}
    metrics |= {"losses/qf1_loss": losses[0], "losses/qf2_loss": losses[1]}
    return losses.sum(), metrics | {"losses/qf_loss": losses.mean()}


def actor_loss(actor: Params, critics: Params, args: Args, obs: Array) -> Array:
    logits = get_logits(critics, obs, get_actions(actor, obs))
    q_values = (jax.nn.softmax(logits) * args.atoms).sum(-1)
    return -q_values.min(0).mean()


# differs from ppo_continuous_action_brax_jax.py: AdamW
def make_optimizer(args: Args) -> optax.GradientTransformation:
    return optax.adamw(args.learning_rate, weight_decay=args.weight_decay)


# differs from ppo_continuous_action_brax_jax.py: twin critics, then the policy
def update(args: Args, replay: Ring, train: dict, key: Array) -> tuple[dict, dict]:
    """Some gradient steps of the critics and one of the policy; the new state, and metrics."""
    optimizer = make_optimizer(args)
    logged = []
    for step_key in random.split(key, args.policy_frequency):
        sample_key, noise_key = random.split(step_key)
        windows = replay.draw(sample_key, args.batch_size, args.n_step)
        batch = n_step_batch(replay, args, *windows)
        obs, next_obs = (normalise(train["obs_stats"], x) for x in (batch.obs, batch.next_obs))
        batch = batch._replace(obs=obs, next_obs=next_obs)
        targets = get_targets(train, args, batch, random.normal(noise_key, batch.actions.shape))
        critics = train["critics"]
        grads, metrics = jax.grad(q_loss, has_aux=True)(critics, args, batch, targets)
        logged.append(metrics)
        updates, moments = optimizer.update(grads, train["critic_moments"], critics)
        train = train | {"critics": optax.apply_updates(critics, updates)}
        # target = tau * network + (1 - tau) * target
        target = optax.incremental_update(train["critics"], train["target_critics"], args.tau)
        train |= {"critic_moments": moments, "target_critics": target}

    loss, grads = jax.value_and_grad(actor_loss)(train["actor"], train["critics"], args, batch.obs)
    updates, moments = optimizer.update(grads, train["actor_moments"], train["actor"])
    train |= {"actor": optax.apply_updates(train["actor"], updates), "actor_moments": moments}
    return train, mean_of(logged) | {"losses/actor_loss": loss}


def redraw(args: Args, key: Array, scales: Array, done: Array) -> Array:
    """The scale of each environment's noise, with a new one where an episode ended."""
    new = random.uniform(key, scales.shape, minval=args.std_min, maxval=args.std_max)
    return jnp.where(done, new, scales)


# differs from ppo_continuous_action_brax_jax.py: two optimisers, a replay memory, noise scales
def init(env: Brax, args: Args, params: tuple, episodes: Episode, seed: Array) -> tuple:
    """The states of learning, of the environments and of the replay memory after the first steps,
    which only fill the memory."""
    actor, critics = params
    key, scale_key = random.split(random.key(seed))
    optimizer = make_optimizer(args)
    train = {"actor": actor, "critics": critics, "target_critics": critics, "key": key}
    train |= {"actor_moments": optimizer.init(actor), "critic_moments": optimizer.init(critics)}
    train |= {"obs_stats": init_stats(*env.observation_space.shape)}
    scales = redraw(args, scale_key, jnp.zeros(args.num_envs), jnp.ones(args.num_envs, bool))
    replay = Ring.empty(args.slots, env, args.num_envs)
    carry = train, (env.stagger(episodes), scales), replay
    return jax.lax.scan(partial(collect, env, args, episodes), carry, length=args.warmup_steps)[0]


# differs from ppo_continuous_action_brax_jax.py: one step, into the replay memory
def collect(env: Brax, args: Args, starts: Episode, carry: tuple, x: None) -> tuple[tuple, Step]:
    """One step of all environments, stored in the replay memory."""
    train, (episodes, scales), replay = carry
    key, noise_key, step_key, scale_key = random.split(train["key"], 4)
    train = train | {"key": key, "obs_stats": update_stats(train["obs_stats"], episodes.obs)}
    actions = get_actions(train["actor"], normalise(train["obs_stats"], episodes.obs))
    actions += scales[:, None] * random.normal(noise_key, actions.shape)
    actions = actions.clip(-1, 1)
    keys = random.split(step_key, args.num_envs)
    after, step = advance(env, episodes, actions, keys, starts)
    replay = replay.store(episodes.obs, actions, step)
    return (train, (after, redraw(args, scale_key, scales, step.done)), replay), step


# differs from ppo_continuous_action_brax_jax.py: one step, then gradient steps from the memory
def iterate(env: Brax, args: Args, starts: Episode, carry: tuple, x: None) -> tuple[tuple, tuple]:
    """Collect one step of all environments and learn from the replay memory."""
    (train, episodes, replay), step = collect(env, args, starts, carry, x)
    key, update_key = random.split(train["key"])
    train |= {"key": key}
    logged = []
    for key in random.split(update_key, args.num_updates // args.policy_frequency):
        train, metrics = update(args, replay, train, key)
        logged.append(metrics)
    return (train, episodes, replay), (mean_of(logged), step.episodic_return, step.episodic_length)


# differs from ppo_continuous_action_brax_jax.py: with the replay memory
def train_segment(env: Brax, args: Args, carry: tuple, starts: Episode) -> tuple:
    """Some iterations of one agent, from state to state."""
    one = partial(iterate, env, args, starts)
    carry, (metrics, *ended) = jax.lax.scan(one, carry, length=args.segment_steps)
    return carry, jax.tree.map(lambda x: x.mean(0), metrics), *ended


if __name__ == "__main__":
    args = parse_args(Args)
    run = Runs(args, make_env)
    env = make_physics(args.env_id)

    # The functions above are about one agent; these do the same for all, one agent per seed.
    def begin_one(seed: Array, number: Array) -> Episode:
        return begin(env, random.fold_in(random.key(seed), number), args.num_envs)

    begin_all = run.vectorise(begin_one)
    program = run.vectorise(partial(train_segment, env, args))
    params = run.stack([init_params(env, args, seed) for seed in run.seeds])
    none = np.zeros_like(run.seeds)
    first = begin_all(run.env_seeds, none)
    train, episodes, replay = run.vectorise(partial(init, env, args))(params, first, run.seeds)

    start = run.resume(args.num_segments, train=train, episodes=episodes, replay=replay)
    train = run.state["train"]
    episodes = run.state["episodes"]
    replay = run.state["replay"]
    for segment in range(start, run.total):
        starts = begin_all(run.env_seeds, none + segment + 1)
        carry, metrics, returns, lengths = program((train, episodes, replay), starts)
        train, episodes, replay = carry
        steps = args.warmup_steps + (segment + 1) * args.segment_steps  # per environment
        global_step = steps * args.num_envs
        run.log_segment(metrics, returns, lengths, global_step)
        run.evaluate(agent_of(train), global_step)
        run.checkpoint(segment + 1, train=train, episodes=episodes, replay=replay)
    run.finish(agent_of(train))
