"""Replay memory for environments written in JAX: a ring of steps of all environments.

    ring = Ring.empty(slots, env, num_envs)
    ring = ring.store(obs, actions, step)               # in place of the oldest step
    slots, envs = ring.draw(key, batch_size, length)    # windows of consecutive steps
    rewards = ring.rewards[slots, envs]                 # (length, batch_size)

Its functions are pure and part of the compiled program; in a scan, XLA stores in place.
"""

from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax import Array, random


class Ring(NamedTuple):
    """Arrays (slots, num_envs, ...), and the number of steps ever stored."""

    obs: Array
    actions: Array
    next_obs: Array  # what the action led to, also where an episode ended
    rewards: Array
    terminated: Array
    done: Array
    stored: Array

    @classmethod
    def empty(cls, slots: int, env: Any, num_envs: int) -> Self:
        rows = (slots, num_envs)
        obs = jnp.zeros((*rows, *env.observation_space.shape))
        actions = jnp.zeros((*rows, *env.action_space.shape))
        flags = jnp.zeros(rows, bool)
        return cls(obs, actions, obs, jnp.zeros(rows), flags, flags, jnp.int32(0))

    def store(self, obs: Array, actions: Array, step: Any) -> Self:
        """Store what `advance` returned for these observations and actions."""
        row = {"obs": obs, "actions": actions, "next_obs": step.next_obs, "rewards": step.reward}
        row |= {"terminated": step.terminated, "done": step.done}
        slot = self.stored % len(self.rewards)
        arrays = {name: getattr(self, name).at[slot].set(x) for name, x in row.items()}
        return self._replace(stored=self.stored + 1, **arrays)

    def draw(self, key: Array, batch_size: int, length: int) -> tuple[Array, Array]:
        """Slots, (length, batch_size), and environments, (batch_size,), of windows of consecutive
        steps, drawn uniformly. A window never runs over the newest step into the oldest one; at
        least `length` steps must have been stored."""
        slot_key, env_key = random.split(key)
        size, num_envs = self.rewards.shape
        filled = jnp.minimum(self.stored, size)
        first = random.randint(slot_key, (batch_size,), 0, filled - length + 1)
        first += self.stored - filled  # the oldest step that is still there
        envs = random.randint(env_key, (batch_size,), 0, num_envs)
        return (first + jnp.arange(length)[:, None]) % size, envs
