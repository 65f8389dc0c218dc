"""The models that are kept in the repository, in zoo/: NAME.cleanrl_model and facts, NAME.json."""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path

from cleanrl_utils.errors import BadInput
from cleanrl_utils.running import folder

ZOO = Path(__file__).resolve().parent.parent.parent / "zoo"


@dataclass
class Kept:
    """A model of the zoo: which run made it, and what it scored at the end of that run."""

    script: str
    env_id: str
    seed: int
    steps: int
    episodic_return: float  # mean of the final evaluation
    episodes: int  # of that evaluation
    command: str
    commit: str

    @property
    def name(self) -> str:
        return zoo_name(self.script, self.env_id)


def zoo_name(script: str, env_id: str) -> str:
    return f"{script}__{env_id.replace('/', '_')}"


def read_zoo(where: Path = ZOO) -> list[Kept]:
    """The models of the zoo, by environment."""
    facts = [Kept(**json.loads(path.read_text())) for path in where.glob("*.json")]
    return sorted(facts, key=lambda kept: (kept.env_id, kept.script))


def model_of(name: str, where: Path = ZOO) -> Path:
    """The file of a model by its name."""
    return where / f"{name}{folder.MODEL}"


def find_kept(name: str, where: Path = ZOO) -> Path:
    """The file of a model by its name; the error for an unknown name gives the nearest ones."""
    path = model_of(name, where)
    if not path.is_file():
        near = difflib.get_close_matches(name, [kept.name for kept in read_zoo(where)])
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise BadInput(
            f"{name}: no such run, model file or model of the zoo; {hint}"
            "`python -m cleanrl_utils.zoo list` lists the zoo"
        )
    return path
