"""One row per script: what every test of tests/test_scripts.py needs to know about it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PPO_TAGS = [
    "charts/episodic_return",
    "charts/episodic_length",
    "charts/learning_rate",
    "charts/SPS",
    "losses/value_loss",
    "losses/policy_loss",
    "losses/entropy",
    "losses/old_approx_kl",
    "losses/approx_kl",
    "losses/clipfrac",
    "losses/explained_variance",
]


@dataclass
class Script:
    """`values` and `acts` look into the script's global variables after training."""

    name: str
    env_id: str
    quick: str  # flags of a run that takes gradient steps within seconds
    tags: list[str]  # metrics that such a run must have logged
    probe: str = ""  # flags with which it learns a probe environment; empty: no probe tests
    probe_suffix: str = ""  # Continuous or Pixels
    probes: list[str] = field(
        default_factory=lambda: ["Constant", "Cue", "Discount", "Action", "Both", "Truncation"]
    )
    values: Callable[[dict[str, Any], np.ndarray], np.ndarray] | None = None  # (n, *obs) -> (n,)
    acts: Callable[[dict[str, Any], np.ndarray], np.ndarray] | None = None  # greedy actions
    tolerance: float = 0.1  # of a probe's values
    needs: list[str] = field(default_factory=list)  # packages without which it is skipped
    video: bool = True
    discrete: bool = True

    def __str__(self) -> str:
        return self.name


def torch_call(function: Callable, obs: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return function(torch.as_tensor(obs)).numpy()


SCRIPTS = [
    Script(
        name="ppo",
        env_id="CartPole-v1",
        quick="--total-timesteps 2048 --num-steps 64",
        tags=PPO_TAGS,
        probe="--total-timesteps 12000 --learning-rate 0.005 --num-steps 32 --ent-coef 0",
        values=lambda g, obs: torch_call(g["agent"].get_value, obs),
        acts=lambda g, obs: torch_call(g["agent"].act, obs),
    ),
]
