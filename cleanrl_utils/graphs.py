"""CUDA graphs: replay a function's GPU work as one launch instead of hundreds."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class CudaGraph:
    """`function` on tensors of fixed shapes, captured on its fourth call and replayed ever after.

    The first calls run eagerly (on a side stream, as capture asks for), so that lazy
    initialisation, the optimiser's state among it, is over by then; they are real calls, nothing
    is done twice. Arguments are copied into the graph's own tensors; what the function closes over
    is used in place.
    """

    WARM_UP = 3

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.calls = 0
        self.stream = torch.cuda.Stream()
        self.graph: Any = None  # until it is captured

    def __call__(self, *args: Tensor) -> Any:
        if self.graph is None:
            if self.calls < self.WARM_UP:
                self.calls += 1
                return self._eagerly(*args)
            self._capture(*args)
        for mine, given in zip(self.inputs, args, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return copy_of(self.outputs)

    def _eagerly(self, *args: Tensor) -> Any:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            outputs = self.function(*args)
        torch.cuda.current_stream().wait_stream(self.stream)
        return outputs

    def _capture(self, *args: Tensor) -> None:
        self.inputs = [arg.clone() for arg in args]
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # other threads (NCCL watches its queues) go on as they like
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.outputs = self.function(*self.inputs)


def copy_of(outputs: Any) -> Any:
    """Outputs live in the graph's memory and change at the next replay: hand out copies."""
    if isinstance(outputs, Tensor):
        return outputs.clone()
    if isinstance(outputs, tuple | list):
        return type(outputs)(copy_of(x) for x in outputs)
    return outputs


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """What environments gave, for networks: float64 as float32. Never waits for the GPU's work."""
    x = torch.from_numpy(array)
    x = x.float() if x.dtype == torch.float64 else x
    # Pinned memory comes from a cache, which gives it out again only when the copy is over.
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


class ToHost:
    """A tensor on its way to the host: `numpy()` waits for it, but not for work started since.

    So a GPU may choose actions, then learn, while the CPU already steps the environments.
    """

    def __init__(self, x: Tensor):
        self.x = x.to("cpu", non_blocking=True)  # pinned, if x is on a GPU
        self.arrived = torch.cuda.Event() if x.is_cuda else None
        if self.arrived is not None:
            self.arrived.record()

    def numpy(self) -> np.ndarray:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.x.numpy()
