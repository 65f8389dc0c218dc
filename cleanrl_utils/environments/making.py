"""Make environments: register a family when its id is asked for, explain errors, record videos."""

import contextlib
import difflib
import importlib.util
import os
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any, get_args

import gymnasium as gym
import numpy as np

from cleanrl_utils.environments.spaces import parts_of
from cleanrl_utils.errors import BadInput, missing_package, require, silenced

# SDL (pygame) would catch SIGTERM, and `kill` and `timeout` could not end a run
os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")

# without its dependencies: it asks for a Gymnasium of 2023
NO_DEPS = "pip install --no-deps -r requirements/no-deps.txt"


def make(env_id: str, video_folder: str | Path | None = None, **kwargs: Any) -> gym.Env:
    """gym.make for all families of this project; records videos if `video_folder` is given."""
    require(not env_id.startswith(":"), f"--env-id {env_id}: name the module, as in module:Id")
    register_family(env_id)
    if ":" in env_id and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # so that --env-id my_env:My-v0 finds ./my_env.py
    cannot = f"--capture-video: {env_id} cannot be recorded"
    if video_folder is not None:
        kwargs["render_mode"] = "rgb_array"
        render_without_screen()
    try:
        env = gym.make(env_id, **kwargs)
        if video_folder is None:
            return env
        modes = env.metadata.get("render_modes") or []
        require("rgb_array" in modes, f"{cannot}: its metadata names no render mode rgb_array")
        return record_video(env, Path(video_folder))
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise explain_missing(env_id, error) from None
    except gym.error.Error as error:
        raise BadInput(f"--env-id {env_id}: {explain(env_id, error)}") from None
    except (TypeError, AssertionError) as error:
        named = [name for name in kwargs if re.search(f"['`]{name}['`]", str(error))]
        if named == ["render_mode"]:
            raise BadInput(f"{cannot}: it does not accept render_mode") from None
        if named:
            raise BadInput(f"--env-kwargs: {env_id} does not accept it: {error}") from None
        raise


def render_without_screen() -> None:
    """Let pygame and MuJoCo render on a machine without a screen or sound card."""
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # pygame looks for a sound card
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")
        if "WAYLAND_DISPLAY" not in os.environ:
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else pygame prints an error


class Film(gym.wrappers.RecordVideo):
    """Record the first episode, and later ones as long as recording takes little of the time."""

    MAX_TIME_FRACTION = 0.05
    MAX_FRAMES = 3_000  # per episode

    def __init__(self, env: gym.Env, folder: Path):
        self.spent = 0.0
        self.began = time.perf_counter()
        part = len({path.name.split("-episode")[0] for path in folder.glob("*.mp4")})
        env.metadata.setdefault("render_fps", 30)
        with warnings.catch_warnings():  # nothing is overwritten: file names are new
            warnings.filterwarnings("ignore", "(?s).*Overwriting existing videos")
            super().__init__(
                env,
                str(folder),
                episode_trigger=bool,
                name_prefix=f"part{part}",
                disable_logger=True,
            )
        self.episode_trigger = self.affordable  # set here: the constructor would deep-copy it

    def affordable(self, episode: int) -> bool:
        """Whether to record this episode."""
        elapsed = time.perf_counter() - self.began
        return episode == 0 or self.spent < self.MAX_TIME_FRACTION * elapsed

    def _capture_frame(self) -> None:
        if len(self.recorded_frames) < self.MAX_FRAMES:
            began = time.perf_counter()
            super()._capture_frame()
            self.spent += time.perf_counter() - began

    def stop_recording(self) -> None:
        began = time.perf_counter()
        super().stop_recording()
        self.spent += time.perf_counter() - began


def record_video(env: gym.Env, folder: Path) -> gym.Env:
    return Film(env, folder)


def is_atari(env_id: str) -> bool:
    return env_id.startswith("ALE/") or "NoFrameskip" in env_id or "Deterministic-v" in env_id


def register_family(env_id: str) -> None:
    """Register the environments of packages that Gymnasium does not know by itself."""
    if is_atari(env_id):
        try:
            import ale_py
            import cv2  # noqa: F401
        except ImportError as error:
            names = {"ale_py": "ale-py", "cv2": "opencv-python-headless"}
            raise missing_package(names.get(error.name or "", "ale-py"), "atari") from None
        gym.register_envs(ale_py)
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    elif env_id.startswith("dm_control/"):
        register_dm_control()
    elif any(name in env_id for name in ("MortarMayhem", "MysteryPath", "SearingSpotlights")):
        register_memory_gym()
    elif env_id.startswith("pettingzoo/"):
        register_board_game(env_id)
    elif "mujoco" in str(getattr(gym.registry.get(env_id), "entry_point", "")):
        quieten_mujoco()


def quieten_mujoco() -> None:
    """Hide the warnings about version 4 of a task, which published results use."""
    warnings.filterwarnings("ignore", ".*is out of date", DeprecationWarning)
    try:
        import mujoco
    except ImportError:
        return  # gym.make will say what to install

    def show(text: str) -> None:
        if "deprecated" not in text:  # about Gymnasium's model files
            print(f"mujoco: {text}", file=sys.stderr)

    mujoco.set_mju_user_warning(show)


def register_dm_control() -> None:
    try:
        import mujoco
        from dm_control.mujoco.wrapper.mjbindings import sizes
    except ImportError:
        raise missing_package("dm_control", "dm_control") from None
    # dm_control 1.0.50 lists arrays that mujoco 4 no longer has, and fails on the first of them
    for kind, owner in (("mjmodel", mujoco.MjModel), ("mjdata", mujoco.MjData)):
        for name in [n for n in sizes.array_sizes[kind] if not hasattr(owner, n)]:
            del sizes.array_sizes[kind][name]
    try:
        import shimmy
    except ImportError:
        raise missing_package("shimmy", "dm_control") from None
    gym.register_envs(shimmy)


def register_board_game(env_id: str) -> None:
    """A classic game of PettingZoo by its name, e.g. pettingzoo/connect_four_v3."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    entry_point = "cleanrl_utils.environments.board_games:make_board_game"
    if env_id not in gym.registry:
        gym.register(env_id, entry_point, kwargs={"name": env_id.partition("/")[2]})


def register_memory_gym() -> None:
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame, without a screen
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        import memory_gym
    except ImportError:
        hint = f"{NO_DEPS} (or make install-memory_gym)"
        raise BadInput(f"memory-gym is not installed: {hint}") from None
    for cls in vars(memory_gym).values():
        if isinstance(cls, type):
            # its own close would quit pygame for all other environments as well
            cls.close = gym.Env.close  # type: ignore[attr-defined]


def explain(env_id: str, error: Exception) -> str:
    """The message of an error from gym.make, with similar ids if the id is unknown."""
    unknown = (gym.error.UnregisteredEnv, gym.error.RegistrationError, gym.error.DeprecatedEnv)
    if isinstance(error, unknown):
        with contextlib.suppress(BadInput), silenced():
            register_family("ALE/")  # to suggest their names, too
        near = difflib.get_close_matches(env_id, list(gym.registry), n=3, cutoff=0.6)
        if near and env_id not in near:
            return f"there is no such environment; nearest names: {', '.join(near)}"
    return first_line(error)


def explain_missing(env_id: str, error: Exception) -> BadInput:
    """The error for a package that is not installed or a version that no longer exists."""
    packages = {"mujoco": "mujoco", "ale_py": "atari", "dm_control": "dm_control"}
    packages["Box2D"] = "box2d"
    for word in re.findall(r"\w+", str(error)):
        name = word if word in packages else word.lower()
        if name in packages and not importable(name):
            return missing_package(name, packages[name])
    name = re.sub(r"-v[234]$", "", env_id)  # versions that Gymnasium or mujoco dropped
    if name != env_id and f"{name}-v5" in gym.registry:
        older = f"{name}-v4 or " if not env_id.endswith("-v4") and name != "Pusher" else ""
        return BadInput(f"--env-id {env_id} no longer exists: use {older}{name}-v5")
    return BadInput(f"--env-id {env_id}: {first_line(error)}")


def importable(package: str) -> bool:
    """Whether a package is installed."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        return False


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def require_spaces(
    envs: gym.vector.VectorEnv, env_id: str, actions: Any, instead: str, bounded: bool = False
) -> None:
    """require_actions, for scripts that make one vector of each observation."""
    warn_of_flattened_images(envs, env_id)
    sized = envs.single_observation_space.shape is not None  # not a Sequence, Graph or OneOf
    require(
        sized, f"--env-id {env_id} has observations of no fixed size, this script needs vectors"
    )
    require_actions(envs, env_id, actions, instead, bounded)


def require_actions(
    envs: gym.vector.VectorEnv, env_id: str, actions: Any, instead: str, bounded: bool = False
) -> None:
    """Stop unless the action space is of type `actions` or one of several: `Discrete | ...`.

    `instead` is the script for Box where this one needs discrete actions, or the other way round.
    Discrete actions must start at 0, a Box must be vectors, with bounds if `bounded`.
    """
    space = envs.single_action_space
    has = f"--env-id {env_id} has"
    several = isinstance(space, gym.spaces.MultiDiscrete | gym.spaces.MultiBinary)
    single = isinstance(space, gym.spaces.Discrete | gym.spaces.Box)
    hint = f": use {instead}" if single else ": use ppo_multi_input.py" if several else ""
    wanted = " or ".join(kind.__name__ for kind in get_args(actions) or [actions])
    needs = f"{has} {type(space).__name__} actions, this script needs {wanted}{hint}"
    require(isinstance(space, actions), needs)
    if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        numbers = f"{has} actions that start at {space.start}, this script needs actions from 0"
        require(not np.any(space.start), numbers)
    if isinstance(space, gym.spaces.Box):
        vectors = f"{has} actions of shape {space.shape}, this script needs vectors"
        require(len(space.shape) == 1, vectors)
        hint = "this script needs them: use ppo_continuous_action.py"
        require(not bounded or space.is_bounded(), f"{has} actions without bounds, {hint}")


def warn_of_flattened_images(envs: gym.vector.VectorEnv, env_id: str) -> None:
    """Warn that this script makes one long vector of each image, hardly ever the right choice."""
    inner = getattr(envs, "envs", [None])[0]
    space = getattr(getattr(inner, "unwrapped", None), "observation_space", gym.Space())
    spaces = parts_of(space)
    shapes = [part.shape for part in spaces if len(part.shape or ()) == 3]
    flat = len(envs.single_observation_space.shape or ()) == 1
    if not flat or not shapes:
        return
    better = "ppo_atari.py and dqn_atari.py have convolutional networks"
    if len(spaces) > 1:
        better = "ppo_multi_input.py has an encoder for each part of an observation"
    print(
        f"note: --env-id {env_id} has images of shape {shapes[0]}, which this script flattens into"
        f" vectors: {better}",
        file=sys.stderr,
    )
