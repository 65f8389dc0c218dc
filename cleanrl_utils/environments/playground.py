"""MuJoCo Playground's tasks of the DM control suite, behind the interface of jax_envs.py.

    env = make_physics("playground/CheetahRun")     # or one of Brax's: make_physics("ant")

The physics is MJX, MuJoCo in JAX, so the tasks are part of the compiled program.
"""

import contextlib
import difflib
import io
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cleanrl_utils.environments.jax_envs import Brax, nearest
from cleanrl_utils.environments.making import NO_DEPS
from cleanrl_utils.errors import BadInput, require


class Playground(Brax):
    """A task of MuJoCo Playground's DM control suite, `playground/CheetahRun`, simulated by MJX."""

    PREFIX = "playground/"
    # of MJX's state, what a step starts from: it computes all the rest anew
    KEPT = ("qpos", "qvel", "act", "qacc_warmstart", "eq_active", "mocap_pos", "mocap_quat", "time")

    def __init__(self, env_id: str):
        import mujoco

        name = env_id.removeprefix(self.PREFIX)
        playground = import_playground()
        known = playground.dm_control_suite.ALL_ENVS
        if name in playground.registry.ALL_ENVS and name not in known:
            raise BadInput(
                f"--env-id {env_id}: locomotion and manipulation tasks need a download and are not"
                f" supported; those that need none: {', '.join(known)}"
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            raise BadInput(
                f"--env-id {env_id}: MuJoCo Playground has no such task; {nearest(near)}all:"
                f" {', '.join(known)}"
            )
        cpu = jax.local_devices(backend="cpu")[0]  # compiles the small programs of this sooner
        mujoco.set_mju_user_warning(lambda message: None)  # else MuJoCo writes a log file here
        with jax.default_device(cpu):
            suite = playground.dm_control_suite
            self.env = suite.load(name, config_overrides={"impl": "jax"})  # the default is Warp
        mujoco.set_mju_user_warning(None)
        self.action_space = gym.spaces.Box(-1, 1, (self.env.action_size,), np.float32)
        shapes = jax.eval_shape(lambda: self.env.reset(jax.random.PRNGKey(0)))
        self.blank = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, shapes.obs.shape, np.float32)

    def slim(self, state: Any) -> tuple[dict[str, Array], dict[str, Any]]:
        return {name: getattr(state.data, name) for name in self.KEPT}, state.info

    def reset(self, key: Array) -> tuple[Any, Array]:
        with jax.default_matmul_precision("highest"):  # a GPU would round physics to ten bits
            return super().reset(jax.random.key_data(key))  # numbers: the state keeps them

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, Array, Array, Array, Array]:
        """As in Brax. Episodes terminate only where the physics has become NaN; the observation is
        zeros there, so that no mean over a batch becomes NaN."""
        (kept, info), time = state
        full = self.blank.replace(data=self.blank.data.replace(**kept), info=info)
        with jax.default_matmul_precision("highest"):
            state, obs, reward, *ends = super().step(key, (full, time), action)
        return state, jnp.nan_to_num(obs), jnp.nan_to_num(reward), *ends

    def render(self, state: Any) -> np.ndarray:
        kept, _ = state[0]
        arrays = {name: kept[name] for name in ("qpos", "qvel", "mocap_pos", "mocap_quat")}
        return self.draw(self.env.mj_model, arrays)


def make_physics(env_id: str) -> Brax:
    """A task of Brax or of MuJoCo Playground."""
    return (Playground if env_id.startswith(Playground.PREFIX) else Brax).make(env_id)


def add_backend(env_id: str, backend: str) -> str:
    """The id with the physics of --backend, so that an evaluation has the same."""
    if env_id.startswith(Playground.PREFIX):
        allowed = backend in (Brax.BACKENDS[0], "mjx")  # the first is the default
        require(allowed, f"--backend {backend}: MuJoCo Playground has mjx only")
        return env_id
    return env_id if backend == Brax.BACKENDS[0] or "-" in env_id else f"{env_id}-{backend}"


def import_playground() -> Any:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # that Warp, which is not used, is missing
            import mujoco
            import mujoco_playground
    except ImportError:
        hint = "pip install -r requirements/requirements-playground.txt, then " + NO_DEPS
        raise BadInput(f"playground is not installed: {hint}") from None
    if not hasattr(mujoco.MjSpec, "find_body"):  # playground 0.2.0 takes 3.17 for older than 3.3
        mujoco.MjSpec.find_body = mujoco.MjSpec.body
    return mujoco_playground
