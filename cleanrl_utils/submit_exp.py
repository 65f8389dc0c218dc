"""Run a command in a container on AWS Batch, with several seeds.

    python -m cleanrl_utils.submit_exp --docker-tag you/cleanrl:latest \\
        --command "python cleanrl/ppo.py" --num-seed 3 --num-vcpu 1 --num-memory 2000 \\
        --num-hours 16 --job-queue c5a-large-spot --provider aws

Without --provider it is a dry run: it prints the request and needs no account. Keys are never
passed on: --secrets names them in AWS (cloud/README.md), and AWS gives them to the container.
"""

import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Literal

from cleanrl_utils.errors import require
from cleanrl_utils.launching.aws_batch import Submission
from cleanrl_utils.launching.jobs import refuse_flag, split
from cleanrl_utils.launching.options import BatchArgs
from cleanrl_utils.running.settings import parse_command


@dataclass
class SubmitArgs(BatchArgs):
    command: str = "python cleanrl/ppo.py"
    """command to run; --seed is added to it"""
    num_seed: int = 1
    """number of seeds, from 1"""
    provider: Literal["", "aws"] = ""
    """aws: submit; empty: only print the request"""
    wait: bool = False
    """wait until all runs have ended; exit status 1 if one failed"""
    build: bool = False
    """build the Docker image first"""
    push: bool = False
    """build the Docker image and push it to its registry"""
    archs: str = "linux/amd64"
    """platforms of the Docker image, e.g. linux/amd64,linux/arm64"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_seed >= 1, f"--num-seed must be at least 1, got {self.num_seed}")


def build_commands(args: SubmitArgs) -> list[list[str]]:
    """The commands that build the image; it stores the commit for the records of its runs."""
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
    refuse_flag(typed, "--seed", "--num-seed sets it")
    words = ["python", "-m", "cleanrl_utils.benchmark", "--command", args.command]
    words += ["--num-seeds", str(args.num_seed), "--index", "aws-batch", "--no-auto-tag"]
    scripts = [word for word in typed if word.endswith(".py")]
    name = re.sub(r"[^A-Za-z0-9_-]", "-", scripts[0].rpartition("/")[2][:-3] if scripts else "run")
    submission = Submission(args, words, f"{name}-{int(time.time())}", args.num_seed)
    for command in build_commands(args):
        print(shlex.join(command), flush=True)
        if args.provider:
            done = subprocess.run(command)
            require(done.returncode == 0, "--build: docker failed; see above")
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
