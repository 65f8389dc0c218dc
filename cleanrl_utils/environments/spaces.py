"""Spaces of several parts: their parts as one vector, and the choices of several actions."""

import math

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


def count_choices(space: gym.Space) -> list[int]:
    """The number of choices of each discrete action; a bit of MultiBinary has two."""
    if isinstance(space, gym.spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    choices = getattr(space, "nvec", getattr(space, "n", []))  # none of Box
    return [int(n) for n in np.ravel(choices)]


class FlattenParts(gym.wrappers.FlattenObservation):
    """One vector of all parts of an observation; `parts` are their spaces, in the same order.

    Discrete parts become one-hot codes.
    """

    def __init__(self, env: gym.Env):
        self.parts = parts_of(env.observation_space)
        for part in self.parts:
            has = f"observations of {type(part).__name__}"
            name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
            fits = isinstance(part, KNOWN)
            require(fits, f"--env-id {name} has {has}, this script needs Box or discrete parts")
        super().__init__(env)
