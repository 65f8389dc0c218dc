"""Replay memory in JAX: arrays on the device, and pure functions on them for compiled programs.

    memory = ReplayMemory(args.buffer_size, envs)
    memory.add(obs, next_obs, actions, rewards, terminated, real)
    batch = memory.sample(memory.replay, key, args.batch_size)  # in a program that gets the arrays

It takes what vector environments in next-step autoreset return; `real` is false where a step only
reset its environment, and such a step is never sampled. A step travels to the device as one NumPy
array, because the number of arrays costs more than their bytes.

`FrameMemory` does the same for stacked frames and keeps each frame once.
"""

from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import VectorEnv
from jax import Array, random

from cleanrl_utils.errors import require
from cleanrl_utils.replay.buffers import compact, stack_slots
from cleanrl_utils.replay.free_memory import free_host_memory
from cleanrl_utils.speed.jax_tools import arrays_of, with_arrays


class Replay(NamedTuple):
    rows: Array  # float32, one transition per row; the row beyond the capacity is never sampled
    added: Array  # number of transitions ever added


class Batch(NamedTuple):
    """Transitions, one per row. `next_obs` is what the action led to, also where an episode ended:
    a target bootstraps from it unless `terminated`, so truncation needs no special case."""

    obs: Array
    next_obs: Array
    actions: Array  # int32 where the action space is discrete
    rewards: Array
    terminated: Array  # 0.0 or 1.0


Batches = list[Batch]


class ReplayMemory:
    """Transitions of vector observations, one per row of a matrix: a batch is a single gather.

    `next_obs` lies beside `obs`, so the last observation of a truncated episode is its own.
    """

    def __init__(self, capacity: int, envs: VectorEnv, collect_steps: int = 1):
        observations = envs.single_observation_space
        actions = envs.single_action_space
        enough = capacity >= envs.num_envs
        require(enough, f"--buffer-size {capacity} is less than --num-envs {envs.num_envs}")
        self.capacity = capacity
        self.num_envs = envs.num_envs
        self.discrete = np.issubdtype(actions.dtype, np.integer)
        obs_shape: tuple[int, ...] = observations.shape or ()
        self.action_shape: tuple[int, ...] = actions.shape or ()
        self.shapes = [obs_shape, obs_shape, self.action_shape, (), ()]  # as in Batch
        self.width = sum(map(prod, self.shapes))
        check_memory(4 * (capacity + 1) * self.width, capacity)
        self.replay = Replay(jnp.zeros((capacity + 1, self.width)), jnp.int32(0))
        self._insert = jax.jit(self.insert, donate_argnums=0)
        self._layout: list[tuple[slice, tuple[int, ...]]] = []  # columns and shape of each field
        start = 0
        for shape in [*self.shapes, ()]:  # `real` comes last
            end = start + prod(shape)
            self._layout.append((slice(start, end), shape))
            start = end
        self._collected_shape = (collect_steps, self.num_envs, self.width + 1)
        self._collect_into(np.zeros(self._collected_shape, np.float32))

    def add(self, *step: Any) -> None:
        """Insert one step of all environments: the fields of Batch, and `real`."""
        self.replay = self._insert(self.replay, self.pack(*step))

    def collect(self, *step: Any) -> None:
        """Keep one step of all environments on the host, until a program takes all of them."""
        for column, field in zip(self._columns, step, strict=True):
            column[self._num_collected] = field
        self._num_collected += 1

    def take_collected(self) -> np.ndarray:
        """The collected steps, (collect_steps, num_envs, width + 1); a missing one is not real.
        The array is made anew each time: a program may still read the one before."""
        collected = self._collected
        self._collect_into(np.zeros(self._collected_shape, np.float32))
        return collected

    def _collect_into(self, collected: np.ndarray) -> None:
        self._collected = collected
        # Views of the fields of Batch and of `real`: assigning to them is faster than packing.
        self._columns = [
            collected[..., column].reshape(*collected.shape[:-1], *shape)
            for column, shape in self._layout
        ]
        self._num_collected = 0

    def pack(self, *step: Any) -> np.ndarray:
        """One step of all environments as one array, (num_envs, width + 1); `real` comes last."""
        columns = [np.asarray(field).reshape(self.num_envs, -1) for field in step]
        return np.concatenate(columns, 1, dtype=np.float32, casting="unsafe")

    def insert(self, replay: Replay, steps: Array) -> Replay:
        """The memory after one packed step or several, without those that are not real."""
        steps = steps.reshape(-1, self.width + 1)
        rows, number = compact(steps[:, self.width] > 0, replay.added, self.capacity)
        stored = replay.rows.at[rows].set(steps[:, : self.width], mode="promise_in_bounds")
        return Replay(stored, replay.added + number)

    def sample(self, replay: Replay, key: Array, batch_size: int) -> Batch:
        """Transitions drawn uniformly and with replacement."""
        return self.gather(replay, self.sample_indices(replay, key, batch_size))

    def sample_indices(self, replay: Replay, key: Array, *shape: int) -> Array:
        """Indices of such transitions, of this shape: one call can draw them for many batches."""
        return draw(key, shape, jnp.minimum(replay.added, self.capacity))

    def gather(self, replay: Replay, indices: Array) -> Batch:
        """The transitions at these indices."""
        rows = replay.rows.at[indices].get(mode="promise_in_bounds")
        ends = np.cumsum([prod(shape) for shape in self.shapes[:-1]])
        columns = zip(jnp.split(rows, ends, 1), self.shapes, strict=True)
        fields = [column.reshape(-1, *shape) for column, shape in columns]
        if self.discrete:
            fields[2] = fields[2].astype(jnp.int32)
        return Batch(*fields)

    @property
    def nbytes(self) -> int:
        return self.replay.rows.nbytes

    def state_dict(self) -> dict[str, Any]:
        return {"arrays": arrays_of(self.replay), "collected": self._collected}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.replay = with_arrays(self.replay, state["arrays"])
        self._collect_into(state["collected"])


class FrameReplay(NamedTuple):
    frames: Array  # (slots, height, width), each frame once and as it came
    rows: Array  # float32: action, reward and terminated
    real: Array
    age: Array  # number of earlier frames of a frame's episode, up to stack_size - 1
    order: Array  # slots of real transitions, [first, last) around a ring; see `compact`
    counters: Array  # steps added, first, last


class FrameMemory:
    """Transitions of stacked frames, (stack_size, height, width), and discrete actions: in JAX what
    FrameReplayBuffer of buffers.py is, where slots and ages are explained.

    A step writes to neighbouring slots only: a program that is given the arrays for good (donated)
    changes gigabytes in place.
    """

    def __init__(self, capacity: int, envs: VectorEnv):
        space = envs.single_observation_space
        assert space.shape, "stacked frames are wanted"
        self.stack_size, *frame = space.shape
        self.num_envs = envs.num_envs
        self.num_steps = capacity // envs.num_envs
        require(
            self.num_steps > self.stack_size,
            f"--buffer-size {capacity} is too small for stacks of {self.stack_size} frames from"
            f" --num-envs {self.num_envs}: it takes {self.num_envs * (self.stack_size + 1)} and"
            " more",
        )
        self.capacity = slots = self.num_steps * self.num_envs
        layout = [((slots, *frame), space.dtype), ((slots, 3), np.float32)]
        layout += [((slots,), bool), ((slots,), np.uint8), ((slots + 1,), np.int32)]
        layout += [((3,), np.int32)]
        check_memory(sum(prod(x) * np.dtype(kind).itemsize for x, kind in layout), capacity)
        self.replay = FrameReplay(*(jnp.zeros(shape, kind) for shape, kind in layout))
        self._insert = jax.jit(self.insert, donate_argnums=0)
        self._clear = jax.jit(self.cleared, donate_argnums=0)
        # A transition takes the stack of `obs` and one frame more: 3, 2, 1, 0 and -1 steps back.
        self.steps_back = np.arange(self.stack_size - 1, -2, -1)

    def add(self, *step: Any) -> None:
        """Insert one step of all environments: the fields of Batch, and `real`."""
        self.replay = self._insert(self.replay, self.pack(*step))

    def clear(self) -> None:
        """Forget everything."""
        self.replay = self._clear(self.replay)

    def pack(self, obs: np.ndarray, next_obs: np.ndarray, *rest: Any) -> tuple[np.ndarray, ...]:
        """One step of all environments: the newest frames; actions, rewards, terminated, real."""
        newest = np.stack([obs[:, -1], next_obs[:, -1]])
        return newest, np.stack(rest, 1, dtype=np.float32, casting="unsafe")

    def insert(self, replay: FrameReplay, step: tuple[Array, Array]) -> FrameReplay:
        """The memory after a packed step. The first slot it takes belongs to a frame of the oldest
        stack, whose transition can no longer be sampled."""
        (obs, next_obs), rest = step
        number, first, last = replay.counters
        oldest = (number + self.stack_size) % self.num_steps * self.num_envs
        lost = self._at(replay.real, oldest).sum()
        now = number % self.num_steps * self.num_envs
        before = (now - self.num_envs) % self.capacity
        after = (now + self.num_envs) % self.capacity
        real = rest[:, 3] > 0
        age = jnp.minimum(self._at(replay.age, before) + 1, self.stack_size - 1)
        places, added = compact(real, last, self.capacity)
        return FrameReplay(
            frames=_put(_put(replay.frames, now, obs), after, next_obs),
            rows=_put(replay.rows, now, rest[:, :3]),
            real=_put(replay.real, now, real),
            age=_put(replay.age, now, age * self._at(replay.real, before)),
            order=replay.order.at[places].set(now + jnp.arange(self.num_envs)),
            counters=jnp.stack([number + 1, first + lost, last + added]).astype(jnp.int32),
        )

    def cleared(self, replay: FrameReplay) -> FrameReplay:
        """The memory without transitions."""
        counters = jnp.zeros_like(replay.counters)
        return replay._replace(real=jnp.zeros_like(replay.real), counters=counters)

    def _at(self, array: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(array, start, self.num_envs)

    def sample(self, replay: FrameReplay, key: Array, batch_size: int) -> Batch:
        """Transitions drawn uniformly and with replacement."""
        _, first, last = replay.counters
        chosen = first + draw(key, (batch_size,), last - first)
        slot = replay.order[chosen % self.capacity]
        age = replay.age[slot].astype(jnp.int32)
        slots = stack_slots(slot, age, self.steps_back, self.num_envs, self.capacity)
        frames = replay.frames.at[slots].get(mode="promise_in_bounds")
        actions, rewards, terminated = replay.rows[slot].T
        return Batch(frames[:, :-1], frames[:, 1:], actions.astype(jnp.int32), rewards, terminated)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.replay)

    def state_dict(self) -> dict[str, Any]:
        return {"arrays": arrays_of(self.replay)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.replay = with_arrays(self.replay, state["arrays"])


def draw(key: Array, shape: tuple[int, ...], size: Array) -> Array:
    """Uniform integers below `size`, as remainders: their bias is below size / 2^32, and JAX's
    randint takes a CPU as long as the rest of a small update."""
    return (random.bits(key, shape) % size.astype(jnp.uint32)).astype(jnp.int32)


def _put(array: Array, start: Array, new: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, new.astype(array.dtype), start, 0)


def check_memory(needed: int, capacity: int) -> None:
    """Refuse, before training, a memory that the device has no room for."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}  # a CPU has none
    if "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
    else:
        free = free_host_memory()
    require(
        needed <= free,
        f"the replay memory needs {needed / 2**30:.1f} GiB, {device} has {free / 2**30:.1f} GiB"
        f" free: set --buffer-size to at most {int(0.9 * free / needed * capacity)}",
    )
