"""PettingZoo's classic games of two players who take turns, for one agent that plays both.

    --env-id pettingzoo/connect_four_v3

A Gymnasium environment of such a game has a random opponent: this is what evaluation plays. With
`opponent="self"` it has the observations and actions of both players, and `SelfPlay` makes a row of
each player, as if it were an environment of its own. The waiting player has a single valid action,
which is ignored. Its probability is 1, so nothing is learned from it. Games of self-play begin with
up to RANDOM_MOVES random moves: otherwise all games are alike once the agent plays well, and it
does not learn to answer weak moves.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from cleanrl_utils.environments.vector import SyncVectorEnv
from cleanrl_utils.errors import BadInput, missing_package, require

PREFIX = "pettingzoo/"
RANDOM_MOVES = 8  # at most, before self-play


def is_board_game(env_id: str) -> bool:
    return env_id.startswith(PREFIX)


class TwoPlayers(gym.Env):
    """A game against a random opponent, or with the observations and actions of both players.

    An observation is the board as the player sees it, and 1 if it is the player's turn, else 0: the
    board does not tell, and the values of both are quite different.
    Rewards come at the end of a game: 1 for the winner, -1 for the loser, 0 for a draw. Against a
    random opponent, the agent begins every second game on average.
    """

    def __init__(self, game: Any, opponent: str = "random", render_mode: str | None = None):
        self.game = game
        self.opponent = opponent
        self.render_mode = render_mode
        self.metadata = {**game.metadata, "render_modes": ["rgb_array"]}
        self.players = list(game.possible_agents)
        require(len(self.players) == 2, "--env-id: this script plays games of two players")
        self.seen = game.observation_space(self.players[0])["observation"]
        num_actions = game.action_space(self.players[0]).n
        num_seen = gym.spaces.flatdim(self.seen) + 1  # whose turn it is
        both = (2,) if opponent == "self" else ()
        self.observation_space = gym.spaces.Dict(
            observation=gym.spaces.Box(-np.inf, np.inf, (*both, num_seen), np.float32),
            action_mask=gym.spaces.MultiBinary((*both, num_actions)),
        )
        self.action_space: gym.Space = gym.spaces.Discrete(num_actions)
        if opponent == "self":
            self.action_space = gym.spaces.MultiDiscrete([num_actions, num_actions])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.game.reset(seed=int(self.np_random.integers(2**31)))
        self.player = int(self.np_random.integers(2))  # the agent, against a random opponent
        if self.opponent == "self":
            self._open()
        self._move_opponent()
        return self._observe(), {"rewards": np.zeros(2)}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        own_action = action[self._mover()] if self.opponent == "self" else action
        self.game.step(int(own_action))
        self._move_opponent()
        over = all(self.game.terminations.values())
        cut = any(self.game.truncations.values())
        rewards = np.zeros(2)
        if over or cut:
            rewards += [self.game.rewards[player] for player in self.players]
        own = 0 if self.opponent == "self" else self.player
        return self._observe(), float(rewards[own]), over, cut and not over, {"rewards": rewards}

    def _mover(self) -> int:
        return self.players.index(self.game.agent_selection)

    def _open(self) -> None:
        """Random moves; a game that they end is begun again."""
        for _ in range(self.np_random.integers(RANDOM_MOVES + 1)):
            self._move_at_random()
            if any(self.game.terminations.values()):
                self.game.reset(seed=int(self.np_random.integers(2**31)))

    def _move_opponent(self) -> None:
        if self.opponent == "self":
            return
        while self._mover() != self.player and not any(self.game.terminations.values()):
            self._move_at_random()

    def _move_at_random(self) -> None:
        mask = self.game.observe(self.game.agent_selection)["action_mask"]
        self.game.step(int(self.np_random.choice(np.flatnonzero(mask))))

    def _observe(self) -> dict[str, np.ndarray]:
        who = self.players if self.opponent == "self" else [self.players[self.player]]
        views = [self.game.observe(player) for player in who]
        boards = [gym.spaces.flatten(self.seen, x["observation"]) for x in views]
        turns = [player == self.game.agent_selection for player in who]
        seen = np.column_stack([boards, turns])
        masks = np.array([x["action_mask"] for x in views], np.int8)
        if self.opponent == "self":
            masks[1 - self._mover()] = np.eye(masks.shape[1])[0]  # waits
            return {"observation": seen.astype(np.float32), "action_mask": masks}
        return {"observation": seen[0].astype(np.float32), "action_mask": masks[0]}

    def render(self) -> Any:
        return self.game.render()

    def close(self) -> None:
        self.game.close()


def make_board_game(
    name: str, opponent: str = "random", render_mode: str | None = None
) -> TwoPlayers:
    return TwoPlayers(find_game(name).raw_env(render_mode=render_mode), opponent, render_mode)


def find_game(name: str) -> Any:
    try:
        importlib.import_module("pettingzoo.classic")
    except ImportError:
        raise missing_package("pettingzoo", "pettingzoo") from None
    try:
        with warnings.catch_warnings():  # of modules, in favour of a registry to come
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(f"pettingzoo.classic.{name}")
    except ImportError as error:
        games = "tictactoe_v3, connect_four_v3, go_v5, ..."
        raise BadInput(f"--env-id {PREFIX}{name}: {error}; PettingZoo has {games}") from None


class SelfPlay:
    """The players of several games as rows of one vector environment: two rows for each game.

    The games return the observations of both players followed by the masks of both, as
    MaskInObservation makes them of TwoPlayers; a row is an observation and its mask.
    """

    nbytes = 0

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env]]):
        self.games = SyncVectorEnv(env_fns)
        self.num_envs = 2 * len(env_fns)
        self.num_actions = int(self.games.single_action_space.nvec[0])  # type: ignore[attr-defined]
        size = self.games.single_observation_space.shape[0] // 2  # type: ignore[index]
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.single_action_space = gym.spaces.Discrete(self.num_actions)
        batch = gym.vector.utils.batch_space
        self.observation_space = batch(self.single_observation_space, self.num_envs)
        self.action_space = batch(self.single_action_space, self.num_envs)

    @property
    def obs(self) -> np.ndarray:
        num_seen = 2 * (self.single_observation_space.shape[0] - self.num_actions)
        seen = self.games.obs[:, :num_seen].reshape(self.num_envs, -1)
        masks = self.games.obs[:, num_seen:].reshape(self.num_envs, -1)
        return np.concatenate([seen, masks], 1)

    @property
    def ended(self) -> np.ndarray:
        return self.games.ended.repeat(2)

    @property
    def stop(self) -> Callable[[str], None]:
        return self.games.stop

    @stop.setter
    def stop(self, stop: Callable[[str], None]) -> None:
        self.games.stop = stop  # type: ignore[method-assign]

    def reset(self, *, seed: Any = None) -> tuple[np.ndarray, dict]:
        _, infos = self.games.reset(seed=seed)
        return self.obs, infos

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        _, _, terminated, truncated, infos = self.games.step(actions.reshape(-1, 2))
        rewards = infos["rewards"].ravel()
        return self.obs, rewards, terminated.repeat(2), truncated.repeat(2), infos

    def state_dict(self) -> dict[str, Any]:
        return self.games.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.games.load_state_dict(saved)

    def close(self) -> None:
        self.games.close()
