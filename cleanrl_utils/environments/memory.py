"""Small environments that need a memory, for any script as `--env-id module:Id`, no download.

    python cleanrl/ppo_recurrent.py --env-id cleanrl_utils.environments.memory:CartPoleNoVel-v1

CartPoleNoVel-v1, PendulumNoVel-v1: the tasks of Gymnasium without the velocities, which an agent
must infer from successive observations (Han, Doya and Tani, 2020: arxiv.org/abs/1912.10703).
TMaze-v0: the way to turn at the end of a corridor is shown at its start only (Bakker, 2001:
proceedings.neurips.cc/paper/2001/hash/a38b16173474ba8b1a95bcbc30d3b8a5-Abstract.html).
"""

from typing import Any

import gymnasium as gym
import numpy as np

from cleanrl_utils.errors import require


class KeepObservations(gym.ObservationWrapper):
    """Keep only the numbers of an observation vector that `indices` names."""

    def __init__(self, env: gym.Env, indices: list[int]):
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, gym.spaces.Box)
        self.indices = indices
        low = space.low[indices]
        high = space.high[indices]
        self.observation_space = gym.spaces.Box(low, high, dtype=space.dtype.type)

    def observation(self, obs: np.ndarray) -> np.ndarray:
        return obs[self.indices]


def without_velocities(env_id: str, positions: list[int], **kwargs: Any) -> gym.Env:
    """An environment of Gymnasium whose observations are the `positions` of its vector."""
    return KeepObservations(gym.make(env_id, **kwargs), positions)


class TMaze(gym.Env):
    """A corridor of `length` steps with a junction at its end.

    The first observation shows which way to turn there. Actions: 0 walks forward, 1 turns left, 2
    turns right; turning before the junction does nothing, and so does walking into its wall. The
    return is 1 for the right turn, else 0: its mean is the rate of success, and chance is 0.5.
    No action before the junction leaves a trace, so success beyond chance needs a memory. An
    episode is truncated after 10 x `length` steps.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, length: int = 20, render_mode: str | None = None):
        require(length >= 1, "--env-kwargs: length must be at least 1")
        self.length = length
        self.render_mode = render_mode
        self.action_space = gym.spaces.Discrete(3)
        # shown to the left, shown to the right, in the corridor, at the junction
        self.observation_space = gym.spaces.Box(0, 1, (4,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position = 0
        self.steps = 0
        self.right = bool(self.np_random.integers(2))
        return self._observe(shown=True), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        turned = self.position == self.length and action != 0
        success = turned and (action == 2) == self.right
        if action == 0:
            self.position = min(self.position + 1, self.length)
        self.steps += 1
        truncated = not turned and self.steps >= 10 * self.length
        return self._observe(), float(success), turned, truncated, {}

    def _observe(self, shown: bool = False) -> np.ndarray:
        at_junction = self.position == self.length
        parts = [shown and not self.right, shown and self.right, not at_junction, at_junction]
        return np.array(parts, np.float32)

    def render(self) -> np.ndarray:
        """A map of the maze: the agent white, the right way out green."""
        image = np.zeros((3, self.length + 1, 3), np.uint8)
        image[1, :] = 90
        image[:, -1] = 90
        image[2 if self.right else 0, -1] = (0, 160, 0)
        image[1, self.position] = 255
        return image.repeat(16, 0).repeat(16, 1)


POSITIONS = {"CartPole-v1": [0, 2], "Pendulum-v1": [0, 1]}  # cart and pole; cosine and sine
for _env_id, _positions in POSITIONS.items():
    gym.register(
        _env_id.replace("-v1", "NoVel-v1"),
        without_velocities,
        kwargs={"env_id": _env_id, "positions": _positions},
    )
gym.register("TMaze-v0", TMaze)
