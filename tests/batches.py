"""Spaces and random batches of transitions for networks of vectors and of pictures."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from cleanrl_utils.replay.buffers_jax import Batch

NUM_ACTIONS = 3
VECTORS: Any = SimpleNamespace(
    num_envs=2,
    single_observation_space=Box(-1, 1, (4,), np.float32),
    observation_space=Box(-1, 1, (2, 4), np.float32),
    single_action_space=Discrete(NUM_ACTIONS),
)
PIXELS: Any = SimpleNamespace(
    num_envs=2,
    single_observation_space=Box(0, 255, (4, 84, 84), np.uint8),
    observation_space=Box(0, 255, (2, 4, 84, 84), np.uint8),
    single_action_space=Discrete(NUM_ACTIONS),
)


def make_batch(envs: Any, size: int = 8) -> Batch:
    rng = np.random.default_rng(0)
    shape = (2, size, *envs.single_observation_space.shape)
    if envs is PIXELS:
        obs = rng.integers(0, 256, shape, np.uint8)
    else:
        obs = rng.normal(size=shape).astype(np.float32)
    rewards, terminated = rng.normal(size=size), rng.random(size) < 0.3
    actions = rng.integers(NUM_ACTIONS, size=size)
    return Batch(*obs, actions, rewards.astype(np.float32), terminated.astype(np.float32))
