"""PPO in JAX: it is the PPO of ppo.py, and many agents at once are as good as one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnax")
import gymnasium as gym
import gymnax
import jax
import jax.numpy as jnp
import torch
from conftest import ROOT, Killed
from flax import struct
from gymnax.environments import environment, spaces

from cleanrl import ppo, ppo_continuous_action, ppo_jax
from cleanrl import ppo_continuous_action_brax_jax as brax_jax
from cleanrl import ppo_continuous_action_isaacgym as isaacgym
from cleanrl_utils.environments.jax_envs import Brax, Gymnax, Step, advance, begin
from cleanrl_utils.running.evaluation import load_model
from cleanrl_utils.running.runs import segment_length
from cleanrl_utils.speed.jax_tools import orthogonal, permutations


def test_advantages_are_those_of_ppo() -> None:
    """An episode's last observation is the next row in ppo.py (a step that only resets), and
    `next_obs` here."""
    rng = np.random.default_rng(0)
    num = 40
    terminated = rng.random(num) < 0.15
    done = terminated | (rng.random(num) < 0.15)
    rewards, values, after = rng.standard_normal((3, num)).astype(np.float32)
    for t in range(num - 1):
        after[t] = after[t] if done[t] else values[t + 1]
    rows = []  # reward, value, terminated, done, real: as next-step autoreset gives them
    for t in range(num):
        rows.append((rewards[t], values[t], terminated[t], done[t], True))
        if done[t]:
            rows.append((0.0, after[t], False, False, False))
    rewards_, values_, terminated_, done_, real = (
        torch.tensor(np.array(column, np.float32))[:, None] for column in zip(*rows)
    )
    values_ = torch.cat([values_, torch.tensor([[after[-1]]])])
    wanted = ppo.gae(rewards_, values_, terminated_, done_, ppo.Args())[real > 0]

    column = [jnp.asarray(x)[:, None] for x in (rewards, terminated, done)]
    step = Step(None, *column, None, None)
    found = ppo_jax.gae(step, values[:, None], after[:, None], ppo_jax.Args())
    np.testing.assert_allclose(found[:, 0], wanted, atol=1e-5)


@pytest.mark.parametrize("flags", [{}, {"clip_vloss": False, "norm_adv": False, "clip_coef": 0.05}])
def test_loss_and_gradient_are_those_of_ppo(flags: dict) -> None:
    envs = gym.vector.SyncVectorEnv([ppo.make_env("CartPole-v1", 1, 0, False, "")])
    agent = ppo.Agent(envs)
    rng = np.random.default_rng(0)
    n = 64
    floats = rng.standard_normal((5, n)).astype(np.float32)
    obs = rng.standard_normal((n, 4)).astype(np.float32)
    actions = rng.integers(0, 2, n)
    floats[0] = np.log(rng.uniform(0.3, 0.7, n))  # log-probabilities
    values, advantages, returns = floats[1:4]
    minibatch = (obs, actions, floats[0], values, advantages, returns)

    optimizer = torch.optim.SGD(agent.parameters(), lr=0.0)
    args = ppo.Args(max_grad_norm=1e9, **flags)
    real = np.ones(n, np.float32)
    losses = ppo.update(agent, optimizer, args, *map(torch.as_tensor, (*minibatch, real)))

    params = params_of(dict(agent.named_parameters()))
    gradient = jax.grad(ppo_jax.get_loss, has_aux=True)
    grads, found = gradient(params, ppo_jax.Args(**flags), minibatch)
    np.testing.assert_allclose(found, torch.stack(list(losses.values())), atol=1e-5)
    wanted = params_of({k: parameter.grad for k, parameter in agent.named_parameters()})
    for k in wanted:
        np.testing.assert_allclose(grads[k], wanted[k], atol=1e-5)


def params_of(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Of torch's Sequentials: activations are not counted, matrices are (inputs, outputs)."""
    params = {}
    for name, tensor in tensors.items():
        x, (network, *rest) = tensor.detach().numpy(), name.split(".")
        if rest:
            kind = "kernel" if rest[1] == "weight" else rest[1]
            name = f"{network}.{int(rest[0]) // 2}.{kind}"
        params[name] = x.T if x.ndim == 2 else x
    return params


def test_loss_and_gradient_are_those_of_ppo_continuous_action() -> None:
    n, num_obs, num_actions = 64, 3, 2
    spaces = {"single_observation_space": np.zeros(num_obs), "single_action_space": np.zeros(2)}
    agent = ppo_continuous_action.Agent(SimpleNamespace(**spaces))
    agent.logstd.data = torch.tensor([0.3, -0.2])
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((n, num_obs)).astype(np.float32)
    actions = rng.standard_normal((n, num_actions)).astype(np.float32)
    floats = rng.standard_normal((4, n)).astype(np.float32)
    minibatch = (obs, actions, floats[0] - 3, *floats[1:])
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.0)
    args = ppo_continuous_action.Args(max_grad_norm=1e9, clip_vloss=False, ent_coef=0.01)
    real = np.ones(n, np.float32)
    losses = ppo_continuous_action.update(
        agent, optimizer, args, *map(torch.as_tensor, (*minibatch, real))
    )
    params = params_of(dict(agent.named_parameters()))
    grads, found = jax.grad(brax_jax.get_loss, has_aux=True)(
        params, brax_jax.Args(ent_coef=0.01), minibatch
    )
    np.testing.assert_allclose(found, torch.stack(list(losses.values())), atol=1e-5, rtol=1e-5)
    wanted = params_of({k: parameter.grad for k, parameter in agent.named_parameters()})
    for k in wanted:
        np.testing.assert_allclose(grads[k], wanted[k], atol=1e-5, rtol=1e-4)


def test_statistics_are_those_of_everything_seen() -> None:
    rng = np.random.default_rng(0)
    batches = [rng.normal(i, 2 + i, (50 + i, 3)).astype(np.float32) for i in range(4)]
    stats = brax_jax.init_stats(3)
    for batch in batches:
        stats = brax_jax.update_stats(stats, batch)
    everything = np.concatenate(batches)
    np.testing.assert_allclose(stats["mean"], everything.mean(0), atol=1e-4)
    np.testing.assert_allclose(stats["std"], everything.std(0), atol=1e-4)


@pytest.mark.parametrize(
    "env_id, shape, actions",
    [
        ("Asterix-MinAtar", (10, 10, 4), 5),
        ("Breakout-MinAtar", (10, 10, 4), 3),
        ("Freeway-MinAtar", (10, 10, 7), 3),
        ("SpaceInvaders-MinAtar", (10, 10, 6), 4),
    ],
)
def test_pictures_stay_pictures_and_go_through_a_convolution(
    env_id: str, shape: tuple[int, ...], actions: int
) -> None:
    from flax import linen as nn

    env = Gymnax.make(env_id)
    assert env.observation_space.shape == shape and env.action_space.n == actions
    seen = jax.eval_shape(lambda: begin(env, jax.random.key(0), 2)).obs
    assert seen.shape == (2, *shape) and seen.dtype == jnp.float32

    rng = np.random.default_rng(0)
    obs = rng.random((2, 5, *shape)).astype(np.float32)
    params = ppo_jax.init_params(env, 1)
    for name, outputs in [("actor", actions), ("critic", 1)]:
        biases = [rng.standard_normal(n).astype(np.float32) for n in (16, 128, outputs)]
        params |= {f"{name}.{i}.bias": bias for i, bias in enumerate(biases)}
        kernels = [params[f"{name}.{i}.kernel"] for i in range(3)]
        kernels[0] = kernels[0].reshape(3, 3, shape[-1], 16)
        layers = [nn.Conv(16, (3, 3), padding="VALID"), nn.Dense(128), nn.Dense(outputs)]
        x = jnp.asarray(obs)
        for i, layer in enumerate(layers):
            x = layer.apply({"params": {"kernel": kernels[i], "bias": biases[i]}}, x)
            x = nn.relu(x) if i < 2 else x
            x = x.reshape(2, 5, -1)
        np.testing.assert_allclose(ppo_jax.forward(params, name, obs), x, atol=1e-4)


def test_vectors_have_the_network_of_ppo() -> None:
    params = ppo_jax.init_params(Gymnax.make("CartPole-v1"), 1)
    obs = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)
    assert params["actor.0.kernel"].shape == (4, 64)
    found = ppo_jax.forward(params, "actor", obs)
    np.testing.assert_array_equal(found, ppo_jax.mlp(params, "actor", jnp.asarray(obs)))


def test_a_game_of_pictures_trains_is_saved_and_played(train) -> None:
    flags = "--env-id Breakout-MinAtar --total-timesteps 1024 --num-steps 32"
    done = train("ppo_jax", f"{flags} --save-model --eval-episodes 1 --capture-video")
    tags = {tag for _, tag, _ in done.rows()}
    assert {"charts/episodic_return", "losses/value_loss", "eval/episodic_return"} <= tags
    (film,) = done.folder.glob("videos/**/*.mp4")
    assert film.stat().st_size > 0
    agent, *_ = load_model(done.folder / "ppo_jax.cleanrl_model", env_id="Breakout-MinAtar")
    obs = np.random.default_rng(0).random((3, 10, 10, 4)).astype(np.float32)
    trained = jax.tree.map(lambda x: x[0], done.variables["train"]["params"])
    wanted = ppo_jax.forward(trained, "actor", obs).argmax(-1)
    assert agent.act(obs).tolist() == wanted.tolist()


def test_minibatches_are_permutations() -> None:
    rows = np.asarray(permutations(jax.random.key(0), 3, 500, 50)).reshape(3, 500)
    assert (np.sort(rows) == np.arange(500)).all()
    assert not (rows[0] == rows[1]).all()
    first = [int(permutations(jax.random.key(i), 1, 5, 5)[0, 0]) for i in range(200)]
    assert np.bincount(first, minlength=5).min() > 20  # each comes first about 40 times


def test_initial_weights_are_orthogonal() -> None:
    for shape in [(64, 4), (4, 64), (64, 64)]:
        w = orthogonal(np.random.default_rng(0), 2.0, *shape)
        square = w @ w.T if shape[0] < shape[1] else w.T @ w
        np.testing.assert_allclose(square, 4 * np.eye(min(shape)), atol=1e-5)


@struct.dataclass
class ProbeState(environment.EnvState):
    time: int


class Forever(environment.Environment):
    """Reward 1 for ever, cut off every 5 steps: worth 1 / (1 - gamma) = 10, not 4.1."""

    @property
    def default_params(self) -> environment.EnvParams:
        return environment.EnvParams(max_steps_in_episode=5)

    def reset_env(self, key, params):
        return jnp.zeros(1), ProbeState(time=0)

    def step_env(self, key, state, action, params):
        state = ProbeState(time=state.time + 1)
        ended = self.is_terminated(state, params)
        return self.observe_time(state), state, jnp.float32(1), ended, {}

    def observe_time(self, state):
        return jnp.zeros(1)

    def is_terminated(self, state, params):
        return jnp.bool(False)

    def action_space(self, params):
        return spaces.Discrete(2)

    def observation_space(self, params):
        return spaces.Box(0, 1, (1,))


class Once(Forever):
    """Reward 1, then the end: worth 1."""

    def is_terminated(self, state, params):
        return state.time >= 1


class Clock(Forever):
    """The observation is the time."""

    def observe_time(self, state):
        return jnp.full(1, state.time / 5)


gymnax.register("Clock-probe", Clock)
gymnax.register("Forever-probe", Forever)
gymnax.register("Once-probe", Once)


@pytest.mark.parametrize("env_id, wanted", [("Forever-probe", 10.0), ("Once-probe", 1.0)])
def test_it_finds_the_known_values(env_id: str, wanted: float, train) -> None:
    flags = (
        "--total-timesteps 25600 --learning-rate 0.005 --num-steps 32 --gamma 0.9 --no-clip-vloss"
    )
    done = train("ppo_jax", f"--env-id {env_id} {flags}")
    params = jax.tree.map(lambda x: x[0], done.variables["train"]["params"])
    found = ppo_jax.mlp(params, "critic", jnp.zeros((1, 1)))[0, 0]
    assert abs(found - wanted) < 0.1 * wanted


def test_an_ended_episode_goes_on_from_its_start_and_keeps_its_last_observation() -> None:
    env = Gymnax.make("Clock-probe")
    episodes = begin(env, jax.random.key(0), 2)
    keys, starts = jax.random.split(jax.random.key(1), 2), begin(env, jax.random.key(2), 2)
    for t in range(1, 6):
        episodes, step = advance(env, episodes, jnp.zeros(2, int), keys, starts)
        assert step.done.tolist() == [t == 5] * 2 and not step.terminated.any()
        np.testing.assert_allclose(step.next_obs, t / 5)
        np.testing.assert_allclose(episodes.obs, 0 if t == 5 else t / 5)
    assert step.episodic_return.tolist() == [5, 5] and step.episodic_length.tolist() == [5, 5]
    assert episodes.ret.tolist() == [0, 0]


def test_a_checkpoint_ends_no_episode(train) -> None:
    """Episodes take 5 steps, and there is a checkpoint every 2."""
    flags = "--env-id Clock-probe --num-envs 1 --num-steps 2 --num-minibatches 1"
    done = train("ppo_jax", f"{flags} --total-timesteps 20 --checkpoints 10")
    lengths = [value for _, tag, value in done.rows() if tag == "charts/episodic_length"]
    assert lengths == [5, 5, 5, 5]


def test_seeds_together_are_runs_of_their_own_and_resume_exactly(train, die_at, capfd) -> None:
    flags = "--num-seeds 2 --total-timesteps 4096 --num-steps 64 --checkpoints 4 --save-model"
    flags += " --eval-episodes 1"
    train("ppo_jax", flags, "whole")
    die_at([10])
    with pytest.raises(Killed):
        train("ppo_jax", flags, "killed")
    first, second = sorted(Path("killed").iterdir())
    with pytest.raises(SystemExit):  # the checkpoint of both is in the first one's folder
        train("ppo_jax", f"--resume {second}")
    train("ppo_jax", f"--resume {first}")

    def rows(folder: Path) -> list[str]:
        lines = (folder / "metrics.csv").read_text().splitlines()
        fields = [line.split(",") for line in lines]
        return [f"{f[0]},{f[2]},{f[3]}" for f in fields if f[2] != "charts/SPS"]

    whole = sorted(Path("whole").iterdir())
    assert [json.loads((f / "run.json").read_text())["args"]["seed"] for f in whole] == [1, 2]
    assert rows(whole[0]) != rows(whole[1])
    for one, other in zip(whole, [first, second]):
        assert rows(one) == rows(other)
        model = "ppo_jax.cleanrl_model"
        assert (one / model).read_bytes() == (other / model).read_bytes()
        assert (one / "finished.json").exists()

    train("ppo_jax", f"--resume {first} --total-timesteps 5120")
    for one in (first, second):
        record = json.loads((one / "run.json").read_text())
        assert [change["to"] for change in record["lengthened"]] == [5120]

    shutil.rmtree(second)
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        train("ppo_jax", f"--resume {first} --total-timesteps 6144")
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and f"{second}, trained together with it, is gone" in line


def test_seeds_together_that_were_killed_as_they_began_are_refused(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """Status 2 lets the benchmark begin them again."""

    def killed(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr("cleanrl_utils.running.source.copy", killed)  # after the first record
    with pytest.raises(Killed):
        train("ppo_jax", "--num-seeds 3 --total-timesteps 1024")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    first, _, third = sorted(Path("runs").iterdir())
    with pytest.raises(SystemExit) as stop:
        train("ppo_jax", f"--resume {first}")
    assert stop.value.code == 2
    assert f"{third}, trained together with it, is gone or was killed" in capfd.readouterr().err


def test_a_longer_run_keeps_the_length_of_its_segments(train, die_at) -> None:
    """Of 60 iterations a segment has 1, of 160 it would have 2: checkpoints count segments."""
    flags = "--num-envs 1 --num-steps 8 --num-minibatches 1 --update-epochs 1 --checkpoints 10"
    done = train("ppo_jax", f"{flags} --total-timesteps 480")
    longer = f"--resume {done.folder} --total-timesteps 1280"
    die_at([100])
    with pytest.raises(Killed):
        train("ppo_jax", longer)
    for words in (longer, f"--resume {done.folder} --total-timesteps 1600"):
        train("ppo_jax", words)
        rows = (done.folder / "metrics.csv").read_text().splitlines()
        losses = [int(row.split(",")[0]) for row in rows if "losses/policy_loss" in row]
        assert losses == list(range(8, int(words.split()[-1]) + 1, 8))


def test_seeds_together_are_tracked_as_runs_of_their_own(tmp_path: Path, capfd) -> None:
    flags = ["--num-seeds", "2", "--total-timesteps", "1024", "--track"]
    words = [sys.executable, str(ROOT / "cleanrl" / "ppo_jax.py"), *flags]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/*/wandb/offline-run-*/*.wandb"))) == 2
    assert len(list(tmp_path.glob("runs/*/finished.json"))) == 2
    with pytest.raises(SystemExit):
        ppo_jax.Args(num_seeds=17, track=True)
    assert "--num-seeds must be at most 16 with --track, got 17" in capfd.readouterr().err


@pytest.mark.parametrize("script", [ppo_jax, isaacgym])
def test_arguments_that_no_environment_takes_are_refused(script: Any, capfd) -> None:
    with pytest.raises(SystemExit) as stop:
        script.Args(env_kwargs=["gravity=1"])
    assert stop.value.code == 2 and "error: --env-kwargs: " in capfd.readouterr().err


@pytest.mark.parametrize("number", [0, -2])
def test_there_is_at_least_one_seed(number: int, capfd) -> None:
    with pytest.raises(SystemExit) as stop:
        ppo_jax.Args(num_seeds=number)
    assert stop.value.code == 2
    assert f"--num-seeds must be at least 1, got {number}" in capfd.readouterr().err


def test_the_last_of_several_seeds_is_one_that_all_streams_take(train, capfd) -> None:
    with pytest.raises(SystemExit) as stop:
        train("ppo_jax", f"--seed {2**32 - 2} --num-seeds 3")
    assert stop.value.code == 2
    assert "--seed must be below 4294967294 with --num-seeds 3" in capfd.readouterr().err
    assert ppo_jax.Args(seed=2**32 - 3, num_seeds=3).num_seeds == 3


@pytest.mark.parametrize(
    "iterations, agents, segments",
    [(976, 1, 122), (976, 100, 122), (976, 2048, 16), (97, 1, 97), (997, 1, 997), (5, 1, 5)],
)
def test_segments_are_equally_long_and_fewer_of_many_agents(
    iterations: int, agents: int, segments: int
) -> None:
    length = segment_length(iterations, agents)
    assert iterations % length == 0 and iterations // length == segments


def test_a_prime_number_of_iterations_is_not_a_single_segment() -> None:
    """Ten million steps of ppo_jax.py: 19531 iterations. One is left out, 105 segments are run."""
    assert divmod(19531, segment_length(19531, 1)) == (105, 1)
    assert divmod(997, segment_length(997, 2048)) == (12, 1)


def test_the_camera_of_brax_follows_the_robot() -> None:
    env = Brax.make("ant")
    (state, time), _ = env.reset(jax.random.key(0))
    physics = state.pipeline_state
    brown = []  # share of the picture that is not grey, as the floor and the sky are
    for x in (0.0, 30.0):
        moved = state.replace(pipeline_state=physics.replace(q=physics.q.at[0].set(x)))
        picture = env.render((moved, time)).astype(int)
        brown.append((picture[..., 0] - picture[..., 2] > 15).mean())
    assert brown[0] > 0.01
    assert brown[1] == pytest.approx(brown[0], rel=0.2)
