"""The flags of the benchmark tool, for the command itself and for its backends."""

import math
from dataclasses import dataclass, field
from typing import Literal

from cleanrl_utils.errors import require
from cleanrl_utils.launching.jobs import split


@dataclass
class CoreArgs:
    """The runs and where to run them."""

    env_ids: list[str] = field(default_factory=list)
    """environments; none: the command's own"""
    command: str = "python cleanrl/ppo.py"
    """command to run; --env-id and --seed are added to it"""
    num_seeds: int = 3
    """number of seeds per environment"""
    start_seed: int = 1
    """first seed"""
    workers: int = 0
    """number of parallel runs; 0: print the commands and run nothing"""
    retries: int = 1
    """how often a failed run is resumed from its last checkpoint"""
    timeout: float = 0
    """stop a run after this many minutes and count it as failed; 0: no limit"""
    tags: list[str] = field(default_factory=list)
    """tags for every run, in its run.json and on Weights & Biases"""
    auto_tag: bool = True
    """also tag the runs with the version of the code (git describe)"""
    fresh: bool = False
    """run everything again, even finished runs"""
    backend: Literal["local", "ray", "slurm", "aws-batch"] = "local"
    """where to run: processes on this machine, Ray cluster, Slurm job array, AWS Batch array job"""
    wait: bool = False
    """Slurm, AWS Batch: wait for the runs and report their results instead of only submitting"""
    index: str | None = None
    """run only the run with this number, on this machine; slurm or aws-batch: take the number from
    the scheduler"""
    cpus_per_run: float = 1
    """Ray: CPUs per run"""
    gpus_per_run: float | None = None
    """GPUs per run, with Ray also a fraction; 0: none; unset: one, if there are any"""
    ray_address: str = "auto"
    """Ray: head node as host:port; auto: this machine's cluster; local: start one for this call"""
    slurm_template_path: str | None = None
    """Slurm: template of the job script, default benchmark/cleanrl_1gpu.slurm_template; implies
    --backend slurm"""
    slurm_gpus_per_task: int = 1
    """Slurm: GPUs per run; 0: none"""
    slurm_total_cpus: int = 0
    """Slurm: CPUs per array element, shared by its runs; 0: Slurm's default"""
    slurm_ntasks: int = 1
    """Slurm: parallel runs per array element"""
    slurm_nodes: int | None = None
    """Slurm: nodes per array element; unset: as few as possible"""
    slurm_options: str = ""
    """Slurm: further options for sbatch, e.g. "--partition=gpu --time=24:00:00" """


@dataclass
class BatchArgs:
    """Resources on AWS Batch."""

    docker_tag: str = "vwxyzjn/cleanrl:latest"
    """AWS Batch: Docker image"""
    job_queue: str = "m6gd-medium"
    """AWS Batch: job queue, named after its machines; cloud/ makes e.g. c5a-large-spot"""
    num_vcpu: int = 1
    """AWS Batch: CPUs per run"""
    num_memory: int = 2000
    """AWS Batch: memory per run in MiB"""
    num_gpu: int = 0
    """AWS Batch: GPUs per run"""
    num_hours: float = 16.0
    """AWS Batch: stop a run after this many hours"""
    attempts: int = 3
    """AWS Batch: how often to start a run whose machine is taken away"""
    secrets: list[str] = field(default_factory=list)
    """AWS Batch: secret variables by reference, as WANDB_API_KEY=arn:aws:secretsmanager:..."""
    execution_role: str = ""
    """AWS Batch: ARN of the role that may read the secrets"""
    efs: str = ""
    """AWS Batch: EFS file system for runs, fs-ID or fs-ID:fsap-ID; lets a restarted run resume"""
    region: str | None = None
    """AWS Batch: region; unset: the configured one"""

    def __post_init__(self) -> None:
        for name, least in (("num_vcpu", 1), ("num_memory", 1), ("num_gpu", 0), ("attempts", 1)):
            flag = "--" + name.replace("_", "-")
            require(getattr(self, name) >= least, f"{flag} must be at least {least}")
        require(self.num_hours > 0, f"--num-hours must be above 0, got {self.num_hours:g}")


@dataclass
class LaunchArgs(BatchArgs, CoreArgs):
    """All flags of the benchmark tool."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.env_ids = list(dict.fromkeys(self.env_ids))  # a run counts once
        if self.slurm_template_path and self.backend == "local":
            self.backend = "slurm"
        for name in ("num_seeds", "slurm_ntasks"):
            flag = "--" + name.replace("_", "-")
            require(getattr(self, name) >= 1, f"{flag} must be at least 1")
        for name in ("workers", "retries", "start_seed", "slurm_gpus_per_task", "slurm_total_cpus"):
            flag = "--" + name.replace("_", "-")
            require(getattr(self, name) >= 0, f"{flag} must not be negative")
        finite = math.isfinite(self.timeout) and self.timeout >= 0
        require(finite, f"--timeout takes minutes, 0 for no limit, not {self.timeout}")
        require(self.gpus_per_run is None or self.gpus_per_run >= 0, "--gpus-per-run is negative")
        split("--slurm-options", self.slurm_options)  # stop now rather than after all other work


def same_command(args: LaunchArgs, tags: list[str], index: str) -> list[str]:
    """The command that a node of a cluster runs for one run of this benchmark."""
    words = ["-m", "cleanrl_utils.benchmark", "--command", args.command, "--index", index]
    words += ["--env-ids", *args.env_ids] if args.env_ids else []
    words += ["--num-seeds", str(args.num_seeds), "--start-seed", str(args.start_seed)]
    words += ["--retries", str(args.retries), "--no-auto-tag"]
    words += ["--tags", *tags] if tags else []
    words += ["--timeout", str(args.timeout)] if args.timeout else []
    words += ["--slurm-ntasks", str(args.slurm_ntasks)] if args.slurm_ntasks > 1 else []
    return words
