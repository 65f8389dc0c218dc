"""PPO for Brax and MuJoCo Playground: physics and learning in one program on the accelerator.

    python cleanrl/ppo_continuous_action_brax_jax.py --env-id ant --backend spring
    python cleanrl/ppo_continuous_action_brax_jax.py --env-id playground/CheetahRun

Paper: https://arxiv.org/abs/1707.06347. Every detail with its reason: docs/rl-algorithms/ppo.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import e, log, pi
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, random

from cleanrl_utils.environments.jax_envs import Brax, Episode, Step, advance, begin, to_gym
from cleanrl_utils.environments.playground import add_backend, make_physics
from cleanrl_utils.running.runs import Runs, RunsArgs, parse_args, require, segment_length
from cleanrl_utils.running.settings import Count, NonNegative, Share
from cleanrl_utils.speed.jax_tools import Model, Params, orthogonal, permutations


@dataclass
class Args(RunsArgs):
    env_id: str = "ant"
    """name of the environment: Brax's (ant, humanoid, ...) or MuJoCo Playground's
    (playground/CheetahRun, ...)"""
    backend: str = "spring"
    """physics of Brax: spring (fastest), positional, generalized or mjx"""
    total_timesteps: Count = 30_000_000
    """number of environment steps per agent"""
    learning_rate: NonNegative = 1e-3
    """learning rate of Adam"""
    num_envs: Count = 4096
    """number of parallel environments per agent"""
    num_steps: Count = 20
    """number of steps per environment in a rollout"""
    anneal_lr: bool = True
    """decrease the learning rate linearly to zero"""
    gamma: Share = 0.97
    """discount factor"""
    gae_lambda: Share = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: Count = 8
    """number of minibatches per epoch"""
    update_epochs: Count = 4
    """number of epochs per update"""
    norm_adv: bool = True
    """normalise advantages per minibatch"""
    clip_coef: NonNegative = 0.2
    """clipping coefficient of the policy objective: the ratio stays within 1 ± this"""
    clip_vloss: bool = False
    """clip the value loss with the same coefficient as the policy objective"""
    ent_coef: NonNegative = 0.0
    """coefficient of the entropy bonus"""
    vf_coef: NonNegative = 0.5
    """coefficient of the value loss"""
    max_grad_norm: NonNegative = 1.0
    """maximum norm of the gradient"""
    target_kl: NonNegative | None = None
    """stop an update after the epoch in which the approximate KL divergence exceeds this"""

    # differs from ppo_continuous_action.py: segments of several iterations
    def __post_init__(self) -> None:
        super().__post_init__()
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.num_iterations = self.total_timesteps // self.batch_size
        batch = f"the batch of --num-envs x --num-steps = {self.batch_size} steps"
        divides = self.batch_size % self.num_minibatches == 0
        require(divides, f"--num-minibatches must divide {batch}")
        require(self.num_iterations > 0, f"--total-timesteps must be at least {batch}")
        self.env_id = add_backend(self.env_id, self.backend)
        self.segment = segment_length(self.num_iterations, self.num_seeds)  # iterations per report


TAGS = [f"losses/{name}" for name in ("value_loss", "policy_loss", "entropy", "old_approx_kl")]
TAGS += ["losses/approx_kl", "losses/clipfrac", "losses/explained_variance", "charts/learning_rate"]


# differs from ppo_continuous_action.py: a simulated robot, for evaluation
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


def init_params(env: Brax, seed: int) -> Params:
    """Actor and critic, two networks that share nothing."""
    params: dict[str, Any] = {}
    rng = np.random.default_rng(seed)
    num_actions = env.action_space.shape[0]
    # small outputs at first: a mean near 0
    for name, outputs, std in [("actor", num_actions, 0.01), ("critic", 1, 1.0)]:
        sizes = [*env.observation_space.shape, 256, 256, outputs]
        stds = [2**0.5, 2**0.5, std]
        for i in range(3):
            params[f"{name}.{i}.kernel"] = orthogonal(rng, stds[i], sizes[i], sizes[i + 1])
            params[f"{name}.{i}.bias"] = np.zeros(sizes[i + 1], np.float32)
    return params | {"logstd": np.zeros(num_actions, np.float32)}  # the same in every state


def mlp(params: Params, name: str, x: Array) -> Array:
    for i in range(3):
        x = x @ params[f"{name}.{i}.kernel"] + params[f"{name}.{i}.bias"]
        x = jnp.tanh(x) if i < 2 else x
    return x


def get_logprob_entropy_value(params: Params, obs: Array, actions: Array) -> tuple[Array, ...]:
    logstd = params["logstd"]
    mean = mlp(params, "actor", obs)
    z = (actions - mean) / jnp.exp(logstd)  # a Gaussian, components independent
    logprob = (-0.5 * jnp.square(z) - logstd - 0.5 * log(2 * pi)).sum(-1)
    entropy = jnp.broadcast_to((logstd + 0.5 * log(2 * pi * e)).sum(), logprob.shape)
    return logprob, entropy, mlp(params, "critic", obs)[..., 0]


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


class Agent(Model):
    """The agent as model files hold it and evaluations play it."""

    def act(self, obs: np.ndarray, greedy: bool = True) -> np.ndarray:
        stats = {name: self.params[f"obs.{name}"] for name in ("mean", "std")}
        mean = np.asarray(mlp(self.params, "actor", normalise(stats, jnp.asarray(obs))))
        noise = 0 if greedy else np.random.standard_normal(mean.shape).astype(np.float32)
        return mean + np.exp(self.params["logstd"]) * noise


def agent_of(train: dict) -> Agent:
    return Agent(train["params"] | {f"obs.{name}": x for name, x in train["obs_stats"].items()})


def collect(env: Brax, args: Args, train: dict, carry: tuple, starts: Episode, key: Array) -> tuple:
    """A rollout of arrays (num_steps, num_envs, ...), with all its random numbers drawn at once."""
    shape = (args.num_steps, args.num_envs)
    noise_key, step_key, deal_key = random.split(key, 3)
    # Resets are expensive: a segment draws new initial states, each rollout shifts them.
    shift = random.randint(deal_key, (), 0, args.num_envs)
    starts = jax.tree.map(lambda x: jnp.roll(x, shift, 0), starts)

    def step(carry: tuple[Episode, Array], x: tuple) -> tuple[tuple, tuple]:
        episodes, discounted = carry
        noise, keys = x
        obs = normalise(train["obs_stats"], episodes.obs)
        actions = mlp(train["params"], "actor", obs) + jnp.exp(train["params"]["logstd"]) * noise
        after, outcome = advance(env, episodes, actions, keys, starts)
        discounted = outcome.reward + args.gamma * discounted  # return of the episode so far
        row = (episodes.obs, actions, discounted, outcome)
        return (after, discounted * (1 - outcome.done)), row

    noise = random.normal(noise_key, (*shape, *env.action_space.shape))
    return jax.lax.scan(step, carry, (noise, random.split(step_key, shape)))


def gae(step: Step, values: Array, next_values: Array, args: Args) -> Array:
    """Advantages of a rollout; next_values are those of what the actions really led to."""
    # A truncated episode bootstraps from its real last observation.
    delta = step.reward + args.gamma * next_values * (1 - step.terminated) - values
    decay = args.gamma * args.gae_lambda * (1 - step.done)  # no sum goes beyond an episode's end
    back = lambda last, x: (x[0] + x[1] * last,) * 2  # noqa: E731
    return jax.lax.scan(back, jnp.zeros_like(delta[0]), (delta, decay), reverse=True, unroll=16)[1]


def get_loss(params: Params, args: Args, minibatch: tuple[Array, ...]) -> tuple[Array, Array]:
    """The loss, and losses and diagnostics in log order."""
    obs, actions, logprobs, values, advantages, returns = minibatch
    newlogprob, entropy, newvalue = get_logprob_entropy_value(params, obs, actions)
    logratio = newlogprob - logprobs
    ratio = jnp.exp(logratio)

    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    clipped_ratio = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = jnp.maximum(-advantages * ratio, -advantages * clipped_ratio).mean()

    v_error = jnp.square(newvalue - returns)
    if args.clip_vloss:
        clipped_value = values + jnp.clip(newvalue - values, -args.clip_coef, args.clip_coef)
        v_error = jnp.maximum(v_error, jnp.square(clipped_value - returns))
    v_loss = 0.5 * v_error.mean()

    entropy = entropy.mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    old_approx_kl = -logratio.mean()  # http://joschu.net/blog/kl-approx.html
    approx_kl = (ratio - 1 - logratio).mean()
    clipfrac = (jnp.abs(ratio - 1) > args.clip_coef).mean()
    return loss, jnp.stack([v_loss, pg_loss, entropy, old_approx_kl, approx_kl, clipfrac])


def make_optimizer(args: Args) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(eps=1e-5)  # eps: openai/baselines
    return optax.flatten(optax.chain(optax.clip_by_global_norm(args.max_grad_norm), adam))


def update(args: Args, lr: Array, carry: tuple, x: tuple) -> tuple[tuple, tuple[Array, Array]]:
    """One gradient step, unless an epoch before it has passed --target-kl."""
    params, moments, going = carry
    minibatch, ends_epoch = x
    grads, losses = jax.grad(get_loss, has_aux=True)(params, args, minibatch)
    updates, new_moments = make_optimizer(args).update(grads, moments)
    new = jax.tree.map(lambda p, u: p - lr * u, params, updates), new_moments
    if args.target_kl is not None:
        new = jax.tree.map(partial(jnp.where, going), new, (params, moments))
        ends_epoch = ends_epoch & (losses[4] > args.target_kl)
        return (*new, going & ~ends_epoch), (losses, going)
    return (*new, going), (losses, going)


def init(env: Brax, args: Args, params: Params, seed: Array) -> dict:
    moments = make_optimizer(args).init(params)
    stats = {"obs_stats": init_stats(*env.observation_space.shape), "return_stats": init_stats()}
    return {"params": params, "moments": moments, "key": random.key(seed), "iteration": 0, **stats}


def iterate(env: Brax, args: Args, starts: Episode, carry: tuple, x: None) -> tuple[tuple, tuple]:
    """Collect a rollout and learn from it."""
    train, episodes = carry
    params = train["params"]
    key, collect_key, shuffle_key = random.split(train["key"], 3)
    episodes, rollout = collect(env, args, train, episodes, starts, collect_key)
    raw_obs, actions, discounted, step = rollout
    obs, next_obs = (normalise(train["obs_stats"], x) for x in (raw_obs, step.next_obs))

    logprobs, _, values = get_logprob_entropy_value(params, obs, actions)
    next_values = mlp(params, "critic", next_obs)[..., 0]
    return_stats = update_stats(train["return_stats"], discounted.reshape(-1))
    scaled = jnp.clip(step.reward / return_stats["std"], -10, 10)  # only their size changes
    advantages = gae(step._replace(reward=scaled), values, next_values, args)
    returns = advantages + values
    batch = (obs, actions, logprobs, values, advantages, returns)
    indices = permutations(shuffle_key, args.update_epochs, args.batch_size, args.minibatch_size)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    ends_epoch = jnp.arange(1, len(indices) + 1) % args.num_minibatches == 0
    remaining = 1 - train["iteration"] / args.num_iterations if args.anneal_lr else 1.0
    lr = jnp.float32(args.learning_rate * remaining)

    def learn(carry: tuple, x: tuple) -> tuple[tuple, tuple[Array, Array]]:
        indices, ends_epoch = x
        return update(args, lr, carry, (jax.tree.map(lambda x: x[indices], flat), ends_epoch))

    carry = params, train["moments"], jnp.bool(True)
    carry, (losses, taken) = jax.lax.scan(learn, carry, (indices, ends_epoch))

    explained = 1 - advantages.var(ddof=1) / (returns.var(ddof=1) + 1e-8)
    metrics = dict(zip(TAGS, [*jnp.average(losses, 0, taken), explained, lr]))
    new = {"params": carry[0], "moments": carry[1], "key": key, "iteration": train["iteration"] + 1}
    # after learning, which thus normalises observations as acting did
    obs_stats = update_stats(train["obs_stats"], raw_obs.reshape(-1, raw_obs.shape[-1]))
    new |= {"obs_stats": obs_stats, "return_stats": return_stats}
    return (new, episodes), (metrics, step.episodic_return, step.episodic_length)


def train_segment(env: Brax, args: Args, train: dict, episodes: tuple, starts: Episode) -> tuple:
    """Some iterations of one agent, from state to state."""
    one = partial(iterate, env, args, starts)
    start = (train, episodes)
    (train, episodes), (metrics, *ended) = jax.lax.scan(one, start, length=args.segment)
    return train, episodes, jax.tree.map(lambda x: x.mean(0), metrics), *ended


if __name__ == "__main__":
    args = parse_args(Args)
    run = Runs(args, make_env)
    env = make_physics(args.env_id)

    # The functions above are about one agent; these do the same for all, one agent per seed.
    def begin_one(seed: Array, number: Array) -> Episode:
        return begin(env, random.fold_in(random.key(seed), number), args.num_envs)

    begin_all = run.vectorise(begin_one)
    program = run.vectorise(partial(train_segment, env, args))
    params = run.stack([init_params(env, seed) for seed in run.seeds])
    train = run.vectorise(partial(init, env, args))(params, run.seeds)
    none = np.zeros_like(run.seeds)
    discounted = np.zeros((args.num_seeds, args.num_envs), np.float32)
    episodes = run.vectorise(env.stagger)(begin_all(run.env_seeds, none)), discounted

    start = run.resume(args.num_iterations // args.segment, train=train, episodes=episodes)
    train = run.state["train"]
    episodes = run.state["episodes"]
    for segment in range(start, run.total):
        starts = begin_all(run.env_seeds, none + segment + 1)
        train, episodes, metrics, returns, lengths = program(train, episodes, starts)
        global_step = (segment + 1) * args.segment * args.batch_size
        run.log_segment(metrics, returns, lengths, global_step)
        run.evaluate(agent_of(train), global_step)
        run.checkpoint(segment + 1, train=train, episodes=episodes)
    run.finish(agent_of(train))
