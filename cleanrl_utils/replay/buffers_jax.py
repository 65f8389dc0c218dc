"""Replay memory for JAX: pure functions on two arrays, for programs that act and learn.

    memory = ReplayMemory(args.buffer_size, envs)  # shapes; the arrays are a Replay:
    replay = memory.init()
    page = memory.page(obs, next_obs, actions, rewards, terminated, real)  # on the host
    replay = memory.insert(replay, page)  # in a program that is given the replay for good (donated)
    batch = memory.sample(replay, key, args.batch_size)

It takes what vector environments in next-step autoreset give; `real` is false where a step only
reset its environment, and such a step is never sampled. A page is one NumPy array with all that
the device must hear of a step, because each array on its way there costs more than its bytes;
`memory.pages(n)` is one array for n steps.

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
from cleanrl_utils.replay.buffers import compact, free_host_memory, stack_slots


class Replay(NamedTuple):
    rows: Array  # float32, a transition each; the one beyond the capacity is never sampled
    added: Array  # how many transitions ever were


class Batch(NamedTuple):
    """Transitions, one per row. `next_obs` is what the action led to, also where an episode ended:
    a target bootstraps from it unless `terminated`, so truncation needs no special case."""

    obs: Array
    next_obs: Array
    actions: Array  # int32 where the action space is discrete
    rewards: Array
    terminated: Array  # 0.0 or 1.0


class ReplayMemory:
    """Transitions of vector observations, each one row of one matrix: a batch is a single gather.

    `next_obs` lies beside `obs`, so the last observation of a truncated episode is its own.
    """

    def __init__(self, capacity: int, envs: VectorEnv):
        observations, actions = envs.single_observation_space, envs.single_action_space
        enough = capacity >= envs.num_envs
        require(enough, f"--buffer-size {capacity} is less than --num-envs {envs.num_envs}")
        self.capacity, self.num_envs = capacity, envs.num_envs
        self.discrete = np.issubdtype(actions.dtype, np.integer)
        obs_shape: tuple[int, ...] = observations.shape or ()
        shapes = [obs_shape, obs_shape, actions.shape or (), (), ()]
        self.shapes = [*shapes, ()]  # of a page's parts: the last is `real`
        self.width = sum(map(prod, shapes))
        check_memory(4 * (capacity + 1) * self.width, capacity)

    def init(self) -> Replay:
        return Replay(jnp.zeros((self.capacity + 1, self.width)), jnp.int32(0))

    def page(self, *parts: Any) -> np.ndarray:
        """A step of all environments as one array, (num_envs, columns). Made anew for each step:
        a program may still be reading the one before."""
        columns = [np.reshape(part, (self.num_envs, -1)) for part in parts]
        return np.concatenate(columns, 1, dtype=np.float32, casting="unsafe")

    def pages(self, turns: int) -> np.ndarray:
        """Room for the pages of so many steps; until they are there, nothing to remember."""
        return np.zeros((turns, self.num_envs, self.width + 1), np.float32)

    def insert(self, replay: Replay, page: Array) -> Replay:
        """The step of a page, or those of several, enter the memory, except where not real."""
        page = page.reshape(-1, self.width + 1)
        rows, number = compact(page[:, self.width] > 0, replay.added, self.capacity)
        stored = replay.rows.at[rows].set(page[:, : self.width], mode="promise_in_bounds")
        return Replay(stored, replay.added + number)

    def sample(self, replay: Replay, key: Array, batch_size: int) -> Batch:
        """Transitions drawn uniformly and with replacement."""
        return self.take(replay, self.choose(replay, key, batch_size))

    def choose(self, replay: Replay, key: Array, *shape: int) -> Array:
        """Where such transitions lie, in this shape: one call can choose for many batches."""
        return draw(key, shape, jnp.minimum(replay.added, self.capacity))

    def take(self, replay: Replay, chosen: Array) -> Batch:
        """The transitions that lie there."""
        rows = replay.rows.at[chosen].get(mode="promise_in_bounds")
        ends = np.cumsum([prod(shape) for shape in self.shapes[:4]])
        parts = [
            part.reshape(-1, *shape)
            for part, shape in zip(jnp.split(rows, ends, 1), self.shapes, strict=False)
        ]
        if self.discrete:
            parts[2] = parts[2].astype(jnp.int32)
        return Batch(*parts)


class FrameReplay(NamedTuple):
    frames: Array  # (slots, height, width), each frame once and as it came
    rows: Array  # float32: action, reward and terminated
    real: Array
    age: Array  # how many earlier frames of its episode a frame has, up to the stack's
    order: Array  # slots of real transitions, [first, last) around a ring; see `compact`
    counters: Array  # turn, first, last


class FrameMemory:
    """Transitions of stacked frames, (stack, height, width), and discrete actions: in JAX what
    FrameReplayBuffer of buffers.py is, where slots, ages and `cut` are explained.

    All a turn writes lies side by side: in a program that is given the memory for good (donated),
    gigabytes stay where they are.
    """

    def __init__(self, capacity: int, envs: VectorEnv):
        space = envs.single_observation_space
        assert space.shape, "stacked frames are wanted"
        self.stack_size, *frame = space.shape
        self.num_envs, self.num_turns = envs.num_envs, capacity // envs.num_envs
        require(
            self.num_turns > self.stack_size,
            f"--buffer-size {capacity} is too small for stacks of {self.stack_size} frames from"
            f" --num-envs {self.num_envs}: it takes {self.num_envs * (self.stack_size + 1)} and"
            " more",
        )
        self.capacity = slots = self.num_turns * self.num_envs
        self.layout = [((slots, *frame), space.dtype), ((slots, 3), np.float32)]
        self.layout += [((slots,), bool), ((slots,), np.uint8), ((slots + 1,), np.int32)]
        self.layout += [((3,), np.int32)]
        check_memory(sum(prod(x) * np.dtype(kind).itemsize for x, kind in self.layout), capacity)
        # A transition takes the stack of `obs` and one frame more: 3, 2, 1, 0 and -1 turns back.
        self.back = np.arange(self.stack_size - 1, -2, -1)

    def init(self) -> FrameReplay:
        return FrameReplay(*(jnp.zeros(shape, kind) for shape, kind in self.layout))

    def page(self, obs: np.ndarray, next_obs: np.ndarray, *rest: Any) -> tuple[np.ndarray, ...]:
        """A step of all environments: the newest frames; actions, rewards, terminated and real."""
        newest = np.stack([obs[:, -1], next_obs[:, -1]])
        return newest, np.stack(rest, 1, dtype=np.float32, casting="unsafe")

    def insert(self, replay: FrameReplay, page: tuple[Array, Array]) -> FrameReplay:
        """The page's step enters the memory; it can be sampled if it was real."""
        replay, now = self._enter_turn(replay)
        (obs, next_obs), rest = page
        before, after = (now - self.num_envs) % self.capacity, (now + self.num_envs) % self.capacity
        real = rest[:, 3] > 0
        age = jnp.minimum(self._at(replay.age, before) + 1, self.stack_size - 1)
        places, number = compact(real, replay.counters[2], self.capacity)
        return FrameReplay(
            frames=_put(_put(replay.frames, now, obs), after, next_obs),
            rows=_put(replay.rows, now, rest[:, :3]),
            real=_put(replay.real, now, real),
            age=_put(replay.age, now, age * self._at(replay.real, before)),
            order=replay.order.at[places].set(now + jnp.arange(self.num_envs)),
            counters=replay.counters.at[2].add(number),
        )

    def cut(self, replay: FrameReplay) -> FrameReplay:
        """End all episodes here, because the environments were reset by hand and not by a step."""
        replay, now = self._enter_turn(replay)
        return replay._replace(real=_put(replay.real, now, jnp.zeros(self.num_envs, bool)))

    def clear(self, replay: FrameReplay) -> FrameReplay:
        """Forget everything: the memory of a program that is given it for good is used again."""
        nothing = jnp.zeros_like(replay.real), jnp.zeros_like(replay.counters)
        return replay._replace(real=nothing[0], counters=nothing[1])

    def _enter_turn(self, replay: FrameReplay) -> tuple[FrameReplay, Array]:
        """The first slot of a new turn. It takes a frame from the oldest stack: that transition can
        no longer be sampled."""
        turn = replay.counters[0]
        oldest = (turn + self.stack_size) % self.num_turns * self.num_envs
        lost = self._at(replay.real, oldest).sum()
        counters = replay.counters + jnp.stack([1, lost, 0])
        return replay._replace(counters=counters), turn % self.num_turns * self.num_envs

    def _at(self, array: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(array, start, self.num_envs)

    def sample(self, replay: FrameReplay, key: Array, batch_size: int) -> Batch:
        """Transitions drawn uniformly and with replacement."""
        _, first, last = replay.counters
        chosen = first + draw(key, (batch_size,), last - first)
        slot = replay.order[chosen % self.capacity]
        age = replay.age[slot].astype(jnp.int32)
        slots = stack_slots(slot, age, self.back, self.num_envs, self.capacity)
        frames = replay.frames.at[slots].get(mode="promise_in_bounds")
        actions, rewards, terminated = replay.rows[slot].T
        parts = actions.astype(jnp.int32), rewards, terminated
        return Batch(frames[:, :-1], frames[:, 1:], *parts)


def draw(key: Array, shape: tuple[int, ...], size: Array) -> Array:
    """Uniform whole numbers below `size`. As remainders: the unevenness is below size / 2^32, and
    JAX's randint takes a CPU as long as the rest of a small update."""
    return (random.bits(key, shape) % size.astype(jnp.uint32)).astype(jnp.int32)


def _put(array: Array, start: Array, new: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, new.astype(array.dtype), start, 0)


def check_memory(needed: int, capacity: int) -> None:
    """Say before training, and in words, that the device has not enough memory."""
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
