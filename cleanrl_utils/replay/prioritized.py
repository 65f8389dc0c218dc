"""Prioritised replay of n-step transitions of stacked frames, on the CPU or on the GPU.

    memory = PrioritizedFrameReplayBuffer(args.buffer_size, envs.single_observation_space,
                                          envs.single_action_space, args.num_envs, device,
                                          n_step=3, gamma=0.99, alpha=0.5)
    memory.add(obs, next_obs, actions, rewards, terminated, real)  # one step of all environments
    batch, slots = memory.sample(args.batch_size)
    memory.update_priorities(slots, losses)

Frames are stored as in FrameReplayBuffer, each once. The n steps of a transition are read when it
is sampled, from the slots of the next vector steps. Priorities are the leaves of a sum tree. Like
`insert`, `sample` and `update_priorities` have static shapes and never wait for the GPU, so that a
CUDA graph can hold them together with the gradient step between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cleanrl_utils.errors import require
from cleanrl_utils.replay.buffers import FrameReplayBuffer, in_any_order, stack_slots

if TYPE_CHECKING:
    import torch
    from gymnasium import Space
    from torch import Tensor

    from cleanrl_utils.replay.buffers import Layout, Shape

BRANCHES = 128  # children of a node: three levels for a million leaves
BELOW_ONE = 1 - 2**-52


class PrioritizedBatch(NamedTuple):
    """n-step transitions, one per row: a target is rewards + discounts * value of `next_obs`."""

    obs: Tensor
    next_obs: Tensor  # after the last step of the window
    actions: Tensor  # the first one
    rewards: Tensor  # discounted and summed over the window
    discounts: Tensor  # gamma ** (steps in the window), 0.0 if the last of them terminated
    weights: Tensor  # importance-sampling weights; the largest is 1

    def to(self, device: torch.device | str) -> PrioritizedBatch:
        """The batch on the networks' device: the memory may be on the CPU, they on the GPU."""
        if self.obs.device.type == str(device).split(":")[0]:
            return self
        return PrioritizedBatch(*(x.to(device, non_blocking=True) for x in self))


class PrioritizedFrameReplayBuffer(FrameReplayBuffer):
    """A FrameReplayBuffer that draws transitions in proportion to their priorities.

    A priority is (loss + eps) ** alpha; a new transition has the largest one so far. A transition
    can be drawn as soon as its n steps are stored. Its window ends with the episode: the reset step
    marks the end, so a truncated episode bootstraps from its last observation. A transition that
    cannot be drawn has priority 0.
    """

    def __init__(
        self,
        capacity: int,
        observation_space: Space,
        action_space: Space,
        num_envs: int = 1,
        device: torch.device | str = "cpu",
        n_step: int = 3,
        gamma: float = 0.99,
        alpha: float = 0.5,
        eps: float = 1e-6,
    ):
        import torch

        self.n_step = n_step
        self.alpha = alpha
        self.eps = eps
        super().__init__(capacity, observation_space, action_space, num_envs, device)
        least = num_envs * (self.stack_size + n_step)
        require(
            self.capacity >= least,
            f"--buffer-size {capacity} is too small for stacks of {self.stack_size} frames with"
            f" --n-step {n_step} and --num-envs {num_envs}: it takes {least} and more",
        )
        self.tensors["largest"].fill_(1)
        # Exponent of the importance-sampling weights; training sets it (beta.fill_).
        self.beta = torch.zeros((), dtype=torch.float64, device=self.device)
        steps = torch.arange(n_step + 1, device=self.device)
        self.window = steps[:-1] * num_envs  # slots of the n steps, after the first one
        self.powers = gamma**steps  # gamma ** 0, ..., gamma ** n
        self.stack = torch.arange(self.stack_size - 1, -1, -1, device=self.device)

    def _layout(self, slots: int, dtype: torch.dtype) -> Layout:
        import torch

        shapes = tree_shapes(slots, BRANCHES)
        self.level_names = [f"priorities_{i}" for i in range(len(shapes))]
        tree = {name: (x, torch.float64) for name, x in zip(self.level_names, shapes, strict=True)}
        return super()._layout(slots, dtype) | tree | {"largest": ((), torch.float64)}

    @property
    def levels(self) -> list[Any]:
        """The sum tree, leaves first: NumPy views on the CPU, tensors on the GPU."""
        return [getattr(self.arrays, name) for name in self.level_names]

    def _insert(self) -> None:
        import torch

        arrays = self.arrays
        now = arrays.vector_step * self.num_envs + arrays.env_numbers
        super()._insert()
        # The n steps of `complete` are now stored; the oldest frame of `lost` is overwritten.
        complete = (now - (self.n_step - 1) * self.num_envs) % self.capacity
        lost = (now + self.stack_size * self.num_envs) % self.capacity
        priorities = arrays.real[complete] * arrays.largest
        concatenate = np.concatenate if self.on_cpu else torch.concatenate
        slots = concatenate([complete, lost])
        set_leaves(self.levels, slots, concatenate([priorities, 0 * priorities]))

    def sample(self, batch_size: int) -> tuple[PrioritizedBatch, Tensor]:  # type: ignore[override]
        """Transitions drawn by priority and with replacement, and their slots.

        The draws are stratified: each comes from its own part of the total priority.
        """
        import torch

        parts = torch.arange(batch_size, device=self.device)
        uniform = torch.rand(batch_size, dtype=torch.float64, device=self.device)
        quantiles = (parts + uniform) / batch_size
        if self.on_cpu:
            slots, priorities = map(torch.from_numpy, self._find(quantiles.numpy()))
        else:
            with in_any_order():  # of cumsum, which is deterministic along the rows of a matrix
                slots, priorities = self._find(quantiles)
        # (N * p / total) ** -beta, divided by the largest weight: N and the total cancel.
        weights = (priorities / priorities.amin()) ** -self.beta
        fields = [*self.read(slots), weights.float()]
        return PrioritizedBatch(*fields), slots

    def _find(self, quantiles: Any) -> tuple[Any, Any]:
        """Slots at these quantiles of the total priority, and their priorities."""
        levels = self.levels
        total = levels[-1].sum()
        if self.on_cpu and total == 0:
            raise RuntimeError("no transition is stored whose n steps are complete")
        slots = find_leaves(levels, quantiles * total)
        return slots, levels[0].reshape(-1)[slots]

    def read(self, slots: Tensor) -> list[Tensor]:
        """The transitions that begin in these slots: the fields of a batch without the weights."""
        tensors = self.tensors
        steps = (slots[:, None] + self.window) % self.capacity  # (batch, n)
        # A reset step and the steps after it belong to another episode.
        inside = tensors["real"][steps].cumprod(1)
        length = inside.sum(1)
        rewards = (tensors["rows"][steps, -2] * self.powers[:-1] * inside).sum(1)
        last = (slots + (length - 1) * self.num_envs) % self.capacity
        discounts = self.powers[length] * (1 - tensors["rows"][last, -1])
        actions = self._unpack(tensors["rows"][slots])[0]

        age = tensors["age"][slots].long()
        stacks = stack_slots(slots, age, self.stack, self.num_envs, self.capacity)
        after = (last + self.num_envs) % self.capacity
        next_stacks = stack_slots(after, age + length, self.stack, self.num_envs, self.capacity)
        obs, next_obs = (self._frames(x) for x in (stacks, next_stacks))
        return [obs, next_obs, actions, rewards, discounts]

    def update_priorities(self, slots: Tensor, losses: Tensor) -> None:
        """Set the priorities of transitions that were sampled, by their losses."""
        import torch

        losses = losses.detach().to(self.device, torch.float64)
        priorities = (losses + self.eps) ** self.alpha
        # A transition that was drawn twice gets the larger priority, whatever the order of writing.
        priorities = (priorities * (slots[:, None] == slots)).amax(1)
        largest = self.tensors["largest"]
        largest.copy_(torch.maximum(largest, priorities.amax()))
        # A transition that left the memory after it was drawn keeps priority 0.
        stored = self.tensors[self.level_names[0]].view(-1)[slots] > 0
        priorities = priorities * stored
        if self.on_cpu:
            return set_leaves(self.levels, slots.numpy(), priorities.numpy())
        with in_any_order():
            set_leaves(self.levels, slots, priorities)

    def clear(self) -> None:
        super().clear()
        for name in self.level_names:
            self.tensors[name].zero_()

    def state_dict(self) -> dict[str, Tensor]:
        state = super().state_dict()
        rows = len(state["real"])
        for name in self.level_names:
            rows = -(-rows // BRANCHES)
            state[name] = self.tensors[name][:rows]
        return state | {"largest": self.tensors["largest"]}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name in self.level_names:
            self.tensors[name].zero_()
        super().load_state_dict(state)


# A sum tree is a list of matrices, leaves first. A row holds the children of one node; the next
# level holds the sum of each row. For NumPy and torch.


def tree_shapes(leaves: int, branches: int) -> list[Shape]:
    """Shapes of the levels of a sum tree."""
    rows = -(-leaves // branches)
    above = tree_shapes(rows, branches) if rows > 1 else []
    return [(rows, branches), *above]


def set_leaves(levels: list[Any], leaves: Any, values: Any) -> None:
    """Set the values of some leaves, and the sums above them."""
    for level in levels:
        rows = leaves // level.shape[1]
        level[rows, leaves % level.shape[1]] = values
        values = level[rows].sum(-1)
        leaves = rows


def find_leaves(levels: list[Any], masses: Any) -> Any:
    """The leaves in which the sum over all leaves, from the first on, reaches `masses`; never one
    of value 0. A mass lies between 0 and the total."""
    nodes = (masses < 0) * 0  # the root
    for level in reversed(levels):
        children = level[nodes]
        sums = children.cumsum(-1)
        masses = masses.clip(max=sums[:, -1] * BELOW_ONE)  # rounding must not lead past the last
        passed = sums <= masses[:, None]
        child = passed.sum(-1).clip(max=level.shape[1] - 1)
        masses = (masses - (children * passed).sum(-1)).clip(min=0)
        nodes = nodes * level.shape[1] + child
    return nodes
