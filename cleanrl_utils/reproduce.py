"""Print the commands that reproduce a run: commit, packages and flags.

    python -m cleanrl_utils.reproduce runs/CartPole-v1__ppo__1__1700000000
    python -m cleanrl_utils.reproduce runs/CartPole-v1__ppo__1__1700000000 | bash   # in a clone

--all-flags includes the settings that had their default values.
"""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from cleanrl_utils.errors import BadInput
from cleanrl_utils.running import folder
from cleanrl_utils.running.settings import parse_command
from cleanrl_utils.running.source import PROJECT

PER_RUN = {"resume", "runs_dir"}  # location of a run: not reproduced
VENV = ".venv-reproduce"
LIBRARY = ".cleanrl-reproduce"  # a clone of this project, for a script in a repository of its own


@dataclass
class ReproduceArgs:
    path: tyro.conf.Positional[str | None] = None
    """folder of a run, or its run.json"""
    run: str | None = None
    """folder of a run, or its run.json"""
    all_flags: bool = False
    """include the settings that had their default values"""


def run_folder(run: str) -> Path:
    """The folder of a run, given by itself or by its run.json."""
    path = Path(run)
    return path.parent if path.name == folder.RECORD else path


def read_record(run: str) -> dict[str, Any]:
    return folder.read_record(run_folder(run))


def part(record: dict[str, Any], name: str) -> dict[str, Any]:
    """A dictionary in a record; empty if it is missing."""
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def commands(record: dict[str, Any], all_flags: bool = False, run: Path | None = None) -> list[str]:
    """The lines of a shell script; comments say what cannot be reproduced.

    `run` is the run's folder, which holds the script and uncommitted changes.
    """
    lines = ["set -e", *restore_code(record, run), *install_packages(record)]

    script = folder.recorded_script(record)
    copy = folder.script_path(run, record["script"]) if run else None
    if copy and copy.is_file() and record.get("script_tracked") is False:
        lines.append("# The script was not committed: use the copy in the run's folder.")
        script = str(copy.resolve())
    missing = record.get("modules_not_committed")
    if isinstance(missing, list) and missing:
        names = comment(", ".join(map(str, missing)))
        lines.append(f"# The run imports modules that were not committed, nor kept: {names}.")
    module, colon, _ = str(record["args"].get("env_id", "")).partition(":")
    if colon and not module.startswith("cleanrl_utils"):
        lines.append(f"# The module {comment(module)} of the environment must be on PYTHONPATH.")
    lines += changed_by_resume(record)

    words = [*folder.starter(record, f"{VENV}/bin/python"), script]
    if all_flags:
        words += flags(record["args"])
    else:
        words += folder.drop_flags(record["command"][1:], PER_RUN)
    stored = record.get("tags")
    tags = ",".join(map(str, stored)) if isinstance(stored, list) else ""
    variables = f"WANDB_TAGS={shlex.quote(tags)} " if tags else ""
    return [*lines, variables + shlex.join(words)]


def restore_code(record: dict[str, Any], run: Path | None) -> list[str]:
    """Commands that restore the code of a run: its commit and its uncommitted changes."""
    lines = []
    git = part(record, "git")
    if git.get("commit"):
        lines.append(f"git checkout {shlex.quote(str(git['commit']))}")
    else:
        lines.append(
            "# The commit is unknown: check out the version of the code that the run used."
        )
    changes = run / folder.CHANGES if run else None
    if changes and changes.is_file():
        lines.append("# Uncommitted changes of the run:")
        lines.append(f"git apply {shlex.quote(str(changes.resolve()))}")
    elif git.get("dirty"):
        lines.append("# The run had changes that were not committed; they are lost.")
    library = part(record, "library")
    if library:
        commit = str(library.get("commit", ""))
        dirty = "; its uncommitted changes are lost" if library.get("dirty") else ""
        lines += [
            f"# cleanrl_utils was imported from another checkout, at {comment(commit)}{dirty}.",
            f"test -d {LIBRARY} || git clone {shlex.quote(str(PROJECT))} {LIBRARY}",
            f"git -C {LIBRARY} checkout {shlex.quote(commit)}",
        ]
    return lines


def install_packages(record: dict[str, Any]) -> list[str]:
    """Commands that make a virtual environment with the packages of a run."""
    versions = {name: str(version) for name, version in part(record, "versions").items()}
    python = versions.pop("python", "3").partition(" ")[0]
    minor = ".".join(re.findall(r"\d+", python)[:2]) or "3"
    hardware = describe(part(record, "hardware"))
    lines = [
        f"# Python {comment(python)} on {comment(hardware)}",
        f"python{minor} -m venv {VENV}",
    ]
    pins = []
    for name, version in versions.items():
        if name.lower() == "cleanrl":
            continue
        public, _, local = version.partition("+")
        if local:  # a build for certain hardware, e.g. torch 2.5.1+cpu
            lines.append(f"# {comment(name)} was the build {comment(version)}")
        pins.append(shlex.quote(f"{name}=={public}"))
    pip = f"{VENV}/bin/python -m pip install"
    pinned = f"{pip} -r requirements/requirements.txt"
    if part(record, "library"):
        pinned = f"(cd {LIBRARY} && ../{pinned})"
    lines.append(f"{pinned}  # that commit's pins")
    lines.append("# The packages that the run used; changes nothing if they are the pinned ones.")
    if pins:
        lines.append(f"{pip} {' '.join(pins)}")
    return lines


def changed_by_resume(record: dict[str, Any]) -> list[str]:
    """Comments about what --resume changed, which one command cannot repeat."""
    lines = []
    for change in folder.changes_of(record, "lengthened"):
        old, new, step = (comment(str(change.get(key))) for key in ("from", "to", "at_step"))
        lines.append(f"# --resume lengthened the run from {old} to {new} steps at step {step}.")
    for change in folder.changes_of(record, "edited"):
        step = comment(str(change.get("at_step")))
        lines.append(f"# --resume continued the run at step {step} with other code.")
    return [*lines, "# One command cannot repeat this."] if lines else []


def describe(hardware: dict[str, Any]) -> str:
    parts = [hardware.get(name) for name in ("device", "cpu", "os")]
    return ", ".join(str(part) for part in parts if part) or "unknown hardware"


def comment(text: str) -> str:
    """Text without line breaks, so that it stays within its comment."""
    return " ".join(text.split())


def flags(args: dict[str, Any]) -> list[str]:
    """Every setting as a flag."""
    words = []
    for name, value in args.items():
        if name in PER_RUN or value in ("", []):
            continue
        flag = "--" + name.replace("_", "-")
        words += [flag, *map(str, value)] if isinstance(value, list) else [f"{flag}={value}"]
    return words


def main(argv: list[str] | None = None) -> int:
    args = parse_command(ReproduceArgs, argv)
    run = args.run or args.path
    if not run:
        raise BadInput("give the folder of a run: python -m cleanrl_utils.reproduce runs/...")
    print("\n".join(commands(read_record(run), args.all_flags, run_folder(run))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
