"""Run a command on several environments with several seeds, on this machine or a cluster.

    python -m cleanrl_utils.benchmark --env-ids CartPole-v1 Acrobot-v1 \\
        --command "python cleanrl/ppo.py --cuda False" --num-seeds 3 --workers 2

The same command again runs only what is missing: finished runs are skipped, interrupted runs are
resumed from their checkpoints. If a run fails after all retries, the exit status is 1 and the last
line names it.
"""

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from cleanrl_utils.analysis.grouping import count
from cleanrl_utils.analysis.stats import mean_and_std
from cleanrl_utils.errors import require
from cleanrl_utils.launching import jobs
from cleanrl_utils.launching.jobs import Command, Job
from cleanrl_utils.launching.local import run_local
from cleanrl_utils.launching.options import LaunchArgs, same_command
from cleanrl_utils.running.settings import parse_command

SHOWN = 10  # names in a note


@dataclass
class BenchmarkArgs(LaunchArgs):
    """The flags of this command: see launching/options.py."""


def plan(args: BenchmarkArgs, command: Command) -> list[Job]:
    """All jobs, seed by seed, so that every environment soon has a first result."""
    require(
        args.num_seeds == 1 or command.seeds_per_run == "1",
        f"--num-seeds {args.num_seeds}: each run of this --command trains"
        f" {command.seeds_per_run} seeds itself, and runs would repeat seeds: add --num-seeds 1",
    )
    seeds = range(args.start_seed, args.start_seed + args.num_seeds)
    env_ids: list[str | None] = [*args.env_ids] or [None]
    pairs = [(env_id, seed) for seed in seeds for env_id in env_ids]
    return [Job(command, env_id, seed, number) for number, (env_id, seed) in enumerate(pairs)]


def git(*words: str) -> str:
    """The output of a git command; empty if it fails."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        return ""


def all_tags(args: BenchmarkArgs) -> list[str]:
    """The tags of --tags, and the version of the code with --auto-tag."""
    version = git("describe", "--tags", "--always") if args.auto_tag else ""
    return [*args.tags, version] if version else [*args.tags]


def track_offline(command: Command, env: dict[str, str]) -> str | None:
    """Set W&B to offline mode if there is no key, because it cannot ask for one; returns a note."""
    known = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    if "--track" not in command.words or any(env.get(name) for name in known):
        return None
    try:
        import wandb

        if wandb.login(prompt=False, verify=False):
            return None
    except Exception:  # not installed, or too old: each run prints it in its log
        return None
    env["WANDB_MODE"] = "offline"
    return "no W&B key is configured: runs are tracked offline, `wandb sync` uploads them later"


def skip_finished(all_jobs: list[Job], fresh: bool, tags: list[str]) -> list[Job]:
    """The jobs that are not finished; prints what is skipped and what is run again."""
    if fresh:
        for job in all_jobs:
            job.forget()
        return all_jobs
    done = [job for job in all_jobs if job.finished]
    todo = [job for job in all_jobs if not job.finished]
    if done:
        number = f"{len(done)} of {len(all_jobs)}"
        print(f"{number} runs are already finished; --fresh runs them again", flush=True)
        untagged = [job for job in done if not set(tags) <= set(job.tags())]
        if untagged:
            print(f"note: {len(untagged)} of these were run without --tags {' '.join(tags)}")
    older: list[Job] = []
    homes = jobs.homes_by_job(all_jobs[0].home.parent)
    for job in todo:
        if job.folder is None:
            older += job.older(homes.get(job.key_without_code, []))
    if older:
        names = list(dict.fromkeys(old.name for old in older))
        places = [str(old.folder or old.home) for old in older]
        number = f"{len(names)} of {len(all_jobs)} runs"
        again = f"{number} start again, because their code has changed: {some(names)}"
        print(f"{again} (old runs: {some(places)})")
    return todo


def some(names: list[str]) -> str:
    """Names in a line that stays readable with thousands of them."""
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def report(all_jobs: list[Job], failed: list[Job]) -> int:
    """Print scores per environment, then the names of failed runs; returns the exit status."""
    summaries: dict[str, list[dict[str, Any]]] = {}
    for job in all_jobs:
        summary = job.summary() if job.finished else {}
        if summary:
            summaries.setdefault(job.name.rpartition("__")[0], []).append(summary)
    for name, found in summaries.items():
        seeds = all_jobs[0].command.seeds_per_run
        first = "" if seeds == "1" else f" (the first of {seeds}: `results show` has all)"
        print(f"{name}: {describe_scores(found)}{first}")
    all_jobs[0].command.forget_code()
    old = [job.name for job in all_jobs if job.finished and job.code != job.current_code()]
    if old:
        number = f"{len(old)} of {len(all_jobs)} runs"
        print(f"note: {number} are of code that has changed since: {some(old)}")
    if failed:
        names = ", ".join(job.name for job in sorted(failed, key=lambda job: job.number))
        print(f"error: {len(failed)} of {len(all_jobs)} runs failed: {names}", file=sys.stderr)
    return 1 if failed else 0


def describe_scores(summaries: list[dict[str, Any]]) -> str:
    """Mean ± sample standard deviation over seeds, and how many runs finished no episode."""
    values = [summary["episodic_return"] for summary in summaries if "episodic_return" in summary]
    no_episode = len(summaries) - len(values)
    if not values:
        return "no finished episode"
    over = count(len(values), "seed")
    missing = f" ({no_episode} of {len(summaries)} finished no episode)" if no_episode else ""
    return f"return {mean_and_std(values)} over {over}{missing}"


def number_of(index: str, args: BenchmarkArgs) -> int:
    """The number of the run that --index names."""
    env = os.environ
    if index == "slurm":
        require(
            "SLURM_ARRAY_TASK_ID" in env,
            "--index slurm: SLURM_ARRAY_TASK_ID is not set: not in a Slurm job array",
        )
        return int(env["SLURM_ARRAY_TASK_ID"]) * args.slurm_ntasks + int(env.get("SLURM_PROCID", 0))
    if index == "aws-batch":  # a job that is not an array has no index
        return int(env.get("AWS_BATCH_JOB_ARRAY_INDEX", 0))
    require(index.isdecimal(), f"--index takes a number, slurm or aws-batch, not {index}")
    return int(index)


def terminate(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def main(argv: list[str] | None = None) -> int:
    args = parse_command(BenchmarkArgs, argv)
    command = Command(args.command)
    jobs.refuse_flag(command.words, "--resume", "interrupted runs resume by themselves")
    jobs.refuse_flag(command.words, "--seed", "--start-seed and --num-seeds set it")
    if args.env_ids:
        jobs.refuse_flag(command.words, "--env-id", "--env-ids sets it")
    all_jobs = plan(args, command)
    tags = all_tags(args)
    for note in command.notes:
        print(note, flush=True)

    if args.index is not None:
        number = number_of(args.index, args)
        total = len(all_jobs)
        if number >= total and args.index == "slurm":  # the last array element may have fewer runs
            return 0
        require(number < total, f"--index {number}: must be below {total}, the number of runs")
        all_jobs = [all_jobs[number]]
        args.backend = "local"
        args.workers = 1
        args.gpus_per_run = 0  # the scheduler chooses the GPUs
    elif args.backend == "local":
        command.require_script()
        if args.workers == 0:
            for job in all_jobs:
                print(shlex.join(job.words()))
            print("nothing was run: --workers 0 only prints the commands", file=sys.stderr)
            return 0
    if args.backend == "aws-batch":
        from cleanrl_utils.launching.aws_batch import run_aws_batch

        return run_aws_batch(args, all_jobs, same_command(args, tags, "aws-batch"))

    todo = skip_finished(all_jobs, args.fresh, args.tags)
    env = jobs.environment(command, tags)
    offline = track_offline(command, env)
    if offline:
        print(offline, flush=True)
    if args.backend == "slurm":
        from cleanrl_utils.launching.slurm import run_slurm

        failed = run_slurm(args, todo, same_command(args, tags, "slurm"), env)
        return report(all_jobs, failed) if failed is not None else 0
    if args.backend == "ray":
        from cleanrl_utils.launching.ray import run_ray

        return report(all_jobs, run_ray(args, todo, tags, env))
    return run_here(args, all_jobs, todo, env)


def run_here(args: BenchmarkArgs, all_jobs: list[Job], todo: list[Job], env: dict[str, str]) -> int:
    """Run jobs as processes on this machine; returns the exit status."""
    signal.signal(signal.SIGTERM, terminate)
    try:
        failed = run_local(todo, args, env)
    except KeyboardInterrupt:
        print("interrupted; the same command resumes the runs", file=sys.stderr)
        return 130
    except OSError as error:  # the disk is full
        reason = f"{error.filename or all_jobs[0].home.parent}: {error.strerror or error}"
        print(f"error: {reason}; the same command resumes the runs", file=sys.stderr)
        return 1
    return report(all_jobs, failed)


if __name__ == "__main__":
    sys.exit(main())
