"""Environments whose open episode can be stored: they are replayed.

Most environments cannot be serialised. Each game (a reset of the innermost environment) is seeded
by its number. A checkpoint stores that number and the actions since the game began; a resumed run
makes a new environment and takes the same actions again, which does not affect training.
"""

from typing import Any

import gymnasium as gym
import numpy as np

from cleanrl_utils.environments import failures
from cleanrl_utils.environments.failures import EnvironmentFailed, OldApi
from cleanrl_utils.errors import require
from cleanrl_utils.running.rng import derive_seed
from cleanrl_utils.running.stored import one_line

State = dict[str, Any]


class SeededGames(gym.Wrapper):
    """The innermost wrapper: seeds each game by its number."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.ale = getattr(env.unwrapped, "ale", None)
        self.begin(seed=0)

    def begin(self, seed: int, number: int = 0) -> None:
        """Let the next reset start game `number` + 1 of this seed."""
        self.seed = seed
        self.number = number
        self.rom_loaded = False
        self.console: np.ndarray | None = None
        self.outcome: Any = None  # what the environment itself returned for the latest step

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        self.outcome = outcome = self.env.step(action)
        if len(outcome) != 5:
            raise OldApi(f"its step returns {len(outcome)} values: {failures.STEP_API}")
        return outcome

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.number += 1
        seed = derive_seed(self.seed, self.number)
        if self.ale is None or not self.rom_loaded:
            self.rom_loaded = True
            return self._reset(seed=seed, options=options)
        # ALE's reset(seed) would load the ROM again, in 130 ms: keep the console's state instead.
        if self.console is None:
            self.console = np.frombuffer(self._clone(), np.uint8)
        self.unwrapped.np_random = gym.utils.seeding.np_random(seed)[0]
        return self.env.reset(options=options)

    def _reset(self, **arguments: Any) -> tuple[Any, dict]:
        try:
            result = self.env.reset(**arguments)
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise OldApi(f"its reset takes no seed or no options: {failures.RESET_API}") from None
        if not isinstance(result, tuple) or len(result) != 2:
            raise OldApi(f"its reset returns no (observation, info): {failures.RESET_API}")
        return result

    def _clone(self) -> bytes:
        assert self.ale is not None
        return self.ale.cloneState(include_rng=True).serialize()

    def restore(self, seed: int, number: int, console: np.ndarray | None) -> None:
        """Prepare the reset that starts game `number` + 1."""
        self.begin(seed, number)
        if console is not None and self.ale is not None:
            import ale_py

            self.env.reset(seed=seed)
            self.ale.restoreState(ale_py.ALEState(np.asarray(console).tobytes()))
            self.rom_loaded = True
            self.console = console


def insert_seeds(env: gym.Env) -> tuple[gym.Env, SeededGames]:
    """Put SeededGames below all wrappers of `env`."""
    if not isinstance(env, gym.Wrapper):
        games = SeededGames(env)
        return games, games
    lowest = env
    while isinstance(lowest.env, gym.Wrapper):
        lowest = lowest.env
    lowest.env = games = SeededGames(lowest.env)
    return env, games


def count_statistics(env: gym.Env) -> int:
    """The number of RecordEpisodeStatistics wrappers; the second one fails when an episode ends."""
    found = 0
    while isinstance(env, gym.Wrapper):
        found += isinstance(env, gym.wrappers.RecordEpisodeStatistics)
        env = env.env
    return found


class Replayable(gym.Wrapper):
    """The outermost wrapper: resets by itself after an episode and records the current game."""

    def __init__(self, env: gym.Env, index: int = 0):
        self.env_id = failures.env_id(env)
        twice = f"--env-id {self.env_id} wraps itself in RecordEpisodeStatistics, as this script"
        require(count_statistics(env) < 2, f"{twice} does: leave out that wrapper")
        self.index = index
        env, self.games = insert_seeds(env)
        super().__init__(env)
        self.ended = False
        self.calls: list[Any] = []  # actions since the game began, None for a reset
        self.game_before = 0
        self.console_before: np.ndarray | None = None
        self.to_replay: State = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        if seed is not None:
            self.games.begin(seed)
        number = self.games.number
        self.games.console = None
        self.ended = False
        try:
            obs, info = self.env.reset(seed=seed, options=options)
        except Exception as error:
            raise self._failed(error) from None
        self._record(None, number)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        if self.ended:
            obs, info = self.reset()
            return obs, 0.0, False, False, info
        number = self.games.number
        try:
            outcome = self.env.step(action)
            self.ended = bool(outcome[2] or outcome[3])
        except Exception as error:
            raise self._failed(error) from None
        self._record(action.copy() if isinstance(action, np.ndarray) else action, number)
        return outcome

    def _record(self, action: Any, number: int) -> None:
        if self.games.number != number:  # a new game began: nothing older matters
            self.calls = []
            self.game_before = number
            self.console_before = self.games.console
            self.games.console = None
        self.calls.append(action)

    def _failed(self, error: Exception) -> EnvironmentFailed:
        if isinstance(error, OldApi):
            return EnvironmentFailed(self.failure_line(str(error)))
        cause = failures.check_statistics(error) or failures.check_outcome(self.games.outcome)
        cause = cause or one_line(error)
        return EnvironmentFailed(self.failure_line(cause), failures.users_traceback(error))

    def failure_line(self, cause: str) -> str:
        """The error line of this environment: its index, id, game and step, and the cause."""
        where = f"step {len(self.calls)} of its game {self.games.number}"
        return f"environment {self.index} ({self.env_id}) failed in {where}: {cause}"

    def saved_state(self) -> State:
        actions = [action for action in self.calls if action is not None]
        return {
            "seed": self.games.seed,
            "game_before": self.game_before,
            "console_before": self.console_before,
            "game": self.games.number,
            "resets": np.array([action is None for action in self.calls], bool),
            "actions": np.array(actions) if actions else None,
            "ended": self.ended,
        }

    def replay(self) -> Any:
        """Replay the game of `to_replay`; returns its last observation, None if it differs."""
        saved = self.to_replay
        self.games.restore(saved["seed"], saved["game_before"], saved["console_before"])
        self.ended = False
        actions = iter(() if saved["actions"] is None else saved["actions"])
        obs = None
        try:
            for is_reset in saved["resets"]:
                obs = self.reset()[0] if is_reset else self.step(next(actions))[0]
        except Exception:  # the environment refuses the same actions
            return None
        same = (self.games.number, self.ended) == (saved["game"], saved["ended"])
        return obs if same else None

    def start_new_game(self) -> None:
        """Make the next step start a new game."""
        self.games.begin(self.to_replay["seed"], self.to_replay["game"])
        self.ended = True
