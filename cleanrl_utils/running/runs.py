"""Several runs in one program: agents of consecutive seeds, trained at once by jax.vmap.

    run = Runs(args, make_env)                        # args.num_seeds runs, each with its folder
    program = run.vectorise(function)                 # a function of one agent, for all at once
    start = run.resume(total, train=train)            # arrays of shape (num_seeds, ...)
    for segment in range(start, total):
        train, episodes, metrics, returns, lengths = program(train, episodes)
        run.log_segment(metrics, returns, lengths, step)
        run.checkpoint(segment + 1, train=train, episodes=episodes)
    run.finish(agent)                                 # agent.split() lists the agents

All tools treat them as ordinary runs. The first run is the Runs object itself: it shows the
progress, and its folder holds the checkpoint of all.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running import folder, rng, source
from cleanrl_utils.running.metrics import require_rows
from cleanrl_utils.running.run import Run, RunArgs, parse_args
from cleanrl_utils.running.saving import NEW_RUN
from cleanrl_utils.running.settings import Count

__all__ = ["Runs", "RunsArgs", "parse_args", "require", "segment_length"]

MANY_ENVS = 256  # with fewer environments, a second CPU thread costs more than it saves
MAX_SEEDS_WITH_TENSORBOARD = 16  # with more, only metrics.csv is written: it is fast enough


@dataclass
class RunsArgs(RunArgs):
    """agents"""

    num_seeds: Count = 1
    """agents trained at once, from seeds --seed, --seed + 1, ...; each is a run of its own"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.env_kwargs, "--env-kwargs: environments written in JAX take no arguments")
        few = self.num_seeds <= MAX_SEEDS_WITH_TENSORBOARD
        most = f"at most {MAX_SEEDS_WITH_TENSORBOARD} with --track"
        require(few or not self.track, f"--num-seeds must be {most}, got {self.num_seeds}")


class Runs(Run):
    """See the module's docstring."""

    def __init__(self, args: Any, make_env: Callable | None = None):
        has_gpu = args.cuda and entry_points(group="jax_plugins")  # then XLA compiles with threads
        if args.num_envs < MANY_ENVS and not has_gpu:
            os.environ.setdefault("NPROC", "1")  # read when XLA starts
        with contextlib.suppress(RuntimeError):  # JAX has already started in this process
            cores = usable_devices(args.num_seeds, os.cpu_count() or 1)
            jax.config.update("jax_num_cpu_devices", cores)
        changes = [{"seed": args.seed + i, "num_seeds": 1} for i in range(1, args.num_seeds)]
        if args.resume:
            folders = find_siblings(Path(args.resume))
            for change, sibling in zip(changes, folders, strict=True):
                change["resume"] = str(sibling)
            keep_segment(args)
        if len(changes) > 256:
            allow_open_files(2 * len(changes))
        self.siblings = []
        for change in changes:
            self.siblings.append(Run(dataclasses.replace(args, **change), make_env, quiet=True))
        super().__init__(args, make_env)  # last, so that the random generators have its seed
        self.all: list[Run] = [self, *self.siblings]
        for run in self.all:
            run.csv_only = args.num_seeds > MAX_SEEDS_WITH_TENSORBOARD
        self._siblings_before = [NEW_RUN] * len(self.siblings)
        self._writer = ThreadPoolExecutor(1)
        self._pending = Future[None]()
        self._pending.set_result(None)

    @property
    def seeds(self) -> np.ndarray:
        """The seed of each run."""
        return np.array([run.args.seed for run in self.all])

    @property
    def env_seeds(self) -> np.ndarray:
        """The seed of each run's environments."""
        return np.array([rng.derive_seed(run.args.seed, 0) for run in self.all])

    def vectorise(self, function: Callable) -> Callable:
        """Compile a function of one agent's arrays for the arrays of all agents."""
        if self.args.num_seeds > 1:
            program = jax.jit(jax.vmap(function))
        else:  # vmap over a single seed would be slower: drop the axis and add it again

            def single(*args: Any) -> Any:
                outputs = function(*jax.tree.map(lambda x: x[0], args))
                return jax.tree.map(lambda x: jnp.asarray(x)[None], outputs)

            program = jax.jit(single)
        return lambda *args: program(*self.spread(args))

    def stack(self, trees: list[Any]) -> Any:
        """Stack one tree per seed into one tree with a first axis of seeds."""
        return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    def spread(self, tree: Any) -> Any:
        """Distribute arrays over GPUs or CPU cores along their axis of seeds."""
        devices = jax.devices()[: usable_devices(self.args.num_seeds, len(jax.devices()))]
        seeds = NamedSharding(Mesh(np.array(devices), "seeds"), PartitionSpec("seeds"))
        return tree if len(devices) == 1 else jax.device_put(tree, seeds)

    def resume(self, total: int, **state: Any) -> int:
        start = super().resume(total, **state)
        for run, before in zip(self.siblings, self._siblings_before, strict=True):
            run.total = total
            run._open(before)
            if self.args.resume:
                run._note_changes(before["step"])
        if self.siblings:
            self.say(f"together with {len(self.siblings)} more runs, seeds up to {self.seeds[-1]}")
        return start

    def _save(self, iteration: int) -> None:
        self._pending.result()  # a checkpoint comes after all metrics before it
        super()._save(iteration)

    def log_segment(
        self, metrics: Mapping[str, Any], returns: Any, lengths: Any, step: int
    ) -> None:
        """Log the outputs of a segment, in a second thread, while the next segment is computed.

        Metrics are (num_seeds,); returns and lengths of episodes are (num_seeds, ..., num_envs), in
        the order of steps, NaN where no episode ended. `step` is the last step of the segment.
        """
        self._pending.result()
        self._pending = self._writer.submit(self._write_segment, metrics, returns, lengths, step)

    def evaluate(self, agent: Any, step: int) -> None:
        if self.evaluation_due(step):
            self._pending.result()
            for run, one in zip(self.all, agent.split(), strict=True):
                Run.evaluate(run, one, step)

    def finish(self, agent: Any) -> None:
        self._pending.result()
        first, *others = agent.split()
        for run, one in zip(self.siblings, others, strict=True):
            run.finish(one)
        super().finish(first)
        if self.siblings:
            last = [np.mean(run._progress.returns) for run in self.all if run._progress.returns]
            spread = f" ± {np.std(last, ddof=1):.2f}" if len(last) > 1 else ""
            mean = f"{np.mean(last):.2f}{spread}" if last else "no finished episode"
            self.say(f"return over {len(last)} of {len(self.all)} seeds: {mean}")

    def _write_segment(self, *segment: Any) -> None:
        metrics, returns, lengths, step = jax.device_get(segment)
        shape = (len(self.all), -1, returns.shape[-1])
        returns = returns.reshape(shape)
        lengths = lengths.reshape(shape)
        rows = zip(*(column.tolist() for column in metrics.values()), strict=True)
        for i, (run, row) in enumerate(zip(self.all, rows, strict=True)):
            run.log_rollout(returns[i], lengths[i], step)
            run.log(dict(zip(metrics, row, strict=True)), step)

    def _metadata(self) -> dict[str, Any]:
        siblings = [run._metadata() for run in self.siblings]
        return super()._metadata() | {"siblings": siblings}

    def _load(self, path: Path) -> tuple[int, dict[str, Any]]:
        start, metadata = super()._load(path)
        self._siblings_before = metadata["siblings"]
        for run, before in zip(self.siblings, self._siblings_before, strict=True):
            require_rows(run.folder / folder.METRICS, before["csv_bytes"])
        return start, metadata

    def _write_record(self, **more: Any) -> None:
        super()._write_record(**more, siblings=[run.folder.name for run in self.siblings])
        record = folder.read_record(self.folder)
        del record["siblings"]
        for run in self.siblings:
            run.args.checkpoints = self.args.checkpoints
            own = {"args": dataclasses.asdict(run.args), "trained_with": self.folder.name}
            folder.write_record(run.folder, record | own | {"id": run.id})
            source.copy(self.folder, run.folder)

    def _close(self) -> None:
        super()._close()
        for run in self.siblings:
            run._close()


def find_siblings(first: Path) -> list[Path]:
    """The folders of the runs that were trained together with the run in folder `first`."""
    record = folder.read_record(first, "--resume")
    if "trained_with" in record:
        other = first.parent / record["trained_with"]
        raise BadInput(f"--resume {first}: it was trained together with others; resume {other}")
    siblings = [first.parent / name for name in record.get("siblings", [])]
    for other in siblings:
        together = f"--resume {first}: {other}, trained together with it"
        gone = f"{together}, is gone or was killed before it began; start a new run"
        require(folder.has_record(other), gone)
    return siblings


def keep_segment(args: Any) -> None:
    """Checkpoints count segments, so a run keeps their length when it is made longer."""
    first = Path(args.resume)
    if hasattr(args, "segment") and folder.has_checkpoint(first):
        total = folder.first_length(folder.read_record(first))
        args.segment = dataclasses.replace(args, total_timesteps=total).segment


def segment_length(iterations: int, agents: int) -> int:
    """Iterations per segment, for about a hundred segments: a divisor of `iterations` if one is
    near enough, else a length that leaves out as few iterations as possible at the end.

    Many agents report less often: writing their metrics would take longer than training them.
    """
    wanted = iterations / max(20, min(100, 10_000 // agents))
    shortest = max(1, int(wanted / 10))
    longest = max(1, int(wanted * 10))
    lengths = range(shortest, longest + 1)
    return min(lengths, key=lambda n: (iterations % n, max(n / wanted, wanted / n)))


def usable_devices(seeds: int, devices: int) -> int:
    """The largest number of devices that can train equally many seeds each."""
    return max(n for n in range(1, min(seeds, devices) + 1) if seeds % n == 0)


def allow_open_files(count: int) -> None:
    """Raise the limit of open files: every run keeps its metrics.csv open."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = max(soft, count + 512)
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
