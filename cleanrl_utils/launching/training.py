"""A run that the tuner starts and watches while it trains."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cleanrl_utils.launching import jobs
from cleanrl_utils.launching.jobs import Process
from cleanrl_utils.running import folder as run_folder
from cleanrl_utils.running.folder import Metrics
from cleanrl_utils.running.settings import flag


class RunFailed(Exception):
    """A run that failed or ignored a setting, so that it has no score."""


class Training:
    """A run of a script with these settings, in the folder `where`."""

    def __init__(
        self,
        script: str,
        params: Mapping[str, Any],
        env_id: str,
        seed: int,
        where: Path,
        metric: str,
        more_words: list[str] | None = None,
        more_env: Mapping[str, str] | None = None,
    ):
        self.name = f"{env_id}, seed {seed}"
        self.asked = {**params, "env-id": env_id, "seed": seed}
        self.metric = metric
        self.metrics: Metrics | None = None
        self.values: list[tuple[int, float]] = []  # (step, value) of the metric
        self.last_step = 0
        where.mkdir(parents=True, exist_ok=True)
        stem = f"{env_id.split(':')[-1].replace('/', '-')}__{seed}"
        self.place = (where / f"{stem}.folder").resolve()  # holds the path of the run's folder
        self.place.unlink(missing_ok=True)  # from an earlier run of this name
        self.log = self.place.with_suffix(".txt")
        words = [sys.executable, script, *as_flags(params), "--env-id", env_id]
        words += ["--seed", str(seed), "--runs-dir", str(where), *(more_words or [])]
        env = jobs.environment() | {"CLEANRL_FOLDER_FILE": str(self.place)} | dict(more_env or {})
        self.process = Process(words, env, self.log)

    def look(self) -> bool:
        """Read the metrics logged since the last call; returns whether it still trains."""
        ended = self.process.poll() is not None  # before reading, so that nothing is missed
        if self.metrics is None and self.place.exists() and self.place.read_text():
            folder = self.place.parent / self.place.read_text()
            check_settings(self.asked, folder)
            self.metrics = Metrics(folder)
        for step, _, tag, value in self.metrics.new() if self.metrics else ():
            if not tag.startswith("eval/"):  # its steps are episodes
                self.last_step = step
            if tag == self.metric:
                self.values.append((step, value))
        return not ended

    @property
    def total(self) -> int:
        """Its total timesteps; 0 before it has started."""
        return self.metrics.total if self.metrics else 0

    def values_until(self, step: float) -> list[float]:
        return [value for at, value in self.values if at <= step]

    def result(self) -> list[float]:
        """All values of the metric of an ended run; raises RunFailed if there are none."""
        status = self.process.poll()
        if status != 0:
            last_line = jobs.tail(self.log, 1).strip()
            how = f"ended with status {status}: {last_line}"
            raise RunFailed(f"{self.name}, {how}; see {self.log}")
        if not self.values:
            no_episode = ""
            if self.metric.endswith("episodic_return"):
                no_episode = " (no episode finished)"
            raise RunFailed(f"{self.name}, logged no {self.metric}{no_episode}; see {self.log}")
        return [value for _, value in self.values]

    def stop(self) -> None:
        jobs.stop([self.process])


def as_flags(params: Mapping[str, Any]) -> list[str]:
    """Settings as flags: {"learning-rate": 0.1} becomes --learning-rate=0.1."""
    words = []
    for name, value in params.items():
        if isinstance(value, list | tuple):
            words += [flag(name), *map(str, value)]
        else:
            words.append(f"{flag(name)}={value}")
    return words


def check_settings(params: Mapping[str, Any], folder: Path) -> None:
    """Raise RunFailed unless the run uses every setting that was asked for."""
    record = run_folder.read_json(folder / run_folder.RECORD) or {}
    recorded = record.get("args", {})
    for name, value in params.items():
        found = recorded.get(name.replace("-", "_"), "nothing")
        same = list(found) == list(value) if isinstance(value, list | tuple) else found == value
        if not same:
            path = folder / run_folder.RECORD
            raise RunFailed(f"{flag(name)} should be {value!r}, but is {found!r}; see {path}")


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
