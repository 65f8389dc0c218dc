"""The Atari wrappers that Gymnasium lacks. Each script composes its own chain, in this order:

    # ALE/Breakout-v5 would skip 4 frames by itself
    env = gym.make(env_id, frameskip=1, obs_type="grayscale")
    env = gym.wrappers.RecordEpisodeStatistics(env)  # below EpisodicLife: it counts whole games
    env = NoopReset(env)
    env = MaxAndSkip(env)
    env = EpisodicLife(env)
    env = FireReset(env)
    env = ClipReward(env)
    ... then Gymnasium's resize and frame stack; the console itself is asked for gray pictures

`frameskip=1` is what `BreakoutNoFrameskip-v4` has anyway, so the line serves both kinds of id.
A game may end while EpisodicLife or FireReset resets. Its statistics are then in the info of that
reset, which a vector environment hands on like the info of any step: no game goes unlogged.
"""

from functools import reduce
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

from cleanrl_utils.errors import require

NOOP, FIRE = 0, 1
Frame = np.ndarray
Info = dict[str, Any]
Step = tuple[Frame, SupportsFloat, bool, bool, Info]


class NoopReset(gym.Wrapper):
    """Start each game with 1 to `noop_max` idle frames: a deterministic game gets random starts."""

    def __init__(self, env: gym.Env, noop_max: int = 30):
        super().__init__(env)
        assert _meanings(env)[NOOP] == "NOOP"
        self.noop_max = noop_max

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Frame, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        for _ in range(self.np_random.integers(1, self.noop_max + 1)):
            obs, _, terminated, truncated, new_info = self.env.step(NOOP)
            info = info | new_info
            if terminated or truncated:  # nobody played that game: its statistics are dropped
                obs, info = self.env.reset()
        return obs, info


class MaxAndSkip(gym.Wrapper):
    """Repeat an action for `skip` frames and show the brighter of the last two, pixel by pixel:
    the Atari draws some objects on every other frame only."""

    def __init__(self, env: gym.Env, skip: int = 4):
        super().__init__(env)
        self.skip = skip

    def step(self, action: int) -> Step:
        frames: list[Frame] = []
        total_reward: Any = 0.0  # a vector where several play
        for _ in range(self.skip):
            frame, reward, terminated, truncated, info = self.env.step(action)
            frames.append(frame)
            total_reward = total_reward + reward
            if terminated or truncated:
                break  # `frames` holds this step's frames alone, so the last ones are never stale
        return reduce(np.maximum, frames[-2:]), total_reward, terminated, truncated, info


class EpisodicLife(gym.Wrapper):
    """A lost life ends the episode for the learner, who so learns to value it; the game goes on, so
    that what lies behind the first life is seen too."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.lives = 0
        self.game_goes_on = False

    def step(self, action: int) -> Step:
        obs, reward, terminated, truncated, info = self.env.step(action)
        # at 0 lives the game says when it is over: openai/baselines saw Qbert go on for a while
        lost_life = 0 < info["lives"] < self.lives
        self.lives = info["lives"]
        self.game_goes_on = lost_life and not (terminated or truncated)
        return obs, reward, terminated or lost_life, truncated, info

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Frame, Info]:
        """A new game, unless a life was just lost: then one idle step into the next life.

        With a seed it is always a new game: a seed promises a known state, also in mid-game."""
        info: Info = {}
        over = not self.game_goes_on or seed is not None
        if not over:
            obs, _, terminated, truncated, info = self.env.step(NOOP)
            over = terminated or truncated
        if over:
            obs, new_info = self.env.reset(seed=seed, options=options)
            info = info | new_info  # keeps the statistics of a game that the idle step ended
        self.lives, self.game_goes_on = info["lives"], False
        return obs, info


class EnvPoolLives(EpisodicLife):
    """EpisodicLife above MaxAndSkip, with the starts of EnvPool: games and lives alike begin with
    some idle frames and one frame of FIRE, in games that have it. No NoopReset, no FireReset."""

    def __init__(self, env: MaxAndSkip, noop_max: int = 30):
        super().__init__(env)
        self.frames = env.env
        self.noop_max = noop_max
        self.fire = "FIRE" in _meanings(env)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Frame, Info]:
        info: Info = {}
        if not self.game_goes_on or seed is not None:
            obs, info = self.env.reset(seed=seed, options=options)
        idle = self.np_random.integers(1, self.noop_max + 1) - self.fire
        for action in [NOOP] * idle + [FIRE] * self.fire:
            obs, _, terminated, truncated, new_info = self.frames.step(action)
            info = info | new_info
            if terminated or truncated:
                obs, new_info = self.env.reset()
                info = info | new_info
        self.lives, self.game_goes_on = info["lives"], False
        return obs, info


class FireReset(gym.Wrapper):
    """Press FIRE after a reset, in games that have it: many stand still until then. And action 2
    after it, as openai/baselines does."""

    def __init__(self, env: gym.Env, attempts: int = 10):
        super().__init__(env)
        meanings = _meanings(env)
        self.attempts = attempts if meanings[FIRE] == "FIRE" and len(meanings) > 2 else 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Frame, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        for _ in range(self.attempts):
            for action in (FIRE, 2):
                obs, _, terminated, truncated, new_info = self.env.step(action)
                info = info | new_info  # the newest counts, and what an ended game said is kept
                if terminated or truncated:
                    break
            else:
                return obs, info
            obs, new_info = self.env.reset()
            info = info | new_info
        return obs, info  # FIRE ends every episode here: better unpressed than terminal


class Grayscale(gym.wrappers.GrayscaleObservation):
    """Gymnasium's, for games that are not the console's own; it says so of what is no picture."""

    def __init__(self, env: gym.Env):
        game = getattr(env.spec, "id", env.unwrapped)
        pictures = len(env.observation_space.shape or ()) == 3
        require(pictures, f"--env-id {game}: this script is for pictures; ppo.py or dqn.py are not")
        super().__init__(env)


class ClipReward(gym.RewardWrapper):
    """The sign of the reward: one learning rate then fits games that count by 1 or by 1,000."""

    def reward(self, reward: Any) -> Any:
        return np.sign(reward)


def _meanings(env: gym.Env) -> list[str]:
    return env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]  # ALE's own
