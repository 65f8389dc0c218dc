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
            # copy_ would broadcast
            assert mine.shape == given.shape, f"captured {mine.shape}, called with {given.shape}"
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
    if isinstance(outputs, dict):
        return {key: copy_of(x) for key, x in outputs.items()}
    if hasattr(outputs, "_fields"):  # a named tuple
        return type(outputs)(*map(copy_of, outputs))
    if isinstance(outputs, tuple | list):
        return type(outputs)(map(copy_of, outputs))
    if outputs is None:
        return None
    raise TypeError(f"a CUDA graph returns tensors and collections of them, not {type(outputs)}")


def as_tensor(array: np.ndarray) -> Tensor:
    """What environments gave, for networks: float32, but pictures stay bytes."""
    x = torch.from_numpy(array)
    return x if x.dtype == torch.uint8 and x.ndim > 2 else x.float()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The same on the device. Never waits for the GPU's work."""
    x = as_tensor(array)
    # Pinned memory comes from a cache, which gives it out again only when the copy is over.
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


class Oracle:
    """A function of observations: `ask` it, do something else, then take the `answer`, in NumPy.

    The answer is waited for, but no work that was started after the question: so a GPU may choose
    actions, then learn, while the CPU already steps the environments. The ways there and back, by
    memory that is used again each time, are parts of what `capture` may make a CUDA graph of: so
    take an answer before you ask again.
    """

    def __init__(self, function: Callable, device: torch.device, capture: Callable):
        self.function, self.device = function, device
        self.question: Any = None  # pinned memory, once the shapes are known
        self.there: Any = None  # the question on the device
        self.reply: Any = None
        self.arrived = torch.cuda.Event() if device.type == "cuda" else None
        self.consult = capture(self._consult)

    def ask(self, obs: np.ndarray) -> Tensor:
        """Returns the observations on the device; the next question overwrites them there."""
        if self.arrived is None:
            self.there = as_tensor(obs)
            self.reply = self.function(self.there)
            return self.there
        if self.question is None:
            x = as_tensor(obs)
            self.question, self.there = x.pin_memory(), x.to(self.device)
        self.question.numpy()[...] = obs
        self.consult()
        self.arrived.record()
        return self.there

    def _consult(self) -> None:
        self.there.copy_(self.question, non_blocking=True)
        reply = self.function(self.there)
        if self.reply is None:
            self.reply = torch.empty_like(reply, device="cpu", pin_memory=True)
        self.reply.copy_(reply, non_blocking=True)

    def answer(self) -> np.ndarray:
        if self.arrived is None:
            return self.reply.numpy()
        self.arrived.synchronize()
        return self.reply.numpy().copy()


def compiled(function: Callable, args: Any) -> Callable:
    """The function for --compile: with the random numbers of eager mode."""
    if not args.compile:
        return function
    torch._inductor.config.fallback_random = True
    torch._inductor.config.deterministic = args.torch_deterministic
    return torch.compile(function)


def captured(function: Callable, device: Any, args: Any) -> Callable:
    """The function as a CUDA graph, on a GPU and unless --no-cudagraphs."""
    if device.type != "cuda" or not args.cudagraphs:
        return function
    return CudaGraph(function)
