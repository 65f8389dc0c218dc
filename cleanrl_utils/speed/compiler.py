"""Start without torch's compiler where nothing is compiled: importing it takes 1.5 s.

Torch's optimisers import the compiler (torch._dynamo) for one reason: to tell it not to compile
them. As long as nothing else has imported it, nothing is compiled, and there is nothing to tell.
Where something does import it, at any time, torch's own functions run as they are.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

COMPILER = "torch._dynamo"


def load_late() -> None:
    """Let torch's optimisers work without importing the compiler.

    A version of torch with other code inside stays as it is: it only starts more slowly.
    """
    if COMPILER in sys.modules:
        return
    from torch import optim

    for method in vars(optim.Optimizer).values():
        if written_in(method, "torch._compile"):
            # torch looks here for the method that its compiler does not compile
            plain = method.__wrapped__
            not_compiled = disabled_in_compiler(plain)
            plain.__dynamo_disable = without_compiler(plain, otherwise=not_compiled)
    for optimizer in (optim.Adam, optim.AdamW, optim.RMSprop, optim.SGD):
        step = vars(optimizer).get("step")
        if written_in(step, "torch.optim.optimizer") and not hasattr(step, "hooked"):
            plain = in_grad_mode(step.__wrapped__)
            optimizer.step = without_compiler(plain, otherwise=step)  # type: ignore[method-assign]


def written_in(function: Any, module: str) -> bool:
    """Whether a function is a wrapper that this module has put around another one."""
    place = getattr(function, "__globals__", {}).get("__name__")
    return place == module and hasattr(function, "__wrapped__")


def without_compiler(plain: Callable, otherwise: Callable) -> Callable:
    """`plain` as long as nothing has imported the compiler, then `otherwise`."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        function = otherwise if COMPILER in sys.modules else plain
        return function(*args, **kwargs)

    return call


def disabled_in_compiler(method: Callable) -> Callable:
    """A method that the compiler does not compile, as torch makes it."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        import torch._dynamo

        return torch._dynamo.disable(method, wrapping=False)(*args, **kwargs)

    return call


def in_grad_mode(step: Callable) -> Callable:
    """A step of an optimiser in the grad mode that it asks for, as torch takes it."""

    @functools.wraps(step)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return call
