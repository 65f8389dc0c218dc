"""What JAX scripts share: models, initial weights, permutations, patches of images, metrics."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.train_state import TrainState

Params = Mapping[str, Any]  # arrays by name, in Flax nested


class Model:
    """Arrays by name, saved and loaded as evaluate.py asks; a script adds `act(obs, greedy)`."""

    def __init__(self, params: Params):
        self.params = params

    @classmethod
    def from_args(cls, envs: Any, args: Any) -> Self:
        return cls({})  # load_state_dict brings everything

    def state_dict(self) -> dict[str, Any]:
        return jax.tree.map(np.asarray, self.params)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.params = dict(state)

    def split(self) -> list[Self]:
        """One model for each entry of the arrays' first axis."""
        params = jax.device_get(self.params)
        count = len(jax.tree.leaves(params)[0])
        return [type(self)(jax.tree.map(lambda x, i=i: x[i], params)) for i in range(count)]


class FlaxModel(Model):
    """A Flax network that has `act(obs)`, and its parameters."""

    def __init__(self, network: Any, params: Params):
        super().__init__(params)
        self.network = network

    def act(self, obs: np.ndarray, greedy: bool = True) -> np.ndarray:
        return np.asarray(_act(self.network, self.params, obs))


@partial(jax.jit, static_argnums=0)
def _act(network: Any, params: Params, obs: jax.Array) -> jax.Array:
    return network.apply(params, obs, method="act")


def orthogonal(rng: np.random.Generator, std: float, *shape: int) -> np.ndarray:
    """A random matrix with orthogonal rows or columns, the longer ones, times `std`.

    NumPy's, not JAX's: nothing to compile, and jaxlib 0.10's batched decompositions can wait for
    each other for ever on machines with few cores.
    """
    q, r = np.linalg.qr(rng.standard_normal((max(shape), min(shape))))
    q = q * np.sign(np.diagonal(r))
    return (std * (q if shape[0] > shape[1] else q.T)).astype(np.float32)


def train_state(apply: Callable | None, params: Params, optimizer: Any) -> TrainState:
    """Flax's TrainState: a network's function, its parameters and their optimiser."""
    return TrainState.create(apply_fn=apply, params=params, tx=optimizer)


def permutations(key: jax.Array, count: int, size: int, cut: int) -> jax.Array:
    """`count` random permutations of range(size), in rows of `cut`: (count * size / cut, cut).

    Sorted random numbers whose last bits are indices: ten times as quick on a CPU as sorting pairs
    of number and index. Numbers that are equal but for the index stay in order; it hardly matters.
    """
    bits = (size - 1).bit_length()
    noise = jax.random.bits(key, (count, size)) >> bits << bits
    order = jnp.sort(noise | jnp.arange(size, dtype=jnp.uint32)) & (2**bits - 1)
    return order.reshape(-1, cut)


def patches(x: jax.Array, size: int, stride: int) -> jax.Array:
    """The patches of a convolution, (..., rows, columns, size * size * channels), of images
    (..., height, width, channels); `size` is a multiple of `stride`.

    Their product with a matrix is the convolution. In a scan on the CPU, XLA takes a hundred times
    as long for the gradient of a convolution; on a GPU, it need not search for the fastest
    algorithm.
    """
    *batch, height, width, channels = x.shape

    # blocks of stride x stride pixels: (..., block_rows, block_columns, stride * stride * channels)
    block_rows = height // stride
    block_columns = width // stride
    x = x.reshape(*batch, block_rows, stride, block_columns, stride, channels)
    x = jnp.moveaxis(x, -4, -3)
    blocks = x.reshape(*batch, block_rows, block_columns, stride**2 * channels)

    # a patch is blocks_per_side x blocks_per_side blocks
    blocks_per_side = size // stride
    rows = block_rows - blocks_per_side + 1
    columns = block_columns - blocks_per_side + 1
    views = []
    for i in range(blocks_per_side):
        for j in range(blocks_per_side):
            views.append(blocks[..., i : i + rows, j : j + columns, :])
    return jnp.concatenate(views, -1)


def mean_of(updates: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """The mean of each metric over several updates."""
    return {tag: jnp.stack([metrics[tag] for metrics in updates]).mean(0) for tag in updates[0]}


def arrays_of(tree: Any) -> list[np.ndarray]:
    """The arrays of a tree in NumPy, for a checkpoint."""
    leaves = jax.tree.leaves(tree)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves]


def with_arrays(tree: Any, arrays: list[np.ndarray]) -> Any:
    """The tree with these arrays, which `arrays_of` returned, on its own devices."""
    leaves, structure = jax.tree.flatten(tree)
    new = []
    for leaf, array in zip(leaves, arrays, strict=True):
        if is_key(leaf):
            new.append(jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf)))
        else:
            # committed to a device only if it was: else programs would be compiled once more
            device = leaf.sharding if leaf.committed else None
            new.append(jax.device_put(np.asarray(array, leaf.dtype), device))
    return jax.tree.unflatten(structure, new)


def is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
