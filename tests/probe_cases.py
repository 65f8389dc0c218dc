"""Probe environments for each script of tests/table.py, and the errors of what it learns."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import run_script
from probes import see_each_picture_once
from table import SCRIPTS, Script

CASES = [(script, probe) for script in SCRIPTS if script.probe for probe in script.probes]
GAMMA = 0.8  # the value in Truncation is 5; it is 2.8 where truncated episodes do not bootstrap
CUES = {"Cue": [-1, 1], "Both": [-1, 1], "Discount": [-1, 1]}  # the others show 1 only
VALUES = {
    "Constant": [1],
    "Cue": [-1, 1],
    "Discount": [GAMMA, 1],
    "Action": [1],
    "Both": [1, 1],
    "Truncation": [1 / (1 - GAMMA)],
}
ACTION_TOLERANCE = 0.3  # of continuous actions


def observations(script: Script, cues: list[float]) -> np.ndarray:
    """The agent's observations of these cues."""
    from cleanrl_utils.running.evaluation import import_script

    make_env = import_script(script.name).make_env
    rows = []
    for cue in cues:
        env = make_env(f"probes:ProbeConstant{script.probe_suffix}-v0", 1, 0, False, "")()
        env.unwrapped.cue = lambda cue=cue: cue
        rows.append(env.reset(seed=1)[0])
    assert isinstance(env, gym.Env)
    return np.stack(rows)


def tolerance_used(script: Script, probe: str, variables: dict[str, Any]) -> float:
    """The largest error as a fraction of the tolerance; infinite for a wrong discrete action."""
    cues = CUES.get(probe, [1])
    obs = observations(script, cues)
    shares = []
    if script.values is not None:
        wanted = np.array(VALUES[probe])
        # relative above 1: a value of 10 may be off by ten times as much
        allowed = script.tolerance * np.maximum(np.abs(wanted), 1)
        shares.append(np.abs(script.values(variables, obs) - wanted) / allowed)
    if probe in ("Action", "Both") and script.acts is not None:
        best = np.array([1] if probe == "Action" else cues)
        actions = script.acts(variables, obs)
        if script.discrete:
            shares.append(np.where(2 * actions - 1 == best, 0.0, np.inf))
        else:
            shares.append(np.abs(actions[:, 0] - best) / ACTION_TOLERANCE)
    return float(np.max(np.concatenate(shares)))


def learn_probe(script: Script, probe: str, seed: int = 1) -> float:
    """Train on a probe in the current folder; returns the largest error / tolerance."""
    env_id = f"probes:Probe{probe}{script.probe_suffix}-v0"
    flags = f"--env-id {env_id} --gamma {GAMMA} --seed {seed} --checkpoints 0 {script.probe}"
    with pytest.MonkeyPatch.context() as patch:
        if script.probe_suffix == "Pixels":
            see_each_picture_once(patch)
        script.prepare(env_id)
        done = run_script(script.name, flags)
        return tolerance_used(script, probe, done.variables)
