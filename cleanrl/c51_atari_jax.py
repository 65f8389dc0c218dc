"""Categorical DQN (C51) in JAX, for Atari games: pictures and discrete actions.

    python cleanrl/c51_atari_jax.py --env-id BreakoutNoFrameskip-v4

Paper: https://arxiv.org/abs/1707.06887. Every detail with its reason: docs/rl-algorithms/c51.md
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
from jax import Array, random

from cleanrl_utils.environments import atari_wrappers as atari
from cleanrl_utils.environments.making import is_atari, make, require_spaces
from cleanrl_utils.environments.vector import AsyncVectorEnv, SyncVectorEnv
from cleanrl_utils.replay.buffers_jax import Batch, FrameMemory, FrameReplay
from cleanrl_utils.running.run import Run, RunArgs, parse_args, require
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share
from cleanrl_utils.speed.jax_tools import FlaxModel, Packed, Packing, Params, conv, means, mlp


@dataclass
class Args(RunArgs):
    env_id: str = "BreakoutNoFrameskip-v4"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 10_000_000
    """number of environment steps"""
    learning_rate: NonNegative = 2.5e-4
    """learning rate of Adam"""
    num_envs: Count = 1
    """number of parallel environments; other settings count steps of single environments"""
    async_envs: bool = False
    """run each environment in a process of its own"""
    n_atoms: Count = 51
    """number of atoms of the return distribution"""
    v_min: float = -10
    """smallest atom of the return distribution"""
    v_max: float = 10
    """largest atom of the return distribution"""
    min_probability: Share = 0.0
    """lower bound of predicted probabilities in the loss, below which they have no gradient; the
    original uses 1e-5"""
    buffer_size: Count = 1_000_000
    """number of transitions in the replay memory; 1,000,000 take 6.6 GiB"""
    gamma: Share = 0.99
    """discount factor"""
    target_network_frequency: Count = 10_000
    """update the target network every this many steps"""
    batch_size: Count = 32
    """number of transitions per gradient step"""
    start_e: Share = 1
    """probability of a random action at the start (epsilon)"""
    end_e: Share = 0.01
    """probability of a random action at the end of exploration (epsilon)"""
    exploration_fraction: Share = 0.1
    """fraction of --total-timesteps over which epsilon falls from --start-e to --end-e"""
    learning_starts: Natural = 80_000
    """number of steps before the first gradient step"""
    train_frequency: Count = 4
    """number of steps per gradient step"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_turns = self.total_timesteps // self.num_envs
        require(self.num_turns > 0, "--total-timesteps must be at least --num-envs")
        require(self.n_atoms >= 2, f"--n-atoms must be at least 2, got {self.n_atoms}")
        require(self.v_min < self.v_max, "--v-min must be below --v-max")
        enough = self.learning_starts >= self.num_envs  # for the first batch to be drawn from
        require(enough, f"--learning-starts must be at least --num-envs, {self.num_envs}")


# same as ppo_atari.py
def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment; the first of them may be filmed."""

    def thunk() -> gym.Env:
        # the wrappers skip frames, not the game; gray is fastest from the console itself
        game = {"frameskip": 1, "obs_type": "grayscale"} if is_atari(env_id) else {}
        film = video_folder if capture_video and idx == 0 else None
        env = make(env_id, film, **game, **env_kwargs)
        env = gym.wrappers.RecordEpisodeStatistics(env)  # of whole games, rewards unclipped
        if game:
            env = atari.NoopReset(env, noop_max=30)
            env = atari.MaxAndSkip(env, skip=4)
            env = atari.EpisodicLife(env)
            env = atari.FireReset(env)  # where a game has FIRE
        else:
            env = atari.Grayscale(env)
        env = atari.ClipReward(env)
        env = gym.wrappers.ResizeObservation(env, (84, 84))
        env = gym.wrappers.FrameStackObservation(env, 4)
        env.action_space.seed(seed)
        return env

    return thunk


# same as dqn_atari_jax.py
def make_envs(args: Args, video_folder: str) -> gym.vector.VectorEnv:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored."""
    kwargs = args.env_settings | {"capture_video": args.capture_video, "video_folder": video_folder}
    thunks = [make_env(args.env_id, args.seed + i, i, **kwargs) for i in range(args.num_envs)]
    return AsyncVectorEnv(thunks) if args.async_envs else SyncVectorEnv(thunks)


class QNetwork(nn.Module):
    """How likely each return is after each action: logits, (batch, actions, atoms)."""

    num_actions: int
    n_atoms: int
    v_min: float
    v_max: float

    @nn.compact
    def __call__(self, obs: Array) -> Array:
        x = jnp.moveaxis(obs, 1, -1) / 255  # of bytes, (batch, 4, 84, 84)
        x = nn.relu(conv(x, 32, size=8, stride=4))
        x = nn.relu(conv(x, 64, size=4, stride=2))
        x = nn.relu(conv(x, 64, size=3, stride=1))
        logits = mlp(x.reshape(len(x), -1), 512, self.num_actions * self.n_atoms)
        return logits.reshape(-1, self.num_actions, self.n_atoms)

    # same as c51_jax.py
    @property
    def atoms(self) -> np.ndarray:
        return np.linspace(self.v_min, self.v_max, self.n_atoms, dtype=np.float32)

    # same as c51_jax.py
    def q_values(self, obs: Array) -> Array:
        return (nn.softmax(self(obs)) * self.atoms).sum(-1)  # the mean return of every action

    def act(self, obs: Array) -> Array:
        return self.q_values(obs).argmax(-1)  # exploration is the training loop's


# same as c51_jax.py
def make_network(envs: gym.vector.VectorEnv, args: Args) -> QNetwork:
    return QNetwork(int(envs.single_action_space.n), args.n_atoms, args.v_min, args.v_max)


# same as dqn_jax.py
class Agent(FlaxModel):
    """What model files hold and evaluations play."""

    @classmethod
    def from_args(cls, envs: gym.vector.VectorEnv, args: Args) -> Self:
        return cls(make_network(envs, args), {})  # load_state_dict brings the rest


# same as dqn.py
def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """From `start` at step 0 to `end` at step `duration`, and `end` from there on."""
    return end if step >= duration else start + (end - start) * step / duration


# same as c51_jax.py
def project(probs: Array, returns: Array, atoms: Array) -> Array:
    """The distribution that has `probs` at `returns`, (batch, atoms) both, moved onto the atoms:
    each probability is shared by the two atoms around its return, the nearer one gets more."""
    last = len(atoms) - 1
    spacing = (atoms[-1] - atoms[0]) / last
    position = ((returns - atoms[0]) / spacing).clip(0, last)
    nearest = position.round()  # rounding errors must not move mass away from an atom that is met
    position = jnp.where(abs(position - nearest) < 1e-4, nearest, position)
    rows, below = jnp.arange(len(probs))[:, None], jnp.floor(position).astype(int)
    share = position - below  # of the atom above
    projected = jnp.zeros_like(probs).at[rows, below].add(probs * (1 - share))
    return projected.at[rows, (below + 1).clip(max=last)].add(probs * share)


# same as dqn_jax.py
class Train(NamedTuple):
    """Everything that learning changes; each network is one vector."""

    q_network: Packed
    target_network: Packed
    moments: optax.OptState
    key: Array


TAGS = ["losses/loss", "losses/q_values"]


class Learner:
    """Training as pure functions: what they change, they are given and return."""

    def __init__(self, args: Args, envs: gym.vector.VectorEnv):
        self.args = args
        self.network: Any = make_network(envs, args)
        self.memory = FrameMemory(args.buffer_size, envs)
        eps = 0.01 / args.batch_size  # as in the paper
        self.optimizer = optax.adam(args.learning_rate, eps=eps)
        obs = np.zeros(envs.observation_space.shape, np.uint8)
        self.params = jax.jit(self.network.init)(random.key(args.seed), obs)
        self.packing = Packing(self.params, few=jax.default_backend() != "cpu")

    # same as dqn_jax.py
    def init(self) -> Train:
        fresh = partial(jax.tree.map, jnp.copy, self.params)
        q_network, target_network = self.packing.pack(fresh()), self.packing.pack(fresh())
        key = random.fold_in(random.key(self.args.seed), 1)
        return Train(q_network, target_network, self.optimizer.init(q_network), key)

    # same as dqn_jax.py
    def agent(self, train: Train) -> Agent:
        return Agent(self.network, self.packing.unpack(train.q_network))

    # same as c51_jax.py
    def get_loss(self, params: Params, train: Train, batch: Batch) -> tuple[Array, Array]:
        """The loss, and with it the mean of the predicted values."""
        atoms = self.network.atoms
        target_network = self.packing.unpack(train.target_network)
        next_probs = nn.softmax(self.network.apply(target_network, batch.next_obs))
        # not next_probs @ atoms: a GPU rounds the factors of matrices to ten bits
        best = (next_probs * atoms).sum(2).argmax(1)
        next_probs = jnp.take_along_axis(next_probs, best[:, None, None], 1).squeeze(1)
        # Only termination ends the sum of rewards; a truncated episode's next_obs is its own last.
        discount = self.args.gamma * (1 - batch.terminated)
        returns = batch.rewards[:, None] + discount[:, None] * atoms
        target_probs = project(next_probs, returns, atoms)
        logits = self.network.apply(params, batch.obs)
        logits = jnp.take_along_axis(logits, batch.actions[:, None, None], 1).squeeze(1)
        logprobs = nn.log_softmax(logits)
        floor = np.log(max(self.args.min_probability, 1e-38))  # 1e-38: as good as none
        loss = -(target_probs * jnp.maximum(logprobs, floor)).sum(1).mean()  # cross-entropy
        return loss, jnp.stack([loss, (jnp.exp(logprobs) @ atoms).mean()])

    # same as dqn_atari_jax.py
    def learn(self, train: Train, sums: Array, replay: FrameReplay) -> tuple[Train, Array]:
        """One gradient step; what is logged of it is added to the sums."""
        key, batch_key = random.split(train.key)
        batch = self.memory.sample(replay, batch_key, self.args.batch_size)
        params = self.packing.unpack(train.q_network)
        grads, losses = jax.grad(self.get_loss, has_aux=True)(params, train, batch)
        updates, moments = self.optimizer.update(self.packing.pack(grads), train.moments)
        q_network = optax.apply_updates(train.q_network, updates)
        train = train._replace(q_network=q_network, moments=moments, key=key)
        return train, sums + jnp.stack([losses, jnp.ones(2)])


if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Discrete, "sac_continuous_action_jax.py")

    learner = Learner(args, envs)
    memory = learner.memory
    act = jax.jit(learner.packing.reader(partial(learner.network.apply, method="act")))
    learn = jax.jit(learner.learn, donate_argnums=0)
    copy_to_target = lambda train: train._replace(target_network=train.q_network)  # noqa: E731
    update_target = jax.jit(copy_to_target, donate_argnums=0)
    insert = jax.jit(memory.insert, donate_argnums=0)
    nothing = jnp.zeros((2, len(TAGS)))
    rng = np.random.default_rng(args.seed)
    actions = np.zeros(args.num_envs, dtype=np.int64)

    state = dict(train=learner.init(), replay=memory.init(), sums=nothing)
    envs.reset(seed=args.seed)
    start = run.resume(args.num_turns, **state, rng=rng, envs=envs)
    train, replay, sums = (run.state[name] for name in state)
    del state  # a resumed run has read its own: let go of the other memory
    obs, ended = envs.obs, envs.ended
    for turn in range(start, args.num_turns):
        # new environments, so that a resumed run is the same run
        # Act. Each environment explores by a coin of its own.
        exploring = args.exploration_fraction * args.total_timesteps  # steps
        epsilon = linear_schedule(args.start_e, args.end_e, exploring, turn * args.num_envs)
        explore = rng.random(args.num_envs) < epsilon
        if not explore.all():
            actions[:] = act(train.q_network, obs)
        if explore.any():
            actions[explore] = rng.integers(envs.single_action_space.n, size=explore.sum())

        # Learn, while a GPU can do so beside the environments' next step. Each environment's step
        # is counted, so that --num-envs changes neither the number of updates nor their order.
        for global_step in range(turn * args.num_envs + 1, (turn + 1) * args.num_envs + 1):
            learning = global_step > args.learning_starts
            if learning and global_step % args.train_frequency == 0:
                train, sums = learn(train, sums, replay)
            if learning and global_step % args.target_network_frequency == 0:
                train = update_target(train)
            if global_step % 100 == 0:
                run.log(means(TAGS, sums), global_step)
                sums = nothing

        # Step, and remember it unless it only reset an environment whose episode had ended.
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        replay = insert(replay, memory.page(obs, next_obs, actions, rewards, terminated, ~ended))
        obs, ended = next_obs, terminated | truncated
        run.log_episodes(infos, global_step)
        if run.evaluation_due(global_step):
            run.evaluate(learner.agent(train), global_step)
        run.checkpoint(turn + 1, train=train, replay=replay, sums=sums)

    run.finish(learner.agent(train))
