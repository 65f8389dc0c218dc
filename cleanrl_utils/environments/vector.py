"""Gymnasium's vector environments, with a state that a checkpoint can hold.

    envs = SyncVectorEnv([make_env(...), ...])      # AsyncVectorEnv: a process per environment
    envs.reset(seed=1)
    start = run.resume(total, agent=agent, envs=envs)
    envs.obs                                        # the latest observations
    envs.ended                                      # where an episode ended in the last step

Next-step autoreset, as in Gymnasium: the observation is the one an action led to, and the step
after an episode's end only resets the environment; its action is ignored.

A resumed run replays the open episodes (replaying.py). If a replay ends in another observation,
the environment is not deterministic: its episode then counts as truncated, and the next step starts
a new one.

An environment that fails (an exception, an observation that is not in its space, a process that
dies) ends the run with one line that names the environment, its game and its step.
"""

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import concatenate, iterate

from cleanrl_utils.environments import failures
from cleanrl_utils.environments.failures import EnvironmentFailed, all_finite
from cleanrl_utils.environments.replaying import Replayable, State
from cleanrl_utils.errors import require
from cleanrl_utils.running.stored import one_line

NUMBERS = {float, int, bool, np.float64}  # in infos, besides other types of NumPy


class ReplayState:
    """The state of vector environments made of Replayable environments."""

    nbytes = 0  # in a checkpoint, next to nothing
    obs: Any  # the latest observations
    ended: np.ndarray  # True where an episode has ended: the next step only resets
    num_envs: int
    observation_space: gym.Space
    call: Callable
    set_attr: Callable
    stop: Callable[[str], None] = staticmethod(failures.stop_now)  # replaced by the run

    def _fail(self, line: str, trace: str = "") -> None:
        failures.show(trace)
        self.stop(line)

    def _fail_not_finite(self, rewards: np.ndarray) -> None:
        lines = self.call("failure_line", "its observation or its reward is NaN or infinite")
        self._fail(lines[failures.not_finite(self.obs, rewards)[0]])

    def state_dict(self) -> State:
        return {"obs": self.obs, "envs": list(self.call("saved_state"))}

    def load_state_dict(self, saved: State) -> None:
        cause = failures.check_observation(saved["obs"], self.observation_space)
        require(not cause, f"the saved state of the environments does not fit: {cause}")
        self.set_attr("to_replay", saved["envs"])
        replayed = self.call("replay")
        self.obs = saved["obs"]
        self.ended = np.array([env["ended"] for env in saved["envs"]])
        expected = [_select(self.obs, i) for i in range(self.num_envs)]
        differs = [not _same(a, b) for a, b in zip(replayed, expected, strict=True)]
        if any(differs):
            self.ended |= differs
            self._start_new_games(np.array(differs))
            numbers = ", ".join(map(str, np.flatnonzero(differs)))
            print(
                f"environments {numbers} are not deterministic: their open episodes could not be"
                " replayed and end here; the run continues with new ones",
                file=sys.stderr,
                flush=True,
            )

    def _start_new_games(self, which: np.ndarray) -> None:
        raise NotImplementedError


class SyncVectorEnv(ReplayState, gym.vector.SyncVectorEnv):
    """Steps its environments one by one."""

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env]]):
        super().__init__([partial(_make, make, i) for i, make in enumerate(env_fns)])
        arrays = gym.spaces.Box, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary
        self._actions_are_rows = isinstance(self.action_space, arrays)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        try:
            self.obs, infos = super().reset(seed=seed, options=options)
        except Exception as error:
            self._explain(error)
        no_rewards = np.zeros(self.num_envs)
        if not all_finite(self.obs, no_rewards):
            self._fail_not_finite(no_rewards)
        self.ended = np.zeros(self.num_envs, bool)
        return self.obs, infos

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict]:
        infos: dict[str, Any] = {}
        rewards = self._rewards
        terminated = self._terminations
        truncated = self._truncations
        try:
            if not self._actions_are_rows:
                actions = iterate(self.action_space, actions)
            for i, action in enumerate(actions):
                outcome = self.envs[i].step(action)
                self._env_obs[i], rewards[i], terminated[i], truncated[i], info = outcome
                if info:
                    infos = self._add_info(infos, info, i)
            self.obs = self._stack()
        except Exception as error:
            self._explain(error)
        if not all_finite(self.obs, rewards):
            self._fail_not_finite(rewards)
        self.ended = terminated | truncated
        return self.obs, rewards.copy(), terminated.copy(), truncated.copy(), infos

    def _stack(self) -> Any:
        """The observations of all environments in new arrays."""
        batch = self._observations
        if isinstance(batch, np.ndarray):  # else a dictionary or tuple of arrays
            obs = np.array(self._env_obs)  # faster than concatenate
            if obs.shape == batch.shape and obs.dtype == batch.dtype:
                return obs
        return deepcopy(concatenate(self.single_observation_space, self._env_obs, batch))

    def _add_info(self, vector_infos: dict, env_info: dict, env_num: int) -> dict:
        """As in Gymnasium, and faster for numbers."""
        others = {}
        for key, value in env_info.items():
            kind = type(value)
            if kind not in NUMBERS and not issubclass(kind, np.number):
                others[key] = value
                continue
            if key not in vector_infos:
                vector_infos[key] = np.zeros(self.num_envs, kind)
                vector_infos[f"_{key}"] = np.zeros(self.num_envs, bool)
            vector_infos[key][env_num] = value
            vector_infos[f"_{key}"][env_num] = True
        return super()._add_info(vector_infos, others, env_num) if others else vector_infos

    def _start_new_games(self, which: np.ndarray) -> None:
        for i in np.flatnonzero(which):
            self.envs[i].start_new_game()

    def _explain(self, error: Exception) -> None:
        """Stop with one line if an environment caused the error, else raise it again."""
        if isinstance(error, EnvironmentFailed):
            self._fail(error.line, error.trace)
        for env, obs in zip(self.envs, self._env_obs, strict=True):
            cause = failures.check_outcome(env.games.outcome)
            cause = cause or failures.check_observation(obs, self.single_observation_space)
            if cause:
                self._fail(env.failure_line(cause))
        raise error


class AsyncVectorEnv(ReplayState, gym.vector.AsyncVectorEnv):
    """Steps each environment in a process of its own."""

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env]]):
        makers = [partial(_make, make, i) for i, make in enumerate(env_fns)]
        context = "spawn" if "jax" in sys.modules else None  # a fork would break JAX's threads
        mode = gym.vector.AutoresetMode.DISABLED
        super().__init__(makers, context=context, autoreset_mode=mode)
        # Replayable resets the environments: next-step autoreset.
        self.metadata["autoreset_mode"] = gym.vector.AutoresetMode.NEXT_STEP
        self.ids = self.get_attr("env_id")
        self.steps = 0

    def __del__(self) -> None:
        """End the workers at once: Gymnasium would wait for a step that Ctrl+C interrupted."""
        if not getattr(self, "closed", True) and hasattr(self, "_state"):  # all have started
            self._end_workers()

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        try:
            self.obs, infos = super().reset(seed=seed, options=options)
        except (EOFError, ConnectionError):
            self._report_dead_workers()
        no_rewards = np.zeros(self.num_envs)
        if not all_finite(self.obs, no_rewards):
            self._fail_not_finite(no_rewards)
        self.ended = np.zeros(self.num_envs, bool)
        return self.obs, infos

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict]:
        self.steps += 1
        try:
            outcome = super().step(actions)
        except (EOFError, ConnectionError):
            self._report_dead_workers()
        self.obs = outcome[0]
        if not all_finite(self.obs, outcome[1]):
            self._fail_not_finite(outcome[1])
        self.ended = outcome[2] | outcome[3]
        return outcome

    def _start_new_games(self, which: np.ndarray) -> None:
        for i in np.flatnonzero(which):
            self.parent_pipes[i].send(("_call", ("start_new_game", (), {})))
            self.parent_pipes[i].recv()

    def _raise_if_errors(self, successes: Sequence[bool]) -> None:
        """Replace Gymnasium's, which logs the worker's whole traceback and raises its exception."""
        if all(successes):
            return
        index, _, error, _ = self.error_queue.get()
        self._end_workers()
        if isinstance(error, EnvironmentFailed):
            self._fail(error.line, error.trace)
        what = f"its observation is not in its space ({one_line(error)})"
        self._fail(f"environment {index} ({self.ids[index]}) failed in step {self.steps}: {what}")

    def _report_dead_workers(self) -> None:
        """Stop with a line that names the environment whose process died."""
        dead: list[int] = []
        until = time.monotonic() + 5
        while (
            not dead and time.monotonic() < until
        ):  # a pipe closes a little before its process ends
            time.sleep(0.01)
            dead = [i for i, worker in enumerate(self.processes) if not worker.is_alive()]
        codes = [self.processes[i].exitcode for i in dead]
        self._end_workers()
        for i, code in zip(dead, codes, strict=True):
            how = f"exit status {code}"
            if code is not None and code < 0:
                how = f"killed by {signal.Signals(-code).name}"
            what = f"its process ended ({how})"
            self._fail(f"environment {i} ({self.ids[i]}) failed in step {self.steps}: {what}")
        self._fail(f"--async-envs: a process no longer answers in step {self.steps}")

    def _end_workers(self) -> None:
        self._state = AsyncState.DEFAULT  # else closing would wait for a dead worker
        self.close_extras(terminate=True)
        self.closed = True


class OfAllRanks:
    """The environments of all processes that train one agent, as one state of a checkpoint."""

    nbytes = 0

    def __init__(self, envs: Any, rank: int, world_size: int):
        self.envs = envs
        self.rank = rank
        self.world_size = world_size

    @property
    def stop(self) -> Callable[[str], None]:
        return self.envs.stop

    @stop.setter
    def stop(self, stop: Callable[[str], None]) -> None:
        self.envs.stop = stop

    def state_dict(self) -> dict[str, list[State]]:
        own = self.envs.state_dict()
        if self.world_size == 1:
            return {"ranks": [own]}
        from torch import distributed

        states: list[Any] = [None] * self.world_size
        distributed.all_gather_object(states, own)
        return {"ranks": states}

    def load_state_dict(self, saved: dict[str, list[State]]) -> None:
        before = len(saved["ranks"])
        message = f"--resume needs {before} processes, as before; there are {self.world_size}"
        require(before == self.world_size, message)
        self.envs.load_state_dict(saved["ranks"][self.rank])

    def close(self) -> None:
        self.envs.close()


def _make(make: Callable[[], gym.Env], index: int) -> Replayable:
    if multiprocessing.parent_process() is not None:  # the main process handles Ctrl+C
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return Replayable(make(), index)


def _select(obs: Any, i: int) -> Any:
    """The observation of environment `i`; batches may be dictionaries or tuples."""
    if isinstance(obs, dict):
        return {name: _select(x, i) for name, x in obs.items()}
    return tuple(_select(x, i) for x in obs) if isinstance(obs, tuple) else obs[i]


def _same(a: Any, b: Any) -> bool:
    """Whether two observations are equal; NaN equals NaN."""
    if isinstance(b, dict):
        return a is not None and all(_same(a[name], b[name]) for name in b)
    if isinstance(b, tuple):
        return a is not None and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if a is None:
        return False
    a, b = np.asarray(a), np.asarray(b)
    return np.array_equal(a.astype(b.dtype), b, equal_nan=b.dtype.kind == "f")
