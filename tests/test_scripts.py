"""What every script must do; a new script is a new row of tests/table.py."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import Killed
from probes import GAMMA, see_each_picture_once
from table import SCRIPTS, Script

from cleanrl_utils.running.evaluation import as_policy, load_model, play
from cleanrl_utils.running.run import Run

every_script = pytest.mark.parametrize("script", SCRIPTS, ids=str)


@pytest.fixture(autouse=True)
def needs(request: pytest.FixtureRequest) -> None:
    if "script" in request.fixturenames:
        for package in request.getfixturevalue("script").needs:
            pytest.importorskip(package, exc_type=ImportError)


@every_script
def test_it_writes_metrics_model_and_video(script: Script, train) -> None:
    script.prepare(script.env_id)
    # few checkpoints: at each, environments start anew, and so does the filming of early episodes
    flags = f"--env-id {script.env_id} {script.quick} --save-model --eval-episodes 2"
    flags += "" if "--checkpoints" in script.quick else " --checkpoints 2"
    done = train(script.name, flags + (" --capture-video" if script.video else ""))
    rows = done.rows()
    tags = {tag for _, tag, _ in rows} | {"charts/SPS"}
    assert set(script.tags) <= tags, set(script.tags) - tags
    assert all(np.isfinite(value) for _, _, value in rows)
    assert sum(tag == "eval/episodic_return" for _, tag, _ in rows) == 2
    record = json.loads((done.folder / "run.json").read_text())
    assert record["args"]["env_id"] == script.env_id and record["versions"]["numpy"]
    assert json.loads((done.folder / "finished.json").read_text())["step"] > 0
    assert list(done.folder.glob("events.out.tfevents.*"))
    if script.video:
        assert list(done.folder.rglob("*.mp4"))
    # the saved model plays as the trained one did in its final evaluation
    agent, args, module = load_model(done.folder / f"{script.name}.cleanrl_model")
    run = done.variables["run"]
    wanted = json.loads((done.folder / "finished.json").read_text())["eval_returns"]
    seed = run.eval_seed
    assert play(as_policy(agent), module.make_env, script.env_id, 2, seed, False, "") == wanted


@every_script
def test_same_seed_same_run_and_resume_is_exact(script: Script, train, monkeypatch) -> None:
    """Checkpoints, evaluations, a kill and a resume: none of them may change the run."""
    script.prepare(script.env_id)
    flags = f"--env-id {script.env_id} {script.quick} --save-model --eval-episodes 1"
    few = "0" if script.replays else "4"  # checkpoints; EnvPool restarts at each
    whole = train(script.name, f"{flags} --checkpoints {few}", "whole")

    written, save = [], Run._save

    def dies_after_second_checkpoint(run: Run, iteration: int) -> None:
        if len(written) == 2:
            run._close()  # rows written since the checkpoint reach the disk, and must go again
            raise Killed
        save(run, iteration)
        written.append(iteration)

    monkeypatch.setattr(Run, "_save", dies_after_second_checkpoint)
    with pytest.raises(Killed):
        train(script.name, f"{flags} --checkpoints 4 --eval-frequency 100", "killed")
    monkeypatch.setattr(Run, "_save", save)
    (record,) = Path("killed").rglob("run.json")
    resumed = train(script.name, f"--resume {record.parent}")
    assert len(written) == 2 and resumed.curve() == whole.curve()
    assert resumed.weights() == whole.weights()


def probe_observations(script: Script, cues: list[float]) -> np.ndarray:
    """What the agent sees when the probe shows these cues."""
    import gymnasium as gym

    from cleanrl_utils.running.evaluation import import_script

    make_env = import_script(script.name).make_env
    rows = []
    for cue in cues:
        env = make_env(f"probes:ProbeConstant{script.probe_suffix}-v0", 1, 0, False, "")()
        env.unwrapped.cue = lambda cue=cue: cue
        rows.append(env.reset(seed=1)[0])
    assert isinstance(env, gym.Env)
    return np.stack(rows)


PROBE_CASES = [(script, probe) for script in SCRIPTS if script.probe for probe in script.probes]


@pytest.mark.parametrize("script, probe", PROBE_CASES, ids=[f"{s}-{p}" for s, p in PROBE_CASES])
def test_it_finds_the_known_values(script: Script, probe: str, train, monkeypatch) -> None:
    if script.probe_suffix == "Pixels":
        see_each_picture_once(monkeypatch)
    env_id = f"probes:Probe{probe}{script.probe_suffix}-v0"
    script.prepare(env_id)
    done = train(script.name, f"--env-id {env_id} --gamma {GAMMA} {script.probe}")
    cues = {"Cue": [-1, 1], "Both": [-1, 1], "Discount": [-1, 1]}.get(probe, [1])
    obs = probe_observations(script, cues)
    if script.values is not None:
        wanted = {
            "Constant": [1],
            "Cue": [-1, 1],
            "Discount": [GAMMA, 1],
            "Action": [1],
            "Both": [1, 1],
            "Truncation": [1 / (1 - GAMMA)],
        }[probe]
        found = script.values(done.variables, obs)
        # what is worth 10 may be off by ten times as much
        slack = script.tolerance * np.maximum(np.abs(wanted), 1)
        assert np.all(np.abs(found - wanted) < slack), (found, wanted)
    if probe in ("Action", "Both") and script.acts is not None:
        best = np.array([1] if probe == "Action" else cues)
        actions = script.acts(done.variables, obs)
        if script.discrete:
            assert (2 * actions - 1 == best).all(), actions
        else:
            assert np.abs(actions[:, 0] - best).max() < 0.3, actions


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
