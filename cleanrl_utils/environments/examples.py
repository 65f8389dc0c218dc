"""Small environments of our own, for tutorials and tests of what a script can do.

python cleanrl/ppo_action_mask.py --env-id cleanrl_utils.environments.examples:MostlyInvalid-v0
python cleanrl/ppo_multi_input.py --env-id cleanrl_utils.environments.examples:LookAndListen-v0
"""

from typing import Any

import gymnasium as gym
import numpy as np


class MostlyInvalid(gym.Env):
    """Name the number that is shown: 80 actions, of which 60 random wrong ones are invalid.

    The reward is 1 for the right action, an episode has 100 steps. Without masks, an agent has to
    try four times as many actions. The design is that of SB3-Contrib's InvalidActionEnvDiscrete.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(
        self,
        actions: int = 80,
        invalid: int = 60,
        length: int = 100,
        render_mode: str | None = None,
    ):
        self.observation_space = gym.spaces.Discrete(actions)
        self.action_space = gym.spaces.Discrete(actions)
        self.invalid = invalid
        self.length = length
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._next()

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        if not self.mask[action]:
            raise ValueError(f"action {action} is invalid here")
        reward = float(action == self.number)
        self.t += 1
        obs, info = self._next()
        return obs, reward, False, self.t >= self.length, info

    def _next(self) -> tuple[int, dict]:
        actions = int(self.action_space.n)  # type: ignore[attr-defined]
        self.number = int(self.np_random.integers(actions))
        others = np.delete(np.arange(actions), self.number)
        self.mask = np.ones(actions, np.int8)
        self.mask[self.np_random.choice(others, self.invalid, replace=False)] = 0
        return self.number, {"action_mask": self.mask.copy()}

    def render(self) -> np.ndarray:
        """A row of squares: the number is white, valid actions are gray."""
        shades = 90 * self.mask
        shades[self.number] = 255
        row = np.repeat(shades.astype(np.uint8), 8)
        return np.broadcast_to(row[None, :, None], (64, len(row), 3)).copy()


class LookAndListen(gym.Env):
    """Two things to find out from two parts of the observation, and an action for each.

    The picture is bright in one of its four quarters, the vector has a sign. The first action names
    the quarter, the second the sign. Each right answer is worth 0.5; an episode has 10 steps. With
    `binary`, the actions are three bits: two for the quarter, one for the sign, a third each.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    length = 10

    def __init__(self, size: int = 16, binary: bool = False, render_mode: str | None = None):
        self.size = size
        self.binary = binary
        self.render_mode = render_mode
        picture = gym.spaces.Box(0, 255, (size, size, 3), np.uint8)
        vector = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.observation_space = gym.spaces.Dict({"picture": picture, "vector": vector})
        several = gym.spaces.MultiBinary(3) if binary else gym.spaces.MultiDiscrete([4, 2])
        self.action_space: gym.Space = several

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._next(), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        right = [self.quarter, self.sign]
        if self.binary:
            right = [self.quarter // 2, self.quarter % 2, self.sign]
        reward = float(np.mean(np.asarray(action) == right))
        self.t += 1
        return self._next(), reward, False, self.t >= self.length, {}

    def _next(self) -> dict[str, np.ndarray]:
        self.quarter = int(self.np_random.integers(4))
        self.sign = int(self.np_random.integers(2))
        half = self.size // 2
        row, column = divmod(self.quarter, 2)
        self.picture = self.np_random.integers(64, size=(self.size, self.size, 3), dtype=np.uint8)
        self.picture[row * half : (row + 1) * half, column * half : (column + 1) * half] += 128
        noise = self.np_random.normal(size=4).astype(np.float32)
        noise[0] = 2 * self.sign - 1
        return {"picture": self.picture, "vector": noise}

    def render(self) -> np.ndarray:
        return self.picture.repeat(4, 0).repeat(4, 1)


gym.register("MostlyInvalid-v0", MostlyInvalid)
gym.register("LookAndListen-v0", LookAndListen)
gym.register("LookAndListenBinary-v0", LookAndListen, kwargs={"binary": True})
