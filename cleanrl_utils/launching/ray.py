"""Runs as tasks of a Ray cluster, whose nodes must see the same working directory.

A node runs `python -m cleanrl_utils.benchmark ... --index NUMBER`: one run, resumed if it was
interrupted.
"""

import shlex
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cleanrl_utils.errors import BadInput, missing_package, require
from cleanrl_utils.launching.jobs import Job
from cleanrl_utils.launching.local import Board, gpu_memory
from cleanrl_utils.launching.options import LaunchArgs, same_command

CONNECT_SECONDS = 60  # to reach a Ray cluster


def run_ray(args: LaunchArgs, todo: list[Job], tags: list[str], env: dict[str, str]) -> list[Job]:
    """Run jobs as Ray tasks; returns those that failed."""
    if args.workers == 0:
        for job in todo:
            print(shlex.join(["python", *same_command(args, tags, str(job.number))]))
        return []
    if not todo:
        return []
    try:
        import ray
    except ImportError:
        raise missing_package("ray", "cloud") from None
    connect(ray, args.ray_address)
    gpus = args.gpus_per_run
    if gpus is None:
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
    task = ray_task(ray, args, gpus)
    variables = {k: v for k, v in env.items() if k == "PYTHONPATH" or k.startswith("WANDB_")}
    variables |= gpu_memory(1 / gpus if gpus else 1, env)
    waiting = list(todo)
    failed: list[Job] = []
    running: dict[Any, Job] = {}  # by the future of its task
    with Board(len(todo)) as board:
        try:
            while waiting or running:
                while waiting and len(running) < args.workers:
                    job = waiting.pop(0)
                    words = [sys.executable, *same_command(args, tags, str(job.number))]
                    future = task.remote(words, str(Path.cwd()), variables)
                    running[future] = job
                ended, _ = ray.wait(list(running), timeout=0.2)
                for future in ended:
                    job = running.pop(future)
                    if not succeeded(ray, future, job, board):
                        failed.append(job)
                board.update([job for job in running.values() if job.folder])
        finally:
            for future in running:
                ray.cancel(future, force=True)
            ray.shutdown()
    return failed


def ray_task(ray: Any, args: LaunchArgs, gpus: float) -> Any:
    """The Ray task that runs a command in a folder; it returns (exit status, output)."""

    # Defined here, so that Ray sends its code: a node need not be able to import this module.
    def work(words: list[str], folder: str, variables: dict[str, str]) -> tuple[int, str]:
        import os  # in the node's process
        import subprocess

        done = subprocess.run(
            words,
            cwd=folder,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    # Ray repeats a task whose node or worker died; --retries repeats a run that failed.
    retries = max(args.retries, 1)
    return ray.remote(work).options(num_cpus=args.cpus_per_run, num_gpus=gpus, max_retries=retries)


def succeeded(ray: Any, future: Any, job: Job, board: Board) -> bool:
    """Print how the task of a job ended; returns whether it succeeded."""
    try:
        status, output = ray.get(future)
    except ray.exceptions.RayError as error:
        status = 1
        output = str(error)
    board.ended(job, status == 0)
    if status:
        board.say(f"{job.name} FAILED on Ray:\n{output.strip()}")
    else:
        board.say(f"{job.name} finished")
    return status == 0


def connect(ray: Any, address: str) -> None:
    """Connect to a cluster; Ray itself would wait for minutes if there is none."""
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if address == "local":
        ray.init(address="local", include_dashboard=False, **quiet)
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise BadInput(f"--ray-address {address}: no answer ({error})") from None
    problem = within(CONNECT_SECONDS, lambda: ray.init(address=address, **quiet))
    hint = "start one with `ray start --head`, or use --ray-address local"
    require(problem is None, f"--ray-address {address}: no cluster ({problem}); {hint}")


def within(seconds: float, function: Callable[[], Any]) -> str | None:
    """Call a function; returns why it did not succeed in this time, or None if it did."""
    problem = [f"no answer in {seconds:.0f} s"]

    def call() -> None:
        try:
            function()
            problem.clear()
        except Exception as error:
            problem[:] = [str(error).strip().splitlines()[0] if str(error) else repr(error)]

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return problem[0] if problem else None
