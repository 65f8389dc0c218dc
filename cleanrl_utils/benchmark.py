"""Run a command on several environments with several seeds, here or on a cluster.

    python -m cleanrl_utils.benchmark --env-ids CartPole-v1 Acrobot-v1 \\
        --command "python cleanrl/ppo.py --cuda False" --num-seeds 3 --workers 2

The same command again does only what is missing: finished runs are left alone, interrupted ones go
on from their checkpoints. A run that fails for good makes the exit status 1 and is named last.
"""

import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cleanrl_utils.errors import require
from cleanrl_utils.launching import jobs
from cleanrl_utils.launching.jobs import Command, Job, Process, Progress
from cleanrl_utils.running import folder as run_folder
from cleanrl_utils.running.metrics import clock
from cleanrl_utils.running.settings import parse_command
from cleanrl_utils.submit_exp import BatchArgs

POLL = 0.05  # seconds: how long a free worker may stand idle
REFRESH = 0.5  # seconds between two looks at the runs' metrics
PLAIN_EVERY = 60.0  # seconds between two lines about a run where there is no terminal


@dataclass
class CoreArgs:
    env_ids: list[str] = field(default_factory=list)
    """environments; none: the command names its own"""
    command: str = "python cleanrl/ppo.py"
    """what to run; --env-id and --seed are added to it"""
    num_seeds: int = 3
    """seeds per environment"""
    start_seed: int = 1
    """the first of them"""
    workers: int = 0
    """runs side by side; 0 prints the commands and runs nothing"""
    retries: int = 1
    """how often a run that failed goes on from its last checkpoint"""
    tags: list[str] = field(default_factory=list)
    """tags of every run, in its run.json and on Weights & Biases"""
    auto_tag: bool = True
    """also tag the runs with this version: git describe"""
    fresh: bool = False
    """run everything anew, also what is finished"""
    backend: Literal["local", "ray", "slurm", "aws-batch"] = "local"
    """where to run: processes here, a Ray cluster, a Slurm job array, an AWS Batch array job"""
    wait: bool = False
    """Slurm, AWS Batch: wait for the runs and report on them, instead of only submitting them"""
    index: str | None = None
    """only the run of this number, here and now; slurm and aws-batch: the scheduler's number"""
    cpus_per_run: float = 1
    """CPUs that Ray keeps for a run"""
    gpus_per_run: float | None = None
    """GPUs of a run, 0.5 for half of one (Ray); unset: one, if there are any; 0 assigns none"""
    ray_address: str = "auto"
    """Ray's head as host:port; auto: the cluster of this machine; local: start one for this call"""
    slurm_template_path: str | None = None
    """Slurm job script to fill in, default benchmark/cleanrl_1gpu.slurm_template; implies slurm"""
    slurm_gpus_per_task: int = 1
    """GPUs of a run; 0 asks for none"""
    slurm_total_cpus: int = 0
    """CPUs of an array element, shared by its runs; 0 leaves it to Slurm"""
    slurm_ntasks: int = 1
    """runs side by side in one array element"""
    slurm_nodes: int | None = None
    """nodes of an array element; unset: as few as possible"""
    slurm_options: str = ""
    """more options for sbatch, e.g. "--partition=gpu --time=24:00:00" """


@dataclass
class BenchmarkArgs(BatchArgs, CoreArgs):
    def __post_init__(self) -> None:
        if self.slurm_template_path and self.backend == "local":
            self.backend = "slurm"
        for name in ("num_seeds", "slurm_ntasks"):
            flag = "--" + name.replace("_", "-")
            require(getattr(self, name) >= 1, f"{flag} must be at least 1")
        for name in ("workers", "retries", "start_seed", "slurm_gpus_per_task", "slurm_total_cpus"):
            flag = "--" + name.replace("_", "-")
            require(getattr(self, name) >= 0, f"{flag} must not be negative")
        require(self.gpus_per_run is None or self.gpus_per_run >= 0, "--gpus-per-run is negative")
        jobs.split("--slurm-options", self.slurm_options)  # the last thing to be read


def plan(args: BenchmarkArgs, command: Command) -> list[Job]:
    """All jobs, seed by seed: after the first round every environment has a result."""
    seeds = range(args.start_seed, args.start_seed + args.num_seeds)
    env_ids: list[str | None] = [*args.env_ids] or [None]
    pairs = [(env_id, seed) for seed in seeds for env_id in env_ids]
    return [Job(command, env_id, seed, number) for number, (env_id, seed) in enumerate(pairs)]


def git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        return ""


def all_tags(args: BenchmarkArgs) -> list[str]:
    version = git("describe", "--tags", "--always") if args.auto_tag else ""
    return [*args.tags, *([version] if version else [])]


def track_offline(command: Command, env: dict[str, str]) -> str | None:
    """W&B cannot ask for a key here: without one, it keeps its files for `wandb sync`."""
    known = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    if "--track" not in command.words or any(env.get(name) for name in known):
        return None
    try:
        import wandb

        if wandb.login(prompt=False, verify=False):
            return None
    except Exception:  # not installed, or too old to be asked: each run will say so in its log
        return None
    env["WANDB_MODE"] = "offline"
    return "no W&B key is configured: runs are tracked offline, `wandb sync` uploads them later"


def visible_gpus() -> list[str]:
    """The GPUs that processes here may use, as CUDA_VISIBLE_DEVICES names them."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in given.split(",") if name]
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(i) for i, _ in enumerate(done.stdout.splitlines())] if not done.returncode else []


def gpus_of(slot: int, gpus: list[str], each: float | None) -> dict[str, str]:
    """Spread workers over several GPUs; with one GPU, or none, there is nothing to decide."""
    if len(gpus) < 2 or each == 0:
        return {}
    count = max(1, math.ceil(each or 1))
    chosen = [gpus[(slot * count + i) % len(gpus)] for i in range(min(count, len(gpus)))]
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}


class Board:
    """What goes on: one live table in a terminal, plain lines elsewhere."""

    def __init__(self, total: int, console: Console | None = None):
        self.console = console or Console(stderr=False, highlight=False)
        self.live = (
            Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        )
        self.total, self.finished, self.failed = total, 0, 0
        self.seen: dict[str, Progress] = {}
        self.looked = self.said = time.monotonic()
        self.began = time.monotonic()

    def __enter__(self) -> "Board":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.live:
            self.live.update(Text(""), refresh=True)
            self.live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False, soft_wrap=True)

    def ended(self, job: Job, ok: bool) -> None:
        self.finished += ok
        self.failed += not ok
        self.seen.pop(job.key, None)

    def update(self, running: list[Job]) -> None:
        now = time.monotonic()
        if now - self.looked < REFRESH:
            return
        self.looked = now
        for job in running:
            if job.key not in self.seen and (folder := job.folder):
                self.seen[job.key] = Progress(folder)
            if job.key in self.seen:
                self.seen[job.key].update()
        if self.live:
            self.live.update(self.table(running), refresh=True)
        elif now - self.said > PLAIN_EVERY:
            self.said = now
            for job in running:
                self.say(f"  {job.name}: {self.line(job)}")

    def line(self, job: Job) -> str:
        progress = self.seen.get(job.key)
        if progress is None or progress.done is None:
            return "running"
        parts = [f"{progress.done:.0%}"]
        if progress.mean_return is not None:
            parts.append(f"return {progress.mean_return:.1f}")
        if progress.seconds_left is not None:
            parts.append(f"{clock(progress.seconds_left)} left")
        return ", ".join(parts)

    def table(self, running: list[Job]) -> Group:
        table = Table(box=None, pad_edge=False)
        for title in ("run", "progress", "", "return", "left"):
            table.add_column(title, justify="right" if title in ("return", "left", "") else "left")
        room = max(3, self.console.height - 4)
        for job in running[:room]:
            progress = self.seen.get(job.key)
            done = progress.done if progress else None
            score = progress.mean_return if progress else None
            left = progress.seconds_left if progress else None
            table.add_row(
                Text(job.name),
                ProgressBar(total=1.0, completed=done or 0.0, width=24),
                "starts" if done is None else f"{done:.0%}",
                "" if score is None else f"{score:.1f}",
                "" if left is None else clock(left),
            )
        more = f" ({len(running) - room} more are running)" if len(running) > room else ""
        waiting = self.total - self.finished - self.failed - len(running)
        counts = f"{self.finished} finished, {self.failed} failed, {waiting} waiting"
        took = clock(time.monotonic() - self.began)
        return Group(table, Text(f"{counts}, {took} so far{more}", style="dim"))


@dataclass
class Attempt:
    job: Job
    process: Process
    slot: int
    resumed: bool


def run_local(
    todo: list[Job], workers: int, retries: int, env: dict[str, str], gpus_per_run: float | None
) -> list[Job]:
    """Run jobs as processes here, `workers` at a time; returns those that failed."""
    waiting, running, failed = deque(todo), list[Attempt](), list[Job]()
    failures = dict.fromkeys((job.key for job in todo), 0)
    free, gpus = list(range(workers)), visible_gpus()
    told: set[str] = set()
    with Board(len(todo)) as board:
        try:
            while waiting or running:
                for attempt in [a for a in running if a.process.poll() is not None]:
                    running.remove(attempt)
                    free.append(attempt.slot)
                    if settle(attempt, failures, retries, board):
                        waiting.appendleft(attempt.job)
                    elif attempt.job.note("status") == "failed":
                        failed.append(attempt.job)
                for _ in range(len(waiting)):
                    if not free:
                        break
                    job = waiting.popleft()
                    if (lock := job.claim()) is None:  # another call has it: look again later
                        waiting.append(job)
                        if job.key not in told:
                            board.say(f"{job.name} is being run by another call: waits for it")
                            told.add(job.key)
                        continue
                    if job.finished:  # by that other call
                        os.close(lock)
                        board.ended(job, True)
                        board.say(f"{job.name} finished")
                        continue
                    slot = free.pop(0)
                    words, own = job.words(), gpus_of(slot, gpus, gpus_per_run)
                    own["CLEANRL_FOLDER_FILE"] = str((job.home / "folder").resolve())
                    job.write(status="running", started=time.time())
                    process, resumed = Process(words, env | own, job.log, lock), "--resume" in words
                    running.append(Attempt(job, process, slot, resumed))
                    board.say(f"{job.name} {'goes on' if resumed else 'starts'}")
                board.update([attempt.job for attempt in running])
                time.sleep(POLL)
        except BaseException:
            jobs.stop([attempt.process for attempt in running])
            for attempt in running:
                attempt.job.write(status="interrupted")
            raise
    return failed


def settle(attempt: Attempt, failures: dict[str, int], retries: int, board: Board) -> bool:
    """Say how an attempt ended and write it down; True if the job is to be tried again."""
    job, status, folder = attempt.job, attempt.process.poll(), attempt.job.folder
    if status == 0 and (folder is None or run_folder.is_finished(folder)):
        job.write(status="finished", exit_status=0)
        board.ended(job, True)
        about = job.summary()
        score = f", return {about['episodic_return']:.1f}" if "episodic_return" in about else ""
        took = f" in {clock(about['seconds'])}" if "seconds" in about else ""
        board.say(f"{job.name} finished{took}{score}")
        return False
    failures[job.key] += 1
    how = describe_status(status)
    trained = folder is not None and run_folder.is_finished(folder)
    refused = status == jobs.BAD_INPUT and not trained
    stale = refused and attempt.resumed  # its code changed since: it cannot be continued
    if trained or (refused and not stale) or (failures[job.key] > retries and not stale):
        job.write(status="failed", exit_status=status)
        board.ended(job, False)
        lines = "\n".join(f"    {line}" for line in job.tail().splitlines())
        board.say(f"{job.name} FAILED: {how}; its last lines, the rest is in {job.log}:\n{lines}")
        return False
    if stale or (folder is not None and not run_folder.can_resume(folder)):
        (job.home / "folder").unlink(missing_ok=True)
        board.seen.pop(job.key, None)
    last = job.tail(1).strip()
    where = "from the start" if stale or not has_checkpoint(job) else "from its checkpoint"
    count = f"{failures[job.key]} of {retries}"
    board.say(f"{job.name}: {how} ({last}); tried again {where} ({count})")
    return True


def has_checkpoint(job: Job) -> bool:
    return job.folder is not None and run_folder.has_checkpoint(job.folder)


def describe_status(status: int | None) -> str:
    if status is None:
        return "lost"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return "ended without finishing" if status == 0 else f"exit status {status}"


def skip_finished(all_jobs: list[Job], fresh: bool) -> list[Job]:
    """What is left to do; says what is not."""
    if fresh:
        for job in all_jobs:
            job.forget()
        return all_jobs
    done = [job for job in all_jobs if job.finished]
    todo = [job for job in all_jobs if not job.finished]
    if done:
        head, others = git("rev-parse", "HEAD"), 0
        for job in done:
            if head and (folder := job.folder):
                record = run_folder.find_record(folder) or {}
                others += record.get("git", {}).get("commit") != head
        older = f", {others} of them from another commit" if others else ""
        print(f"{len(done)} of {len(all_jobs)} runs are finished already{older}", end="")
        print("; --fresh runs everything anew", flush=True)
    return todo


def report(all_jobs: list[Job], failed: list[Job]) -> int:
    """Scores per environment, then the names of what failed; returns the exit status."""
    scores: dict[str, list[float]] = {}
    for job in all_jobs:
        if job.finished and "episodic_return" in (about := job.summary()):
            scores.setdefault(job.name.rpartition("__")[0], []).append(about["episodic_return"])
    for name, values in scores.items():
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        count = f"{len(values)} seed{'s' * (len(values) > 1)}"
        print(f"{name}: return {statistics.mean(values):.1f}{spread} over {count}")
    if failed:
        names = ", ".join(job.name for job in sorted(failed, key=lambda job: job.number))
        print(f"error: {len(failed)} of {len(all_jobs)} runs failed: {names}", file=sys.stderr)
    return 1 if failed else 0


def number_of(index: str, args: BenchmarkArgs) -> int:
    """The number of the one run that this process is for."""
    env = os.environ
    if index == "slurm":
        require("SLURM_ARRAY_TASK_ID" in env, "--index slurm: this is not a job of a Slurm array")
        return int(env["SLURM_ARRAY_TASK_ID"]) * args.slurm_ntasks + int(env.get("SLURM_PROCID", 0))
    if index == "aws-batch":  # a job that is not an array has no index
        return int(env.get("AWS_BATCH_JOB_ARRAY_INDEX", 0))
    require(index.isdecimal(), f"--index takes a number, slurm or aws-batch, not {index}")
    return int(index)


def same_command(args: BenchmarkArgs, tags: list[str], index: str) -> list[str]:
    """This command for one run: what a cluster's node runs, where everything is decided already."""
    words = ["-m", "cleanrl_utils.benchmark", "--command", args.command, "--index", index]
    words += ["--env-ids", *args.env_ids] if args.env_ids else []
    words += ["--num-seeds", str(args.num_seeds), "--start-seed", str(args.start_seed)]
    words += ["--retries", str(args.retries), "--no-auto-tag"]
    words += ["--tags", *tags] if tags else []
    return words + (["--slurm-ntasks", str(args.slurm_ntasks)] if args.slurm_ntasks > 1 else [])


def terminate(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def main(argv: list[str] | None = None) -> int:
    args = parse_command(BenchmarkArgs, argv)
    command = Command(args.command)
    all_jobs, tags = plan(args, command), all_tags(args)
    for note in command.notes:
        print(note, flush=True)

    if args.index is not None:
        number = number_of(args.index, args)
        count = len(all_jobs)
        if number >= count and args.index == "slurm":  # the last array element may have fewer runs
            return 0
        require(number < count, f"--index {number}: must be below {count}, the number of runs")
        all_jobs, args.backend, args.workers = [all_jobs[number]], "local", 1
        args.gpus_per_run = 0  # the scheduler has chosen them
    elif args.backend == "local" and args.workers == 0:
        for job in all_jobs:
            print(shlex.join(job.words()))
        return 0
    if args.backend == "aws-batch":
        from cleanrl_utils.launching.clusters import run_aws_batch

        return run_aws_batch(args, all_jobs, same_command(args, tags, "aws-batch"))

    todo = skip_finished(all_jobs, args.fresh)
    env = jobs.environment(command, tags)
    if offline := track_offline(command, env):
        print(offline, flush=True)
    if args.backend == "slurm":
        from cleanrl_utils.launching.clusters import run_slurm

        failed = run_slurm(args, todo, same_command(args, tags, "slurm"), env)
        return report(all_jobs, failed) if failed is not None else 0
    if args.backend == "ray":
        from cleanrl_utils.launching.clusters import run_ray

        return report(all_jobs, run_ray(args, todo, tags, env))
    signal.signal(signal.SIGTERM, terminate)
    try:
        failed = run_local(todo, args.workers, args.retries, env, args.gpus_per_run)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return report(all_jobs, failed)


if __name__ == "__main__":
    sys.exit(main())
