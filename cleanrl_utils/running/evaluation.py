"""Play any script's model: load it, run seeded episodes, return what they scored.

A script says how its model acts: its class has `act(obs)`, greedy unless told so. A recurrent
model also has `initial_state(num_envs)`; its `act(obs, state, first)` returns (actions, new state),
where `first` marks the environments whose episode begins. A class is built as `cls(envs)`, or as
`cls(envs, args)` if it takes `args`. JAX models are built by `from_args(envs, args)`, and also have
state_dict and load_state_dict.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_type_hints

import gymnasium as gym
import numpy as np

from cleanrl_utils.errors import BadInput, require, unsaid
from cleanrl_utils.running import checkpoint, hub
from cleanrl_utils.running.settings import FREE_TO_CHANGE
from cleanrl_utils.running.stored import fits, known_settings, one_line, restore_settings

Policy = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (observations, first) -> actions

LONGEST = 30_000  # steps of an episode: more than the longest time limit, 27,000 of Atari's


def save_model(path: Path, agent: Any, args: Any, script: str) -> None:
    """The model file: weights and normaliser statistics, with the settings in its metadata."""
    settings = {k: v for k, v in dataclasses.asdict(args).items() if k not in FREE_TO_CHANGE}
    about = {"script": script, "class": type(agent).__name__, "args": settings}
    checkpoint.save(path, {"model": agent}, about)


def load_model(
    path: str | Path,
    script: str | Path | None = None,
    device: str = "cpu",
    env_id: str | None = None,
    exp_name: str | None = None,
) -> tuple[Any, Any, ModuleType]:
    """(agent, args, module) of a model file; code comes from here or `script`, never from the file.

    `env_id` and `exp_name` are what the user says about it. A file that names an environment of
    the form module:Name-v0 is refused unless `env_id` names the same one, as making it imports that
    module. Weights that the original saved with torch need both, as such files do not have them.
    """
    original = zipfile.is_zipfile(path)
    about, state = load_original(path) if original else read_model(path)
    stored = about["args"]
    if original:
        require(bool(exp_name and env_id), f"{path}: weights alone; name --exp-name and --env-id")
        about = {"script": exp_name, "class": None}
        stored = {"env_id": env_id, **stored}
    check_env_id(stored.get("env_id"), env_id, path)
    module = import_script(about["script"], script)
    stored = known_settings(module.Args, stored)
    if original:  # of another program's settings, those that mean the same here
        hints = get_type_hints(module.Args)
        stored = {name: value for name, value in stored.items() if fits(value, hints[name])}
    args = restore_settings(module.Args, stored, str(path))
    cls = find_class(module, about["class"], path)
    try:
        with unsaid():
            make_env = partial(module.make_env, **args.env_settings)
            envs = gym.vector.SyncVectorEnv([make_env(args.env_id, args.seed, 0, False, "")])
            agent = build(cls, envs, args)
            envs.close()
    except BadInput as error:
        raise BadInput(f"{path}: {error.message}") from None
    except Exception as error:
        if script is not None:  # the user's own code: it needs its traceback
            raise
        raise BadInput(f"{path}: {cls.__name__} cannot be built ({one_line(error)})") from None
    if "torch" in sys.modules and hasattr(agent, "to"):
        agent = agent.to(device)
    if original:
        state["model"] = as_ours(agent, state["model"], path)
    load_weights(agent, state["model"], path)
    return agent, args, module


def read_model(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metadata, state) of a model file; one line for whatever is not one."""
    try:
        about, state = checkpoint.load(path)
    except Exception as error:  # a header that no program of ours wrote
        raise BadInput(f"{path}: not a CleanRL file ({one_line(error)})") from None
    is_model = isinstance(about, dict) and "class" in about and "model" in state
    require(is_model, f"{path}: a checkpoint, not a model")
    kinds = {"script": str, "class": str, "args": dict}
    whole = all(isinstance(about.get(name), kind) for name, kind in kinds.items())
    require(whole, f"{path}: its metadata is not that of a model (script, class, args)")
    return about, state


def check_env_id(found: Any, named: str | None, path: str | Path) -> None:
    """Refuse a file's environment that imports a module, unless the user names the same one."""
    require(isinstance(found, str), f"{path}: its metadata names no environment")
    imports = f"{path}: trained on {found}, which imports a module"
    hint = f"if you trust it, name it: --env-id {found}"
    require(":" not in found or found == named, f"{imports}; {hint}")


def find_class(module: ModuleType, name: str | None, path: str | Path) -> Any:
    """The class of a model; without a name, the only class of the script that can act."""
    own = [cls for cls in vars(module).values() if inspect.isclass(cls)]
    own = [cls for cls in own if cls.__module__ == module.__name__]
    found = [cls for cls in own if cls.__name__ == name or (name is None and hasattr(cls, "act"))]
    if len(found) != 1:
        raise BadInput(f"{path}: {module.__name__} has no class {name or 'that acts'}")
    return found[0]


def load_weights(agent: Any, weights: Any, path: str | Path) -> None:
    try:
        agent.load_state_dict(weights)
    except Exception as error:
        kind = type(agent).__name__
        raise BadInput(f"{path}: not the weights of this {kind} ({one_line(error)})") from None


def build(cls: Any, envs: gym.vector.VectorEnv, args: Any) -> Any:
    """A model of this class, before its weights are loaded."""
    if hasattr(cls, "from_args"):
        return cls.from_args(envs, args)
    return cls(envs, args) if "args" in inspect.signature(cls).parameters else cls(envs)


def load_teacher(args: Any, envs: gym.vector.VectorEnv, scripts: list[str], device: Any) -> Any:
    """The agent that --teacher-model or --teacher-policy-hf-repo names, made by one of `scripts`,
    for the game of --env-id."""
    path, flag = find_teacher(args, scripts)
    original = zipfile.is_zipfile(path)  # weights that the original saved: they name no script
    made_by = args.teacher_model_exp_name if original else read_model(path)[0]["script"]
    wanted = " or ".join(f"{name}.py" for name in scripts)
    require(made_by in scripts, f"{flag}: a file of {made_by}.py, not of {wanted}")
    about = {"env_id": args.env_id, "exp_name": made_by}
    teacher, settings, module = load_model(path, device=str(device), **about)
    differ = f"{flag}: it plays {settings.env_id}, not {args.env_id}"
    require(game_of(settings.env_id) == game_of(args.env_id), differ)
    env = module.make_env(settings.env_id, 1, 0, False, "")()
    space = env.action_space
    env.close()
    differ = f"{differ}: {space} of actions instead of {envs.single_action_space}"
    require(space == envs.single_action_space, differ)
    return teacher


def find_teacher(args: Any, scripts: list[str]) -> tuple[Path, str]:
    """The teacher's file, and the flag that names it; by default the original's on the hub."""
    if args.teacher_model is not None:
        path, flag = Path(args.teacher_model), f"--teacher-model {args.teacher_model}"
        require(path.is_file(), f"{flag}: no such file")
        return path, flag
    name = args.teacher_model_exp_name
    default = hub.repository_name({"env_id": args.env_id, "exp_name": name, "seed": 1}, "cleanrl")
    repository = args.teacher_policy_hf_repo or default
    try:
        with unsaid():
            path = hub.download_model(repository, name)
    except BadInput as error:
        train = f"python cleanrl/{scripts[0]}.py --env-id {args.env_id} --save-model"
        hint = f"train a teacher ({train}) and name it with --teacher-model FILE"
        raise BadInput(f"{error.message}; {hint}") from None
    return path, f"--teacher-policy-hf-repo {repository}"


def game_of(env_id: str) -> str:
    """The game of an id: Breakout, of BreakoutNoFrameskip-v4 and of ALE/Breakout-v5."""
    return re.sub(r"(NoFrameskip|Deterministic)?-v\d+$", "", env_id.removeprefix("ALE/"))


def import_script(name: str, path: str | Path | None = None) -> ModuleType:
    """The script that made a model: cleanrl/`name`.py, or your own file at `path`."""
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
    """A function from NumPy observations to NumPy actions, whatever the agent is made of."""
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
    """Returns of `episodes` episodes, one per environment, so that short ones are not favoured;
    `epsilon` of the actions are random. Their lengths are added to `lengths`."""
    envs = gym.vector.SyncVectorEnv(
        [make_env(env_id, seed + i, i, video, video_folder) for i in range(episodes)]
    )
    obs, _ = envs.reset(seed=seed)
    space, random = envs.single_action_space, np.random.default_rng(seed)
    space.seed(seed)
    returns, counts = np.full((2, episodes), np.nan)
    first, ended = np.ones(episodes, bool), np.zeros(episodes, bool)
    for _ in range(LONGEST):
        actions = policy(obs, first)
        if epsilon:
            actions = np.array(actions)  # a copy: what JAX returns cannot be written to
            for i in np.flatnonzero(random.random(episodes) < epsilon):
                actions[i] = space.sample()
        first = ended  # an episode's last observation is followed by the first of the next
        obs, _, terminated, truncated, infos = envs.step(actions)
        ended = terminated | truncated
        if "_episode" in infos:
            new = infos["_episode"] & np.isnan(returns)
            returns[new] = infos["episode"]["r"][new]
            counts[new] = infos["episode"]["l"][new]
        if not (endless := np.isnan(returns)).any():
            break
    else:
        so_far = [np.ravel(x)[0] for x in envs.get_attr("episode_returns")]
        returns[endless] = np.array(so_far)[endless]
        counts[endless] = LONGEST
        number = f"{endless.sum()} of {episodes} episodes did not end"
        print(f"evaluation: {number} in {LONGEST:,} steps; they count so far", file=sys.stderr)
    envs.close()
    if lengths is not None:
        lengths += counts.tolist()
    return returns.tolist()


def describe(returns: list[float]) -> str:
    mean = f"mean return {np.mean(returns):.2f} over {len(returns)} episodes"
    lowest, highest = min(returns), max(returns)
    return f"{mean}, from {lowest:.2f} to {highest:.2f}" if len(returns) > 1 else mean


def load_original(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `checkpoint.load` returns, of a file that the original wrote with torch.save: weights,
    for C51 with settings. Nothing but tensors and plain values is unpickled."""
    import torch

    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # whatever a file can hold that is not weights
        saved = None
    require(isinstance(saved, dict), f"{path}: not weights alone, so it is not loaded")
    settings, weights = saved.get("args", {}), saved.get("model_weights", saved)
    whole = isinstance(settings, dict) and isinstance(weights, dict)
    require(whole, f"{path}: not weights alone, so it is not loaded")
    return {"args": settings}, {"model": weights}


def as_ours(model: Any, theirs: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The original's weights under the names that our class has for them."""
    ours = model.state_dict()
    if not any(name.startswith("network.") for name in ours):  # our Q-networks are sequences
        theirs = {str(name).removeprefix("network."): x for name, x in theirs.items()}
    differ = sorted(theirs.keys() ^ ours.keys())
    differ = differ or [
        name for name in ours if ours[name].shape != getattr(theirs[name], "shape", None)
    ]
    kind = type(model).__name__
    require(not differ, f"{path}: not the weights of {kind}: {differ[:3]}")
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
    """Play a saved model of class `Model`, maybe one that the original saved with torch; `epsilon`
    of the actions are random."""
    original = zipfile.is_zipfile(model_path)
    about, state = load_original(model_path) if original else read_model(model_path)
    envs = gym.vector.SyncVectorEnv([make_env(env_id, seed, 0, False, run_name)])
    try:
        model = build(Model, envs, SimpleNamespace(**about["args"]))
    except AttributeError as error:  # weights without the settings that shape this class
        raise BadInput(f"{model_path}: {Model.__name__} needs settings: {error}") from None
    model = model.to(device) if hasattr(model, "to") else model  # JAX has chosen its device
    envs.close()
    if original:
        state["model"] = as_ours(model, state["model"], model_path)
    load_weights(model, state["model"], model_path)
    policy = as_policy(model, device)
    films = f"videos/{run_name}"
    return play(policy, make_env, env_id, eval_episodes, seed, capture_video, films, epsilon)
