"""The benchmark tool on real runs: failures, retries, missing runs, and each backend."""

import errno
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cleanrl_utils import benchmark
from cleanrl_utils.launching import jobs, local
from cleanrl_utils.launching import slurm as slurm_backend
from cleanrl_utils.launching.jobs import Command, Job
from cleanrl_utils.running.settings import parse_command

ROOT = Path(__file__).resolve().parent.parent
PPO = f"python {ROOT}/cleanrl/ppo.py --cuda False --total-timesteps 2048"


def call(*flags: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "cleanrl_utils.benchmark", *flags]
    env = {**os.environ, **variables}
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


def finished_runs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*runs/*/finished.json"))


def the_log(folder: Path, name: str) -> str:
    (path,) = folder.glob(f"*runs/.benchmark/{name}__*/log.txt")
    return path.read_text()


def test_a_crash_is_reported_a_kill_is_survived_and_a_second_call_does_the_rest(
    tmp_path: Path,
) -> None:
    flags = ["--env-ids", "CartPole-v1", "faulty:Crash-v0", "faulty:KilledOnce-v0"]
    flags += ["--command", PPO, "--num-seeds", "1", "--workers", "2", "--tags", "pr-1", "mine"]
    env = {"FAULTY_MARKER": str(tmp_path / "killed"), "WANDB_TAGS": ""}
    first = call(*flags, cwd=tmp_path, **env)
    said = first.stdout + first.stderr
    assert first.returncode == 1, said
    assert "1 of 3 runs failed: Crash-v0__ppo__1" in first.stderr
    assert "RuntimeError: the environment broke" in first.stdout  # its last lines
    assert "KilledOnce-v0__ppo__1: killed by SIGKILL" in first.stdout
    assert (tmp_path / "killed").exists()
    # the killed one went on where it was, in its own folder, and is whole
    assert "resumes at step" in the_log(tmp_path, "KilledOnce-v0__ppo__1")
    runs = finished_runs(tmp_path)
    assert [path.name.split("__")[0] for path in runs] == ["CartPole-v1", "KilledOnce-v0"]
    steps = [line.split(",")[0] for line in (runs[1] / "metrics.csv").read_text().splitlines()]
    assert [int(step) for step in steps[1:]] == sorted(int(step) for step in steps[1:])
    tags = json.loads((runs[0] / "run.json").read_text())["tags"]
    assert tags[:2] == ["pr-1", "mine"] and len(set(tags)) == len(tags)
    # the crashing one was tried twice, from one folder
    assert the_log(tmp_path, "Crash-v0__ppo__1").count("$ ") == 2

    mended = call(*flags, cwd=tmp_path, **env, FAULTY_AFTER="100000")
    assert mended.returncode == 0, mended.stdout + mended.stderr
    assert "2 of 3 runs are already finished" in mended.stdout
    assert "Crash-v0__ppo__1 finished" in mended.stdout and "CartPole-v1__ppo__1 starts" not in (
        mended.stdout
    )
    assert set(runs) < set(finished_runs(tmp_path)) and len(finished_runs(tmp_path)) == 3
    nothing = call(*flags, cwd=tmp_path, **env)
    assert nothing.returncode == 0 and "3 of 3 runs are already finished" in nothing.stdout


def test_a_run_whose_folder_was_deleted_is_run_again(tmp_path: Path) -> None:
    flags = ["--env-ids", "CartPole-v1", "--command", PPO, "--num-seeds", "1", "--workers", "1"]
    assert call(*flags, cwd=tmp_path).returncode == 0
    (old,) = finished_runs(tmp_path)
    shutil.rmtree(old)
    again = call(*flags, cwd=tmp_path)
    assert again.returncode == 0 and "CartPole-v1__ppo__1 finished" in again.stdout
    assert len(finished_runs(tmp_path)) == 1


def test_a_killed_run_without_checkpoints_starts_anew(tmp_path: Path) -> None:
    flags = ["--env-ids", "faulty:KilledOnce-v0", "--num-seeds", "1", "--workers", "1"]
    done = call(
        *flags,
        "--command",
        f"{PPO} --checkpoints 0",
        cwd=tmp_path,
        FAULTY_MARKER=str(tmp_path / "killed"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "killed").exists() and len(finished_runs(tmp_path)) == 1
    assert "error" not in the_log(tmp_path, "KilledOnce-v0__ppo__1")


def test_the_documented_command_runs_as_typed(tmp_path: Path) -> None:
    """With poetry, --cuda False, --track without a login, --capture-video and xvfb-run."""
    (tmp_path / "cleanrl").symlink_to(ROOT / "cleanrl")
    tail = "--cuda False --track --capture-video --total-timesteps 512"
    words = [sys.executable, "-m", "cleanrl_utils.benchmark", "--env-ids", "CartPole-v1"]
    words += ["--command", f"poetry run python cleanrl/ppo.py {tail}"]
    words += ["--num-seeds", "1", "--workers", "5"]
    words = (["xvfb-run", "-a"] if shutil.which("xvfb-run") else []) + words
    env = {k: v for k, v in os.environ.items() if k not in ("WANDB_MODE", "WANDB_API_KEY")}
    env |= {"HOME": str(tmp_path), "PATH": os.path.dirname(sys.executable) + ":/usr/bin:/bin"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "poetry is not installed: 'poetry run' left out" in done.stdout
    assert "tracked offline" in done.stdout
    (run,) = finished_runs(tmp_path)
    assert list(run.glob("wandb/offline-run-*")), "no offline W&B files"
    assert list(run.glob("videos/**/*.mp4")), "no video"


def test_workers_0_prints_the_commands_seed_by_seed(capsys: pytest.CaptureFixture) -> None:
    assert benchmark.main(["--env-ids", "A-v1", "B-v1", "--command", PPO, "--num-seeds", "2"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    pairs = [("A-v1", "1"), ("B-v1", "1"), ("A-v1", "2"), ("B-v1", "2")]
    assert [tuple(words[-3::2]) for words in lines] == pairs
    assert lines[0][:2] == [sys.executable, f"{ROOT}/cleanrl/ppo.py"]


def test_an_environment_that_is_named_twice_counts_once(capsys: pytest.CaptureFixture) -> None:
    words = ["--env-ids", "CartPole-v1", "CartPole-v1", "--num-seeds", "1"]
    assert benchmark.main(words) == 0
    assert capsys.readouterr().out.count("--env-id CartPole-v1") == 1
    with pytest.raises(SystemExit):
        benchmark.main(["--env-ids", "CartPole-v1", "--env-ids", "Acrobot-v1"])
    assert "--env-ids is given twice" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    command = f"python {ROOT}/cleanrl/ppo.py --runs-dir {tmp_path}/file"
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["--command", command, "--workers", "1"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1
    assert f"{tmp_path}/file" in said


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(jobs.run_folder, "write_json", is_full)
    words = ["--command", f"{PPO} --runs-dir {tmp_path}", "--num-seeds", "1", "--workers", "1"]
    assert benchmark.main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}/.benchmark: No space left") and "resumes" in said


def test_a_job_is_its_command_environment_and_seed(tmp_path: Path) -> None:
    one = Job(Command(f"poetry run {PPO}"), "CartPole-v1", 1)
    assert one.home == Job(Command(PPO), "CartPole-v1", 1).home, (
        "how Python is reached is no matter"
    )
    others = [Job(Command(PPO), "CartPole-v1", 2), Job(Command(PPO), "Acrobot-v1", 1)]
    others.append(Job(Command(PPO + " --gamma 0.9"), "CartPole-v1", 1))
    assert len({one.home, *(job.home for job in others)}) == 4
    command = Command("MUJOCO_GL=egl python x.py --runs_dir=elsewhere")
    assert command.variables == {"MUJOCO_GL": "egl"}
    assert Job(command, None, 1).home.parts[0] == "elsewhere"


def test_code_is_read_once_for_thousands_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, ...]] = []

    def count(script: Path, modules: tuple[str, ...]) -> str:
        read.append(modules)
        return f"code {len(read)}"

    monkeypatch.setattr(jobs, "fingerprint", count)
    args = benchmark.BenchmarkArgs(env_ids=["A-v0", "B-v0", "mine:C-v0"], num_seeds=100)
    planned = benchmark.plan(args, Command(PPO))
    assert len(planned) == 300 and read == [(), ("mine",)]
    assert {job.code for job in planned[:2]} == {"code 1"} and planned[2].code == "code 2"
    assert planned[0].has_other_code() and len(read) == 3  # before it starts, the file is read


def test_a_note_about_thousands_of_runs_stays_readable() -> None:
    assert benchmark.some(["a", "b"]) == "a, b"
    text = benchmark.some([str(number) for number in range(2000)])
    assert text == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, and 1990 more"


def test_a_bad_command_line_is_one_line(capsys: pytest.CaptureFixture) -> None:
    for flags in (
        ["--wokers", "2"],
        ["--command", "python 'x"],
        ["--command", "no-such-program"],
        ["--command", "python cleanrl/ppo.py --resume runs/x"],
        ["--command", "python cleanrl/ppo.py --seed=3"],
        ["--command", "python cleanrl/ppo.py --env-id A-v1", "--env-ids", "B-v1"],
        ["--command", "python cleanrl/poo.py"],
        ["--num-seeds", "2", "--command", "python cleanrl/ppo_jax.py --num-seeds 4"],
        ["--index", "99"],
        ["--index", "-1"],
        ["--index", "²"],
        ["--slurm-options", "--wait"],
        ["--slurm-options", "-p gpu --comment='x"],
    ):
        with pytest.raises(SystemExit) as stop:
            benchmark.main(flags)
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and flags[0] in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--slurm-options", "--partition=gpu --time=24:00:00"],
        ["--slurm-options=--partition=gpu"],
        ["--slurm-options", "-p gpu", "--workers", "2"],
    ],
)
def test_options_of_slurm_are_taken_as_they_are(words: list[str]) -> None:
    args = parse_command(benchmark.BenchmarkArgs, words)
    assert args.slurm_options == (words[0].partition("=")[2] or words[1])


def test_a_number_too_many_is_right_for_slurm_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Three runs, two per array element: the last element has one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("AWS_BATCH_JOB_ARRAY_INDEX", "3")
    assert benchmark.main(["--index", "slurm", "--slurm-ntasks", "2"]) == 0
    assert not any(tmp_path.iterdir())
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["--index", "aws-batch"])
    assert stop.value.code == 2
    assert "--index 3: must be below 3" in capsys.readouterr().err


def test_one_threads_each_and_gpus_are_spread() -> None:
    assert jobs.environment()["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    name = "CUDA_VISIBLE_DEVICES"
    slots = [local.gpus_of(slot, ["0", "1"], None) for slot in range(3)]
    assert slots == [{name: "0"}, {name: "1"}, {name: "0"}]
    assert local.gpus_of(1, ["0", "1", "2", "3"], 2) == {name: "2,3"}
    assert local.gpus_of(1, ["0"], None) == local.gpus_of(1, ["0", "1"], 0) == {}


def test_jax_runs_that_share_a_gpu_share_its_memory() -> None:
    args = benchmark.BenchmarkArgs(workers=3)
    assert local.runs_per_gpu(args, []) == local.runs_per_gpu(args, ["0", "1", "2"]) == 1
    assert local.runs_per_gpu(args, ["0"]) == 3 and local.runs_per_gpu(args, ["0", "1"]) == 2
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    assert local.gpu_memory(1, {}) == {}
    shared = local.gpu_memory(3, {})
    assert shared == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", name: "0.30"}
    assert local.gpu_memory(3, {name: "0.5"}) == {}, "what the user has set stays"
    assert name in local.describe_memory("jaxlib: RESOURCE_EXHAUSTED: Out of memory")
    assert local.describe_memory("ValueError") == ""


STAND_IN = """
import json, os, pathlib, sys
if "--resume" in sys.argv:  # as a script whose settings are others by now
    sys.exit(2)
folder = pathlib.Path("runs/one")
folder.mkdir(parents=True, exist_ok=True)
(folder / "run.json").write_text(json.dumps({"args": {}, "git": {}}))
place = pathlib.Path(os.environ["CLEANRL_FOLDER_FILE"])
place.write_text(os.path.relpath(folder, place.parent))
if "crash" in sys.argv:
    sys.exit(1)
(folder / "finished.json").write_text("{}")
"""


def test_a_run_that_cannot_be_continued_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(STAND_IN)
    flags = ["--num-seeds", "1", "--workers", "1", "--retries", "0", "--command"]
    assert benchmark.main([*flags, "python x.py crash"]) == 1
    said = capsys.readouterr()
    assert said.out.count("starts") == 1 and "1 of 1 runs failed: x__1" in said.err
    (home,) = (tmp_path / "runs/.benchmark").iterdir()
    assert (home / "folder").exists()
    assert benchmark.main([*flags, "python x.py crash"]) == 1  # refused, anew, and crashed again
    said = capsys.readouterr().out
    assert "x__1 resumes" in said and "tried again from the start" in said and "x__1 starts" in said


COUNTS = """
import json, os, pathlib, sys
import helper
folder = pathlib.Path("runs") / f"run{len(list(pathlib.Path('runs').glob('run*')))}"
if "--resume" in sys.argv:
    folder = pathlib.Path(sys.argv[sys.argv.index("--resume") + 1])
folder.mkdir(parents=True, exist_ok=True)
(folder / "run.json").write_text(json.dumps({"args": {}, "git": {}}))
place = pathlib.Path(os.environ["CLEANRL_FOLDER_FILE"])
place.write_text(os.path.relpath(folder, place.parent))
if "crash" in sys.argv:
    sys.exit(1)
(folder / "finished.json").write_text(json.dumps({"episodic_return": helper.SCORE}))
"""


def test_a_result_belongs_to_the_code_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """For a script outside of any repository, and for a module beside it."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "elsewhere" / "x.py"
    helper = script.with_name("helper.py")
    script.parent.mkdir()
    script.write_text(COUNTS)
    helper.write_text("SCORE = 1.0\n")
    flags = ["--num-seeds", "2", "--workers", "2", "--retries", "0"]
    flags += ["--command", "python elsewhere/x.py"]
    assert benchmark.main(flags) == 0
    said = capsys.readouterr().out
    assert "x: return 1.00 ± 0.00 over 2 seeds" in said and "start again" not in said

    (tmp_path / "docs.md").write_text("a page")
    (script.parent / "unrelated.py").write_text("x = 1\n")
    helper.write_text('"""Says more."""\n\nSCORE = 1.0  # a comment\n')
    assert benchmark.main(flags) == 0
    assert "2 of 2 runs are already finished" in capsys.readouterr().out

    helper.write_text("SCORE = 2.0\n")
    assert benchmark.main(flags) == 0
    said = capsys.readouterr().out
    assert "2 of 2 runs start again, because their code has changed: x__1, x__2 (old" in said
    assert "x: return 2.00 ± 0.00 over 2 seeds" in said
    assert len(finished_runs(tmp_path)) == 4, "old runs stay"

    script.write_text(COUNTS + "print('more')\n")
    assert benchmark.main(flags) == 0
    assert "start again, because their code has changed" in capsys.readouterr().out
    assert benchmark.main(flags) == 0
    assert "2 of 2 runs are already finished" in capsys.readouterr().out

    script.write_text(COUNTS)  # the results of this code are still there
    assert benchmark.main(flags) == 0
    said = capsys.readouterr().out
    assert "2 of 2 runs are already finished" in said and "return 2.0" in said


def test_finished_runs_without_the_tags_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """rlops would not find them by their tag."""
    monkeypatch.chdir(tmp_path)
    flags = ["--num-seeds", "1", "--workers", "1", "--command", f"{PPO} --total-timesteps 512"]
    for tag, missing in (("before", False), ("before", False), ("after", True)):
        assert benchmark.main([*flags, "--tags", tag]) == 0
        note = "note: 1 of these were run without --tags after"
        assert (note in capsys.readouterr().out) == missing


def test_a_run_of_several_seeds_says_whose_return_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(COUNTS)
    flags = ["--num-seeds", "1", "--workers", "1", "--command", "python x.py --num-seeds 4"]
    (tmp_path / "helper.py").write_text("SCORE = 1.0\n")
    assert benchmark.main(flags) == 0
    said = capsys.readouterr().out
    assert "x: return 1.00 over 1 seed (the first of 4: `results show` has all)" in said


def test_a_run_of_other_code_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "x.py"
    script.write_text(COUNTS)
    (tmp_path / "helper.py").write_text("SCORE = 1.0\n")
    flags = ["--num-seeds", "1", "--workers", "1", "--retries", "0"]
    flags += ["--command", "python x.py crash"]
    assert benchmark.main(flags) == 1
    assert benchmark.main(flags) == 1
    assert "x__1 resumes" in capsys.readouterr().out
    script.write_text(COUNTS.replace("sys.exit(1)", "pass"))
    assert benchmark.main(flags) == 0
    said = capsys.readouterr().out
    assert "1 of 1 runs start again" in said and "x__1 (old runs: runs/run0)" in said
    assert "x__1 starts" in said and "resumes" not in said


def test_code_edited_while_the_benchmark_runs_makes_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    edit = 'pathlib.Path("helper.py").write_text("SCORE = 2.0\\n")\n'
    (tmp_path / "x.py").write_text(COUNTS + edit)
    (tmp_path / "helper.py").write_text("SCORE = 1.0\n")
    flags = ["--num-seeds", "3", "--workers", "1", "--command", "python x.py"]
    assert benchmark.main(flags) == 0
    said = capsys.readouterr().out
    assert said.count("its code has changed since this call began") == 2
    assert "note: 1 of 3 runs are of code that has changed since: x__1\n" in said
    assert benchmark.main(flags) == 0  # what the new code has done is not done again
    said = capsys.readouterr().out
    assert "2 of 3 runs are already finished" in said and "x__1 (old runs: runs/run0)" in said
    assert "x: return 2.00 ± 0.00 over 3 seeds" in said and "note:" not in said


def test_a_run_that_takes_too_long_is_ended_and_one_that_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "SILENT", 0.5)
    monkeypatch.setattr(local, "REFRESH", 0.1)
    monkeypatch.setattr(local, "PATIENCE", 0.5)
    stubborn = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: None)\n"
    (tmp_path / "x.py").write_text(stubborn + "while True: time.sleep(1)\n")
    flags = ["--num-seeds", "1", "--workers", "1", "--retries", "5", "--command", "python x.py"]
    began = time.monotonic()
    assert benchmark.main([*flags, "--timeout", "0.04"]) == 1
    assert time.monotonic() - began < 20
    said = capsys.readouterr()
    assert (
        said.out.count("x__1 hangs? no output and no metrics for") == 1
        and "--timeout MINUTES" in said.out
    )
    assert "x__1 FAILED: ended after 0.04 minutes (--timeout)" in said.out
    assert said.out.count("starts") == 1 and "1 of 1 runs failed: x__1" in said.err
    with pytest.raises(SystemExit):
        benchmark.main([*flags, "--timeout", "-1"])
    assert "--timeout takes minutes" in capsys.readouterr().err
    args = benchmark.BenchmarkArgs(timeout=2.5)
    assert "--timeout 2.5" in " ".join(benchmark.same_command(args, [], "0"))


@pytest.mark.parametrize("name", ["ppo", "dqn", "qdagger"])
def test_without_workers_our_own_benchmarks_start_nothing(name: str, tmp_path: Path) -> None:
    """Every call of the tool gets --workers 0."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WORKERS": "0", "GPU_WORKERS": "0"}
    words = ["sh", str(ROOT / f"benchmark/{name}.sh")]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines
    assert all(line.endswith("--workers 0") for line in lines), lines


def test_a_mistake_in_the_command_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("import sys; print('error: no such flag'); sys.exit(2)")
    flags = ["--num-seeds", "2", "--workers", "2", "--retries", "5", "--command", "python x.py"]
    assert benchmark.main(flags) == 1
    said = capsys.readouterr()
    assert said.out.count("starts") == 2 and said.out.count("error: no such flag") == 2
    assert "2 of 2 runs failed: x__1, x__2" in said.err


def test_a_job_is_never_run_twice_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process itself holds its lock, also after the tool that started it has died."""
    monkeypatch.chdir(tmp_path)
    job = Job(Command("sleep 30"), None, 1)
    lock = job.claim()
    process = jobs.Process(["sleep", "30"], os.environ, job.log, lock)
    assert job.claim() is None
    jobs.stop([process])
    assert process.poll() == -signal.SIGTERM
    again = job.claim()
    assert again is not None
    os.close(again)


def test_a_file_system_without_locks_does_not_wait_for_another_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fcntl.flock", refuse)
    for handle in (Job(Command("sleep 30"), None, 1).claim(), jobs.run_folder.lock(tmp_path)):
        assert handle is not None
        os.close(handle)


# -- Ray ------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_ray_runs_and_names_what_failed(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    port = free_port()
    temp = tempfile.mkdtemp(prefix="ray")  # a short path: Ray puts sockets there
    flags = ["--env-ids", "CartPole-v1", "faulty:Crash-v0", "--command", PPO, "--num-seeds", "1"]
    flags += ["--workers", "2", "--backend", "ray", "--retries", "0"]
    flags += ["--ray-address", f"127.0.0.1:{port}"]
    head = f"ray start --head --block --node-ip-address=127.0.0.1 --port={port} --num-cpus=2"
    head += f" --include-dashboard=false --object-store-memory=100000000 --temp-dir={temp}"
    python = shlex.quote(sys.executable)
    script = f"""
    {os.path.dirname(sys.executable)}/{head} > ray.txt 2>&1 &
    head=$!
    trap 'kill $head; wait $head' EXIT
    for i in $(seq 60); do grep -q "Ray runtime started" ray.txt && break; sleep 0.5; done
    {python} -m cleanrl_utils.benchmark {shlex.join(flags)}
    """
    words = ["bash", "-c", script]
    # Ray listens on every interface: where we may, give it a network of its own.
    alone = ["unshare", "--net", "bash", "-c", 'ip link set lo up && exec bash -c "$0"', script]
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0:
        words = alone
    env = {**os.environ, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        done = subprocess.run(
            words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
        )
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "CartPole-v1__ppo__1 finished" in done.stdout, said
    assert "1 of 2 runs failed: Crash-v0__ppo__1" in done.stderr, said
    assert "RuntimeError: the environment broke" in done.stdout, said
    assert len(finished_runs(tmp_path)) == 1


def test_a_ray_cluster_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    address = f"127.0.0.1:{free_port()}"
    flags = ["--command", PPO, "--workers", "1", "--backend", "ray", "--ray-address", address]
    with pytest.raises(SystemExit) as stop:
        benchmark.main(flags)
    assert stop.value.code == 2 and "no answer" in capsys.readouterr().err


# -- Slurm ----------------------------------------------------------------------------------------

SLURM_CONF = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
JobRequeue=1
MinJobAge=600
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.log
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPort={port}
SlurmdPort={port_d}
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Slurm cluster of one node, with its own authentication daemon."""
    programs = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
    missing = [name for name in programs if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"a Slurm for the test needs root and {missing or 'nothing else'}")
    home = Path(tempfile.mkdtemp(prefix="slurm"))
    home.chmod(0o755)
    for name in ("munge", "state", "spool"):
        (home / name).mkdir(mode=0o755)
    key = home / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    conf = home / "slurm.conf"
    values = dict(host=socket.gethostname(), home=home, cpus=os.cpu_count())
    conf.write_text(SLURM_CONF.format(port=free_port(), port_d=free_port(), **values))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    files = [f"--{n}-file={home}/munge/{n}" for n in ("key", "pid", "log", "seed")]
    subprocess.run(["munged", f"--socket={home}/munge/socket", *files], check=True)
    subprocess.run(["slurmctld", "-f", str(conf)], check=True)
    subprocess.run(["slurmd", "-f", str(conf)], check=True)
    try:
        for _ in range(100):
            state = subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True)
            if state.stdout.strip() == "idle":
                break
            time.sleep(0.2)
        else:
            pytest.fail(f"Slurm did not start: {(home / 'slurmctld.log').read_text()[-2000:]}")
        yield home
    finally:
        subprocess.run(["scancel", "--user=root", "--full"], capture_output=True)
        for _ in range(100):  # its helpers end by telling slurmd, which must still be there
            if not subprocess.run(["squeue", "-h"], capture_output=True).stdout.strip():
                break
            time.sleep(0.2)
        for name in ("slurmd.pid", "slurmctld.pid", "munge/pid"):
            if (home / name).exists():
                os.kill(int((home / name).read_text()), signal.SIGTERM)
        time.sleep(1)
        shutil.rmtree(home, ignore_errors=True)


def test_slurm_array_a_requeued_run_goes_on(slurm: Path, tmp_path: Path) -> None:
    flags = ["--env-ids", "CartPole-v1", "faulty:Crash-v0", "--num-seeds", "1", "--workers", "2"]
    command = PPO.replace("2048", "16384") + " --runs-dir 'my runs'"
    flags += ["--command", command, "--retries", "0", "--backend", "slurm"]
    flags += ["--slurm-gpus-per-task", "0", "--slurm-ntasks", "1", "--slurm-nodes", "1"]
    flags += ["--slurm-total-cpus", "1"]
    sent = call(*flags, cwd=tmp_path)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    number = sent.stdout.partition("as Slurm job ")[2].partition(";")[0]
    checkpoint = ".benchmark/../CartPole-v1__ppo__1__*/checkpoint.safetensors"
    for _ in range(600):
        if list(tmp_path.glob(f"my runs/{checkpoint}")):
            break
        time.sleep(0.1)
    done = subprocess.run(["scontrol", "requeue", f"{number}_0"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    waited = call(*flags, "--wait", cwd=tmp_path)
    said = waited.stdout + waited.stderr
    assert "runs are already in the queue" in said
    assert waited.returncode == 1, said
    assert "1 of 2 runs failed: Crash-v0__ppo__1" in waited.stderr, said
    log = the_log(tmp_path, "CartPole-v1__ppo__1")
    assert log.count("$ ") == 2 and "resumes at step" in log
    assert list(tmp_path.glob(f"my runs/.benchmark/slurm/{number}_0.txt")), "its own log"
    assert len(finished_runs(tmp_path)) == 1


def test_the_slurm_script_follows_its_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [
        "--env-ids",
        "A-v1",
        "B-v1",
        "--command",
        PPO,
        "--num-seeds",
        "3",
        "--backend",
        "slurm",
    ]
    assert benchmark.main([*flags, "--slurm-ntasks", "2", "--slurm-total-cpus", "8"]) == 0
    script = capsys.readouterr().out
    for line in ("--array=0-2", "--ntasks=2", "--cpus-per-task=4", "--gpus-per-task=1"):
        assert f"#SBATCH {line}\n" in script
    assert "--nodes" not in script
    own = tmp_path / "own.slurm_template"
    own.write_text(
        "#!/bin/bash\n#SBATCH --array={{array}}\n#SBATCH -G {{gpus_per_task}}\n{{job}}\n"
    )
    flags = flags[:-2] + ["--slurm-template-path", str(own), "--slurm-gpus-per-task", "0"]
    assert benchmark.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["#!/bin/bash", "#SBATCH --array=0-5"]
    assert "--index slurm" in lines[2] and "SBATCH -G" not in "\n".join(lines)
    assert slurm_backend.as_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_the_number_of_a_run_comes_from_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    args = benchmark.BenchmarkArgs(slurm_ntasks=2)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("AWS_BATCH_JOB_ARRAY_INDEX", "5")
    assert benchmark.number_of("slurm", args) == 7
    assert benchmark.number_of("aws-batch", args) == 5
    assert benchmark.number_of("4", args) == 4


def test_runs_without_a_finished_episode_are_named() -> None:
    known = [{"episodic_return": 10.0}, {"episodic_return": 30.0}]
    assert benchmark.describe_scores(known) == "return 20.00 ± 14.14 over 2 seeds"
    assert benchmark.describe_scores(known[:1]) == "return 10.00 over 1 seed"
    some = benchmark.describe_scores([*known, {"step": 100}])
    assert some == "return 20.00 ± 14.14 over 2 seeds (1 of 3 finished no episode)"
    assert benchmark.describe_scores([{"step": 100}]) == "no finished episode"
    assert local.describe_result({"step": 100, "seconds": 2.0}).endswith(", no finished episode")
