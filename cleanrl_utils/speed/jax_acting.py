"""Acting with JAX networks on the CPU: NumPy computes what JAX defines."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from cleanrl_utils.speed.jax_tools import Model, Params
from cleanrl_utils.speed.straight_line import straight_line


class NumpyModel(Model):
    """A Flax network with its parameters, whose methods are computed by NumPy."""

    def __init__(self, network: Any, params: Params | None = None):
        super().__init__(params or {})
        self.network = network
        self._computed: dict[str, Callable] = {}

    def compute(self, method: str, obs: np.ndarray, *inputs: np.ndarray) -> np.ndarray:
        """What the network's method returns."""
        if method not in self._computed:
            self._computed[method] = in_numpy(partial(self.network.apply, method=method))
        return self._computed[method](self.params, obs.astype(np.float32, copy=False), *inputs)


def in_numpy(function: Callable) -> Callable[..., np.ndarray]:
    """The same function of (params, *inputs), computed by NumPy operation by operation.

    For the few observations of one step, NumPy is faster than the call of a compiled program, and
    its results do not depend on XLA's fusions. A function with other operations than the tables
    below (say a convolution) is compiled instead.
    """
    compiled = jax.jit(function)
    programs: dict[tuple, Callable] = {}

    def call(params: Any, *inputs: np.ndarray) -> np.ndarray:
        shapes = tuple([x.shape for x in inputs])
        if shapes not in programs:
            jaxpr = jax.make_jaxpr(function)(params, *inputs)
            translated = translate(jaxpr, num_inputs=len(inputs))
            programs[shapes] = translated or (lambda *given: np.asarray(compiled(*given)))
        return programs[shapes](params, *inputs)

    return call


def _split(axis: int, sizes: tuple[int, ...], **_: Any) -> Callable:
    ends = np.cumsum(sizes).tolist()
    parts = [slice(end - n, end) for n, end in zip(sizes, ends, strict=True)]
    indices = [(*(slice(None),) * axis, part) for part in parts]
    return lambda x: [x[i] for i in indices]


def _broadcast(shape: tuple[int, ...], broadcast_dimensions: tuple[int, ...], **_: Any) -> Callable:
    def broadcast(x: np.ndarray) -> np.ndarray:
        expanded = [1] * len(shape)
        for axis, size in zip(broadcast_dimensions, np.shape(x), strict=True):
            expanded[axis] = size
        return np.broadcast_to(np.reshape(x, expanded), shape)

    return broadcast


# By the name of JAX's primitive. Those of the second table are functions of its parameters.
ELEMENTWISE: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "exp": np.exp,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "stop_gradient": lambda x: x,
}
OPERATIONS: dict[str, Callable] = {
    "dot_general": lambda **_: np.ndarray.dot,  # x @ y takes longer
    "split": _split,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda new_sizes, **_: lambda x: np.reshape(x, new_sizes),
    "squeeze": lambda dimensions, **_: lambda x: np.squeeze(x, dimensions),
    "convert_element_type": lambda new_dtype, **_: lambda x: np.asarray(x, new_dtype),
    "reduce_max": lambda axes, **_: lambda x: x.max(axes),
    "reduce_sum": lambda axes, **_: lambda x: x.sum(axes),
    "argmax": lambda axes, **_: lambda x: x.argmax(*axes),
}
PLAIN_PRODUCT = (((1,), (0,)), ((), ()))  # x @ y of two matrices


def translate(program: Any, num_inputs: int) -> Callable[..., np.ndarray] | None:
    """The traced function of (params, *inputs) as NumPy operations; None if it has others.

    Every array has a place in one list. What depends on nothing is computed here, what depends on
    the parameters alone once for each set of parameters.
    """
    places: list[Any] = [None] * len(program.jaxpr.invars)
    inputs = range(len(places))
    known: set[int] = set()
    steps: list[tuple[Any, list[int], list[int]]] = []  # operation, where it reads and writes

    def new_place(value: Any = None, is_known: bool = False) -> int:
        places.append(value)
        if is_known:
            known.add(len(places) - 1)
        return len(places) - 1

    def walk(jaxpr: Any, constants: Any, arguments: Any) -> list[int]:
        found = dict(zip(jaxpr.invars, arguments, strict=True))
        for variable, value in zip(jaxpr.constvars, constants, strict=True):
            found[variable] = new_place(np.asarray(value), is_known=True)

        def read(variable: Any) -> int:
            if hasattr(variable, "val"):
                value = np.asarray(variable.val, variable.aval.dtype)  # JAX's own type is slow
                return new_place(value, is_known=True)
            return found[variable]

        for equation in jaxpr.eqns:
            read_from = [read(variable) for variable in equation.invars]
            inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
            if inner is not None:  # a function within the function, say relu
                write_to = walk(inner.jaxpr, inner.consts, read_from)
            else:
                write_to = add_step(equation, read_from)
            found.update(zip(equation.outvars, write_to, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def add_step(equation: Any, read_from: list[int]) -> list[int]:
        name = equation.primitive.name
        operation = ELEMENTWISE.get(name)
        if name in OPERATIONS:
            operation = OPERATIONS[name](**equation.params)
        if name == "dot_general" and equation.params["dimension_numbers"] != PLAIN_PRODUCT:
            operation = None
        if operation is None or not known.issuperset(read_from):
            write_to = [new_place() for _ in equation.outvars]
            steps.append((operation, read_from, write_to))
            return write_to
        results = operation(*(places[i] for i in read_from))
        if not equation.primitive.multiple_results:
            results = [results]
        return [new_place(result, is_known=True) for result in results]

    (output,) = walk(program.jaxpr, program.consts, inputs)
    dtype = program.out_avals[0].dtype
    needed = {output}
    for _, read_from, write_to in reversed(steps):  # say, actions need no log-probability
        if not needed.isdisjoint(write_to):
            needed.update(read_from)
    steps = [step for step in steps if not needed.isdisjoint(step[2])]
    if any(operation is None for operation, _, _ in steps):
        return None
    first_input = len(inputs) - num_inputs
    per_call = {i for i in inputs if i >= first_input}  # places that change with every call
    for _, read_from, write_to in steps:
        if not per_call.isdisjoint(read_from):
            per_call.update(write_to)
    of_params = [step for step in steps if per_call.isdisjoint(step[2])]
    of_calls = [step for step in steps if not per_call.isdisjoint(step[2])]
    used_params = [i for i in range(first_input) if i in needed]
    written = {i for _, _, write_to in of_params for i in write_to}
    kept = sorted(written.union(used_params) & {output}.union(*[step[1] for step in of_calls]))
    constants = {i: places[i] for i in known}
    of_every_call = straight_line(of_calls, [*kept, *inputs[first_input:]], [output], constants)
    prepare = straight_line(of_params, used_params, kept, constants)
    last_params: Any = None
    prepared: list[np.ndarray] = []

    def run(params: Any, *arrays: np.ndarray) -> np.ndarray:
        nonlocal last_params, prepared
        if params is not last_params:
            leaves = jax.tree.leaves(params)
            prepared = prepare(*[np.asarray(leaves[i]) for i in used_params])
            last_params = params
        (result,) = of_every_call(*prepared, *arrays)
        return result.astype(dtype, copy=False)

    return run
