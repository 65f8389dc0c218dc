"""What a run logs: metrics, and episodes that ended."""

import math
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from cleanrl_utils.running.metrics import CsvWriter, Progress, to_floats
from cleanrl_utils.running.stopping import Stopping


class Logs(Stopping):
    """The part of a run that writes metrics."""

    _progress: Progress
    _csv: CsvWriter
    _writers: list[Any]
    _began: float  # when training began, by the clock of this process
    _start_step: int  # of this process: later than 0 in a resumed run
    _start_seconds: float

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

    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    def _speed(self, step: int) -> float:
        return (step - self._start_step) / max(self._seconds() - self._start_seconds, 1e-9)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        try:  # as self.writing(), which would cost more than the writing itself
            self._csv.write(step, self._seconds(), values)
            for writer in self._writers:
                writer.write(step, values)
        except OSError as error:
            self._stop_writing(error)
