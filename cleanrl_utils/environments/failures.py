"""Failing environments: one line that names the environment, and the user's own traceback."""

import sys
import traceback
from math import isfinite
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from cleanrl_utils.errors import Stopped

OUR_FOLDERS = (str(Path(gym.__file__).parent), str(Path(__file__).parent.parent))
OLD_API = "this is the API of the old gym; Gymnasium's is"
RESET_API = f"{OLD_API} reset(seed=None, options=None), which returns (observation, info)"
STEP_API = f"{OLD_API} (observation, reward, terminated, truncated, info)"


class EnvironmentFailed(Exception):
    """An environment failed: `line` says how; `trace`: traceback of the user's code, if any."""

    def __init__(self, line: str, trace: str = ""):
        super().__init__(line, trace)  # both, because pickling keeps only the arguments
        self.line = line
        self.trace = trace


class OldApi(Exception):
    """An environment written for the old gym; the message says what to change."""


def env_id(env: gym.Env) -> str:
    """The id of an environment, or the name of its class if it was not made by its id."""
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


def users_traceback(error: BaseException) -> str:
    """The traceback without the frames of Gymnasium and of this project; empty if none is left."""
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if not frame.filename.startswith(OUR_FOLDERS)]
    if not frames:
        return ""
    lines = ["Traceback of the environment's own code (most recent call last):\n"]
    lines += traceback.format_list(frames)
    lines += traceback.format_exception_only(error)
    return "".join(lines)


def check_outcome(outcome: Any) -> str:
    """What is wrong with the result of a step; empty if nothing is found."""
    if not isinstance(outcome, tuple) or len(outcome) != 5:
        return ""
    reward = outcome[1]
    try:
        float(reward)
    except (TypeError, ValueError):
        return f"its reward is {reward!r}, not a number"
    return ""


def check_statistics(error: BaseException) -> str:
    """Whether an environment sets what Gymnasium's RecordEpisodeStatistics wants to set."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AssertionError) and "_stats_key not in info" in (frames[-1].line or ""):
        return 'its info has the key "episode", which RecordEpisodeStatistics of the script sets'
    return ""


def check_observation(obs: Any, space: gym.Space) -> str:
    """Why an observation is not in its space; empty if it is, or if the space has no shape."""
    if space.shape is None:
        return ""
    array = np.asarray(obs)
    if array.shape != space.shape:
        return f"its observation has the shape {array.shape}, its space {space.shape}"
    if not np.can_cast(array.dtype, space.dtype, "same_kind"):
        return f"its observation is of {array.dtype}, its space of {space.dtype}"
    return ""


def all_finite(obs: Any, rewards: np.ndarray) -> bool:
    """Whether all observations and rewards are finite.

    The sum of squares takes only two microseconds. Large numbers can overflow it, so each number is
    checked if the sum is not finite.
    """
    sum_of_squares = rewards.dot(rewards)
    if isinstance(obs, np.ndarray) and obs.dtype.kind == "f":
        sum_of_squares += np.vdot(obs, obs)  # dot would warn of an overflow
    if isfinite(sum_of_squares):
        return True
    return not len(not_finite(obs, rewards))


def not_finite(obs: Any, rewards: np.ndarray) -> np.ndarray:
    """The indices of the environments whose observation or reward is NaN or infinite."""
    bad = ~np.isfinite(rewards)
    if isinstance(obs, np.ndarray) and obs.dtype.kind == "f":
        bad = bad | ~np.isfinite(obs.reshape(len(obs), -1)).all(1)
    return np.flatnonzero(bad)


def stop_now(line: str) -> None:
    """Stop the process; used until a run replaces it by its own way to stop."""
    raise Stopped(line)


def show(trace: str) -> None:
    if trace:
        print(trace, end="", file=sys.stderr, flush=True)
