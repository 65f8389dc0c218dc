"""What JAX scripts share: models as dictionaries of arrays, initial weights, permutations."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]  # arrays of NumPy at first, of JAX then


class Model:
    """Arrays by name, saved and loaded as evaluate.py asks; a script adds `act(obs, greedy)`."""

    def __init__(self, params: Params):
        self.params = params

    @classmethod
    def from_args(cls, envs: Any, args: Any) -> Self:
        return cls({})  # load_state_dict brings everything

    def state_dict(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in self.params.items()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.params = dict(state)

    def split(self) -> list[Self]:
        """One model for each entry of the arrays' first axis."""
        params = jax.device_get(self.params)
        count = len(next(iter(params.values())))
        return [type(self)({name: x[i] for name, x in params.items()}) for i in range(count)]


def orthogonal(rng: np.random.Generator, std: float, *shape: int) -> np.ndarray:
    """A random matrix with orthogonal rows or columns, the longer ones, times `std`.

    NumPy's, not JAX's: nothing to compile, and jaxlib 0.10's batched decompositions can wait for
    each other for ever on machines with few cores.
    """
    q, r = np.linalg.qr(rng.standard_normal((max(shape), min(shape))))
    q = q * np.sign(np.diagonal(r))
    return (std * (q if shape[0] > shape[1] else q.T)).astype(np.float32)


def permutations(key: jax.Array, count: int, size: int, cut: int) -> jax.Array:
    """`count` random permutations of range(size), in rows of `cut`: (count * size / cut, cut).

    Sorted random numbers whose last bits are indices: ten times as quick on a CPU as sorting pairs
    of number and index. Numbers that are equal but for the index stay in order; it hardly matters.
    """
    bits = (size - 1).bit_length()
    noise = jax.random.bits(key, (count, size)) >> bits << bits
    order = jnp.sort(noise | jnp.arange(size, dtype=jnp.uint32)) & (2**bits - 1)
    return order.reshape(-1, cut)
