"""The folder of a run: the names of its files, and the functions that read and write them.

    run.json                the record: settings, command, commit, packages, hardware
    finished.json           the summary, written last: a run that has it is finished
    metrics.csv             every logged value: step, seconds, tag, value
    checkpoint.safetensors  what --resume continues from
    NAME.cleanrl_model      the trained model, with --save-model
    SCRIPT.py               the script as it ran
    changes.diff            `git diff HEAD` of its repository, if files were changed
    videos/                 videos of training and evaluation
    profile/                the trace of --profile

Nothing else opens run.json, finished.json or metrics.csv.
"""

import atexit
import errno
import io
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running.stored import is_file_name

try:
    import fcntl
except ImportError:  # Windows: no locks, so do not start one run or job twice at the same time
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import pandas as pd

RECORD = "run.json"
SUMMARY = "finished.json"
METRICS = "metrics.csv"
CHECKPOINT = "checkpoint.safetensors"
MODEL = ".cleanrl_model"
CHANGES = "changes.diff"
VIDEOS = "videos"
EVALUATION = "evaluation"  # below videos/
BEST = "best"  # holds the model with the best evaluation so far

SETTINGS = {"exp_name": str, "env_id": str, "seed": int}  # settings that every tool relies on


# -- a new folder ------------------------------------------------------------------------------


def new_folder(args: Any) -> Path:
    """Make a new folder, unique even if two runs start in the same second; removed if unused."""
    env_id = getattr(args, "env_id", "env").split(":")[-1]
    stamp = int(time.time())
    base = Path(args.runs_dir) / f"{env_id}__{args.exp_name}__{args.seed}__{stamp}"
    names_a_folder = "\0" not in str(base)
    require(names_a_folder, "--runs-dir, --env-id, --exp-name: null characters are not allowed")
    new_parents = [folder for folder in base.parents if not os.path.exists(folder)]
    for attempt in range(1000):
        folder = base if attempt == 0 else base.with_name(f"{base.name}_{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if folder.is_dir():
                continue
            raise BadInput(f"--runs-dir {args.runs_dir}: is a file, not a folder") from None
        except OSError as error:
            remove_if_empty(new_parents)
            what = "cannot write there"
            if error.errno == errno.ENAMETOOLONG:
                what = "with --env-id and --exp-name, which name the run's folder"
            raise BadInput(f"--runs-dir {args.runs_dir}: {what} ({error.strerror})") from None
        atexit.register(remove_if_empty, [folder, *new_parents])
        return folder
    raise BadInput(f"--runs-dir {args.runs_dir}: too many runs of this name in one second")


def remove_if_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):  # it does not exist
                return


# -- writing -----------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """Write a whole file or none: a new file is flushed to disk, then renamed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_record(folder: Path, record: dict[str, Any]) -> None:
    write_json(folder / RECORD, record)


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    write_json(folder / SUMMARY, summary)


def remove_summary(folder: Path) -> None:
    """Mark a run as not finished."""
    (folder / SUMMARY).unlink(missing_ok=True)


def remove_partial_files(folder: Path) -> None:
    """Remove files that a killed process had not finished writing."""
    for path in folder.glob(".*.partial"):
        path.unlink(missing_ok=True)


def lock(folder: Path) -> int | None:
    """Lock the folder, so that only one process trains this run."""
    if fcntl is None:
        return None
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise BadInput(f"{folder}: cannot be opened ({error.strerror})") from None
    if not try_lock(handle):
        os.close(handle)
        raise BadInput(f"--resume {folder}: another process is training this run")
    return handle


def try_lock(handle: int) -> bool:
    """Lock an open file or folder; False if another process holds it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # Lustre mounted without flock, NFS without lockd: no locks, as on Windows
        pass
    return True


def unlock(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)


# -- the record ----------------------------------------------------------------------------------


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if it cannot be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def is_record(record: Any) -> bool:
    """Whether this is the content of a run.json."""
    if not isinstance(record, dict) or not isinstance(record.get("args"), dict):
        return False
    command = record.get("command")
    if not is_file_name(record.get("script")) or not isinstance(command, list):
        return False
    args = record["args"]
    typed = all(isinstance(args[name], kind) for name, kind in SETTINGS.items() if name in args)
    named = {"exp_name", "seed"} <= set(args)
    return typed and named and all(isinstance(word, str) for word in command)


def find_record(folder: str | Path) -> dict[str, Any] | None:
    """The record of a run; None if the folder has no readable record."""
    record = read_json(Path(folder) / RECORD)
    return record if is_record(record) else None


def read_record(folder: str | Path, flag: str = "") -> dict[str, Any]:
    """The record of a run; without one, an error that names `flag`."""
    record = find_record(folder)
    if record is None:
        what = f"{flag} {folder}" if flag else str(folder)
        raise BadInput(f"{what}: not the folder of a run (no readable {RECORD})")
    return record


def find_records(where: str | Path) -> list[tuple[Path, dict[str, Any]]]:
    """(folder, record) of every run at or below a folder, oldest first.

    Folders whose names begin with a dot, such as those of the tuner's trials, are skipped.
    """
    found = []
    for path in Path(where).rglob(RECORD):
        if any(part.startswith(".") for part in path.relative_to(where).parts):
            continue
        record = read_json(path)
        require(record is not None, f"{path}: not readable as JSON")
        if is_record(record):
            found.append((path.parent, record))
    return sorted(found, key=lambda run: by_start(*run))


def by_start(folder: Path, record: dict[str, Any]) -> tuple[str, str]:
    """A key that sorts runs, oldest first."""
    return str(record.get("started", "")), folder.name


def recorded_script(record: dict[str, Any]) -> str:
    """The path of the script in the repository, wherever it was called from."""
    known = record.get("path_in_repository")
    if isinstance(known, str):
        return known
    # not committed, or an older record: as it was called
    path = Path(str(record.get("script_path") or f"cleanrl/{record['script']}.py"))
    outside = path.is_absolute() or ".." in path.parts
    return f"cleanrl/{path.name}" if outside and path.parent.name == "cleanrl" else str(path)


def starter(record: dict[str, Any], python: str = "python") -> list[str]:
    """The words that start the script: python, or torchrun for a run of several processes."""
    processes = record.get("processes", 1)
    if not isinstance(processes, int) or processes < 2:
        return [python]
    torchrun = str(Path(python).with_name("torchrun")) if "/" in python else "torchrun"
    return [torchrun, "--standalone", f"--nproc_per_node={processes}"]


def drop_flags(words: list[str], names: set[str]) -> list[str]:
    """The words of a command line without some flags and their values."""
    kept = []
    skip = False
    for word in words:
        if re.match(r"--\w", word):
            name, equals, _ = word.removeprefix("--").partition("=")
            skip = name.replace("-", "_") in names
            if skip and equals:
                continue
        if not skip:
            kept.append(word)
    return kept


def codes_of(record: dict[str, Any]) -> list[str]:
    """The versions of the code of a run: more than one if it was resumed after an edit."""
    first = record.get("code")
    found = [str(first)] if first else []
    for change in changes_of(record, "edited"):
        kept = found if change.get("at_step") else []  # a run that begins again has one version
        found = [*kept, str(change.get("code"))]
    return found


def changes_of(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """What --resume changed: "edited" (its code) or "lengthened" (--total-timesteps)."""
    changes = record.get(name)
    return [x for x in changes if isinstance(x, dict)] if isinstance(changes, list) else []


def first_length(record: dict[str, Any]) -> Any:
    """The --total-timesteps of a run before --resume lengthened it."""
    lengthened = changes_of(record, "lengthened")
    return lengthened[0].get("from") if lengthened else record["args"]["total_timesteps"]


def has_record(folder: Path) -> bool:
    return (folder / RECORD).exists()


def run_name(folder: Path) -> str:
    """The name of a run: that of its folder, after the namespace of its environment, if any."""
    record = find_record(folder) or {"args": {}}
    env_id = record["args"].get("env_id", "")
    depth = env_id.split(":")[-1].count("/")
    return str(Path(*folder.resolve().parts[-1 - depth :]))


# -- progress of a run ---------------------------------------------------------------------------


def is_finished(folder: Path) -> bool:
    return (folder / SUMMARY).exists()


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a finished run; empty if the run is not finished."""
    summary = read_json(folder / SUMMARY)
    return summary if isinstance(summary, dict) else {}


def has_checkpoint(folder: Path) -> bool:
    return (folder / CHECKPOINT).exists()


def can_resume(folder: Path) -> bool:
    """Whether a run can be resumed: False with --checkpoints 0."""
    record = read_json(folder / RECORD)
    args = record.get("args") if isinstance(record, dict) else None
    return not isinstance(args, dict) or args.get("checkpoints") != 0


# -- metrics -------------------------------------------------------------------------------------


def has_metrics(folder: Path) -> bool:
    return (folder / METRICS).exists()


def read_metrics(folder: str | Path) -> "pd.DataFrame":
    """All logged values of a run: columns step, seconds, tag, value."""
    import pandas as pd

    path = Path(folder) / METRICS
    require(path.exists(), f"{path}: no such file")
    try:
        content = path.read_bytes()
        whole_lines = content[: content.rfind(b"\n") + 1]  # the last of a running run may be cut
        file = io.BytesIO(whole_lines)
        table = pd.read_csv(file, dtype={"tag": "category"}, on_bad_lines="skip")
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read ({error})") from None
    return table.dropna()


class Metrics:
    """Follow metrics.csv while a run writes it."""

    def __init__(self, folder: Path):
        self.path = folder / METRICS
        self.offset = 0
        self.rest = ""
        record = find_record(folder) or {"args": {}}
        steps = record["args"].get("total_timesteps"), record.get("steps_of_other_phases", 0)
        self.total = sum(steps) if all(isinstance(x, int) for x in steps) else 0

    def new(self) -> Iterator[tuple[int, float, str, float]]:
        """The rows (step, seconds, tag, value) added since the last call."""
        try:
            with open(self.path) as file:
                if (
                    self.path.stat().st_size < self.offset
                ):  # a resumed run drops the rows it repeats
                    self.offset = 0
                    self.rest = ""
                file.seek(self.offset)
                text = file.read()
                self.offset = file.tell()
        except (OSError, ValueError):
            return
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            try:
                step, seconds, tag, value = line.split(",")
                row = int(step), float(seconds), tag, float(value)
            except ValueError:  # the header, or a damaged line
                continue
            yield row


# -- model, code, videos -------------------------------------------------------------------------


def model_path(folder: Path, exp_name: str) -> Path:
    return folder / f"{exp_name}{MODEL}"


def find_models(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{MODEL}"))


def script_path(folder: Path, script: str) -> Path:
    """The copy of the script in the folder; `script` is its name without .py."""
    return folder / f"{script}.py"


def find_videos(folder: Path) -> list[Path]:
    """The videos of a run, oldest first, those of its evaluation last."""
    videos: list[Path] = []
    for place in (folder, folder / VIDEOS, folder / VIDEOS / EVALUATION):
        videos += sorted(place.glob("*.mp4"), key=os.path.getmtime)
    return videos
