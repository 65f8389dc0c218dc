"""Checkpoints must not touch the returns that a run logs: no open episode is lost."""

import numpy as np
import pytest


def logged(run: object, name: str) -> np.ndarray:
    rows = run.rows()  # type: ignore[attr-defined]
    return np.array([value for _, tag, value in rows if tag == f"charts/episodic_{name}"])


def lost_steps(lengths: np.ndarray, total: int) -> float:
    """Steps that no logged episode has; after each of them, one step resets."""
    return total - float(np.sum(lengths + 1))


def test_long_episodes_are_logged_in_a_short_wide_run(train) -> None:
    """Acrobot takes up to 500 steps; there are 625 for each environment."""
    done = train("ppo", "--env-id Acrobot-v1 --num-envs 16 --total-timesteps 10000")
    returns = logged(done, "return")
    assert len(returns) >= 16 and -500 <= returns.mean() < -450


def test_long_episodes_are_not_logged_less_often_than_short_ones(train) -> None:
    flags = "--env-id probes:ProbeLengths-v0 --num-envs 8 --num-steps 128 --update-epochs 1"
    done = train("ppo", f"{flags} --total-timesteps 20480")
    lengths = logged(done, "length")
    assert set(lengths) == {20, 400}
    assert lost_steps(lengths, 20480) <= 8 * 400  # at most one open episode each
    assert (logged(done, "return") == lengths).all() and lengths.mean() > 150


def test_random_play_has_its_known_return(train) -> None:
    """A random CartPole episode takes 22 steps."""
    flags = "--env-id CartPole-v1 --num-envs 64 --total-timesteps 25600"
    done = train("dqn", f"{flags} --learning-starts 30000 --end-e 1")
    lengths = logged(done, "length")
    assert lost_steps(lengths, 25600) < 64 * 40
    assert logged(done, "return").mean() == pytest.approx(22, abs=1)
