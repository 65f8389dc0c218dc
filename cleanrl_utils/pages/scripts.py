"""Facts about the scripts, read from their source without running it.

scripts = read_scripts()
scripts["ppo"].flags, scripts["ppo"].tags, scripts["ppo_atari"].relative
"""

import ast
import re
from collections.abc import Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cleanrl_utils.pages.tags import logged_tags

ROOT = Path(__file__).resolve().parent.parent.parent
# A variant is compared with the script whose name its own name extends, except these.
RELATIVES = {
    "rpo_continuous_action": "ppo_continuous_action",
    "ppo_procgen": "ppo_atari_envpool",
    "ppg_procgen": "ppo_procgen",
    "ppo_recurrent": "ppo_atari_lstm",
    "ppo_trxl": "ppo_atari_lstm",
    "c51": "dqn",
    "c51_atari": "dqn_atari",
    "rainbow_atari": "c51_atari",
    "td3_continuous_action": "ddpg_continuous_action",
    "sac_continuous_action": "td3_continuous_action",
    "tqc_continuous_action": "sac_continuous_action",
    "simbav2_continuous_action": "sac_continuous_action",
    "sac_atari": "dqn_atari",
    "crossq_continuous_action": "sac_continuous_action",
    "droq_continuous_action": "sac_continuous_action",
    "qdagger_dqn_atari_impalacnn": "dqn_atari",
    "qdagger_dqn_atari_jax_impalacnn": "dqn_atari_jax",
    "ppo_rnd_envpool": "ppo_atari_envpool",
    "ppo_pettingzoo_ma_atari": "ppo_atari",
    "pqn": "ppo",
    "pqn_jax": "ppo_jax",
    "fast_td3_continuous_action_jax": "ppo_continuous_action_brax_jax",
}
# Scripts in JAX resemble one another more than their twins in torch.
JAX_RELATIVES = {
    "td3_continuous_action_jax": "ddpg_continuous_action_jax",
    "sac_continuous_action_jax": "td3_continuous_action_jax",
    "crossq_continuous_action_jax": "sac_continuous_action_jax",
    "c51_jax": "dqn_jax",
    "c51_atari_jax": "dqn_atari_jax",
    "dqn_atari_jax": "dqn_jax",
}
FAMILIES = {  # environments, by a word in the imports or in the name of a script
    "envpool": "EnvPool",
    "isaacgym": "Isaac Gym",
    "brax": "Brax",
    "playground": "MuJoCo Playground",
    "gymnax": "gymnax",
    "procgen": "Procgen",
    "pettingzoo": "PettingZoo",
    "trxl": "Memory Gym",
    "atari": "Atari",
}


SHARED = {  # classes that Args inherits flags from, and the titles of their tables
    "RunArgs": "Every script",
    "LoggingArgs": "Logging",
    "ModelArgs": "Model and evaluation",
    "CheckpointArgs": "Checkpoints",
    "MachineArgs": "Machine",
    "TorchArgs": "Scripts in torch",
    "LargeArgs": "Scripts in torch with large networks",
    "PixelArgs": "Scripts in torch for images, in Gymnasium",
    "RunsArgs": "JAX, end to end",
}


SPACES = {  # of scripts whose name does not say it
    "ppo_action_mask": "vectors, several discrete",
    "ppo_multi_input": "vectors with images, several discrete",
    "ppo_recurrent": "vectors, discrete or continuous",
    "ppo_trxl": "images or vectors, several discrete",
    "ppo_jax": "vectors or small images, discrete",
    "pqn_jax": "vectors or small images, discrete",
}


@dataclass
class Flag:
    field: str
    kind: str
    default: str
    help: str

    @property
    def text(self) -> str:
        name = "--" + self.field.replace("_", "-")
        return f"`{name}`, `--no-{name[2:]}`" if self.kind == "bool" else f"`{name}`"

    def row(self) -> str:
        default = "" if "field(" in self.default else self.default.strip("'")
        default = "" if default == "None" else default
        return f"| {self.text} | {f'`{default}`' if default else 'unset'} | {self.help} |"


@dataclass
class Script:
    """A file of cleanrl/."""

    name: str
    source: str
    siblings: set[str] = field(default_factory=set)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def title(self) -> str:
        return (ast.get_docstring(self.tree) or self.name).splitlines()[0].rstrip(".")

    @property
    def page(self) -> str:
        """The page of the algorithm, from the docstring."""
        found = re.search(r"docs/(rl-algorithms/[\w-]+\.md)", self.source)
        return found[1] if found else "rl-algorithms/overview.md"

    @property
    def lines(self) -> int:
        return len(self.source.splitlines())

    @cached_property
    def flags(self) -> list[Flag]:
        """The flags of this script alone, without `shared_flags`."""
        return fields_of(self.tree, "Args")

    @property
    def bases(self) -> list[str]:
        (args,) = [x for x in self.tree.body if isinstance(x, ast.ClassDef) and x.name == "Args"]
        return [base.id for base in args.bases if isinstance(base, ast.Name)]

    @property
    def env_id(self) -> str:
        return next((flag.default.strip("'") for flag in self.flags if flag.field == "env_id"), "")

    @cached_property
    def tags(self) -> list[str]:
        """The tags of all metrics that it logs."""
        return logged_tags(self.tree)

    @property
    def jax(self) -> bool:
        return "import jax" in self.source

    @property
    def images(self) -> bool:
        return any(word in self.name for word in ("atari", "envpool", "procgen", "trxl"))

    @property
    def spaces(self) -> str:
        if self.name in SPACES:
            return SPACES[self.name]
        actions = "continuous" if "continuous" in self.name else "discrete"
        return f"{'images' if self.images else 'vectors'}, {actions}"

    @property
    def families(self) -> str:
        text = self.name + " ".join(re.findall(r"^(?:from|import) .*", self.source, re.M)).lower()
        found = [name for word, name in FAMILIES.items() if word in text]
        if "EnvPool" in found:
            found = ["EnvPool", *(x for x in found if x not in ("EnvPool", "Atari"))]
        return ", ".join(found) or (
            "MuJoCo, dm_control" if "continuous" in self.name else "Gymnasium"
        )

    @property
    def features(self) -> str:
        has = {flag.field for flag in self.flags} | set(self.bases)
        features = {
            "CUDA graphs": "speed.graphs import" in self.source,
            "one program": "RunsArgs" in has,
            "many agents at once": "RunsArgs" in has,
            "replay on the GPU": "buffer_device" in has,
            "processes": "async_envs" in has or "PixelArgs" in has,
            "several GPUs": "distributed" in self.source,
            "compiled steps": self.jax and "RunsArgs" not in has,
            "memory": "def initial_state(" in self.source,
            "action masks": "MaskInObservation" in self.source,
        }
        return ", ".join(name for name, there in features.items() if there)

    @property
    def relative(self) -> str | None:
        """The script to compare it with."""
        return relative_of(self.name, self.siblings)


def fields_of(tree: ast.Module, cls: str) -> list[Flag]:
    """The fields of a dataclass with the docstrings under them."""
    (node,) = [x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == cls]
    found = []
    for at, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(at, ast.AnnAssign) and isinstance(at.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) else ""  # type: ignore[attr-defined]
            default = ast.unparse(at.value) if at.value else ""
            kind = ast.unparse(at.annotation)
            found.append(Flag(at.target.id, kind, default, " ".join(str(text).split())))
    return found


def shared_flags() -> dict[str, list[Flag]]:
    """The flags of each class of settings in cleanrl_utils/running, in the order of SHARED."""
    found: dict[str, list[Flag]] = {}
    for path in sorted((ROOT / "cleanrl_utils" / "running").glob("*.py")):
        tree = ast.parse(path.read_text())
        names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        found |= {name: fields_of(tree, name) for name in names if name.endswith("Args")}
    if set(found) != set(SHARED):
        raise LookupError(f"SHARED names other classes: {sorted(set(found) ^ set(SHARED))}")
    return {name: found[name] for name in SHARED}


def read_scripts() -> dict[str, Script]:
    paths = sorted((ROOT / "cleanrl").glob("[a-z]*.py"))
    names = {path.stem for path in paths}
    scripts = {path.stem: Script(path.stem, path.read_text(), names) for path in paths}
    order = {"ppo": 0, "rpo": 1, "dqn": 2, "c51": 3, "rainbow": 4, "sac": 5, "td3": 6, "ddpg": 7}
    rank = lambda x: (order.get(x.name.split("_")[0], 9), x.jax, x.images, x.name)  # noqa: E731
    return {script.name: script for script in sorted(scripts.values(), key=rank)}


def relative_of(name: str, known: Set[str]) -> str | None:
    """The script that a script is best read beside: the one that its name continues, mostly."""
    if RELATIVES.get(name) in known:
        return RELATIVES[name]
    while "_" in name:
        name = name.rpartition("_")[0]
        if name in known:
            return name
    return None


def relatives(name: str, known: Set[str]) -> list[str]:
    """The scripts that a script shares functions with, nearest first; ppo.py is the last."""
    found: list[str] = []
    waiting = [JAX_RELATIVES.get(name), relative_of(name, known), "ppo"]
    while waiting:
        other = waiting.pop(0)
        if other is None or other not in known or other in found or other == name:
            continue
        found.append(other)
        waiting[:0] = [JAX_RELATIVES.get(other), relative_of(other, known)]
    return [*(x for x in found if x != "ppo"), *(x for x in found if x == "ppo")]
