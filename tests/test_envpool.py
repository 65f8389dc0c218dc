"""EnvPool's environments as a vector environment, with a fake pool that behaves like EnvPool."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from cleanrl_utils.environments import envpool

LIMIT = 3  # steps of a game


class ScriptedPool:
    """Three games: one ends exactly at the time limit, one is truncated, one ends earlier."""

    single_observation_space = gym.spaces.Box(0, 1, (1,))
    single_action_space = gym.spaces.Discrete(2)

    def __init__(self, task: str, num_envs: int, seed: int, **settings: Any):
        self.time = 0

    def reset(self) -> tuple[np.ndarray, dict]:
        return np.zeros((3, 1)), {}

    def step(self, actions: np.ndarray) -> tuple:
        self.time += 1
        over = np.array([self.time == LIMIT, False, self.time == LIMIT - 1])
        truncated = np.array([self.time == LIMIT] * 2 + [False])
        terminated = over & ~truncated  # of a game over at the limit EnvPool says only truncated
        infos = {"reward": np.ones(3), "terminated": over.astype(np.int32)}
        infos["elapsed_step"] = np.full(3, self.time)
        return np.full((3, 1), self.time), np.ones(3), terminated, truncated, infos

    def close(self) -> None:
        pass


@pytest.fixture
def envs(monkeypatch) -> envpool.Pool:
    monkeypatch.setattr(envpool, "make_pool", ScriptedPool)
    return envpool.Pool("Game-v5", num_envs=3, seed=1)


def test_a_game_over_exactly_at_the_time_limit_is_terminated(envs: envpool.Pool) -> None:
    steps = [envs.step(np.zeros(3, int)) for _ in range(LIMIT)]
    assert [step[2].tolist() for step in steps] == [[False] * 3, [0, 0, 1], [1, 0, 0]]
    assert [step[3].tolist() for step in steps] == [[False] * 3, [False] * 3, [0, 1, 0]]
    assert envs.ended.tolist() == [True, True, False]


def test_each_game_is_counted_once_with_its_own_score(envs: envpool.Pool) -> None:
    steps = [envs.step(np.zeros(3, int)) for _ in range(LIMIT)]
    assert "_episode" not in steps[0][4]
    early, late = steps[1][4], steps[2][4]
    assert early["_episode"].tolist() == [0, 0, 1] and early["episode"]["r"][2] == 2
    assert late["_episode"].tolist() == [1, 1, 0]
    assert late["episode"]["r"].tolist() == [3, 3, 1] and late["episode"]["l"][0] == 3
