"""Acting in a training loop: NumPy observations in, NumPy actions or values out, no gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cleanrl_utils.speed.graphs import as_tensor, capture, compile

Forward = Callable[[np.ndarray], np.ndarray]
ACTIVATIONS: dict[type, Forward] = {nn.ReLU: lambda x: np.maximum(x, 0), nn.Tanh: np.tanh}
MOST_ROWS_IN_NUMPY = 8  # with more, NumPy would start threads of its own


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
    """A network, or another function of observations, as a function from NumPy to NumPy."""
    on_device = PolicyOnDevice(lambda obs: function(obs), device, args)
    in_numpy = device.type == "cpu" and not args.compile
    return numpy_forward(function, otherwise=on_device) if in_numpy else on_device


def affine(weight: np.ndarray, bias: np.ndarray) -> Forward:
    return lambda x: x @ weight + bias


def numpy_forward(network: Any, otherwise: Forward) -> Forward:
    """A chain of linear layers, ReLU and tanh on the CPU, computed by NumPy: in a fifth of torch's
    time for a few rows. It uses the weights themselves, which optimizers change in place. Other
    networks and larger batches go to `otherwise`."""
    if getattr(type(network), "forward", None) is not nn.Sequential.forward:
        return otherwise
    layers: list[Forward] = []
    for layer in network.children():
        if type(layer) is nn.Linear and layer.bias is not None:
            layers.append(affine(layer.weight.detach().numpy().T, layer.bias.detach().numpy()))
        elif type(layer) in ACTIVATIONS:
            layers.append(ACTIVATIONS[type(layer)])
        else:
            return otherwise

    def forward(obs: np.ndarray) -> np.ndarray:
        if len(obs) > MOST_ROWS_IN_NUMPY:
            return otherwise(obs)
        x = obs.astype(np.float32, copy=False)
        for layer in layers:
            x = layer(x)
        return x

    return forward
