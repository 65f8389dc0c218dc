"""A chain of small operations as one Python function: a loop over them would take longer than
many of the operations themselves."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# An operation, and the places of the values that it reads and writes.
Step = tuple[Callable, Sequence[int], Sequence[int]]


def straight_line(
    steps: Sequence[Step], inputs: Sequence[int], outputs: Sequence[int], known: Mapping[int, Any]
) -> Callable:
    """The steps as a function of the values at the places `inputs`; it returns the values at the
    places `outputs` as a list. `known` has the values that are always the same."""
    names: dict[str, Any] = {f"x{place}": value for place, value in known.items()}
    body = []
    for number, (operation, read_from, write_to) in enumerate(steps):
        names[f"operation{number}"] = operation
        body.append(f"{_variables(write_to)} = operation{number}({_variables(read_from)})")
    body.append(f"return [{_variables(outputs)}]")
    source = "\n    ".join([f"def function({_variables(inputs)}):", *body])
    exec(source, names)  # as dataclasses and named tuples are made
    return names["function"]


def _variables(places: Sequence[int]) -> str:
    return ", ".join(f"x{place}" for place in places)
