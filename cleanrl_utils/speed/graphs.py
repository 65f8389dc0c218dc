"""CUDA graphs: replay a function's GPU work as one launch instead of hundreds.

    update = accelerate(partial(update, agent, optimizer, args), device, args)
    losses = update(*minibatch)

Without a GPU, and with --no-cudagraphs, the function stays what it is.
"""

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class CudaGraph:
    """`function` on tensors of fixed shapes, captured after a few calls and replayed afterwards.

    The first calls run eagerly, so that what happens only once (compilation, the optimizer's state)
    is over before the capture. They are real calls: nothing is done twice. All calls compute on the
    graph's own copies of the arguments and on one stream, so that the captured call differs in
    nothing from the eager ones. Tensors that the function closes over are used in place.
    """

    WARM_UP = 3  # calls
    MOST_WARM_UP = 20  # calls, where torch.compile goes on compiling
    running = False  # whether a graph is being warmed up or captured

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.calls = 0
        self.settled = False
        self.inputs: list[Tensor] | None = None
        self.stream = torch.cuda.Stream()
        self.graph: Any = None  # until it is captured

    def __call__(self, *args: Tensor) -> Any:
        if CudaGraph.running:  # as a part of a larger graph, which must see the same call each time
            return self.function(*args)
        self._set_inputs(args)
        if self.graph is None and self.calls >= self.WARM_UP and self.settled:
            self._capture()
        if self.graph is None:
            return self._warm_up()
        self.graph.replay()
        return copy_of(self.outputs)

    def _set_inputs(self, args: tuple[Tensor, ...]) -> None:
        if self.inputs is None:
            self.inputs = [arg.clone() for arg in args]
        for mine, given in zip(self.inputs, args, strict=True):
            # copy_ would broadcast
            assert mine.shape == given.shape, f"captured {mine.shape}, called with {given.shape}"
            mine.copy_(given)

    def _warm_up(self) -> Any:
        compiled_before = number_compiled()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            outputs = self._run()
        torch.cuda.current_stream().wait_stream(self.stream)
        self.calls += 1
        self.settled = number_compiled() == compiled_before or self.calls >= self.MOST_WARM_UP
        return copy_of(outputs)

    def _run(self) -> Any:
        CudaGraph.running = True
        try:
            return self.function(*self.inputs or [])
        finally:
            CudaGraph.running = False

    def _capture(self) -> None:
        """Sets `graph` only when the capture has succeeded: a broken one is never replayed."""
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # the autograd graphs of earlier calls
        torch.cuda.synchronize()
        try:
            # thread_local: other threads (NCCL watches its queues) go on as they like
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.outputs = self._run()
        except Exception as error:
            name = getattr(self.function, "__name__", None) or repr(self.function)
            raise RuntimeError(
                f"{name} could not be captured as a CUDA graph: run with --no-cudagraphs, and"
                " without --compile if it was given"
            ) from error
        self.graph = graph


def number_compiled() -> int:
    """How many graphs torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def copy_of(outputs: Any) -> Any:
    """A copy of what a graph returned: the next replay overwrites the graph's own tensors."""
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


def compile(function: Callable, args: Any) -> Callable:
    """The function compiled if --compile asks for it, with the random numbers of eager mode."""
    if not args.compile:
        return function
    torch._inductor.config.fallback_random = True
    torch._inductor.config.deterministic = args.torch_deterministic
    return torch.compile(function)


def capture(function: Callable, device: torch.device, args: Any) -> Callable:
    """The function as a CUDA graph if `device` is a GPU, unless --no-cudagraphs."""
    if device.type != "cuda" or not args.cudagraphs:
        return function
    return CudaGraph(function)


def accelerate(function: Callable, device: torch.device, args: Any) -> Callable:
    """The function compiled and captured as a CUDA graph, as the flags ask."""
    return capture(compile(function, args), device, args)


def as_tensor(array: np.ndarray) -> Tensor:
    """Observations as a tensor for networks: float32, but images stay bytes."""
    x = torch.from_numpy(array)
    return x if x.dtype == torch.uint8 and x.ndim > 2 else x.float()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Observations as a tensor on the device, without waiting for the GPU's work."""
    x = as_tensor(array)
    # Pinned memory comes from a cache, which gives it out again only when the copy is over.
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
