"""Several runs in one program: agents of consecutive seeds, trained at once by jax.vmap.

    run = Runs(args, make_env)                        # args.num_seeds runs, each with its folder
    program = run.vectorise(function)                 # of one agent, for all at once
    start = run.resume(total, train=train)            # arrays whose first axis is the seeds
    for segment in range(start, total):
        train, episodes, metrics, returns, lengths = program(train, episodes)
        run.log_segment(metrics, returns, lengths, step)
        run.checkpoint(segment + 1, train=train, episodes=episodes)
    run.finish(agent)                                 # all agents: it has a method split()

To every tool they are ordinary runs. The first of them is the Runs object itself: it shows the
progress, and its folder has the checkpoint of all.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running import folder, rng, source
from cleanrl_utils.running.run import NOTHING_BEFORE, Run, RunArgs, parse_args

__all__ = ["Runs", "RunsArgs", "parse_args", "require", "segment_length"]

MANY_ENVS = 256  # on a CPU, what fewer take is over before a second thread has woken up
MOST_WITH_TENSORBOARD = 16  # beyond so many agents, only metrics.csv keeps up with them


@dataclass
class RunsArgs(RunArgs):
    num_seeds: int = 1
    """agents trained at once, from seeds --seed, --seed + 1, ...; each is a run of its own"""


class Runs(Run):
    """See the module's docstring."""

    def __init__(self, args: Any, make_env: Callable | None = None):
        accelerated = args.cuda and entry_points(group="jax_plugins")  # it compiles with threads
        if args.num_envs < MANY_ENVS and not accelerated:
            os.environ.setdefault("NPROC", "1")  # XLA reads it when it starts
        with contextlib.suppress(RuntimeError):  # too late in a process that has used JAX before
            jax.config.update("jax_num_cpu_devices", share(args.num_seeds, os.cpu_count() or 1))
        changes = [{"seed": args.seed + i, "num_seeds": 1} for i in range(1, args.num_seeds)]
        if args.resume:
            folders = siblings_of(Path(args.resume))
            changes = [{**c, "resume": str(f)} for c, f in zip(changes, folders, strict=True)]
        if len(changes) > 256:
            allow_open_files(2 * len(changes))
        self.siblings = [Run(dataclasses.replace(args, **c), make_env, quiet=True) for c in changes]
        super().__init__(args, make_env)  # last, as random streams are seeded from the first
        self.all: list[Run] = [self, *self.siblings]
        for run in self.all:
            run.csv_only = args.num_seeds > MOST_WITH_TENSORBOARD
        self._siblings_before = [NOTHING_BEFORE] * len(self.siblings)
        self._writer, self._pending = ThreadPoolExecutor(1), Future[None]()
        self._pending.set_result(None)

    @property
    def seeds(self) -> np.ndarray:
        return np.array([run.args.seed for run in self.all])

    @property
    def env_seeds(self) -> np.ndarray:
        """Seeds of each run's environments."""
        return np.array([rng.derive_seed(run.args.seed, 0) for run in self.all])

    def vectorise(self, function: Callable) -> Callable:
        """Compile a function of one agent's arrays to do the same for all agents."""
        if self.args.num_seeds > 1:
            program = jax.jit(jax.vmap(function))
        else:  # without the axis of seeds inside: it is slower even if its length is one
            drop, add = (
                partial(jax.tree.map, lambda x: x[0]),
                partial(jax.tree.map, lambda x: x[None]),
            )
            program = jax.jit(lambda *args: add(jax.tree.map(jnp.asarray, function(*drop(args)))))
        return lambda *args: program(*self.spread(args))

    def stack(self, trees: list[Any]) -> Any:
        """One tree with an axis of seeds, made of one tree per seed."""
        return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    def spread(self, tree: Any) -> Any:
        """The same arrays, their axis of seeds shared out among the GPUs or CPU cores there are."""
        devices = jax.devices()[: share(self.args.num_seeds, len(jax.devices()))]
        seeds = NamedSharding(Mesh(np.array(devices), "seeds"), PartitionSpec("seeds"))
        return tree if len(devices) == 1 else jax.device_put(tree, seeds)

    def resume(self, total: int, **state: Any) -> int:
        start = super().resume(total, **state)
        for run, before in zip(self.siblings, self._siblings_before, strict=True):
            run.total = total
            run._open(before)
        if self.siblings:
            self.say(f"with it {len(self.siblings)} more, of the seeds up to {self.seeds[-1]}")
        return start

    def _save(self, iteration: int) -> None:
        self._pending.result()  # a checkpoint is written when all before it is
        super()._save(iteration)

    def log_segment(
        self, metrics: Mapping[str, Any], returns: Any, lengths: Any, step: int
    ) -> None:
        """Log what a segment of the program gave; it happens while the next one is computed, in a
        thread of its own, because this one may have to tell a GPU one kernel after the other.

        Metrics are (num_seeds,); returns and lengths of episodes (num_seeds, ..., num_envs), in the
        order of steps, NaN where none ended. `step` is the last of them.
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
        returns, lengths = returns.reshape(shape), lengths.reshape(shape)
        rows = zip(*(column.tolist() for column in metrics.values()), strict=True)
        for i, (run, row) in enumerate(zip(self.all, rows, strict=True)):
            run.log_rollout(returns[i], lengths[i], step)
            run.log(dict(zip(metrics, row, strict=True)), step)

    def _about(self) -> dict[str, Any]:
        return super()._about() | {"siblings": [run._about() for run in self.siblings]}

    def _load(self, path: Path) -> tuple[int, dict[str, Any]]:
        start, about = super()._load(path)
        self._siblings_before = about["siblings"]
        return start, about

    def _write_record(self) -> None:
        super()._write_record()
        record = folder.read_record(self.folder)
        for run in self.siblings:
            run.args.checkpoints = self.args.checkpoints
            own = {"args": dataclasses.asdict(run.args), "trained_with": self.folder.name}
            folder.write_record(run.folder, record | own | {"id": run.id})
            source.copy(self.folder, run.folder)
        record["siblings"] = [run.folder.name for run in self.siblings]
        folder.write_record(self.folder, record)

    def _lengthen(self, record: dict[str, Any], step: int) -> None:
        super()._lengthen(record, step)
        total = self.args.total_timesteps
        for run in self.siblings:
            record = folder.read_record(run.folder)
            record["args"]["total_timesteps"] = run.args.total_timesteps = total
            folder.write_record(run.folder, record)
            folder.remove_summary(run.folder)

    def _close(self) -> None:
        super()._close()
        for run in self.siblings:
            run._close()


def siblings_of(first: Path) -> list[Path]:
    """The other runs of the program whose first run has this folder."""
    record = folder.read_record(first, "--resume")
    if other := record.get("trained_with"):
        other = first.parent / other
        raise BadInput(f"--resume {first}: it was trained together with others; resume {other}")
    return [first.parent / name for name in record.get("siblings", [])]


def segment_length(iterations: int, agents: int) -> int:
    """How many iterations a segment has: all equally many, for about a hundred segments. Of many
    agents each reports less often: writing it all would take longer than training them."""
    wanted = iterations / max(20, min(100, 10_000 // agents))
    divisors = [n for n in range(1, iterations + 1) if iterations % n == 0]
    return min(divisors, key=lambda n: max(n / wanted, wanted / n))


def share(seeds: int, devices: int) -> int:
    """How many of the devices can have equally many of the seeds."""
    return max(n for n in range(1, min(seeds, devices) + 1) if seeds % n == 0)


def allow_open_files(count: int) -> None:
    """Every run has its metrics.csv open."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = max(soft, count + 512)
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
