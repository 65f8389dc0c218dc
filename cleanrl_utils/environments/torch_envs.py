"""Thousands of environments on the GPU with tensors as input and output: Isaac Gym or Brax.

    envs = make_tensor_envs("Ant", 4096, seed, run)
    envs.reset(seed)                         # or load_state_dict, by --resume
    obs = envs.observe()
    obs, outcome = envs.step(actions)        # outcome is (len(OUTCOME), num_envs)

Next-step autoreset, as in all scripts: the last observation of an episode is the one its last
action led to, and the next step only resets. Nothing in this module waits for the GPU.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX shares the GPU with torch
import contextlib
import importlib.util
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import torch
from jax import Array
from torch import Tensor

from cleanrl_utils.environments.jax_envs import Brax, Episode, begin, import_brax
from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running import checkpoint

OUTCOME = ("reward", "terminated", "done", "real", "episodic_return", "episodic_length")
HAS_ISAAC_GYM = importlib.util.find_spec("isaacgym") is not None


def make_tensor_envs(task: str, num_envs: int, seed: int, run: Any) -> Any:
    """Make `num_envs` environments on the run's device, and print which package they are from."""
    if HAS_ISAAC_GYM:
        run.say(f"{task}: from Isaac Gym")
        return IsaacTensors(task, num_envs, seed, run)
    run.say(f"{task}: {brax_name(task)} from Brax, because isaacgym is not installed")
    return BraxTensors(task, num_envs, run.device)


def brax_name(task: str) -> str:
    """The name in Brax of Isaac Gym's Ant, Humanoid or Cartpole, or of a task of Brax itself."""
    known = {name.replace("_", ""): name for name in import_brax()._envs if name != "fast"}
    known["cartpole"] = "inverted_pendulum"
    name = known.get(task.replace("_", "").lower())
    if name is None:
        raise BadInput(
            f"--env-id {task}: needs Isaac Gym, which is not installed; Brax has Ant, Humanoid,"
            f" Cartpole and {', '.join(known)}"
        )
    return name


class BraxTensors:
    """Brax's environments for torch; dlpack shares memory without a copy."""

    STARTS = 16  # draw new initial states every this many steps

    def __init__(self, task: str, num_envs: int, device: torch.device):
        if device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # JAX is running already
                jax.config.update("jax_platforms", "cpu")
        kind = jax.devices()[0].platform
        require(
            (kind == "cpu") == (device.type == "cpu"),
            f"torch is on {device.type}, JAX on {kind}: install JAX for the GPU, or use --no-cuda",
        )
        self.env = Brax.make(brax_name(task))
        self.num_envs = num_envs
        self.single_observation_space = self.env.observation_space
        self.single_action_space = self.env.action_space
        self._begin = jax.jit(lambda key, n: begin(self.env, jax.random.fold_in(key, n), num_envs))
        self._step = jax.jit(self._advance, donate_argnums=0)

    def reset(self, seed: int) -> None:
        self.key = jax.random.key(seed)
        self.count = 0
        episodes = self.env.stagger(self._begin(self.key, 0))
        self.now = episodes, jnp.zeros(self.num_envs, bool)

    def observe(self) -> Tensor:
        self.kept: tuple = (self.now[0].obs + 0,)  # a copy: the next step donates self.now
        return torch.from_dlpack(self.kept[0])

    def state_dict(self) -> dict[str, Any]:
        return {"key": self.key, "count": self.count, "now": self.now}

    def load_state_dict(self, saved: Any) -> None:
        state = checkpoint.restore(self.state_dict(), saved)
        self.key = state["key"]
        self.count = state["count"]
        self.now = state["now"]
        self.starts = self._begin(self.key, self.count // self.STARTS * self.STARTS + 1)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Step all environments. Torch and JAX use separate streams, which dlpack synchronises.

        `self.kept` keeps the last outputs alive until the next step is launched. That step waits
        for the actions, and so for everything torch computed from these outputs.
        """
        if self.count % self.STARTS == 0:
            self.starts = self._begin(self.key, self.count + 1)
        self.count += 1
        self.now, self.kept = self._step(self.now, self.starts, jax.dlpack.from_dlpack(actions))
        obs, outcome = (torch.from_dlpack(x) for x in self.kept)
        return obs, outcome

    def _advance(self, now: tuple[Episode, Array], starts: Episode, actions: Array) -> tuple:
        episodes, ended = now
        step = jax.vmap(self.env.step, (None, 0, 0))
        unused = jax.random.key(0)  # Brax draws random numbers only when it resets
        state, obs, reward, terminated, truncated = step(unused, episodes.state, actions)
        after = Episode(state, obs, episodes.ret + reward, episodes.length + 1)

        def choose(start: Array, on: Array) -> Array:
            return jnp.where(ended.reshape(-1, *(1,) * (on.ndim - 1)), start, on)

        episodes = jax.tree.map(choose, starts, after)
        done = (terminated | truncated) & ~ended
        rows = (
            jnp.where(ended, 0, reward),
            terminated & ~ended,
            done,
            ~ended,
            jnp.where(done, episodes.ret, jnp.nan),
            episodes.length,
        )
        outcome = jnp.stack([row.astype(jnp.float32) for row in rows])
        return (episodes, done), (episodes.obs + 0, outcome)


class IsaacTensors:
    """Isaac Gym's environments, written for its interface but never tested with it: see the script.

    It has one simulation per process, which cannot be seeded again: a resumed run continues with
    the same agent, but in other episodes.
    """

    def __init__(self, task: str, num_envs: int, seed: int, run: Any):
        import isaacgymenvs

        video = run.args.capture_video
        device = str(run.device)
        self.envs = isaacgymenvs.make(
            seed=seed,
            task=task,
            num_envs=num_envs,
            sim_device=device,
            rl_device=device,
            graphics_device_id=0 if video else -1,
            headless=not video,
            multi_gpu=False,
            virtual_screen_capture=video,
            force_render=video,
        )
        self.single_action_space = gym.spaces.Box(-1, 1, self.envs.action_space.shape)
        infinite = float("inf")
        shape = self.envs.observation_space.shape
        self.single_observation_space = gym.spaces.Box(-infinite, infinite, shape)
        if video:
            from gym.wrappers import RecordVideo  # the old gym, which Isaac Gym needs

            every = run.args.record_video_step_frequency
            trigger = lambda step: step % every == 0  # noqa: E731
            self.envs.is_vector_env = True
            self.envs = RecordVideo(self.envs, run.videos, step_trigger=trigger, video_length=100)
        self.returns = torch.zeros(num_envs, device=run.device)
        self.lengths = torch.zeros(num_envs, device=run.device)
        self.ended = torch.zeros(num_envs, dtype=torch.bool, device=run.device)

    def reset(self, seed: int) -> None:
        for x in (self.returns, self.lengths, self.ended):
            x.zero_()
        self.first = self.envs.reset()["obs"]

    def observe(self) -> Tensor:
        return self.first

    def state_dict(self) -> dict[str, Any]:
        return {}  # a simulation cannot be saved

    def load_state_dict(self, saved: Any) -> None:
        pass

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        obs, reward, done, infos = self.envs.step(actions.clamp(-1, 1))
        real = ~self.ended
        done = done.bool() & real
        truncated = infos.get("time_outs", torch.zeros_like(done)).bool()
        reward = reward * real
        self.returns.mul_(real).add_(reward)
        self.lengths.mul_(real).add_(real)
        episodic_return = torch.where(done, self.returns, torch.nan)
        rows = (reward, done & ~truncated, done, real, episodic_return, self.lengths)
        self.ended = done
        return obs["obs"], torch.stack([row.float() for row in rows])
