"""Action masks: the valid actions of a state, put into the observation.

    env = MaskInObservation(env)    # (observation, mask) as one flat vector of float32

An environment may give its mask in three ways. The first that it has is used:

1. an observation dictionary with the key `action_mask`, as PettingZoo's classic games;
2. `info["action_mask"]` of reset and step, as Gymnasium's Taxi;
3. a method `action_masks()`, as SB3-Contrib has it, or `valid_action_mask()`; of a wrapper, too.

A mask has one entry per action, 0 or False for an invalid one. For MultiDiscrete actions, the masks
of all heads follow one another; they may also be a tuple with one mask per head.

As a part of the observation, the mask reaches rollout, update, evaluation, checkpoints and saved
models without further code.
"""

from typing import Any

import gymnasium as gym
import numpy as np

from cleanrl_utils.environments.spaces import count_choices
from cleanrl_utils.errors import require

KEY = "action_mask"
METHODS = ("action_masks", "valid_action_mask")
SOURCES = f'a key "{KEY}" in its observation, info["{KEY}"], or a method {METHODS[0]}()'


class MaskInObservation(gym.Wrapper):
    """Flatten the observation and append the mask: 1 for a valid action, 0 for an invalid one.

    Unless masks are `required`, all actions of an environment without them are valid.
    """

    def __init__(self, env: gym.Env, required: bool = True):
        super().__init__(env)
        self.required = required
        space = env.observation_space
        self.key_in_observation = isinstance(space, gym.spaces.Dict) and KEY in space.spaces
        if self.key_in_observation:
            space = gym.spaces.Dict({key: x for key, x in space.spaces.items() if key != KEY})
        self.visible = space  # the observation without the mask
        self.choices = count_choices(env.action_space)
        self.starts = np.cumsum([0, *self.choices[:-1]])  # of each head in the mask
        methods = [name for name in METHODS if env.has_wrapper_attr(name)]
        self.method = env.get_wrapper_attr(methods[0]) if methods else None
        self.num_visible = gym.spaces.flatdim(space)
        self.num_actions = sum(self.choices)
        size = self.num_visible + self.num_actions
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.joined = np.zeros(size, np.float32)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        obs, info = self.env.reset(**kwargs)
        self.known = self.key_in_observation or KEY in info or self.method is not None
        name = self.env.spec.id if self.env.spec is not None else type(self.unwrapped).__name__
        known = self.known or not self.required
        require(known, f"--env-id {name} has no action masks: it needs {SOURCES}; or use ppo.py")
        return self._join(obs, info, ended=False), info

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        joined = self._join(obs, info, bool(terminated or truncated))
        return joined, reward, terminated, truncated, info

    def _join(self, obs: Any, info: dict, ended: bool) -> np.ndarray:
        mask = self._find_mask(obs, info)
        problem = self._check(mask) if self.known else ""
        if problem and not ended:
            raise ValueError(problem)
        if mask is None or problem or not self.known:
            mask = np.ones(self.num_actions)  # at the end of an episode, no action follows
        if self.key_in_observation:
            obs = {key: x for key, x in obs.items() if key != KEY}
        self.joined[: self.num_visible] = gym.spaces.flatten(self.visible, obs)
        self.joined[self.num_visible :] = np.not_equal(mask, 0)
        return self.joined.copy()

    def _find_mask(self, obs: Any, info: dict) -> np.ndarray | None:
        mask = None
        if self.key_in_observation:
            mask = obs[KEY]
        elif KEY in info:
            mask = info[KEY]
        elif self.method is not None:
            mask = self.method()
        if isinstance(mask, np.ndarray) and mask.ndim == 1:
            return mask
        if isinstance(mask, tuple | list):
            return np.concatenate([np.ravel(head) for head in mask])
        return None if mask is None else np.ravel(mask)

    def _check(self, mask: np.ndarray | None) -> str:
        """What is wrong with a mask; empty if nothing is."""
        if mask is None:
            return f'its info has no "{KEY}"'
        if len(mask) != self.num_actions:
            actions = f"its {self.num_actions} actions need one entry each"
            return f"its action mask has {len(mask)} entries: {actions}"
        if len(self.choices) == 1 and np.count_nonzero(mask):  # quickly
            return ""
        valid = np.logical_or.reduceat(mask != 0, self.starts)
        if valid.all():
            return ""
        head = f" in head {np.argmin(valid)}" if len(self.choices) > 1 else ""
        return f"its action mask has no valid action{head}: at least one is needed"
