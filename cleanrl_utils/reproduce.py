"""Print the commands that repeat a run: its commit, its packages, its flags.

    python -m cleanrl_utils.reproduce runs/CartPole-v1__ppo__1__1700000000
    python -m cleanrl_utils.reproduce runs/CartPole-v1__ppo__1__1700000000 | bash   # in a clone

--all-flags writes every setting out, also those that were defaults.
"""

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from cleanrl_utils.errors import BadInput
from cleanrl_utils.running import folder

PER_RUN = {"resume", "runs_dir"}  # where a run is, not what it does


def read_record(run: str) -> dict[str, Any]:
    path = Path(run)
    return folder.read_record(path.parent if path.name == folder.RECORD else path)


def commands(record: dict[str, Any], all_flags: bool = False) -> list[str]:
    """Lines of a shell script, with what cannot be repeated as comments."""
    lines = ["set -e"]
    git = record.get("git", {})
    if git.get("dirty"):
        lines.append(
            "# Its files had changes that were not committed: those are not in this commit."
        )
    if git.get("commit"):
        lines.append(f"git checkout {shlex.quote(git['commit'])}")
    else:
        lines.append("# It does not know its commit: take the version of the code that it used.")

    versions = dict(record.get("versions", {}))
    python = versions.pop("python", "3")
    minor = ".".join(python.split(".")[:2])
    lines += [f"# Python {python} on {describe(record.get('hardware', {}))}"]
    lines += [f"python{minor} -m venv .venv-reproduce"]
    pins = []
    for name, version in versions.items():
        if name.lower() == "cleanrl":
            continue
        public, _, local = version.partition("+")
        if local:  # the same release for other hardware, e.g. of torch: 2.5.1+cpu
            lines.append(f"# {name} was the build {version}")
        pins.append(shlex.quote(f"{name}=={public}"))
    pip = ".venv-reproduce/bin/python -m pip install"
    lines += [f"{pip} -r requirements/requirements.txt  # that commit's pins"]
    lines += [
        "# What the run really had loaded; changes nothing if it was installed from those pins."
    ]
    lines += [f"{pip} {' '.join(pins)}"] if pins else []

    words = [".venv-reproduce/bin/python", script_path(record)]
    words += flags(record["args"]) if all_flags else drop(record["command"][1:], PER_RUN)
    tags = ",".join(record.get("tags", []))
    variables = f"WANDB_TAGS={shlex.quote(tags)} " if tags else ""
    return [*lines, variables + shlex.join(words)]


def describe(hardware: dict[str, Any]) -> str:
    parts = [hardware.get(name) for name in ("device", "cpu", "os")]
    return ", ".join(str(part) for part in parts if part) or "unknown hardware"


def script_path(record: dict[str, Any]) -> str:
    """Where the script is in the repository, wherever it was called from."""
    path = Path(record.get("script_path") or f"cleanrl/{record['script']}.py")
    outside = path.is_absolute() or ".." in path.parts
    return f"cleanrl/{path.name}" if outside and path.parent.name == "cleanrl" else str(path)


def drop(words: list[str], names: set[str]) -> list[str]:
    """The words of a command line without some flags and their values."""
    kept, skip = [], False
    for word in words:
        if re.match(r"--\w", word):
            name, equals, _ = word.removeprefix("--").partition("=")
            skip = name.replace("-", "_") in names
            if skip and equals:
                continue
        if not skip:
            kept.append(word)
    return kept


def flags(args: dict[str, Any]) -> list[str]:
    """Every setting as a flag."""
    words = []
    for name, value in args.items():
        if name in PER_RUN or value == "":
            continue
        flag = "--" + name.replace("_", "-")
        words += [flag, *map(str, value)] if isinstance(value, list) else [f"{flag}={value}"]
    return words


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", help="folder of a run, or its run.json")
    parser.add_argument("--run", dest="named", metavar="RUN", help="the same")
    parser.add_argument("--all-flags", action="store_true", help="every setting, defaults too")
    args = parser.parse_args(argv)
    if not (run := args.run or args.named):
        raise BadInput("name the folder of a run: python -m cleanrl_utils.reproduce runs/...")
    print("\n".join(commands(read_record(run), args.all_flags)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
