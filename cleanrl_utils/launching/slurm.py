"""Runs as elements of a Slurm job array, whose nodes must see the same working directory.

An element runs `python -m cleanrl_utils.benchmark ... --index slurm`: one run, resumed if it was
interrupted.
"""

import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cleanrl_utils.errors import require
from cleanrl_utils.launching.jobs import Job
from cleanrl_utils.launching.local import Board, describe_status
from cleanrl_utils.launching.options import LaunchArgs

TEMPLATE = (
    Path(__file__).resolve().parent.parent.parent / "benchmark" / "cleanrl_1gpu.slurm_template"
)
LOST = 15  # seconds without queue entry and result after which a job counts as lost


def fill_template(text: str, values: dict[str, Any]) -> str:
    """Replace {{name}} by its value; drop #SBATCH lines whose value is not given."""
    lines = []
    for line in text.splitlines():
        names = re.findall(r"\{\{\s*(\w+)\s*\}\}", line)
        unknown = [name for name in names if name not in values]
        known = ", ".join(values)
        require(not unknown, f"the Slurm template has unknown names {unknown}; known are: {known}")
        if line.startswith("#SBATCH") and any(values[name] in (None, 0, "") for name in names):
            continue
        lines.append(re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda m: str(values[m.group(1)]), line))
    return "\n".join(lines) + "\n"


def quote(path: Path) -> str:
    """Quote a path for a #SBATCH line: as in a shell, % doubled."""
    text = str(path).replace("%", "%%")
    return shlex.quote(text)


def as_ranges(numbers: list[int]) -> str:
    """Numbers in Slurm's notation: [0, 1, 2, 5] becomes 0-2,5."""
    groups: list[list[int]] = []
    for number in sorted(numbers):
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ",".join(str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups)


def run_slurm(
    args: LaunchArgs, todo: list[Job], words: list[str], env: dict[str, str]
) -> list[Job] | None:
    """Submit jobs as one array; with --wait returns those that failed, else None."""
    states = slurm_states(todo)
    queued = [job for job in todo if states.get(slurm_element(job)) in ACTIVE]
    if queued:
        print(f"{len(queued)} of {len(todo)} runs are already in the queue", flush=True)
    new = [job for job in todo if job not in queued]
    if new:
        path = Path(args.slurm_template_path or TEMPLATE)
        require(path.is_file(), f"--slurm-template-path {path}: no such file")
        logs = new[0].home.parent / "slurm"
        elements = sorted({job.number // args.slurm_ntasks for job in new})
        at_once = f"%{args.workers}" if args.workers else ""
        values = {
            "array": as_ranges(elements) + at_once,
            "job": shlex.join([sys.executable, *words]),
            "gpus_per_task": args.slurm_gpus_per_task,
            "cpus_per_task": args.slurm_total_cpus // args.slurm_ntasks,
            "ntasks": args.slurm_ntasks,
            "nodes": args.slurm_nodes,
            "logs": quote(logs),
        }
        script = fill_template(path.read_text(), values)
        if args.workers == 0:
            print(script)
            return None
        submit(script, logs, new, args, env)
    if args.wait:
        return wait_for_slurm(todo)
    print("run the same command later to submit missing runs again; --wait waits for the results")
    return None


def submit(script: str, logs: Path, new: list[Job], args: LaunchArgs, env: dict[str, str]) -> None:
    require(
        shutil.which("sbatch") is not None,
        "--backend slurm: sbatch is not installed on this machine",
    )
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"{time.time_ns()}.sh"
    path.write_text(script)
    options = shlex.split(args.slurm_options)
    done = subprocess.run(
        ["sbatch", "--parsable", *options, str(path)], capture_output=True, text=True, env=env
    )
    reasons = "; ".join(line for line in done.stderr.splitlines() if line.strip())
    require(done.returncode == 0, f"--backend slurm: sbatch refused {path}: {reasons}")
    number = done.stdout.strip().partition(";")[0]
    for job in new:
        job.home.mkdir(parents=True, exist_ok=True)
        (job.home / "slurm").write_text(f"{number}_{job.number // args.slurm_ntasks}")
    print(f"submitted {len(new)} runs as Slurm job {number}; logs in {logs}", flush=True)


def slurm_element(job: Job) -> str:
    """The array element of a job's last submission, e.g. 12_0."""
    path = job.home / "slurm"
    return path.read_text() if path.exists() else ""


def slurm_states(todo: list[Job]) -> dict[str, str]:
    """The states of the array elements that Slurm still knows: {"12_0": "RUNNING"}."""
    states: dict[str, str] = {}
    for number in sorted({slurm_element(job).partition("_")[0] for job in todo} - {""}):
        words = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T"]
        try:
            done = subprocess.run([*words, f"--jobs={number}"], capture_output=True, text=True)
        except OSError:
            return {}
        for line in done.stdout.splitlines():
            element, _, state = line.strip().partition(" ")
            states[element] = state
    return states


ACTIVE = {"PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "RESIZING"}
ACTIVE |= {"REQUEUE_HOLD", "REQUEUE_FED", "SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT"}


def wait_for_slurm(todo: list[Job]) -> list[Job]:
    """Wait until all jobs of the queue have ended; returns those that failed."""
    left = list(todo)
    failed: list[Job] = []
    missing: dict[str, float] = {}  # when a job was first found neither active nor finished
    with Board(len(todo)) as board:
        while left:
            states = slurm_states(left)
            for job in list(left):
                state = states.get(slurm_element(job), "")
                since = missing.setdefault(job.key, time.monotonic())
                if state in ACTIVE and not job.finished:
                    missing.pop(job.key)
                    continue
                # On a network file system job.json may appear later than Slurm's state.
                settled = job.finished or job.note("status") in ("failed", "interrupted")
                if not settled and time.monotonic() - since < LOST:
                    continue
                left.remove(job)
                board.ended(job, job.finished)
                if job.finished:
                    board.say(f"{job.name} finished")
                    continue
                failed.append(job)
                how = describe_status(job.note("exit_status"))
                board.say(f"{job.name} FAILED: {how} (Slurm: {state or 'unknown'})\n{job.tail()}")
            board.update([job for job in left if job.folder])
            time.sleep(1.0 if left else 0.0)
    return failed
