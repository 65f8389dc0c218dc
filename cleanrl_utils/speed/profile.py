"""--profile N: a trace of N iterations, and five lines that say where their time went.

environment  in its step function
copies       between NumPy and tensors or CPU and GPU, and waiting for the GPU to have a result
launches     what torch or XLA do on the CPU to start work on a device
kernels      the work itself: on the GPU, beside the CPU, or on the CPU
Python       the rest: nothing of the above was going on on the CPU

Work on several threads, or on a GPU beside the CPU, can add up to more than the whole.
"""

import contextlib
import gzip
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from cleanrl_utils.errors import require

FOLDER = "profile"  # in the run's
WARM_UP_ITERATIONS = 3
WARM_UP_STEPS = 1000  # of off-policy scripts, whose iterations are short
ENVIRONMENT = "environment"
ITERATION = "iteration"


class Span(NamedTuple):
    """Something that a thread or a GPU did, from start to end, in microseconds."""

    start: float
    end: float
    kind: str  # environment, copies, launches or kernels; empty: a mark around other spans


class Trace(NamedTuple):
    """What was recorded: the spans of each CPU thread, and those of the GPU, if there is one."""

    threads: list[list[Span]]
    gpu: list[Span] | None


class Profile:
    """Records some iterations of a run, without what happens between `pause` and `go_on`."""

    def __init__(self, recorder: Any, envs: Any, first: int, iterations: int, say: Callable):
        self.recorder = recorder
        self.envs = envs
        self.first = first
        self.iterations = iterations
        self.say = say
        self.seconds = 0.0
        self.recording = False
        self.began = 0.0
        self.marks = contextlib.ExitStack()  # closed at the end of each iteration

    def pause(self) -> None:
        """An iteration ends."""
        if self.recording:
            self.marks.close()
            self.seconds += time.perf_counter() - self.began

    def go_on(self, iteration: int) -> None:
        """The next iteration begins, after this many."""
        if iteration == self.first:
            self.recording = True
            self.recorder.start()
        elif iteration == self.first + self.iterations:
            self.recording = False
            path = self.recorder.stop()
            for line in self.report(path, self.recorder.trace()):
                self.say(line)
        if self.recording:
            self.marks.enter_context(self.recorder.mark(ITERATION))
            self.marks.enter_context(marked_steps(self.envs, self.recorder.mark))
            self.began = time.perf_counter()

    def report(self, path: Path, trace: Trace) -> list[str]:
        """A line that says where the trace is, and five that say where the time went."""
        count = self.iterations
        each = self.seconds / count
        what = "1 iteration" if count == 1 else f"{count} iterations"
        lines = [f"profile of {what}, {1e3 * each:,.2f} ms each: {path}"]
        for part, total in account(trace, 1e6 * self.seconds).items():
            share = total / 1e6 / self.seconds
            text = f"{part:<12}{total / 1e3 / count:>12,.2f} ms {share:>6.1%}"
            lines.append(f"{text}  {remark(part, total, trace.gpu is not None)}".rstrip())
        return lines


def remark(part: str, total: float, has_gpu: bool) -> str:
    if part == "environment" and total == 0:
        return "not stepped by Python: the environment is part of the kernels"
    if part == "launches" and total == 0 and not has_gpu:
        return "no GPU: nothing is launched"
    if part == "kernels":
        return "on the GPU, beside the CPU" if has_gpu else "on the CPU"
    return ""


def make_profile(run: Any, start: int, steps: int) -> Profile | None:
    """The profile that --profile asks for; `steps` are those of all the run's iterations."""
    asked = run.args.profile
    waiting = warm_up(run.total, steps, getattr(run.args, "learning_starts", 0))
    needed = asked + waiting
    left = run.total - start
    if needed > left:
        why = f"--profile {asked}: needs {needed} iterations, {waiting} of them to warm up"
        require(bool(run.args.resume), f"{why}, and the run has {left}: raise --total-timesteps")
        run.say(f"{why}, and {left} are left: none is profiled")
        return None
    recorder = TorchRecorder if run.device is not None else JaxRecorder
    envs = run.state.get("envs")
    if not hasattr(envs, "step"):
        envs = getattr(envs, "envs", None)  # those of this process, where there are several
    folder = run.folder / FOLDER
    return Profile(recorder(folder), envs, start + waiting, asked, run.say)


def warm_up(iterations: int, steps: int, learning_starts: int = 0) -> int:
    """How many iterations to wait until programs are compiled, graphs captured, learning begun."""
    steps_each = max(steps / iterations, 1)
    compiled = max(WARM_UP_ITERATIONS, math.ceil(WARM_UP_STEPS / steps_each))
    return math.ceil(learning_starts / steps_each) + compiled


@contextlib.contextmanager
def marked_steps(envs: Any, mark: Callable) -> Iterator[None]:
    """Mark each step of the environments, as long as this is open."""
    step = getattr(envs, "step", None)
    if step is None:
        yield
        return

    @wraps(step)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with mark(ENVIRONMENT):
            return step(*args, **kwargs)

    envs.step = marked
    try:
        yield
    finally:
        del envs.step  # the class has the method


# -- where the time went ---------------------------------------------------------------------------


def account(trace: Trace, total: float) -> dict[str, float]:
    """Microseconds of each part: what a thread does counts for the innermost span it is in."""
    sums: dict[str, float] = defaultdict(float)
    for spans in trace.threads:
        for kind, own in own_times(spans):
            sums[kind] += own
    busy = covered(span for spans in trace.threads for span in spans if span.kind)
    for span in trace.gpu or []:
        sums[span.kind] += span.end - span.start
    parts = ("environment", "copies", "launches", "kernels")
    return {part: sums[part] for part in parts} | {"Python": max(total - busy, 0.0)}


def own_times(spans: list[Span]) -> Iterator[tuple[str, float]]:
    """(kind, time without the spans inside it) of each; all inside a step is the environment's."""
    open_spans: list[OpenSpan] = []  # each is inside the one before it
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while open_spans and open_spans[-1].span.end <= span.start:
            ended = open_spans.pop()
            yield ended.kind, ended.own_time()
        kind = span.kind
        if open_spans:
            outer = open_spans[-1]
            outer.inside += min(span.end, outer.span.end) - span.start
            if outer.kind == ENVIRONMENT:
                kind = ENVIRONMENT
        open_spans.append(OpenSpan(span, kind))
    for ended in reversed(open_spans):
        yield ended.kind, ended.own_time()


@dataclass
class OpenSpan:
    """A span that has not ended yet, while spans are read in the order of their starts."""

    span: Span
    kind: str
    inside: float = 0.0  # time of the spans directly inside it

    def own_time(self) -> float:
        return max(self.span.end - self.span.start - self.inside, 0.0)


def covered(spans: Iterable[Span]) -> float:
    """The time in which at least one of them was going on."""
    total = 0.0
    end = -math.inf
    for span in sorted(spans):
        total += max(span.end - max(span.start, end), 0.0)
        end = max(end, span.end)
    return total


# -- recorders ---------------------------------------------------------------------------------


class TorchRecorder:
    """Records with torch.profiler; the categories are those of its trace files."""

    GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
    CATEGORIES = GPU_CATEGORIES | {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}

    def __init__(self, folder: Path):
        import torch

        self.torch = torch
        self.path = folder / "trace.json.gz"
        self.has_gpu = torch.cuda.is_initialized()
        self.mark = torch.profiler.record_function

    def start(self) -> None:
        kinds = self.torch.profiler.ProfilerActivity
        activities = [kinds.CPU, kinds.CUDA] if self.has_gpu else [kinds.CPU]
        self.profiler = self.torch.profiler.profile(activities=activities)
        self.profiler.start()

    def stop(self) -> Path:
        self.profiler.stop()
        self.path.parent.mkdir(exist_ok=True)
        self.profiler.export_chrome_trace(str(self.path))
        return self.path

    def trace(self) -> Trace:
        with gzip.open(self.path, "rt") as file:  # the profiler's own list takes ten times as long
            events = json.load(file)["traceEvents"]
        threads: dict[Any, list[Span]] = defaultdict(list)
        gpu = []
        for event in events:
            category = event.get("cat")
            if category not in self.CATEGORIES:
                continue
            span = Span(event["ts"], event["ts"] + event["dur"], self.kind(category, event["name"]))
            if category in self.GPU_CATEGORIES:
                gpu.append(span)
            else:
                threads[event["pid"], event["tid"]].append(span)
        return Trace(list(threads.values()), gpu if self.has_gpu else None)

    def kind(self, category: str, name: str) -> str:
        if category in self.GPU_CATEGORIES:
            return "kernels" if category == "kernel" else "copies"
        if category == "user_annotation":
            return ENVIRONMENT if name == ENVIRONMENT else ""
        # a wait for the GPU is a wait for a result, which is then copied
        if name in ("aten::copy_", "aten::_local_scalar_dense"):
            return "copies"
        if name.startswith("cu") and ("Memcpy" in name or "Synchronize" in name):
            return "copies"
        return "launches" if self.has_gpu else "kernels"


class JaxRecorder:
    """Records with jax.profiler."""

    def __init__(self, folder: Path):
        import jax

        self.jax = jax
        self.folder = folder
        self.mark = jax.profiler.TraceAnnotation

    def start(self) -> None:
        options = self.jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # tracing every call of Python would take most of the time
        self.jax.profiler.start_trace(str(self.folder), profiler_options=options)

    def stop(self) -> Path:
        self.jax.profiler.stop_trace()
        return max(self.folder.rglob("*.trace.json.gz"))  # the newest

    def trace(self) -> Trace:
        data = self.jax.profiler.ProfileData.from_file(str(max(self.folder.rglob("*.xplane.pb"))))
        threads = []
        gpu = []
        has_gpu = False
        for plane in data.planes:
            for line in plane.lines:
                if plane.name.startswith("/device:GPU"):
                    has_gpu = True
                    if line.name.startswith("Stream"):  # others sum streams up
                        gpu += [as_span(event, kind_on_gpu) for event in line.events]
                elif plane.name.startswith("/host:CPU"):
                    threads.append([as_span(event, kind_on_host) for event in line.events])
        return Trace(threads, gpu if has_gpu else None)


def as_span(event: Any, kind: Callable[[Any], str]) -> Span:
    return Span(event.start_ns / 1e3, (event.start_ns + event.duration_ns) / 1e3, kind(event))


def kind_on_gpu(event: Any) -> str:
    return "copies" if event.name.lower().startswith(("memcpy", "memset")) else "kernels"


def kind_on_host(event: Any) -> str:
    name = event.name
    if name in (ENVIRONMENT, ITERATION):
        return "" if name == ITERATION else ENVIRONMENT
    if any(word in name for word in ("DevicePut", "HostBuffer", "ToLiteral", "Transfer", "Await")):
        return "copies"
    if any(stat == "hlo_op" for stat, _ in event.stats):
        return "kernels"
    return "launches"
