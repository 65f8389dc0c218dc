"""The random generators of a run: seeded once, saved in checkpoints, used only by training.

torch is seeded only if the script has imported it; JAX scripts hold their keys in their state.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)  # CPU and every CUDA device


def derive_seed(*parts: int) -> int:
    """A seed that is a function of all `parts`, e.g. of (seed, iteration)."""
    return int(np.random.SeedSequence([part % 2**32 for part in parts]).generate_state(1)[0] >> 1)


def get_state() -> dict[str, Any]:
    """The states of all random generators."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }
    if torch := sys.modules.get("torch"):
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if (torch := sys.modules.get("torch")) and "torch" in state:
        torch.set_rng_state(state["torch"])
        gpus = range(torch.cuda.device_count())  # may be fewer than at the time of saving
        for gpu, stream in zip(gpus, state.get("cuda", [])):
            torch.cuda.set_rng_state(stream, gpu)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the random generators afterwards: the code inside does not affect training."""
    state = get_state()
    try:
        yield
    finally:
        set_state(state)
