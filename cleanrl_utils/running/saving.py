"""Checkpoints of a run: when they are due, what they hold, how a run continues from one."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running import checkpoint, folder, rng
from cleanrl_utils.running.logs import Logs
from cleanrl_utils.running.stored import fits, one_line

DEFAULT_CHECKPOINTS = 10
STEPS_BETWEEN_RESTARTS = 50_000  # of each environment, where a checkpoint restarts them
LARGEST_BY_DEFAULT = 2**30  # bytes: larger checkpoints are written only when asked for
# state that may hold what environments give, or NaN where there is nothing yet
NOT_PARAMETERS = {"envs", "memory", "replay", "random_streams", "recent_returns"}
# what a checkpoint says about its run
ABOUT: dict[str, Any] = {
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


class Checkpoints(Logs):
    """The part of a run that writes and reads checkpoints."""

    args: Any
    writes: bool
    id: str  # of the run: a checkpoint of another one is refused
    total: int  # number of iterations
    state: dict[str, Any]
    _last_eval: int
    _best_eval: float | None
    _restarts: int

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

    def _default_checkpoints(self, size: int) -> int:
        if size > LARGEST_BY_DEFAULT:
            return 0
        envs = self.state.get("envs")
        if getattr(envs, "restarts", False):
            steps = self.args.total_timesteps // envs.num_envs  # type: ignore[union-attr]
            return min(DEFAULT_CHECKPOINTS, steps // STEPS_BETWEEN_RESTARTS)
        return DEFAULT_CHECKPOINTS

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
        odd = [name for name, kind in ABOUT.items() if not fits(about.get(name), kind)]
        require(not odd, f"{path}: what it says of its run cannot be used ({', '.join(odd)})")
        within = 0 <= about["iteration"] <= self.total
        require(within, f"{path}: of iteration {about['iteration']}, the run has {self.total}")
        require(
            set(saved) == {*self.state, "random_streams"},
            f"{path}: holds other state than this script's",
        )
        try:
            for name, target in self.state.items():
                self.state[name] = checkpoint.restore(target, saved[name])
            rng.set_state(saved["random_streams"])
        except Exception as error:  # arrays of other shapes, or what no version of ours has written
            raise BadInput(f"{path}: does not fit this run ({one_line(error)})") from None
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
