"""Group runs that may be averaged: the same settings, each seed once.

Settings are compared as text, so that 1e6 on a command line equals 1000000 in a record.
"""

import json
import re
import shlex
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from cleanrl_utils.running import folder as run_folder
from cleanrl_utils.running.settings import FREE_TO_CHANGE, flag

# Name, task and seed of a run; --num-seeds is the number of runs that were trained together.
IDENTITY = {"exp_name", "env_id", "seed", "num_seeds"}
RESTARTS = "environment_restarts"  # checkpoints matter only if they restart environments
NOT_COMPARED = FREE_TO_CHANGE | IDENTITY | {"checkpoints"}
LENGTHENED = "lengthened"  # its schedules are not those of a run of its final length
PROCESSES = "processes"  # of torchrun: each has environments of its own
NOT_FLAGS = {"script", "steps", RESTARTS, LENGTHENED, PROCESSES}

Settings = Mapping[str, str]


def as_text(value: Any) -> str:
    """The canonical text of a setting: 1000000 for 1e6, 1000000.0 and "1_000_000"."""
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True)
    if isinstance(value, list | tuple):
        return " ".join(map(as_text, value))
    text = str(value).strip()
    if text.lower() in ("true", "false"):
        return text.capitalize()
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else repr(number)


def compared_settings(args: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a run that can move its learning curve."""
    return {name: as_text(value) for name, value in args.items() if name not in NOT_COMPARED}


def record_settings(record: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, str]:
    """The compared settings of a run folder, and its script."""
    settings = {"script": record["script"], **compared_settings(record["args"])}
    if RESTARTS in summary:
        settings[RESTARTS] = as_text(summary[RESTARTS])
    if PROCESSES in record:
        settings[PROCESSES] = as_text(record[PROCESSES])
    longer = run_folder.changes_of(dict(record), LENGTHENED)
    if longer:
        texts = [f"{x.get('from')}-to-{x.get('to')}-at-{x.get('at_step')}" for x in longer]
        settings[LENGTHENED] = ",".join(texts)
    return settings


def command_settings(command: str, script: str, steps: int) -> dict[str, str]:
    """The settings in a command line; `steps` takes the place of --total-timesteps."""
    args: dict[str, Any] = {}
    name = ""
    for word in shlex.split(command):
        if word.startswith("--"):
            typed, equals, value = word[2:].partition("=")
            off = not equals and typed.startswith("no-")
            name = typed.removeprefix("no-" if off else "").replace("-", "_")
            args[name] = value if equals else str(not off)
        elif name:
            args[name] = word
    args.pop("total_timesteps", None)
    return {"script": script, **compared_settings(args), "steps": as_text(steps)}


def code_version(record: Mapping[str, Any]) -> str:
    """The hash of a run's sources, or else its commit, with * if files were changed."""
    codes = run_folder.codes_of(dict(record))
    if codes:
        return "+".join(code[:12] for code in codes)
    git = record.get("git", {})
    return git.get("commit", "")[:12] + "*" * bool(git.get("dirty"))


def is_mixed(code: str) -> bool:
    """Whether a run was resumed with other code than it began with."""
    return "+" in code


def flag_name(name: str) -> str:
    """The name of a setting for the user: its flag, if it is one."""
    return name.replace("_", " ") if name in NOT_FLAGS else flag(name)


def in_order(texts: set[str]) -> list[str]:
    """Sort numbers by size, then other texts alphabetically."""

    def key(text: str) -> tuple[bool, float, str]:
        is_number = bool(re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", text))
        return not is_number, float(text) if is_number else 0.0, text

    return sorted(texts, key=key)


ABSENT = "unset"


def differing(many: Sequence[Settings]) -> dict[str, list[str]]:
    """The settings that are not the same in all of `many`, with their values."""
    names = dict.fromkeys(name for settings in many for name in settings)
    values = {name: {settings.get(name, ABSENT) for settings in many} for name in names}
    return {name: in_order(found) for name, found in values.items() if len(found) > 1}


def settings_key(settings: Settings) -> Hashable:
    """A dictionary key that is the same for equal settings."""
    return frozenset(settings.items())


class Seeded(Protocol):
    seed: int


S = TypeVar("S", bound=Seeded)


def newest_per_seed(runs: Sequence[S]) -> list[S]:
    """The last run of each seed; `runs` have the same settings and are sorted oldest first."""
    return list({run.seed: run for run in runs}.values())


def count(number: int, what: str) -> str:
    """1 run, 2 runs."""
    return f"{number} {what}" + "s" * (number != 1)
