"""EnvPool's environments: many games stepped at once by C++ threads."""

import difflib
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from cleanrl_utils.environments.making import record_video
from cleanrl_utils.errors import BadInput, missing_package
from cleanrl_utils.running.rng import derive_seed


def make_pool(task: str, **settings: Any) -> Any:
    """envpool.make, as a Gymnasium vector environment."""
    try:
        import envpool
    except ImportError:
        raise missing_package("envpool", "envpool") from None
    tasks = envpool.list_all_envs()
    if task not in tasks:
        near = difflib.get_close_matches(task, tasks, n=3, cutoff=0.6)
        hint = f"; nearest names: {', '.join(near)}" if near else ""
        raise BadInput(f"--env-id: EnvPool has no {task}{hint}")
    try:
        return envpool.make(task, env_type="gymnasium", **settings)
    except TypeError:  # the environment does not have all settings
        raise BadInput(f"--env-id {task}: not one of the games of this script") from None
    except ImportError as error:  # the game needs a system library
        if "Qt" not in str(error):
            raise
        packages = "apt-get install --no-install-recommends libqt5gui5 libqt5core5a"
        raise BadInput(f"--env-id {task} needs two Qt libraries; on Debian: {packages}") from None


class Pool:
    """EnvPool's environments as a vector environment with next-step autoreset.

    EnvPool can neither be saved nor seeded again: each checkpoint starts new games, seeded by the
    number of checkpoints so far. So a resumed run equals an uninterrupted one.
    """

    restarts = True
    nbytes = 0  # of a checkpoint

    def __init__(self, task: str, num_envs: int, seed: int, **settings: Any):
        self.make = partial(make_pool, task, num_envs=num_envs, **settings)
        self.num_envs = num_envs
        self.seed = seed
        self.number = 0  # of checkpoints so far
        self._start()
        self.single_observation_space = self.pool.single_observation_space
        self.single_action_space = self.pool.single_action_space

    def _start(self) -> None:
        self.pool: Any = self.make(seed=derive_seed(self.seed, self.number))
        self._obs, _ = self.pool.reset()
        self._ended = np.zeros(self.num_envs, bool)
        self.scores = np.zeros(self.num_envs)

    @property
    def obs(self) -> Any:
        """The latest observations."""
        if self.pool is None:
            self._start()
        return self._obs

    @property
    def ended(self) -> np.ndarray:
        """The environments whose episode has ended: their next step only resets."""
        if self.pool is None:
            self._start()
        return self._ended

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Like Gymnasium's step; infos hold return and length of whole games, rewards unclipped."""
        self._obs, reward, terminated, truncated, infos = self.pool.step(actions)
        game_over = np.asarray(infos.get("terminated", terminated)) > 0
        # EnvPool marks a game that ends exactly at the time limit only as truncated.
        terminated = terminated | game_over
        truncated = truncated & ~terminated
        self._ended = terminated | truncated
        self.scores += infos.get("reward", reward)
        played = game_over | truncated
        if played.any():
            infos["episode"] = {"r": self.scores.copy(), "l": infos["elapsed_step"]}
            infos["_episode"] = played
            self.scores[played] = 0
        return self._obs, reward, terminated, truncated, infos

    def state_dict(self) -> dict[str, int]:
        self.close()
        self.number += 1
        return {"number": self.number}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.close()
        self.number = saved["number"]

    def restart(self) -> None:
        """Start the same games again, at the next use."""
        self.close()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None


class OneOfPool(gym.Env):
    """A single EnvPool environment with Gymnasium's interface, for evaluation and videos."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}

    def __init__(self, task: str, render_mode: str | None = None):
        self.task = task
        self.render_mode = render_mode
        self.settings: dict[str, Any] = {"num_envs": 1, "num_threads": 1}
        if render_mode is not None:
            self.settings |= {"render_mode": render_mode, "render_width": 256, "render_height": 256}
        self.pool = make_pool(task, **self.settings)
        self.observation_space = self.pool.single_observation_space
        self.action_space = self.pool.single_action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:  # EnvPool accepts a seed only when it makes an environment
            self.pool.close()
            self.pool = make_pool(self.task, seed=seed % 2**31, **self.settings)
        obs, _ = self.pool.reset()
        return obs[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = self.pool.step(np.array([action]))
        return obs[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> Any:
        return self.pool.render()[0]

    def close(self) -> None:
        self.pool.close()


def make_one_of_pool(task: str, video_folder: str | Path | None = None) -> gym.Env:
    """Make a single EnvPool environment, for games that only EnvPool has."""
    if video_folder is None:
        return OneOfPool(task)
    return record_video(OneOfPool(task, render_mode="rgb_array"), Path(video_folder))
