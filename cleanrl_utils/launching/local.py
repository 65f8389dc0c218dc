"""Runs as processes on this machine: a pool of workers, and a table of their progress."""

import math
import os
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cleanrl_utils.launching import jobs
from cleanrl_utils.launching.jobs import Job, Process, Progress
from cleanrl_utils.launching.options import LaunchArgs
from cleanrl_utils.running import folder as run_folder
from cleanrl_utils.running.metrics import clock

POLL = 0.05  # seconds between two looks for processes that ended
REFRESH = 0.5  # seconds between two readings of the runs' metrics
PLAIN_EVERY = 60.0  # seconds between two lines about a run if there is no terminal
SILENT = 300.0  # seconds without output or metrics after which a run seems to hang
PATIENCE = 10.0  # seconds between SIGTERM and SIGKILL when --timeout ends a run
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY", "Out of memory while trying")


def visible_gpus() -> list[str]:
    """The GPUs that processes may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    return [str(i) for i in range(len(done.stdout.splitlines()))]


def gpus_of(slot: int, gpus: list[str], each: float | None) -> dict[str, str]:
    """Variables that choose the GPUs of a worker; none if there are fewer than two GPUs."""
    if len(gpus) < 2 or each == 0:
        return {}
    count = max(1, math.ceil(each or 1))
    chosen = [gpus[(slot * count + i) % len(gpus)] for i in range(min(count, len(gpus)))]
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def runs_per_gpu(args: LaunchArgs, gpus: list[str]) -> int:
    """The number of runs on a GPU at the same time."""
    if not gpus or args.gpus_per_run == 0:
        return 1
    count = min(max(1, math.ceil(args.gpus_per_run or 1)), len(gpus))
    return math.ceil(args.workers * count / len(gpus))


def gpu_memory(runs: float, env: Mapping[str, str]) -> dict[str, str]:
    """Variables that let several JAX runs share a GPU, unless the user has set them.

    By default each of them would allocate three quarters of the GPU's memory when it starts.
    """
    if runs <= 1 or any(name.startswith("XLA_PYTHON_CLIENT_") for name in env):
        return {}
    fraction = math.floor(90 / runs) / 100
    return {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{max(fraction, 0.01):.2f}",
    }


class Board:
    """The progress of all runs: a live table in a terminal, else plain lines."""

    def __init__(self, total: int, console: Console | None = None):
        self.console = console or Console(stderr=False, highlight=False)
        self.live = (
            Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        )
        self.total = total
        self.finished = 0
        self.failed = 0
        self.seen: dict[str, Progress] = {}
        self.silent: dict[str, float] = {}  # seconds without output, of runs that seem to hang
        self.looked = time.monotonic()
        self.said = time.monotonic()
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
        """Print a line above the table."""
        self.console.print(text, markup=False, soft_wrap=True)

    def ended(self, job: Job, ok: bool) -> None:
        """Count a job as finished or failed."""
        self.finished += ok
        self.failed += not ok
        self.seen.pop(job.key, None)
        self.silent.pop(job.key, None)

    def update(self, running: list[Job]) -> None:
        """Read new metrics and show them, at most every REFRESH seconds."""
        now = time.monotonic()
        if now - self.looked < REFRESH:
            return
        self.looked = now
        for job in running:
            folder = job.folder if job.key not in self.seen else None
            if folder is not None:
                self.seen[job.key] = Progress(folder)
            if job.key in self.seen:
                self.seen[job.key].update()
            self.watch(job)
        if self.live:
            self.live.update(self.table(running), refresh=True)
        elif now - self.said > PLAIN_EVERY:
            self.said = now
            for job in running:
                self.say(f"  {job.name}: {self.line(job)}")

    def watch(self, job: Job) -> None:
        """Warn once of a run that seems to hang."""
        seconds = job.silence()
        if seconds < SILENT:
            self.silent.pop(job.key, None)
            return
        if job.key not in self.silent:
            silence = f"no output and no metrics for {clock(seconds)}"
            hint = "--timeout MINUTES would end it"
            self.say(f"{job.name} hangs? {silence} (process {job.note('process')}); {hint}")
        self.silent[job.key] = seconds

    def line(self, job: Job) -> str:
        """The progress of a job in words."""
        progress = self.seen.get(job.key)
        known = progress is not None and progress.done is not None
        parts = [f"{progress.done:.0%}" if known else "running"]  # type: ignore[union-attr]
        if job.key in self.silent:
            parts.append(f"no output for {clock(self.silent[job.key])}")
        if progress is None or not known:
            return ", ".join(parts)
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
            time_left = "" if left is None else clock(left)
            if job.key in self.silent:
                time_left = "hangs?"
            table.add_row(
                Text(job.name),
                ProgressBar(total=1.0, completed=done or 0.0, width=24),
                "starts" if done is None else f"{done:.0%}",
                "" if score is None else f"{score:.1f}",
                time_left,
            )
        more = f" ({len(running) - room} more are running)" if len(running) > room else ""
        waiting = self.total - self.finished - self.failed - len(running)
        counts = f"{self.finished} finished, {self.failed} failed, {waiting} waiting"
        took = clock(time.monotonic() - self.began)
        return Group(table, Text(f"{counts}, {took} so far{more}", style="dim"))


@dataclass
class Attempt:
    """A process that runs a job, on the worker with number `slot`."""

    job: Job
    process: Process
    slot: int
    resumed: bool
    timed_out: bool = False


class Pool:
    """Runs jobs as processes, `args.workers` at a time."""

    def __init__(self, todo: list[Job], args: LaunchArgs, env: dict[str, str], board: Board):
        self.waiting = deque(todo)
        self.args = args
        self.env = env
        self.board = board
        self.running: list[Attempt] = []
        self.failed: list[Job] = []
        self.failures = Counter[str]()  # by key of the job
        self.begun: dict[str, float] = {}  # start of each job's first attempt
        self.free = list(range(args.workers))
        self.gpus = visible_gpus()
        self.elsewhere: set[str] = set()  # jobs that another call of this tool runs

    def run(self) -> list[Job]:
        """Run all jobs; returns those that failed."""
        try:
            while self.waiting or self.running:
                self.collect()
                self.start()
                self.stop_late()
                self.board.update([attempt.job for attempt in self.running])
                time.sleep(POLL)
        except BaseException:
            jobs.stop([attempt.process for attempt in self.running])
            for attempt in self.running:
                attempt.job.write(status="interrupted")
            raise
        return self.failed

    def collect(self) -> None:
        """Handle the attempts that have ended."""
        for attempt in [a for a in self.running if a.process.poll() is not None]:
            self.running.remove(attempt)
            self.free.append(attempt.slot)
            if settle(attempt, self.failures, self.args, self.board):
                self.waiting.appendleft(attempt.job)
            elif attempt.job.note("status") == "failed":
                self.failed.append(attempt.job)

    def start(self) -> None:
        """Give every free worker a job."""
        for _ in range(len(self.waiting)):
            if not self.free:
                return
            job = self.waiting.popleft()
            lock = job.claim()
            if lock is None:  # another call runs it: look again later
                self.waiting.append(job)
                if job.key not in self.elsewhere:
                    self.board.say(f"{job.name} is run by another call: waiting for it")
                    self.elsewhere.add(job.key)
            elif job.finished:  # by that other call
                os.close(lock)
                self.board.ended(job, True)
                self.board.say(f"{job.name} finished")
            elif job.has_other_code():
                os.close(lock)
                job.update_code()
                self.waiting.appendleft(job)
                self.board.say(f"{job.name}: its code has changed since this call began")
            else:
                self.launch(job, lock)

    def launch(self, job: Job, lock: int) -> None:
        """Start a job on a free worker."""
        slot = self.free.pop(0)
        words = job.words()
        resumed = "--resume" in words
        own = gpus_of(slot, self.gpus, self.args.gpus_per_run)
        own |= gpu_memory(runs_per_gpu(self.args, self.gpus), self.env)
        own["CLEANRL_FOLDER_FILE"] = str((job.home / "folder").resolve())
        job.write(status="running", started=time.time())
        process = Process(words, self.env | own, job.log, lock)
        job.write(process=process.popen.pid)
        self.begun.setdefault(job.key, time.monotonic())
        self.running.append(Attempt(job, process, slot, resumed))
        self.board.say(f"{job.name} {'resumes' if resumed else 'starts'}")

    def stop_late(self) -> None:
        """End runs that take longer than --timeout, by SIGTERM and then by SIGKILL."""
        if not self.args.timeout:
            return
        for attempt in self.running:
            late = time.monotonic() - self.begun[attempt.job.key] - self.args.timeout * 60
            if late > 0 and not attempt.timed_out:
                attempt.timed_out = True
                attempt.process.signal(signal.SIGTERM)
            elif late > PATIENCE:
                attempt.process.signal(getattr(signal, "SIGKILL", signal.SIGTERM))


def run_local(todo: list[Job], args: LaunchArgs, env: dict[str, str]) -> list[Job]:
    """Run jobs as processes on this machine; returns those that failed."""
    with Board(len(todo)) as board:
        return Pool(todo, args, env, board).run()


def settle(attempt: Attempt, failures: Counter[str], args: LaunchArgs, board: Board) -> bool:
    """Print and record how an attempt ended; True if the job is to be tried again."""
    job = attempt.job
    status = attempt.process.poll()
    trained = job.folder is not None and run_folder.is_finished(job.folder)
    if status == 0 and (job.folder is None or trained):
        job.write(status="finished", exit_status=0)
        board.ended(job, True)
        board.say(f"{job.name} finished{describe_result(job.summary())}")
        return False
    failures[job.key] += 1
    how = describe_status(status)
    if attempt.timed_out:
        how = f"ended after {args.timeout:g} minutes (--timeout)"
    refused = status == jobs.BAD_INPUT and not trained
    stale = refused and attempt.resumed  # its settings have changed: it cannot be resumed
    too_often = failures[job.key] > args.retries and not stale
    if trained or (refused and not stale) or too_often or attempt.timed_out:
        job.write(status="failed", exit_status=status)
        board.ended(job, False)
        lines = "\n".join(f"    {line}" for line in job.tail().splitlines())
        hint = describe_memory(job.tail(200))
        board.say(f"{job.name} FAILED: {how}{hint}; last lines of {job.log}:\n{lines}")
        return False
    if stale or (job.folder is not None and not run_folder.can_resume(job.folder)):
        (job.home / "folder").unlink(missing_ok=True)
        board.seen.pop(job.key, None)
    last = job.tail(1).strip()
    begun = job.folder is not None and run_folder.has_checkpoint(job.folder)
    where = "from its checkpoint" if begun and not stale else "from the start"
    count = f"{failures[job.key]} of {args.retries}"
    board.say(f"{job.name}: {how} ({last}); tried again {where} ({count})")
    return True


def describe_result(summary: dict[str, Any]) -> str:
    took = f" in {clock(summary['seconds'])}" if "seconds" in summary else ""
    if "episodic_return" in summary:
        return f"{took}, return {summary['episodic_return']:.2f}"
    return f"{took}, no finished episode" if summary else took


def describe_status(status: int | None) -> str:
    if status is None:
        return "lost"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return "ended without finishing" if status == 0 else f"exit status {status}"


def describe_memory(log: str) -> str:
    """What to do if the log shows that the GPU ran out of memory; else empty."""
    if not any(words in log for words in OUT_OF_MEMORY):
        return ""
    variable = "XLA_PYTHON_CLIENT_MEM_FRACTION, the fraction of GPU memory for each JAX run"
    return f" (out of GPU memory: use fewer --workers or raise {variable})"
