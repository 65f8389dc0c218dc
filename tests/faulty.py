"""Environments that go wrong, for the tests of the tools: faulty:Crash-v0 and its like."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

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


gym.register("NoLevel-v0", NoLevel)
gym.register("Crash-v0", Faulty, max_episode_steps=500)
gym.register("KilledOnce-v0", KilledOnce, max_episode_steps=500)
