"""PettingZoo's Atari games, several players with one screen, as Gymnasium environments.

    env = make_game("pong_v3")     # frames, and a reward for each player
    ...                            # wrappers of frames
    env = EachPlayer(env)          # observations of shape (players, ...), one action per player

The reward that `EachPlayer` returns is the first player's: evaluation is self-play and reports the
return of the first player. The infos hold those of all players: `rewards`, `returns` of an ended
episode, and `dead`, the players who are out. Vector environments return them as (games, players).
"""

import difflib
import importlib
import os
import pkgutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from cleanrl_utils.environments.making import record_video
from cleanrl_utils.errors import BadInput, missing_package, require


def make_game(env_id: str, video_folder: str | Path | None = None) -> gym.Env:
    """Make an Atari game of PettingZoo, e.g. pong_v3, or the `parallel_env` of module:name."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    mode = None if video_folder is None else "rgb_array"
    if ":" in env_id:
        module, _, name = env_id.partition(":")
        try:
            maker = getattr(importlib.import_module(module), name).parallel_env
        except (ImportError, AttributeError) as error:
            raise BadInput(f"--env-id {env_id}: {error}") from None
        game = maker(render_mode=mode)
    else:
        game = find_atari(env_id).parallel_env(
            render_mode=mode,
            auto_rom_install_path=find_roms(),
            obs_type="grayscale_image",  # faster than converting colours later
        )
    env = Game(game, mode)
    return env if video_folder is None else record_video(env, Path(video_folder))


def count_players(env_id: str) -> int:
    game = make_game(env_id)
    game.close()
    return game.unwrapped.num_players  # type: ignore[attr-defined]


def find_roms() -> str:
    try:
        import ale_py
    except ImportError:
        raise missing_package("ale-py", "pettingzoo") from None
    return str(Path(ale_py.__file__).parent / "roms")


def find_atari(env_id: str) -> Any:
    try:
        import pettingzoo.atari as atari

        names = [x.name for x in pkgutil.iter_modules(atari.__path__) if "_v" in x.name]
        if env_id in names:
            return importlib.import_module(f"pettingzoo.atari.{env_id}")
    except ImportError:
        raise missing_package("pettingzoo[atari]", "pettingzoo") from None
    near = difflib.get_close_matches(env_id, names, n=3, cutoff=0.5) or names
    raise BadInput(f"--env-id: PettingZoo has no Atari game {env_id}; it has {', '.join(near)}")


class Game(gym.Env):
    """A PettingZoo game whose players see the same screen; a step returns one reward per player."""

    def __init__(self, game: Any, render_mode: str | None = None):
        inner = game.unwrapped  # without wrappers that only check: twice as fast
        self.game = game if hasattr(inner, "agent_iter") else inner  # keep the adapter of turns
        self.players = list(self.game.possible_agents)
        self.num_players = len(self.players)
        self.metadata = dict(game.metadata)
        self.render_mode = render_mode
        screens = [self.game.observation_space(player) for player in self.players]
        actions = [self.game.action_space(player) for player in self.players]
        equal = all(x == screens[0] for x in screens) and all(x == actions[0] for x in actions)
        discrete = isinstance(actions[0], gym.spaces.Discrete)
        require(equal and discrete, "--env-id: its players must all have the same discrete actions")
        shape: tuple[int, ...] = screens[0].shape or ()
        dtype = screens[0].dtype
        is_image = len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))
        require(
            is_image and dtype == np.uint8,
            "--env-id: its players must see uint8 images, gray or in colour; they see"
            f" {type(screens[0]).__name__} {shape} {dtype}",
        )
        shape = shape[:2] if shape[2:] == (1,) else shape
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.action_space = gym.spaces.MultiDiscrete([actions[0].n] * self.num_players)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        obs, _ = self.game.reset(seed=seed)
        self.dead = np.zeros(self.num_players, bool)
        return self._screen(obs), {"dead": self.dead.copy()}

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict]:
        """Step with one action per player, or with a single action for all of them."""
        actions = np.broadcast_to(action, self.num_players).tolist()
        by_player = {}
        for player, own_action, dead in zip(self.players, actions, self.dead, strict=True):
            if not dead:
                by_player[player] = own_action
        obs, reward, terminated, truncated, _ = self.game.step(by_player)
        self.dead |= [terminated.get(player, True) for player in self.players]
        rewards = np.array([reward.get(player, 0) for player in self.players], np.float64)
        game_over = bool(self.dead.all())
        info = {"dead": self.dead.copy()}
        return self._screen(obs), rewards, game_over, any(truncated.values()), info

    def _screen(self, obs: dict[str, np.ndarray]) -> np.ndarray:
        return next(iter(obs.values())).reshape(self.observation_space.shape)

    def get_action_meanings(self) -> list[str]:
        return ["NOOP"]  # action 0 of every Atari game

    def render(self) -> np.ndarray:
        return self.game.render()

    def close(self) -> None:
        self.game.close()


class EachPlayer(gym.Wrapper):
    """The frames, (n, height, width), once per player, with a one-hot code of that player.

    The code is one further channel per player: 1 for the observing player, 0 for the others.
    """

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.num_players = env.unwrapped.num_players  # type: ignore[attr-defined]
        frames, *size = env.observation_space.shape  # type: ignore[misc]
        shape = (self.num_players, frames + self.num_players, *size)
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.view = np.zeros(shape, np.uint8)
        self.view[:, frames:] = np.eye(self.num_players)[:, :, None, None]
        self.frames = frames

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        frames, info = self.env.reset(**kwargs)
        return self._observations(frames), info | {"rewards": np.zeros(self.num_players)}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        frames, rewards, terminated, truncated, info = self.env.step(action)
        if "episode" in info:
            info["returns"] = np.asarray(info["episode"]["r"])
            info["episode"] = info["episode"] | {"r": info["returns"][0]}
        info["rewards"] = rewards
        return self._observations(frames), float(rewards[0]), terminated, truncated, info

    def _observations(self, frames: np.ndarray) -> np.ndarray:
        self.view[:, : self.frames] = frames
        return self.view.copy()
