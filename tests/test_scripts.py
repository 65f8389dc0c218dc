"""Tests of every script; a new script is a new row of tests/table.py."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import Finished, Killed, run_script
from probe_cases import CASES, learn_probe
from table import SCRIPTS, Script

from cleanrl_utils.running.evaluation import as_policy, load_model, play
from cleanrl_utils.running.rng import derive_seed
from cleanrl_utils.running.run import EVAL_SEED, Run

# one worker makes a script's runs: they are shared between tests
every_script = pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=pytest.mark.xdist_group(script.name)) for script in SCRIPTS],
    ids=str,
)
whole_runs: dict[str, Finished] = {}


@pytest.fixture(autouse=True)
def needs(request: pytest.FixtureRequest) -> None:
    if "script" in request.fixturenames:
        for package in request.getfixturevalue("script").needs:
            pytest.importorskip(package, exc_type=ImportError)


@pytest.fixture
def whole(script: Script, needs: None, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A complete run of the script with video, made once for all tests."""
    if script.name not in whole_runs:
        flags = f"--env-id {script.env_id} {script.quick} --save-model --eval-episodes 2"
        flags += " --capture-video" if script.video else ""
        flags += " --checkpoints 0"
        folder = tmp_path_factory.mktemp(script.name)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            script.prepare(script.env_id)
            run = run_script(script.name, flags)
        whole_runs[script.name] = Finished(folder / run.folder, {})
    return whole_runs[script.name]


@every_script
def test_it_writes_metrics_model_and_video(script: Script, whole: Finished, tmp_path) -> None:
    rows = whole.rows()
    tags = {tag for _, tag, _ in rows} | {"charts/SPS"}
    assert set(script.tags) <= tags, set(script.tags) - tags
    assert all(np.isfinite(value) for _, _, value in rows)
    assert sum(tag == "eval/episodic_return" for _, tag, _ in rows) == 2
    record = json.loads((whole.folder / "run.json").read_text())
    assert record["args"]["env_id"] == script.env_id and record["versions"]["numpy"]
    summary = json.loads((whole.folder / "finished.json").read_text())
    assert summary["step"] > 0
    assert list(whole.folder.glob("events.out.tfevents.*"))
    if script.video:
        assert list(whole.folder.glob("videos/**/*.mp4"))
    # the saved model plays as the trained one did in its final evaluation
    agent, args, module = load_model(
        whole.folder / f"{script.name}.cleanrl_model", env_id=script.env_id
    )
    seed = derive_seed(args.seed, EVAL_SEED)
    make_env = partial(module.make_env, **args.env_settings)
    returns = play(as_policy(agent), make_env, script.env_id, 2, seed, False, "")
    assert returns == summary["eval_returns"]


@every_script
def test_resume_is_exact(script: Script, whole: Finished, train, monkeypatch) -> None:
    """Checkpoints, evaluations, a kill and a resume: none of them may change the run."""
    script.prepare(script.env_id)
    written, save = [], Run._save

    def dies_in_the_second_half(run: Run, iteration: int) -> None:
        if len(written) >= 2 and iteration > run.total / 2:
            run._close()  # rows written since the checkpoint reach the disk, and must go again
            raise Killed
        save(run, iteration)
        written.append(iteration)

    flags = f"--env-id {script.env_id} {script.quick} --checkpoints {script.checkpoints}"
    flags += " --save-model --eval-episodes 1"
    if not script.replays:  # EnvPool restarts at every checkpoint
        whole = train(script.name, flags, "whole")
    monkeypatch.setattr(Run, "_save", dies_in_the_second_half)
    with pytest.raises(Killed):
        train(script.name, f"{flags} --eval-frequency 100")
    monkeypatch.setattr(Run, "_save", save)
    (record,) = Path("runs").rglob("run.json")
    resumed = train(script.name, f"--resume {record.parent}")
    assert resumed.curve() == whole.curve()
    assert resumed.weights() == whole.weights()


def test_every_script_has_probes_or_says_why_not() -> None:
    for script in SCRIPTS:
        assert bool(script.probe) != bool(script.no_probe), script


@pytest.mark.parametrize("script, probe", CASES, ids=[f"{s}-{p}" for s, p in CASES])
def test_it_finds_the_known_values(script: Script, probe: str, train) -> None:
    """tests/check_probes.py checks that other seeds and instruction sets have a margin."""
    assert learn_probe(script, probe) < 1


@pytest.mark.parametrize("name", ["ppo", "dqn", "c51", "sac_continuous_action", "dqn_jax"])
@pytest.mark.parametrize("seen", ["bytes", "numbers"])
def test_observations_need_not_be_floats(name: str, seen: str, train) -> None:
    if "jax" in name:
        pytest.importorskip("jax")
    suffix = "Continuous" if "continuous" in name else ""
    env_id = f"probes:ProbeOddBytes{suffix}-v0"
    if seen == "numbers":
        env_id = "FrozenLake-v1" if not suffix else "probes:ProbeOddNumbersContinuous-v0"
    few = (
        "--total-timesteps 1024" if name == "ppo" else "--total-timesteps 300 --learning-starts 99"
    )
    many = "--num-envs 9" if "dqn" in name or name == "c51" else ""  # too many for NumPy alone
    done = train(name, f"--env-id {env_id} {few} --save-model {many}")
    assert (done.folder / "finished.json").exists()


@pytest.mark.parametrize(
    "name, env, says",
    [
        ("ppo_continuous_action", "Matrix", "shape (2, 3)"),
        ("ppo_continuous_action", "MultiDiscrete", "needs Box"),
        ("ddpg_continuous_action", "Unbounded", "without bounds"),
        ("ddpg_continuous_action", "Bytes", "use dqn.py"),
    ],
)
def test_actions_that_do_not_fit_are_named(name: str, env: str, says: str, train, capfd) -> None:
    with pytest.raises(SystemExit) as stop:
        train(name, f"--env-id probes:ProbeOdd{env}-v0")
    lines = capfd.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and len(lines) == 1 and says in lines[0], lines
    assert "ppo.py" not in lines[0]  # which would not fit either
