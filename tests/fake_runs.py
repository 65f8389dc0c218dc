"""Folders of artificial runs, for tests of the tools that read runs."""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cleanrl_utils.results import RETURN


def make_run(
    where: Path,
    seed: int,
    level: float,
    env_id: str = "CartPole-v1",
    exp_name: str = "ppo",
    tags: Sequence[str] = (),
    commit: str = "a" * 40,
    episodes: int = 200,
    finished: bool = True,
    losses: int = 50,
    name: str = "",
    code: str = "",
    more: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Write the folder of an artificial run whose final return is about `level`."""
    folder = where / (name or f"{env_id}__{exp_name}__{seed}__{'-'.join(tags) or commit[:3]}")
    random = np.random.default_rng(zlib.crc32(f"{where.name}/{folder.name}".encode()))
    folder.mkdir(parents=True)
    record: dict[str, Any] = {
        "args": {"exp_name": exp_name, "env_id": env_id, "seed": seed, **settings},
        "script": exp_name,
        "command": [f"{exp_name}.py"],
        "started": f"2026-01-01T00:00:{seed:02}Z",
        "tags": list(tags),
        "git": {"commit": commit, "dirty": False},
    }
    if code:
        record["code"] = code
    record |= more or {}
    (folder / "run.json").write_text(json.dumps(record))
    if finished:
        (folder / "finished.json").write_text("{}")
    own = level * (1 + 0.03 * random.standard_normal())
    grown = np.minimum(1, np.arange(1, episodes + 1) / episodes * 2)
    values = own * grown + random.standard_normal(episodes) * level / 50
    lines = ["step,seconds,tag,value"]
    for i, value in enumerate(values.tolist()):
        lines.append(f"{(i + 1) * 50},{(i + 1) * 0.1:.3f},{RETURN},{value!r}")
    for i in range(losses):
        lines.append(f"{(i + 1) * 200},{(i + 1) * 0.4:.3f},losses/value_loss,{1 / (i + 1)!r}")
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder
