"""Checkpoints of a run: when to write one, what it holds, how to resume from it."""

from pathlib import Path
from typing import Any

import numpy as np

from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running import checkpoint, folder, rng
from cleanrl_utils.running.logs import Logs
from cleanrl_utils.running.metrics import require_rows
from cleanrl_utils.running.stored import has_type, one_line

DEFAULT_CHECKPOINTS = 10
STEPS_BETWEEN_RESTARTS = 50_000  # per environment, if a checkpoint restarts the environments
KEEP_FINISHED = 64 * 2**20  # bytes: larger checkpoints are deleted when the run finishes
MAX_DEFAULT_BYTES = 2**30  # larger checkpoints are written only if --checkpoints asks for them
# state that may hold NaN: rewards and observations, or slots that are not filled yet
NOT_PARAMETERS = {"envs", "episodes", "memory", "replay", "random_streams", "recent_returns"}
# the metadata of a checkpoint, with types
METADATA: dict[str, Any] = {
    "iteration": int,
    "step": int,
    "seconds": float,
    "csv_bytes": int,
    "returns": list[float],
    "lengths": list[float],
    "last_eval": int,
    "best_eval": float | None,
    "restarts": int,
}
NEW_RUN: dict[str, Any] = {  # the progress that a new run starts from
    "seconds": 0.0,
    "csv_bytes": None,
    "step": 0,
    "returns": [],
    "lengths": [],
    "last_eval": 0,
    "best_eval": None,
    "restarts": 0,
}


class Checkpoints(Logs):
    """The part of a run that writes and loads checkpoints."""

    args: Any
    writes: bool
    id: str  # of the run: a checkpoint with another id is refused
    total: int  # number of iterations
    state: dict[str, Any]
    _last_eval: int
    _best_eval: float | None
    _restarts: int

    def checkpoint(self, iteration: int, **changed: Any) -> bool:
        """Write a checkpoint if one is due after this many iterations; True if it was written.

        It does not affect training, except that EnvPool's environments restart. `changed` replaces
        immutable state.
        """
        self.state.update(changed)
        count = self.args.checkpoints
        due = iteration * count // self.total > (iteration - 1) * count // self.total
        if not due:
            return False
        self._save(iteration)
        return True

    def _default_checkpoints(self, size: int) -> int:
        if size > MAX_DEFAULT_BYTES:
            return 0
        envs = self.state.get("envs")
        if getattr(envs, "restarts", False):
            steps = self.args.total_timesteps // envs.num_envs  # type: ignore[union-attr]
            return min(DEFAULT_CHECKPOINTS, steps // STEPS_BETWEEN_RESTARTS)
        return DEFAULT_CHECKPOINTS

    def _metadata(self) -> dict[str, Any]:
        """The progress of the run, as stored in a checkpoint."""
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
        if not self.writes:  # another process writes the file, with the states of all
            return checkpoint.gather(state)
        with self._writing():
            metadata = {"run": self.id, "script": self.script.stem, "iteration": iteration}
            finite = checkpoint.save(
                self.folder / folder.CHECKPOINT,
                state,
                metadata | self._metadata(),
                must_be_finite={name for name in state if self._has_parameters(name)},
            )
        if not finite:
            self._stop(f"parameters are not finite at step {self._step:,}")

    def _has_parameters(self, name: str) -> bool:
        """Whether NaN in this state is an error; in arrays of the loop it marks open episodes."""
        return name not in NOT_PARAMETERS and not isinstance(self.state.get(name), np.ndarray)

    def _restore(self) -> tuple[int, dict[str, Any]]:
        """Restore the last checkpoint; returns the first iteration and the progress until then."""
        path = self.folder / folder.CHECKPOINT
        where = f"--resume {self.folder}"
        record = folder.read_record(self.folder, "--resume")
        old = record["args"].get("total_timesteps")
        longer = old is not None and self.args.total_timesteps > old
        finished = folder.is_finished(self.folder)
        hint = f"a --total-timesteps above {old} continues it"
        require(longer or not finished, f"{where}: the run is finished; {hint}")
        if self.writes:
            folder.remove_partial_files(self.folder)
        self.id = record.get("id", "")
        if not path.exists():
            # A run that was killed before its first checkpoint starts again from the beginning.
            never = f"{where}: the run has no checkpoints (--checkpoints 0); start a new run"
            require(self.args.checkpoints != 0, never)
            large = f"those above {KEEP_FINISHED >> 20} MiB are deleted when a run finishes"
            require(not finished, f"{where}: it has no checkpoint: {large}; start a new run")
            return 0, NEW_RUN
        return self._load(path)

    def _load(self, path: Path) -> tuple[int, dict[str, Any]]:
        metadata, saved = checkpoint.load(path)
        old = f"{path}: written by an older version of this project; start a new run"
        require({"run", "restarts", "best_eval"} <= set(metadata), old)
        require(metadata["run"] == self.id, f"{path}: the checkpoint of another run")
        wrong = [name for name, kind in METADATA.items() if not has_type(metadata.get(name), kind)]
        require(not wrong, f"{path}: its metadata has wrong values ({', '.join(wrong)})")
        iteration = metadata["iteration"]
        within = 0 <= iteration <= self.total
        require(within, f"{path}: of iteration {iteration}, but the run has {self.total}")
        if self.writes:
            require_rows(self.folder / folder.METRICS, metadata["csv_bytes"])
        names = {*self.state, "random_streams"}
        require(set(saved) == names, f"{path}: does not hold the state of this script")
        try:
            for name, target in self.state.items():
                self.state[name] = checkpoint.restore(target, saved[name])
            rng.set_state(saved["random_streams"])
        except Exception as error:  # arrays of other shapes, or content that we did not write
            raise BadInput(f"{path}: does not fit this run ({one_line(error)})") from None
        return iteration, metadata

    def _note_length(self, step: int) -> None:
        """Record that the run, resumed at this step, is longer than before."""
        record = folder.read_record(self.folder)
        old = record["args"].get("total_timesteps")
        if old is None or self.args.total_timesteps <= old:
            return
        new = self.args.total_timesteps
        record["args"]["total_timesteps"] = new
        if step:
            record.setdefault("lengthened", []).append({"at_step": step, "from": old, "to": new})
            self.say(
                f"--total-timesteps was {old:,}, is now {new:,}: from here on schedules"
                " (learning rate, exploration) follow the new length"
            )
        else:  # it begins again: an ordinary run of the new length
            words = folder.drop_flags(record["command"], {"total_timesteps"})
            record["command"] = [*words, "--total-timesteps", str(new)]
        folder.write_record(self.folder, record)
        folder.remove_summary(self.folder)
