"""Evaluate the model of any script: load it, play seeded episodes, return their returns.

The script defines how its model acts: its class has `act(obs)`, which is greedy unless called with
`greedy=False`. A recurrent model also has `initial_state(num_envs)`; its `act(obs, state, first)`
returns (actions, new state), where `first` marks the environments whose episode begins. The class
is built as `cls(envs)`, or as `cls(envs, args)` if it takes `args`. JAX models are built by
`from_args(envs, args)` and have state_dict and load_state_dict.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_type_hints

import gymnasium as gym
import numpy as np

from cleanrl_utils.errors import BadInput, require, silenced
from cleanrl_utils.running import checkpoint, hub
from cleanrl_utils.running.settings import FREE_TO_CHANGE
from cleanrl_utils.running.stored import (
    has_type,
    is_file_name,
    known_settings,
    one_line,
    restore_settings,
)

Policy = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (observations, first) -> actions

MAX_EPISODE_STEPS = 30_000  # more than the longest time limit, Atari's 27,000


def save_model(path: Path, agent: Any, args: Any, script: str) -> None:
    """Write the model file: weights and normaliser statistics, with the settings as metadata."""
    settings = dataclasses.asdict(args)
    for name in FREE_TO_CHANGE:
        settings.pop(name, None)
    metadata = {"script": script, "class": type(agent).__name__, "args": settings}
    checkpoint.save(path, {"model": agent}, metadata)


def load_model(
    path: str | Path,
    script: str | Path | None = None,
    device: str = "cpu",
    env_id: str | None = None,
    exp_name: str | None = None,
) -> tuple[Any, Any, ModuleType]:
    """Load (agent, args, module); the code is cleanrl/'s or `script`, never part of the file.

    `env_id` and `exp_name` are the user's. A file that names an environment of the form
    module:Name-v0 is refused unless `env_id` is the same, because making it imports that module.
    Files that the original CleanRL saved with torch hold only weights, so they need both.
    """
    original = zipfile.is_zipfile(path)
    metadata, state = load_original(path) if original else read_model(path)
    stored = metadata["args"]
    if original:
        require(
            bool(exp_name and env_id), f"{path}: holds only weights; give --exp-name and --env-id"
        )
        metadata = {"script": exp_name, "class": None}
        stored = {"env_id": env_id, **stored}
    check_env_id(stored.get("env_id"), env_id, path)
    module = import_script(metadata["script"], script)
    stored = known_settings(module.Args, stored)
    if original:  # keep the settings that have the same type here
        types = get_type_hints(module.Args)
        stored = {name: value for name, value in stored.items() if has_type(value, types[name])}
    args = restore_settings(module.Args, stored, str(path))
    cls = find_class(module, metadata["class"], path)
    agent = build_agent(cls, args, module, path, is_own_script=script is not None)
    if "torch" in sys.modules and hasattr(agent, "to"):
        agent = agent.to(device)
    if original:
        state["model"] = rename_weights(agent, state["model"], path)
    load_weights(agent, state["model"], path)
    return agent, args, module


def read_model(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read (metadata, state) of a model file; a one-line error for any other file."""
    try:
        metadata, state = checkpoint.load(path)
    except Exception as error:  # a header that this project did not write
        raise BadInput(f"{path}: not a CleanRL file ({one_line(error)})") from None
    is_model = isinstance(metadata, dict) and "class" in metadata and "model" in state
    require(is_model, f"{path}: a checkpoint, not a model")
    kinds = {"script": str, "class": str, "args": dict}
    complete = all(isinstance(metadata.get(name), kind) for name, kind in kinds.items())
    require(complete, f"{path}: its metadata lacks the script, class or args of a model")
    require(is_file_name(metadata["script"]), f"{path}: its metadata names no script")
    return metadata, state


def check_env_id(found: Any, named: str | None, path: str | Path) -> None:
    """Refuse an environment that imports a module, unless the user named it, too."""
    require(isinstance(found, str), f"{path}: its metadata names no environment")
    imports = f"{path}: trained on {found}, which imports a module"
    hint = f"if you trust it, add --env-id {found}"
    require(":" not in found or found == named, f"{imports}; {hint}")


def find_class(module: ModuleType, name: str | None, path: str | Path) -> Any:
    """The class of a model by its name; without one, the only class that has `act`."""
    classes = [cls for cls in vars(module).values() if inspect.isclass(cls)]
    classes = [cls for cls in classes if cls.__module__ == module.__name__]
    if name is None:
        found = [cls for cls in classes if hasattr(cls, "act")]
    else:
        found = [cls for cls in classes if cls.__name__ == name]
    if len(found) != 1:
        raise BadInput(f"{path}: {module.__name__} has no class {name or 'that acts'}")
    return found[0]


def load_weights(agent: Any, weights: Any, path: str | Path) -> None:
    try:
        agent.load_state_dict(weights)
    except Exception as error:
        kind = type(agent).__name__
        raise BadInput(f"{path}: not the weights of this {kind} ({one_line(error)})") from None
    if hasattr(agent, "eval"):  # not in JAX
        agent.eval()


def build(cls: Any, envs: gym.vector.VectorEnv, args: Any) -> Any:
    """Make a model of this class, with initial weights."""
    if hasattr(cls, "from_args"):
        return cls.from_args(envs, args)
    return cls(envs, args) if "args" in inspect.signature(cls).parameters else cls(envs)


def build_agent(
    cls: Any, args: Any, module: ModuleType, path: str | Path, is_own_script: bool
) -> Any:
    """Make a model for the environment of its script; errors begin with `path`, its file."""
    try:
        with silenced():
            make_env = partial(module.make_env, **args.env_settings)
            envs = gym.vector.SyncVectorEnv([make_env(args.env_id, args.seed, 0, False, "")])
            agent = build(cls, envs, args)
            envs.close()
            return agent
    except BadInput as error:
        raise BadInput(f"{path}: {error.message}") from None
    except Exception as error:
        if is_own_script:  # the user's own code: show the traceback
            raise
        raise BadInput(f"{path}: {cls.__name__} cannot be built ({one_line(error)})") from None


def load_teacher(args: Any, envs: gym.vector.VectorEnv, scripts: list[str], device: Any) -> Any:
    """Load the agent of --teacher-model or --teacher-policy-hf-repo.

    It must be made by one of `scripts` and play the game of --env-id.
    """
    path, flag = find_teacher(args, scripts)
    original = zipfile.is_zipfile(path)  # only weights: the file names no script
    made_by = args.teacher_model_exp_name if original else read_model(path)[0]["script"]
    wanted = " or ".join(f"{name}.py" for name in scripts)
    require(made_by in scripts, f"{flag}: made by {made_by}.py, not by {wanted}")
    teacher, settings, module = load_model(
        path, device=str(device), env_id=args.env_id, exp_name=made_by
    )
    differ = f"{flag}: it plays {settings.env_id}, not {args.env_id}"
    require(game_name(settings.env_id) == game_name(args.env_id), differ)
    env = module.make_env(settings.env_id, 1, 0, False, "")()
    space = env.action_space
    env.close()
    differ = f"{differ}: its actions are {space}, not {envs.single_action_space}"
    require(space == envs.single_action_space, differ)
    return teacher


def find_teacher(args: Any, scripts: list[str]) -> tuple[Path, str]:
    """The teacher's file and the flag that names it; by default the original's on the hub."""
    if args.teacher_model is not None:
        path = Path(args.teacher_model)
        flag = f"--teacher-model {args.teacher_model}"
        require(path.is_file(), f"{flag}: no such file")
        return path, flag
    name = args.teacher_model_exp_name
    default = hub.repository_name({"env_id": args.env_id, "exp_name": name, "seed": 1}, "cleanrl")
    repository = args.teacher_policy_hf_repo or default
    try:
        with silenced():
            path = hub.download_model(repository, name)
    except BadInput as error:
        train = f"python cleanrl/{scripts[0]}.py --env-id {args.env_id} --save-model"
        hint = f"train a teacher ({train}) and pass it as --teacher-model FILE"
        raise BadInput(f"{error.message}; {hint}") from None
    return path, f"--teacher-policy-hf-repo {repository}"


def game_name(env_id: str) -> str:
    """The Atari game of an id: Breakout for BreakoutNoFrameskip-v4 and ALE/Breakout-v5."""
    return re.sub(r"(NoFrameskip|Deterministic)?-v\d+$", "", env_id.removeprefix("ALE/"))


def import_script(name: str, path: str | Path | None = None) -> ModuleType:
    """Import the script that made a model: cleanrl/`name`.py, or the file at `path`."""
    try:
        if path is None:
            require(name.isidentifier(), f"{name!r} is not the name of a script of cleanrl/")
            return importlib.import_module(f"cleanrl.{name}")
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert spec and spec.loader
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (ModuleNotFoundError, FileNotFoundError, AssertionError) as error:
        raise BadInput(
            f"the script {path or f'cleanrl/{name}.py'} cannot be loaded ({error})"
        ) from None


def as_policy(agent: Any, device: Any = "cpu", greedy: bool = True) -> Policy:
    """A function from NumPy observations to NumPy actions, for a torch or JAX agent."""
    torch = sys.modules.get("torch")
    kwargs = {} if greedy else {"greedy": False}
    if torch is None or not isinstance(agent, torch.nn.Module):
        return lambda obs, first: np.asarray(agent.act(obs, **kwargs))

    from cleanrl_utils.speed.graphs import as_tensor

    state: Any = None

    def policy(obs: np.ndarray, first: np.ndarray) -> np.ndarray:
        nonlocal state
        x = as_tensor(obs).to(device)
        with torch.no_grad():
            if not hasattr(agent, "initial_state"):
                return agent.act(x, **kwargs).cpu().numpy()
            state = agent.initial_state(len(obs)) if state is None else state
            actions, state = agent.act(x, state, torch.as_tensor(first, device=device), **kwargs)
        return actions.cpu().numpy()

    return policy


@contextmanager
def eval_mode(agent: Any) -> Iterator[None]:
    """Inside, a torch agent has no dropout and batch normalisation keeps its statistics."""
    parts = list(agent.modules()) if hasattr(agent, "modules") else []
    modes = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode


def play(
    policy: Policy,
    make_env: Callable,
    env_id: str,
    episodes: int,
    seed: int,
    video: bool,
    video_folder: str,
    epsilon: float = 0.0,
    lengths: list[float] | None = None,
) -> list[float]:
    """Play `episodes` episodes and return their returns.

    Each environment plays one, so that short episodes are not favoured. A fraction `epsilon` of the
    actions is random. The lengths are appended to `lengths`.
    """
    envs = gym.vector.SyncVectorEnv(
        [make_env(env_id, seed + i, i, video, video_folder) for i in range(episodes)]
    )
    obs, _ = envs.reset(seed=seed)
    random = np.random.default_rng(seed)
    space = envs.single_action_space
    space.seed(seed)
    returns = np.full(episodes, np.nan)
    steps = np.full(episodes, np.nan)
    first = np.ones(episodes, bool)
    ended = np.zeros(episodes, bool)
    for _ in range(MAX_EPISODE_STEPS):
        actions = policy(obs, first)
        if epsilon:
            actions = np.array(actions)  # a copy: JAX arrays are read-only
            for i in np.flatnonzero(random.random(episodes) < epsilon):
                actions[i] = space.sample()
        first = ended  # the step after the end of an episode resets
        obs, _, terminated, truncated, infos = envs.step(actions)
        ended = terminated | truncated
        if "_episode" in infos:
            new = infos["_episode"] & np.isnan(returns)
            returns[new] = infos["episode"]["r"][new]
            steps[new] = infos["episode"]["l"][new]
        unfinished = np.isnan(returns)
        if not unfinished.any():
            break
    if unfinished.any():
        so_far = [np.ravel(x)[0] for x in envs.get_attr("episode_returns")]
        returns[unfinished] = np.array(so_far)[unfinished]
        steps[unfinished] = MAX_EPISODE_STEPS
        number = f"{unfinished.sum()} of {episodes} episodes did not end"
        limit = f"in {MAX_EPISODE_STEPS:,} steps"
        print(f"evaluation: {number} {limit}; their return so far counts", file=sys.stderr)
    envs.close()
    if lengths is not None:
        lengths += steps.tolist()
    return returns.tolist()


def describe(returns: list[float]) -> str:
    """Mean, number and range of some returns, in words."""
    if len(returns) == 1:
        return f"return {returns[0]:.2f} of 1 episode"
    mean = f"mean return {np.mean(returns):.2f} over {len(returns)} episodes"
    return f"{mean}, from {min(returns):.2f} to {max(returns):.2f}"


def load_original(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a file that the original CleanRL wrote with torch.save; returns (metadata, state).

    It holds weights, for C51 also settings. Only tensors and plain values are unpickled.
    """
    import torch

    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # not a file of weights
        saved = None
    unsafe = f"{path}: holds more than weights, so it is not loaded"
    require(isinstance(saved, dict), unsafe)
    settings = saved.get("args", {})
    weights = saved.get("model_weights", saved)
    require(isinstance(settings, dict) and isinstance(weights, dict), unsafe)
    return {"args": settings}, {"model": weights}


def rename_weights(model: Any, theirs: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Rename the weights of the original CleanRL to the names of our class."""
    ours = model.state_dict()
    if not any(name.startswith("network.") for name in ours):  # our Q-networks are sequences
        theirs = {str(name).removeprefix("network."): x for name, x in theirs.items()}
    wrong = sorted(theirs.keys() ^ ours.keys())
    if not wrong:
        shapes = {name: getattr(weights, "shape", None) for name, weights in theirs.items()}
        wrong = [name for name in ours if ours[name].shape != shapes[name]]
    kind = type(model).__name__
    require(not wrong, f"{path}: not the weights of {kind}: {wrong[:3]}")
    return theirs


def evaluate(
    model_path: str | Path,
    make_env: Callable,
    env_id: str,
    eval_episodes: int,
    run_name: str,
    Model: type,
    device: Any = "cpu",
    epsilon: float = 0.0,
    capture_video: bool = True,
    seed: int = 1,
) -> list[float]:
    """Play a saved model of class `Model`, ours or the original CleanRL's.

    A fraction `epsilon` of the actions is random.
    """
    original = zipfile.is_zipfile(model_path)
    metadata, state = load_original(model_path) if original else read_model(model_path)
    envs = gym.vector.SyncVectorEnv([make_env(env_id, seed, 0, False, run_name)])
    try:
        model = build(Model, envs, SimpleNamespace(**metadata["args"]))
    except AttributeError as error:  # the file lacks settings that this class needs
        raise BadInput(f"{model_path}: {Model.__name__} needs settings: {error}") from None
    model = model.to(device) if hasattr(model, "to") else model  # not in JAX
    envs.close()
    if original:
        state["model"] = rename_weights(model, state["model"], model_path)
    load_weights(model, state["model"], model_path)
    policy = as_policy(model, device)
    videos = f"videos/{run_name}"
    return play(policy, make_env, env_id, eval_episodes, seed, capture_video, videos, epsilon)
