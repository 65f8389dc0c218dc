"""Replay memory in preallocated tensors, on the CPU or on the GPU.

    buffer = ReplayBuffer(args.buffer_size, envs.single_observation_space, envs.single_action_space,
                          args.num_envs, args.buffer_device)
    buffer.add(obs, next_obs, actions, rewards, terminated, real)  # one step of all environments
    batch = buffer.sample(args.batch_size)

`FrameReplayBuffer` does the same for stacked frames and keeps each frame once. Both take what
vector environments in next-step autoreset give; `real` is false where a step only reset its
environment (its episode had ended the step before), and such a step is never sampled.

For CUDA graphs `add` comes in two halves: `stage` writes on the host, `insert` sends that to the
device and files it there. Like `sample` it has static shapes and never waits: a graph can hold it.
Torch is imported when a memory is made: a JAX script can import this file without it.
"""

from __future__ import annotations

import os
import sys
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from cleanrl_utils.errors import BadInput, require

if TYPE_CHECKING:
    import torch
    from gymnasium import Space
    from gymnasium.vector import VectorEnv
    from numpy.typing import ArrayLike
    from torch import Tensor

    Shape = tuple[int, ...]
    Layout = dict[str, tuple[Shape, torch.dtype]]

M = TypeVar("M", "ReplayBuffer", "FrameReplayBuffer")


class Batch(NamedTuple):
    """Transitions, one per row. `next_obs` is what the action led to, also where an episode ended:
    a target bootstraps from it unless `terminated`, so truncation needs no special case."""

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
    """What both memories share: a matrix of float rows that end in action, reward and terminated,
    the way of a step into it, and how it is saved."""

    counters: tuple[str, ...]  # the tensors that say how far the others are filled

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        device: torch.device | str,
        action_space: Space,
        in_row: list[Shape],  # what lies in a row before the action
        memory: Layout,
        pages: Layout,
    ):
        import torch

        def zeros(layout: Layout, **options: Any) -> dict[str, Tensor]:
            return {k: torch.zeros(shape, dtype=t, **options) for k, (shape, t) in layout.items()}

        self.capacity, self.num_envs, self.device = capacity, num_envs, torch.device(device)
        self.discrete = np.issubdtype(action_space.dtype, np.integer)
        self.shapes = [*in_row, _shape(action_space)]
        self.widths = [*map(prod, self.shapes), 2]
        row = sum(self.widths)
        # The row beyond the capacity takes what is not to be remembered: see `compact`.
        memory = memory | {"rows": ((capacity + 1, row), torch.float32)}
        memory |= {name: ((), torch.int64) for name in self.counters}
        self.nbytes = sum(prod(shape) * dtype.itemsize for shape, dtype in memory.values())
        check_memory(self.nbytes, capacity, self.device)
        if self.device.type == "cpu":  # NumPy's zeros take memory only as it is filled
            empty = {k: np.zeros(shape, str(t).split(".")[1]) for k, (shape, t) in memory.items()}
            self.tensors = {k: torch.as_tensor(x) for k, x in empty.items()}
        else:
            self.tensors = zeros(memory, device=self.device)
        # A page holds one step of all environments, here with one column more: is it real?
        pages = pages | {"page": ((num_envs, row + 1), torch.float32)}
        self.on_cpu, on_gpu = self.device.type == "cpu", self.device.type == "cuda"
        self.pages = zeros(pages, device=self.device)
        self.host = self.pages if self.on_cpu else zeros(pages, pin_memory=on_gpu)
        self.sent = torch.cuda.Event() if on_gpu else None
        shapes = [*self.shapes, (), (), ()]
        columns = self.host["page"].split([prod(shape) for shape in shapes], 1)
        self.places = [x.view(-1, *s).numpy() for x, s in zip(columns, shapes, strict=True)]
        # `insert` is written in what NumPy and torch share. On the CPU it works on NumPy views of
        # the tensors, which takes a third of the time for a few rows.
        both = self.tensors | self.pages | {"lanes": torch.arange(num_envs, device=self.device)}
        self.at = SimpleNamespace(**{k: x.numpy() if self.on_cpu else x for k, x in both.items()})

    def add(
        self,
        obs: np.ndarray,
        next_obs: np.ndarray,
        actions: ArrayLike,
        rewards: ArrayLike,
        terminated: ArrayLike,
        real: ArrayLike,
    ) -> None:
        """Remember one step of all environments, except where it was not `real`."""
        self.stage(obs, next_obs, actions, rewards, terminated, real)
        self.insert()
        if self.sent is not None:
            self.sent.record()

    def stage(self, obs: np.ndarray, next_obs: np.ndarray, *rest: ArrayLike) -> None:
        """First half of `add`: the arrays of a step are put together, on the host."""
        if self.sent is not None:
            self.sent.synchronize()  # the copy of the step before may still be reading
        for place, part in zip(self.places, (obs, next_obs, *rest), strict=True):
            place[...] = part

    def insert(self) -> None:
        """Second half of `add`: the staged step enters the memory."""
        if self.on_cpu:
            return self._insert()
        import torch

        if self.host is not self.pages:
            for name, page in self.host.items():
                self.pages[name].copy_(page, non_blocking=True)
        # Torch's deterministic mode would sort the rows before it writes them, for 2 to 4 times the
        # cost. They differ anyway, all but the one beyond the capacity, which nobody reads.
        mode = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("default")
        self._insert()
        torch.set_deterministic_debug_mode(mode)

    def _insert(self) -> None:
        raise NotImplementedError

    def _draw(self, batch_size: int, size: Any) -> Tensor:
        """Uniform whole numbers below `size`, by torch's own generator of the device."""
        import torch

        if self.on_cpu:
            return torch.randint(int(size), (batch_size,))  # an error where nothing is stored
        # Here `size` is a tensor that nobody waits for.
        words = torch.empty(batch_size, dtype=torch.int64, device=self.device).random_()
        return words % size

    def _unpack(self, rows: Tensor) -> list[Tensor]:
        """The parts of rows, as they were before they became columns of floats."""
        *parts, rest = rows.split_with_sizes(self.widths, 1)
        for i, shape in enumerate(self.shapes):
            if len(shape) != 1:
                parts[i] = parts[i].reshape(-1, *shape)
        if self.discrete:
            parts[-1] = parts[-1].long()
        return [*parts, *rest.unbind(1)]

    def state_dict(self) -> dict[str, Tensor]:
        """The filled part of every tensor, not copied."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue exactly where `state_dict` was taken."""
        for name in self.counters:
            self.tensors[name].copy_(state[name])
        for name, rows in self.state_dict().items():  # whose shapes follow from the counters
            require(
                rows.shape == state[name].shape,
                f"the saved replay memory has {name} of shape {tuple(state[name].shape)}, expected"
                f" {tuple(rows.shape)}: keep the --buffer-size and --num-envs it was saved with",
            )
            rows.copy_(state[name])


class ReplayBuffer(_Replay):
    """Transitions of vector observations, each one row of one matrix: a batch is a single gather.

    `next_obs` lies beside `obs`, so the last observation of a truncated episode is its own.
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

        # The host keeps count, and tells a GPU with each step where it goes, and the size since.
        pages: Layout = {"goes_to": ((num_envs + 1,), torch.int64)}
        obs_and_next_obs = [_shape(observation_space)] * 2
        super().__init__(capacity, num_envs, device, action_space, obs_and_next_obs, {}, pages)
        self.rows, self.goes_to = self.tensors["rows"], self.host["goes_to"].numpy()
        self.tensors["count"] = torch.zeros((), dtype=torch.int64)
        self.count = self.tensors["count"].numpy()

    def stage(self, obs: np.ndarray, next_obs: np.ndarray, *rest: ArrayLike) -> None:
        super().stage(obs, next_obs, *rest)
        start, n = int(self.count) % self.capacity, self.num_envs
        real = self.places[-1]
        self.slice = start if np.count_nonzero(real) == n and start + n <= self.capacity else None
        if self.slice is None:
            self.goes_to[:-1], n = compact(real > 0, self.count, self.capacity)
        else:  # as on most turns
            self.goes_to[:-1] = range(start, start + n)
        self.count.fill(self.count + n)
        self.goes_to[-1] = len(self)

    def _insert(self) -> None:
        at, n = self.at, self.num_envs
        if self.on_cpu and self.slice is not None:  # quicker than by index
            at.rows[self.slice : self.slice + n] = at.page[:, :-1]
        else:
            at.rows[at.goes_to[:-1]] = at.page[:, :-1]

    def sample(self, batch_size: int) -> Batch:
        """Transitions drawn uniformly and with replacement."""
        size = len(self) if self.on_cpu else self.pages["goes_to"][-1]
        rows = self.rows.index_select(0, self._draw(batch_size, size))
        return Batch(*self._unpack(rows))

    def __len__(self) -> int:
        return min(int(self.count), self.capacity)

    def state_dict(self) -> dict[str, Tensor]:
        return {"rows": self.rows[: len(self)], "count": self.tensors["count"]}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.goes_to[-1] = len(self)
        self.pages["goes_to"].copy_(self.host["goes_to"])


class FrameReplayBuffer(_Replay):
    """Transitions of stacked frames (stack, height, width), each frame kept once as it came.

    A turn of all environments fills one slot per environment, slot = turn * num_envs + environment,
    around a ring. A slot has the newest frame of `obs` and what was done there; a stack is this
    slot and those of the turns before, and the newest frame of `next_obs` is in the slot after it.
    That holds at an episode's end as well, because a reset step has its slot, too: its `obs` is the
    last observation of the episode. `age` says how many earlier frames an episode has, so a stack
    stops at the reset frame and repeats it, as Gymnasium's FrameStackObservation does.

    Whoever resets the environments by hand calls `cut()`.
    """

    counters = ("turn", "first", "last")

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
        self.num_turns = capacity // num_envs
        require(
            self.num_turns > self.stack_size,
            f"--buffer-size {capacity} is too small for stacks of {self.stack_size} frames from"
            f" --num-envs {num_envs}: it takes {num_envs * (self.stack_size + 1)} and more",
        )
        slots = self.num_turns * num_envs
        dtype = getattr(torch, np.dtype(observation_space.dtype).name)
        memory: Layout = {
            "frames": ((slots, *self.frame_shape), dtype),
            "real": ((slots,), torch.bool),
            "age": ((slots,), torch.uint8),
            # The slots of real transitions as they came, [first, last) around a ring: what `sample`
            # draws from. Here, too, one more than the ring: see `compact`.
            "order": ((slots + 1,), torch.int64),
        }
        frame_pages: Layout = {"frame_pages": ((2, num_envs, *self.frame_shape), dtype)}
        super().__init__(slots, num_envs, device, action_space, [], memory, frame_pages)
        self.places = [*self.host["frame_pages"].numpy(), *self.places]
        # A transition takes the stack of `obs` and one frame more: 3, 2, 1, 0 and -1 turns back.
        self.back = torch.arange(self.stack_size - 1, -2, -1, device=self.device)

    def stage(self, obs: np.ndarray, next_obs: np.ndarray, *rest: ArrayLike) -> None:
        super().stage(obs[:, -1], next_obs[:, -1], *rest)

    def _insert(self) -> None:
        at = self.at
        now = self._enter_turn()
        before, after = (now - self.num_envs) % self.capacity, (now + self.num_envs) % self.capacity
        real = at.page[:, -1] > 0
        at.frames[now], at.frames[after] = at.frame_pages[0], at.frame_pages[1]
        at.rows[now] = at.page[:, :-1]
        at.age[now] = (at.age[before] + 1).clip(max=self.stack_size - 1) * at.real[before]
        at.real[now] = real
        places, number = compact(real, at.last, self.capacity)
        at.order[places] = now
        at.last += number

    def cut(self) -> None:
        """End all episodes here, because the environments were reset by hand and not by a step.
        Their last frames are stored already: an empty turn keeps them from being overwritten."""
        self.at.real[self._enter_turn()] = False

    def clear(self) -> None:
        """Forget everything; what a CUDA graph has captured goes on with the empty memory."""
        for name in (*self.counters, "real"):
            self.tensors[name].zero_()

    def _enter_turn(self) -> Any:
        """The slots of a new turn. It will write up to one turn further, over the oldest frame of
        the oldest stack: that transition can no longer be sampled."""
        at = self.at
        now = (at.turn * self.num_envs + at.lanes) % self.capacity
        at.first += at.real[(now + self.stack_size * self.num_envs) % self.capacity].sum()
        at.turn += 1
        return now

    def sample(self, batch_size: int) -> Batch:
        """Transitions drawn uniformly and with replacement."""
        store = self.tensors
        size = self.at.last - self.at.first
        if not self.on_cpu:
            size = size.clamp(min=1)  # as a graph's warm-up may meet it
        chosen = store["first"] + self._draw(batch_size, size)
        slot = store["order"].index_select(0, chosen % self.capacity)
        age = store["age"].index_select(0, slot)
        slots = stack_slots(slot, age, self.back, self.num_envs, self.capacity)
        frames = store["frames"].index_select(0, slots.flatten()).unflatten(0, slots.shape)
        parts = self._unpack(store["rows"].index_select(0, slot))
        return Batch(frames[:, :-1], frames[:, 1:], *parts)

    def __len__(self) -> int:
        return int(self.at.last - self.at.first)

    def state_dict(self) -> dict[str, Tensor]:
        turns = min(int(self.at.turn) + 1, self.num_turns)  # one ahead: the frames of next_obs
        filled = dict.fromkeys(("frames", "rows", "real", "age"), turns * self.num_envs)
        filled["order"] = min(int(self.at.last), self.capacity)
        state = {name: self.tensors[name][:size] for name, size in filled.items()}
        return state | {name: self.tensors[name] for name in self.counters}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.tensors["real"].zero_()  # a slot that is not filled holds no transition
        super().load_state_dict(state)


def make_memory(kind: type[M], envs: VectorEnv, args: Any, device: torch.device) -> M:
    """Replay memory for `envs` as --buffer-size, --num-envs and --buffer-device ask for it.

    "auto" is the device of the network if the memory takes no more than half of what is free there,
    otherwise the CPU; `args.buffer_device` says which from then on, and so does the run's record.
    """
    spaces = envs.single_observation_space, envs.single_action_space
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


def compact(real: Any, count: Any, capacity: int) -> tuple[Any, Any]:
    """Rows around a ring for the real steps of a turn, one after the other from `count` on, and how
    many there are. The other steps all get the row `capacity`, which is beyond the ring and never
    sampled: so the shapes stay the same however many are real. For NumPy, torch and JAX alike."""
    rank = real.cumsum(0)
    rows = (count + rank - 1) % capacity
    return capacity + (rows - capacity) * real, rank[-1]


def stack_slots(slot: Any, age: Any, back: Any, num_envs: int, capacity: int) -> Any:
    """The slots, (batch, stack), of the frames `back` turns before each slot, but no further than
    the `age` of its episode: so the reset frame is repeated. For NumPy, torch and JAX alike."""
    age = age[:, None]
    turns = back + (age - back) * (age < back)  # min(back, age)
    return (slot[:, None] - turns * num_envs) % capacity


def check_memory(needed: int, capacity: int, device: torch.device) -> None:
    """Say before training that memory will not do: allocated lazily, it would fail hours later."""
    free = free_memory(device)
    if needed > free:
        other = "cpu" if device.type == "cuda" else "cuda"
        raise BadInput(
            f"the replay memory needs {needed / 2**30:.1f} GiB, {device} has {free / 2**30:.1f} GiB"
            f" free: set --buffer-size to at most {int(0.9 * free / needed * capacity)}, or"
            f" --buffer-device {other}"
        )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`, as far as the system tells."""
    if device.type == "meta":
        return sys.maxsize
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return free_host_memory()


def free_host_memory() -> int:
    """The same for the CPU's memory."""
    free = sys.maxsize
    available = _number("/proc/meminfo", "MemAvailable:")
    if available is not None:
        free = available * 1024
    elif "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _number("/sys/fs/cgroup/memory.max")
    if limit is not None:  # a container may have less than its machine
        free = min(free, limit - (_number("/sys/fs/cgroup/memory.stat", "anon") or 0))
    return free


def _number(path: str, name: str = "") -> int | None:
    """The number after `name` in a file of the kernel's, or its first; None where there is none."""
    try:
        with open(path) as file:
            words = file.read().split()
        return int(words[words.index(name) + 1 if name else 0])
    except (OSError, ValueError, IndexError):
        return None


def _shape(space: Space) -> Shape:
    assert space.shape is not None, f"{space} has no fixed shape: flatten it first"
    return space.shape
