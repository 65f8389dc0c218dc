"""A run: folder, seeds, device, metrics, checkpoints and evaluation, shared by all scripts.

    args = parse_args(Args)
    run = Run(args, make_env)                 # folder, seeds, device
    start = run.resume(total, agent=agent, optimizer=optimizer, envs=envs)     # 0 on a new run
    for iteration in range(start, total):
        run.log_episodes(infos, step)         # episodes that ended in this step
        run.log({"losses/value_loss": v_loss}, step)
        run.evaluate(agent, step)             # when --eval-frequency says so
        run.checkpoint(iteration + 1)         # when --checkpoints says so
    run.finish(agent)                         # model file, evaluation, upload: as the flags ask

Nothing in this module can move a learning curve; everything that could is in the scripts.
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
    KEEP_FINISHED,
    MAX_DEFAULT_BYTES,
    NEW_RUN,
    Checkpoints,
)
from cleanrl_utils.running.settings import LargeArgs, PixelArgs, RunArgs, TorchArgs, parse_args
from cleanrl_utils.speed.profile import Profile, make_profile

__all__ = ["LargeArgs", "PixelArgs", "Run", "RunArgs", "TorchArgs", "parse_args", "require"]

EVAL_SEED = 0xE7A1  # makes the seeds of evaluation differ from those of training


class Run(Checkpoints):
    """See the module's docstring. `make_env` is the script's own, for evaluation and videos.

    If several processes train one agent, all but one pass `writes=False`: they resume and
    checkpoint with the others, but write, evaluate and print nothing.
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
        self.script = source.script_file(type(args))
        args.exp_name = args.exp_name or self.script.stem  # settings made without parse_args
        if args.resume:
            self.folder = Path(args.resume)
            self.name = folder.run_name(self.folder)
        elif writes:
            self.folder = folder.new_folder(args)
            self.name = str(self.folder.relative_to(args.runs_dir))
        else:
            self.folder = Path(os.devnull)
            self.name = ""
        if writes and not args.resume:
            self._repository = source.Repository(self.script)
        self.videos = str(self.folder / folder.VIDEOS)
        self._lock = folder.lock(self.folder) if writes else None
        rng.seed_everything(args.seed)
        self.eval_seed = rng.derive_seed(args.seed, EVAL_SEED)
        self.device = machine.choose_device(args)
        self.state: dict[str, Any] = {}
        self.id = secrets.token_hex(8)
        self._writers: list[Any] = []
        self._profile: Profile | None = None
        if writes and not quiet:
            self._check_final_steps()

    # -- the life of a run ------------------------------------------------------------------

    def resume(self, total: int, **state: Any) -> int:
        """Start the run. Returns the first iteration: 0, or where --resume continues.

        `total` is the number of iterations; `state` is everything a checkpoint must hold, by name.
        Objects are restored in place; immutable values (JAX) are replaced in `run.state`.
        """
        self.total = total
        self.state = state
        start = 0
        before = NEW_RUN
        if self.args.resume:
            with self._writing(), self._unlocked_if_refused():
                start, before = self._restore()
        size = checkpoint.nbytes(state)
        unset = self.args.checkpoints is None
        if unset:  # a resumed run has the number in its settings
            self.args.checkpoints = self._default_checkpoints(size)
        if self.args.profile and self.writes:
            self._profile = make_profile(self, start, sum(self._phases().values()))
        with self._writing():
            if not self.args.resume and self.writes:
                self._write_record()
            self._open(before)
            if self.args.resume and self.writes:  # only now: nothing refuses to resume any more
                self._note_changes(before["step"])
        if hasattr(state.get("envs"), "stop"):  # called when an environment fails
            state["envs"].stop = self._stop
        what = f"resumes at step {before['step']:,}" if start else "starts"
        self.say(f"{self.name} {what} on {machine.describe_device(self.device)}")
        if unset and size > MAX_DEFAULT_BYTES:
            self.say(
                f"no checkpoints: each could take {size / 2**30:.1f} GiB;"
                f" --checkpoints {DEFAULT_CHECKPOINTS} writes them, so that the run can be resumed"
            )
        self._warn_about_settings()
        self._warn_about_library()
        return start

    def checkpoint(self, iteration: int, **changed: Any) -> bool:
        """The end of an iteration: a checkpoint if one is due, and the profile if there is one."""
        if self._profile is None:
            return super().checkpoint(iteration, **changed)
        self._profile.pause()
        written = super().checkpoint(iteration, **changed)
        with self._writing():
            self._profile.go_on(iteration)
        return written

    def evaluate(self, agent: Any, step: int) -> None:
        """Evaluate the greedy policy if --eval-frequency says so; does not affect training."""
        if not self.evaluation_due(step) or not self.writes:
            return
        self._last_eval = step
        self._progress.note("evaluating", step)
        returns = self._play(agent, video=False)
        mean = float(np.mean(returns))
        std = float(np.std(returns))
        self._write(step, {"eval/mean_return": mean, "eval/std_return": std})
        self._progress.note(f"evaluation {mean:.1f}", step)
        if self.args.save_model and (self._best_eval is None or mean > self._best_eval):
            self._best_eval = mean
            best = self.folder / folder.BEST
            with self._writing():
                best.mkdir(exist_ok=True)
            self._save_model(best, agent)

    def play(self, agent: Any, episodes: int, epsilon: float = 0.0) -> list[float]:
        """Play episodes, a fraction `epsilon` of the actions random; does not affect training."""
        return self._play(agent, video=False, episodes=episodes, epsilon=epsilon)

    def film(self, agent: Any) -> None:
        """Record a video of one episode of the current agent; does not affect training."""
        if self.make_env is not None and self.writes:
            self._play(agent, video=True, episodes=1, videos=self.videos)

    def evaluation_due(self, step: int) -> bool:
        """Whether --eval-frequency asks for an evaluation at this step."""
        every = self.args.eval_frequency
        return bool(every) and step - self._last_eval >= every

    def finish(self, agent: Any) -> None:
        """End the run: save, evaluate and upload the model as the flags ask; close all files."""
        envs: Any = self.state.get("envs")
        if hasattr(envs, "close"):
            envs.close()
        if not self.writes:
            return self._close()
        summary = self._training_summary()
        memory = machine.peak_memory(self.device)
        summary |= {f"peak_{where}memory_mb": used for where, used in memory.items()}
        self._progress.end(self._step)
        if not summary["last_episodes"]:
            self.say("no episode ended: there is no return to report")
        if self.args.save_model:
            path = self._save_model(self.folder, agent)
            self.say(f"model: {path}")
        filmed = any(Path(self.videos).glob("*.mp4"))  # EnvPool and JAX record none in training
        needs_video = self.args.capture_video and not filmed
        if self.make_env and (self.args.save_model or needs_video):
            summary |= self._final_evaluation(agent)
        self._log_videos()
        with self._writing():
            self._close()
            folder.write_summary(self.folder, summary)
        saved = self.folder / folder.CHECKPOINT
        if saved.exists() and saved.stat().st_size > KEEP_FINISHED:
            saved.unlink()
        if self.args.upload_model:
            hub.upload(self.folder, self.args.hf_entity)
        used = ", ".join(
            f"{where.replace('gpu_', 'GPU ')}{mb:,} MB" for where, mb in memory.items()
        )
        done = f"{self.name} finished in {clock(summary['seconds'])}"
        self.say(f"{done}; peak memory {used}; metrics in {self.folder}")

    def say(self, text: str) -> None:
        """Print a line above the progress line."""
        if self.quiet:
            return
        if hasattr(self, "_progress"):
            self._progress.say(text)
        else:
            print(text, file=sys.stderr, flush=True)

    # -- starting a run ---------------------------------------------------------------------

    def _check_final_steps(self) -> None:
        """Fail before training if upload, evaluation or video would fail after it."""
        args = self.args
        if args.upload_model:
            hub.require_login()
        if self.make_env is None:
            no_env = f"{self.script.name} has no environment to evaluate in"
            require(not args.eval_frequency, f"--eval-frequency: {no_env}")
        if self.make_env and (args.save_model or args.capture_video or args.eval_frequency):
            with rng.preserved():
                self.make_env(args.env_id, args.seed, 1, False, self.videos)().close()

    @contextlib.contextmanager
    def _unlocked_if_refused(self) -> Iterator[None]:
        """Unlock the run if it cannot be resumed, so that this process may try again."""
        try:
            yield
        except BadInput:
            folder.unlock(self._lock)
            self._lock = None
            raise

    @property
    def _env_id(self) -> str:
        return getattr(self.args, "env_id", "")

    def _note_changes(self, step: int) -> None:
        """Record what differs from now on in a resumed run: its length, its code."""
        self._note_length(step)
        self._note_edited_code(step)

    def _note_edited_code(self, step: int) -> None:
        """Record that other code continues the run, so that its results do not count as one's."""
        record = folder.read_record(self.folder)
        code = source.code_of(self.script, self._env_id)
        before = folder.codes_of(record)
        if not before or code == before[-1]:
            return
        changes = [*folder.changes_of(record, "edited"), {"at_step": step, "code": code}]
        folder.write_record(self.folder, record | {"edited": changes})
        source.keep_edited(self.folder, self.script, step)
        self.say(f"note: the code has changed; the run uses the new code from step {step:,} on")

    def _warn_about_settings(self) -> None:
        """Warn of settings that are right for a short trial, but else a mistake."""
        starts = getattr(self.args, "learning_starts", 0)
        total = getattr(self.args, "total_timesteps", 0)
        if starts >= total > 0:
            self.say(f"note: --learning-starts {starts} is not reached: the agent will not learn")
        size = getattr(self.args, "batch_size", 0)
        room = getattr(self.args, "buffer_size", math.inf)
        if size > room:
            self.say(
                f"note: --batch-size {size} exceeds --buffer-size {room}: batches repeat steps"
            )

    def _open(self, before: Mapping[str, Any]) -> None:
        """Open metrics, trackers and progress line; `before` is the progress of a resumed run."""
        self._began = time.perf_counter() - before["seconds"]
        self._start_step = before["step"]
        self._start_seconds = before["seconds"]
        self._last_eval = before["last_eval"]
        self._best_eval = before["best_eval"]
        self._restarts = before["restarts"]
        if not self.csv_only:
            settings = folder.read_record(self.folder)["args"]
            if "total_timesteps" in settings:  # a resumed run may be longer than its record says
                settings["total_timesteps"] = self.args.total_timesteps
            step = before["step"]
            try:
                self._writers = open_writers(self.args, self.name, self.folder, settings, step)
            except BadInput:  # --track failed: leave no empty run behind
                if not self.args.resume:
                    for run in [self, *getattr(self, "siblings", [])]:
                        shutil.rmtree(run.folder)
                raise
        if self.writes:
            self._csv = CsvWriter(self.folder / folder.METRICS, before["csv_bytes"])
        else:
            self._csv = CsvWriter(Path(os.devnull))
        self._progress = Progress(self._phases(), before["step"], quiet=self.quiet)
        self._progress.returns.extend(before["returns"])
        self._progress.lengths.extend(before["lengths"])
        self._step = before["step"]
        if not self.quiet:
            self._catch_interrupts()

    def _phases(self) -> dict[str, int]:
        """The number of steps of each phase, by name; most scripts have one, without a name."""
        whole = {"": getattr(self.args, "total_timesteps", self.total)}
        return getattr(self.args, "phases", whole)

    def _warn_about_library(self) -> None:
        """Name the checkout that cleanrl_utils comes from, if it is not the script's."""
        if self.writes and (other := source.other_library(self.script)):
            self.say(
                f"note: cleanrl_utils is imported from {source.PROJECT}, not from {other};"
                f" PYTHONPATH={other} selects that one"
            )

    def _write_record(self, **more: Any) -> None:
        record = {
            "id": self.id,
            "args": dataclasses.asdict(self.args),
            "script": self.script.stem,
            "script_path": os.path.relpath(self.script),
            "command": [self.script.name, *sys.argv[1:]],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "tags": [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag],
            "git": self._repository.state,
            **source.keep(self.folder, self.script, self._env_id, self._repository),
            "versions": machine.versions(),
            "hardware": machine.hardware(self.device),
            **more,
        }
        processes = getattr(self.args, "world_size", 1)  # of torchrun, in the script that uses it
        if processes > 1:
            record["processes"] = processes
        steps = sum(self._phases().values())
        other = steps - getattr(self.args, "total_timesteps", steps)
        if other:
            record["steps_of_other_phases"] = other  # --total-timesteps does not count them
        folder.write_record(self.folder, record)
        path = os.environ.get("CLEANRL_FOLDER_FILE")  # tells the launcher where the run is
        if path:
            Path(path).write_text(os.path.relpath(self.folder, Path(path).parent))

    # -- evaluation -------------------------------------------------------------------------

    def _training_summary(self) -> dict[str, Any]:
        """Steps, time and last returns of training."""
        summary: dict[str, Any] = {"step": self._step, "seconds": self._seconds()}
        returns = list(self._progress.returns)
        summary["last_episodes"] = len(returns)  # at most 100
        if returns:
            summary["episodic_return"] = float(np.mean(returns))
        if self._restarts:
            summary["environment_restarts"] = self._restarts
        return summary

    def _final_evaluation(self, agent: Any) -> dict[str, Any]:
        """Evaluate the final agent and log its episodes; returns what the summary has of them."""
        lengths: list[float] = []
        returns = self._play(agent, video=self.args.capture_video, lengths=lengths)
        for episode, (value, length) in enumerate(zip(returns, lengths, strict=True)):
            row = {"eval/episodic_return": value, "eval/episodic_length": length}
            self._write(episode, row)
        self.say(f"evaluation: {evaluation.describe(returns)}")
        return {"eval_returns": returns, "eval_lengths": lengths}

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
        with rng.preserved(), evaluation.eval_mode(agent):
            return evaluation.play(
                evaluation.as_policy(agent, self.device),
                self.make_env,
                self.args.env_id,
                episodes or self.args.eval_episodes,
                self.eval_seed,
                video,
                videos or f"{self.videos}/{folder.EVALUATION}",
                epsilon,
                lengths,
            )

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
