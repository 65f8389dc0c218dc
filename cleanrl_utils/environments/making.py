"""Making environments: families registered when their ids are asked for, clear errors, videos."""

import contextlib
import difflib
import importlib.util
import os
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym

from cleanrl_utils.errors import BadInput, missing_package, require, silenced

# pygame's SDL would catch SIGTERM for itself: `kill` and `timeout` could not end a run
os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")


# without the Gymnasium of 2023 that it declares
MEMORY_GYM = "pip install --no-deps -r requirements/no-deps.txt"


def make(env_id: str, video_folder: str | Path | None = None, **kwargs: Any) -> gym.Env:
    """gym.make for every family this project knows; films episodes into `video_folder` if given."""
    register_family(env_id)
    if ":" in env_id and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # --env-id my_env:My-v0 finds my_env.py beside you
    if video_folder is not None:
        kwargs["render_mode"] = "rgb_array"
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # pygame looks for a sound card
        if sys.platform == "linux" and "DISPLAY" not in os.environ:
            os.environ.setdefault("MUJOCO_GL", "egl")  # pictures without a screen
    try:
        env = gym.make(env_id, **kwargs)
        return env if video_folder is None else record_video(env, Path(video_folder))
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise explain_missing(env_id, error) from None
    except gym.error.Error as error:
        raise BadInput(f"--env-id {env_id}: {explain(env_id, error)}") from None
    except TypeError as error:
        if any(f"'{name}'" in str(error) for name in kwargs):
            raise BadInput(f"--env-kwargs: {env_id} does not take this: {error}") from None
        raise


class Film(gym.wrappers.RecordVideo):
    """Records the first episode, and later ones while recording takes a small share of the time."""

    SHARE = 0.05
    MOST_FRAMES = 3_000  # of an episode: the rest is not recorded

    def __init__(self, env: gym.Env, folder: Path):
        self.spent = 0.0
        self.began = time.perf_counter()
        part = len({path.name.split("-episode")[0] for path in folder.glob("*.mp4")})
        env.metadata.setdefault("render_fps", 30)
        with warnings.catch_warnings():  # of a folder that exists: names are new each time
            warnings.filterwarnings("ignore", "(?s).*Overwriting existing videos")
            super().__init__(
                env,
                str(folder),
                episode_trigger=bool,
                name_prefix=f"part{part}",
                disable_logger=True,
            )
        self.episode_trigger = self.affordable  # Gymnasium deep-copies what the constructor gets

    def affordable(self, episode: int) -> bool:
        elapsed = time.perf_counter() - self.began
        return episode == 0 or self.spent < self.SHARE * elapsed

    def _capture_frame(self) -> None:
        if len(self.recorded_frames) < self.MOST_FRAMES:
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
    """Let Gymnasium know the ids of packages that do not register themselves on import."""
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
    elif "mujoco" in str(getattr(gym.registry.get(env_id), "entry_point", "")):
        quieten_mujoco()


def quieten_mujoco() -> None:
    """Version 4 of a task is what results are compared on: no two lines at each of its makings."""
    warnings.filterwarnings("ignore", ".*is out of date", DeprecationWarning)
    try:
        import mujoco
    except ImportError:
        return  # making the environment says what to install

    def show(text: str) -> None:
        if "deprecated" not in text:  # of Gymnasium's model files
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


def register_memory_gym() -> None:
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # it draws with pygame, on no screen
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        import memory_gym
    except ImportError:
        hint = f"{MEMORY_GYM} (or make install-memory_gym)"
        raise BadInput(f"memory-gym is not installed: {hint}") from None
    for cls in vars(memory_gym).values():
        if isinstance(cls, type):
            # theirs would quit pygame, for all other environments as well
            cls.close = gym.Env.close  # type: ignore[attr-defined]


def explain(env_id: str, error: Exception) -> str:
    unknown = (gym.error.UnregisteredEnv, gym.error.RegistrationError, gym.error.DeprecatedEnv)
    if isinstance(error, unknown):
        with contextlib.suppress(BadInput), silenced():
            register_family("ALE/")  # their names are near to what people type
        near = difflib.get_close_matches(env_id, list(gym.registry), n=3, cutoff=0.6)
        if near and env_id not in near:
            return f"there is no such environment; nearest names: {', '.join(near)}"
    return first_line(error)


def explain_missing(env_id: str, error: Exception) -> BadInput:
    packages = {"mujoco": "mujoco", "ale_py": "atari", "dm_control": "dm_control"}
    for word in re.findall(r"\w+", str(error).lower()):
        if word in packages and not importable(word):
            return missing_package(word, packages[word])
    name = re.sub(r"-v[234]$", "", env_id)  # versions that Gymnasium or mujoco has left behind
    if name != env_id and f"{name}-v5" in gym.registry:
        older = f"{name}-v4 or " if not env_id.endswith("-v4") and name != "Pusher" else ""
        return BadInput(f"--env-id {env_id} no longer exists: use {older}{name}-v5")
    return BadInput(f"--env-id {env_id}: {first_line(error)}")


def importable(package: str) -> bool:
    """Whether `import` would find it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        return False


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def require_spaces(
    envs: gym.vector.VectorEnv, env_id: str, actions: type, instead: str, bounded: bool = False
) -> None:
    """Stop unless actions are numbers from 0 (Discrete) or vectors (Box), within bounds if asked
    for; `instead` is the script for the other one of these two."""
    note_flattened_pictures(envs, env_id)
    space, spaces = envs.single_action_space, gym.spaces
    kind, has = type(space).__name__, f"--env-id {env_id} has"
    hint = f": use {instead}" if isinstance(space, spaces.Discrete | spaces.Box) else ""
    needs = f"{has} {kind} actions, this script needs {actions.__name__}{hint}"
    require(isinstance(space, actions), needs)
    if isinstance(space, spaces.Discrete):
        require(space.start == 0, f"{has} actions from {space.start} on, this script's begin at 0")
    if isinstance(space, spaces.Box):
        vectors = f"{has} actions of shape {space.shape}, this script needs vectors"
        require(len(space.shape) == 1, vectors)
        hint = "this script needs them: use ppo_continuous_action.py"
        require(not bounded or space.is_bounded(), f"{has} actions without bounds, {hint}")


def note_flattened_pictures(envs: gym.vector.VectorEnv, env_id: str) -> None:
    """A picture as one long vector is hardly ever what somebody wants."""
    inner = getattr(envs, "envs", [None])[0]
    shape = getattr(getattr(inner, "unwrapped", None), "observation_space", gym.Space()).shape
    flat = len(envs.single_observation_space.shape or ()) == 1
    if flat and shape is not None and len(shape) == 3:
        print(
            f"note: --env-id {env_id} has pictures of {shape}, which this script flattens into"
            " vectors: ppo_atari.py and dqn_atari.py have convolutional networks",
            file=sys.stderr,
        )
