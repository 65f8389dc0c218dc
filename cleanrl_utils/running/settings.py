"""The settings every script shares, and how a command line becomes settings."""

import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro

from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running.folder import is_record as is_record
from cleanrl_utils.running.folder import read_record
from cleanrl_utils.running.stored import restore_settings


@dataclass
class RunArgs:
    exp_name: str = ""
    """name of the experiment; empty: the script's name"""
    seed: int = 1
    """seed of every random stream: environments, initial weights, exploration, minibatches"""
    cuda: bool = True
    """use a GPU if there is one"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "cleanRL"
    """project of the run on Weights & Biases"""
    wandb_entity: str | None = None
    """team or user of that project; unset: your own"""
    capture_video: bool = False
    """film the first training environment now and then, and the evaluation of --save-model, into
    videos/"""
    save_model: bool = False
    """at the end, write the model into the run's folder and evaluate it"""
    upload_model: bool = False
    """at the end, share the saved model on the Hugging Face hub; implies --save-model"""
    hf_entity: str = ""
    """user or organisation on the hub; empty: your own"""
    runs_dir: str = "runs"
    """folder in which the run gets a folder of its own"""
    resume: str | None = None
    """folder of a run to continue from its last checkpoint; its settings are taken over"""
    checkpoints: int | None = None
    """checkpoints per run, evenly spaced; environments start anew at each, except JAX's own, which
    go on; 0 turns them off; unset: 10, or 0 where one could take more than 1 GiB (large replay
    memory)"""
    eval_frequency: int = 0
    """evaluate about every so many steps, on environments of its own; 0: only at the end"""
    eval_episodes: int = 10
    """episodes of each evaluation"""

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass
class TorchArgs(RunArgs):
    torch_deterministic: bool = True
    """let torch use deterministic algorithms where it has them, and warn where it has none"""
    torch_threads: int = 1
    """CPU threads of torch; small networks are fastest on one; 0 leaves the choice to torch"""
    compile: bool = False
    """compile the update with torch.compile: slower to start, then faster"""
    cudagraphs: bool = True
    """on a GPU, replay inference and update as CUDA graphs; turn off to debug them"""


@dataclass
class PixelArgs(TorchArgs):
    async_envs: bool = False
    """step each environment in a process of its own"""
    torch_threads: int = 0
    """CPU threads of torch; 0 leaves the choice to torch"""


# What a resumed run may change: none of these can move its learning curve.
FREE_TO_CHANGE = {"resume", "track", "wandb_project_name", "wandb_entity", "capture_video"}
FREE_TO_CHANGE |= {"save_model", "upload_model", "hf_entity", "eval_frequency", "eval_episodes"}
FREE_TO_CHANGE |= {"runs_dir"}

A = TypeVar("A", bound=RunArgs)
C = TypeVar("C")


def parse_args(cls: type[A], argv: list[str] | None = None) -> A:
    """A script's settings by its command line; a mistake in it is one line and exit status 2."""
    argv = normalise(cls, sys.argv[1:] if argv is None else argv)
    default = stored_settings(cls, argv)
    args = run_tyro(cls, argv, default)
    args.exp_name = args.exp_name or Path(inspect.getfile(cls)).stem
    if args.resume is not None:
        check_unchanged(args, default)
    args.save_model = args.save_model or args.upload_model
    return args


def parse_command(cls: type[C], argv: list[str] | None = None) -> C:
    """The same for the flags of a tool."""
    return run_tyro(cls, normalise(cls, sys.argv[1:] if argv is None else argv))


def run_tyro(cls: type[C], argv: list[str], default: Any = tyro.MISSING_NONPROP) -> C:
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            about = inspect.getdoc(sys.modules[cls.__module__])
            return tyro.cli(cls, args=argv, default=default, description=about)
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
    known = {flag(field.name): field.name for field in dataclasses.fields(cls)}
    words, out = list(argv), []
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--help":
            out.append(word)
            continue
        name, _, value = word.partition("=")
        name = name.replace("_", "-")
        positive = "--" + name.removeprefix("--no-") if name not in known else name
        if positive not in known or (positive != name and types[known[positive]] is not bool):
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; --help lists the flags"
            raise BadInput(f"{name} is not a flag of this script{hint}")
        kind = types[known[positive]]
        if kind is bool:
            follows = "=" not in word and bool(words) and not words[0].startswith("-")
            if follows and (issubclass(cls, RunArgs) or words[0].lower() in ("true", "false")):
                value = words.pop(0)
            require(
                value.lower() in ("", "true", "false"), f"{name} takes True or False, not {value}"
            )
            on = (value.lower() != "false") == (name == positive)
            out.append(positive if on else "--no-" + positive.removeprefix("--"))
            continue
        if not value and words and "=" not in word:
            value = words.pop(0)
            more = [value]
            while words and not words[0].startswith("--"):  # --device-ids 0 1
                more.append(words.pop(0))
        else:
            more = [value] if "=" in word else []
        if kind in (int, float):
            more[:1] = [as_number(name, kind, text) for text in more[:1]]
        looks_like_flags = len(more) == 1 and more[0].startswith("-")  # --slurm-options "--time=1"
        if looks_like_flags and ("=" in word or " " in more[0]) and not issubclass(cls, RunArgs):
            out.append(f"{name}={more[0]}")
        else:
            out += [name, *more]
    return out


def as_number(name: str, kind: type, text: str) -> str:
    """1e6 and 1_000_000 are integers too."""
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


def first_message(box: str) -> str:
    """The one sentence that matters in tyro's box: from below its title to the next rule."""
    lines = [line.strip("│╭╮╰╯─- ") for line in box.splitlines()]  # of a rule nothing is left
    while lines and not lines.pop(0):
        pass  # up to the title
    while lines and not lines[0]:
        lines.pop(0)
    text = " ".join(itertools.takewhile(bool, lines))
    return text or "the command line could not be read; see --help"


COUNTS = {"total_timesteps", "eval_episodes", "update_epochs", "learn_every", "anneal_steps"}
COUNTS |= {"n_iteration", "e_policy", "v_value", "e_auxiliary", "n_aux_grad_accum"}
SHARES = {"min_probability", "gamma", "int_gamma", "gae_lambda", "tau", "update_proportion"}
SHARES |= {"start_e", "end_e", "exploration_fraction"}
ANY_SIGN = {"v_min", "v_max", "reward_scaler"}
SEEDS = 2**32  # of a larger seed, NumPy and JAX would use the last 32 bits only


def check_numbers(args: RunArgs) -> None:
    """Whatever no script can mean; what only some cannot is theirs to say."""
    require("/" not in args.exp_name, f"--exp-name {args.exp_name}: it must not contain /")
    check_seed(args.seed, getattr(args, "num_seeds", 1))
    for field in dataclasses.fields(args):
        name, value = field.name, getattr(args, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        counts = name.startswith(("num_", "trxl_")) or name.endswith(("_size", "_frequency"))
        if name in ("eval_frequency", "checkpoints", "torch_threads"):
            require(value >= 0, f"{flag(name)} must not be negative, got {value}")
        elif counts or name in COUNTS:
            least = 1
            if name == "num_steps" and isinstance(args, TorchArgs):
                # so that two of them are real, not resets, and have a variance
                least = 4 if getattr(args, "num_envs", 1) == 1 else 2
            require(value >= least, f"{flag(name)} must be at least {least}, got {value}")
        elif name in SHARES:
            require(0 <= value <= 1, f"{flag(name)} must be from 0 to 1, got {value}")
        elif isinstance(value, float) and name not in ANY_SIGN:
            require(0 <= value < math.inf, f"{flag(name)} must not be negative, got {value}")


def check_seed(seed: int, count: int = 1) -> None:
    """The last of `count` seeds, too, must be one that every random stream takes."""
    with_more = f" with --num-seeds {count}" if count > 1 else ""
    limit = SEEDS - max(count, 1) + 1
    require(seed >= 0, f"--seed must not be negative, got {seed}")
    require(seed < limit, f"--seed must be below {limit}{with_more}, got {seed}")


def stored_settings(cls: type[A], argv: list[str]) -> A | Any:
    """The settings of the run that --resume names, as defaults for this command line."""
    if "--resume" not in argv:
        return tyro.MISSING_NONPROP
    at = argv.index("--resume") + 1
    require(at < len(argv) and argv[at] != "None", "--resume needs the folder of a run")
    folder = Path(argv[at])
    record = read_record(folder, "--resume")
    names, stored = {field.name for field in dataclasses.fields(cls)}, record["args"]
    script = Path(inspect.getfile(cls)).stem
    require(
        record["script"] == script,
        f"--resume {folder}: made by {record['script']}.py, not {script}.py",
    )
    require(set(stored) == names, f"--resume {folder}: {script}.py has other settings by now")
    return restore_settings(cls, stored, f"--resume {folder}")


def check_unchanged(args: RunArgs, stored: RunArgs) -> None:
    names = [field.name for field in dataclasses.fields(args) if field.name not in FREE_TO_CHANGE]
    changed = [name for name in names if getattr(args, name) != getattr(stored, name)]
    if changed:
        texts = [f"{flag(n)} was {getattr(stored, n)}, now {getattr(args, n)}" for n in changed]
        raise BadInput(
            f"--resume {args.resume} continues a run with its own settings: {'; '.join(texts)}"
        )
