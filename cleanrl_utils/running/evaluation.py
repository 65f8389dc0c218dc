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
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np

from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running import checkpoint
from cleanrl_utils.running.settings import FREE_TO_CHANGE

Policy = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (observations, first) -> actions

LONGEST = 30_000  # steps of an episode: more than the longest time limit, 27,000 of Atari's


def save_model(path: Path, agent: Any, args: Any, script: str) -> None:
    """The model file: weights and normaliser statistics, with the settings in its metadata."""
    settings = {k: v for k, v in dataclasses.asdict(args).items() if k not in FREE_TO_CHANGE}
    about = {"script": script, "class": type(agent).__name__, "args": settings}
    checkpoint.save(path, {"model": agent}, about)


def load_model(
    path: str | Path, script: str | None = None, device: str = "cpu"
) -> tuple[Any, Any, ModuleType]:
    """(agent, args, module) of a model file; code comes from here or `script`, never from it."""
    about, state = checkpoint.load(path)
    require("class" in about and "model" in state, f"{path}: a checkpoint, not a model")
    module = import_script(about["script"], script)
    known = {field.name for field in dataclasses.fields(module.Args)}
    args = module.Args(**{name: value for name, value in about["args"].items() if name in known})
    cls: Any = getattr(module, about["class"], None)
    its_own = inspect.isclass(cls) and cls.__module__ == module.__name__
    if not its_own:
        raise BadInput(f"{path}: {module.__name__} has no class {about['class']}")
    envs = gym.vector.SyncVectorEnv([module.make_env(args.env_id, args.seed, 0, False, "")])
    agent = build(cls, envs, args)
    envs.close()
    if "torch" in sys.modules and hasattr(agent, "to"):
        agent = agent.to(device)
    agent.load_state_dict(state["model"])
    return agent, args, module


def build(cls: Any, envs: gym.vector.VectorEnv, args: Any) -> Any:
    """A model of this class, before its weights are loaded."""
    if hasattr(cls, "from_args"):
        return cls.from_args(envs, args)
    return cls(envs, args) if "args" in inspect.signature(cls).parameters else cls(envs)


def load_teacher(args: Any, envs: gym.vector.VectorEnv, scripts: list[str], device: Any) -> Any:
    """The agent that --teacher-model or --teacher-policy-hf-repo names, made by one of `scripts`,
    for the actions of `envs`."""
    path, flag = Path(args.teacher_model or ""), f"--teacher-model {args.teacher_model}"
    if args.teacher_policy_hf_repo:
        from cleanrl_utils.huggingface import download_model

        path = download_model(args.teacher_policy_hf_repo, args.teacher_model_exp_name)
        flag = f"--teacher-policy-hf-repo {args.teacher_policy_hf_repo}"
    require(path.is_file(), f"{flag}: no such file")
    made_by = checkpoint.load(path)[0].get("script")
    wanted = " or ".join(f"{name}.py" for name in scripts)
    require(made_by in scripts, f"{flag}: a file of {made_by}.py, not of {wanted}")
    teacher, settings, module = load_model(path, device=str(device))
    game, env = settings.env_id, module.make_env(settings.env_id, 1, 0, False, "")()
    space, env_id = env.action_space, args.env_id
    env.close()
    differ = f"it plays {game}, with {space} of actions; {env_id} has {envs.single_action_space}"
    require(space == envs.single_action_space, f"{flag}: {differ}")
    return teacher


def import_script(name: str, path: str | None = None) -> ModuleType:
    """The script that made a model: cleanrl/`name`.py, or your own file at `path`."""
    try:
        if path is None:
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
    run_name: str,
    epsilon: float = 0.0,
    lengths: list[float] | None = None,
) -> list[float]:
    """Returns of `episodes` episodes, one per environment, so that short ones are not favoured;
    `epsilon` of the actions are random. Their lengths are added to `lengths`."""
    envs = gym.vector.SyncVectorEnv(
        [make_env(env_id, seed + i, i, video, run_name) for i in range(episodes)]
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


def load_original(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `checkpoint.load` returns, of a file that the original wrote with torch.save: weights,
    for C51 with settings. Nothing but tensors and plain values is unpickled."""
    import pickle

    import torch

    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError):
        saved = None
    require(isinstance(saved, dict), f"{path}: not weights alone, so it is not loaded")
    return {"args": saved.get("args", {})}, {"model": saved.get("model_weights", saved)}


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
    about, state = load_original(model_path) if original else checkpoint.load(model_path)
    envs = gym.vector.SyncVectorEnv([make_env(env_id, seed, 0, False, run_name)])
    try:
        model = build(Model, envs, SimpleNamespace(**about["args"]))
    except AttributeError as error:  # weights without the settings that shape this class
        raise BadInput(f"{model_path}: {Model.__name__} needs settings: {error}") from None
    model = model.to(device) if hasattr(model, "to") else model  # JAX has chosen its device
    envs.close()
    if original:
        ours, theirs = model.state_dict(), state["model"]
        if not any(name.startswith("network.") for name in ours):  # our Q-networks are sequences
            theirs = {name.removeprefix("network."): x for name, x in theirs.items()}
        differ = sorted(theirs.keys() ^ ours.keys())
        differ = differ or [name for name in ours if ours[name].shape != theirs[name].shape]
        state["model"] = theirs
        require(not differ, f"{model_path}: not the weights of {Model.__name__}: {differ[:3]}")
    model.load_state_dict(state["model"])
    policy = as_policy(model, device)
    return play(policy, make_env, env_id, eval_episodes, seed, capture_video, run_name, epsilon)


def describe(returns: Sequence[float]) -> str:
    """Mean and spread over episodes; ± is kept for what varies over seeds."""
    mean = f"{np.mean(returns):.2f}"
    if len(returns) == 1:
        return f"{mean} (1 episode)"
    return f"{mean} (standard deviation {np.std(returns):.2f} over {len(returns)} episodes)"
