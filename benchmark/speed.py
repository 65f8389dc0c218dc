"""Measure steps per second of scripts and of other libraries at equal settings, after warm-up.

    python benchmark/speed.py ppo                     # CartPole-v1: ours and stable-baselines3
    python benchmark/speed.py sac_continuous_action --repeats 3 --threads 1 2

Scripts and libraries are measured alternately, so that a busy machine slows all of them; each is
reported with its best number of threads. The libraries are in requirements-peers.txt.
"""

import argparse
import csv
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATH = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


@dataclass
class Case:
    """A script's settings to measure, and the same settings for stable-baselines3."""

    env_id: str
    steps: int
    warm_up: int
    flags: list[str] = field(default_factory=list)
    algorithm: str = ""  # of stable-baselines3 and sbx; empty: no peer
    num_envs: int = 1
    peer: dict[str, Any] = field(default_factory=dict)
    net_arch: list[int] = field(default_factory=lambda: [64, 64])
    normalise: bool = False


OFF_POLICY = dict(buffer_size=100_000, batch_size=256, learning_starts=1000, train_freq=1)
CONTINUOUS = ["--learning-starts", "1000", "--buffer-size", "100000"]
CASES = {
    "ppo": Case(
        "CartPole-v1",
        40_000,
        10_000,
        algorithm="PPO",
        num_envs=4,
        peer=dict(n_steps=128, batch_size=128, n_epochs=4, clip_range_vf=0.2, ent_coef=0.01),
    ),
    "ppo_continuous_action": Case(
        "HalfCheetah-v4",
        16_384,
        4_096,
        algorithm="PPO",
        peer=dict(n_steps=2048, batch_size=64, n_epochs=10, clip_range_vf=0.2),
        normalise=True,
    ),
    "dqn": Case(
        "CartPole-v1",
        30_000,
        12_000,
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
    "sac_continuous_action": Case(
        "HalfCheetah-v4",
        4_000,
        2_000,
        CONTINUOUS,
        "SAC",
        peer=OFF_POLICY,
        net_arch=[256, 256],
    ),
    "td3_continuous_action": Case(
        "HalfCheetah-v4",
        4_000,
        2_000,
        CONTINUOUS,
        "TD3",
        peer=OFF_POLICY,
        net_arch=[256, 256],
    ),
    "ddpg_continuous_action": Case(
        "HalfCheetah-v4",
        4_000,
        2_000,
        CONTINUOUS,
        "DDPG",
        peer=OFF_POLICY,
        net_arch=[256, 256],
    ),
}
for torch_name in [
    "dqn",
    "sac_continuous_action",
    "td3_continuous_action",
    "ddpg_continuous_action",
]:
    CASES[f"{torch_name}_jax"] = CASES[torch_name]


def measure_script(name: str, case: Case, threads: int, extra: list[str]) -> float:
    """Steps per second of a run, from the end of the warm-up to its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "cleanrl" / f"{name}.py"), "--env-id", case.env_id]
        command += ["--total-timesteps", str(case.steps), "--checkpoints", "0", *case.flags, *extra]
        if not name.endswith("_jax"):
            command += ["--torch-threads", str(threads)]
        environment = os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": str(threads)}
        subprocess.run(command, cwd=folder, check=True, capture_output=True, env=environment)
        (path,) = Path(folder).glob("runs/**/metrics.csv")
        with open(path) as file:
            points = [(int(row["step"]), float(row["seconds"])) for row in csv.DictReader(file)]
    warm = min(point for point in points if point[0] >= case.warm_up)
    last = max(points)
    return (last[0] - warm[0]) / (last[1] - warm[1])


def measure_peer(package: str, case: Case, threads: int) -> float:
    """Steps per second of another library, measured in a process of its own."""
    words = [package, json.dumps(case.__dict__), str(threads)]
    command = [sys.executable, __file__, "--peer-process", *words]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout.split()[-1])


def peer_process(package: str, case: Case, threads: int) -> None:
    """Train with another library and print its steps per second after warm-up."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(threads)
    module = importlib.import_module(package)
    envs = make_vec_env(case.env_id, case.num_envs)
    envs = VecNormalize(envs) if case.normalise else envs

    class Clock(BaseCallback):
        warm: tuple[int, float] | None = None

        def _on_step(self) -> bool:
            if self.warm is None and self.num_timesteps >= case.warm_up:
                self.warm = (self.num_timesteps, time.perf_counter())
            return True

    clock = Clock()
    algorithm = getattr(module, case.algorithm)
    network = {"net_arch": case.net_arch}
    model = algorithm("MlpPolicy", envs, device="cpu", policy_kwargs=network, **case.peer)
    model.learn(case.steps, callback=clock)
    step, seconds = clock.warm
    print((model.num_timesteps - step) / (time.perf_counter() - seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "scripts", nargs="*", default=["ppo"], help=f"scripts to measure: {', '.join(CASES)}"
    )
    parser.add_argument("--repeats", type=int, default=3, help="measurements; the median counts")
    numbers = "numbers of threads to try"
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help=numbers)
    parser.add_argument("--flags", default="", help="further flags for our scripts, in one string")
    parser.add_argument("--peer-process", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer_process:
        package, case, threads = options.peer_process
        return peer_process(package, Case(**json.loads(case)), int(threads))
    print("| script | environment | library | threads | steps/s | ratio |\n|-|-|-|-|-|-|")
    for name in options.scripts:
        if name not in CASES:
            raise SystemExit(f"error: {name}: not one of {', '.join(CASES)}")
        case = CASES[name]
        peers = [p for p in ("stable_baselines3", "sbx") if importlib.util.find_spec(p)]
        speeds: dict[tuple[str, int], list[float]] = {}
        for _ in range(options.repeats):
            for threads in options.threads:
                speed = measure_script(name, case, threads, options.flags.split())
                speeds.setdefault(("cleanrl", threads), []).append(speed)
                for peer in peers if case.algorithm else []:
                    speed = measure_peer(peer, case, threads)
                    speeds.setdefault((peer, threads), []).append(speed)
        medians = {key: statistics.median(values) for key, values in speeds.items()}
        best: dict[str, tuple[float, int]] = {}  # by library: steps per second, threads
        for (library, threads), speed in medians.items():
            best[library] = max(best.get(library, (0.0, 0)), (speed, threads))
        ours = best["cleanrl"][0]
        for library, (speed, threads) in best.items():
            cells = [name, case.env_id, library, str(threads), f"{speed:,.0f}"]
            print(f"| {' | '.join(cells)} | {ours / speed:.2f} |", flush=True)


if __name__ == "__main__":
    main()
