"""Spaces of several parts: their parts as one vector, and the choices of several actions."""

import math
from typing import Any

import gymnasium as gym
import numpy as np

from cleanrl_utils.errors import require

KNOWN = gym.spaces.Box | gym.spaces.Discrete | gym.spaces.MultiDiscrete | gym.spaces.MultiBinary


def parts_of(space: gym.Space) -> list[gym.Space]:
    """The parts of an observation, in the order in which Gymnasium flattens them."""
    if isinstance(space, gym.spaces.Dict):
        return [part for inner in space.spaces.values() for part in parts_of(inner)]
    if isinstance(space, gym.spaces.Tuple):
        return [part for inner in space.spaces for part in parts_of(inner)]
    return [space]


def values_of(space: gym.Space, value: Any) -> list[Any]:
    """The values of the parts of an observation, in the order of `parts_of`."""
    if isinstance(space, gym.spaces.Dict):
        inner = [values_of(part, value[key]) for key, part in space.spaces.items()]
    elif isinstance(space, gym.spaces.Tuple):
        inner = [values_of(part, x) for part, x in zip(space.spaces, value, strict=True)]
    else:
        return [value]
    return [x for values in inner for x in values]


def count_choices(space: gym.Space) -> list[int]:
    """The number of choices of each discrete action; a bit of MultiBinary has two."""
    if isinstance(space, gym.spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    choices = getattr(space, "nvec", getattr(space, "n", []))  # none of Box
    return [int(n) for n in np.ravel(choices)]


def is_picture(space: gym.Space) -> bool:
    """Whether a part is a picture: three dimensions, or two of bytes (gray)."""
    dimensions = len(space.shape or ())
    return dimensions == 3 or (dimensions == 2 and space.dtype == np.uint8)


def to_channels_first(picture: np.ndarray) -> np.ndarray:
    """A picture as (channels, height, width); the channels are the smaller of first and last."""
    if picture.ndim == 2:
        return picture[None]
    return picture if picture.shape[0] < picture.shape[2] else picture.transpose(2, 0, 1)


class FlattenParts(gym.ObservationWrapper):
    """One vector of all parts of an observation; `parts` are their spaces, in the same order.

    Pictures are turned to (channels, height, width). Discrete parts become one-hot codes.
    """

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.parts: list[gym.Space] = []
        for part in parts_of(env.observation_space):
            has = f"observations of {type(part).__name__}"
            name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
            fits = isinstance(part, KNOWN)
            require(fits, f"--env-id {name} has {has}, this script needs Box or discrete parts")
            if isinstance(part, gym.spaces.Box) and is_picture(part):
                bounds = to_channels_first(part.low), to_channels_first(part.high)
                part = gym.spaces.Box(*bounds, dtype=part.dtype.type)
            self.parts.append(part)
        size = sum(gym.spaces.flatdim(part) for part in self.parts)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)

    def observation(self, observation: Any) -> np.ndarray:
        values = values_of(self.env.observation_space, observation)
        flat = []
        for part, value in zip(self.parts, values, strict=True):
            turned = to_channels_first(value) if is_picture(part) else value
            flat.append(gym.spaces.flatten(part, turned))
        return np.concatenate(flat, dtype=np.float32)
