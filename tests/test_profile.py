"""--profile: a trace of some iterations, and where their time went."""

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from cleanrl_utils.speed.profile import (
    Profile,
    Span,
    TorchRecorder,
    Trace,
    account,
    kind_on_gpu,
    kind_on_host,
    warm_up,
)

PARTS = ["environment", "copies", "launches", "kernels", "Python"]


def five_lines(text: str) -> dict[str, tuple[float, float, str]]:
    """(milliseconds, percent, remark) of each part, as printed, in order."""
    pattern = r"^(\w+) +([\d.,]+) ms +([\d.]+)%(.*)$"
    rows = re.findall(pattern, text, re.M)
    return {part: (float(ms.replace(",", "")), float(p), more) for part, ms, p, more in rows}


# -- the sums --------------------------------------------------------------------------------------


def test_time_counts_for_the_innermost_span() -> None:
    thread = [
        Span(0, 100, ""),  # an iteration
        Span(10, 40, "environment"),
        Span(20, 30, "kernels"),  # an operation of the environment's own
        Span(50, 80, "kernels"),
        Span(60, 65, "copies"),
    ]
    parts = account(Trace([thread], None), 100)
    assert parts == {
        "environment": 30,
        "copies": 5,
        "launches": 0,
        "kernels": 25,
        "Python": 40,
    }


def test_threads_add_up_and_python_is_what_none_of_them_covers() -> None:
    main = [Span(0, 50, "environment")]
    background = [Span(25, 75, "launches"), Span(30, 40, "copies")]
    gpu = [Span(0, 60, "kernels"), Span(60, 70, "copies")]
    parts = account(Trace([main, background], gpu), 100)
    assert parts == {
        "environment": 50,
        "copies": 20,
        "launches": 40,
        "kernels": 60,
        "Python": 25,
    }


def test_a_gpu_is_told_apart_from_the_cpu_that_starts_its_work(tmp_path: Path) -> None:
    recorder = TorchRecorder(tmp_path)

    recorder.has_gpu = True

    def kind(name: str, category: str = "cpu_op") -> str:
        return recorder.kind(category, name)

    assert kind("environment", "user_annotation") == "environment"
    assert kind("iteration", "user_annotation") == ""
    assert kind("Optimizer.step#Adam.step", "user_annotation") == "", "mostly Python"
    assert kind("aten::addmm") == kind("cudaGraphLaunch", "cuda_runtime") == "launches"
    assert kind("aten::copy_") == kind("cudaMemcpyAsync", "cuda_runtime") == "copies"
    assert kind("cudaStreamSynchronize", "cuda_runtime") == "copies"
    assert kind("sgemm", "kernel") == "kernels"
    assert kind("Memcpy DtoH", "gpu_memcpy") == kind("Memset", "gpu_memset") == "copies"
    recorder.has_gpu = False
    assert kind("aten::addmm") == "kernels" and kind("aten::copy_") == "copies"

    assert kind_on_gpu(SimpleNamespace(name="MemcpyD2H")) == "copies"
    assert kind_on_gpu(SimpleNamespace(name="loop_fusion")) == "kernels"
    assert kind_on_host(SimpleNamespace(name="PjitFunction(f)", stats=[])) == "launches"
    assert kind_on_host(SimpleNamespace(name="dot.3", stats=[("hlo_op", "dot.3")])) == "kernels"
    assert kind_on_host(SimpleNamespace(name="DevicePut", stats=[])) == "copies"


def test_a_trace_of_torch_is_read_from_its_file(tmp_path: Path) -> None:
    recorder = TorchRecorder(tmp_path)
    recorder.has_gpu = True
    where = dict(pid=1, tid=2, ph="X")
    events = [
        dict(cat="user_annotation", name="environment", ts=10.0, dur=5.0, **where),
        dict(cat="cpu_op", name="aten::mm", ts=20.0, dur=2.5, **where),
        dict(cat="cuda_runtime", name="cudaLaunchKernel", ts=21.0, dur=1.0, **where | {"tid": 3}),
        dict(cat="kernel", name="sgemm", ts=22.0, dur=7.0, **where | {"pid": 0}),
        dict(cat="gpu_user_annotation", name="environment", ts=10.0, dur=5.0, **where | {"pid": 0}),
        dict(cat="fwdbwd", name="fwdbwd", ph="s", ts=20.0, pid=1, tid=2, id=1),
        dict(ph="M", name="process_name", pid=1, args={}),
    ]
    with gzip.open(recorder.path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    trace = recorder.trace()
    main = [Span(10.0, 15.0, "environment"), Span(20.0, 22.5, "launches")]
    assert trace.threads == [main, [Span(21.0, 22.0, "launches")]]
    assert trace.gpu == [Span(22.0, 29.0, "kernels")]


def test_the_report_of_a_gpu_says_so() -> None:
    profile = Profile(None, None, first=3, iterations=2, say=print)
    profile.seconds = 0.2
    trace = Trace([[Span(0, 50_000, "launches")]], [Span(0, 150_000, "kernels")])
    text = "\n".join(profile.report(Path("trace.json.gz"), trace))
    assert text.startswith("profile of 2 iterations, 100.00 ms each: trace.json.gz\n")
    parts = five_lines(text)
    assert list(parts) == PARTS
    assert parts["kernels"] == (75.0, 75.0, "  on the GPU, beside the CPU")
    assert parts["launches"] == (25.0, 25.0, "")
    assert parts["Python"] == (75.0, 75.0, "")
    assert "not stepped by Python" in parts["environment"][2]


def test_warm_up_waits_for_learning_and_for_graphs() -> None:
    assert warm_up(iterations=976, steps=976 * 512) == 3
    assert warm_up(iterations=50_000, steps=500_000, learning_starts=10_000) == 1000 + 100
    assert warm_up(iterations=1000, steps=1000, learning_starts=500) == 1500


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, flags",
    [
        ("ppo", "--total-timesteps 1536 --num-steps 64"),
        ("dqn_jax", "--total-timesteps 3000 --learning-starts 200 --buffer-size 1000"),
    ],
)
def test_a_profile_leaves_the_run_as_it_is(name: str, flags: str, train, capfd) -> None:
    flags += " --cuda False --save-model --eval-episodes 1"
    plain = train(name, flags, "plain")
    capfd.readouterr()
    count = 2 if name == "ppo" else 40  # iterations; of dqn_jax's, every tenth learns
    done = train(name, f"{flags} --profile {count}", "profiled")
    assert done.rows() == plain.rows() and done.model() == plain.model()
    assert "step" not in vars(done.variables["envs"]), "nothing is left around its steps"

    printed = capfd.readouterr().err
    (path,) = (done.folder / "profile").rglob("*trace.json.gz")
    assert re.search(rf"^profile of {count} iterations, [\d.,]+ ms each: {path}$", printed, re.M)
    parts = five_lines(printed)
    assert list(parts) == PARTS
    assert all(parts[part][0] > 0 for part in ("environment", "kernels", "Python"))
    if name == "ppo":  # XLA's kernels run in threads beside Python: their shares add up to more
        assert 50 < sum(percent for _, percent, _ in parts.values()) < 150
    names = [event.get("name") for event in json.loads(gzip.open(path).read())["traceEvents"]]
    num_steps = done.variables["args"].num_steps if name == "ppo" else 1
    assert names.count("iteration") == count
    assert names.count("environment") == count * num_steps


def test_environments_inside_a_program_are_part_of_its_kernels(train, capfd) -> None:
    train("ppo_jax", "--cuda False --total-timesteps 2560 --num-steps 64 --profile 1")
    parts = five_lines(capfd.readouterr().err)
    assert list(parts) == PARTS and parts["kernels"][0] > 0
    assert parts["environment"][0] == 0 and "part of the kernels" in parts["environment"][2]


def test_too_few_iterations_are_said(train, capfd) -> None:
    with pytest.raises(SystemExit) as stop:
        train("ppo", "--total-timesteps 1024 --profile 2")
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert stop.value.code == 2
    assert "--profile 2: needs 5 iterations, 3 of them to warm up, and the run has 2" in line
    assert not list(Path("runs").rglob("run.json"))

    done = train("ppo", "--total-timesteps 2560 --profile 1")
    (done.folder / "finished.json").unlink()
    capfd.readouterr()
    train("ppo", f"--resume {done.folder}")
    assert "0 are left: none is profiled" in capfd.readouterr().err
