"""The flags of the benchmark tool, for the command itself and for its backends."""

import math
from dataclasses import dataclass, field
from typing import Literal

from cleanrl_utils.errors import require
from cleanrl_utils.launching.jobs import split


@dataclass
class CoreArgs:
    """What to run, how often and where."""

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
    timeout: float = 0
    """minutes after which a run is ended and counts as failed; 0: no limit"""
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
class BatchArgs:
    """What AWS Batch is asked for."""

    docker_tag: str = "vwxyzjn/cleanrl:latest"
    """AWS Batch: image to run"""
    job_queue: str = "m6gd-medium"
    """AWS Batch: queue, named after its machines; the ones of cloud/ are like c5a-large-spot"""
    num_vcpu: int = 1
    """AWS Batch: CPUs of a run"""
    num_memory: int = 2000
    """AWS Batch: memory of a run in MiB"""
    num_gpu: int = 0
    """AWS Batch: GPUs of a run"""
    num_hours: float = 16.0
    """AWS Batch: a run that takes longer is ended"""
    attempts: int = 3
    """AWS Batch: how often a run is started if its machine is taken away"""
    secrets: list[str] = field(default_factory=list)
    """AWS Batch: variables that AWS keeps, as WANDB_API_KEY=arn:aws:secretsmanager:..."""
    execution_role: str = ""
    """AWS Batch: ARN of the role that may read those secrets"""
    efs: str = ""
    """AWS Batch: EFS for the runs, as fs-ID or fs-ID:fsap-ID; then a run started again goes on"""
    region: str | None = None
    """AWS Batch: region; unset: as configured for the AWS tools"""


@dataclass
class LaunchArgs(BatchArgs, CoreArgs):
    """All flags of the benchmark tool."""

    def __post_init__(self) -> None:
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
        split("--slurm-options", self.slurm_options)  # the last thing to be read


def same_command(args: LaunchArgs, tags: list[str], index: str) -> list[str]:
    """This command for one run: what a cluster's node runs, where everything is decided already."""
    words = ["-m", "cleanrl_utils.benchmark", "--command", args.command, "--index", index]
    words += ["--env-ids", *args.env_ids] if args.env_ids else []
    words += ["--num-seeds", str(args.num_seeds), "--start-seed", str(args.start_seed)]
    words += ["--retries", str(args.retries), "--no-auto-tag"]
    words += ["--tags", *tags] if tags else []
    words += ["--timeout", str(args.timeout)] if args.timeout else []
    return words + (["--slurm-ntasks", str(args.slurm_ntasks)] if args.slurm_ntasks > 1 else [])
