"""Facts about the machine that a run is made on; the device it trains on."""

import importlib.metadata
import os
import platform
import sys
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


def versions() -> dict[str, str]:
    """Of the packages that are loaded: those are the ones that can matter."""
    loaded = {name.partition(".")[0] for name in list(sys.modules)}
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        if not loaded.isdisjoint(modules_of(package)):
            found.setdefault(package.name, package.version)
    names = sorted(found, key=str.lower)
    return {"python": platform.python_version()} | {name: found[name] for name in names}


def modules_of(package: importlib.metadata.Distribution) -> set[str]:
    """The top-level modules that a package installs.

    importlib.metadata.packages_distributions knows them too, but takes ten times as long.
    """
    if declared := (package.read_text("top_level.txt") or "").split():
        return set(declared)
    lines = (package.read_text("RECORD") or "").splitlines()
    files = [line.partition(",")[0].strip('"') for line in lines]
    return {path.partition("/")[0].removesuffix(".py") for path in files if path.endswith(".py")}


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


def peak_memory(device: Any) -> dict[str, int]:
    """The most memory that this process has used so far, in MB, and of the GPU, if it uses one."""
    peaks = {"": host_peak()}
    if device is None:
        jax: Any = sys.modules.get("jax")
        stats = jax.devices()[0].memory_stats() if jax else None
        gpu = (stats or {}).get("peak_bytes_in_use", 0)
    else:
        torch: Any = sys.modules["torch"]
        gpu = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    if gpu:
        peaks["gpu_"] = gpu
    return {where: round(peak / 1e6) for where, peak in peaks.items()}


def host_peak() -> int:
    """The most memory of the CPU that this process has used, in bytes."""
    if (path := Path("/proc/self/status")).exists():
        # not getrusage here: it begins with what the process had that started this one
        lines = [line for line in path.read_text().splitlines() if line.startswith("VmHWM")]
        if lines:
            return int(lines[0].split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
