"""Check that the memory of scripts does not grow with the number of steps.

    python benchmark/memory.py                                  # fast scripts, 1M steps each
    python benchmark/memory.py sac_continuous_action --steps 10000 40000

Each script runs twice, with few and with many steps, on the task and with the flags of
benchmark/speed.py. The replay memory of those flags is full after the shorter run.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]

from speed import CASES, run_script  # noqa: E402

from cleanrl_utils.errors import Stopped, require  # noqa: E402
from cleanrl_utils.running.settings import Count, parse_command  # noqa: E402

FAST = ("ppo", "ppo_continuous_action", "ppo_action_mask", "ppo_recurrent", "dqn", "c51", "pqn")
FAST += ("dqn_jax", "c51_jax")


@dataclass
class MemoryArgs:
    scripts: tyro.conf.Positional[tuple[str, ...]] = FAST
    """scripts to check"""
    steps: tuple[Count, Count] = (100_000, 1_000_000)
    """number of environment steps of the shorter and of the longer run"""
    allowed: Count = 20
    """growth in MB that passes, as the peaks of two equal runs differ a little"""


def main() -> None:
    args = parse_command(MemoryArgs)
    unknown = [name for name in args.scripts if name not in CASES]
    require(not unknown, f"{', '.join(unknown)}: not one of {', '.join(CASES)}")
    few, many = args.steps
    print(f"| script | MB after {few:,} steps | after {many:,} | growth |\n|-|-|-|-|")
    grown = []
    for name in args.scripts:
        before, after = [
            run_script(name, steps, threads=1)[2]["peak_memory_mb"] for steps in args.steps
        ]
        print(f"| {name} | {before:,} | {after:,} | {after - before:+,} |", flush=True)
        if after - before > args.allowed:
            grown.append(name)
    if grown:
        raise Stopped(f"memory grew by more than {args.allowed} MB: {', '.join(grown)}")


if __name__ == "__main__":
    main()
