"""How wide a sum tree should be: python benchmark/sum_tree.py

Prints the CPU time in microseconds to draw 32 of a million priorities, to set 32 of them, and to
set 2, which is what each step of an environment does. The last row has no tree: it draws by the
cumulative sum of all priorities.
"""

import time
from collections.abc import Callable

import numpy as np

from cleanrl_utils.replay.prioritized import find_leaves, set_leaves, tree_shapes

SIZE = 1_000_000
BATCH = 32


def microseconds(function: Callable, calls: int = 100) -> float:
    """CPU time per call, the best of five series."""
    function()
    series = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(calls):
            function()
        series.append((time.process_time() - start) / calls * 1e6)
    return min(series)


def main() -> None:
    rng = np.random.default_rng(0)
    priorities = rng.random(SIZE)
    masses = np.sort(rng.random(BATCH)) * priorities.sum()
    leaves = rng.integers(0, SIZE, BATCH)
    values = rng.random(BATCH)
    print("children per node, levels: draw 32, set 32, set 2")
    for branches in (2, 8, 32, 128, 1024):
        levels = [np.zeros(shape) for shape in tree_shapes(SIZE, branches)]
        set_leaves(levels, np.arange(SIZE), priorities)
        draw = microseconds(lambda: find_leaves(levels, masses))  # noqa: B023
        set_many = microseconds(lambda: set_leaves(levels, leaves, values))  # noqa: B023
        set_two = microseconds(lambda: set_leaves(levels, leaves[:2], values[:2]))  # noqa: B023
        print(f"{branches}, {len(levels)}: {draw:.0f}, {set_many:.0f}, {set_two:.0f}")
    draw = microseconds(lambda: np.searchsorted(priorities.cumsum(), masses), calls=5)
    set_many = microseconds(lambda: priorities.__setitem__(leaves, values))
    print(f"cumulative sum: {draw:.0f}, {set_many:.0f}")


if __name__ == "__main__":
    main()
