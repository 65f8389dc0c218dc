"""The settings that all scripts share, and the parser of command lines.

The type of a setting is its allowed range: `gamma: Share = 0.99`, `num_steps: Count = 128`. A plain
float may be any finite number, a plain int any whole number.
"""

import ast
import contextlib
import dataclasses
import difflib
import io
import itertools
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from cleanrl_utils.errors import BadInput, quiet_interrupts, require
from cleanrl_utils.running import folder as run_folder
from cleanrl_utils.running.help import is_positional, print_command_help, print_help
from cleanrl_utils.running.source import script_file
from cleanrl_utils.running.stored import restore_settings
from cleanrl_utils.running.tuned import tuned_flags


@dataclass(frozen=True)
class Range:
    """The allowed values of a number: `least` to `most`, both included."""

    least: float = -math.inf
    most: float = math.inf

    def __str__(self) -> str:
        if math.isinf(self.most):
            return f"at least {self.least:g}"
        return f"from {self.least:g} to {self.most:g}"


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1)]
NonNegative = Annotated[float, Range(0)]
Threads = Annotated[int, Range(0, 1024)]


# Each of these classes is a group of flags in --help; its docstring is the group's title.


@dataclass
class LoggingArgs:
    """logging"""

    exp_name: str = ""
    """name of the experiment; empty: the name of the script"""
    runs_dir: str = "runs"
    """folder for runs; each run gets a folder of its own there"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "cleanRL"
    """project on Weights & Biases"""
    wandb_entity: str | None = None
    """team or user on Weights & Biases; unset: your own"""
    capture_video: bool = False
    """record videos of the first environment, unless EnvPool or JAX steps it, and of the final
    evaluation, into the run's folder"""


@dataclass
class ModelArgs:
    """model and evaluation"""

    save_model: bool = False
    """save and evaluate the model at the end; with --eval-frequency, also keep the best one"""
    upload_model: bool = False
    """upload the saved model to the Hugging Face hub; implies --save-model"""
    hf_entity: str = ""
    """user or organisation on the Hugging Face hub; empty: your own"""
    eval_frequency: Natural = 0
    """evaluate every this many steps, in separate environments; 0: only at the end"""
    eval_episodes: Count = 10
    """number of episodes per evaluation"""


@dataclass
class CheckpointArgs:
    """checkpoints"""

    resume: str | None = None
    """folder of a run to continue from its last checkpoint, with its own settings; a larger
    --total-timesteps continues it beyond its end"""
    checkpoints: Annotated[int, Range(0)] | None = None
    """number of checkpoints, evenly spaced; no effect on training, but EnvPool's games restart at
    each; 0: none; unset: 10, fewer in short runs of EnvPool, 0 if one could exceed 1 GiB"""


@dataclass
class MachineArgs:
    """machine"""

    cuda: bool = True
    """use a GPU if there is one"""
    profile: Natural = 0
    """number of iterations to profile after warm-up: a trace in the run's folder, and a table of
    where their time went; 0: none"""


@dataclass
class RunArgs(LoggingArgs, ModelArgs, CheckpointArgs, MachineArgs):
    """experiment"""

    seed: int = 1
    """random seed: environments, initial weights, exploration, minibatches"""
    tuned: bool = False
    """use the tuned settings of this script for --env-id; other flags take precedence"""
    env_kwargs: list[str] = field(default_factory=list)
    """arguments of the environment, as key=value key=value"""

    def __post_init__(self) -> None:
        check_ranges(self)
        check_seed(self.seed, getattr(self, "num_seeds", 1))
        check_names(self)
        self.env_settings = env_settings(self.env_kwargs)


@dataclass
class TorchArgs(RunArgs):
    """torch"""

    torch_deterministic: bool = True
    """use deterministic algorithms where torch has them"""
    torch_threads: Threads = 1
    """number of CPU threads for torch; 0: torch chooses"""
    compile: bool = False
    """compile the networks' updates with torch.compile: slower to start, then faster"""
    cudagraphs: bool = True
    """on a GPU, run acting and updates as CUDA graphs; turn off to debug"""


@dataclass
class LargeArgs(TorchArgs):
    """large networks"""

    torch_threads: Threads = 0
    """number of CPU threads for torch; 0: torch chooses"""


@dataclass
class PixelArgs(LargeArgs):
    """images"""

    async_envs: bool = False
    """run each environment in a process of its own"""


# Settings that a resumed run may change: none of them can move its learning curve.
FREE_TO_CHANGE = {"resume", "track", "wandb_project_name", "wandb_entity", "capture_video"}
FREE_TO_CHANGE |= {"save_model", "upload_model", "hf_entity", "eval_frequency", "eval_episodes"}
FREE_TO_CHANGE |= {"runs_dir", "profile"}
FREE_TO_CHANGE |= {"tuned"}  # the settings that it set are recorded themselves

A = TypeVar("A", bound=RunArgs)
C = TypeVar("C")


def parse_args(cls: type[A], argv: list[str] | None = None) -> A:
    """Parse the settings of a script; a mistake is one line and exit status 2."""
    quiet_interrupts()
    argv = normalise(cls, sys.argv[1:] if argv is None else argv)
    if {"--help", "-h"} & set(argv):
        print_help(cls)
        raise SystemExit(0)
    default = stored_settings(cls, argv)
    args = run_tyro(cls, add_tuned(cls, argv), default)
    args.exp_name = args.exp_name or script_file(cls).stem
    if args.resume is not None:
        check_unchanged(args, default)
    args.save_model = args.save_model or args.upload_model
    return args


def parse_command(cls: type[C], argv: list[str] | None = None) -> C:
    """Parse the settings of a tool; a mistake is one line and exit status 2."""
    argv = normalise(cls, sys.argv[1:] if argv is None else argv)
    if {"--help", "-h"} & set(argv):
        print_command_help(cls)
        raise SystemExit(0)
    return run_tyro(cls, argv)


def run_tyro(cls: type[C], argv: list[str], default: Any = tyro.MISSING_NONPROP) -> C:
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return tyro.cli(cls, args=argv, default=default)
    except BadInput as bad:  # from the class's own checks
        raise BadInput(bad.message) from None
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise BadInput(first_message(messages.getvalue())) from None


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def normalise(cls: type, argv: list[str]) -> list[str]:
    """Accept `--cuda False`, `--capture_video`, `--total-timesteps 1e6`; refuse unknown flags."""
    types = get_type_hints(cls)
    is_script = issubclass(cls, RunArgs)  # else a tool, which may have positional arguments
    named = [x.name for x in dataclasses.fields(cls) if is_script or not is_positional(cls, x)]
    kinds = {flag(name): types[name] for name in named}
    words = list(argv)
    out = []
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--help":
            out.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        positive = positive_flag(name, kinds)
        kind = kinds[positive]
        if kind is bool:
            if not equals and words and is_switch_value(words[0], is_script):
                value = words.pop(0)
            out.append(switch(name, positive, value))
            continue
        values = [value] if equals else []
        takes_many = get_origin(kind) in (list, tuple)
        if not equals and words and not takes_many:
            values.append(words.pop(0))  # even one that begins with --
        while not equals and words and not words[0].startswith("--"):  # --device-ids 0 1
            values.append(words.pop(0))
        if takes_many:
            again = f"{name} is given twice: give all its values at once, {name} A B"
            require(name not in out, again)
        number = number_type(kind)
        if values and number and (number is kind or values[0] != "None"):
            values[0] = as_number(name, number, values[0])
        looks_like_flags = len(values) == 1 and values[0].startswith("-")
        if looks_like_flags and (equals or " " in values[0]) and not is_script:
            out.append(f"{name}={values[0]}")  # --slurm-options "--time=1"
        else:
            out += [name, *values]
    return out


def positive_flag(name: str, kinds: Mapping[str, Any]) -> str:
    """The flag without the `no-` of a switch; an error if there is no such flag."""
    if name in kinds:
        return name
    positive = "--" + name.removeprefix("--no-")
    if kinds.get(positive) is bool:
        return positive
    near = difflib.get_close_matches(name, kinds, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; --help lists the flags"
    raise BadInput(f"{name} is not a flag{hint}")


def is_switch_value(word: str, is_script: bool) -> bool:
    """Whether the word after a switch is its value: tools, unlike scripts, have other arguments."""
    if is_script:
        return not word.startswith("-")
    return word.lower() in ("true", "false")


def switch(name: str, positive: str, value: str) -> str:
    """--cuda or --no-cuda, for a switch that was typed as `name` with this value, maybe empty."""
    require(value.lower() in ("", "true", "false"), f"{name} takes True or False, not {value}")
    on = value.lower() != "false"
    if name != positive:  # --no-cuda
        on = not on
    return positive if on else "--no-" + positive.removeprefix("--")


def number_type(kind: Any) -> type | None:
    """int or float if a setting is one, or one or None; else None."""
    union = get_origin(kind) in (Union, UnionType)
    kinds = [part for part in (get_args(kind) if union else (kind,)) if part is not type(None)]
    return kinds[0] if kinds in ([int], [float]) else None


def as_number(name: str, kind: type, text: str) -> str:
    """Check a number; whole numbers may also be written as 1e6 or 1_000_000."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    whole = math.isfinite(number) and number.is_integer()
    if kind is int:
        require(whole, f"{name} takes a whole number, not {text}")
        return text if text.isdecimal() else str(int(number))
    require(math.isfinite(number), f"{name} takes a number, not {text}")
    return text


# tyro's errors in the words of the others: which flag, and what is allowed.
REWORDED = [
    (r"Missing from .*?: \{(.*?)\} .*", r"missing: one of \1"),
    (r"Missing from .*?: \S+ (.*?)( \(required\))?", r"missing: \1"),
    (r"Missing value for argument '(.*?)'.*", r"\1 needs a value"),
    (
        r"invalid choice (.*?) for argument '(.*?)'\. Expected one of \((.*)\) ?\.",
        r"\2 must be one of \3, got \1",
    ),
    (
        r"Error parsing (.*?): Could not find valid parse for arguments: \[(.*)\]",
        r"\1 does not take \2",
    ),
    (r"Unrecognized options: (.*)", r"unexpected: \1; flags begin with --, and --help lists them"),
]


def first_message(box: str) -> str:
    """The error in the box that tyro prints: the text between its title and the next rule."""
    lines = [line.strip("│╭╮╰╯─- ") for line in box.splitlines()]  # rules become empty lines
    while lines and not lines.pop(0):
        pass  # skip the title
    while lines and not lines[0]:
        lines.pop(0)
    text = " ".join(itertools.takewhile(bool, lines))
    for pattern, words in REWORDED:
        found = re.fullmatch(pattern, text)
        if found:
            return found.expand(words)
    return text or "the command line cannot be parsed; see --help"


SEEDS = 2**32  # NumPy and JAX would use only the last 32 bits of a larger seed
MAX_NAME_BYTES = 100


def range_of(kind: Any) -> Range | None:
    """The Range of an annotated type, or of a member of a union; None without one."""
    for part in (kind, *get_args(kind)):
        for note in getattr(part, "__metadata__", ()):
            if isinstance(note, Range):
                return note
    return None


def check_ranges(args: Any) -> None:
    """Stop unless every number is in the range of its setting."""
    types = get_type_hints(type(args), include_extras=True)
    for setting in dataclasses.fields(args):
        value = getattr(args, setting.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        name = flag(setting.name)
        require(math.isfinite(value), f"{name} must be a finite number, got {value}")
        if allowed := range_of(types[setting.name]):
            fits = allowed.least <= value <= allowed.most
            require(fits, f"{name} must be {allowed}, got {value}")


def check_seed(seed: int, count: int = 1) -> None:
    """Stop unless every random generator accepts all of `count` seeds from `seed` on."""
    with_more = f" with --num-seeds {count}" if count > 1 else ""
    limit = SEEDS - max(count, 1) + 1
    require(seed >= 0, f"--seed must not be negative, got {seed}")
    require(seed < limit, f"--seed must be below {limit}{with_more}, got {seed}")


def check_names(args: LoggingArgs) -> None:
    """Stop unless the names can become folders."""
    name = args.exp_name
    require(name.isprintable(), "--exp-name must consist of printable characters")
    require("/" not in name, f"--exp-name {name}: must not contain /")
    size = len(name.encode())
    too_long = f"--exp-name must have at most {MAX_NAME_BYTES} bytes, got {size}"
    require(size <= MAX_NAME_BYTES, too_long)
    require(args.runs_dir.strip() != "", "--runs-dir must not be empty")
    require(args.runs_dir.isprintable(), "--runs-dir must consist of printable characters")


MAKE_ENV_PARAMETERS = {"env_id", "seed", "idx", "capture_video", "video_folder", "render_mode"}


def env_settings(words: list[str]) -> dict[str, Any]:
    """Parse --env-kwargs key=value; values are Python literals, else text."""
    settings = {}
    for word in words:
        name, equals, text = word.partition("=")
        fits = bool(equals) and name.isidentifier()
        require(fits, f"--env-kwargs takes key=value, not {word}")
        require(
            name not in MAKE_ENV_PARAMETERS, f"--env-kwargs {name}: the script sets this itself"
        )
        try:
            settings[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            settings[name] = {"true": True, "false": False, "none": None}.get(text.lower(), text)
    return settings


def add_tuned(cls: type, argv: list[str]) -> list[str]:
    """With --tuned, a command line with the tuned settings of the script for its environment."""
    switches = [word for word in argv if word in ("--tuned", "--no-tuned")]
    if switches[-1:] != ["--tuned"] or "--resume" in argv:  # its record has the tuned settings
        return argv
    env_id = getattr(cls, "env_id", "")
    if "--env-id" in argv[:-1]:
        last = len(argv) - 1 - argv[::-1].index("--env-id")
        env_id = argv[last + 1]
    given = {word.replace("--no-", "--", 1) for word in argv if word.startswith("--")}
    flags = tuned_flags(script_file(cls).stem, env_id, given)
    return [*normalise(cls, flags), *argv]


def stored_settings(cls: type[A], argv: list[str]) -> A | Any:
    """The settings of the run to resume, as defaults for this command line."""
    if "--resume" not in argv:
        return tyro.MISSING_NONPROP
    at = argv.index("--resume") + 1
    require(at < len(argv) and argv[at] != "None", "--resume needs the folder of a run")
    folder = Path(argv[at])
    record = run_folder.read_record(folder, "--resume")
    names = {field.name for field in dataclasses.fields(cls)}
    stored = record["args"]
    script = script_file(cls).stem
    require(
        record["script"] == script,
        f"--resume {folder}: made by {record['script']}.py, not {script}.py",
    )
    same = set(stored) <= names <= set(stored) | FREE_TO_CHANGE
    require(same, f"--resume {folder}: the settings of {script}.py have changed since")
    return restore_settings(cls, stored, f"--resume {folder}")


def check_unchanged(args: RunArgs, stored: RunArgs) -> None:
    """Stop if a resumed run changes its settings; only its length may grow."""
    names = [field.name for field in dataclasses.fields(args) if field.name not in FREE_TO_CHANGE]
    changed = [name for name in names if getattr(args, name) != getattr(stored, name)]
    longer = getattr(args, "total_timesteps", 0) > getattr(stored, "total_timesteps", 0)
    if longer:
        changed.remove("total_timesteps")
    if args.tuned and not stored.tuned:
        changed.append("tuned")
    if changed:
        texts = [f"{flag(n)} was {getattr(stored, n)}, now {getattr(args, n)}" for n in changed]
        raise BadInput(
            f"--resume {args.resume} continues a run with its own settings: {'; '.join(texts)}"
        )
