"""Runs as elements of an AWS Batch array job, each in a container.

Keys are never passed on: --secrets names them in AWS, and AWS gives them to the container.
"""

import hashlib
import json
import re
import sys
import time
from typing import Any

from cleanrl_utils.errors import BadInput, missing_package, require
from cleanrl_utils.launching.jobs import Job
from cleanrl_utils.launching.options import BatchArgs, LaunchArgs

ARN = re.compile(r"arn:aws[\w-]*:(secretsmanager|ssm):[\w-]+:\d{12}:\S+")
LOOKS_SECRET = re.compile(r"[A-Z_]*(API_?KEY|TOKEN|SECRET|PASSWORD)[A-Z_]*=")
RUNS = "/cleanrl/runs"  # the runs folder in the image's working directory
ENDED = ("SUCCEEDED", "FAILED")


def run_aws_batch(args: LaunchArgs, todo: list[Job], words: list[str]) -> int:
    """Submit jobs as one array job, which uses the image's own Python and folders."""
    require(
        not args.fresh,
        "--fresh: the runs on AWS are not known here; give --command another folder below runs/,"
        " e.g. --runs-dir runs/again",
    )
    name = re.sub(r"[^A-Za-z0-9_-]", "-", f"{todo[0].command.script}-{int(time.time())}")
    submission = Submission(args, ["python", *words], name, len(todo))
    if args.workers == 0:
        print(submission.as_json())
        return 0
    job_id = submission.submit()
    print(f"submitted {len(todo)} runs as AWS Batch job {job_id} to the queue {args.job_queue}")
    return submission.wait(job_id, [job.name for job in todo]) if args.wait else 0


class Submission:
    """A job definition, and an array job or a single job that uses it."""

    def __init__(self, args: BatchArgs, words: list[str], name: str, size: int):
        require(
            1 <= size <= 10_000, f"--backend aws-batch: takes 1 to 10,000 runs at once, not {size}"
        )
        leak = LOOKS_SECRET.search(" ".join(words))
        if leak:
            raise BadInput(f"--command: holds {leak[0]}...: pass it by reference, with --secrets")
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
        """Call AWS; its errors are one line and exit status 1."""
        from botocore.exceptions import BotoCoreError, ClientError, NoRegionError

        try:
            return function(**request)
        except NoRegionError:
            raise BadInput("AWS: no region is configured: use --region, e.g. us-east-1") from None
        except (BotoCoreError, ClientError) as error:
            raise SystemExit(f"error: AWS: {error}") from None

    def submit(self) -> str:
        """Register the job definition, if it is new, and submit; returns the job's id."""
        batch = self.client()
        name = self.definition["jobDefinitionName"]
        known = self.call(batch.describe_job_definitions, jobDefinitionName=name, status="ACTIVE")
        if not known["jobDefinitions"]:
            self.call(batch.register_job_definition, **self.definition)
        return self.call(batch.submit_job, **self.request)["jobId"]

    def wait(self, job_id: str, names: list[str], every: float = 30.0) -> int:
        """Wait until the job has ended, print the runs that failed, and return the exit status."""
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
    """Image, resources and references to secrets; the name is a hash, so that it is made once."""
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
            # The reason for a machine taken away is "Host EC2 (instance i-...) terminated."
            "evaluateOnExit": [
                {"onStatusReason": "Host EC2*", "action": "RETRY"},
                {"onReason": "*", "action": "EXIT"},
            ],
        },
    }
    digest = hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()
    return {"jobDefinitionName": f"cleanrl-{digest[:12]}", **definition}


def secret_reference(text: str) -> dict[str, str]:
    """Parse NAME=ARN. The error never repeats the value, which may be the secret itself."""
    name, _, arn = text.partition("=")
    if not ARN.fullmatch(arn):
        raise BadInput(
            "--secrets takes NAME=ARN, with the ARN of a secret in AWS Secrets Manager; "
            f"the value of {name if name.isidentifier() and arn else 'your variable'} is no ARN"
        )
    return {"name": name, "valueFrom": arn}
