"""Run a command in a container on AWS Batch, with several seeds.

    python -m cleanrl_utils.submit_exp --docker-tag you/cleanrl:latest \\
        --command "python cleanrl/ppo.py" --num-seed 3 --num-vcpu 1 --num-memory 2000 \\
        --num-hours 16 --job-queue c5a-large-spot --provider aws

Without --provider it is a dry run: it prints what would be sent and needs no account. Keys are
never passed: --secrets names where AWS keeps them (cloud/README.md), and AWS hands them over.
"""

import hashlib
import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from cleanrl_utils.errors import BadInput, missing_package, require
from cleanrl_utils.launching.jobs import split
from cleanrl_utils.running.settings import parse_command

ARN = re.compile(r"arn:aws[\w-]*:(secretsmanager|ssm):[\w-]+:\d{12}:\S+")
LOOKS_SECRET = re.compile(r"[A-Z_]*(API_?KEY|TOKEN|SECRET|PASSWORD)[A-Z_]*=")
RUNS = "/cleanrl/runs"  # where the image's working directory has its runs
ENDED = ("SUCCEEDED", "FAILED")


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
class SubmitArgs(BatchArgs):
    command: str = "python cleanrl/ppo.py"
    """what to run; --seed is added to it"""
    num_seed: int = 1
    """seeds, from 1"""
    provider: Literal["", "aws"] = ""
    """aws submits; empty only prints what would be submitted"""
    wait: bool = False
    """wait until all runs have ended; exit status 1 if one failed"""
    build: bool = False
    """build the image first"""
    push: bool = False
    """push it to its registry, too"""
    archs: str = "linux/amd64"
    """platforms of the image, e.g. linux/amd64,linux/arm64"""


class Submission:
    """A job definition and an array job (or a single one) that uses it."""

    def __init__(self, args: BatchArgs, words: list[str], name: str, size: int):
        require(1 <= size <= 10_000, f"AWS Batch takes 1 to 10,000 runs at once, not {size}")
        leak = LOOKS_SECRET.search(" ".join(words))
        if leak:
            raise BadInput(f"the command has {leak[0]}...: pass it by reference, with --secrets")
        self.region = args.region
        self.definition = job_definition(args)
        self.request: dict[str, Any] = {
            "jobName": name,
            "jobQueue": args.job_queue,
            "jobDefinition": self.definition["jobDefinitionName"],
            "containerOverrides": {"command": words},
        }
        if size > 1:
            self.request["arrayProperties"] = {"size": size}

    def as_json(self) -> str:
        return json.dumps([self.definition, self.request], indent=2)

    def client(self) -> Any:
        try:
            import boto3
        except ImportError:
            raise missing_package("boto3", "cloud") from None
        return self.call(lambda: boto3.client("batch", region_name=self.region))

    def call(self, function: Any, **request: Any) -> Any:
        """A call to AWS; what it refuses is one line and exit status 1."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return function(**request)
        except (BotoCoreError, ClientError) as error:
            raise SystemExit(f"error: AWS: {error}") from None

    def submit(self) -> str:
        """Register the job definition, if it is new, and submit; returns the job's id."""
        batch, name = self.client(), self.definition["jobDefinitionName"]
        known = self.call(batch.describe_job_definitions, jobDefinitionName=name, status="ACTIVE")
        if not known["jobDefinitions"]:
            self.call(batch.register_job_definition, **self.definition)
        return self.call(batch.submit_job, **self.request)["jobId"]

    def wait(self, job_id: str, names: list[str], every: float = 30.0) -> int:
        """Until the job has ended; names what failed. Returns the exit status."""
        batch = self.client()
        while True:
            job = self.call(batch.describe_jobs, jobs=[job_id])["jobs"][0]
            counts = job.get("arrayProperties", {}).get("statusSummary", {})
            print(job["status"], {k: v for k, v in counts.items() if v} or "", flush=True)
            if job["status"] in ENDED:
                break
            time.sleep(every)
        if job["status"] == "SUCCEEDED":
            return 0
        failed = [names[0]]
        if "arrayProperties" in self.request:
            pages = batch.get_paginator("list_jobs").paginate(arrayJobId=job_id, jobStatus="FAILED")
            children = [child for page in pages for child in page["jobSummaryList"]]
            failed = [names[int(child["jobId"].rpartition(":")[2])] for child in children]
        print(f"error: {len(failed)} runs failed: {', '.join(failed)}", file=sys.stderr)
        return 1


def job_definition(args: BatchArgs) -> dict[str, Any]:
    """Image, resources and references to secrets; named by its contents, so it is made once."""
    needs = {"VCPU": args.num_vcpu, "MEMORY": args.num_memory, "GPU": args.num_gpu}
    container: dict[str, Any] = {
        "image": args.docker_tag,
        "command": ["python", "cleanrl/ppo.py", "--help"],
        "resourceRequirements": [{"type": k, "value": str(v)} for k, v in needs.items() if v],
    }
    if args.secrets:
        require(bool(args.execution_role), "--secrets needs --execution-role, which may read them")
        container["secrets"] = [secret_reference(text) for text in args.secrets]
    if args.execution_role:
        container["executionRoleArn"] = args.execution_role
    if args.efs:
        file_system, _, access_point = args.efs.partition(":")
        volume: dict[str, Any] = {"fileSystemId": file_system, "transitEncryption": "ENABLED"}
        if access_point:
            volume["authorizationConfig"] = {"accessPointId": access_point, "iam": "DISABLED"}
        container["volumes"] = [{"name": "runs", "efsVolumeConfiguration": volume}]
        container["mountPoints"] = [{"sourceVolume": "runs", "containerPath": RUNS}]
    definition = {
        "type": "container",
        "containerProperties": container,
        "timeout": {"attemptDurationSeconds": max(60, int(args.num_hours * 3600))},
        "retryStrategy": {
            "attempts": args.attempts,
            # A machine that is taken away says "Host EC2 (instance i-...) terminated."
            "evaluateOnExit": [
                {"onStatusReason": "Host EC2*", "action": "RETRY"},
                {"onReason": "*", "action": "EXIT"},
            ],
        },
    }
    digest = hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()
    return {"jobDefinitionName": f"cleanrl-{digest[:12]}", **definition}


def secret_reference(text: str) -> dict[str, str]:
    """NAME=ARN as AWS wants it. A message never repeats the value: it may be the secret itself."""
    name, _, arn = text.partition("=")
    if not ARN.fullmatch(arn):
        raise BadInput(
            "--secrets takes NAME=ARN, with the ARN of a secret in AWS Secrets Manager; "
            f"the value of {name if name.isidentifier() and arn else 'your variable'} is none"
        )
    return {"name": name, "valueFrom": arn}


def build_commands(args: SubmitArgs) -> list[list[str]]:
    """How the image is made; it is told its commit, so that its runs can name it."""
    if not (args.build or args.push):
        return []
    head = ["git", "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    words = ["docker", "buildx", "build", "--platform", args.archs, "--tag", args.docker_tag]
    words += ["--build-arg", f"COMMIT={commit}", "--push" if args.push else "--load", "."]
    return [words]


def main(argv: list[str] | None = None) -> int:
    args = parse_command(SubmitArgs, argv)
    typed = split("--command", args.command)
    require(bool(typed), "--command needs a command, e.g. 'python cleanrl/ppo.py'")
    words = ["python", "-m", "cleanrl_utils.benchmark", "--command", args.command]
    words += ["--num-seeds", str(args.num_seed), "--index", "aws-batch", "--no-auto-tag"]
    scripts = [word for word in typed if word.endswith(".py")]
    name = re.sub(r"[^A-Za-z0-9_-]", "-", scripts[0].rpartition("/")[2][:-3] if scripts else "run")
    submission = Submission(args, words, f"{name}-{int(time.time())}", args.num_seed)
    for command in build_commands(args):
        print(shlex.join(command), flush=True)
        if args.provider:
            done = subprocess.run(command)
            require(done.returncode == 0, "the image could not be built; see above")
    if not args.provider:
        print(submission.as_json())
        print("dry run: nothing was sent; --provider aws submits it", file=sys.stderr)
        return 0
    job_id = submission.submit()
    print(f"submitted {args.num_seed} runs as {job_id} to the queue {args.job_queue}")
    names = [f"seed {seed}" for seed in range(1, args.num_seed + 1)]
    return submission.wait(job_id, names) if args.wait else 0


if __name__ == "__main__":
    sys.exit(main())
