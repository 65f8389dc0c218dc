"""A run that a tool starts and watches while it trains."""

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
    """A run did not do what was asked of it: it has no score."""


class Training:
    """The run of a script with these settings, below the folder `where`."""

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
        self.place = (where / f"{stem}.folder").resolve()  # tells where the run's folder is
        self.place.unlink(missing_ok=True)  # of an earlier run of this name
        self.log = self.place.with_suffix(".txt")
        words = [sys.executable, script, *as_flags(params), "--env-id", env_id]
        words += ["--seed", str(seed), "--runs-dir", str(where), *(more_words or [])]
        env = jobs.environment() | {"CLEANRL_FOLDER_FILE": str(self.place)} | dict(more_env or {})
        self.process = Process(words, env, self.log)

    def look(self) -> bool:
        """Read what it has logged since the last look; whether it still trains."""
        ended = self.process.poll() is not None  # asked first: then all it wrote is read
        if self.metrics is None and self.place.exists() and self.place.read_text():
            folder = self.place.parent / self.place.read_text()
            check_settings(self.asked, folder)
            self.metrics = Metrics(folder)
        for step, _, tag, value in self.metrics.new() if self.metrics else ():
            if not tag.startswith("eval/"):  # which counts episodes, not steps
                self.last_step = step
            if tag == self.metric:
                self.values.append((step, value))
        return not ended

    @property
    def total(self) -> int:
        """Its total timesteps; 0 until they are known."""
        return self.metrics.total if self.metrics else 0

    def values_until(self, step: float) -> list[float]:
        return [value for at, value in self.values if at <= step]

    def result(self) -> list[float]:
        """All values of the metric, once it has ended; RunFailed if it has none."""
        status = self.process.poll()
        if status != 0:
            last_line = jobs.tail(self.log, 1).strip()
            how = f"ended with status {status}: {last_line}"
            raise RunFailed(f"{self.name}, {how}; see {self.log}")
        if not self.values:
            no_episode = " (no episode finished)" * self.metric.endswith("episodic_return")
            raise RunFailed(f"{self.name}, logged no {self.metric}{no_episode}; see {self.log}")
        return [value for _, value in self.values]

    def stop(self) -> None:
        jobs.stop([self.process])


def as_flags(params: Mapping[str, Any]) -> list[str]:
    """Settings as words of a command line: {"learning-rate": 0.1} as --learning-rate=0.1."""
    words = []
    for name, value in params.items():
        if isinstance(value, list | tuple):
            words += [flag(name), *map(str, value)]
        else:
            words.append(f"{flag(name)}={value}")
    return words


def check_settings(params: Mapping[str, Any], folder: Path) -> None:
    """Every value that was asked for must be the one the run says it uses."""
    record = run_folder.read_json(folder / run_folder.RECORD) or {}
    recorded = record.get("args", {})
    for name, value in params.items():
        found = recorded.get(name.replace("-", "_"), "nothing")
        same = list(found) == list(value) if isinstance(value, list | tuple) else found == value
        if not same:
            path = folder / run_folder.RECORD
            raise RunFailed(f"{flag(name)} was to be {value!r}, is {found!r}; see {path}")
