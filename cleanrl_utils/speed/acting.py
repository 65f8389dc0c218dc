"""Acting with the policy of an on-policy algorithm, in NumPy where that is faster."""

from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch

from cleanrl_utils.speed.inference import PolicyOnDevice
from cleanrl_utils.speed.numpy_networks import MOST_ROWS_IN_NUMPY, numpy_method


class Sampler:
    """agent.act(obs, greedy=False) from NumPy to NumPy, for the rollouts of on-policy algorithms.

    If `act` is a chain of small layers, NumPy computes it, beside a GPU with a copy of the weights
    that `fetch` brings up to date. Other networks, and many environments, act on the device. Random
    numbers are torch's.
    """

    def __init__(self, agent: Any, device: torch.device, args: Any):
        self.agent = agent
        self.on_device = PolicyOnDevice(partial(agent.act, greedy=False), device, args)
        self.on_cpu = agent if device.type == "cpu" else deepcopy(agent).cpu()
        small = args.num_envs <= MOST_ROWS_IN_NUMPY
        self.in_numpy = numpy_method(self.on_cpu, "act", greedy=False) if small else None

    def fetch(self) -> None:
        """Act with the agent's present weights. On a CPU they are the same memory anyway."""
        if self.in_numpy and not self.in_numpy.is_valid():
            self.in_numpy = None  # say, a layer was replaced
        if self.in_numpy and self.on_cpu is not self.agent:
            self.on_cpu.load_state_dict(self.agent.state_dict())

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        return self.in_numpy(obs) if self.in_numpy else self.on_device(obs)
