"""Replay memory in preallocated tensors, on the CPU or on the GPU.

    buffer = ReplayBuffer(args.buffer_size, envs.single_observation_space, envs.single_action_space,
                          args.num_envs, args.buffer_device)
    buffer.add(obs, next_obs, actions, rewards, terminated, real)  # one step of all environments
    batch = buffer.sample(args.batch_size)

`FrameReplayBuffer` does the same for stacked frames and stores each frame once. Both take the steps
of vector environments in next-step autoreset; `real` is false where a step only reset its
environment (its episode had ended the step before), and such a step is never sampled.

`add` has two halves, so that CUDA graphs can hold its second one: `stage` writes a step into pinned
host memory, `insert` copies it to the device and stores it there. `insert` and `sample` have static
shapes and never wait. Torch is imported when a memory is made, so that JAX scripts can import this
file without it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from cleanrl_utils.errors import require
from cleanrl_utils.replay.free_memory import check_memory, free_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from gymnasium import Space
    from gymnasium.vector import VectorEnv
    from numpy.typing import ArrayLike
    from torch import Tensor

    Shape = tuple[int, ...]
    Layout = dict[str, tuple[Shape, torch.dtype]]

M = TypeVar("M", bound="_Replay")


class Batch(NamedTuple):
    """Transitions, one per row. `next_obs` follows the action, also at the end of an episode: a
    target bootstraps from it unless `terminated`, so truncation needs no special case."""

    obs: Tensor
    next_obs: Tensor
    actions: Tensor  # int64 where the action space is discrete
    rewards: Tensor
    terminated: Tensor  # 0.0 or 1.0

    def to(self, device: torch.device | str) -> Batch:
        """The batch on the networks' device: the memory may be on the CPU, they on the GPU."""
        if self.obs.device.type == str(device).split(":")[0]:
            return self
        return Batch(*(x.to(device, non_blocking=True) for x in self))


class _Replay:
    """The common part of both memories: a matrix of float rows that end in action, reward and
    terminated, staging and inserting of steps, saving and loading."""

    counters: tuple[str, ...]  # tensors that count what the others hold

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        device: torch.device | str,
        action_space: Space,
        obs_shapes: list[Shape],  # of the columns before the action
        memory: Layout,
        staged: Layout,
    ):
        import torch

        def zeros(layout: Layout, **options: Any) -> dict[str, Tensor]:
            return {k: torch.zeros(shape, dtype=t, **options) for k, (shape, t) in layout.items()}

        self.capacity = capacity
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.on_cpu = self.device.type == "cpu"
        on_gpu = self.device.type == "cuda"
        self.discrete = np.issubdtype(action_space.dtype, np.integer)
        self.shapes = [*obs_shapes, _shape(action_space)]
        self.widths = [*map(prod, self.shapes), 2]  # 2: reward and terminated
        row = sum(self.widths)
        # The row beyond the capacity receives the steps that are not stored: see `compact`.
        memory = memory | {"rows": ((capacity + 1, row), torch.float32)}
        memory |= {name: ((), torch.int64) for name in self.counters}
        self.nbytes = sum(prod(shape) * dtype.itemsize for shape, dtype in memory.values())
        check_memory(self.nbytes, capacity, self.device)
        if self.on_cpu:  # NumPy's zeros take memory only as it is filled
            empty = {k: np.zeros(shape, str(t).split(".")[1]) for k, (shape, t) in memory.items()}
            self.tensors = {k: torch.as_tensor(x) for k, x in empty.items()}
        else:
            self.tensors = zeros(memory, device=self.device)
        # One step of all environments before it is stored; its last column is `real`.
        staged = staged | {"new_rows": ((num_envs, row + 1), torch.float32)}
        self.staged = zeros(staged, device=self.device)
        self.staged_on_host = self.staged if self.on_cpu else zeros(staged, pin_memory=on_gpu)
        self.copied = torch.cuda.Event() if on_gpu else None
        shapes = [*self.shapes, (), (), ()]
        columns = self.staged_on_host["new_rows"].split([prod(shape) for shape in shapes], 1)
        self.inputs = [x.view(-1, *s).numpy() for x, s in zip(columns, shapes, strict=True)]
        # `_insert` uses only what NumPy and torch share. On the CPU it works on NumPy views of the
        # tensors, which takes a third of the time for a few rows.
        all_tensors = self.tensors | self.staged
        all_tensors |= {"env_numbers": torch.arange(num_envs, device=self.device)}
        arrays = {k: x.numpy() if self.on_cpu else x for k, x in all_tensors.items()}
        self.arrays = SimpleNamespace(**arrays)

    def add(
        self,
        obs: np.ndarray,
        next_obs: np.ndarray,
        actions: ArrayLike,
        rewards: ArrayLike,
        terminated: ArrayLike,
        real: ArrayLike,
    ) -> None:
        """Store one step of all environments, except where it is not `real`."""
        self.stage(obs, next_obs, actions, rewards, terminated, real)
        self.insert()
        if self.copied is not None:
            self.copied.record()

    def stage(self, obs: np.ndarray, next_obs: np.ndarray, *rest: ArrayLike) -> None:
        """First half of `add`: write a step into host memory."""
        if self.copied is not None:
            self.copied.synchronize()  # the GPU may still be copying the step before
        for target, values in zip(self.inputs, (obs, next_obs, *rest), strict=True):
            target[...] = values

    def insert(self) -> None:
        """Second half of `add`: store the staged step."""
        if self.on_cpu:
            return self._insert()
        if self.staged_on_host is not self.staged:
            for name, values in self.staged_on_host.items():
                self.staged[name].copy_(values, non_blocking=True)
        with in_any_order():
            self._insert()

    def _insert(self) -> None:
        raise NotImplementedError

    def _draw(self, batch_size: int, size: Any) -> Tensor:
        """Uniform integers below `size`, from torch's generator of the device."""
        import torch

        if self.on_cpu:
            return torch.randint(int(size), (batch_size,))  # an error if nothing is stored
        # On a GPU `size` is a tensor, and its value is not waited for.
        integers = torch.empty(batch_size, dtype=torch.int64, device=self.device).random_()
        return integers % size

    def _unpack(self, rows: Tensor) -> list[Tensor]:
        """Rows as their parts, each in its own shape and type."""
        *parts, rest = rows.split_with_sizes(self.widths, 1)
        for i, shape in enumerate(self.shapes):
            if len(shape) != 1:
                parts[i] = parts[i].reshape(-1, *shape)
        if self.discrete:
            parts[-1] = parts[-1].long()
        return [*parts, *rest.unbind(1)]

    def state_dict(self) -> dict[str, Tensor]:
        """The filled part of every tensor, without copying it."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue exactly where `state_dict` was taken."""
        for name in self.counters:
            self.tensors[name].copy_(state[name])
        for name, rows in self.state_dict().items():  # the counters determine its shapes
            require(
                rows.shape == state[name].shape,
                f"the saved replay memory has {name} of shape {tuple(state[name].shape)}, expected"
                f" {tuple(rows.shape)}: keep the --buffer-size and --num-envs it was saved with",
            )
            rows.copy_(state[name])


class ReplayBuffer(_Replay):
    """Transitions of vector observations; each is one row of a matrix, so a batch is one gather.

    A row holds `next_obs` beside `obs`, so a truncated episode keeps its last observation.
    """

    counters = ("count",)

    def __init__(
        self,
        capacity: int,
        observation_space: Space,
        action_space: Space,
        num_envs: int = 1,
        device: torch.device | str = "cpu",
    ):
        require(
            capacity >= num_envs, f"--buffer-size {capacity} is less than --num-envs {num_envs}"
        )
        import torch

        # The host counts; each step carries the rows it goes to, and at the end the new size.
        staged: Layout = {"destinations": ((num_envs + 1,), torch.int64)}
        obs_shapes = [_shape(observation_space)] * 2  # obs and next_obs
        super().__init__(capacity, num_envs, device, action_space, obs_shapes, {}, staged)
        self.rows = self.tensors["rows"]
        self.destinations = self.staged_on_host["destinations"].numpy()
        self.tensors["count"] = torch.zeros((), dtype=torch.int64)
        self.count = self.tensors["count"].numpy()

    def stage(self, obs: np.ndarray, next_obs: np.ndarray, *rest: ArrayLike) -> None:
        super().stage(obs, next_obs, *rest)
        start = int(self.count) % self.capacity
        end = start + self.num_envs
        real = self.inputs[-1]
        self.slice: slice | None = None
        if np.count_nonzero(real) == self.num_envs and end <= self.capacity:  # most steps
            self.slice = slice(start, end)
            number = self.num_envs
            if not self.on_cpu:
                self.destinations[:-1] = range(start, end)
        else:
            self.destinations[:-1], number = compact(real > 0, self.count, self.capacity)
        self.count.fill(self.count + number)
        if not self.on_cpu:
            self.destinations[-1] = len(self)

    def _insert(self) -> None:
        arrays = self.arrays
        if self.on_cpu and self.slice is not None:  # faster than by index
            arrays.rows[self.slice] = arrays.new_rows[:, :-1]
        else:
            arrays.rows[arrays.destinations[:-1]] = arrays.new_rows[:, :-1]

    def sample(self, batch_size: int) -> Batch:
        """Transitions drawn uniformly and with replacement."""
        size = len(self) if self.on_cpu else self.staged["destinations"][-1]
        rows = self.rows.index_select(0, self._draw(batch_size, size))
        return Batch(*self._unpack(rows))

    def __len__(self) -> int:
        return min(int(self.count), self.capacity)

    def state_dict(self) -> dict[str, Tensor]:
        return {"rows": self.rows[: len(self)], "count": self.tensors["count"]}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.destinations[-1] = len(self)
        self.staged["destinations"].copy_(self.staged_on_host["destinations"])


class FrameReplayBuffer(_Replay):
    """Transitions of stacked frames, (stack, height, width); each frame is stored once.

    A vector step fills one slot per environment: slot = vector_step * num_envs + environment,
    modulo the capacity. A slot holds the newest frame of `obs`, the action, reward and terminated.
    A stack is read from this slot and those of the vector steps before; the newest frame of
    `next_obs` is in the slot after it. This holds at the end of an episode, too, because a reset
    step has its slot: its `obs` is the last observation of the episode. `age` is the number of
    earlier frames of the episode, so that a stack stops at the first one and repeats it, as
    Gymnasium's FrameStackObservation does.
    """

    counters = ("vector_step", "first", "last")

    def __init__(
        self,
        capacity: int,
        observation_space: Space,
        action_space: Space,
        num_envs: int = 1,
        device: torch.device | str = "cpu",
    ):
        import torch

        self.stack_size, *self.frame_shape = _shape(observation_space)
        self.num_vector_steps = capacity // num_envs
        require(
            self.num_vector_steps > self.stack_size,
            f"--buffer-size {capacity} is too small for stacks of {self.stack_size} frames from"
            f" --num-envs {num_envs}: it takes {num_envs * (self.stack_size + 1)} and more",
        )
        slots = self.num_vector_steps * num_envs
        dtype = getattr(torch, np.dtype(observation_space.dtype).name)
        memory = self._layout(slots, dtype)
        staged: Layout = {"new_frames": ((2, num_envs, *self.frame_shape), dtype)}
        super().__init__(slots, num_envs, device, action_space, [], memory, staged)
        self.inputs = [*self.staged_on_host["new_frames"].numpy(), *self.inputs]
        # A transition is the stack of `obs` and one more frame: 3, 2, 1, 0 and -1 vector steps ago.
        self.back = torch.arange(self.stack_size - 1, -2, -1, device=self.device)

    def _layout(self, slots: int, dtype: torch.dtype) -> Layout:
        import torch

        return {
            "frames": ((slots, *self.frame_shape), dtype),
            "real": ((slots,), torch.bool),
            "age": ((slots,), torch.uint8),
            # Slots of the real transitions in order, [first, last) modulo the capacity: `sample`
            # draws from them. One more than the capacity: see `compact`.
            "order": ((slots + 1,), torch.int64),
        }

    def stage(self, obs: np.ndarray, next_obs: np.ndarray, *rest: ArrayLike) -> None:
        super().stage(obs[:, -1], next_obs[:, -1], *rest)

    def _insert(self) -> None:
        arrays = self.arrays
        now = (arrays.vector_step * self.num_envs + arrays.env_numbers) % self.capacity
        before = (now - self.num_envs) % self.capacity
        after = (now + self.num_envs) % self.capacity
        # The frames written below are the oldest ones of the oldest stacks: those transitions can
        # no longer be sampled.
        oldest = (now + self.stack_size * self.num_envs) % self.capacity
        arrays.first += arrays.real[oldest].sum()
        arrays.vector_step += 1

        real = arrays.new_rows[:, -1] > 0
        arrays.frames[now] = arrays.new_frames[0]
        arrays.frames[after] = arrays.new_frames[1]
        arrays.rows[now] = arrays.new_rows[:, :-1]
        age = (arrays.age[before] + 1).clip(max=self.stack_size - 1)
        arrays.age[now] = age * arrays.real[before]
        arrays.real[now] = real
        destinations, number = compact(real, arrays.last, self.capacity)
        arrays.order[destinations] = now
        arrays.last += number

    def clear(self) -> None:
        """Remove all transitions, in place: a CUDA graph that was captured stays valid."""
        for name in (*self.counters, "real"):
            self.tensors[name].zero_()

    def sample(self, batch_size: int) -> Batch:
        """Transitions drawn uniformly and with replacement."""
        tensors = self.tensors
        size = self.arrays.last - self.arrays.first
        if not self.on_cpu:
            size = size.clamp(min=1)  # a CUDA graph's warm-up may find the memory empty
        chosen = tensors["first"] + self._draw(batch_size, size)
        slot = tensors["order"].index_select(0, chosen % self.capacity)
        age = tensors["age"].index_select(0, slot)
        slots = stack_slots(slot, age, self.back, self.num_envs, self.capacity)
        frames = self._frames(slots)
        parts = self._unpack(tensors["rows"].index_select(0, slot))
        return Batch(frames[:, :-1], frames[:, 1:], *parts)

    def _frames(self, slots: Tensor) -> Tensor:
        return self.tensors["frames"].index_select(0, slots.flatten()).unflatten(0, slots.shape)

    def __len__(self) -> int:
        return int(self.arrays.last - self.arrays.first)

    def state_dict(self) -> dict[str, Tensor]:
        # one more: the frames of next_obs
        vector_steps = min(int(self.arrays.vector_step) + 1, self.num_vector_steps)
        filled = dict.fromkeys(("frames", "rows", "real", "age"), vector_steps * self.num_envs)
        filled["order"] = min(int(self.arrays.last), self.capacity)
        state = {name: self.tensors[name][:size] for name, size in filled.items()}
        return state | {name: self.tensors[name] for name in self.counters}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.tensors["real"].zero_()  # a slot that is not filled holds no transition
        super().load_state_dict(state)


def make_memory(kind: Callable[..., M], envs: VectorEnv, args: Any, device: torch.device) -> M:
    """Replay memory for `envs` as --buffer-size, --num-envs and --buffer-device ask for it.

    "auto" is the networks' device if the memory takes at most half of what is free there, otherwise
    the CPU; the choice is written to `args.buffer_device`, and so to the run's record.
    """
    spaces = (envs.single_observation_space, envs.single_action_space)
    where = args.buffer_device
    if where == "auto":
        where = device.type
        if where != "cpu":
            needed = kind(args.buffer_size, *spaces, args.num_envs, "meta").nbytes
            free = free_memory(device)
            where = where if needed <= free / 2 else "cpu"
            print(
                f"replay memory of {needed / 2**30:.1f} GiB on {where}, {device} has"
                f" {free / 2**30:.1f} GiB free; --buffer-device chooses",
                file=sys.stderr,
            )
    require(
        where in ("cpu", device.type),
        f"--buffer-device {where}: the network is on {device.type}, and no other GPU is in use",
    )
    args.buffer_device = where
    memory = kind(args.buffer_size, *spaces, args.num_envs, where)
    if where == "cuda" and args.cudagraphs:
        from cleanrl_utils.speed.graphs import CudaGraph

        memory.insert = CudaGraph(memory.insert)  # type: ignore[method-assign]
    return memory


@contextmanager
def in_any_order() -> Iterator[None]:
    """Write rows by index in any order: deterministic mode would sort them first, at 2 to 4 times
    the cost. For writes of which no two go to the same place, or only with the same value."""
    import torch

    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def compact(real: Any, count: Any, capacity: int) -> tuple[Any, Any]:
    """Destinations of the real steps among `real`: the rows after `count`, modulo the capacity, and
    their number. The other steps go to the row `capacity`, which is never sampled: so the shapes do
    not depend on how many are real. For NumPy, torch and JAX."""
    rank = real.cumsum(0)
    rows = (count + rank - 1) % capacity
    return capacity + (rows - capacity) * real, rank[-1]


def stack_slots(slot: Any, age: Any, back: Any, num_envs: int, capacity: int) -> Any:
    """Slots of the frames `back` vector steps before each slot, (batch, stack), but not before the
    first frame of the episode, which is repeated. For NumPy, torch and JAX."""
    age = age[:, None]
    vector_steps = back + (age - back) * (age < back)  # min(back, age)
    return (slot[:, None] - vector_steps * num_envs) % capacity


def _shape(space: Space) -> Shape:
    assert space.shape is not None, f"{space} has no fixed shape: flatten it first"
    return space.shape
