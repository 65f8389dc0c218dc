"""Acting with JAX networks on the CPU: NumPy computes what JAX defines."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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


def _split(axis: int, sizes: tuple[int, ...], **_: Any) -> Callable | None:
    if len(sizes) == 1:
        return None  # its result would be a list of one array
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
CALLS = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call"}  # a function once, unlike scan


def numpy_operation(equation: Any) -> Callable | None:
    """What NumPy does for one of JAX's primitives; None if it is in neither table."""
    name = equation.primitive.name
    if name == "dot_general":
        matrices = all(x.aval.ndim == 2 for x in equation.invars)
        if not matrices or equation.params["dimension_numbers"] != PLAIN_PRODUCT:
            return None
    if name in OPERATIONS:
        return OPERATIONS[name](**equation.params)
    return ELEMENTWISE.get(name)


class Step(NamedTuple):
    """One operation. Every value of a program has a number, its place."""

    operation: Any  # None if NumPy has none
    read_from: list[int]
    write_to: list[int]


class Program:
    """A traced function as a list of steps. Operations on constants are no steps: they are computed
    once, when they are added."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.constants: dict[int, np.ndarray] = {}  # by place
        self.num_places = 0

    def new_places(self, count: int) -> list[int]:
        first = self.num_places
        self.num_places += count
        return list(range(first, self.num_places))

    def new_constant(self, value: np.ndarray) -> int:
        (place,) = self.new_places(1)
        self.constants[place] = value
        return place

    def add_function(self, jaxpr: Any, constants: Any, arguments: list[int]) -> list[int]:
        """Add the steps of a function of the values at `arguments`; return its results' places."""
        places = dict(zip(jaxpr.invars, arguments, strict=True))  # by variable
        for variable, value in zip(jaxpr.constvars, constants, strict=True):
            places[variable] = self.new_constant(np.asarray(value))

        def place_of(variable: Any) -> int:
            if hasattr(variable, "val"):  # a number in the program itself
                value = np.asarray(variable.val, variable.aval.dtype)  # JAX's own type is slow
                return self.new_constant(value)
            return places[variable]

        for equation in jaxpr.eqns:
            read_from = [place_of(variable) for variable in equation.invars]
            if equation.primitive.name in CALLS:  # a function within the function, say relu
                inner = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
                write_to = self.add_function(inner.jaxpr, inner.consts, read_from)
            else:
                write_to = self.add_operation(equation, read_from)
            places.update(zip(equation.outvars, write_to, strict=True))
        return [place_of(variable) for variable in jaxpr.outvars]

    def add_operation(self, equation: Any, read_from: list[int]) -> list[int]:
        """Add a step, or constants if it reads only constants; return its results' places."""
        operation = numpy_operation(equation)
        reads_constants = all(place in self.constants for place in read_from)
        if operation is None or not reads_constants:
            write_to = self.new_places(len(equation.outvars))
            self.steps.append(Step(operation, read_from, write_to))
            return write_to
        results = operation(*[self.constants[place] for place in read_from])
        if not equation.primitive.multiple_results:
            results = [results]
        return [self.new_constant(result) for result in results]


def needed_steps(steps: list[Step], output: int) -> list[Step]:
    """The steps that the output depends on: actions, say, need no log-probability."""
    needed_places = {output}
    needed = []
    for step in reversed(steps):
        if not needed_places.isdisjoint(step.write_to):
            needed_places.update(step.read_from)
            needed.append(step)
    return needed[::-1]


def steps_that_depend_on(places: list[int], steps: list[Step]) -> list[Step]:
    """The steps that read these places, or what such steps write."""
    dependent_places = set(places)
    dependent = []
    for step in steps:
        if not dependent_places.isdisjoint(step.read_from):
            dependent_places.update(step.write_to)
            dependent.append(step)
    return dependent


def translate(traced: Any, num_inputs: int) -> Callable[..., np.ndarray] | None:
    """The traced function of (params, *inputs) as NumPy operations; None if it has others.

    What depends on the parameters alone is computed once for each set of parameters.
    """
    program = Program()
    arguments = program.new_places(len(traced.jaxpr.invars))
    (output,) = program.add_function(traced.jaxpr, traced.consts, arguments)
    steps = needed_steps(program.steps, output)
    if any(step.operation is None for step in steps):
        return None

    num_params = len(arguments) - num_inputs
    inputs = arguments[num_params:]
    steps_per_call = steps_that_depend_on(inputs, steps)
    steps_per_params = [step for step in steps if step not in steps_per_call]
    read = {output}.union(*[step.read_from for step in steps])
    params_read = [place for place in arguments[:num_params] if place in read]

    # Of the parameters and of what is computed from them alone, keep what a call reads.
    read_per_call = {output}.union(*[step.read_from for step in steps_per_call])
    candidates = params_read.copy()
    for step in steps_per_params:
        candidates += step.write_to
    kept = [place for place in candidates if place in read_per_call]

    prepare = straight_line(steps_per_params, params_read, kept, program.constants)
    compute = straight_line(steps_per_call, [*kept, *inputs], [output], program.constants)
    dtype = traced.out_avals[0].dtype
    last_params: Any = None
    prepared: list[np.ndarray] = []  # the values at the places `kept`

    def call(params: Any, *arrays: np.ndarray) -> np.ndarray:
        nonlocal last_params, prepared
        if params is not last_params:
            leaves = jax.tree.leaves(params)
            prepared = prepare(*[np.asarray(leaves[i]) for i in params_read])
            last_params = params
        (result,) = compute(*prepared, *arrays)
        return result.astype(dtype, copy=False)

    return call
