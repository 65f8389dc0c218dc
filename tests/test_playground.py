"""MuJoCo Playground's tasks: the interface of the JAX scripts, and what is said of the others."""

import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

pytest.importorskip("brax")
import jax
import jax.numpy as jnp

from cleanrl_utils.environments.jax_envs import advance, begin
from cleanrl_utils.environments.making import NO_DEPS
from cleanrl_utils.environments.playground import Playground, add_backend, make_physics
from cleanrl_utils.errors import BadInput

TASK = "playground/CartpoleBalance"  # the one that compiles soonest
QUICK = f"--env-id {TASK} --total-timesteps 128 --num-envs 4 --num-steps 8 --num-minibatches 2"


@pytest.fixture
def task() -> Playground:
    pytest.importorskip("mujoco_playground")
    return make_physics(TASK)


def test_steps_are_those_of_playground_and_keep_the_last_observation(
    task: Playground, monkeypatch, tmp_path: Path
) -> None:
    """The state that is carried from step to step is a small part of MJX's; here all of it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Playground, "EPISODE_LENGTH", 5)
    keys = jax.random.split(jax.random.key(0), 2)
    starts = jax.jit(lambda: begin(task, jax.random.key(0), 2))()
    full = jax.jit(jax.vmap(task.env.reset))(jax.random.key_data(keys))
    np.testing.assert_allclose(starts.obs, full.obs, atol=1e-6)
    assert abs(starts.obs[0] - starts.obs[1]).max() > 1e-3  # each start is random
    step_full = jax.jit(jax.vmap(task.env.step))
    step = jax.jit(lambda episodes, actions: advance(task, episodes, actions, keys, starts))
    rng = np.random.default_rng(0)
    episodes = starts
    for t in range(1, 6):
        actions = rng.uniform(-2, 2, (2, 1)).astype(np.float32)  # clipped to [-1, 1]
        full = step_full(full, actions.clip(-1, 1))
        episodes, outcome = step(episodes, actions)
        np.testing.assert_allclose(outcome.next_obs, full.obs, atol=1e-5)
        np.testing.assert_allclose(outcome.reward, full.reward, atol=1e-5)
        assert outcome.done.tolist() == [t == 5] * 2 and not outcome.terminated.any()
    np.testing.assert_allclose(episodes.obs, starts.obs)
    assert outcome.episodic_length.tolist() == [5, 5] and outcome.episodic_return.min() > 3
    assert sum(x.size for x in jax.tree.leaves(episodes.state)) < 100

    broken = jax.tree.map(lambda x: x * jnp.nan if x.dtype == jnp.float32 else x, starts)
    _, outcome = step(broken._replace(ret=starts.ret), np.zeros((2, 1), np.float32))
    assert outcome.terminated.all() and not outcome.next_obs.any() and not outcome.reward.any()
    assert not (tmp_path / "MUJOCO_LOG.TXT").exists()


def test_ppo_trains_on_a_task_is_saved_evaluated_and_filmed(task, train, monkeypatch) -> None:
    monkeypatch.setattr(Playground, "EPISODE_LENGTH", 20)
    done = train(
        "ppo_continuous_action_brax_jax",
        f"{QUICK} --save-model --eval-episodes 1 --capture-video",
    )
    values = {tag: value for _, tag, value in done.rows()}
    assert values["eval/episodic_length"] == 20 and values["eval/episodic_return"] > 10
    assert np.isfinite(values["losses/value_loss"])
    (film,) = done.folder.glob("videos/**/*.mp4")
    assert film.stat().st_size > 0
    assert done.folder.parent.name == "playground"


@pytest.mark.parametrize("name", ["ReacherHard", "CheetahRun"])
def test_other_tasks_load(name: str, tmp_path: Path, monkeypatch) -> None:
    """MuJoCo 3.17 lacks a function that playground 0.2 calls for the first; the second warns."""
    pytest.importorskip("mujoco_playground")
    monkeypatch.chdir(tmp_path)
    env = Playground(f"playground/{name}")
    assert env.action_space.shape == ((2,) if name == "ReacherHard" else (6,))
    assert not list(tmp_path.iterdir())  # no log file


@pytest.mark.parametrize(
    "env_id, says",
    [
        ("playground/Go1JoystickFlatTerrain", "need a download"),
        ("playground/LeapCubeReorient", "need a download"),
        ("playground/CheetahWalk", "nearest names: CheetahRun"),
    ],
)
def test_tasks_that_are_not_there_are_named(env_id: str, says: str) -> None:
    pytest.importorskip("mujoco_playground")
    with pytest.raises(BadInput) as stop:
        make_physics(env_id)
    assert says in stop.value.message and "\n" not in stop.value.message


def test_the_backend_is_part_of_the_id_of_brax_alone() -> None:
    assert add_backend("ant", "spring") == "ant"
    assert add_backend("ant", "mjx") == add_backend("ant-mjx", "spring") == "ant-mjx"
    assert add_backend(TASK, "spring") == add_backend(TASK, "mjx") == TASK
    with pytest.raises(BadInput) as stop:
        add_backend(TASK, "positional")
    assert "--backend positional: MuJoCo Playground has mjx only" in stop.value.message


def test_without_playground_it_says_what_to_install(train, monkeypatch, capfd) -> None:
    monkeypatch.setitem(sys.modules, "mujoco_playground", None)
    monkeypatch.setattr(Playground, "make", Playground)  # not one that is already there
    with pytest.raises(SystemExit) as stop:
        train("ppo_continuous_action_brax_jax", QUICK)
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and "playground is not installed" in line and NO_DEPS in line


def test_the_lines_that_install_playground_are_the_same_everywhere() -> None:
    installs = (ROOT / "requirements" / "no-deps.txt").read_text().splitlines()
    assert any(line.startswith("playground==") for line in installs)
    first = "pip install -r requirements/requirements-playground.txt"
    for name in ("docs/get-started/installation.md", "docs/rl-algorithms/fast-td3.md"):
        text = (ROOT / name).read_text()
        assert first in text and NO_DEPS in text, name
    assert NO_DEPS in (ROOT / "requirements/requirements-playground.txt").read_text()
    makefile = (ROOT / "Makefile").read_text()
    rule = makefile[makefile.index("$(STAMPS)/playground") :].split("\n\n")[0]
    assert NO_DEPS.removeprefix("pip install ") in rule
