"""Measure the speed and memory of scripts, alone or beside other libraries at equal settings.

    python benchmark/speed.py                     # every script
    python benchmark/speed.py ppo dqn --peers     # beside stable-baselines3, SB3-Contrib and SBX
    python benchmark/speed.py --write             # keep the figures in benchmark/speed.csv
    python benchmark/speed.py --check             # compare with the figures of this machine

Steps per second are those of the last 60% of a short run. `limit` is the environment alone, with
random actions; `learning` is the script with an environment that costs next to nothing. Scripts
and libraries are measured in turns, so that a busy machine slows all of them, and each is reported
with its best number of threads. The libraries are in requirements-peers.txt.
"""

import csv
import importlib
import importlib.util
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]

from speed_cases import CASES, FREE, NOT_FREE, Case  # noqa: E402

from cleanrl_utils.environments.envpool import Pool  # noqa: E402
from cleanrl_utils.environments.making import is_atari  # noqa: E402
from cleanrl_utils.errors import Stopped, require  # noqa: E402
from cleanrl_utils.running.settings import Count, parse_command  # noqa: E402

FIGURES = ROOT / "benchmark" / "speed.csv"
PATH = os.pathsep.join([str(ROOT), str(ROOT / "benchmark"), os.environ.get("PYTHONPATH", "")])
LIBRARIES = ("stable_baselines3", "sb3_contrib", "sbx")
NOISE = 0.1  # a script is slower if it lost more than this share, and more than its own spread


@dataclass
class SpeedArgs:
    scripts: tyro.conf.Positional[tuple[str, ...]] = ()
    """scripts to measure; none: all of them"""
    repeats: Count = 3
    """number of measurements; the median counts"""
    threads: tuple[Count, ...] = (1, 2)
    """numbers of CPU threads to try"""
    flags: str = ""
    """further flags for our scripts, in one string"""
    peers: bool = False
    """measure the installed libraries, too"""
    write: bool = False
    """keep the figures in benchmark/speed.csv, by script, flags and hardware"""
    check: bool = False
    """fail if a script is slower than its figure in benchmark/speed.csv for this hardware"""
    of_process: str = ""
    """used by this command itself: a measurement in a process of its own"""


@dataclass
class Figure:
    """A row of benchmark/speed.csv."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later measurement replaces, and is compared with."""
        return self.script, self.flags, self.hardware

    script: str
    env_id: str
    flags: str
    hardware: str
    threads: int
    steps_per_second: int
    spread: float  # (largest - smallest) / median
    limit: int  # the environment alone; 0: not measured
    learning: int  # the script with an environment that costs nothing; 0: not measured
    memory_mb: int
    gpu_memory_mb: int
    stable_baselines3: int  # its steps per second, with its best number of threads; 0: not measured
    sb3_contrib: int
    sbx: int
    commit: str


def in_process(*words: Any, threads: int) -> float:
    """A number that this file prints when it is started with these words."""
    command = [sys.executable, __file__, "--of-process", json.dumps(words)]
    environment = os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout.split()[-1])


def run_script(
    name: str, steps: int, threads: int, extra: str = "", env_id: str = ""
) -> tuple[list[tuple[int, float]], dict, dict]:
    """Run a script; the steps and seconds at which it logged, its run.json and finished.json."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "cleanrl" / f"{name}.py")]
        command += ["--env-id", env_id or case.env_id, "--total-timesteps", str(steps)]
        command += ["--checkpoints", "0", *case.flags.split(), *extra.split()]
        if "_jax" not in name:
            command += ["--torch-threads", str(threads)]
        environment = os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise Stopped(f"{name}.py: {done.stderr.strip()[-300:]}")
        (path,) = Path(folder).glob("runs/**/metrics.csv")
        with open(path) as file:
            points = [(int(row["step"]), float(row["seconds"])) for row in csv.DictReader(file)]
        started = json.loads((path.parent / "run.json").read_text())
        finished = json.loads((path.parent / "finished.json").read_text())
    return points, started, finished


def measure_script(
    name: str, threads: int, extra: str, env_id: str = ""
) -> tuple[float, dict, dict]:
    """Steps per second of the last 60% of a run; its run.json and finished.json."""
    steps = CASES[name].steps * (10 if has_gpu() else 1)
    points, started, finished = run_script(name, steps, threads, extra, env_id)
    last = max(points)
    warm = min(point for point in points if point[0] >= 0.4 * last[0])
    return (last[0] - warm[0]) / (last[1] - warm[1]), started, finished


def has_gpu() -> bool:
    return Path("/dev/nvidia0").exists()


def environment_process(name: str) -> float:
    """Steps per second of the script's environments with random actions; 0 if they are in JAX."""
    module = importlib.import_module(f"cleanrl.{name}")
    case = CASES[name]
    args = module.Args(env_id=case.env_id)
    if not hasattr(module, "make_envs") or not hasattr(args, "num_envs"):
        return 0.0
    with tempfile.TemporaryDirectory() as folder:
        several = len(inspect.signature(module.make_envs).parameters) > 1
        envs = module.make_envs(args, folder) if several else module.make_envs(args)
        if not hasattr(envs, "step") or not hasattr(envs, "single_action_space"):
            return 0.0
        if not isinstance(envs, Pool):  # which has reset itself
            envs.reset(seed=1)
        space = envs.single_action_space
        actions = [[space.sample() for _ in range(envs.num_envs)] for _ in range(100)]
        steps = 0
        began = time.perf_counter()
        while time.perf_counter() < began + 3:
            envs.step(np.array(actions[steps % 100]))
            steps += 1
        return steps * args.num_envs / (time.perf_counter() - began)


def peer_process(package: str, name: str, threads: int) -> float:
    """Train with another library; its steps per second in the last 60%."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    case = CASES[name]
    torch.set_num_threads(threads)

    class Clock(BaseCallback):
        warm: tuple[int, float] | None = None

        def _on_step(self) -> bool:
            if self.warm is None and self.num_timesteps >= 0.4 * case.steps:
                self.warm = (self.num_timesteps, time.perf_counter())
            return True

    clock = Clock()
    algorithm = getattr(importlib.import_module(package), case.algorithm)
    policy = "CnnPolicy" if is_atari(case.env_id) else "MlpPolicy"
    more = {"device": "cpu", "policy_kwargs": case.policy, **case.peer}
    model = algorithm(policy, peer_envs(case), **more)
    model.learn(case.steps, callback=clock)
    assert clock.warm is not None
    step, seconds = clock.warm
    return (model.num_timesteps - step) / (time.perf_counter() - seconds)


def peer_envs(case: Case) -> Any:
    """The environments of a case, with the wrappers of stable-baselines3."""
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    if is_atari(case.env_id):
        importlib.import_module("ale_py")  # its games register themselves
        return VecFrameStack(make_atari_env(case.env_id, case.num_envs), 4)
    envs = make_vec_env(case.env_id, case.num_envs)
    return VecNormalize(envs) if case.normalise else envs


def measure_learning(name: str, threads: int, extra: str) -> float:
    """Steps per second of a script whose environment costs nothing; 0 if there is none for it."""
    env_id = CASES[name].env_id
    if env_id not in FREE or name in NOT_FREE:
        return 0.0
    extra = f"{extra} --env-kwargs like={env_id}"
    return measure_script(name, threads, extra, "free_env:Free-v0")[0]


def installed_peers(case: Case) -> list[str]:
    """The installed libraries that have the algorithm of a case."""
    found = [name for name in LIBRARIES if case.algorithm and importlib.util.find_spec(name)]
    return [name for name in found if hasattr(importlib.import_module(name), case.algorithm)]


def measure(name: str, args: SpeedArgs) -> Figure:
    """The speed of a script, and of the other libraries if they are asked for."""
    case = CASES[name]
    peers = installed_peers(case) if args.peers else []
    speeds: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.repeats):
        for threads in args.threads:
            speed, started, finished = measure_script(name, threads, args.flags)
            speeds.setdefault(("", threads), []).append(speed)
            for peer in peers:
                speed = in_process("peer", peer, name, threads, threads=threads)
                speeds.setdefault((peer, threads), []).append(speed)
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    best: dict[str, tuple[float, int]] = {}  # by library, "" is ours: steps per second, threads
    for (library, threads), speed in medians.items():
        best[library] = max(best.get(library, (0.0, 0)), (speed, threads))
    speed, threads = best.pop("")
    seen = speeds["", threads]
    machine = started["hardware"]
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {machine['device'].split(',')[0]}"
    libraries = {name: round(best.get(name, (0.0, 0))[0]) for name in LIBRARIES}
    return Figure(
        script=name,
        env_id=case.env_id,
        flags=f"{case.flags} {args.flags}".strip(),
        hardware=hardware,
        threads=threads,
        steps_per_second=round(speed),
        spread=round((max(seen) - min(seen)) / speed, 3),
        limit=round(in_process("environment", name, threads=threads)),
        learning=round(measure_learning(name, threads, args.flags)),
        memory_mb=finished["peak_memory_mb"],
        gpu_memory_mb=finished.get("peak_gpu_memory_mb", 0),
        commit=started["git"].get("commit", "")[:9],
        **libraries,
    )


def committed() -> dict[tuple[str, str, str], Figure]:
    """The figures of benchmark/speed.csv."""
    if not FIGURES.exists():
        return {}
    figures = {}
    with open(FIGURES) as file:
        for row in csv.DictReader(file):
            kinds = inspect.get_annotations(Figure)
            figure = Figure(**{name: kinds[name](value) for name, value in row.items()})
            figures[figure.key] = figure
    return figures


def write(figures: list[Figure]) -> None:
    rows = committed() | {figure.key: figure for figure in figures}
    with open(FIGURES, "w", newline="") as file:
        writer = csv.DictWriter(file, list(inspect.get_annotations(Figure)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(rows[key]) for key in sorted(rows))


def slower(now: Figure, before: Figure) -> str:
    """A line that says how much was lost; empty if no more than the noise of both."""
    lost = 1 - now.steps_per_second / before.steps_per_second
    if lost <= max(NOISE, now.spread, before.spread):
        return ""
    speeds = f"{now.steps_per_second:,} steps/s, {before.steps_per_second:,} at {before.commit}"
    return f"{now.script} is {lost:.0%} slower: {speeds}"


def row(figure: Figure) -> str:
    limits = [figure.limit, figure.learning]
    shares = [f"{figure.steps_per_second / limit:.0%}" if limit else "-" for limit in limits]
    peers = {name: getattr(figure, name) for name in LIBRARIES if getattr(figure, name)}
    ratios = [f"{figure.steps_per_second / v:.2f} x {name}" for name, v in peers.items()]
    cells = [figure.script, figure.env_id, str(figure.threads), f"{figure.steps_per_second:,}"]
    cells += [f"{figure.spread:.0%}", *shares]
    cells += [f"{figure.memory_mb:,}", f"{figure.gpu_memory_mb:,}", ", ".join(ratios) or "-"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    args = parse_command(SpeedArgs)
    if args.of_process:
        what, *words = json.loads(args.of_process)
        print(peer_process(*words) if what == "peer" else environment_process(*words))
        return
    unknown = [name for name in args.scripts if name not in CASES]
    require(not unknown, f"{', '.join(unknown)}: not one of {', '.join(CASES)}")
    columns = "script, environment, threads, steps/s, spread, of limit, of learning, memory (MB)"
    names = [*columns.split(", "), "GPU memory (MB)", "speed of ours"]
    print(f"| {' | '.join(names)} |\n|{'-|' * len(names)}")
    before = committed()
    figures = []
    problems = []
    for name in args.scripts or CASES:
        try:
            figure = measure(name, args)
        except (Stopped, subprocess.CalledProcessError) as error:  # measure the others
            if not isinstance(error, Stopped):  # which has printed its line
                print(f"{name}: {error.stderr[-300:]}", file=sys.stderr)
            problems.append(f"{name} could not be measured")
            continue
        figures.append(figure)
        print(row(figure), flush=True)
        if args.write:
            write([figure])
    if args.check:
        known = [figure for figure in figures if figure.key in before]
        problems += [slower(figure, before[figure.key]) for figure in known]
        print(f"{len(known)} of {len(figures)} have a figure for these flags and this hardware")
    if any(problems):
        raise Stopped("; ".join(filter(None, problems)))


if __name__ == "__main__":
    main()
