"""One safe, atomic and exact file format for models and checkpoints, in torch and JAX alike.

A file is a safetensors file: arrays, plus JSON metadata that says how they nest. Nothing is ever
unpickled, a digest detects files that were cut off or changed, and a new file replaces the old one
in a single rename, so that a crash leaves either the old or the new file.

    save("x.safetensors", {"agent": agent, "optimizer": optimizer, "step": 3}, {"script": "ppo"})
    metadata, state = load("x.safetensors")
    agent.load_state_dict(state["agent"])
"""

import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cleanrl_utils.errors import BadInput

FORMAT = "cleanrl-1"


def save(
    path: str | Path,
    state: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    must_be_finite: Container[str] = (),
) -> bool:
    """Write nested `state` (modules, optimisers, arrays, numbers, containers), atomically.

    Returns False and writes nothing if an entry in `must_be_finite` holds NaN or infinity.
    """
    arrays: dict[str, np.ndarray] = {}  # filled by _pack
    structure = {name: _pack(value, name, arrays) for name, value in state.items()}
    for key, array in arrays.items():
        name = key.partition(".")[0]
        if name in must_be_finite and array.dtype.kind == "f" and not np.isfinite(array).all():
            return False
    text = json.dumps({"structure": structure, "metadata": dict(metadata or {})})
    digest_and_text = json.dumps([_digest(arrays, text), text])
    header = {FORMAT: digest_and_text}  # one entry: the order of several is random
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(arrays, partial, metadata=header)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except SafetensorError as error:  # usually a full disk
        number = re.search(r"os error (\d+)", str(error))
        reason = os.strerror(int(number[1])) if number else str(error)
        raise OSError(errno.EIO, reason, str(path)) from None
    finally:
        partial.unlink(missing_ok=True)
    if os.name == "posix":  # so that the rename survives a power cut
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    return True


def gather(state: Mapping[str, Any]) -> None:
    """Send the states of this process to the process that writes the checkpoint."""
    for value in state.values():
        if hasattr(value, "state_dict"):
            value.state_dict()


def load(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read (metadata, state). Arrays are NumPy's, or torch's if they were saved from torch."""
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"{path}: no such file")
    try:
        with safe_open(path, framework="numpy") as file:
            header = (file.metadata() or {}).get(FORMAT)
            if header is None:
                raise BadInput(f"{path}: a safetensors file, but not written by CleanRL")
            digest, text = read_header(header)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise BadInput(f"{path}: not a CleanRL file, or cut off ({error})") from None
    if _digest(arrays, text) != digest:
        raise BadInput(f"{path}: damaged or changed (its contents do not match its digest)")
    try:
        content = json.loads(text)
        state = {name: _unpack(value, arrays) for name, value in content["structure"].items()}
        return dict(content["metadata"]), state
    except Exception as error:  # its digest is right, but this project did not write it
        kind = type(error).__name__
        raise BadInput(f"{path}: not a CleanRL file ({kind} in its structure)") from None


def read_header(header: str) -> tuple[str, str]:
    """Read (digest, text); any other content is a ValueError."""
    parts = json.loads(header)
    if not isinstance(parts, list) or [type(part) for part in parts] != [str, str]:
        raise ValueError("an unknown header")
    return parts[0], parts[1]


def restore(target: Any, saved: Any) -> Any:
    """Restore `saved` into `target`, in place if possible; returns the restored value."""
    torch = sys.modules.get("torch")
    if hasattr(target, "load_state_dict"):
        groups = [dict(group) for group in getattr(target, "param_groups", [])]
        target.load_state_dict(saved)
        _check_moments(target)
        for before, group in zip(groups, getattr(target, "param_groups", []), strict=True):
            # load_state_dict also loads flags for the device that saved: keep those of this device.
            for flag in ("capturable", "fused"):
                if flag in before:
                    group[flag] = before[flag]
            # A CUDA graph reads the learning rate from its tensor: write the saved value into it.
            if torch and isinstance(before["lr"], torch.Tensor):
                group["lr"] = before["lr"].copy_(torch.as_tensor(group["lr"]))
    elif isinstance(target, np.random.Generator):
        target.bit_generator.state = saved
    elif torch and isinstance(target, torch.Tensor):
        with torch.no_grad():
            target.copy_(saved)
    elif isinstance(target, np.ndarray):
        target[...] = saved
    elif _is_jax_tree(target):
        return _restore_jax(target, saved)
    else:
        return saved
    return target


def _check_moments(target: Any) -> None:
    """Check the shapes of moments: a fused optimiser would write beyond the end of smaller ones."""
    torch = sys.modules.get("torch")
    if not torch or not isinstance(target, torch.optim.Optimizer):
        return
    for parameter, moments in target.state.items():
        for name, value in moments.items():
            shape = torch.Size() if name == "step" else parameter.shape
            if not isinstance(value, torch.Tensor) or value.shape != shape:
                raise ValueError(f"{name} of the optimiser does not have the shape {tuple(shape)}")


def nbytes(value: Any) -> int:
    """Bytes of all arrays in `value`, filled or not: the largest size of a checkpoint."""
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, Mapping):
        return sum(nbytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(nbytes(item) for item in value)
    return sum(leaf.nbytes for leaf in _jax_leaves(value)) if _is_jax_tree(value) else 0


def _digest(arrays: Mapping[str, np.ndarray], text: str) -> str:
    sha = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        sha.update(f"{name} {array.dtype} {array.shape}".encode())
        sha.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


# Nesting as JSON: an array is {"array": key}, a container is {"tuple" | "list" | "dict": ...} with
# dict entries as pairs (their keys may be integers), and plain JSON values are unchanged.


def _pack(value: Any, key: str, arrays: dict[str, np.ndarray]) -> Any:
    torch = sys.modules.get("torch")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, np.random.Generator):
        value = value.bit_generator.state
    if torch and isinstance(value, torch.Tensor):
        arrays[key] = np.asarray(value.detach().cpu().numpy(), order="C")
        return {"array": key, "kind": "torch"}
    if isinstance(value, np.ndarray | np.generic):
        arrays[key] = np.asarray(value, order="C")
        return {"array": key, "kind": "numpy"}
    if _is_jax_tree(value):
        leaves = _jax_leaves(value)
        return {"leaves": [_pack(leaf, f"{key}.{i}", arrays) for i, leaf in enumerate(leaves)]}
    if isinstance(value, Mapping):
        pairs = [[name, _pack(item, f"{key}.{name}", arrays)] for name, item in value.items()]
        return {"dict": pairs}
    if type(value) in (list, tuple):
        kind = type(value).__name__
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return {kind: list(value)}  # e.g. the 625 numbers of Python's random state
        return {kind: [_pack(item, f"{key}.{i}", arrays) for i, item in enumerate(value)]}
    raise TypeError(f"{key}: cannot be saved ({type(value).__name__})")


def _unpack(node: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if not isinstance(node, dict):
        return node
    if "array" in node:
        array = arrays[node["array"]]
        if node["kind"] != "torch":
            return array
        import torch

        return torch.from_numpy(array)
    if "dict" in node:
        return {key: _unpack(value, arrays) for key, value in node["dict"]}
    if "tuple" in node:
        return tuple(_unpack(item, arrays) for item in node["tuple"])
    items = node["list"] if "list" in node else node["leaves"]
    return [_unpack(item, arrays) for item in items]


# JAX state is any pytree: its leaves are saved in order and restored into the tree of the new run.


def _is_jax_tree(value: Any) -> bool:
    jax: Any = sys.modules.get("jax")
    return bool(jax) and any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))


def _is_key(leaf: Any) -> bool:
    import jax

    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _jax_leaves(tree: Any) -> list[Any]:
    import jax

    leaves = jax.tree.leaves(tree)
    return [np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf) for leaf in leaves]


def _restore_jax(target: Any, saved: list[Any]) -> Any:
    import jax

    leaves, tree = jax.tree.flatten(target)
    if len(leaves) != len(saved):
        raise BadInput(f"the saved state has {len(saved)} arrays where this run has {len(leaves)}")
    new: list[Any] = []
    for leaf, value in zip(leaves, saved, strict=True):
        if _is_key(leaf):
            new.append(jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)))
        elif isinstance(leaf, jax.Array):
            new.append(jax.device_put(np.asarray(value, leaf.dtype), leaf.sharding))
        else:
            new.append(value if isinstance(leaf, np.ndarray) else type(leaf)(value))
    return jax.tree.unflatten(tree, new)
