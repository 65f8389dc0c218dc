"""Jobs, the runs that benchmark and tuner start: command, process, status and progress.

A job is a command with an environment, a seed and the code that it runs: if the script or a module
of this project that it imports has changed, it is another job. RUNS_DIR/.benchmark/NAME/ holds
`folder` (the path of the run's folder, written by the run itself), `log.txt` (its output),
`job.json` (its status and process), and `lock`, held as long as its process lives.
"""

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running import folder as run_folder
from cleanrl_utils.running.folder import Metrics
from cleanrl_utils.running.source import find_module, fingerprint, modules_of

RETURN = "charts/episodic_return"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
BAD_INPUT = 2  # exit status for bad input


def split(flag: str, text: str) -> list[str]:
    """Split the command line in the value of a flag into words."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadInput(f"{flag}: cannot be read ({error})") from None


def refuse_flag(words: list[str], flag: str, why: str) -> None:
    """Stop if a command has a flag that the tool would silently replace."""
    has_it = any(word.partition("=")[0].replace("_", "-") == flag for word in words)
    require(not has_it, f"--command: leave out {flag}, {why}")


@dataclass
class Command:
    """A command line, prepared to run on this machine."""

    typed: str
    words: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    """variables before the command: MUJOCO_GL=egl python ..."""
    notes: list[str] = field(default_factory=list)
    """what was changed in the command, for the user"""
    codes: dict[tuple[str, ...], str] = field(default_factory=dict)
    """the code by modules of the environment, once it was read: that takes 0.1 seconds"""

    def __post_init__(self) -> None:
        words = split("--command", self.typed)
        while words and "=" in words[0] and words[0].partition("=")[0].isidentifier():
            name, _, value = words.pop(0).partition("=")
            self.variables[name] = value
        if words[:2] in (["poetry", "run"], ["uv", "run"]) and not shutil.which(words[0]):
            self.notes.append(f"{words[0]} is not installed: '{words[0]} run' left out")
            words = words[2:]
        require(bool(words), "--command needs a command, e.g. 'python cleanrl/ppo.py'")
        if words[0] in ("python", "python3"):  # the Python that has our packages
            words[0] = sys.executable
        require(
            shutil.which(words[0]) is not None,
            f"--command: the program {words[0]} is not installed",
        )
        self.words = words

    @property
    def path(self) -> Path:
        """The path of the script, or of the program if it is no Python script."""
        scripts = [word for word in self.words if word.endswith(".py")]
        if "-m" in self.words[:-1] and not scripts:
            module = self.words[self.words.index("-m") + 1]
            scripts = [str(path) for path in find_module(module, Path.cwd())[-1:]]
        return Path(scripts[0] if scripts else self.words[0])

    @property
    def script(self) -> str:
        """The name of the script without .py, or of the program."""
        return self.path.stem

    @property
    def seeds_per_run(self) -> str:
        """The value of --num-seeds in the command: scripts in JAX can train several at once."""
        return self.value("--num-seeds", "1")

    def require_script(self) -> None:
        """Stop if the command names a Python script that does not exist."""
        found = self.path.suffix != ".py" or self.path.is_file()
        require(found, f"--command: {self.path}: no such file")

    def code(self, env_id: str) -> str:
        """A hash of the Python code that this command runs; empty if it is no Python script."""
        modules = tuple(modules_of(env_id))
        if modules not in self.codes:
            is_script = self.path.suffix == ".py"
            self.codes[modules] = fingerprint(self.path, modules) if is_script else ""
        return self.codes[modules]

    def forget_code(self) -> None:
        """Read the code again when it is next needed: it may have changed."""
        self.codes.clear()

    @property
    def identity(self) -> str:
        """The command without `poetry run` or `uv run`: equal for equal commands."""
        words = shlex.split(self.typed)
        if words[:2] in (["poetry", "run"], ["uv", "run"]):
            words = words[2:]
        return shlex.join(words)

    def value(self, flag: str, default: str) -> str:
        """The value of a flag in the command, written --flag value or --flag=value."""
        for at, word in enumerate(self.words):
            name, equals, value = word.partition("=")
            if name.replace("_", "-") != flag:
                continue
            if equals:
                return value
            return self.words[at + 1] if at + 1 < len(self.words) else default
        return default


@dataclass
class Job:
    """One run of a command: its environment, seed and number in the benchmark."""

    command: Command
    env_id: str | None
    seed: int
    number: int = 0

    def __post_init__(self) -> None:
        env_id = self.env_id or self.command.value("--env-id", "")
        self.name = f"{self.command.script}__{self.seed}"
        if env_id:
            env_name = env_id.split(":")[-1].replace("/", "-")
            self.name = f"{env_name}__{self.name}"
        identity = json.dumps([self.command.identity, self.env_id, self.seed])
        digest = hashlib.sha256(identity.encode()).hexdigest()
        self.key_without_code = f"{self.name}__{digest[:8]}"
        self.update_code()

    def update_code(self) -> None:
        """Make this the job of the code as it is now."""
        self.code = self.current_code()
        self.key = self.key_without_code
        if self.code:
            self.key += f"__{self.code[:8]}"
        runs_dir = Path(self.command.value("--runs-dir", "runs"))
        self.home = runs_dir / ".benchmark" / self.key
        self.log = self.home / "log.txt"

    def current_code(self) -> str:
        return self.command.code(self.env_id or self.command.value("--env-id", ""))

    def has_other_code(self) -> bool:
        """Whether the code has changed since this job was made."""
        self.command.forget_code()
        return self.code != self.current_code()

    @property
    def folder(self) -> Path | None:
        """The folder of its run; None before it has started."""
        try:
            folder = Path(os.path.normpath(self.home / (self.home / "folder").read_text()))
        except OSError:
            return None
        return folder if run_folder.has_record(folder) else None

    def older(self, homes: Iterable[Path]) -> list["Job"]:
        """The jobs of these folders, of this one with other code, that were started."""
        found = []
        for home in homes:
            if home != self.home:
                old = Job(self.command, self.env_id, self.seed, self.number)
                old.home = home
                if old.folder is not None or old.finished:
                    found.append(old)
        return found

    @property
    def finished(self) -> bool:
        """Whether its run is finished."""
        folder = self.folder
        if folder is not None:
            return run_folder.is_finished(folder)
        if (self.home / "folder").exists():  # the run's folder was deleted
            return False
        return self.note("status") == "finished"  # not a script of this project

    def words(self) -> list[str]:
        """The command line to run now: of a new run, or to resume an interrupted one."""
        words = [*self.command.words]
        if self.env_id is not None:
            words += ["--env-id", self.env_id]
        words += ["--seed", str(self.seed)]
        folder = self.folder
        if folder and run_folder.can_resume(folder):
            words += ["--resume", str(folder)]
        return words

    def note(self, key: str, default: Any = None) -> Any:
        """Read a value of job.json."""
        try:
            return json.loads((self.home / "job.json").read_text()).get(key, default)
        except (OSError, ValueError):
            return default

    def write(self, **notes: Any) -> None:
        """Write values into job.json."""
        path = self.home / "job.json"
        self.home.mkdir(parents=True, exist_ok=True)
        old = json.loads(path.read_text()) if path.exists() else {}
        job = {
            "command": self.command.identity,
            "env_id": self.env_id,
            "seed": self.seed,
            "code": self.code,
        }
        run_folder.write_json(path, {**old, **job, **notes})

    def forget(self) -> None:
        """Start from the beginning next time. The run's own folder is kept."""
        for name in ("folder", "job.json", "log.txt"):
            (self.home / name).unlink(missing_ok=True)

    def claim(self) -> int | None:
        """Lock this job; its process inherits the lock. None if another process holds it."""
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.home / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise BadInput(f"{self.home}: cannot be written ({error.strerror})") from None
        if not run_folder.try_lock(lock):
            os.close(lock)
            return None
        return lock

    def summary(self) -> dict[str, Any]:
        """The summary of its finished run."""
        return run_folder.read_summary(self.folder or self.home)

    def tags(self) -> list[str]:
        """The tags of its run; empty before it has started."""
        record = run_folder.read_json(self.folder / run_folder.RECORD) if self.folder else None
        return (record or {}).get("tags", [])

    def tail(self, lines: int = 12) -> str:
        return tail(self.log, lines)

    def silence(self) -> float:
        """Seconds since the run last printed or logged anything."""
        paths = [self.home / "job.json", self.log]
        folder = self.folder
        if folder:
            paths.append(folder / run_folder.METRICS)
        times = [path.stat().st_mtime for path in paths if path.exists()]
        return time.time() - max(times) if times else 0.0


def homes_by_job(folder: Path) -> dict[str, list[Path]]:
    """The folders in RUNS_DIR/.benchmark by the job's key without code."""
    found: dict[str, list[Path]] = {}
    for home in sorted(folder.iterdir()) if folder.is_dir() else []:
        for key in (home.name, home.name.rpartition("__")[0]):
            found.setdefault(key, []).append(home)
    return found


def tail(path: Path, lines: int = 12) -> str:
    """The last lines of a log that are not empty."""
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 16384))
        text = file.read().decode(errors="replace")
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


def environment(command: Command | None = None, tags: list[str] | None = None) -> dict[str, str]:
    """The environment variables of a run: one thread, the path of this project, the tags."""
    env = dict(os.environ)
    for name in THREADS:
        env.setdefault(name, "1")
    env.setdefault("PYTHONUNBUFFERED", "1")  # so that a killed run leaves a complete log
    root = str(Path(__file__).resolve().parent.parent.parent)
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths:
        paths.append(root)
    env["PYTHONPATH"] = os.pathsep.join(paths)
    all_tags = [tag for tag in env.get("WANDB_TAGS", "").split(",") if tag] + (tags or [])
    if all_tags:
        env["WANDB_TAGS"] = ",".join(dict.fromkeys(all_tags))
    return env | (command.variables if command else {})


class Process:
    """A process with a session of its own, so that its children can be stopped with it."""

    def __init__(
        self, words: list[str], env: Mapping[str, str], log: Path, lock: int | None = None
    ):
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a") as out:
            out.write(f"$ {shlex.join(words)}\n")
            out.flush()
            # The process inherits the lock: if it outlives us, the job stays locked.
            self.popen = subprocess.Popen(
                words,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,) if lock is not None and os.name == "posix" else (),
            )
        if lock is not None:
            os.close(lock)

    def poll(self) -> int | None:
        return self.popen.poll()

    def signal(self, number: int) -> None:
        if self.popen.poll() is not None:  # its id may belong to another process by now
            return
        try:
            if os.name == "posix":
                os.killpg(self.popen.pid, number)
            else:
                self.popen.terminate()
        except ProcessLookupError:
            pass


def stop(processes: list[Process], patience: float = 10.0) -> None:
    """End processes by SIGTERM, and by SIGKILL after `patience` seconds."""
    for process in processes:
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + patience
    for process in processes:
        try:
            process.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.signal(getattr(signal, "SIGKILL", signal.SIGTERM))
            process.popen.wait()


class Progress:
    """The progress of a run: fraction done, mean return, time left."""

    def __init__(self, folder: Path):
        self.metrics = Metrics(folder)
        self.returns: deque[float] = deque(maxlen=100)
        self.step = 0
        self.first: tuple[int, float] | None = None
        self.last = (0, 0.0)

    def update(self) -> None:
        for step, seconds, tag, value in self.metrics.new():
            if tag.startswith("eval/"):  # its steps are episodes
                continue
            self.first = self.first or (step, seconds)
            self.last = (step, seconds)
            if tag.startswith(RETURN):
                self.returns.append(value)

    @property
    def done(self) -> float | None:
        return min(1.0, self.last[0] / self.metrics.total) if self.metrics.total else None

    @property
    def mean_return(self) -> float | None:
        return sum(self.returns) / len(self.returns) if self.returns else None

    @property
    def seconds_left(self) -> float | None:
        if self.first is None or not self.metrics.total or self.last[0] <= self.first[0]:
            return None
        speed = (self.last[0] - self.first[0]) / max(self.last[1] - self.first[1], 1e-9)
        return max(0.0, (self.metrics.total - self.last[0]) / speed)
