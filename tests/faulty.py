"""Environments that go wrong, for the tests of the tools: faulty:Crash-v0 and its like."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv

AFTER = int(os.environ.get("FAULTY_AFTER", "600"))  # steps of all environments of a process
SEED = os.environ.get("FAULTY_SEED")  # go wrong only in the run that was called with this seed
CALLED = " ".join(sys.argv) + " "


class Faulty(CartPoleEnv):
    steps = 0

    def step(self, action: Any) -> Any:
        Faulty.steps += 1
        if Faulty.steps == AFTER and (SEED is None or f"--seed {SEED} " in CALLED):
            self.fail()
        return super().step(action)

    def fail(self) -> None:
        """Raise, always."""
        raise RuntimeError("the environment broke")


class KilledOnce(Faulty):
    def fail(self) -> None:
        """Die at once, as when the machine's memory is full; the second time go on."""
        marker = Path(os.environ["FAULTY_MARKER"])
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class NoLevel(CartPoleEnv):
    def __init__(self, render_mode: str | None = None):
        raise gym.error.Error("the level file is missing")


class Odd(CartPoleEnv):
    """Goes wrong in its 70th step, where a run of few steps has written a checkpoint."""

    when = 70
    taken = 0

    def step(self, action: Any) -> Any:
        self.taken += 1
        outcome = super().step(action)
        return self.spoil(*outcome) if self.taken >= self.when else outcome

    def spoil(self, obs: np.ndarray, reward: float, *rest: Any) -> Any:
        raise NotImplementedError


class Raises(Odd):
    def spoil(self, obs: np.ndarray, reward: float, *rest: Any) -> Any:
        return self.deeper()

    def deeper(self) -> Any:
        raise KeyError("no such level")


class NotFinite(Odd):
    def spoil(self, obs: np.ndarray, reward: float, *rest: Any) -> Any:
        return obs * np.float32(np.nan), reward, *rest


class NotFinitePendulum(PendulumEnv):
    when = 70
    taken = 0

    def step(self, action: Any) -> Any:
        self.taken += 1
        obs, *rest = super().step(action)
        return obs * np.float32(np.nan if self.taken >= self.when else 1), *rest


class NotFiniteReward(Odd):
    def spoil(self, obs: np.ndarray, reward: float, *rest: Any) -> Any:
        return obs, float("inf"), *rest


class WrongShape(Odd):
    def spoil(self, obs: np.ndarray, reward: float, *rest: Any) -> Any:
        return obs[:3], reward, *rest


class NoReward(Odd):
    def spoil(self, obs: np.ndarray, reward: float, *rest: Any) -> Any:
        return obs, None, *rest


class OwnEpisode(Odd):
    def spoil(self, obs: np.ndarray, reward: float, *rest: Any) -> Any:
        return obs, reward, True, False, {"episode": 3}


def with_statistics(**arguments: Any) -> gym.Env:
    return gym.wrappers.RecordEpisodeStatistics(CartPoleEnv(**arguments))


class NoSize(CartPoleEnv):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.observation_space = gym.spaces.Sequence(gym.spaces.Discrete(2))


class Dies(Odd):
    def spoil(self, obs: np.ndarray, reward: float, *rest: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class FailsToReset(Odd):
    """In the first reset after the step in which others fail."""

    def step(self, action: Any) -> Any:
        self.taken += 1
        obs, reward, *rest = CartPoleEnv.step(self, action)
        return obs, reward, self.taken >= self.when, *rest[1:]

    def reset(self, **arguments: Any) -> Any:
        if self.taken >= self.when:
            raise OSError("the simulator is gone")
        return super().reset(**arguments)


class OldStep(CartPoleEnv):
    """As written for gym: one flag says that an episode is done."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


class OldReset(CartPoleEnv):
    def reset(self, **arguments: Any) -> Any:
        return super().reset(**arguments)[0]


class OldSeed(CartPoleEnv):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()[0]


class NoPictures(CartPoleEnv):
    def __init__(self) -> None:
        super().__init__()


class NoRenderModes(CartPoleEnv):
    metadata: dict[str, Any] = {}


gym.register("WithStatistics-v0", with_statistics)
gym.register("NoSize-v0", NoSize)
gym.register("NoPictures-v0", NoPictures)
gym.register("NoRenderModes-v0", NoRenderModes)
for cls in (Raises, NotFinite, NotFiniteReward, WrongShape, NoReward, OwnEpisode, Dies):
    gym.register(f"{cls.__name__}-v0", cls, max_episode_steps=500)
for cls in (FailsToReset, OldStep, OldReset, OldSeed):
    gym.register(f"{cls.__name__}-v0", cls, max_episode_steps=500)
gym.register("NotFinitePendulum-v0", NotFinitePendulum, max_episode_steps=200)
gym.register("NoLevel-v0", NoLevel)
gym.register("Crash-v0", Faulty, max_episode_steps=500)
gym.register("KilledOnce-v0", KilledOnce, max_episode_steps=500)
