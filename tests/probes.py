"""Probe environments with known values, which a correct algorithm learns in seconds.

Ids: ProbeConstant-v0 and so on; with a suffix for continuous actions (ProbeConstantContinuous-v0),
84x84 images (ProbeConstantPixels-v0), action masks (ProbeConstantMasked-v0), or a picture beside a
vector and two actions (ProbeConstantParts-v0). Scripts take them as
`--env-id probes:ProbeConstant-v0`.
"""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

GAMMA = 0.9  # the probes' discount; tests pass --gamma 0.9


def image(cue: float) -> np.ndarray:
    """Bright on the left for -1, on the right for 1.

    A ReLU network that starts without biases hardly tells a dark image from a bright one: its
    outputs differ by a factor only.
    """
    both = np.empty((84, 84, 3), np.uint8)
    both[:, :42] = 127.5 - 127.5 * cue
    both[:, 42:] = 127.5 + 127.5 * cue
    return both


class Probe(gym.Env):
    """An episode of at most `length` steps; the observation is a cue of -1, 0 or 1.

    Without information the cue is 1: from zeros a network with zero biases learns little.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    length = 1

    def __init__(
        self, actions: str = "discrete", pixels: bool = False, render_mode: str | None = None
    ):
        self.continuous = actions == "continuous"
        self.pixels = pixels
        self.render_mode = render_mode
        if self.continuous:
            self.action_space = gym.spaces.Box(-2, 2, (1,), np.float32)
        else:
            self.action_space = gym.spaces.Discrete(2)
        if pixels:
            self.observation_space = gym.spaces.Box(0, 255, (84, 84, 3), np.uint8)
        else:
            self.observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def cue(self) -> float:
        return 1.0

    def reward(self, action: float) -> float:
        """The reward; discrete actions are given as -1 and 1, continuous ones as they are."""
        raise NotImplementedError

    def ends(self) -> tuple[bool, bool]:
        return self.t >= self.length, False

    def observe(self) -> np.ndarray:
        if self.pixels:
            return image(self.cue())
        return np.array([self.cue()], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        self.sign = float(self.np_random.choice([-1, 1]))
        return self.observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = self.reward(float(action[0]) if self.continuous else 2.0 * int(action) - 1)
        self.t += 1
        terminated, truncated = self.ends()
        return self.observe(), reward, terminated, truncated, {}

    def render(self) -> np.ndarray:
        return np.full((64, 64, 3), 128, np.uint8)


class Constant(Probe):
    """One step with reward 1: the value is 1."""

    def reward(self, action: float) -> float:
        return 1.0


class Cue(Probe):
    """The reward is the cue: the value is the cue."""

    def cue(self) -> float:
        return self.sign

    def reward(self, action: float) -> float:
        return self.sign


class Discount(Probe):
    """Reward 1 after two steps: the values are gamma at the first cue (-1), 1 at the second (1)."""

    length = 2

    def cue(self) -> float:
        return -1.0 if self.t == 0 else 1.0

    def reward(self, action: float) -> float:
        return float(self.t == 1)


class Action(Probe):
    """The reward depends on the action: the best one is 1, with value 1."""

    def reward(self, action: float) -> float:
        return 1 - (action - 1) ** 2


class Both(Probe):
    """The reward depends on cue and action: the best action is the cue, with value 1."""

    def cue(self) -> float:
        return self.sign

    def reward(self, action: float) -> float:
        return 1 - (action - self.sign) ** 2


class Truncation(Probe):
    """Reward 1 per step, truncated after 5 steps: the value is 1 / (1 - gamma) = 10, not 4.1."""

    length = 5

    def reward(self, action: float) -> float:
        return 1.0

    def ends(self) -> tuple[bool, bool]:
        return False, self.t >= self.length


class Memory(Probe):
    """The last of five actions must repeat the cue of the first step.

    A stack of four frames no longer contains it. Images are black, white or gray all over.
    """

    length = 5

    def observe(self) -> np.ndarray:
        if self.pixels:
            return np.full((84, 84, 3), int(127.5 + 127.5 * self.cue()), np.uint8)
        return super().observe()

    def cue(self) -> float:
        return self.sign if self.t == 0 else 0.0

    def reward(self, action: float) -> float:
        return float(action == self.sign) if self.t == self.length - 1 else 0.0


class Streak(Probe):
    """Reward 1 after five actions that repeat a changing cue; a mistake ends the episode.

    Random actions succeed in one of 32 episodes, and values must propagate over five steps.
    """

    length = 5

    def cue(self) -> float:
        return self.sign

    def reward(self, action: float) -> float:
        self.mistaken = action != self.sign
        self.sign = float(self.np_random.choice([-1, 1]))
        return float(self.t == self.length - 1 and not self.mistaken)

    def ends(self) -> tuple[bool, bool]:
        return self.mistaken or self.t >= self.length, False


class Lengths(Probe):
    """Reward 1 per step; half of the episodes have 20 steps, the others 400."""

    def reward(self, action: float) -> float:
        return 1.0

    def ends(self) -> tuple[bool, bool]:
        return self.t >= (20 if self.sign < 0 else 400), False


class Odd(Both):
    """The probe Both with unusual spaces."""

    def __init__(self, actions: gym.Space, dtype: Any = np.uint8, render_mode: str | None = None):
        continuous = isinstance(actions, gym.spaces.Box)
        super().__init__("continuous" if continuous else "discrete", render_mode=render_mode)
        self.action_space = actions
        self.observation_space = gym.spaces.Box(0, 255, (3,), dtype)

    def observe(self) -> np.ndarray:
        return np.full(3, int(127.5 + 127.5 * self.cue()), self.observation_space.dtype)


ODD = {
    "Bytes": gym.spaces.Discrete(2),
    "BytesContinuous": gym.spaces.Box(-2, 2, (1,), np.float32),
    "FromOne": gym.spaces.Discrete(2, start=1),
    "MultiDiscrete": gym.spaces.MultiDiscrete([2, 3]),
    "Matrix": gym.spaces.Box(-2, 2, (2, 3), np.float32),
    "Unbounded": gym.spaces.Box(-np.inf, np.inf, (1,), np.float32),
}
for name, space in ODD.items():
    gym.register(f"ProbeOdd{name}-v0", Odd, kwargs={"actions": space})
numbers = {"actions": ODD["BytesContinuous"], "dtype": np.int64}
gym.register("ProbeOddNumbersContinuous-v0", Odd, kwargs=numbers)


class Masked(gym.Wrapper):
    """Two pairs of actions, (0, 1) and (2, 3), of which one is valid; the other is an error."""

    action_space = gym.spaces.Discrete(4)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        obs, _ = self.env.reset(**kwargs)
        return obs, self.mask_pair()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.mask[action] == 1, "an invalid action"
        obs, reward, terminated, truncated, _ = self.env.step(action % 2)
        return obs, float(reward), terminated, truncated, self.mask_pair()

    def mask_pair(self) -> dict[str, np.ndarray]:
        pairs = np.array([[1, 1, 0, 0], [0, 0, 1, 1]], np.int8)
        self.mask = self.unwrapped.np_random.choice(pairs)
        return {"action_mask": self.mask}


class Parts(gym.Wrapper):
    """The cue as a small picture and a vector of ones; two actions, of which the first counts."""

    observation_space = gym.spaces.Dict(
        picture=gym.spaces.Box(0, 255, (12, 12, 3), np.uint8),
        vector=gym.spaces.Box(-1, 1, (2,), np.float32),
    )
    action_space = gym.spaces.MultiDiscrete([2, 3])

    def reset(self, **kwargs: Any) -> tuple[dict, dict]:
        obs, info = self.env.reset(**kwargs)
        return self.show(obs), info

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        obs, reward, *rest = self.env.step(action[0])
        return (self.show(obs), float(reward), *rest)

    def show(self, obs: np.ndarray) -> dict[str, np.ndarray]:
        return {"picture": image(obs.item())[::7, ::7], "vector": np.ones(2, np.float32)}


def wrapped(wrapper: type, probe: type, **kwargs: Any) -> gym.Env:
    return wrapper(probe(**kwargs))


PROBES = [Constant, Cue, Discount, Action, Both, Truncation, Memory, Streak, Lengths]
for probe in PROBES:
    name = f"Probe{probe.__name__}"
    gym.register(f"{name}-v0", probe)
    gym.register(f"{name}Continuous-v0", probe, kwargs={"actions": "continuous"})
    gym.register(f"{name}Pixels-v0", probe, kwargs={"pixels": True})
    for wrapper in (Masked, Parts):
        gym.register(f"{name}{wrapper.__name__}-v0", partial(wrapped, wrapper, probe))


def see_each_picture_once(monkeypatch: Any) -> None:
    """Most images of a batch are the same: networks compute each of them only once."""
    from torch import Tensor, nn

    forward = nn.Sequential.forward

    def once(self: nn.Sequential, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] > 4:  # not a stack of frames: an inner layer
            return forward(self, x)
        colours = x[:, :, 0, [0, -1]].flatten(1).numpy()  # of both halves, in all frames
        _, first, inverse = np.unique(colours, axis=0, return_index=True, return_inverse=True)
        return forward(self, x[first])[inverse.ravel()]

    monkeypatch.setattr(nn.Sequential, "forward", once)
