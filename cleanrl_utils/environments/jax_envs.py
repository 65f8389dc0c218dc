"""Environments written in JAX: gymnax's and Brax's behind one interface, Gymnasium's around both.

    env = Gymnax.make("CartPole-v1")
    episodes = begin(env, key, num_envs)
    episodes, step = advance(env, episodes, actions, keys, starts)

`advance` resets in the same step: where an episode ends, the new Episode is the fresh start it was
given, and `step.next_obs` keeps what the action really led to, so that a truncated episode can be
bootstrapped from its real last observation.
"""

import contextlib
import difflib
import functools
import io
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cleanrl_utils.environments.making import record_video, render_without_screen
from cleanrl_utils.errors import BadInput, missing_package, require

PALETTE = np.array(  # of MinAtar's channels; the background is black
    [[0, 158, 115], [230, 159, 0], [86, 180, 233], [204, 121, 167], [240, 228, 66]]
    + [[0, 114, 178], [213, 94, 0], [153, 153, 153], [255, 255, 255], [120, 94, 240]],
    np.uint8,
)


class Gymnax:
    """One of gymnax's environments with discrete actions; it shows pictures or flat vectors."""

    def __init__(self, env_id: str):
        try:
            import gymnax
        except ImportError:
            raise missing_package("gymnax", "jax") from None
        if env_id not in gymnax.registered_envs:
            near = difflib.get_close_matches(env_id, gymnax.registered_envs, n=3, cutoff=0.4)
            raise BadInput(
                f"--env-id {env_id}: gymnax has no such environment; {nearest(near)}all:"
                f" {', '.join(gymnax.registered_envs)}"
            )
        self.env_id = env_id
        self.env, self.params = gymnax.make(env_id)
        convert = gymnax.environments.spaces.gymnax_space_to_gym_space
        self.action_space = convert(self.env.action_space(self.params))
        require(
            isinstance(self.action_space, gym.spaces.Discrete),
            f"--env-id {env_id} has {type(self.action_space).__name__} actions, this script needs"
            " Discrete: see ppo_continuous_action.py or ppo_continuous_action_brax_jax.py",
        )
        self.shape = self.env.observation_space(self.params).shape
        picture = len(self.shape) == 3  # height, width, channels
        shape = self.shape if picture else (int(np.prod(self.shape)),)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, shape, np.float32)

    @classmethod
    @functools.cache
    def make(cls, env_id: str) -> "Gymnax":
        """The one object of this id: what is compiled for it is compiled once."""
        return cls(env_id)

    def reset(self, key: Array) -> tuple[Any, Array]:
        obs, state = self.env.reset_env(key, self.params)
        return state, self.shown(obs)

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, Array, Array, Array, Array]:
        """(state, observation, reward, terminated, truncated); the caller resets."""
        obs, state, reward, terminated, _ = self.env.step_env(key, state, action, self.params)
        truncated = self.env.is_truncated(state, self.params) & ~terminated
        return state, self.shown(obs), jnp.float32(reward), terminated, truncated

    def shown(self, obs: Array) -> Array:
        return obs.reshape(self.observation_space.shape).astype(jnp.float32)

    def render(self, state: Any) -> np.ndarray:
        if self.env_id in gym.registry:  # Gymnasium draws the state of its own twin
            from gymnax.visualize.vis_gym import get_gym_state

            if not hasattr(self, "screen"):
                render_without_screen()
                self.screen = gym.make(self.env_id, render_mode="rgb_array").unwrapped
                self.screen.reset()
            self.screen.state = get_gym_state(state, self.env_id)
            return self.screen.render()
        obs = np.asarray(self.env.get_obs(state, self.params)).reshape(self.shape)
        if obs.ndim != 3:
            raise BadInput(f"--capture-video: gymnax cannot draw {self.env_id}")
        seen = obs.argmax(-1)
        picture = np.where((obs.max(-1) > 0)[..., None], PALETTE[seen % len(PALETTE)], 0)
        return picture.astype(np.uint8).repeat(16, 0).repeat(16, 1)


class Brax:
    """One of Brax's environments, `ant` or with its physics `ant-mjx`; actions are in [-1, 1]."""

    BACKENDS = ("spring", "positional", "generalized", "mjx")  # the first is the default
    EPISODE_LENGTH = 1000

    def __init__(self, env_id: str):
        name, _, backend = env_id.partition("-")
        envs = import_brax()
        known = [known for known in envs._envs if known != "fast"]
        if name not in known:
            near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
            raise BadInput(
                f"--env-id {env_id}: Brax has no such environment; {nearest(near)}all:"
                f" {', '.join(known)}"
            )
        require(
            (backend or "spring") in self.BACKENDS,
            f"--backend {backend}: Brax has {', '.join(self.BACKENDS)}",
        )
        cpu = jax.local_devices(backend="cpu")[0]  # compiles the small programs of this sooner
        with warnings.catch_warnings(), jax.default_device(cpu):
            warnings.simplefilter("ignore")  # that Brax is no longer developed
            self.env = envs.get_environment(name, backend=backend or "spring")
        self.action_space = gym.spaces.Box(-1, 1, (self.env.action_size,), np.float32)
        # Brax's own observation_size runs a reset, with two hundred small programs to compile
        size = jax.eval_shape(lambda: self.env.reset(jax.random.key(0))).obs.shape[-1]
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)

    @classmethod
    @functools.cache
    def make(cls, env_id: str) -> "Brax":
        """The one object of this id: what is compiled for it is compiled once."""
        return cls(env_id)

    def reset(self, key: Array) -> tuple[Any, Array]:
        state = self.env.reset(key)
        return (self.slim(state), jnp.int32(0)), state.obs

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, Array, Array, Array, Array]:
        """(state, observation, reward, terminated, truncated); the caller resets."""
        physics, time = state
        after = self.env.step(physics, jnp.clip(action, -1, 1))
        time = time + 1
        terminated = after.done > 0
        truncated = (time >= self.EPISODE_LENGTH) & ~terminated
        return (self.slim(after), time), after.obs, after.reward, terminated, truncated

    def stagger(self, episodes: "Episode") -> "Episode":
        """Spread the time limits of new episodes, so that they do not all end in the same step.

        Otherwise only failures would end between two time limits, and their returns alone would be
        logged. A first episode that is shortened has no return: it is NaN.
        """
        physics, time = episodes.state
        time = (jnp.arange(len(time)) * self.EPISODE_LENGTH // len(time)).astype(time.dtype)
        return episodes._replace(state=(physics, time), ret=jnp.where(time > 0, jnp.nan, 0))

    def slim(self, state: Any) -> Any:
        """Only what the next step needs: metrics are zeros, which the compiler drops."""
        return state.replace(metrics=jax.tree.map(jnp.zeros_like, state.metrics))

    def render(self, state: Any) -> np.ndarray:
        physics = state[0].pipeline_state
        return self.draw(self.env.sys.mj_model, {"qpos": physics.q, "qvel": physics.qd})

    def draw(self, model: Any, data: dict[str, Array]) -> np.ndarray:
        """A picture of MuJoCo's `model` with these arrays of its state, by its first camera, which
        follows the robot, or by a free one if it has none."""
        import mujoco
        from gymnasium.envs.mujoco.mujoco_rendering import OffScreenViewer

        if not hasattr(self, "screen"):
            render_without_screen()
            self.body = mujoco.MjData(model)
            self.screen = OffScreenViewer(model, self.body, 320, 240)
        for name, array in data.items():
            setattr(self.body, name, np.asarray(array))
        mujoco.mj_forward(model, self.body)
        return self.screen.render("rgb_array", camera_id=0 if model.ncam else None)


def import_brax() -> Any:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it lists the packages it can do without
            from brax import envs
    except ImportError:
        raise missing_package("brax", "jax") from None
    return envs


def nearest(names: list[str]) -> str:
    return f"nearest names: {', '.join(names)}; " if names else ""


class Episode(NamedTuple):
    """An environment in the middle of an episode."""

    state: Any
    obs: Array
    ret: Array  # return and length so far
    length: Array


class Step(NamedTuple):
    """What an action led to; the return of the episode is NaN unless it ended here."""

    next_obs: Array
    reward: Array
    terminated: Array
    done: Array
    episodic_return: Array
    episodic_length: Array


def begin(env: Any, key: Array, *shape: int) -> Episode:
    """As many environments as `shape` says, each at the beginning of an episode of its own."""

    def one(key: Array) -> Episode:
        state, obs = env.reset(key)
        return Episode(state, obs, jnp.float32(0), jnp.int32(0))

    for _ in shape:
        one = jax.vmap(one)
    return one(jax.random.split(key, shape) if shape else key)


def advance(
    env: Any, episodes: Episode, actions: Array, keys: Array, starts: Episode
) -> tuple[Episode, Step]:
    """Step all environments; those whose episode ends go on from their `starts`."""
    state, obs, reward, terminated, truncated = jax.vmap(env.step)(keys, episodes.state, actions)
    done = terminated | truncated
    now = Episode(state, obs, episodes.ret + reward, episodes.length + 1)

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(done.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    ended = jnp.where(done, now.ret, jnp.nan)
    step = Step(obs, reward, terminated, done, ended, now.length)
    return jax.tree.map(choose, starts, now), step


class GymEnv(gym.Env):
    """A JAX environment as a Gymnasium one, to evaluate and film in. It runs on the CPU."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, env: Any, render_mode: str | None = None):
        self.env = env
        self.render_mode = render_mode
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self._reset, self._step = jitted(env)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        key = jax.random.key(int(self.np_random.integers(2**31)))
        self.key = jax.device_put(key, jax.local_devices(backend="cpu")[0])
        self.key, self.state, obs = self._reset(self.key)
        return np.asarray(obs), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.key, self.state, *out = self._step(self.key, self.state, action)
        obs, reward, terminated, truncated = jax.device_get(out)
        return obs, float(reward), bool(terminated), bool(truncated), {}

    def render(self) -> np.ndarray:
        return self.env.render(self.state)


@functools.cache
def jitted(env: Any) -> tuple[Any, Any]:
    """Compiled reset and step, shared by all Gymnasium environments around one JAX environment."""

    def reset(key: Array) -> tuple:
        key, now = jax.random.split(key)
        return key, *env.reset(now)

    def step(key: Array, state: Any, action: Array) -> tuple:
        key, now = jax.random.split(key)
        return key, *env.step(now, state, action)

    return jax.jit(reset), jax.jit(step)


def to_gym(env: Any, video_folder: str | Path | None = None) -> gym.Env:
    """`env` for Gymnasium's tools; films episodes into `video_folder` if given."""
    if video_folder is None:
        return GymEnv(env)
    return record_video(GymEnv(env, render_mode="rgb_array"), Path(video_folder))
