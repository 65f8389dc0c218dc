"""Checks of the benchmark tool and the tuner that take too long for the tests.

    python benchmark/check_tools.py faults        # 12 runs, one crashes always, one is killed once
    python benchmark/check_tools.py pool          # 200 short runs: overhead and memory of the pool
    python benchmark/check_tools.py pruning       # environment steps with and without a pruner

Each works in a temporary folder, prints its measurements, and exits with status 1 if it fails.
"""

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cleanrl_utils.running.settings import Count, Natural, parse_command  # noqa: E402

PPO = f"{sys.executable} {ROOT}/cleanrl/ppo.py --cuda False"
# tests/faulty.py has the environments that fail
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests")])


@dataclass
class CheckArgs:
    check: tyro.conf.Positional[Literal["faults", "pool", "pruning"]]
    """what to check"""
    workers: Count = 2
    """number of parallel runs"""
    runs: Count = 200
    """pool: number of runs"""
    command: str = ""
    """pool: command instead of PPO, e.g. bash -c 'sleep 2'"""
    studies: Count = 5
    """pruning: number of studies with and without it"""
    trials: Count = 20
    """pruning: trials per study"""
    steps: Natural = 0
    """steps per run; 0: the default of the check"""


def benchmark(flags: list[str], folder: Path, **variables: str) -> tuple[int, str]:
    """Exit status and output of the benchmark tool."""
    words = [sys.executable, "-m", "cleanrl_utils.benchmark", *flags]
    env = {**os.environ, "PYTHONPATH": PATHS, **variables}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def faults(args: CheckArgs, folder: Path) -> bool:
    """11 of 12 runs finish, one of them from its checkpoint; the other is named as failed."""
    env_ids = ["CartPole-v1", "Acrobot-v1", "faulty:Crash-v0", "faulty:KilledOnce-v0"]
    # Only the first seed fails: with the others these environments are CartPole.
    flags = ["--env-ids", *env_ids, "--num-seeds", "3", "--workers", str(args.workers)]
    flags += ["--command", f"{PPO} --total-timesteps {args.steps or 2048}"]
    variables = {"FAULTY_MARKER": str(folder / "killed"), "FAULTY_SEED": "1"}
    status, said = benchmark(flags, folder, **variables)
    print(said)
    finished = len(list(folder.glob("runs/*/finished.json")))
    (log,) = folder.glob("runs/.benchmark/KilledOnce-v0__ppo__1__*/log.txt")
    resumed = "resumes at step" in log.read_text()
    named = "error: 1 of 12 runs failed: Crash-v0__ppo__1" in said
    print(f"{finished} finished, resumed from its checkpoint: {resumed}, named: {named}")
    again, said = benchmark(flags, folder, **variables, FAULTY_AFTER="100000")
    print(said)
    rest = "11 of 12 runs are finished already" in said and again == 0
    return status == 1 and finished == 11 and resumed and named and rest


def cpu_and_memory(process: int) -> tuple[float, float] | None:
    """Seconds of CPU and MiB of memory of a process (Linux); None if it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def pool(args: CheckArgs, folder: Path) -> bool:
    """Measure the idle time of workers, and the CPU time and memory of the pool itself."""
    # Each run writes its own start and end, so that the measurement is independent of the pool.
    timed = 's=$EPOCHREALTIME; "$@"; r=$?; echo $s $EPOCHREALTIME >> times.txt; exit $r'
    run = args.command or f"{PPO} --total-timesteps {args.steps or 512}"
    command = f"bash -c {shlex.quote(timed)} run {run}"
    flags = ["--env-ids", "CartPole-v1", "--num-seeds", str(args.runs)]
    flags += ["--command", command, "--workers", str(args.workers)]
    began = time.time()
    memory: list[tuple[int, float]] = []  # (finished runs, MiB)
    with open(folder / "out.txt", "w") as out:
        words = [sys.executable, "-m", "cleanrl_utils.benchmark", *flags]
        env = {**os.environ, "PYTHONPATH": PATHS}
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=out)
        times = folder / "times.txt"
        cpu = 0.0
        while process.poll() is None:
            time.sleep(1)
            done = times.read_text().count("\n") if times.exists() else 0
            found = cpu_and_memory(process.pid)
            if found:
                cpu = found[0]
                memory.append((done, found[1]))
        process.wait()
    spans = [tuple(map(float, line.split())) for line in times.read_text().splitlines()]
    first = min(start for start, _ in spans)
    last = max(end for _, end in spans)
    busy = sum(end - start for start, end in spans)
    # At the end workers are idle because no runs are left: this time does not count.
    tail = sum(last - end for _, end in sorted(spans, key=lambda span: span[1])[-args.workers :])
    idle = 1 - busy / (args.workers * (last - first) - tail)
    early = statistics.mean(
        rss for done, rss in memory if args.runs * 0.1 <= done < args.runs * 0.2
    )
    late = statistics.mean(rss for done, rss in memory if done >= args.runs * 0.9)
    print(f"{len(spans)} runs of {busy / len(spans):.1f} s, {args.workers} workers")
    print(f"first run started after {first - began:.1f} s")
    print(f"workers idle {idle:.2%} of the time, the pool's CPU time {cpu / busy:.2%} of the runs'")
    print(f"memory after 10-20% of the runs {early:.1f} MiB, after 90-100% {late:.1f} MiB")
    ok = process.returncode == 0 and len(spans) == args.runs
    return ok and idle + cpu / busy < 0.05 and late < early * 1.02 + 1


def pruning(args: CheckArgs, folder: Path) -> bool:
    """Compare studies with and without a pruner: environment steps and best score."""
    import optuna

    from cleanrl_utils.tuner import Tuner

    os.chdir(folder)
    rows: dict[str, list[tuple[int, float]]] = {"without": [], "with": []}
    for number in range(args.studies):
        for arm in rows:
            # keeps the best fifth of the trials, from a fifth of their steps on
            top_fifth = optuna.pruners.PercentilePruner(20, n_startup_trials=1, n_warmup_steps=1)
            tuner = Tuner(
                script=str(ROOT / "cleanrl/ppo.py"),
                metric="charts/episodic_return",
                metric_last_n_average_window=50,
                target_scores={"CartPole-v1": [0, 500]},
                params_fn=lambda trial: {
                    "learning-rate": trial.suggest_float("learning-rate", 1e-5, 3e-2, log=True),
                    "update-epochs": trial.suggest_categorical("update-epochs", [1, 2, 4, 8]),
                    "num-steps": trial.suggest_categorical("num-steps", [16, 32, 64, 128]),
                    "gamma": 1 - trial.suggest_float("1-gamma", 0.005, 0.2, log=True),
                    "total-timesteps": args.steps or 80_000,
                    "cuda": False,
                },
                sampler=optuna.samplers.TPESampler(seed=number),
                pruner=top_fifth if arm == "with" else None,
                study_name=f"{arm}_{number}",
                workers=args.workers,
            )
            study = tuner.tune(args.trials, num_seeds=1, fresh_seeds=0)
            steps = sum(trial.user_attrs["steps"] for trial in study.trials)
            rows[arm].append((steps, study.best_value))
            pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
            print(f"{arm} {number}: {steps:,} steps, best {study.best_value:.3f}, {pruned} pruned")
    steps = {arm: statistics.mean(s for s, _ in found) for arm, found in rows.items()}
    best = {arm: [b for _, b in found] for arm, found in rows.items()}
    ratio = steps["without"] / steps["with"]
    for arm in rows:
        spread = f" ± {statistics.stdev(best[arm]):.3f}" if args.studies > 1 else ""
        found = f"{statistics.mean(best[arm]):.3f}{spread} over {args.studies} studies"
        print(f"{arm} pruning: {steps[arm]:,.0f} steps per study, best {found}")
    print(f"{ratio:.2f} times fewer steps")
    worse = statistics.mean(best["without"]) - statistics.mean(best["with"])
    noise = statistics.stdev(best["without"] + best["with"]) if args.studies > 1 else 1.0
    return ratio >= 2.5 and worse <= noise


CHECKS: dict[str, Callable[[CheckArgs, Path], bool]] = {
    "faults": faults,
    "pool": pool,
    "pruning": pruning,
}


def main() -> int:
    args = parse_command(CheckArgs)
    with tempfile.TemporaryDirectory() as folder:
        ok = CHECKS[args.check](args, Path(folder))
    print("passed" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
