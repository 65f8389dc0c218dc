"""A run: its folder, seeds, device, metrics, checkpoints, evaluation. What the scripts share.

    args = parse_args(Args)
    run = Run(args, make_env)                 # folder, seeds, device
    start = run.resume(total, agent=agent, optimizer=optimizer, envs=envs)     # 0 on a new run
    for iteration in range(start, total):
        run.log_episodes(infos, step)         # finished episodes
        run.log({"losses/value_loss": v_loss}, step)
        run.evaluate(agent, step)             # when --eval-frequency says so
        run.checkpoint(iteration + 1)         # when --checkpoints says so
    run.finish(agent)                         # model file, evaluation, upload: as the flags ask

Nothing here can move a learning curve; whatever could is in the scripts.
"""

import contextlib
import dataclasses
import math
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from cleanrl_utils.errors import BadInput, Stopped, hide_stops, require
from cleanrl_utils.running import checkpoint, evaluation, folder, hub, machine, rng, source
from cleanrl_utils.running.metrics import (
    CsvWriter,
    Means,
    Progress,
    WandbWriter,
    clock,
    open_writers,
    to_floats,
)
from cleanrl_utils.running.settings import PixelArgs, RunArgs, TorchArgs, parse_args

__all__ = ["PixelArgs", "Run", "RunArgs", "TorchArgs", "parse_args", "require"]

DEFAULT_CHECKPOINTS = 10
STEPS_BETWEEN_RESTARTS = 50_000  # of each environment, where a checkpoint restarts them
LARGEST_BY_DEFAULT = 2**30  # bytes: larger checkpoints are written only when asked for
KEEP_FINISHED = 64 * 2**20  # bytes: a larger checkpoint is removed when the run is finished
EVAL_SEED = 0xE7A1  # evaluation episodes are seeded apart from training ones
NOT_PARAMETERS = {"envs", "memory", "replay", "random_streams"}  # may hold what environments give
NOTHING_BEFORE: dict[str, Any] = {
    "seconds": 0.0,
    "csv_bytes": None,
    "step": 0,
    "returns": [],
    "lengths": [],
    "last_eval": 0,
    "best_eval": None,
    "restarts": 0,
}


class Run:
    """See the module's docstring. `make_env` is the script's: to evaluate and film its agent.

    Where several processes train one agent, all but one pass `writes=False`: they resume and
    checkpoint like that one, but write, evaluate and print nothing.
    """

    _progress: Progress
    _best_eval: float | None

    def __init__(
        self,
        args: Any,
        make_env: Callable | None = None,
        quiet: bool = False,
        writes: bool = True,
    ):
        self.args = args
        self.make_env = partial(make_env, **args.env_settings) if make_env else None
        self.quiet = quiet or not writes
        self.writes = writes
        self.csv_only = not writes
        self.script = Path(sys.modules[type(args).__module__].__file__ or "script.py")
        if args.resume:
            self.folder = Path(args.resume)
            self.name = folder.run_name(self.folder)
        elif writes:
            self.folder = folder.new_folder(args)
            self.name = str(self.folder.relative_to(args.runs_dir))
        else:
            self.folder, self.name = Path(os.devnull), ""
        self.videos = str(self.folder / folder.VIDEOS)
        self._lock = folder.lock(self.folder) if writes else None
        rng.seed_everything(args.seed)
        self.eval_seed = rng.derive_seed(args.seed, EVAL_SEED)
        self.device = machine.choose_device(args)
        self.state: dict[str, Any] = {}
        self.id = secrets.token_hex(8)
        self._writers: list[Any] = []
        if writes and not quiet:
            self._check_the_end()

    # -- the life of a run ------------------------------------------------------------------

    def resume(self, total: int, **state: Any) -> int:
        """Begin. Returns where to start: 0, or the iteration that --resume continues from.

        `total` is the number of iterations; `state` names everything a checkpoint must hold.
        Objects are restored in place, immutable values (JAX) are in `run.state` afterwards.
        """
        self.total = total
        self.state = state
        start, before = 0, NOTHING_BEFORE
        if self.args.resume:
            start, before = self._continue()
        size = checkpoint.nbytes(state)
        unset = self.args.checkpoints is None
        if unset:  # a resumed run has the answer in its settings
            self.args.checkpoints = self._default_checkpoints(size)
        if not self.args.resume and self.writes:
            self._write_record()
        self._open(before)
        if hasattr(state.get("envs"), "stop"):  # for an environment that fails
            state["envs"].stop = self._stop
        what = f"resumes at step {before['step']:,}" if start else "starts"
        self.say(f"{self.name} {what} on {machine.describe_device(self.device)}")
        if unset and size > LARGEST_BY_DEFAULT:
            self.say(
                f"no checkpoints: each could take {size / 2**30:.1f} GiB;"
                f" --checkpoints {DEFAULT_CHECKPOINTS} writes them, so that the run can be resumed"
            )
        self._note_what_is_in_vain()
        return start

    def checkpoint(self, iteration: int, **changed: Any) -> bool:
        """Write a checkpoint if one is due after this many iterations; True if it was written.

        Training does not notice, except where environments can only restart (EnvPool's).
        `changed` replaces immutable state.
        """
        self.state.update(changed)
        count = self.args.checkpoints
        due = iteration * count // self.total > (iteration - 1) * count // self.total
        if not due:
            return False
        self._save(iteration)
        return True

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write scalars under their tags; a loss that is not finite ends the run."""
        self._step = step
        values = to_floats(metrics)
        for tag, value in values.items():
            if not math.isfinite(value) and (tag.startswith("losses/") or tag.endswith("loss")):
                self._stop(f"{tag} is {value} at step {step:,}")
        self._write(step, values | {"charts/SPS": self._speed(step)})
        self._progress.update(step)

    def log_episodes(
        self, infos: Mapping[str, Any], step: int, whose: str = "", average: int = 0
    ) -> None:
        """Log the episodes that ended in this step of a vector environment; `whose`, say teacher/,
        sets apart those of somebody else than the agent; `average`: see log_episode."""
        if "_episode" in infos:
            for i in np.flatnonzero(infos["_episode"]):
                episode = infos["episode"]["r"][i], infos["episode"]["l"][i]
                self.log_episode(*episode, step, whose=whose, average=average)

    def log_episode(
        self,
        episodic_return: float,
        length: int,
        step: int,
        suffix: str = "",
        average: int = 0,
        whose: str = "",
    ) -> None:
        """Log one episode, and the means over the last `average` ones, if that is not 0."""
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

        TensorBoard gets the mean of those that share a step: it could not show them anyway.
        """
        with self._writing():
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
        """Evaluate the greedy policy when --eval-frequency says so; training does not notice."""
        if not self.evaluation_due(step) or not self.writes:
            return
        self._last_eval = step
        self._progress.note("evaluating", step)
        returns = self._play(agent, video=False)
        mean, std = float(np.mean(returns)), float(np.std(returns))
        self._write(step, {"eval/mean_return": mean, "eval/std_return": std})
        self._progress.note(f"evaluation {mean:.1f}", step)
        if self.args.save_model and (self._best_eval is None or mean > self._best_eval):
            self._best_eval = mean
            best = self.folder / folder.BEST
            best.mkdir(exist_ok=True)
            self._save_model(best, agent)

    def play(self, agent: Any, episodes: int, epsilon: float = 0.0) -> list[float]:
        """Returns of episodes, with `epsilon` of the actions random; training does not notice."""
        return self._play(agent, video=False, episodes=episodes, epsilon=epsilon)

    def film(self, agent: Any) -> None:
        """Record an episode of the agent as it is now; training does not notice."""
        if self.make_env is not None and self.writes:
            self._play(agent, video=True, episodes=1, videos=self.videos)

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
        from cleanrl_utils.speed.graphs import captured, compiled

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
        from cleanrl_utils.speed.graphs import Oracle, captured, compiled

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
        if hasattr(envs := self.state.get("envs"), "close"):
            envs.close()  # type: ignore[union-attr]
        if not self.writes:
            return self._close()
        summary: dict[str, Any] = {"step": self._step, "seconds": self._seconds()}
        returns = list(self._progress.returns)
        summary["episodes"] = len(returns)  # of the last 100
        if returns:
            summary["episodic_return"] = float(np.mean(returns))
        if self._restarts:
            summary["environment_restarts"] = self._restarts
        self._progress.end(self._step)
        if not returns:
            self.say("no episode ended: there is no return to report")
        if self.args.save_model:
            path = self._save_model(self.folder, agent)
            self.say(f"model: {path}")
        filmed = any(Path(self.videos).glob("*.mp4"))  # not where EnvPool or JAX step
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
        with self._writing():
            folder.write_summary(self.folder, summary)
        saved = self.folder / folder.CHECKPOINT
        if saved.exists() and saved.stat().st_size > KEEP_FINISHED:
            saved.unlink()
        if self.args.upload_model:
            hub.upload(self.folder, self.args.hf_entity)
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
            hub.require_login()
        if self.make_env is None:
            nowhere = f"{self.script.name} has no environment to evaluate in"
            require(not args.eval_frequency, f"--eval-frequency: {nowhere}")
        if self.make_env and (args.save_model or args.capture_video or args.eval_frequency):
            with rng.preserved():
                self.make_env(args.env_id, args.seed, 1, False, self.videos)().close()

    def _note_what_is_in_vain(self) -> None:
        """Settings that short trial runs use on purpose, and others by mistake."""
        args = self.args
        starts, total = getattr(args, "learning_starts", 0), getattr(args, "total_timesteps", 0)
        if starts >= total > 0:
            self.say(f"note: --learning-starts {starts} is not reached: nothing will be learned")

    def _default_checkpoints(self, size: int) -> int:
        if size > LARGEST_BY_DEFAULT:
            return 0
        envs = self.state.get("envs")
        if getattr(envs, "restarts", False):
            steps = self.args.total_timesteps // envs.num_envs  # type: ignore[union-attr]
            return min(DEFAULT_CHECKPOINTS, steps // STEPS_BETWEEN_RESTARTS)
        return DEFAULT_CHECKPOINTS

    def _open(self, before: Mapping[str, Any]) -> None:
        """Open what is written to; `before` says how far a resumed run had come."""
        self._began = time.perf_counter() - before["seconds"]
        self._start_step, self._start_seconds = before["step"], before["seconds"]
        self._last_eval, self._best_eval = before["last_eval"], before["best_eval"]
        self._restarts = before["restarts"]
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
        self._progress.lengths.extend(before["lengths"])
        self._step = before["step"]
        if not self.quiet:
            self._catch_interrupts()

    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    def _speed(self, step: int) -> float:
        return (step - self._start_step) / max(self._seconds() - self._start_seconds, 1e-9)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        try:  # as self._writing(), which would cost more than the writing itself
            self._csv.write(step, self._seconds(), values)
            for writer in self._writers:
                writer.write(step, values)
        except OSError as error:
            self._stop_writing(error)

    def _write_record(self) -> None:
        record = {
            "id": self.id,
            "args": dataclasses.asdict(self.args),
            "script": self.script.stem,
            "script_path": os.path.relpath(self.script),
            "command": [self.script.name, *sys.argv[1:]],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "tags": [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag],
            "git": machine.git_state(self.script.resolve().parent),
            **source.keep(self.folder, self.script),
            "versions": machine.versions(),
            "hardware": machine.hardware(self.device),
        }
        folder.write_record(self.folder, record)
        if path := os.environ.get("CLEANRL_FOLDER_FILE"):  # whoever started the run can find it
            Path(path).write_text(os.path.relpath(self.folder, Path(path).parent))

    # -- checkpoints ------------------------------------------------------------------------

    def _about(self) -> dict[str, Any]:
        """What a checkpoint says about the run itself."""
        return {
            "step": self._step,
            "seconds": self._seconds(),
            "csv_bytes": self._csv.sync(),
            "returns": list(self._progress.returns),
            "lengths": list(self._progress.lengths),
            "last_eval": self._last_eval,
            "best_eval": self._best_eval,
            "restarts": self._restarts,
        }

    def _save(self, iteration: int) -> None:
        self._restarts += getattr(self.state.get("envs"), "restarts", False)
        state = dict(self.state, random_streams=rng.get_state())
        if not self.writes:  # another process does, with its own and these states
            return checkpoint.gather(state)
        with self._writing():
            about = {"run": self.id, "script": self.script.stem, "iteration": iteration}
            finite = checkpoint.save(
                self.folder / folder.CHECKPOINT,
                state,
                about | self._about(),
                must_be_finite={name for name in state if self._has_parameters(name)},
            )
        if not finite:
            self._stop(f"parameters are not finite at step {self._step:,}")

    def _has_parameters(self, name: str) -> bool:
        """Not in arrays of the loop itself: NaN may stand for an episode that has not ended yet."""
        return name not in NOT_PARAMETERS and not isinstance(self.state.get(name), np.ndarray)

    def _continue(self) -> tuple[int, dict[str, Any]]:
        """Restore the state from the last checkpoint; where to start, and what was before."""
        path = self.folder / folder.CHECKPOINT
        where = f"--resume {self.folder}"
        record = folder.read_record(self.folder, "--resume")
        old = record["args"].get("total_timesteps")
        longer = old is not None and self.args.total_timesteps > old
        finished = folder.is_finished(self.folder)
        hint = f"a --total-timesteps above {old} continues it"
        require(longer or not finished, f"{where}: it is finished; {hint}")
        if self.writes:
            folder.remove_partial_files(self.folder)
        self.id = record.get("id", "")
        if not path.exists():
            # Killed before its first checkpoint, a run begins again, unless it was to have none.
            never = f"{where}: it has no checkpoints (--checkpoints 0): start it anew"
            require(self.args.checkpoints != 0, never)
            large = f"{where}: its last checkpoint was too large to be kept: start it anew"
            require(not finished, large)
            return 0, NOTHING_BEFORE
        start, before = self._load(path)
        if longer and self.writes:
            self._lengthen(record, before["step"])
        return start, before

    def _load(self, path: Path) -> tuple[int, dict[str, Any]]:
        about, saved = checkpoint.load(path)
        old = f"{path}: written by an older version of this project: start the run anew"
        require({"run", "restarts", "best_eval"} <= set(about), old)
        require(about["run"] == self.id, f"{path}: the checkpoint of another run")
        require(
            set(saved) == {*self.state, "random_streams"},
            f"{path}: holds other state than this script's",
        )
        for name, target in self.state.items():
            self.state[name] = checkpoint.restore(target, saved[name])
        rng.set_state(saved["random_streams"])
        return about["iteration"], about

    def _lengthen(self, record: dict[str, Any], step: int) -> None:
        """Write down that the run goes on beyond its end."""
        old, new = record["args"]["total_timesteps"], self.args.total_timesteps
        record["args"]["total_timesteps"] = new
        record.setdefault("lengthened", []).append({"at_step": step, "from": old, "to": new})
        folder.write_record(self.folder, record)
        folder.remove_summary(self.folder)
        print(
            f"--total-timesteps was {old:,}, is now {new:,}: from here on schedules (learning rate,"
            f" exploration) follow the new length, as if the run had been planned so",
            file=sys.stderr,
        )

    # -- evaluation -------------------------------------------------------------------------

    def _save_model(self, where: Path, agent: Any) -> Path:
        path = folder.model_path(where, self.args.exp_name)
        with self._writing():
            evaluation.save_model(path, agent, self.args, self.script.stem)
        return path

    def _play(
        self,
        agent: Any,
        video: bool,
        episodes: int | None = None,
        videos: str = "",
        epsilon: float = 0.0,
        lengths: list[float] | None = None,
    ) -> list[float]:
        assert self.make_env is not None  # checked at the start
        seed, episodes = self.eval_seed, episodes or self.args.eval_episodes
        videos = videos or f"{self.videos}/{folder.EVALUATION}"
        with rng.preserved():
            policy = evaluation.as_policy(agent, self.device)
            env = self.make_env, self.args.env_id
            return evaluation.play(policy, *env, episodes, seed, video, videos, epsilon, lengths)

    def _log_videos(self) -> None:
        paths = folder.find_videos(self.folder)
        if paths:
            self.say(f"videos: {self.videos} ({len(paths)})")
        for writer in self._writers:
            if isinstance(writer, WandbWriter):
                for path in paths:
                    writer.video(path)

    # -- the end ----------------------------------------------------------------------------

    def _how_to_go_on(self) -> str:
        """What is left of a run that stops now, and the command that continues it."""
        if not (self.folder / folder.CHECKPOINT).exists():
            return "there is no checkpoint yet"
        words = ["python", os.path.relpath(self.script), "--resume", str(self.folder)]
        return f"go on from the last good checkpoint: {shlex.join(words)}"

    def _stop(self, why: str) -> None:
        """End the run with one line."""
        with contextlib.suppress(OSError):
            self._close()
        raise Stopped(f"{why}; stopped, {self._how_to_go_on()}")

    def _stop_writing(self, error: OSError) -> None:
        what = f"{error.filename}: " if error.filename else f"{self.folder}: "
        self._stop(f"{what}cannot be written ({error.strerror or error})")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk or a folder that is gone ends the run with one line."""
        try:
            yield
        except OSError as error:
            self._stop_writing(error)

    def _catch_interrupts(self) -> None:
        """Ctrl+C ends the run with one line and status 130, and keeps the last checkpoint."""

        def interrupted(number: int, frame: Any) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with contextlib.suppress(OSError):
                self._csv.flush()
            raise Stopped(f"interrupted at step {self._step:,}; {self._how_to_go_on()}", 130)

        if sys.flags.interactive:  # python -i: the prompt comes without a traceback
            sys.excepthook = hide_stops
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with contextlib.suppress(ValueError):  # not in the main thread
            if default:
                signal.signal(signal.SIGINT, interrupted)

    def _close(self) -> None:
        folder.unlock(self._lock)
        self._lock = None
        self._csv.close()
        for writer in self._writers:
            writer.close()
        self._writers = []
        with contextlib.suppress(ValueError):
            if getattr(signal.getsignal(signal.SIGINT), "__qualname__", "").startswith("Run."):
                signal.signal(signal.SIGINT, signal.default_int_handler)
