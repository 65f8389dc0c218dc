"""AWS Batch against moto's simulation of it; the Dockerfile and the Terraform files."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cleanrl_utils import benchmark, submit_exp

ROOT = Path(__file__).resolve().parent.parent
SECRET = "arn:aws:secretsmanager:us-east-1:123456789012:secret:wandb-AbCdEf"
ROLE = "arn:aws:iam::123456789012:role/agent"
KEY = "0123456789abcdef0123456789abcdef01234567"  # looks like one of W&B's
BATCH = ["--job-queue", "c5a-large-spot", "--region", "us-east-1", "--docker-tag", "you/cleanrl:1"]
PASSED = ["--secrets", f"WANDB_API_KEY={SECRET}", "--execution-role", ROLE]


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a simulated Batch with one queue, in this process."""
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with moto.mock_aws(config={"batch": {"use_docker": False}}):
        iam = boto3.client("iam", region_name="us-east-1")
        role = iam.create_role(RoleName="batch", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
        client = boto3.client("batch", region_name="us-east-1")
        made = client.create_compute_environment(
            computeEnvironmentName="machines", type="UNMANAGED", state="ENABLED", serviceRole=role
        )
        order = [{"order": 1, "computeEnvironment": made["computeEnvironmentArn"]}]
        client.create_job_queue(
            jobQueueName="c5a-large-spot",
            state="ENABLED",
            priority=1,
            computeEnvironmentOrder=order,
        )
        yield client


def submitted(client: Any) -> list[dict[str, Any]]:
    """All jobs of the queue, without the elements of arrays."""
    found = []
    for status in ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING", "SUCCEEDED"):
        rows = client.list_jobs(jobQueue="c5a-large-spot", jobStatus=status)["jobSummaryList"]
        found += [row["jobId"] for row in rows if ":" not in row["jobId"]]
    return client.describe_jobs(jobs=found)["jobs"]


def test_secrets_are_passed_by_reference_only(batch: Any, capfd: pytest.CaptureFixture) -> None:
    flags = [*BATCH, *PASSED, "--command", "python cleanrl/ppo.py --track", "--num-seed", "3"]
    flags += ["--num-vcpu", "2", "--num-memory", "3000", "--num-hours", "2", "--efs", "fs-1:fsap-2"]
    assert submit_exp.main([*flags, "--provider", "aws"]) == 0
    (definition,) = batch.describe_job_definitions(status="ACTIVE")["jobDefinitions"]
    container = definition["containerProperties"]
    assert container["secrets"] == [{"name": "WANDB_API_KEY", "valueFrom": SECRET}]
    assert container["executionRoleArn"] == ROLE and container["image"] == "you/cleanrl:1"
    needs = {row["type"]: row["value"] for row in container["resourceRequirements"]}
    assert needs == {"VCPU": "2", "MEMORY": "3000"}
    assert definition["timeout"]["attemptDurationSeconds"] == 7200
    assert definition["retryStrategy"]["attempts"] == 3
    assert container["mountPoints"][0]["containerPath"] == "/cleanrl/runs"
    (job,) = submitted(batch)
    assert job["arrayProperties"]["size"] == 3
    said = capfd.readouterr()
    everything = said.out + said.err + json.dumps([definition, job], default=str)
    assert KEY not in everything
    # the same image and resources again: no second definition
    assert submit_exp.main([*flags, "--provider", "aws"]) == 0
    assert len(batch.describe_job_definitions(status="ACTIVE")["jobDefinitions"]) == 1


def test_a_secret_in_the_open_is_refused_and_not_repeated(capfd: pytest.CaptureFixture) -> None:
    bad = [
        ["--secrets", f"WANDB_API_KEY={KEY}", "--execution-role", ROLE],
        ["--secrets", KEY, "--execution-role", ROLE],
        ["--command", f"WANDB_API_KEY={KEY} python cleanrl/ppo.py"],
        ["--secrets", f"WANDB_API_KEY={SECRET}"],  # and nobody who may read it
    ]
    for flags in bad:
        with pytest.raises(SystemExit) as stop:
            submit_exp.main([*BATCH, *flags])
        assert stop.value.code == 2
        said = capfd.readouterr()
        assert "--secrets" in said.err and KEY not in said.out + said.err


def test_a_command_that_cannot_be_read_is_one_line(capfd: pytest.CaptureFixture) -> None:
    for command in ("python 'x", ""):
        with pytest.raises(SystemExit) as stop:
            submit_exp.main([*BATCH, "--command", command])
        assert stop.value.code == 2
        said = capfd.readouterr().err
        assert said.startswith("error: --command") and said.count("\n") == 1


@pytest.mark.parametrize("flag", ["--num-hours", "--num-memory", "--num-vcpu", "--attempts"])
def test_resources_of_nothing_are_refused(flag: str, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        submit_exp.main([*BATCH, flag, "0"])
    assert stop.value.code == 2 and capfd.readouterr().err.startswith(f"error: {flag} must be ")


def test_a_dry_run_needs_neither_account_nor_boto3(tmp_path: Path) -> None:
    (tmp_path / "boto3.py").write_text("raise ImportError('not here')")
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "WANDB_API_KEY": KEY}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    words = [sys.executable, "-m", "cleanrl_utils.submit_exp", *BATCH, *PASSED, "--num-seed", "2"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    definition, request = json.loads(done.stdout)
    assert request["jobDefinition"] == definition["jobDefinitionName"]
    assert KEY not in done.stdout + done.stderr and "dry run" in done.stderr
    done = subprocess.run(
        [*words, "--provider", "aws"], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "boto3 is not installed" in done.stderr


def test_what_aws_refuses_is_one_line_and_a_failure(batch: Any) -> None:
    with pytest.raises(SystemExit, match="error: AWS: "):
        submit_exp.main(
            ["--job-queue", "no-such-queue", "--region", "us-east-1"] + ["--provider=aws"]
        )


@pytest.mark.parametrize(
    "words, named",
    [
        (["--provider", "aws"], "--region"),
        (["--num-seed", "0"], "--num-seed"),
        (["--command", "python cleanrl/ppo.py --seed 3"], "--num-seed"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(
    words: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with pytest.raises(SystemExit) as stop:
        submit_exp.main(words)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and named in said and said.count("\n") == 1


@pytest.mark.parametrize("flag", ["--env-id", "--env_id"])
def test_an_environment_that_would_be_replaced_is_refused(
    flag: str, capsys: pytest.CaptureFixture
) -> None:
    command = f"python cleanrl/ppo.py {flag} Acrobot-v1"
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["--env-ids", "CartPole-v1", "--workers", "0", "--command", command])
    assert stop.value.code == 2 and "leave out --env-id" in capsys.readouterr().err


def test_the_benchmark_submits_an_array_whose_elements_run(batch: Any, tmp_path: Path) -> None:
    """Run the container's command on this machine, as element 1 of the array."""
    flags = ["--env-ids", "CartPole-v1", "Acrobot-v1", "--num-seeds", "2", "--workers", "4"]
    flags += ["--command", "python cleanrl/ppo.py --cuda False --total-timesteps 512"]
    assert (
        benchmark.main([*flags, "--backend", "aws-batch", *BATCH, *PASSED, "--tags", "a-tag"]) == 0
    )
    (job,) = submitted(batch)
    assert job["arrayProperties"]["size"] == 4
    command = job["container"]["command"]
    assert command[:3] == ["python", "-m", "cleanrl_utils.benchmark"]
    (tmp_path / "cleanrl").symlink_to(ROOT / "cleanrl")
    env = {**os.environ, "AWS_BATCH_JOB_ARRAY_INDEX": "1"}
    done = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = tmp_path.glob("runs/*/run.json")
    about = json.loads(record.read_text())
    assert (about["args"]["env_id"], about["args"]["seed"]) == ("Acrobot-v1", 1)
    assert "a-tag" in about["tags"] and (record.parent / "finished.json").exists()


def test_fresh_names_a_folder_that_the_file_system_has(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        benchmark.main([*BATCH, "--backend", "aws-batch", "--fresh", "--workers", "1"])
    said = capfd.readouterr().err
    assert stop.value.code == 2 and said.startswith("error: --fresh") and said.count("\n") == 1
    assert "--command" in said and "--runs-dir runs/" in said


def test_waiting_ends_with_the_state_of_the_jobs(batch: Any) -> None:
    args = submit_exp.SubmitArgs(job_queue="c5a-large-spot", region="us-east-1")
    submission = submit_exp.Submission(args, ["true"], "name", 2)
    job = submission.submit()
    assert submission.wait(job, ["one", "two"], every=0.2) == 0  # moto lets every job succeed

    class Failed:
        def describe_jobs(self, jobs: list[str]) -> dict[str, Any]:
            return {"jobs": [{"status": "FAILED"}]}

        def get_paginator(self, name: str) -> "Failed":
            return self

        def paginate(self, **request: str) -> list[dict[str, Any]]:
            return [{"jobSummaryList": [{"jobId": f"{request['arrayJobId']}:1"}]}]

    submission.client = Failed  # type: ignore[method-assign, assignment]
    assert submission.wait(job, ["one", "two"]) == 1


def test_images_are_built_with_their_commit() -> None:
    args = submit_exp.SubmitArgs(build=True, push=True, archs="linux/amd64,linux/arm64")
    (words,) = submit_exp.build_commands(args)
    assert words[:3] == ["docker", "buildx", "build"] and "--push" in words
    assert submit_exp.build_commands(submit_exp.SubmitArgs()) == []


def test_dockerfile_copies_what_there_is_and_holds_no_secret() -> None:
    text = (ROOT / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [word for line in re.findall(r"^COPY (.*)", text, re.M) for word in line.split()[:-1]]
    assert {"cleanrl", "cleanrl_utils", "requirements"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists() and f"!{name}" in ignored, name
    extras = re.search(r'ARG EXTRAS="(.*)"', text)
    assert extras
    for extra in extras[1].split():
        assert (ROOT / f"requirements/requirements-{extra}.txt").exists()
    assert not re.search(r"^(ARG|ENV).*(KEY|TOKEN|SECRET|PASSWORD)", text, re.M)
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if hadolint := shutil.which("hadolint", path=tools):
        done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["runs", "videos", "wandb"])
def test_what_runs_write_beside_the_scripts_is_in_no_commit_and_no_image(name: str) -> None:
    """A run started in cleanrl/ writes there, and wheel and image contain that folder."""
    command = ["git", "check-ignore", "--quiet", f"cleanrl/{name}/x"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    assert f"**/{name}" in (ROOT / ".dockerignore").read_text().splitlines()


def test_every_extra_can_be_in_the_image(tmp_path: Path) -> None:
    """Run the installation step with a fake Python that records its commands."""
    text = (ROOT / "Dockerfile").read_text()
    (step,) = re.findall(r"^RUN (mkdir cleanrl (?:.*\\\n)*.*)", text, re.M)
    (default,) = re.findall(r'^ARG EXTRAS="(.*)"', text, re.M)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@" >> calls\n')
    python.chmod(0o755)
    paths = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    every = [path.stem.partition("-")[2] for path in ROOT.glob("requirements/requirements-*.txt")]
    for number, extras in enumerate([default, "atari", " ".join(every), default]):
        uname = python.with_name("uname")
        uname.write_text(f"#!/bin/sh\necho {'aarch64' if number == 3 else 'x86_64'}\n")
        uname.chmod(0o755)
        folder = tmp_path / str(number)
        shutil.copytree(ROOT / "requirements", folder / "requirements")
        env = {"PATH": paths, "EXTRAS": extras, "TORCH_INDEX": ""}
        subprocess.run(["sh", "-c", step], cwd=folder, env=env, check=True)
        asked = (folder / "requirements/image.txt").read_text().split()[1::2]
        wanted = ["requirements.txt", *(f"requirements-{x}.txt" for x in extras.split())]
        if number == 3:  # ARM
            wanted.remove("requirements-pettingzoo.txt")
        assert asked == wanted
        first, *second = (folder / "calls").read_text().splitlines()
        assert first == "-m pip install --requirement requirements/image.txt"
        wanted = ["-m pip install --no-deps --requirement requirements/no-deps.txt"]
        assert second == (wanted if {"memory_gym", "playground"} & set(extras.split()) else [])
    tools = {"cloud", "dev", "docs", "peers", "plot", "mujoco_py"}  # the last is mujoco
    assert set(default.split()) == set(every) - tools, "it runs any script"
    assert default in (ROOT / "docs/get-started/installation.md").read_text()


def test_terraform_files() -> None:
    """The files are formatted, and the flags that they print are flags of the tools."""
    text = (ROOT / "cloud/outputs.tf").read_text()
    known = {field.name for field in dataclasses.fields(submit_exp.BatchArgs)}
    printed = re.findall(r'"--([a-z-]+)"', text)
    assert printed and {name.replace("-", "_") for name in printed} <= known
    assert "secret_string" not in (ROOT / "cloud/main.tf").read_text(), (
        "a value would be in the state"
    )
    if not shutil.which("terraform"):
        pytest.skip("terraform is not installed")
    env = {**os.environ, "TF_CLI_CONFIG_FILE": os.devnull, "CHECKPOINT_DISABLE": "1"}
    words = ["terraform", "fmt", "-check", "-diff", str(ROOT / "cloud")]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
