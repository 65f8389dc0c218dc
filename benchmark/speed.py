"""Measure the speed and memory of scripts, alone or beside other libraries at equal settings.

    python benchmark/speed.py                     # every script
    python benchmark/speed.py ppo dqn --peers     # beside stable-baselines3 and SBX
    python benchmark/speed.py --write             # keep the figures in benchmark/speed.csv
    python benchmark/speed.py --check             # compare with the figures of this machine

Steps per second are those of the last 60% of a short run. `limit` is the environment alone, with
random actions. Scripts and libraries are measured in turns, so that a busy machine slows all of
them, and each is reported with its best number of threads. The libraries are in
requirements-peers.txt.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cleanrl_utils.environments.envpool import Pool  # noqa: E402
from cleanrl_utils.errors import Stopped, require  # noqa: E402
from cleanrl_utils.running.settings import Count, parse_command  # noqa: E402

FIGURES = ROOT / "benchmark" / "speed.csv"
PATH = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
LIBRARIES = ("stable_baselines3", "sbx")
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
    """keep the figures in benchmark/speed.csv, by script and hardware"""
    check: bool = False
    """fail if a script is slower than its figure in benchmark/speed.csv for this hardware"""
    of_process: str = ""
    """used by this command itself: a measurement in a process of its own"""


@dataclass
class Case:
    """What to measure of a script, and the same settings for other libraries."""

    env_id: str
    steps: int  # on a CPU; ten times as many on a GPU
    flags: str = ""
    algorithm: str = ""  # of stable-baselines3 and SBX; empty: no peer
    num_envs: int = 1
    peer: dict[str, Any] = field(default_factory=dict)
    net_arch: list[int] = field(default_factory=lambda: [64, 64])
    normalise: bool = False


@dataclass
class Figure:
    """A row of benchmark/speed.csv."""

    script: str
    env_id: str
    flags: str
    hardware: str
    threads: int
    steps_per_second: int
    spread: float  # (largest - smallest) / median
    limit: int  # the environment alone; 0: not measured
    memory_mb: int
    gpu_memory_mb: int
    commit: str


WALK = "--learning-starts 1000 --buffer-size 100000"
OFF_POLICY = dict(buffer_size=100_000, batch_size=256, learning_starts=1000, train_freq=1)
CHEETAH = "HalfCheetah-v4"
PONG = "PongNoFrameskip-v4"
FRAMES = "--learning-starts 200 --buffer-size 10000"
CASES = {
    "ppo": Case(
        "CartPole-v1",
        40_000,
        algorithm="PPO",
        num_envs=4,
        peer=dict(n_steps=128, batch_size=128, n_epochs=4, clip_range_vf=0.2, ent_coef=0.01),
    ),
    "ppo_continuous_action": Case(
        CHEETAH,
        16_384,
        algorithm="PPO",
        peer=dict(n_steps=2048, batch_size=64, n_epochs=10, clip_range_vf=0.2),
        normalise=True,
    ),
    "rpo_continuous_action": Case(CHEETAH, 16_384),
    "ppo_atari": Case(PONG, 3_072),
    "ppo_atari_lstm": Case(PONG, 3_072),
    "ppo_recurrent": Case("cleanrl_utils.environments.memory:CartPoleNoVel-v1", 40_960),
    "ppo_atari_envpool": Case("Breakout-v5", 5_120),
    "ppo_rnd_envpool": Case("MontezumaRevenge-v5", 3_072, "--num-iterations-obs-norm-init 1"),
    "ppo_procgen": Case("starpilot", 32_768),
    "ppg_procgen": Case("starpilot", 32_768, "--n-iteration 1"),
    "ppo_jax": Case("CartPole-v1", 500_000),
    "pqn_jax": Case("CartPole-v1", 500_000),
    "dqn": Case(
        "CartPole-v1",
        30_000,
        algorithm="DQN",
        peer=dict(
            buffer_size=10_000,
            batch_size=128,
            learning_starts=10_000,
            train_freq=10,
            target_update_interval=500,
            exploration_fraction=0.5,
        ),
        net_arch=[120, 84],
    ),
    "c51": Case("CartPole-v1", 30_000),
    "c51_jax": Case("CartPole-v1", 30_000),
    "dqn_atari": Case(PONG, 3_000, FRAMES),
    "dqn_atari_jax": Case(PONG, 3_000, FRAMES),
    "c51_atari": Case(PONG, 3_000, FRAMES),
    "c51_atari_jax": Case(PONG, 3_000, FRAMES),
    "rainbow_atari": Case(PONG, 3_000, FRAMES),
    "sac_atari": Case(PONG, 1_200, FRAMES),
}
for name in ("tqc", "simbav2"):
    CASES[f"{name}_continuous_action"] = Case(CHEETAH, 2_000, WALK)
for name in ("sac", "td3", "ddpg"):
    CASES[f"{name}_continuous_action"] = Case(
        CHEETAH, 4_000, WALK, name.upper(), peer=OFF_POLICY, net_arch=[256, 256]
    )
HEAVY = "--learning-starts 200 --buffer-size 100000"  # updates of a second or so on a CPU
CASES["crossq_continuous_action"] = Case(CHEETAH, 600, HEAVY)
CASES["crossq_continuous_action_jax"] = Case(CHEETAH, 600, HEAVY)
CASES["droq_continuous_action"] = Case(CHEETAH, 600, HEAVY)
for name in ("dqn", "sac_continuous_action", "td3_continuous_action", "ddpg_continuous_action"):
    CASES[f"{name}_jax"] = CASES[name]


def in_process(*words: Any, threads: int) -> float:
    """A number that this file prints when it is started with these words."""
    command = [sys.executable, __file__, "--of-process", json.dumps(words)]
    environment = os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout.split()[-1])


def measure_script(name: str, threads: int, extra: str) -> tuple[float, dict, dict]:
    """Steps per second of the last 60% of a run; its run.json and finished.json."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        steps = case.steps * (10 if has_gpu() else 1)
        command = [sys.executable, str(ROOT / "cleanrl" / f"{name}.py"), "--env-id", case.env_id]
        command += ["--total-timesteps", str(steps), "--checkpoints", "0"]
        command += case.flags.split() + extra.split()
        if not name.endswith("_jax"):
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
        actions = [[space.sample() for _ in range(args.num_envs)] for _ in range(100)]
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
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    case = CASES[name]
    torch.set_num_threads(threads)
    envs = make_vec_env(case.env_id, case.num_envs)
    envs = VecNormalize(envs) if case.normalise else envs

    class Clock(BaseCallback):
        warm: tuple[int, float] | None = None

        def _on_step(self) -> bool:
            if self.warm is None and self.num_timesteps >= 0.4 * case.steps:
                self.warm = (self.num_timesteps, time.perf_counter())
            return True

    clock = Clock()
    algorithm = getattr(importlib.import_module(package), case.algorithm)
    network = {"net_arch": case.net_arch}
    model = algorithm("MlpPolicy", envs, device="cpu", policy_kwargs=network, **case.peer)
    model.learn(case.steps, callback=clock)
    assert clock.warm is not None
    step, seconds = clock.warm
    return (model.num_timesteps - step) / (time.perf_counter() - seconds)


def measure(name: str, args: SpeedArgs) -> tuple[Figure, dict[str, float]]:
    """The script's figure, and the steps per second of each library."""
    case = CASES[name]
    peers = [p for p in LIBRARIES if args.peers and case.algorithm and importlib.util.find_spec(p)]
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
    figure = Figure(
        script=name,
        env_id=case.env_id,
        flags=f"{case.flags} {args.flags}".strip(),
        hardware=hardware,
        threads=threads,
        steps_per_second=round(speed),
        spread=round((max(seen) - min(seen)) / speed, 3),
        limit=round(in_process("environment", name, threads=threads)),
        memory_mb=finished["peak_memory_mb"],
        gpu_memory_mb=finished.get("peak_gpu_memory_mb", 0),
        commit=started["git"].get("commit", "")[:9],
    )
    return figure, {library: speed for library, (speed, _) in best.items()}


def committed() -> dict[tuple[str, str], Figure]:
    """The figures of benchmark/speed.csv by script and hardware."""
    if not FIGURES.exists():
        return {}
    figures = {}
    with open(FIGURES) as file:
        for row in csv.DictReader(file):
            kinds = inspect.get_annotations(Figure)
            figure = Figure(**{name: kinds[name](value) for name, value in row.items()})
            figures[figure.script, figure.hardware] = figure
    return figures


def write(figures: list[Figure]) -> None:
    rows = committed() | {(figure.script, figure.hardware): figure for figure in figures}
    with open(FIGURES, "w", newline="") as file:
        writer = csv.DictWriter(file, list(inspect.get_annotations(Figure)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(rows[key]) for key in sorted(rows))


def slower(now: Figure, before: Figure | None) -> str:
    """A line that says how much was lost; empty if no more than the noise of both."""
    if before is None:
        return ""
    lost = 1 - now.steps_per_second / before.steps_per_second
    if lost <= max(NOISE, now.spread, before.spread):
        return ""
    speeds = f"{now.steps_per_second:,} steps/s, {before.steps_per_second:,} at {before.commit}"
    return f"{now.script} is {lost:.0%} slower: {speeds}"


def row(figure: Figure, peers: dict[str, float]) -> str:
    share = f"{figure.steps_per_second / figure.limit:.0%}" if figure.limit else "-"
    ratios = [f"{figure.steps_per_second / v:.2f} x {peer}" for peer, v in peers.items()]
    cells = [figure.script, figure.env_id, str(figure.threads), f"{figure.steps_per_second:,}"]
    cells += [f"{figure.spread:.0%}", f"{figure.limit:,}" if figure.limit else "-", share]
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
    columns = "script, environment, threads, steps/s, spread, limit, share of it, memory (MB)"
    names = [*columns.split(", "), "GPU memory (MB)", "speed of ours"]
    print(f"| {' | '.join(names)} |\n|{'-|' * len(names)}")
    figures = []
    for name in args.scripts or CASES:
        figure, peers = measure(name, args)
        figures.append(figure)
        print(row(figure, peers), flush=True)
    if args.check:
        before = committed()
        lines = [slower(figure, before.get((figure.script, figure.hardware))) for figure in figures]
        known = [figure for figure in figures if (figure.script, figure.hardware) in before]
        print(f"{len(known)} of {len(figures)} have a figure for this hardware")
        if any(lines):
            raise Stopped("; ".join(filter(None, lines)))
    if args.write:
        write(figures)


if __name__ == "__main__":
    main()
