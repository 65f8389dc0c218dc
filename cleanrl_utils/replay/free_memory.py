"""How much memory is free, and whether a replay memory fits."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from cleanrl_utils.errors import BadInput

if TYPE_CHECKING:
    import torch


def check_memory(needed: int, capacity: int, device: torch.device) -> None:
    """Refuse before training a memory that does not fit: allocated lazily, it fails hours later."""
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
    """Bytes of main memory that can still be allocated, as far as the system tells."""
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
    """The number after `name` in a kernel file, or its first one; None if there is none."""
    try:
        with open(path) as file:
            words = file.read().split()
        return int(words[words.index(name) + 1 if name else 0])
    except (OSError, ValueError, IndexError):
        return None
