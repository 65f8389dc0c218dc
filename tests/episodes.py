"""Artificial episodes with known frames, to fill replay memories."""

from types import SimpleNamespace

import numpy as np
import torch
from gymnasium.spaces import Box

from cleanrl_utils.replay.buffers import Batch, FrameReplayBuffer, ReplayBuffer

STACK = 4
FRAMES = Box(0, 2**30, (STACK, 2, 2), np.int32)  # numbers large enough for every frame to differ


class Episodes:
    """Vector environments in next-step autoreset whose frames are the numbers 1, 2, 3, ...

    It stores each real transition, with stacks as Gymnasium's FrameStackObservation makes them.
    """

    def __init__(self, num_envs: int, seed: int = 0, ends: float = 0.2):
        self.num_envs = num_envs
        self.ends = ends
        self.rng = np.random.default_rng(seed)
        self.frame = 0
        self.turn = 0
        self.remembered: list[SimpleNamespace] = []
        self.reset()

    def reset(self) -> None:
        self.stacks = [[self.new_frame()] * STACK for _ in range(self.num_envs)]
        self.ended = np.zeros(self.num_envs, bool)

    def new_frame(self) -> int:
        self.frame += 1
        return self.frame

    def step(self) -> tuple[np.ndarray, ...]:
        """Step all environments; returns the arguments of `add`."""
        obs = np.array(self.stacks)
        real = ~self.ended
        for i, stack in enumerate(self.stacks):
            frame = self.new_frame()
            self.stacks[i] = [frame] * STACK if self.ended[i] else [*stack[1:], frame]
        next_obs = np.array(self.stacks)
        self.ended = real & (self.rng.random(self.num_envs) < self.ends)
        terminated = self.ended & (self.rng.random(self.num_envs) < 0.5)  # the rest is truncated
        actions = self.rng.uniform(-1, 1, (self.num_envs, 2)).astype(np.float32)
        rewards = self.rng.normal(size=self.num_envs).astype(np.float32)
        for i in np.flatnonzero(real):
            step = (obs[i], next_obs[i], actions[i], rewards[i], terminated[i])
            truncated = self.ended[i] and not terminated[i]
            entry = SimpleNamespace(turn=self.turn, env=i, step=step, truncated=truncated)
            self.remembered.append(entry)
        self.turn += 1
        return obs, next_obs, actions, rewards, terminated, real


def pictures(stacks: np.ndarray) -> np.ndarray:
    return np.broadcast_to(stacks[..., None, None], (*stacks.shape, 2, 2)).astype(np.int32)


def everything(buffer: ReplayBuffer | FrameReplayBuffer) -> Batch:
    """A batch with every transition that `sample` can return, each once."""
    size = len(buffer)
    buffer._draw = lambda batch_size, limit: torch.arange(int(limit))
    try:
        return buffer.sample(size)
    finally:
        del buffer._draw
