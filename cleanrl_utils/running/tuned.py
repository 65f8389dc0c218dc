"""Tuned settings: what `--tuned` sets for a script and an environment, from tuned.toml.

A copy of a script uses the settings of the script that its name contains: my_ppo.py and
ppo_masked.py those of ppo.py. A flag on the command line takes precedence over tuned.toml.
"""

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cleanrl_utils.errors import BadInput

FILE = Path(__file__).with_name("tuned.toml")
SCRIPTS = Path(__file__).resolve().parent.parent.parent / "cleanrl"
Settings = Mapping[str, Any]


def read_tuned(path: Path = FILE) -> dict[str, dict[str, Settings]]:
    """Settings by script and environment."""
    return tomllib.loads(path.read_text())


def script_of(stem: str, known: set[str]) -> str:
    """The script whose settings a file uses: itself, else the longest known name within its own."""
    if stem in known:
        return stem
    inside = [name for name in known if f"_{name}_" in f"_{stem}_"]
    return max(inside, key=len, default=stem)


def tuned_flags(stem: str, env_id: str, given: set[str], path: Path = FILE) -> list[str]:
    """The flags of tuned.toml that are not in `given`, and a printed line that lists them."""
    tuned = read_tuned(path)
    known = {file.stem for file in SCRIPTS.glob("*.py")} | set(tuned)
    script = script_of(stem, known)
    if script not in tuned:
        raise BadInput(
            f"--tuned: {stem}.py has no tuned settings; scripts that have: {', '.join(tuned)}"
        )
    if env_id not in tuned[script]:
        ids = ", ".join(tuned[script])
        raise BadInput(f"--tuned: {script}.py has no tuned settings for {env_id}, only for {ids}")
    flags = []
    kept = []
    for name, value in tuned[script][env_id].items():
        flag = "--" + name.replace("_", "-")
        if flag in given:
            kept.append(flag)
        else:
            flags += as_words(flag, value)
    note = f" (not {', '.join(kept)}: given on the command line)" if kept else ""
    print(f"--tuned, {script}.py on {env_id}: {' '.join(flags)}{note}", file=sys.stderr, flush=True)
    return flags


def as_words(flag: str, value: Any) -> list[str]:
    """A setting as words of a command line."""
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, str(value)]
