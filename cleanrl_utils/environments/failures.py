"""Environments that fail: one line that names the environment, and the user's own traceback."""

import sys
import traceback
from math import isfinite
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from cleanrl_utils.errors import Stopped

NOT_THE_USERS = (str(Path(gym.__file__).parent), str(Path(__file__).parent.parent))
OLD_API = "this is the API of the old gym; Gymnasium's is"
RESET_API = f"{OLD_API} reset(seed=None, options=None), which returns (observation, info)"
STEP_API = f"{OLD_API} (observation, reward, terminated, truncated, info)"


class EnvironmentFailed(Exception):
    """What to say: a line, and the traceback of the user's code, if any is in it."""

    def __init__(self, line: str, trace: str = ""):
        super().__init__(line, trace)  # all of it, as exceptions travel between processes by args
        self.line = line
        self.trace = trace


class OldApi(Exception):
    """An environment that was written for the old gym; the message says what to change."""


def env_id(env: gym.Env) -> str:
    """The id of an environment, or the name of its class if it was not made by its id."""
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


def users_traceback(error: BaseException) -> str:
    """The traceback without the frames of Gymnasium and of this project; empty if none is left."""
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if not frame.filename.startswith(NOT_THE_USERS)]
    if not frames:
        return ""
    lines = ["Traceback of the environment's own code (most recent call last):\n"]
    lines += traceback.format_list(frames)
    lines += traceback.format_exception_only(error)
    return "".join(lines)


def check_outcome(outcome: Any) -> str:
    """What is wrong with what a step returned; empty if nothing shows."""
    if not isinstance(outcome, tuple) or len(outcome) != 5:
        return ""
    reward = outcome[1]
    try:
        float(reward)
    except (TypeError, ValueError):
        return f"its reward is {reward!r}, not a number"
    return ""


def check_observation(obs: Any, space: gym.Space) -> str:
    """How an observation does not fit its space; empty if it does, or if the space has no shape."""
    if space.shape is None:
        return ""
    array = np.asarray(obs)
    if array.shape != space.shape:
        return f"its observation has the shape {array.shape}, its space {space.shape}"
    if not np.can_cast(array.dtype, space.dtype, "same_kind"):
        return f"its observation is of {array.dtype}, its space of {space.dtype}"
    return ""


def all_finite(obs: Any, rewards: np.ndarray) -> bool:
    """Whether no observation and no reward is NaN or infinite, for two microseconds a step.

    The sum of squares of large numbers can be infinite, too: only such a sum is looked into."""
    floats = isinstance(obs, np.ndarray) and obs.dtype.kind == "f"
    if isfinite(rewards.dot(rewards)) and (not floats or isfinite(np.vdot(obs, obs))):
        return True
    return not len(not_finite(obs, rewards))


def not_finite(obs: Any, rewards: np.ndarray) -> np.ndarray:
    """The numbers of the environments whose observation or reward is NaN or infinite."""
    bad = ~np.isfinite(rewards)
    if isinstance(obs, np.ndarray) and obs.dtype.kind == "f":
        bad = bad | ~np.isfinite(obs.reshape(len(obs), -1)).all(1)
    return np.flatnonzero(bad)


def stop_now(line: str) -> None:
    """How a failure ends a process that has no run yet."""
    raise Stopped(line)


def show(trace: str) -> None:
    if trace:
        print(trace, end="", file=sys.stderr, flush=True)
