"""An environment that costs next to nothing, to measure how fast a script learns alone.

PYTHONPATH=benchmark python cleanrl/ppo.py --env-id free_env:Free-v0 --env-kwargs like=CartPole-v1
"""

from itertools import cycle
from typing import Any

import gymnasium as gym
import numpy as np


class Free(gym.Env):
    """The spaces of another environment, a few random observations in turn, reward 1."""

    def __init__(self, like: str, length: int = 1000):
        other = gym.make(like)
        self.observation_space = other.observation_space
        self.action_space = other.action_space
        other.close()
        random = np.random.default_rng(1)
        shape = 16, *self.observation_space.shape  # type: ignore[misc]
        dtype = self.observation_space.dtype
        self.observations = cycle(list(random.uniform(-1, 1, shape).astype(dtype)))
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        self.t = 0
        return next(self.observations), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.t += 1
        return next(self.observations), 1.0, False, self.t >= self.length, {}


gym.register("Free-v0", Free)
