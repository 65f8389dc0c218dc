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
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running import checkpoint, evaluation, folder, hub, machine, rng, source
from cleanrl_utils.running.metrics import (
    CsvWriter,
    Progress,
    WandbWriter,
    clock,
    open_writers,
)
from cleanrl_utils.running.saving import (
    DEFAULT_CHECKPOINTS,
    LARGEST_BY_DEFAULT,
    NOTHING_BEFORE,
    Checkpoints,
)
from cleanrl_utils.running.settings import PixelArgs, RunArgs, TorchArgs, parse_args

__all__ = ["PixelArgs", "Run", "RunArgs", "TorchArgs", "parse_args", "require"]

KEEP_FINISHED = 64 * 2**20  # bytes: a larger checkpoint is removed when the run is finished
EVAL_SEED = 0xE7A1  # evaluation episodes are seeded apart from training ones


class Run(Checkpoints):
    """See the module's docstring. `make_env` is the script's: to evaluate and film its agent.

    Where several processes train one agent, all but one pass `writes=False`: they resume and
    checkpoint like that one, but write, evaluate and print nothing.
    """

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
            with self._writing(), self._unlocked_if_refused():
                start, before = self._continue()
        size = checkpoint.nbytes(state)
        unset = self.args.checkpoints is None
        if unset:  # a resumed run has the answer in its settings
            self.args.checkpoints = self._default_checkpoints(size)
        with self._writing():
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
            with self._writing():
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
        with self._writing():
            self._close()
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

    @contextlib.contextmanager
    def _unlocked_if_refused(self) -> Iterator[None]:
        """A run that is not resumed after all is free for another attempt in this process."""
        try:
            yield
        except BadInput:
            folder.unlock(self._lock)
            self._lock = None
            raise

    def _note_what_is_in_vain(self) -> None:
        """Settings that short trial runs use on purpose, and others by mistake."""
        args = self.args
        starts, total = getattr(args, "learning_starts", 0), getattr(args, "total_timesteps", 0)
        if starts >= total > 0:
            self.say(f"note: --learning-starts {starts} is not reached: nothing will be learned")
        size, room = getattr(args, "batch_size", 0), getattr(args, "buffer_size", math.inf)
        if size > room:
            self.say(
                f"note: --batch-size {size} exceeds --buffer-size {room}: batches repeat steps"
            )

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

    def _close(self) -> None:
        folder.unlock(self._lock)
        self._lock = None
        self._release_interrupts()
        with contextlib.ExitStack() as every:  # also those after one that a full disk keeps open
            for writer in [*self._writers, getattr(self, "_csv", None)]:
                if writer is not None:
                    every.callback(writer.close)
        self._writers = []
