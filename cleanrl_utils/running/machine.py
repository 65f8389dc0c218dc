"""Facts about the machine and the code that a run is made with; the device it trains on."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cleanrl_utils.running.settings import TorchArgs
from cleanrl_utils.speed.compiler import load_late


def choose_device(args: Any) -> Any:
    """The device for torch, set up as the flags ask; JAX scripts (no torch imported) get None."""
    torch = sys.modules.get("torch")
    if not torch or not isinstance(args, TorchArgs):
        if not args.cuda:
            os.environ["JAX_PLATFORMS"] = "cpu"
            if jax := sys.modules.get("jax"):  # it has read the variable already
                jax.config.update("jax_platforms", "cpu")
        return None
    # Where a gradient stays zero, Adam's moments decay to numbers below 1e-38, which take a CPU
    # many times as long as others: let them be zero, in this thread and those it will start.
    _ = np.finfo(np.float32), np.finfo(np.float64)  # NumPy 2.3 and before would warn afterwards
    torch.set_flush_denormal(True)
    if not args.compile:
        load_late()
    if args.torch_threads:
        torch.set_num_threads(args.torch_threads)
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        # as use_deterministic_algorithms(True, warn_only=True), which imports the compiler for it
        torch.set_deterministic_debug_mode("warn")
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads it
    on_gpu = args.cuda and torch.cuda.is_available()
    if not on_gpu and (jax := sys.modules.get("jax")):  # a torch script with JAX's environments
        jax.config.update("jax_platforms", "cpu")
    return torch.device("cuda" if on_gpu else "cpu")


def describe_device(device: Any) -> str:
    if device is None:
        jax: Any = sys.modules.get("jax")
        return jax.devices()[0].device_kind if jax else "cpu"
    torch: Any = sys.modules["torch"]
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} torch thread{'s' * (torch.get_num_threads() > 1)}"


def git_state(folder: Path) -> dict[str, Any]:
    """Commit of the code; a container without git says it with CLEANRL_COMMIT."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=10
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        if commit := git("rev-parse", "HEAD"):
            return {"commit": commit, "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.TimeoutExpired):
        pass
    commit = os.environ.get("CLEANRL_COMMIT", "")
    return {"commit": commit, "dirty": False} if commit else {}


def versions() -> dict[str, str]:
    """Of the packages that are loaded: those are the ones that can matter."""
    tops = {name.partition(".")[0] for name in list(sys.modules)}
    names = {owner for top in tops for owner in owners().get(top, [])}
    found = {name: importlib.metadata.version(name) for name in sorted(names, key=str.lower)}
    return {"python": platform.python_version(), **found}


@cache
def owners() -> Mapping[str, list[str]]:
    """The packages that a module's first name can come from."""
    return importlib.metadata.packages_distributions()


def hardware(device: Any) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    if (path := Path("/proc/cpuinfo")).exists():
        lines = [line for line in path.read_text().splitlines() if line.startswith("model name")]
        cpu = lines[0].partition(":")[2].strip() if lines else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "device": describe_device(device),
        "os": platform.platform(),
    }
