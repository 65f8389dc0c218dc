"""Logging of a run: metrics and finished episodes."""

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
    _began: float  # time.perf_counter() when training began, less the time before a resume
    _start_step: int  # first step of this process: above 0 in a resumed run
    _start_seconds: float

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log scalars by tag; a loss that is not finite ends the run."""
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
        """Log the episodes that ended in this step of a vector environment.

        `whose` is a prefix of the tags, e.g. teacher/ for episodes the agent did not play.
        `average`: see log_episode.
        """
        if "_episode" in infos:
            for i in np.flatnonzero(infos["_episode"]):
                episodic_return = infos["episode"]["r"][i]
                length = infos["episode"]["l"][i]
                self.log_episode(episodic_return, length, step, whose=whose, average=average)

    def log_episode(
        self,
        episodic_return: float,
        length: int,
        step: int,
        suffix: str = "",
        average: int = 0,
        whose: str = "",
    ) -> None:
        """Log one episode and, unless `average` is 0, the means of the last `average` episodes."""
        self._step = step
        if not suffix and not whose:  # not of a further player, nor of a teacher
            self._progress.returns.append(float(episodic_return))
        if average:
            self._progress.lengths.append(float(length))
            for name in ("returns", "lengths"):
                recent = list(getattr(self._progress, name))[-average:]
                tag = f"charts/avg_episodic_{name.removesuffix('s')}{suffix}"
                self._write(step, {tag: sum(recent) / len(recent)})
        row = {
            f"charts/{whose}episodic_return{suffix}": float(episodic_return),
            f"charts/{whose}episodic_length{suffix}": float(length),
        }
        self._write(step, row)
        self._progress.update(step)

    def log_rollout(self, returns: Any, lengths: Any, step: int, average: int = 0) -> None:
        """Log the episodes of a rollout: (num_steps, num_envs) returns, NaN where no episode ended.

        `step` is the last step of the rollout.
        """
        returns = np.asarray(returns)
        lengths = np.asarray(lengths)
        num_steps, num_envs = returns.shape
        ended = np.flatnonzero(~np.isnan(returns))
        steps = (step - (num_steps - 1 - ended // num_envs) * num_envs).tolist()
        ended_returns = returns.ravel()[ended].astype(float).tolist()
        ended_lengths = lengths.ravel()[ended].astype(float).tolist()
        if average:
            for episode in zip(ended_returns, ended_lengths, steps, strict=True):
                self.log_episode(*episode, average=average)
            return
        self._progress.returns.extend(ended_returns)
        columns = {
            "charts/episodic_return": ended_returns,
            "charts/episodic_length": ended_lengths,
        }
        self.log_columns(steps, columns)

    def log_columns(self, steps: Sequence[int], columns: Mapping[str, Sequence[float]]) -> None:
        """Log many values per tag at once, each with its step, in the order of steps.

        TensorBoard gets the mean of the values of one step, as it shows one value per step.
        """
        with self._writing():
            for tag, values in columns.items():
                self._csv.write_column(steps, self._seconds(), tag, values)
            if not self._writers:
                return
            rows = zip(steps, *columns.values(), strict=True)
            for step, group in groupby(rows, lambda row: row[0]):
                _, *values_by_tag = zip(*group, strict=True)
                means = [sum(values) / len(values) for values in values_by_tag]
                for writer in self._writers:
                    writer.write(step, dict(zip(columns, means, strict=True)))

    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    def _speed(self, step: int) -> float:
        return (step - self._start_step) / max(self._seconds() - self._start_seconds, 1e-9)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        try:  # like self._writing(), which would take longer than the writing itself
            self._csv.write(step, self._seconds(), values)
            for writer in self._writers:
                writer.write(step, values)
        except OSError as error:
            self._stop_writing(error)
