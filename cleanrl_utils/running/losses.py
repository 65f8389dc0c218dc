"""Parts of losses, and means of the losses that torch updates return, for logging."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Losses = dict[str, Tensor]  # for each tag a scalar, or one per update


# Parts of losses whose gradients take a GPU few kernels, where torch's own take up to ten.
def larger(a: Tensor, b: Tensor) -> Tensor:
    """torch.max(a, b); where both are equal, the gradient goes to `a` instead of half to each."""
    return torch.where(b > a, b, a)


def clip(x: Tensor, low: float, high: float) -> Tensor:
    """x.clamp(low, high); where x is exactly a bound, there is no gradient."""
    return F.hardtanh(x, low, high)


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """(prediction - target).square(), with the same gradient."""
    return F.mse_loss(prediction, target.expand_as(prediction), reduction="none")


def stack(updates: Sequence[Losses]) -> Losses:
    """The losses of several updates as one tensor for each tag."""
    return {tag: torch.stack([losses[tag] for losses in updates]) for tag in updates[0]}


def mean_of(updates: Sequence[Losses]) -> Losses:
    """The mean of each loss over several updates."""
    rows = torch.stack([x for losses in updates for x in losses.values()])
    rows = rows.unflatten(0, (len(updates), -1)).transpose(0, 1).flatten(1)
    return dict(zip(updates[0], rows.mean(1), strict=True))


class Means:
    """Running means of losses, reset by `take`.

    Part of a run's state, so that a resumed run logs what an uninterrupted one would have logged.
    The sums, followed by the number of updates, are one tensor on the device of the losses and
    change in place, so that a CUDA graph can contain `add`.
    """

    def __init__(self) -> None:
        self.tags: list[str] = []
        self.sums: Any = None  # until the first losses
        self.one: Any = None  # added to the number of updates

    def add(self, losses: Losses) -> None:
        if self.one is None:
            self.tags = list(losses)
            self.one = torch.ones_like(losses[self.tags[0]])
            zeros = self.one.new_zeros(len(losses) + 1)
            self.sums = zeros if self.sums is None else zeros + self.sums.to(zeros.device)
        self.sums += torch.stack([*losses.values(), self.one])

    def take(self) -> dict[str, float]:
        """Return the mean of each loss by tag, empty if none was added, and reset."""
        if self.sums is None or self.sums[-1] == 0:
            return {}
        means = (self.sums[:-1] / self.sums[-1]).tolist()
        self.sums.zero_()
        return dict(zip(self.tags, means, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"tags": self.tags, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tags = list(state["tags"])
        self.sums = None if state["sums"] is None else state["sums"].clone()
        self.one = None  # the next losses say on which device
