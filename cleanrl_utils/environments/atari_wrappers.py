"""The Atari wrappers that Gymnasium lacks. Each script composes its own chain, in this order:

    # else ALE/Breakout-v5 skips 4 frames by itself
    env = gym.make(env_id, frameskip=1, obs_type="grayscale")
    env = gym.wrappers.RecordEpisodeStatistics(env)  # below EpisodicLife: counts whole games
    env = NoopReset(env)
    env = MaxAndSkip(env)
    env = EpisodicLife(env)
    env = FireReset(env)
    env = ClipReward(env)
    ... then Gymnasium's resize and frame stack; ALE itself returns grayscale images

`BreakoutNoFrameskip-v4` has `frameskip=1` anyway, so that the line is right for both kinds of id.
A game may end while EpisodicLife or FireReset resets. Its statistics are then in the info of that
reset, which a vector environment returns like the info of any step: every game is logged.
"""

from functools import reduce
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

from cleanrl_utils.errors import BadInput, require

NOOP, FIRE = 0, 1
Frame = np.ndarray
Info = dict[str, Any]
Step = tuple[Frame, SupportsFloat, bool, bool, Info]


class NoopReset(gym.Wrapper):
    """Start each game with 1 to `noop_max` no-op frames: random starts of a deterministic game."""

    def __init__(self, env: gym.Env, noop_max: int = 30):
        super().__init__(env)
        assert _meanings(env)[NOOP] == "NOOP"
        self.noop_max = noop_max

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Frame, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        for _ in range(self.np_random.integers(1, self.noop_max + 1)):
            obs, _, terminated, truncated, new_info = self.env.step(NOOP)
            info = info | new_info
            if terminated or truncated:  # a game without play: drop its statistics
                obs, info = self.env.reset()
        return obs, info


class MaxAndSkip(gym.Wrapper):
    """Repeat an action for `skip` frames and return the pixelwise maximum of the last two.

    The Atari draws some objects only on every other frame.
    """

    def __init__(self, env: gym.Env, skip: int = 4):
        super().__init__(env)
        self.skip = skip

    def step(self, action: int) -> Step:
        frames: list[Frame] = []
        total_reward: Any = 0.0  # a vector in games of several players
        for _ in range(self.skip):
            frame, reward, terminated, truncated, info = self.env.step(action)
            frames.append(frame)
            total_reward = total_reward + reward
            if terminated or truncated:
                break  # `frames` holds only frames of this step
        return reduce(np.maximum, frames[-2:]), total_reward, terminated, truncated, info


class EpisodicLife(gym.Wrapper):
    """End the episode when a life is lost, so that the agent learns to avoid it.

    The game itself continues, so that the agent also sees what comes after the first life.
    """

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.lives = 0
        self.game_goes_on = False

    def step(self, action: int) -> Step:
        obs, reward, terminated, truncated, info = self.env.step(action)
        # at 0 lives wait for the game to end: openai/baselines saw Qbert continue for some frames
        lost_life = 0 < info["lives"] < self.lives
        self.lives = info["lives"]
        self.game_goes_on = lost_life and not (terminated or truncated)
        return obs, reward, terminated or lost_life, truncated, info

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Frame, Info]:
        """Start a new game, or after a lost life take one no-op step into the next life.

        With a seed it is always a new game, because a seed means a known state.
        """
        info: Info = {}
        over = not self.game_goes_on or seed is not None
        if not over:
            obs, _, terminated, truncated, info = self.env.step(NOOP)
            over = terminated or truncated
        if over:
            obs, new_info = self.env.reset(seed=seed, options=options)
            info = info | new_info  # keep the statistics of a game that the no-op step ended
        self.lives = info["lives"]
        self.game_goes_on = False
        return obs, info


class EnvPoolLives(EpisodicLife):
    """EpisodicLife above MaxAndSkip that starts games and lives as EnvPool does.

    Both begin with some no-op frames and, in games that have it, one frame of FIRE. It replaces
    NoopReset and FireReset.
    """

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
        self.lives = info["lives"]
        self.game_goes_on = False
        return obs, info


class FireReset(gym.Wrapper):
    """Press FIRE after a reset in games that have it, as many do not start without it.

    Action 2 follows, as in openai/baselines.
    """

    def __init__(self, env: gym.Env, attempts: int = 10):
        super().__init__(env)
        meanings = _meanings(env)
        self.attempts = attempts if meanings[FIRE] == "FIRE" and len(meanings) > 2 else 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Frame, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        for _ in range(self.attempts):
            for action in (FIRE, 2):
                obs, _, terminated, truncated, new_info = self.env.step(action)
                info = info | new_info  # keep the statistics of a game that ended here
                if terminated or truncated:
                    break
            else:
                return obs, info
            obs, new_info = self.env.reset()
            info = info | new_info
        return obs, info  # FIRE ended every attempt: start without it


class Grayscale(gym.wrappers.GrayscaleObservation):
    """Gymnasium's wrapper, for environments other than ALE's; stops if there are no RGB images."""

    def __init__(self, env: gym.Env):
        env_id = getattr(env.spec, "id", env.unwrapped)
        has_images = len(env.observation_space.shape or ()) == 3
        several = isinstance(env.observation_space, gym.spaces.Dict | gym.spaces.Tuple)
        instead = "ppo_multi_input.py" if several else "ppo.py or dqn.py"
        require(has_images, f"--env-id {env_id}: has no images: use {instead}")
        try:
            super().__init__(env)
        except AssertionError:
            found = f"--env-id {env_id}: has images {env.observation_space}"
            raise BadInput(f"{found}, needs Box(0, 255, (height, width, 3), uint8)") from None


class ClipReward(gym.RewardWrapper):
    """Replace rewards by their sign, so that one learning rate suits games of any scale."""

    def reward(self, reward: Any) -> Any:
        return np.sign(reward)


def _meanings(env: gym.Env) -> list[str]:
    return env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]  # ALE's own
