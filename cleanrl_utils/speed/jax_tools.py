"""What JAX scripts share: models, layers, initial weights, a gradient step, state as few arrays."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from math import prod
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

Params = dict[str, Any]  # arrays by name, in Flax nested; NumPy's before the first update
Packed = dict[str, Any]  # vectors by type: see Packing


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


def mlp(x: jax.Array, *widths: int, like_torch: bool = False) -> jax.Array:
    """In a Flax module: layers of these widths with ReLU between them. They start with Flax's
    weights, or with the smaller ones of torch's nn.Linear, which leave a tanh behind them alive."""
    for i, width in enumerate(widths):
        bound = x.shape[-1] ** -0.5
        uniform = partial(jax.random.uniform, minval=-bound, maxval=bound)
        init: Any = dict(kernel_init=uniform, bias_init=uniform) if like_torch else {}
        x = nn.Dense(width, **init)(x if i == 0 else nn.relu(x))
    return x


def conv(x: jax.Array, features: int, size: int, stride: int, padding: str = "VALID") -> jax.Array:
    """In a Flax module: a convolution of (batch, height, width, channels), without padding unless
    it is "SAME"."""
    return nn.Conv(features, (size, size), stride, padding=padding)(x)


def descend(
    loss: Callable, optimizer: Any, params: Params, moments: Any, *rest: Any
) -> tuple[Params, Any, jax.Array]:
    """One step down loss(params, *rest), which returns (loss, what is to be logged): new parameters
    and moments, and the latter."""
    grads, losses = jax.grad(loss, has_aux=True)(params, *rest)
    updates, moments = optimizer.update(grads, moments)
    return optax.apply_updates(params, updates), moments, losses  # type: ignore[return-value]


def in_turn(update: Callable, carry: tuple, parts: tuple, arrays: Any) -> tuple:
    """carry = update(*carry, x, *part) for each of `parts`, in a program, where x is the part's
    entry of the arrays. Where parts repeat themselves, it is a loop: its body is compiled once."""
    begin = 0
    while begin < len(parts):
        period, times = repetition(parts[begin:])
        body, end = parts[begin : begin + period], begin + period * times

        def once(carry: tuple, xs: Any, body: tuple = body) -> tuple[tuple, None]:
            for i, part in enumerate(body):
                carry = update(*carry, jax.tree.map(lambda x, i=i: x[i], xs), *part)
            return carry, None

        cut = lambda x: x[begin:end].reshape(times, period, *x.shape[1:])  # noqa: B023, E731
        carry, _ = jax.lax.scan(once, carry, jax.tree.map(cut, arrays))
        begin = end
    return carry


def repetition(parts: tuple) -> tuple[int, int]:
    """What begins `parts`, again and again: how long it is, and how often it is there. Of all such
    beginnings the one that takes up the most."""

    def times(period: int) -> int:
        whole = range(len(parts) // period)
        same = (parts[i * period : (i + 1) * period] == parts[:period] for i in whole)
        return sum(takewhile(bool, same))

    periods = range(1, len(parts) // 2 + 1)
    best = max(periods, key=lambda n: n * times(n) * (times(n) > 1), default=1)
    return best, times(best)


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
    """What a convolution looks at, (..., height, width, size * size * channels), from pictures.

    Its product with a matrix is the convolution. In a scan on the CPU, XLA takes a hundred times as
    long for the gradient of a convolution; a GPU has nothing to search the quickest algorithm for.
    """
    *batch, height, width, channels = x.shape
    rows, columns, k = height // stride, width // stride, size // stride
    x = jnp.moveaxis(x.reshape(*batch, rows, stride, columns, stride, channels), -4, -3)
    x = x.reshape(*batch, rows, columns, stride**2 * channels)  # blocks of stride x stride pixels
    rows, columns = rows - k + 1, columns - k + 1
    views = [x[..., i : i + rows, j : j + columns, :] for i in range(k) for j in range(k)]
    return jnp.concatenate(views, -1)


class Packing:
    """All arrays of a tree as one vector for each type of number.

    Handing an array to a program on a GPU takes some microseconds, whatever its size: the fifty of
    networks and their optimisers take as long as the update itself. On a CPU it is the other way
    round for all but small networks: there a script can leave the tree as it is, with few=False.
    """

    def __init__(self, tree: Any, few: bool = True):
        self.few = few
        leaves, self.structure = jax.tree.flatten(tree)
        self.types, self.shapes = [str(x.dtype) for x in leaves], [x.shape for x in leaves]

    @partial(jax.jit, static_argnums=0)
    def pack(self, tree: Any) -> Any:
        if not self.few:
            return tree
        parts: dict[str, list[jax.Array]] = {kind: [] for kind in self.types}
        for kind, leaf in zip(self.types, jax.tree.leaves(tree), strict=True):
            parts[kind].append(leaf.reshape(-1))
        return {kind: jnp.concatenate(vectors) for kind, vectors in parts.items()}

    @partial(jax.jit, static_argnums=0)
    def unpack(self, vectors: Any) -> Any:
        return self.views(vectors) if self.few else vectors

    def views(self, vectors: Packed) -> Any:
        """The same of NumPy's vectors, without a copy."""
        leaves, starts = [], dict.fromkeys(self.types, 0)
        for kind, shape in zip(self.types, self.shapes, strict=True):
            start, starts[kind] = starts[kind], starts[kind] + prod(shape)
            leaves.append(vectors[kind][start : starts[kind]].reshape(shape))
        return jax.tree.unflatten(self.structure, leaves)

    def reader(self, function: Callable) -> Callable:
        """The function of a tree as one of the tree's vectors."""
        return lambda vectors, *rest: function(self.unpack(vectors), *rest)

    def fetch(self, vectors: Any) -> Any:
        """The tree with NumPy's arrays: few of them have to come from the device."""
        vectors = jax.device_get(vectors)
        return self.views(vectors) if self.few else vectors


def means(tags: Sequence[str], sums: jax.Array) -> dict[str, float]:
    """Mean by tag from (sums, how many there were), leaving out what there was none of."""
    return {tag: value / n for tag, value, n in zip(tags, *np.asarray(sums), strict=True) if n}


def dense(params: Params, obs: np.ndarray) -> np.ndarray:
    """What a Flax network of Dense layers with ReLU between them says, if its parameters are
    NumPy's: for a few rows it takes a third of the time of calling a program."""
    first, *rest = params["params"].values()
    x = obs.astype(np.float32) @ first["kernel"] + first["bias"]
    for layer in rest:
        x = np.maximum(x, 0) @ layer["kernel"] + layer["bias"]
    return x


def dense_inference(network: Any, packing: Packing) -> Callable[..., np.ndarray]:
    """What a Flax network of Dense layers with ReLU between them, and nothing else, says to
    observations, given its packed parameters. On a CPU it is NumPy that computes it for a few rows
    (and leaves it flat where the network shapes it).
    """
    compiled, on_cpu = jax.jit(packing.reader(network.apply)), jax.default_backend() == "cpu"

    def forward(vectors: Packed, obs: np.ndarray) -> np.ndarray:
        if not on_cpu or len(obs) > 8:
            return np.asarray(compiled(vectors, obs))
        return dense(packing.views({kind: np.asarray(x) for kind, x in vectors.items()}), obs)

    return forward
