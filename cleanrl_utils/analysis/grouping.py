"""Which runs may be pooled: those with the same settings, each seed once.

Settings are compared as text, so that 1e6 on a command line and 1000000 in a record are the same.
"""

import json
import re
import shlex
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from cleanrl_utils.running.settings import FREE_TO_CHANGE, flag

# The name of a run, its task and its seed; --num-seeds only says how many were trained together.
IDENTITY = {"exp_name", "env_id", "seed", "num_seeds"}
RESTARTS = "environment_restarts"  # checkpoints matter only where they restart environments
NOT_COMPARED = FREE_TO_CHANGE | IDENTITY | {"checkpoints"}
NO_FLAGS = {"script", "steps", RESTARTS}

Settings = Mapping[str, str]


def as_text(value: Any) -> str:
    """A setting in one spelling: 1e6, 1000000.0 and "1_000_000" are all 1000000."""
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
    """The settings of a run folder, and the script that they belong to."""
    settings = {"script": record["script"], **compared_settings(record["args"])}
    if RESTARTS in summary:
        settings[RESTARTS] = as_text(summary[RESTARTS])
    return settings


def command_settings(command: str, script: str, steps: int) -> dict[str, str]:
    """What a command line says about a run; its length stands for --total-timesteps."""
    args: dict[str, Any] = {}
    name = ""
    for word in shlex.split(command):
        if word.startswith("--"):
            spelt, equals, value = word[2:].partition("=")
            off = not equals and spelt.startswith("no-")
            name = spelt.removeprefix("no-" if off else "").replace("-", "_")
            args[name] = value if equals else str(not off)
        elif name:
            args[name] = word
    args.pop("total_timesteps", None)
    return {"script": script, **compared_settings(args), "steps": as_text(steps)}


def code_version(record: Mapping[str, Any]) -> str:
    """The code of a run: the hash of its sources, or else its commit, * if files were changed."""
    if code := record.get("code"):
        return str(code)[:12]
    git = record.get("git", {})
    return git.get("commit", "")[:12] + "*" * bool(git.get("dirty"))


def spelt(name: str) -> str:
    """A setting as the user knows it."""
    return name.replace("_", " ") if name in NO_FLAGS else flag(name)


def in_order(texts: set[str]) -> list[str]:
    """Numbers by size, other texts by the alphabet."""

    def key(text: str) -> tuple[bool, float, str]:
        is_number = bool(re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", text))
        return not is_number, float(text) if is_number else 0.0, text

    return sorted(texts, key=key)


ABSENT = "unset"


def differing(many: Sequence[Settings]) -> dict[str, list[str]]:
    """The settings that are not the same in all, with their values."""
    names = dict.fromkeys(name for settings in many for name in settings)
    values = {name: {settings.get(name, ABSENT) for settings in many} for name in names}
    return {name: in_order(found) for name, found in values.items() if len(found) > 1}


def same(settings: Settings) -> Hashable:
    """A key that equal settings share."""
    return frozenset(settings.items())


class Seeded(Protocol):
    seed: int


S = TypeVar("S", bound=Seeded)


def newest_per_seed(runs: Sequence[S]) -> list[S]:
    """Of runs with the same settings, oldest first, the last one of each seed."""
    return list({run.seed: run for run in runs}.values())


def count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)
