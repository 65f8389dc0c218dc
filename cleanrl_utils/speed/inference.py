"""Acting in a training loop: NumPy observations in, NumPy actions or values out, no gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cleanrl_utils.speed.graphs import as_tensor, capture, compile
from cleanrl_utils.speed.numpy_networks import MOST_ROWS_IN_NUMPY, numpy_method

Forward = Callable[[np.ndarray], np.ndarray]


class PolicyOnDevice:
    """A function of observations that computes on the device while the CPU does something else.

    `start` sends it observations, `result` waits for what it returns, but not for work that was
    started in between: so a GPU chooses actions and then learns, while the CPU already steps the
    environments. The copies to the device and back are part of the CUDA graph. They use the same
    memory each time: take a result before you start again.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], device: torch.device, args: Any):
        self.function = compile(torch.no_grad()(function), args)
        self.device = device
        self.host_obs: Any = None  # pinned memory, once the shapes are known
        self.obs: Any = None  # on the device
        self.output: Any = None  # pinned memory
        self.finished = torch.cuda.Event() if device.type == "cuda" else None
        self.transfer_and_compute = capture(self._transfer_and_compute, device, args)

    def start(self, obs: np.ndarray) -> Tensor:
        """Returns the observations on the device; the next start overwrites them."""
        if self.finished is None:
            self.obs = as_tensor(obs)
            self.output = self.function(self.obs)
            return self.obs
        if self.host_obs is None:
            x = as_tensor(obs)
            self.host_obs = x.pin_memory()
            self.obs = x.to(self.device)
        self.host_obs.numpy()[...] = obs
        self.transfer_and_compute()
        self.finished.record()
        return self.obs

    def _transfer_and_compute(self) -> None:
        self.obs.copy_(self.host_obs, non_blocking=True)
        output = self.function(self.obs)
        if self.output is None:
            self.output = torch.empty_like(output, device="cpu", pin_memory=True)
        self.output.copy_(output, non_blocking=True)

    def result(self) -> np.ndarray:
        if self.finished is None:
            return self.output.numpy()
        self.finished.synchronize()
        return self.output.numpy().copy()

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        self.start(obs)
        return self.result()


def inference(function: Callable, device: torch.device, args: Any) -> Forward:
    """A network, or another function of observations, as a function from NumPy to NumPy. On the
    CPU, NumPy computes a network of small layers, with the weights that optimizers change."""
    on_device = PolicyOnDevice(lambda obs: function(obs), device, args)
    small = device.type == "cpu" and args.num_envs <= MOST_ROWS_IN_NUMPY
    if not small or not isinstance(function, nn.Module):
        return on_device
    in_numpy = numpy_method(function, "forward")
    if in_numpy is None:
        return on_device
    return lambda obs: in_numpy(obs) if in_numpy.is_valid() else on_device(obs)
