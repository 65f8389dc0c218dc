"""Small torch networks on the CPU: NumPy computes what the module defines.

For the few observations of one step, NumPy needs a fifth of torch's time, and a GPU's answer takes
longer than both.
"""

import operator
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node, Proxy, Tracer

from cleanrl_utils.speed.straight_line import Step, straight_line

MOST_ROWS_IN_NUMPY = 8  # with more, NumPy would start threads of its own


class NumpyMethod:
    """A method of a module on the CPU, from NumPy to NumPy. It uses the weights themselves, which
    optimizers change in place."""

    def __init__(self, function: Callable, module: nn.Module):
        self._function = function
        self._hooks = []
        for part in module.modules():
            self._hooks += [part._forward_pre_hooks, part._forward_hooks]
        found = list(contents(module))
        self._dicts = [values for values, _, _ in found]
        self._names = [name for _, name, _ in found]
        self._values = [value for _, _, value in found]
        self._tensors = [x for x in self._values if isinstance(x, Tensor)]
        self._addresses = [x.data_ptr() for x in self._tensors]

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        return self._function(obs.astype(np.float32, copy=False))[0]

    def is_valid(self) -> bool:
        """Whether nothing but the numbers in the module's tensors has changed. Otherwise the method
        may compute something else now."""
        return (
            not any(self._hooks)  # spectral_norm, say, changes the weights
            and all(map(operator.is_, map(dict.get, self._dicts, self._names), self._values))
            and [x.data_ptr() for x in self._tensors] == self._addresses
        )


OF_TORCH = vars(nn.Module()).keys() - {"training"}  # attributes that every module has


def contents(module: nn.Module) -> Iterator[tuple[dict, str, Any]]:
    """The layers, tensors and attributes of a module and its parts: (dictionary, name, value)."""
    for part in module.modules():
        dicts = [part._modules, part._parameters, part._buffers]
        if not Tracer().is_leaf_module(part, ""):  # not a layer of torch
            dicts.append(vars(part))
        for values in dicts:
            for name in values.keys() - OF_TORCH:
                yield values, name, values[name]


def numpy_method(module: nn.Module, method: str, **constants: Any) -> NumpyMethod | None:
    """module.method(obs, **constants) on the CPU, computed by NumPy; None if it has other
    operations than the tables below."""
    graph = trace(module, method, constants)
    if graph is None or changes_in_place(graph, module):
        return None
    weights = dict(module.named_parameters()) | dict(module.named_buffers())
    new_place = count()
    known: dict[int, Any] = {}  # values of weights and constants, by place
    places: dict[Any, int] = {}  # of each node's value
    steps: list[Step] = []
    for node in needed_for_output(graph):
        operation = None
        if node.op not in ("placeholder", "get_attr"):
            operation = operation_of(node, module)
            if operation is None or node.kwargs or not fits(operation, node):
                return None
        elif node.op == "get_attr" and node.target not in weights:
            return None  # a tensor that was made while tracing, such as random numbers
        read_from = []
        for x in node.args:
            if isinstance(x, Node):
                read_from.append(places[x])
            else:  # a number or an index
                read_from.append(next(new_place))
                known[read_from[-1]] = x
        places[node] = next(new_place)
        if node.op == "get_attr":
            weight = weights[node.target]
            if weight.dtype != torch.float32:
                return None  # NumPy's results would have another type
            known[places[node]] = weight.detach().numpy()
        elif operation is not None:
            steps.append((operation, read_from, [places[node]]))
    obs_places = [places[node] for node in places if node.op == "placeholder"]
    output = graph.output_node().args[0]
    if len(obs_places) != 1 or not isinstance(output, Node):
        return None  # say, a tuple
    function = straight_line(steps, obs_places, [places[output]], known)
    computed = NumpyMethod(function, module)
    return computed if computed.is_valid() else None


class TracedTensor(Proxy):
    """Tracing fails at x += 1: the graph would have x = x + 1, and other names of x would keep the
    old value."""

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __imatmul__ = None


class PlainTracer(Tracer):
    def proxy(self, node: Node) -> Proxy:
        return TracedTensor(node, self)


def trace(module: nn.Module, method: str, constants: dict[str, Any]) -> Graph | None:
    """The graph of a method. None if torch.fx cannot trace it, or if the method draws numbers
    or changes attributes, which the graph would not repeat."""
    tracer = PlainTracer()
    tracer.traced_func_name = method
    generators = states_of_generators()
    before = [(values, values.copy()) for values in attributes_of(module)]
    graph = None
    try:
        with torch.no_grad():
            graph = tracer.trace(module, constants)
    except Exception:  # noqa: BLE001  torch.fx names no kind: control flow, arguments, anything
        pass
    for values, old in before:
        if identities(values) != identities(old):
            graph = None
            values.clear()
            add = values.update if isinstance(values, dict) else values.extend
            add(old)
    return graph if states_of_generators() == generators else None


def attributes_of(module: nn.Module) -> Iterator[dict | list]:
    """All attributes of a module and its parts, and the lists and dictionaries among them."""
    for part in module.modules():
        yield vars(part)
        yield from (value for value in vars(part).values() if isinstance(value, dict | list))


def identities(values: dict | list) -> list[int]:
    return [id(x) for x in (values.values() if isinstance(values, dict) else values)]


def states_of_generators() -> tuple:
    _, *in_numpy = np.random.get_state()
    in_torch = torch.get_rng_state().tolist()
    return random.getstate(), [np.asarray(x).tolist() for x in in_numpy], in_torch


def needed_for_output(graph: Any) -> list[Any]:
    """The nodes that the output depends on, in order, without the output itself."""
    *nodes, output = graph.nodes
    needed = set(output.all_input_nodes)
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in nodes if node in needed]


def changes_in_place(graph: Any, module: nn.Module) -> bool:
    """Whether an operation overwrites a value that others may read: in NumPy none does. One that
    only fills new memory, as in torch.empty_like(x).exponential_(), does not."""
    for node in graph.nodes:
        name = getattr(node.target, "__name__", node.target)
        in_place = node.op.startswith("call") and name.endswith("_")
        if node.op == "call_module":
            in_place = getattr(module.get_submodule(name), "inplace", False)
        if not in_place:
            continue
        (changed, *_) = node.all_input_nodes
        alone = len(changed.users) == 1
        if not alone or (node.op != "call_module" and changed.target is not torch.empty_like):
            return True
    return False


def fits(operation: Callable, node: Any) -> bool:
    """Whether an operation of the tables takes the node's arguments."""
    if node.op == "call_method":  # torch's have defaults, and clamp takes None
        is_ufunc = isinstance(operation, np.ufunc)
        number = 1 if is_ufunc else operation.__code__.co_argcount
        if len(node.args) != number or any(x is None for x in node.args):
            return False
    tensors = [x for x in node.args if isinstance(x, Node)]
    return len(set(tensors)) == len(node.all_input_nodes)  # none within an index or a list


def linear(layer: nn.Linear) -> Callable[[np.ndarray], np.ndarray]:
    weight = layer.weight.detach().numpy().T
    bias = layer.bias.detach().numpy()
    row = bias[None]

    def forward(x: np.ndarray) -> np.ndarray:
        if x.ndim == 2:  # one operation with two matrices is faster than with other shapes
            return x.dot(weight) + row
        return x @ weight + bias

    return forward


def random_numbers(fill: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], np.ndarray]:
    """Random numbers of torch in the shape of an array, each time in the same memory."""
    numbers = torch.empty(0)
    in_numpy = numbers.numpy()

    def draw(x: np.ndarray) -> np.ndarray:
        nonlocal numbers, in_numpy
        if in_numpy.shape != x.shape:
            numbers = torch.empty(x.shape)
            in_numpy = numbers.numpy()
        fill(numbers)
        return in_numpy

    return draw


def clamp(x: np.ndarray, low: Any, high: Any) -> np.ndarray:
    return np.minimum(np.maximum(x, low), high)  # np.clip takes longer


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    x = np.exp(x - x.max(axis, keepdims=True))
    return x / x.sum(axis, keepdims=True)


ZERO = np.zeros((), np.float32)  # operations take it faster than a number
LAYERS: dict[type, Callable[[np.ndarray], np.ndarray]] = {
    nn.Tanh: np.tanh,
    nn.ReLU: lambda x: np.maximum(x, ZERO),
}
FUNCTIONS: dict[Any, Callable] = {
    operator.getitem: operator.getitem,
    operator.eq: operator.eq,
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    operator.truediv: operator.truediv,
    operator.matmul: operator.matmul,
    torch.tanh: np.tanh,
    torch.exp: np.exp,
    torch.empty_like: np.empty_like,
}
METHODS: dict[str, Callable] = {
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "clamp": clamp,
    "softmax": softmax,
    "argmax": lambda x, axis: x.argmax(axis),
    "unflatten": lambda x, axis, sizes: x.reshape(*x.shape[:axis], *sizes, *x.shape[axis:][1:]),
    "masked_fill": lambda x, mask, value: np.where(mask, value, x),
}
RANDOM: dict[Any, Callable[[Tensor], Tensor]] = {
    torch.randn_like: Tensor.normal_,
    "exponential_": Tensor.exponential_,
}


def operation_of(node: Any, module: nn.Module) -> Callable | None:
    """What NumPy does for a node of the traced graph; None if it is in none of the tables."""
    if node.op != "call_module" and node.target in RANDOM:
        return random_numbers(RANDOM[node.target])
    if node.op == "call_function":
        return FUNCTIONS.get(node.target)
    if node.op == "call_method":
        return METHODS.get(node.target)
    layer = module.get_submodule(node.target)
    if type(layer) is nn.Linear and layer.bias is not None and layer.weight.dtype == torch.float32:
        return linear(layer)
    return LAYERS.get(type(layer))
