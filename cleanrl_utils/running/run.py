"""A run: its folder, seeds, device, metrics, checkpoints, evaluation. What the scripts share.

    args = parse_args(Args)
    run = Run(args, make_env)                 # folder, seeds, device
    start = run.resume(total, agent=agent, optimizer=optimizer)     # 0 on a new run
    for iteration in range(start, total):
        if run.boundary(iteration):           # writes a checkpoint; start the environments anew
            envs.reset(seed=run.env_seed)
        run.log_episodes(infos, step)         # finished episodes
        run.log({"losses/value_loss": v_loss}, step)
        run.evaluate(agent, step)             # when --eval-frequency says so
    run.finish(agent)                         # model file, evaluation, upload: as the flags ask

Nothing here can move a learning curve; whatever could is in the scripts.
"""

import atexit
import dataclasses
import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from cleanrl_utils.errors import BadInput, require, unsaid
from cleanrl_utils.running import checkpoint, evaluation, folder, rng, source
from cleanrl_utils.running.metrics import (
    CsvWriter,
    Means,
    Progress,
    WandbWriter,
    clock,
    open_writers,
)
from cleanrl_utils.running.settings import PixelArgs, RunArgs, TorchArgs, parse_args

__all__ = ["PixelArgs", "Run", "RunArgs", "TorchArgs", "parse_args", "require"]

DEFAULT_CHECKPOINTS = 10
LARGEST_BY_DEFAULT = 2**30  # bytes: larger checkpoints are written only when asked for
KEEP_FINISHED = 64 * 2**20  # bytes: a larger checkpoint goes when the run is finished
EVAL_SEED = 0xE7A1  # evaluation episodes are seeded apart from training ones
NOTHING_BEFORE: dict[str, Any] = {
    "seconds": 0.0,
    "csv_bytes": None,
    "step": 0,
    "returns": [],
    "lengths": [],
    "last_eval": 0,
}


class Run:
    """See the module's docstring. `make_env` is the script's: to evaluate and film its agent.

    Where several processes train one agent, all but one pass `writes=False`: they resume and meet
    boundaries like that one, but write, evaluate and say nothing.
    """

    def __init__(
        self,
        args: Any,
        make_env: Callable | None = None,
        quiet: bool = False,
        writes: bool = True,
    ):
        self.args, self.make_env = args, make_env
        self.quiet, self.writes, self.csv_only = quiet or not writes, writes, not writes
        self.script = Path(sys.modules[type(args).__module__].__file__ or "script.py")
        if args.resume:
            self.folder = Path(args.resume)
            self.name = folder.run_name(self.folder)
        elif writes:
            self.folder = new_folder(args)
            self.name = str(self.folder.relative_to(args.runs_dir))
        else:
            self.folder, self.name = Path(os.devnull), ""
        rng.seed_everything(args.seed)
        self.env_seed = rng.derive_seed(args.seed, 0)
        self.eval_seed = rng.derive_seed(args.seed, EVAL_SEED)
        self.device = choose_device(args)
        self.state: dict[str, Any] = {}
        self._next = 0  # the boundary ahead
        self._last_eval = 0
        self._writers: list[Any] = []
        if writes and not quiet:
            self._check_the_end()

    # -- the life of a run ------------------------------------------------------------------

    def resume(self, total: int, **state: Any) -> int:
        """Begin. Returns where to start: 0, or the boundary that --resume goes on from.

        `total` counts what the loop counts, iterations or steps. `state` is all that a checkpoint
        must hold; objects are restored in place, immutable values (JAX) are in `run.state` after.
        """
        self.total, self.state = total, state
        start, before = 0, NOTHING_BEFORE
        if self.args.resume:
            done = folder.is_finished(self.folder)
            require(not done, f"--resume {self.folder}: it is finished")
            if folder.has_checkpoint(self.folder):
                start, before = self._load(self.folder / folder.CHECKPOINT)
            else:  # killed before its first checkpoint it begins again, unless it was to have none
                again = "start it anew, without --resume"
                never = f"--resume {self.folder}: it has no checkpoints (--checkpoints 0): {again}"
                require(self.args.checkpoints != 0, never)
        size, unset = checkpoint.nbytes(state), self.args.checkpoints is None
        if unset:  # a resumed run has the answer in its settings
            self.args.checkpoints = DEFAULT_CHECKPOINTS if size <= LARGEST_BY_DEFAULT else 0
        if not self.args.resume and self.writes:
            self._write_record()
        self._open(start, before)
        what = f"resumes at step {before['step']:,}" if start else "starts"
        self.say(f"{self.name} {what} on {describe_device(self.device)}")
        if unset and not self.args.checkpoints:
            self.say(
                f"no checkpoints: each could take {size / 2**30:.1f} GiB;"
                f" --checkpoints {DEFAULT_CHECKPOINTS} writes them, so that the run can be resumed"
            )
        return start

    def boundary(self, iteration: int, **changed: Any) -> bool:
        """True at the run's boundaries, where a checkpoint is written and environments start anew.

        They lie at fixed places, whether or not anybody ever resumes: so a resumed run meets the
        same environments as one that was never interrupted. Environments that are part of the state
        (JAX's) just go on. `changed` replaces immutable state.
        """
        if iteration != self._next:
            return False
        self.state.update(changed)
        number = iteration * self.args.checkpoints // self.total
        self.env_seed = rng.derive_seed(self.args.seed, number)
        self._next = (
            -(-(number + 1) * self.total // self.args.checkpoints) if self.args.checkpoints else -1
        )
        if iteration > self._loaded_at and self.writes:
            self._save(iteration)
        return True

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write scalars under their tags; a loss that is not finite ends the run."""
        self._step = step
        values = to_floats(metrics)
        for tag, value in values.items():
            if not math.isfinite(value) and (tag.startswith("losses/") or tag.endswith("loss")):
                self._stop_on(tag, value, step)
        self._write(step, values | {"charts/SPS": self._speed(step)})
        self._progress.update(step)

    def log_episodes(self, infos: Mapping[str, Any], step: int, whose: str = "") -> None:
        """Log the episodes that ended in this step of a Gymnasium vector environment; `whose`, say
        teacher/, sets apart those of somebody else than the agent."""
        if "_episode" in infos:
            for i in np.flatnonzero(infos["_episode"]):
                episode = infos["episode"]["r"][i], infos["episode"]["l"][i]
                self.log_episode(*episode, step, whose=whose)

    def log_episode(
        self,
        episodic_return: float,
        length: int,
        step: int,
        suffix: str = "",
        average: int = 0,
        whose: str = "",
    ) -> None:
        """Log one episode; and the means of the last `average` ones, if that is not 0."""
        self._step = step
        if not suffix and not whose:  # else one of several players', or somebody else's
            self._progress.returns.append(float(episodic_return))
        if average:
            self._progress.lengths.append(float(length))
            for name in ("returns", "lengths"):
                recent = list(getattr(self._progress, name))[-average:]
                tag = f"charts/avg_episodic_{name.removesuffix('s')}{suffix}"
                self._write(step, {tag: sum(recent) / len(recent)})
        episode = {"return": float(episodic_return), "length": float(length)}
        self._write(step, {f"charts/{whose}episodic_{k}{suffix}": x for k, x in episode.items()})
        self._progress.update(step)

    def log_rollout(self, returns: Any, lengths: Any, step: int, average: int = 0) -> None:
        """Log the episodes of a rollout, (num_steps, num_envs), NaN where none ended.

        `step` is the rollout's last.
        """
        returns, lengths = np.asarray(returns), np.asarray(lengths)
        num_steps, num_envs = returns.shape
        ended = np.flatnonzero(~np.isnan(returns))
        steps = (step - (num_steps - 1 - ended // num_envs) * num_envs).tolist()
        values, counts = (x.ravel()[ended].astype(float).tolist() for x in (returns, lengths))
        if average:
            for episode in zip(values, counts, steps, strict=True):
                self.log_episode(*episode, average=average)
            return
        self._progress.returns.extend(values)
        columns = {"charts/episodic_return": values, "charts/episodic_length": counts}
        self.log_columns(steps, columns)

    def log_columns(self, steps: Sequence[int], columns: Mapping[str, Sequence[float]]) -> None:
        """Write many values of each tag at once, each with its step, in the order of steps.

        Of those that share a step, TensorBoard gets the mean: it could not show them anyway.
        """
        for tag, values in columns.items():
            self._csv.write_column(steps, self._seconds(), tag, values)
        if not self._writers:
            return
        rows = zip(steps, *columns.values(), strict=True)
        for step, same in groupby(rows, lambda row: row[0]):
            means = [sum(column) / len(column) for column in list(zip(*same, strict=True))[1:]]
            for writer in self._writers:
                writer.write(step, dict(zip(columns, means, strict=True)))

    def evaluate(self, agent: Any, step: int) -> None:
        """Play the agent greedily when --eval-frequency says so; training does not notice."""
        if self.evaluation_due(step) and self.writes:
            self._last_eval = step
            returns = self._play(agent, video=False)
            mean, std = float(np.mean(returns)), float(np.std(returns))
            self._write(step, {"eval/mean_return": mean, "eval/std_return": std})

    def play(self, agent: Any, episodes: int, epsilon: float = 0.0) -> list[float]:
        """Returns of episodes, with `epsilon` of the actions random; training does not notice."""
        return self._play(agent, video=False, episodes=episodes, epsilon=epsilon)

    def film(self, agent: Any) -> None:
        """Film an episode of the agent as it is now; training does not notice."""
        if self.make_env is not None and self.writes:
            self._play(agent, video=True, episodes=1, name=self.name)

    def evaluation_due(self, step: int) -> bool:
        every = self.args.eval_frequency
        return bool(every) and step - self._last_eval >= every

    def accelerate(
        self, function: Callable, sample: Callable | None = None, means: Means | None = None
    ) -> Callable:
        """The same function, compiled and captured as a CUDA graph as far as the flags ask.

        With `sample`, which draws its arguments from replay memory, the result takes none; where
        the memory is on the GPU as well, the graph holds the sampling, too. With `means`, what the
        function returns is added to them, by the same graph.
        """
        function = compiled(function, self.args)
        capture = partial(captured, device=self.device, args=self.args)
        learn = function
        if means is not None:
            learn = lambda *batch: means.add(function(*batch))  # noqa: E731
        if sample is None:
            whole = capture(learn)
        elif self.args.buffer_device == self.device.type:
            whole = capture(lambda: learn(*sample()))
        else:
            graph = capture(learn)
            whole = lambda: graph(*sample().to(self.device))  # noqa: E731
        return whole if means is None else means.counting(whole)

    def oracle(self, function: Callable) -> Any:
        """`function` of observations, to `ask` now and to take the `answer` of later."""
        from cleanrl_utils.speed.graphs import Oracle

        capture = partial(captured, device=self.device, args=self.args)
        return Oracle(compiled(function, self.args), self.device, capture)

    def inference(self, network: Callable) -> Callable[[np.ndarray], np.ndarray]:
        """What `network` says to observations, NumPy in and out, as fast as the device allows."""
        import torch

        from cleanrl_utils.speed.inference import at_once, in_numpy

        asked = at_once(self.oracle(torch.no_grad()(lambda obs: network(obs))))
        plain = self.device.type == "cpu" and not self.args.compile
        return in_numpy(network, otherwise=asked) if plain else asked

    def finish(self, agent: Any) -> None:
        """The end: save, evaluate and share the model as the flags ask, and close everything."""
        if not self.writes:
            return self._close()
        summary: dict[str, Any] = {"step": self._step, "seconds": self._seconds()}
        if returns := list(self._progress.returns):
            summary |= {"episodic_return": float(np.mean(returns)), "episodes": len(returns)}
        self._progress.show(self._progress.line(self._step), stay=True)
        if self.args.save_model:
            path = folder.model_path(self.folder, self.args.exp_name)
            evaluation.save_model(path, agent, self.args, self.script.stem)
            self.say(f"model: {path}")
        filmed = any((Path("videos") / self.name).glob("*.mp4"))  # not where EnvPool or JAX step
        film = self.args.capture_video and not filmed
        if self.make_env and (self.args.save_model or film):
            lengths: list[float] = []
            returns = self._play(agent, video=self.args.capture_video, lengths=lengths)
            for episode, (value, length) in enumerate(zip(returns, lengths, strict=True)):
                both = {"eval/episodic_return": value, "eval/episodic_length": length}
                self._write(episode, both)
            summary |= {"eval_returns": returns, "eval_lengths": lengths}
            self.say(f"evaluation: {evaluation.describe(returns)}")
        self._log_videos()
        self._close()
        folder.write_summary(self.folder, summary)
        saved = self.folder / folder.CHECKPOINT
        if saved.exists() and saved.stat().st_size > KEEP_FINISHED:
            saved.unlink()
        if self.args.upload_model:
            from cleanrl_utils.huggingface import push_run, upload_later

            try:
                with unsaid():
                    push_run(self.folder, self.args.hf_entity)
            except BadInput as error:
                later = upload_later(self.folder, self.args.hf_entity)
                whole = f"the run is whole; share it later: {later}"
                raise BadInput(f"{error.message}; {whole}") from None
        self.say(f"{self.name} finished in {clock(summary['seconds'])}; metrics in {self.folder}")

    def say(self, text: str) -> None:
        """One line to the user that stays on the screen."""
        if self.quiet:
            return
        if hasattr(self, "_progress"):
            self._progress.say(text)
        else:
            print(text, file=sys.stderr, flush=True)

    # -- how it is done ---------------------------------------------------------------------

    def _check_the_end(self) -> None:
        """Stop now for what would stop the run after its training."""
        args = self.args
        if args.upload_model:
            from cleanrl_utils.huggingface import require_login

            require_login()
        if self.make_env is None:
            nowhere = f"{self.script.name} has no environment to evaluate in"
            require(not args.eval_frequency, f"--eval-frequency: {nowhere}")
        if self.make_env and (args.save_model or args.capture_video or args.eval_frequency):
            with rng.preserved():
                self.make_env(args.env_id, args.seed, 1, False, self.name)().close()

    def _open(self, start: int, before: Mapping[str, Any]) -> None:
        """Open what is written to; `before` says how far a resumed run had come."""
        self._began = time.perf_counter() - before["seconds"]
        self._start_step, self._start_seconds = before["step"], before["seconds"]
        self._last_eval = before["last_eval"]
        if self.writes:
            self._csv = CsvWriter(self.folder / folder.METRICS, before["csv_bytes"])
        else:
            self._csv = CsvWriter(Path(os.devnull))
        if not self.csv_only:
            record = folder.read_record(self.folder)
            step = before["step"]
            try:
                self._writers = open_writers(self.args, self.name, self.folder, record, step)
            except BadInput:  # of --track
                self._csv.close()
                if not self.args.resume:
                    for run in [self, *getattr(self, "siblings", [])]:
                        shutil.rmtree(run.folder)
                raise
        phases = {"": getattr(self.args, "total_timesteps", self.total)}
        phases = getattr(self.args, "phases", phases)  # a script may have several
        self._progress = Progress(phases, before["step"], quiet=self.quiet)
        self._progress.returns.extend(before["returns"])
        self._progress.lengths.extend(before.get("lengths", []))
        self._step, self._loaded_at = before["step"], start
        self._next = start

    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    def _speed(self, step: int) -> float:
        return (step - self._start_step) / max(self._seconds() - self._start_seconds, 1e-9)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        self._csv.write(step, self._seconds(), values)
        for writer in self._writers:
            writer.write(step, values)

    def _write_record(self) -> None:
        record = {
            "args": dataclasses.asdict(self.args),
            "script": self.script.stem,
            "script_path": os.path.relpath(self.script),
            "command": [self.script.name, *sys.argv[1:]],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "tags": [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag],
            "git": git_state(self.script.resolve().parent),
            "code": source.keep(self.folder, self.script),
            "versions": versions(),
            "hardware": hardware(self.device),
        }
        folder.write_record(self.folder, record)
        if path := os.environ.get("CLEANRL_FOLDER_FILE"):  # whoever started the run can find it
            Path(path).write_text(os.path.relpath(self.folder, Path(path).parent))

    def _about(self) -> dict[str, Any]:
        """What a checkpoint says about the run itself."""
        return {
            "step": self._step,
            "seconds": self._seconds(),
            "csv_bytes": self._csv.flush(),
            "returns": list(self._progress.returns),
            "lengths": list(self._progress.lengths),
            "last_eval": self._last_eval,
        }

    def _save(self, iteration: int) -> None:
        about = {"script": self.script.stem, "iteration": iteration, **self._about()}
        state = dict(self.state, random_streams=rng.get_state())
        checkpoint.save(self.folder / folder.CHECKPOINT, state, about)

    def _load(self, path: Path) -> tuple[int, dict[str, Any]]:
        about, saved = checkpoint.load(path)
        require(
            set(saved) == {*self.state, "random_streams"},
            f"{path}: holds other state than this script's",
        )
        for name, target in self.state.items():
            self.state[name] = checkpoint.restore(target, saved[name])
        rng.set_state(saved["random_streams"])
        return about["iteration"], about

    def _play(
        self,
        agent: Any,
        video: bool,
        episodes: int | None = None,
        name: str = "",
        epsilon: float = 0.0,
        lengths: list[float] | None = None,
    ) -> list[float]:
        assert self.make_env is not None  # checked at the start
        seed, episodes = self.eval_seed, episodes or self.args.eval_episodes
        name = name or f"{self.name}-eval"
        with rng.preserved():
            policy = evaluation.as_policy(agent, self.device)
            env = self.make_env, self.args.env_id
            return evaluation.play(policy, *env, episodes, seed, video, name, epsilon, lengths)

    def _stop_on(self, tag: str, value: float, step: int) -> None:
        self._close()
        saved = self.folder / folder.CHECKPOINT
        kept = (
            f"the last good checkpoint is {saved}"
            if saved.exists()
            else "there is no checkpoint yet"
        )
        raise SystemExit(f"error: {tag} is {value} at step {step:,}; stopped, {kept}")

    def _log_videos(self) -> None:
        for place in (Path("videos") / self.name, Path("videos") / f"{self.name}-eval"):
            if paths := sorted(place.glob("*.mp4")):
                self.say(f"videos: {place} ({len(paths)})")
            for writer in self._writers:
                if isinstance(writer, WandbWriter):
                    for path in paths:
                        writer.video(path)

    def _close(self) -> None:
        self._csv.close()
        for writer in self._writers:
            writer.close()
        self._writers = []


def new_folder(args: RunArgs) -> Path:
    """A folder nobody else has, even if two runs start in the same second; gone again if unused."""
    env_id = getattr(args, "env_id", "env").split(":")[-1]
    stamp = int(time.time())
    base = Path(args.runs_dir) / f"{env_id}__{args.exp_name}__{args.seed}__{stamp}"
    made = [folder for folder in base.parents if not folder.exists()]
    for attempt in range(1000):
        folder = base if attempt == 0 else base.with_name(f"{base.name}_{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if folder.is_dir():
                continue
            raise BadInput(f"--runs-dir {args.runs_dir}: is a file, not a folder") from None
        except OSError as error:
            raise BadInput(
                f"--runs-dir {args.runs_dir}: cannot write there ({error.strerror})"
            ) from None
        atexit.register(remove_if_empty, [folder, *made])
        return folder
    raise BadInput(f"--runs-dir {args.runs_dir}: too many runs of this name in one second")


def remove_if_empty(folders: list[Path]) -> None:
    for place in folders:
        try:
            place.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return


def choose_device(args: Any) -> Any:
    """The device for torch, set up as the flags ask; JAX scripts (no torch imported) get None."""
    torch = sys.modules.get("torch")
    if not torch or not isinstance(args, TorchArgs):
        if not args.cuda:
            os.environ["JAX_PLATFORMS"] = "cpu"
            if jax := sys.modules.get("jax"):  # it has read the variable already
                jax.config.update("jax_platforms", "cpu")
        return None
    # Where a gradient stays zero, Adam's moments decay to numbers below 1e-38, which take a CPU
    # many times as long as others: let them be zero, in this thread and those it will start.
    _ = np.finfo(np.float32), np.finfo(np.float64)  # NumPy 2.3 and before would warn afterwards
    torch.set_flush_denormal(True)
    if args.torch_threads:
        torch.set_num_threads(args.torch_threads)
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        # as use_deterministic_algorithms(True, warn_only=True), which imports the compiler for it
        torch.set_deterministic_debug_mode("warn")
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads it
    on_gpu = args.cuda and torch.cuda.is_available()
    if not on_gpu and (jax := sys.modules.get("jax")):  # a torch script with JAX's environments
        jax.config.update("jax_platforms", "cpu")
    return torch.device("cuda" if on_gpu else "cpu")


def compiled(function: Callable, args: Any) -> Callable:
    """The function for --compile: with the random numbers of eager mode."""
    if not args.compile:
        return function
    import torch

    torch._inductor.config.fallback_random = True
    torch._inductor.config.deterministic = args.torch_deterministic
    return torch.compile(function)


def captured(function: Callable, device: Any, args: Any) -> Callable:
    """The function as a CUDA graph, on a GPU and unless --no-cudagraphs."""
    if device.type != "cuda" or not args.cudagraphs:
        return function
    from cleanrl_utils.speed.graphs import CudaGraph

    return CudaGraph(function)


def describe_device(device: Any) -> str:
    if device is None:
        jax: Any = sys.modules.get("jax")
        return jax.devices()[0].device_kind if jax else "cpu"
    torch: Any = sys.modules["torch"]
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} torch thread{'s' * (torch.get_num_threads() > 1)}"


def to_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """All values as floats; the tensors of a device come over in a single copy."""
    torch: Any = sys.modules.get("torch")
    values = dict(metrics)
    tensors = {tag: x for tag, x in metrics.items() if torch and isinstance(x, torch.Tensor)}
    for device in {x.device for x in tensors.values()}:
        tags = [tag for tag, x in tensors.items() if x.device == device]
        stacked = torch.stack([tensors[tag].detach().reshape(()).double() for tag in tags])
        values.update(zip(tags, stacked.tolist(), strict=True))
    return {tag: float(value) for tag, value in values.items()}


def git_state(folder: Path) -> dict[str, Any]:
    """Commit of the code; a container without git says it with CLEANRL_COMMIT."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=10
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        if commit := git("rev-parse", "HEAD"):
            return {"commit": commit, "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.TimeoutExpired):
        pass
    commit = os.environ.get("CLEANRL_COMMIT", "")
    return {"commit": commit, "dirty": False} if commit else {}


def versions() -> dict[str, str]:
    """Of the packages that are loaded: those are the ones that can matter."""
    tops = {name.partition(".")[0] for name in list(sys.modules)}
    names = {owner for top in tops for owner in owners().get(top, [])}
    found = {name: importlib.metadata.version(name) for name in sorted(names, key=str.lower)}
    return {"python": platform.python_version(), **found}


@cache
def owners() -> Mapping[str, list[str]]:
    """The packages that a module's first name can come from."""
    return importlib.metadata.packages_distributions()


def hardware(device: Any) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    if (path := Path("/proc/cpuinfo")).exists():
        lines = [line for line in path.read_text().splitlines() if line.startswith("model name")]
        cpu = lines[0].partition(":")[2].strip() if lines else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "device": describe_device(device),
        "os": platform.platform(),
    }
