"""PPO for Atari games in EnvPool; one compiled JAX function chooses actions and steps the games.

    python cleanrl/ppo_atari_envpool_xla_jax.py --env-id Breakout-v5

ppo_atari_envpool_xla_jax_scan.py makes a rollout one call; their diff shows what lax.scan does.
Paper: https://arxiv.org/abs/1707.06347. Every detail with its reason: docs/rl-algorithms/ppo.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, random

from cleanrl_utils.environments import atari_wrappers as atari
from cleanrl_utils.environments.envpool import Pool
from cleanrl_utils.environments.making import make
from cleanrl_utils.running.run import Run, RunArgs, parse_args, require
from cleanrl_utils.running.settings import Count, NonNegative, Share
from cleanrl_utils.speed.jax_tools import Model, Params, orthogonal, patches, permutations


@dataclass
class Args(RunArgs):
    env_id: str = "Breakout-v5"
    """id of the game, one of EnvPool's Atari games"""
    total_timesteps: Count = 10_000_000
    """number of environment steps"""
    learning_rate: NonNegative = 2.5e-4
    """learning rate of Adam"""
    num_envs: Count = 8
    """number of parallel environments"""
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
    clip_coef: NonNegative = 0.1
    """clipping coefficient of the policy objective: the ratio stays within 1 ± this"""
    clip_vloss: bool = False
    """clip the value loss with the same coefficient as the policy objective"""
    ent_coef: NonNegative = 0.01
    """coefficient of the entropy bonus"""
    vf_coef: NonNegative = 0.5
    """coefficient of the value loss"""
    max_grad_norm: NonNegative = 0.5
    """maximum norm of the gradient"""
    target_kl: NonNegative | None = None
    """stop an update after the epoch in which the approximate KL divergence exceeds this"""

    # differs from ppo_atari_envpool.py: no check of --num-steps
    def __post_init__(self) -> None:
        super().__post_init__()
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.num_iterations = self.total_timesteps // self.batch_size
        batch = f"the batch of --num-envs x --num-steps = {self.batch_size} steps"
        divides = self.batch_size % self.num_minibatches == 0
        require(divides, f"--num-minibatches must divide {batch}")
        require(self.num_iterations > 0, f"--total-timesteps must be at least {batch}")


TAGS = [f"losses/{name}" for name in ("value_loss", "policy_loss", "entropy", "old_approx_kl")]
TAGS += ["losses/approx_kl", "losses/clipfrac", "losses/explained_variance", "charts/learning_rate"]


def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment for evaluation, with EnvPool's rules and images."""

    def thunk() -> gym.Env:
        game = f"ALE/{name_of_game(env_id)}-v5"
        rules = {"frameskip": 1, "obs_type": "grayscale", "repeat_action_probability": 0.0}
        film = video_folder if capture_video and idx == 0 else None
        env = make(game, film, **rules, **env_kwargs)
        env = gym.wrappers.RecordEpisodeStatistics(env)  # of whole games, rewards unclipped
        env = atari.MaxAndSkip(env, skip=4)
        env = atari.EnvPoolLives(env, noop_max=30)
        env = atari.ClipReward(env)
        env = gym.wrappers.ResizeObservation(env, (84, 84))
        env = gym.wrappers.FrameStackObservation(env, 4)
        env.action_space.seed(seed)
        return env

    return thunk


def name_of_game(env_id: str) -> str:
    return env_id.removesuffix("-v5").removesuffix("NoFrameskip-v4")


def make_envs(args: Args) -> Pool:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored.

    A lost life is such an end; the step after it goes on with the game.
    """
    game = f"{name_of_game(args.env_id)}-v5"
    learner = {"episodic_life": True, "reward_clip": True}  # infos hold the true game
    return Pool(game, args.num_envs, args.seed, **learner, **args.env_settings)


class Network(nn.Module):
    """Actor and critic, two heads on the convolutional network of DQN's Nature paper."""

    num_actions: int

    @nn.compact
    def __call__(self, obs: Array) -> tuple[Array, Array]:
        """Logits and values of bytes, (..., 4, 84, 84)."""
        x = jnp.moveaxis(obs, -3, -1) / 255
        for features, size, stride in [(32, 8, 4), (64, 4, 2), (64, 3, 1)]:
            x = nn.relu(nn.Dense(features)(patches(x, size, stride)))  # a convolution
        x = nn.relu(nn.Dense(512)(x.reshape(*x.shape[:-3], -1)))
        return nn.Dense(self.num_actions, name="actor")(x), nn.Dense(1, name="critic")(x)[..., 0]


def init_params(num_actions: int, seed: int) -> Params:
    """Orthogonal matrices, zero biases."""
    obs = np.zeros((1, 4, 84, 84), np.uint8)
    rng = np.random.default_rng(seed)
    params = jax.eval_shape(Network(num_actions).init, random.key(0), obs)["params"]
    for name, layer in params.items():
        # small outputs at first: a nearly uniform policy
        std = {"actor": 0.01, "critic": 1.0}.get(name, 2**0.5)
        bias = np.zeros(layer["bias"].shape, np.float32)
        params[name] = {"kernel": orthogonal(rng, std, *layer["kernel"].shape), "bias": bias}
    return params


@jax.jit
def forward(params: Params, obs: Array) -> tuple[Array, Array]:
    return Network(params["actor"]["bias"].size).apply({"params": params}, obs)  # type: ignore


class Agent(Model):
    """The agent as model files hold it and evaluations play it."""

    def act(self, obs: np.ndarray, greedy: bool = True) -> np.ndarray:
        logits = np.asarray(forward(self.params, obs)[0])
        return (logits if greedy else logits + np.random.gumbel(size=logits.shape)).argmax(-1)


class Games(NamedTuple):
    """All games in the middle of play, (num_envs, ...)."""

    handle: Array  # EnvPool's; passing it on keeps steps in order
    key: Array
    obs: Array
    ended: Array  # the step after an end only resets
    score: Array  # true return so far


class Step(NamedTuple):
    """A transition of each environment; in a rollout, arrays are (num_steps, num_envs, ...)."""

    seen: tuple[Array, ...]  # observation, action, its log-probability, value
    reward: Array
    terminated: Array
    done: Array
    real: Array
    episodic_return: Array  # NaN unless a game is over
    episodic_length: Array


def play(step_envs: Callable, params: Params, games: Games, x: None) -> tuple[Games, Step]:
    """One step of all games."""
    key, noise_key = random.split(games.key)
    logits, value = forward(params, games.obs)
    # Gumbel-max: the argmax of logits plus Gumbel noise is a sample of softmax
    action = (logits + random.gumbel(noise_key, logits.shape)).argmax(-1)
    logprob = jax.nn.log_softmax(logits)[jnp.arange(len(action)), action]
    handle, (obs, reward, term, trunc, infos) = step_envs(games.handle, action)
    score = games.score + infos["reward"]
    game_over = infos["terminated"] > 0
    term = term | game_over  # which EnvPool calls truncated if it is exactly at the time limit
    over = game_over | trunc
    played = (jnp.where(over, score, jnp.nan), infos["elapsed_step"])
    seen = (games.obs, action, logprob, value)
    step = Step(seen, reward, term, term | trunc, ~games.ended, *played)
    return Games(handle, key, obs, term | trunc, jnp.where(over, 0, score)), step


def collect(play: Callable, args: Args, params: Params, games: Games) -> tuple[Games, Step]:
    """A rollout: Python calls play, a compiled program, num_steps times."""
    steps = []
    for _ in range(args.num_steps):
        games, step = play(params, games, None)
        steps.append(step)
    return games, stack(steps)


stack = jax.jit(lambda steps: jax.tree.map(lambda *x: jnp.stack(x), *steps))


def gae(step: Step, values: Array, args: Args) -> Array:
    """Advantages of a rollout; values have one row more: of what the last actions led to."""
    # A truncated episode bootstraps from its real last observation, which is the next row's.
    delta = step.reward + args.gamma * values[1:] * (1 - step.terminated) - values[:-1]
    decay = args.gamma * args.gae_lambda * (1 - step.done)  # no sum goes beyond an episode's end
    back = lambda last, x: (x[0] + x[1] * last,) * 2  # noqa: E731
    return jax.lax.scan(back, jnp.zeros_like(delta[0]), (delta, decay), reverse=True, unroll=16)[1]


def masked_mean(x: Array, real: Array) -> Array:
    """Mean over real transitions: steps that only reset an environment do not count."""
    return (x * real).sum() / jnp.maximum(real.sum(), 1)


def masked_var(x: Array, real: Array) -> Array:
    centred = x - masked_mean(x, real)
    return (jnp.square(centred) * real).sum() / jnp.maximum(real.sum() - 1, 1)


def get_loss(params: Params, args: Args, minibatch: tuple[Array, ...]) -> tuple[Array, Array]:
    """The loss, and losses and diagnostics in log order."""
    obs, actions, logprobs, values, advantages, returns, real = minibatch
    logits, newvalue = forward(params, obs)
    newlogprobs = jax.nn.log_softmax(logits)
    logratio = newlogprobs[jnp.arange(len(actions)), actions] - logprobs
    ratio = jnp.exp(logratio)
    if args.norm_adv:
        centred = advantages - masked_mean(advantages, real)
        advantages = centred / (jnp.sqrt(masked_var(advantages, real)) + 1e-8)
    clipped_ratio = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = masked_mean(jnp.maximum(-advantages * ratio, -advantages * clipped_ratio), real)

    v_error = jnp.square(newvalue - returns)
    if args.clip_vloss:
        clipped_value = values + jnp.clip(newvalue - values, -args.clip_coef, args.clip_coef)
        v_error = jnp.maximum(v_error, jnp.square(clipped_value - returns))
    v_loss = 0.5 * masked_mean(v_error, real)
    entropy = masked_mean(-(jnp.exp(newlogprobs) * newlogprobs).sum(-1), real)
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    old_approx_kl = masked_mean(-logratio, real)  # http://joschu.net/blog/kl-approx.html
    approx_kl = masked_mean(ratio - 1 - logratio, real)
    clipfrac = masked_mean(jnp.abs(ratio - 1) > args.clip_coef, real)
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


def learn(args: Args, train: dict, games: Games, step: Step, lr: Array) -> tuple[dict, dict]:
    """All epochs over a rollout, in one compiled program."""
    params = train["params"]
    key, shuffle_key = random.split(train["key"])
    values = jnp.concatenate([step.seen[-1], forward(params, games.obs)[1][None]])
    advantages = gae(step, values, args)
    returns = advantages + values[:-1]
    batch = (*step.seen, advantages, returns, step.real.astype(jnp.float32))
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    indices = permutations(shuffle_key, args.update_epochs, args.batch_size, args.minibatch_size)
    ends_epoch = jnp.arange(1, len(indices) + 1) % args.num_minibatches == 0

    def one(carry: tuple, x: tuple) -> tuple[tuple, tuple[Array, Array]]:
        indices, ends_epoch = x
        return update(args, lr, carry, (jax.tree.map(lambda x: x[indices], flat), ends_epoch))

    carry = params, train["moments"], jnp.bool(True)
    carry, (losses, taken) = jax.lax.scan(one, carry, (indices, ends_epoch))
    explained = 1 - masked_var(advantages, step.real) / (masked_var(returns, step.real) + 1e-8)
    metrics = dict(zip(TAGS, [*jnp.average(losses, 0, taken), explained, lr]))
    return {"params": carry[0], "moments": carry[1], "key": key}, metrics


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    envs = make_envs(args)
    params = init_params(envs.single_action_space.n, args.seed)
    moments = jax.jit(make_optimizer(args).init)(params)
    train_key, games_key = random.split(random.key(args.seed))
    train = {"params": params, "moments": moments, "key": train_key}
    learn_all = jax.jit(partial(learn, args), donate_argnums=0)

    train = jax.device_put(train, jax.devices()[0])
    start = run.resume(args.num_iterations, train=train, envs=envs)
    train = run.state["train"]
    restarted = True
    for iteration in range(start, args.num_iterations):
        if restarted:
            obs = envs.obs
            handle, _, _, step_envs = envs.pool.xla()  # a function for compiled programs
            none = jnp.zeros(args.num_envs)
            key = random.fold_in(games_key, iteration)
            games = Games(handle, key, obs, none > 0, none)
            games = jax.device_put(games, jax.devices()[0])
            # EnvPool writes its pool into the function: a new one is compiled anew
            collect_all = partial(collect, jax.jit(partial(play, step_envs)), args)
        remaining = 1 - iteration / args.num_iterations if args.anneal_lr else 1.0
        games, step = collect_all(train["params"], games)
        train, metrics = learn_all(train, games, step, remaining * args.learning_rate)

        global_step = (iteration + 1) * args.batch_size
        run.log_rollout(step.episodic_return, step.episodic_length, global_step, average=20)
        run.log(jax.device_get(metrics), global_step)
        run.evaluate(Agent(train["params"]), global_step)
        # EnvPool cannot be saved: a checkpoint starts new games
        restarted = run.checkpoint(iteration + 1, train=train)

    run.finish(Agent(train["params"]))
