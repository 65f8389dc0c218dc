"""PQN with environments, network and learning in one compiled program, for one agent or thousands.

    python cleanrl/pqn_jax.py --env-id CartPole-v1

Paper: https://arxiv.org/abs/2407.04811. Every detail with its reason: docs/rl-algorithms/pqn.md
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
    learning_rate: NonNegative = 1e-4
    """learning rate of RAdam"""
    num_envs: Count = 32
    """number of parallel environments per agent"""
    num_steps: Count = 64
    """number of steps per environment in a rollout"""
    anneal_lr: bool = True
    """decrease the learning rate linearly to zero"""
    gamma: Share = 0.99
    """discount factor"""
    q_lambda: Share = 0.95
    """lambda of the Q(lambda) returns"""
    reward_scale: NonNegative = 0.1
    """factor of the rewards in training; logged returns are not scaled"""
    num_minibatches: Count = 16
    """number of minibatches per epoch"""
    update_epochs: Count = 4
    """number of epochs per update"""
    max_grad_norm: NonNegative = 10.0
    """maximum norm of the gradient"""
    start_e: Share = 1
    """probability of a random action at the start (epsilon)"""
    end_e: Share = 0.05
    """probability of a random action at the end of exploration (epsilon)"""
    exploration_fraction: Share = 0.2
    """fraction of --total-timesteps over which epsilon falls from --start-e to --end-e"""

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


TAGS = ["losses/td_loss", "losses/q_values", "charts/learning_rate", "charts/epsilon"]


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


# differs from ppo_jax.py: LayerNorm, one network
def init_params(env: Gymnax, seed: int) -> Params:
    """Three layers, the first two with a LayerNorm that has a scale and a shift."""
    params: dict[str, Any] = {}
    rng = np.random.default_rng(seed)
    sizes = layer_sizes(env.observation_space.shape, env.action_space.n)
    stds = [2**0.5, 2**0.5, 1]
    for i, (inputs, units) in enumerate(sizes):
        params[f"{i}.kernel"] = orthogonal(rng, stds[i], inputs, units)
        params[f"{i}.bias"] = np.zeros(units, np.float32)
        if i < 2:
            params[f"{i}.scale"] = np.ones(units, np.float32)
            params[f"{i}.shift"] = np.zeros(units, np.float32)
    return params


# differs from ppo_jax.py: 256 units for vectors
def layer_sizes(obs_shape: tuple[int, ...], outputs: int) -> list[tuple[int, int]]:
    """(inputs, units) of three layers; of an image the first one is a convolution."""
    if len(obs_shape) == 1:
        return [(obs_shape[0], 256), (256, 256), (256, outputs)]
    height, width, channels = obs_shape
    features = (height - 2) * (width - 2) * 16
    return [(3 * 3 * channels, 16), (features, 128), (128, outputs)]  # as MinAtar's own agents


def get_q_values(params: Params, obs: Array) -> Array:
    """The value of every action. LayerNorm keeps learning stable without a target network."""
    image = len(params["0.kernel"]) > obs.shape[-1]  # a filter sees all channels of 3 x 3 pixels
    x = patches(obs, size=3, stride=1) if image else obs
    for i in range(2):
        x = x @ params[f"{i}.kernel"] + params[f"{i}.bias"]
        # over the units of a layer; over the filters at one place of an image
        x = jax.nn.standardize(x) * params[f"{i}.scale"] + params[f"{i}.shift"]
        x = jax.nn.relu(x)
        x = x.reshape(*x.shape[:-3], -1) if image and i == 0 else x
    return x @ params["2.kernel"] + params["2.bias"]


# differs from ppo_jax.py: greedy in Q-values
class Agent(Model):
    """The agent as model files hold it and evaluations play it."""

    def act(self, obs: np.ndarray, greedy: bool = True) -> np.ndarray:
        return np.asarray(get_q_values(self.params, jnp.asarray(obs)).argmax(-1))


def linear_schedule(start: float, end: float, duration: float, step: Array) -> Array:
    """From `start` at step 0 to `end` at step `duration`, and `end` from there on."""
    share = step / max(duration, 1e-9)
    return jnp.where(step >= duration, end, start + (end - start) * share)


# differs from ppo_jax.py: epsilon-greedy
def collect(
    env: Gymnax, args: Args, params: Params, episodes: Episode, epsilon: Array, key: Array
) -> tuple:
    """A rollout of arrays (num_steps, num_envs, ...), with all its random numbers drawn at once."""
    shape = (args.num_steps, args.num_envs)
    explore_key, action_key, start_key, step_key = random.split(key, 4)

    def step(episodes: Episode, x: tuple) -> tuple[Episode, tuple]:
        explore, random_actions, keys, starts = x
        greedy = get_q_values(params, episodes.obs).argmax(-1)
        actions = jnp.where(explore, random_actions, greedy)
        after, outcome = advance(env, episodes, actions, keys, starts)
        return after, (episodes.obs, actions, outcome)

    explore = random.uniform(explore_key, shape) < epsilon
    random_actions = random.randint(action_key, shape, 0, env.action_space.n)
    starts = begin(env, start_key, *shape)
    x = explore, random_actions, random.split(step_key, shape), starts
    return jax.lax.scan(step, episodes, x)


def q_lambda_returns(step: Step, next_values: Array, args: Args) -> Array:
    """G_t = r_t + γ (1 - terminated_t) [λ G_{t+1} + (1 - λ) max_a Q(s_{t+1}, a)].

    next_values are max_a Q of what the actions really led to.
    """

    def back(later: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        reward, terminated, done, next_value = x
        mixture = args.q_lambda * later + (1 - args.q_lambda) * next_value
        # A truncated episode bootstraps from its real last observation alone.
        bootstrap = jnp.where(done, next_value, mixture)
        target = reward + args.gamma * (1 - terminated) * bootstrap
        return target, target

    rewards = args.reward_scale * step.reward
    rows = rewards, step.terminated, step.done, next_values
    # The last step has only its bootstrap: λ max Q + (1 - λ) max Q.
    return jax.lax.scan(back, next_values[-1], rows, reverse=True, unroll=16)[1]


# differs from ppo_jax.py: squared error to the Q(lambda) returns
def get_loss(params: Params, minibatch: tuple[Array, ...]) -> tuple[Array, Array]:
    """The loss, and the TD loss and Q-values in log order."""
    obs, actions, targets = minibatch
    q_values = get_q_values(params, obs)
    chosen = actions[..., None] == jnp.arange(q_values.shape[-1])  # quicker than indexing
    q_values = (q_values * chosen).sum(-1)
    td_loss = jnp.square(q_values - targets).mean()
    return 0.5 * td_loss, jnp.stack([td_loss, q_values.mean()])


# differs from ppo_jax.py: RAdam
def make_optimizer(args: Args) -> optax.GradientTransformation:
    radam = optax.scale_by_radam()
    return optax.flatten(optax.chain(optax.clip_by_global_norm(args.max_grad_norm), radam))


# differs from ppo_jax.py: Q-learning
def update(args: Args, lr: Array, carry: tuple, minibatch: tuple) -> tuple[tuple, Array]:
    """One gradient step."""
    params, moments = carry
    grads, losses = jax.grad(get_loss, has_aux=True)(params, minibatch)
    updates, moments = make_optimizer(args).update(grads, moments)
    return (jax.tree.map(lambda p, u: p - lr * u, params, updates), moments), losses


def init(args: Args, params: Params, seed: Array) -> dict:
    moments = make_optimizer(args).init(params)
    return {"params": params, "moments": moments, "key": random.key(seed), "iteration": 0}


# differs from ppo_jax.py: Q(lambda) instead of advantages
def iterate(env: Gymnax, args: Args, carry: tuple, x: None) -> tuple[tuple, tuple]:
    """Collect a rollout and learn from it."""
    train, episodes = carry
    params = train["params"]
    key, collect_key, shuffle_key = random.split(train["key"], 3)
    exploring = args.exploration_fraction * args.num_iterations
    epsilon = linear_schedule(args.start_e, args.end_e, exploring, train["iteration"])
    episodes, (obs, actions, step) = collect(env, args, params, episodes, epsilon, collect_key)

    next_values = get_q_values(params, step.next_obs).max(-1)
    targets = q_lambda_returns(step, next_values, args)
    batch = (obs, actions, targets)
    indices = permutations(shuffle_key, args.update_epochs, args.batch_size, args.minibatch_size)
    minibatches = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[indices], batch)
    remaining = 1 - train["iteration"] / args.num_iterations if args.anneal_lr else 1.0
    lr = jnp.float32(args.learning_rate * remaining)
    learn = partial(update, args, lr)
    (params, moments), losses = jax.lax.scan(learn, (params, train["moments"]), minibatches)

    metrics = dict(zip(TAGS, [*losses.mean(0), lr, epsilon]))
    new = {"params": params, "moments": moments, "key": key, "iteration": train["iteration"] + 1}
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
