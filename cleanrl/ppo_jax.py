"""PPO with environments, networks and learning in one compiled program, for one agent or thousands.

    python cleanrl/ppo_jax.py --env-id CartPole-v1

Paper: https://arxiv.org/abs/1707.06347. Every detail with its reason: docs/rl-algorithms/ppo.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, random

from cleanrl_utils.environments.jax_envs import Episode, Gymnax, Step, advance, begin, to_gym
from cleanrl_utils.running.runs import Runs, RunsArgs, parse_args, require, segment_length
from cleanrl_utils.running.settings import Count, NonNegative, Share
from cleanrl_utils.speed.jax_tools import Model, Params, orthogonal, patches, permutations


@dataclass
class Args(RunsArgs):
    env_id: str = "CartPole-v1"
    """id of the environment, one of gymnax's with discrete actions"""
    total_timesteps: Count = 500_000
    """number of environment steps per agent"""
    learning_rate: NonNegative = 2.5e-4
    """learning rate of Adam"""
    num_envs: Count = 4
    """number of parallel environments per agent"""
    num_steps: Count = 128
    """number of steps per environment in a rollout"""
    anneal_lr: bool = True
    """decrease the learning rate linearly to zero"""
    gamma: Share = 0.99
    """discount factor"""
    gae_lambda: Share = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: Count = 4
    """number of minibatches per epoch"""
    update_epochs: Count = 4
    """number of epochs per update"""
    norm_adv: bool = True
    """normalise advantages per minibatch"""
    clip_coef: NonNegative = 0.2
    """clipping coefficient of the policy objective: the ratio stays within 1 ± this"""
    clip_vloss: bool = True
    """clip the value loss with the same coefficient as the policy objective"""
    ent_coef: NonNegative = 0.01
    """coefficient of the entropy bonus"""
    vf_coef: NonNegative = 0.5
    """coefficient of the value loss"""
    max_grad_norm: NonNegative = 0.5
    """maximum norm of the gradient"""
    target_kl: NonNegative | None = None
    """stop an update after the epoch in which the approximate KL divergence exceeds this"""

    # differs from ppo.py: segments of several iterations
    def __post_init__(self) -> None:
        super().__post_init__()
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.num_iterations = self.total_timesteps // self.batch_size
        batch = f"the batch of --num-envs x --num-steps = {self.batch_size} steps"
        divides = self.batch_size % self.num_minibatches == 0
        require(divides, f"--num-minibatches must divide {batch}")
        require(self.num_iterations > 0, f"--total-timesteps must be at least {batch}")
        self.segment = segment_length(self.num_iterations, self.num_seeds)  # iterations per report


TAGS = [f"losses/{name}" for name in ("value_loss", "policy_loss", "entropy", "old_approx_kl")]
TAGS += ["losses/approx_kl", "losses/clipfrac", "losses/explained_variance", "charts/learning_rate"]


# differs from ppo.py: gymnax's environment, for evaluation
def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment to evaluate in; the first of them may be filmed."""

    def thunk() -> gym.Env:
        video = video_folder if capture_video and idx == 0 else None
        env = gym.wrappers.RecordEpisodeStatistics(to_gym(Gymnax.make(env_id), video))
        env.action_space.seed(seed)
        return env

    return thunk


def init_params(env: Gymnax, seed: int) -> Params:
    """Actor and critic, two networks that share nothing."""
    params: dict[str, Any] = {}
    rng = np.random.default_rng(seed)
    # small outputs at first: a nearly uniform policy
    for name, outputs, std in [("actor", env.action_space.n, 0.01), ("critic", 1, 1.0)]:
        sizes = layer_sizes(env.observation_space.shape, outputs)
        stds = [2**0.5, 2**0.5, std]
        for i, (inputs, units) in enumerate(sizes):
            params[f"{name}.{i}.kernel"] = orthogonal(rng, stds[i], inputs, units)
            params[f"{name}.{i}.bias"] = np.zeros(units, np.float32)
    return params


def layer_sizes(obs_shape: tuple[int, ...], outputs: int) -> list[tuple[int, int]]:
    """(inputs, units) of three layers; of an image the first one is a convolution."""
    if len(obs_shape) == 1:
        return [(obs_shape[0], 64), (64, 64), (64, outputs)]
    height, width, channels = obs_shape
    features = (height - 2) * (width - 2) * 16
    return [(3 * 3 * channels, 16), (features, 128), (128, outputs)]  # as MinAtar's own agents


def mlp(params: Params, name: str, x: Array) -> Array:
    for i in range(3):
        x = x @ params[f"{name}.{i}.kernel"] + params[f"{name}.{i}.bias"]
        x = jnp.tanh(x) if i < 2 else x
    return x


def cnn(params: Params, name: str, x: Array) -> Array:
    """16 filters of 3 x 3 pixels, then two dense layers."""
    x = patches(x, size=3, stride=1)  # its product with a kernel is a convolution
    for i in range(3):
        x = x @ params[f"{name}.{i}.kernel"] + params[f"{name}.{i}.bias"]
        x = jax.nn.relu(x) if i < 2 else x
        x = x.reshape(*x.shape[:-3], -1) if i == 0 else x  # all filters at all places
    return x


def forward(params: Params, name: str, obs: Array) -> Array:
    """The output of the actor or the critic for vectors or images."""
    inputs = len(params[f"{name}.0.kernel"])
    image = inputs > obs.shape[-1]  # a filter sees all channels of 3 x 3 pixels
    return cnn(params, name, obs) if image else mlp(params, name, obs)


def get_logprob_entropy_value(params: Params, obs: Array, actions: Array) -> tuple[Array, ...]:
    logprobs = jax.nn.log_softmax(forward(params, "actor", obs))
    entropy = -(jnp.exp(logprobs) * logprobs).sum(-1)
    chosen = actions[..., None] == jnp.arange(logprobs.shape[-1])  # quicker than indexing
    return (logprobs * chosen).sum(-1), entropy, forward(params, "critic", obs)[..., 0]


class Agent(Model):
    """The agent as model files hold it and evaluations play it."""

    def act(self, obs: np.ndarray, greedy: bool = True) -> np.ndarray:
        logits = np.asarray(forward(self.params, "actor", jnp.asarray(obs)))
        return (logits if greedy else logits + np.random.gumbel(size=logits.shape)).argmax(-1)


def collect(env: Gymnax, args: Args, params: Params, episodes: Episode, key: Array) -> tuple:
    """A rollout of arrays (num_steps, num_envs, ...), with all its random numbers drawn at once."""
    shape = (args.num_steps, args.num_envs)
    noise_key, start_key, step_key = random.split(key, 3)

    def step(episodes: Episode, x: tuple) -> tuple[Episode, tuple]:
        noise, keys, starts = x
        # Gumbel-max: the argmax of logits plus Gumbel noise is a sample of softmax
        actions = (forward(params, "actor", episodes.obs) + noise).argmax(-1)
        after, outcome = advance(env, episodes, actions, keys, starts)
        return after, (episodes.obs, actions, outcome)

    noise = random.gumbel(noise_key, (*shape, env.action_space.n))
    x = noise, random.split(step_key, shape), begin(env, start_key, *shape)
    return jax.lax.scan(step, episodes, x)


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


def init(args: Args, params: Params, seed: Array) -> dict:
    moments = make_optimizer(args).init(params)
    return {"params": params, "moments": moments, "key": random.key(seed), "iteration": 0}


def iterate(env: Gymnax, args: Args, carry: tuple, x: None) -> tuple[tuple, tuple]:
    """Collect a rollout and learn from it."""
    train, episodes = carry
    params = train["params"]
    key, collect_key, shuffle_key = random.split(train["key"], 3)
    episodes, (obs, actions, step) = collect(env, args, params, episodes, collect_key)

    logprobs, _, values = get_logprob_entropy_value(params, obs, actions)
    next_values = forward(params, "critic", step.next_obs)[..., 0]
    advantages = gae(step, values, next_values, args)
    returns = advantages + values
    batch = (obs, actions, logprobs, values, advantages, returns)
    indices = permutations(shuffle_key, args.update_epochs, args.batch_size, args.minibatch_size)
    minibatches = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[indices], batch)
    ends_epoch = jnp.arange(1, len(indices) + 1) % args.num_minibatches == 0
    remaining = 1 - train["iteration"] / args.num_iterations if args.anneal_lr else 1.0
    lr = jnp.float32(args.learning_rate * remaining)
    learn = partial(update, args, lr)
    carry = params, train["moments"], jnp.bool(True)
    carry, (losses, taken) = jax.lax.scan(learn, carry, (minibatches, ends_epoch))

    explained = 1 - advantages.var(ddof=1) / (returns.var(ddof=1) + 1e-8)
    metrics = dict(zip(TAGS, [*jnp.average(losses, 0, taken), explained, lr]))
    new = {"params": carry[0], "moments": carry[1], "key": key, "iteration": train["iteration"] + 1}
    return (new, episodes), (metrics, step.episodic_return, step.episodic_length)


def train_segment(env: Gymnax, args: Args, train: dict, episodes: Episode) -> tuple:
    """Some iterations of one agent, from state to state."""
    one = partial(iterate, env, args)
    start = (train, episodes)
    (train, episodes), (metrics, *ended) = jax.lax.scan(one, start, length=args.segment)
    return train, episodes, jax.tree.map(lambda x: x.mean(0), metrics), *ended


if __name__ == "__main__":
    args = parse_args(Args)
    run = Runs(args, make_env)
    env = Gymnax.make(args.env_id)

    # The functions above are about one agent; these do the same for all, one agent per seed.
    begin_all = run.vectorise(lambda seed: begin(env, random.key(seed), args.num_envs))
    program = run.vectorise(partial(train_segment, env, args))
    params = run.stack([init_params(env, seed) for seed in run.seeds])
    train = run.vectorise(partial(init, args))(params, run.seeds)

    episodes = begin_all(run.env_seeds)
    start = run.resume(args.num_iterations // args.segment, train=train, episodes=episodes)
    train = run.state["train"]
    episodes = run.state["episodes"]
    for segment in range(start, run.total):
        train, episodes, metrics, returns, lengths = program(train, episodes)
        global_step = (segment + 1) * args.segment * args.batch_size
        run.log_segment(metrics, returns, lengths, global_step)
        run.evaluate(Agent(train["params"]), global_step)
        run.checkpoint(segment + 1, train=train, episodes=episodes)
    run.finish(Agent(train["params"]))
