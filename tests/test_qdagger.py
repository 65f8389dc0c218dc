"""QDagger: distillation and its coefficient, both backends alike, teachers, phases and resuming."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import Finished, Killed
from episodes import FRAMES, Episodes, everything, pictures
from gymnasium.spaces import Box, Discrete
from hub import Hub, command
from probes import image, see_each_picture_once
from table import untrained_teacher
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from cleanrl import dqn_atari
from cleanrl import qdagger_dqn_atari_impalacnn as qdagger
from cleanrl_utils.errors import BadInput
from cleanrl_utils.replay.buffers import FrameReplayBuffer
from cleanrl_utils.running import checkpoint
from cleanrl_utils.running.evaluation import load_teacher, save_model
from cleanrl_utils.running.folder import Metrics
from cleanrl_utils.running.metrics import Progress

pytest.importorskip("cv2")
NAME, JAX_NAME = "qdagger_dqn_atari_impalacnn", "qdagger_dqn_atari_jax_impalacnn"
NUM_ACTIONS = 3
PIXELS: Any = SimpleNamespace(
    num_envs=2,
    single_observation_space=Box(0, 255, (4, 84, 84), np.uint8),
    observation_space=Box(0, 255, (2, 4, 84, 84), np.uint8),
    single_action_space=Discrete(NUM_ACTIONS),
)


def make_args(module: ModuleType = qdagger, **settings: Any) -> Any:
    return module.Args(teacher_model="teacher.cleanrl_model", **settings)


# -- losses ------------------------------------------------------------------------------------


class Table(nn.Module):
    """Q-values that depend on the first pixel alone: as many rows as there are colours."""

    def __init__(self, rows: list[list[float]]):
        super().__init__()
        self.rows = nn.Parameter(torch.tensor(rows))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.rows[obs[:, 0, 0, 0].long()]


def colours(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)[:, None, None, None].expand(-1, 4, 2, 2)


def losses(batch_size: int = 2, weight: float = 1.0, temperature: float = 1.0) -> list[float]:
    """Of two transitions, each `batch_size` / 2 times: rewards 1, the second one terminal."""
    student = Table([[1.0, 3.0], [0.0, 0.0]])
    target = Table([[5.0, 7.0], [2.0, 4.0]])
    teacher = Table([[np.log(3.0), 0.0], [0.0, 0.0]])
    no_change = torch.optim.SGD(student.parameters(), 0.0)
    args = make_args(gamma=0.5)
    args.temperature = temperature
    batch = (
        colours(0, 1),
        colours(1, 0),
        torch.tensor([1, 0]),
        torch.ones(2),
        torch.tensor([0.0, 1]),
    )
    repeated = [torch.cat([x] * (batch_size // 2)) for x in batch]
    coeff = torch.tensor(weight)
    metrics = qdagger.update(student, target, teacher, no_change, coeff, args, *repeated)
    return torch.stack(list(metrics.values())).tolist()


def test_losses_of_a_case_computed_by_hand() -> None:
    # TD errors: 3 - (1 + 0.5 * 4) = 0 and 0 - 1
    td_loss = (0.0**2 + 1.0**2) / 2
    # the teacher's policy is (3/4, 1/4) where the student's is softmax(1, 3); then both are even
    student = np.exp([1.0, 3.0]) / np.exp([1.0, 3.0]).sum()
    kl = 0.75 * np.log(0.75 / student[0]) + 0.25 * np.log(0.25 / student[1])
    distill_loss = (kl + 0.0) / 2  # a mean over the batch, not a sum
    wanted = [td_loss + distill_loss, td_loss, distill_loss, 1.5]
    assert losses() == pytest.approx(wanted, rel=1e-5)
    assert losses(batch_size=64) == pytest.approx(wanted, rel=1e-5)  # so its size does not matter
    assert losses(weight=0.25)[0] == pytest.approx(td_loss + 0.25 * distill_loss)
    assert losses(weight=0.0)[0] == pytest.approx(td_loss)
    soft = losses(temperature=2.0)[2]  # both policies from halves of the Q-values
    student, teacher = np.exp([0.5, 1.5]), np.exp([0.5 * np.log(3), 0])
    student, teacher = student / student.sum(), teacher / teacher.sum()
    assert soft == pytest.approx((teacher * np.log(teacher / student)).sum() / 2, rel=1e-5)


@pytest.mark.parametrize(
    "student, teacher, wanted",
    [
        ([2.0] * 10, 8.0, 0.75),
        ([0.0, 16.0] * 5, 8.0, 0.0),
        ([20.0] * 10, 8.0, 0.0),  # never below 0
        ([-8.0] * 10, 8.0, 2.0),
        ([2.0] * 9 + [np.nan], 8.0, 1.0),  # too few episodes to tell
        ([-15.0] * 10, -10.0, 0.5),  # a teacher below 0 is still ahead
        ([-5.0] * 10, -10.0, 0.0),
        ([-0.5] * 10, 0.0, 0.5),
    ],
)
def test_the_coefficient_of_distillation(
    student: list[float], teacher: float, wanted: float
) -> None:
    for weight in (1.0, 0.5):
        args = make_args(distill_weight=weight)
        found = qdagger.get_distill_coeff(np.array(student), teacher, args)
        assert found == pytest.approx(weight * wanted)


def test_the_network_is_impalas() -> None:
    network = qdagger.QNetwork(PIXELS)
    convs = [x for x in network.modules() if isinstance(x, nn.Conv2d)]
    wanted = [(4, 16), *[(16, 16)] * 4, (16, 32), *[(32, 32)] * 9]
    assert [(x.in_channels, x.out_channels) for x in convs] == wanted
    linears = [x for x in network.modules() if isinstance(x, nn.Linear)]
    wanted = [(32 * 11 * 11, 256), (256, NUM_ACTIONS)]
    assert [(x.in_features, x.out_features) for x in linears] == wanted
    assert network(torch.zeros(5, 4, 84, 84, dtype=torch.uint8)).shape == (5, NUM_ACTIONS)


def to_flax(network: nn.Module, arrays: list[torch.Tensor]) -> dict[str, Any]:
    """Weights of torch's network, or their gradients, as Flax has them: channels last."""
    kinds = [x for x in network.modules() if isinstance(x, nn.Conv2d | nn.Linear)]
    layers: dict[str, Any] = {}
    counts = {"Conv": 0, "Dense": 0}
    for i, layer in enumerate(kinds):
        weight, bias = (x.detach().numpy() for x in arrays[2 * i : 2 * i + 2])
        name = "Conv" if isinstance(layer, nn.Conv2d) else "Dense"
        if name == "Conv":
            weight, channels = weight.transpose(2, 3, 1, 0), len(weight)
        elif counts[name] == 0:  # its inputs were (channels, height, width)
            side = round((weight.shape[1] / channels) ** 0.5)
            weight = weight.reshape(-1, channels, side, side).transpose(0, 2, 3, 1)
            weight = weight.reshape(len(weight), -1)
        layers[f"{name}_{counts[name]}"] = {
            "kernel": weight if name == "Conv" else weight.T,
            "bias": bias,
        }
        counts[name] += 1
    return {"params": layers}


def test_loss_and_gradient_in_jax_are_those_of_torch() -> None:
    jax = pytest.importorskip("jax")
    pytest.importorskip("flax")
    from batches import PIXELS as envs
    from batches import make_batch

    from cleanrl import dqn_atari_jax
    from cleanrl import qdagger_dqn_atari_jax_impalacnn as twin

    torch.manual_seed(0)
    network = qdagger.QNetwork(PIXELS)
    target = qdagger.QNetwork(PIXELS)
    teacher = dqn_atari.QNetwork(PIXELS)
    with torch.no_grad():
        teacher[-1].weight *= 100  # far from a uniform policy
    batch = make_batch(envs, 4)
    settings: dict[str, Any] = {"gamma": 0.9, "temperature": 0.5, "buffer_size": 10}
    # In double precision: rounding could open or close a ReLU.
    torch.set_default_dtype(torch.float64)
    try:
        for module in (network, target, teacher):
            module.double()
        no_change = torch.optim.SGD(network.parameters(), lr=0.0)
        coeff = torch.tensor(0.7)
        args = make_args(**settings)
        tensors = map(torch.as_tensor, batch)
        wanted = qdagger.update(network, target, teacher, no_change, coeff, args, *tensors)
    finally:
        torch.set_default_dtype(torch.float32)

    params = to_flax(network, list(network.parameters()))
    target_params = to_flax(target, list(target.parameters()))
    teacher_params = to_flax(teacher, list(teacher.parameters()))
    agent = dqn_atari_jax.Agent(dqn_atari_jax.QNetwork(NUM_ACTIONS), teacher_params)
    twin_args = make_args(twin, **settings)
    with jax.enable_x64(True):
        state = twin.init(twin_args, envs, teacher_params)._replace(target_network=target_params)
        taught = agent.network.apply(teacher_params, batch.obs)
        gradient = jax.grad(lambda *x: twin.get_loss(*x[:2], twin_args, *x[2:]), has_aux=True)
        grads, found = jax.jit(gradient)(params, state, batch, taught, 0.7)
    assert found["losses/distill_loss"] > 0.01  # distillation has a part in it
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5)
    gradients: list[Any] = [x.grad for x in network.parameters()]

    def check(a: Any, b: Any) -> None:  # within 1e-5 of the largest number of each array
        assert a.dtype == np.float64
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=1e-5)

    jax.tree.map(check, grads, to_flax(network, gradients))
    shapes = jax.tree.map(np.shape, state.q_network.params)
    assert shapes == jax.tree.map(np.shape, params)


# -- memory ------------------------------------------------------------------------------------


def test_a_cleared_memory_is_as_good_as_new() -> None:

    used, fresh = (FrameReplayBuffer(30, FRAMES, Discrete(5), 2) for _ in range(2))
    episodes = Episodes(2)

    def play(turns: int, *memories: FrameReplayBuffer) -> None:
        for _ in range(turns):
            obs, next_obs, _, *rest = episodes.step()
            for memory in memories:
                memory.add(pictures(obs), pictures(next_obs), np.zeros(2), *rest)

    play(25, used)  # around the ring
    used.clear()
    assert len(used) == 0
    episodes.reset()
    play(9, used, fresh)
    assert len(used) == len(fresh) > 5
    for ours, wanted in zip(everything(used), everything(fresh), strict=True):
        assert torch.equal(ours, wanted)


def test_so_is_one_in_jax() -> None:
    jax = pytest.importorskip("jax")
    from cleanrl_utils.replay.buffers_jax import FrameMemory

    memory, rng = FrameMemory(30, PIXELS), np.random.default_rng(0)
    insert, clear = jax.jit(memory.insert), jax.jit(memory.cleared)

    def play(turns: int, *replays: Any) -> list[Any]:
        for _ in range(turns):
            frames = rng.integers(256, size=(2, 2, 4, 84, 84), dtype=np.uint8)
            step = memory.pack(*frames, np.zeros(2), rng.random(2), np.zeros(2), np.ones(2))
            replays = tuple(insert(replay, step) for replay in replays)
        return list(replays)

    (used,) = play(20, memory.replay)
    both = play(7, clear(used), memory.replay)
    ours, wanted = (memory.sample(replay, jax.random.key(0), 64) for replay in both)
    jax.tree.map(np.testing.assert_array_equal, ours, wanted)
    assert len(np.unique(ours.rewards)) > 10


# -- teachers ----------------------------------------------------------------------------------

PROBE = "probes:ProbeTruncationPixels-v0"
SMALL = (
    f"--env-id {PROBE} --teacher-eval-episodes 2 --teacher-steps 8 --offline-steps 3"
    " --total-timesteps 8 --num-envs 2 --learning-starts 2 --train-frequency 4 --buffer-size 100"
    " --batch-size 2 --checkpoints 0"
)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("", "dqn_atari-seed1"),
        ("--teacher-model a --teacher-policy-hf-repo b", "name one teacher"),
        ("--teacher-model nowhere", "--teacher-model nowhere: no such file"),
        ("--teacher-model pong.cleanrl_model", "it plays PongNoFrameskip-v4, not probes:"),
        ("--teacher-model ppo.cleanrl_model", "made by ppo.py, not by dqn_atari.py"),
        ("--teacher-model teacher.cleanrl_model --teacher-steps 0", "--teacher-steps"),
        ("--teacher-model teacher.cleanrl_model --temperature 0", "--temperature"),
    ],
)
def test_a_wrong_teacher_is_one_line(
    flags: str, message: str, train: Callable, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if "pong" in flags:
        pytest.importorskip("ale_py")
        untrained_teacher("dqn_atari", "PongNoFrameskip-v4")
        Path("teacher.cleanrl_model").rename("pong.cleanrl_model")
    if "ppo" in flags:
        save_model(
            Path("ppo.cleanrl_model"), nn.Linear(1, 1), qdagger.Args("x", teacher_model="x"), "ppo"
        )
    with pytest.raises(BadInput) as refused:
        train(NAME, f"{SMALL} {flags}")
    assert refused.value.code == 2 and message in refused.value.message
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(Path("runs").rglob("run.json"))


def test_a_teacher_of_another_game_with_as_many_actions_is_refused(tmp_path: Path) -> None:
    """Pong and SpaceInvaders both have six actions; one game may have two ids."""
    pytest.importorskip("ale_py")
    envs = gym.vector.SyncVectorEnv([qdagger.make_env("PongNoFrameskip-v4", 1, 0, False, "")])
    path = tmp_path / "teacher.cleanrl_model"
    wanted = make_args(env_id="PongNoFrameskip-v4")
    wanted.teacher_model = str(path)

    def load(env_id: str) -> Any:
        args = dqn_atari.Args(env_id=env_id, exp_name="dqn_atari")
        save_model(path, dqn_atari.QNetwork(envs), args, "dqn_atari")
        return load_teacher(wanted, envs, ["dqn_atari"], "cpu")

    load("ALE/Pong-v5")
    with pytest.raises(BadInput) as refused:
        load("ALE/SpaceInvaders-v5")
    assert "it plays ALE/SpaceInvaders-v5, not PongNoFrameskip-v4" in refused.value.message


def test_without_a_teacher_the_original_s_is_taken_from_the_hub(monkeypatch, tmp_path) -> None:
    """Its weights are read from what the original saved with torch."""
    original = {f"network.{k}": x for k, x in dqn_atari.QNetwork(PIXELS).state_dict().items()}
    asked = []

    def download(repository: str, exp_name: str) -> Path:
        asked.append((repository, exp_name))
        torch.save(original, tmp_path / "x.cleanrl_model")
        return tmp_path / "x.cleanrl_model"

    monkeypatch.setattr("cleanrl_utils.running.hub.download_model", download)
    env_id = "probes:ProbeCuePixels-v0"
    envs = gym.vector.SyncVectorEnv([qdagger.make_env(env_id, 1, 0, False, "")])
    original["network.9.weight"] = torch.randn(envs.single_action_space.n, 512)
    original["network.9.bias"] = torch.randn(envs.single_action_space.n)
    teacher = load_teacher(qdagger.Args(env_id=env_id), envs, ["dqn_atari"], "cpu")
    assert asked == [("cleanrl/probes-ProbeCuePixels-v0-dqn_atari-seed1", "dqn_atari")]
    assert torch.equal(teacher.state_dict()["9.bias"], original["network.9.bias"])


def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for script in ("dqn_atari", "dqn_atari_jax"):
        args = qdagger.Args(env_id="PongNoFrameskip-v4", teacher_model_exp_name=script)
        with pytest.raises(BadInput) as refused:
            load_teacher(args, PIXELS, [script], "cpu")
        line = refused.value.message
        assert f"cleanrl/PongNoFrameskip-v4-{script}-seed1" in line and "\n" not in line
        assert f"python cleanrl/{script}.py --env-id PongNoFrameskip-v4 --save-model" in line
        assert "--teacher-model FILE" in line


def model_of(run: Finished) -> Path:
    (path,) = run.folder.glob("*.cleanrl_model")
    return path


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.shutdown()
    server.server_close()


def test_a_teacher_from_the_hub(hub: Hub, train: Callable, tmp_path: Path) -> None:
    """The same run as with the file itself; then a student is a teacher."""
    untrained_teacher("dqn_atari", PROBE)
    file = "teacher.cleanrl_model"
    local = train(NAME, f"{SMALL} --no-cuda --save-model --teacher-model {file}", "local")
    hub.repositories["me/teacher"] = {"best.cleanrl_model": Path(file).read_bytes()}
    flags = f"{SMALL} --no-cuda --save-model --runs-dir hub --teacher-model-exp-name best"
    done = command(
        f"cleanrl/{NAME}.py", f"{flags} --teacher-policy-hf-repo me/teacher", hub, tmp_path
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "hub").iterdir()
    remote = Finished(folder, {})
    assert remote.rows() == local.rows()
    ours, theirs = (checkpoint.load(model_of(x))[1]["model"] for x in (local, remote))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)

    envs = gym.vector.SyncVectorEnv([qdagger.make_env(PROBE, 1, 0, False, "")])
    args = make_args(env_id=PROBE)
    args.teacher_model = str(model_of(remote))
    assert isinstance(load_teacher(args, envs, ["dqn_atari", NAME], "cpu"), nn.Sequential)


# -- phases ------------------------------------------------------------------------------------


def test_the_live_line_says_the_phase() -> None:
    progress = Progress({"teacher": 10, "offline": 20, "online": 70}, 0)
    lines = {step: progress.line(step) for step in (0, 9, 10, 29, 30, 100)}
    phases = ["teacher", "teacher", "offline", "offline", "online", "online"]
    assert [line.split(" |")[0] for line in lines.values()] == phases
    assert "30/100 steps" in lines[30]
    assert Progress({"": 50}, 0).line(25).startswith(" 50% | 25/50 steps")


@pytest.mark.parametrize("num_envs", [1, 3])
def test_each_phase_has_its_steps_and_its_tags(num_envs: int, train: Callable, monkeypatch) -> None:
    """12 steps of the teacher, 7 offline; online ones: gradient steps at 10, 15, 20, 25, 30."""
    see_each_picture_once(monkeypatch)
    env_id = "probes:ProbeConstantPixels-v0"
    untrained_teacher("dqn_atari", env_id)
    flags = f"--env-id {env_id} --num-envs {num_envs} --teacher-steps 12 --offline-steps 7"
    flags += " --total-timesteps 30 --learning-starts 6 --train-frequency 5 --batch-size 2"
    flags += " --buffer-size 100 --checkpoints 1 --teacher-eval-episodes 2"
    done = train(NAME, f"{flags} --teacher-model teacher.cleanrl_model")
    assert Metrics(done.folder).total == 12 + 7 + 30  # what the benchmark's line counts
    counts = {int(x["step"]) for x in done.variables["optimizer"].state.values()}
    assert counts == {7 + len(range(10, 31, 5))}
    steps: dict[str, list[int]] = {}
    for step, tag, _ in done.rows():
        steps.setdefault(tag, []).append(step)
    assert steps["charts/teacher/avg_episodic_return"] == [0]
    # every second step of an environment that ends at once is a reset
    assert steps["charts/teacher/episodic_return"][-1] == {1: 11, 3: 9}[num_envs]
    for name in ("loss", "q_loss", "distill_loss", "avg_episodic_return"):
        assert steps[f"charts/offline/{name}"] == [19]
    online = steps["charts/episodic_return"]
    assert (min(online), max(online)) == {1: (20, 48), 3: (22, 46)}[num_envs]
    # the student's memory has its own transitions only, and none of the steps that only reset
    assert len(done.variables["memory"]) == len(online) == 15
    # all rewards were 1, the teacher's too: there is nothing left to learn from it
    assert float(done.variables["distill_coeff"]) == 0.0


@pytest.mark.parametrize("name", [NAME, JAX_NAME])
def test_every_phase_resumes_exactly(
    name: str, train: Callable, die_at: Callable, monkeypatch
) -> None:
    """Killed and resumed in each phase, and just where the second and the third begin."""
    teacher = "dqn_atari"
    if name == JAX_NAME:
        pytest.importorskip("flax")
        teacher = "dqn_atari_jax"
    see_each_picture_once(monkeypatch)
    env_id = "probes:ProbeConstantPixels-v0"
    untrained_teacher(teacher, env_id)
    # turns: 12 of the teacher, 12 offline, 54 online, and a checkpoint at every sixth one
    flags = f"--env-id {env_id} --teacher-model teacher.cleanrl_model --teacher-eval-episodes 2"
    flags += " --num-envs 2 --teacher-steps 24 --offline-steps 12 --total-timesteps 108"
    flags += " --learning-starts 4 --train-frequency 8 --batch-size 2 --buffer-size 40"
    flags += " --target-network-frequency 5 --checkpoints 13 --save-model --eval-episodes 1"
    whole = train(name, flags, "whole")
    deaths = [7, 13, 19, 25, 43]
    if name == JAX_NAME:  # which takes longer to start; tests/test_scripts.py has it die offline
        deaths = [7, 43]
    die_at(deaths)
    with pytest.raises(Killed):
        train(name, flags, "killed")
    (record,) = Path("killed").rglob("run.json")
    while deaths:
        with pytest.raises(Killed):
            train(name, f"--resume {record.parent}")
    resumed = train(name, f"--resume {record.parent}")
    assert resumed.rows() == whole.rows()
    assert resumed.model() == whole.model()
    # TensorBoard has it all, too: also what was logged at the very step of a checkpoint
    events = EventAccumulator(str(resumed.folder), {"scalars": 0}).Reload()
    for tag in ("charts/teacher/avg_episodic_return", "charts/offline/loss", "losses/loss"):
        wanted = [step for step, logged, _ in whole.rows() if logged == tag]
        assert [event.step for event in events.Scalars(tag)] == wanted != []


def taught(env_id: str) -> None:
    """A teacher of ProbeStreak, trained on what it is to answer to each stack of pictures."""
    torch.manual_seed(0)
    envs = gym.vector.SyncVectorEnv([dqn_atari.make_env(env_id, 1, 0, False, "")])
    network = dqn_atari.QNetwork(envs)
    envs.close()
    cues = torch.tensor(list(itertools.product([0, 1], repeat=4)))
    images = torch.as_tensor(np.stack([image(-1), image(1)])[..., 0])
    stacks = images[cues]
    answers = nn.functional.one_hot(cues[:, -1], 2).float()
    adam = torch.optim.Adam(network.parameters(), 2e-3)
    for _ in range(25):
        adam.zero_grad()
        (network(stacks) - answers).square().mean().backward()
        adam.step()
    assert (network.act(stacks) == cues[:, -1]).all()
    args = dqn_atari.Args(env_id=env_id, exp_name="dqn_atari")
    save_model(Path("teacher.cleanrl_model"), network, args, "dqn_atari")


def test_a_trained_teacher_helps(train: Callable, monkeypatch) -> None:
    """With distillation the student succeeds from its first games on; without it, the same
    transitions of the teacher and the same gradient steps are not enough."""
    see_each_picture_once(monkeypatch)
    env_id = "probes:ProbeStreakPixels-v0"
    taught(env_id)
    flags = f"--env-id {env_id} --teacher-model teacher.cleanrl_model --teacher-eval-episodes 4"
    flags += " --gamma 0.9 --teacher-steps 60 --offline-steps 15 --total-timesteps 100"
    flags += " --learning-starts 10 --train-frequency 5 --batch-size 8 --learning-rate 0.0005"
    flags += " --target-network-frequency 10 --buffer-size 400 --exploration-fraction 0.01"
    flags += " --end-e 0.02 --temperature 0.2 --checkpoints 1 --torch-threads 1"

    def steps_to_learn(weight: float) -> int:
        """Online steps until nine of ten episodes in a row were successes."""
        done = train(NAME, f"{flags} --distill-weight {weight}")
        rows = done.rows()
        assert (0, "charts/teacher/avg_episodic_return", 1.0) in rows
        ends = [(step, value) for step, tag, value in rows if tag == "charts/episodic_return"]
        for i in range(10, len(ends) + 1):
            if sum(value for _, value in ends[i - 10 : i]) >= 9:
                return ends[i - 1][0] - 75
        return 1000

    assert steps_to_learn(1.0) < 90 < steps_to_learn(0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("buffer_device", ["cuda", "cpu"])
def test_graphs_learn_what_eager_code_learns(buffer_device: str, train: Callable) -> None:
    """On a GPU, through all three phases; the memory is cleared under the graph's feet."""
    env_id = "probes:ProbeConstantPixels-v0"  # all actions are as good: none tips the scales
    untrained_teacher("dqn_atari", env_id)
    flags = f"--env-id {env_id} --teacher-model teacher.cleanrl_model --teacher-eval-episodes 2"
    flags += " --num-envs 2 --teacher-steps 60 --offline-steps 100 --total-timesteps 300"
    flags += " --learning-starts 20 --train-frequency 4 --buffer-size 200 --checkpoints 3"
    flags += f" --target-network-frequency 20 --buffer-device {buffer_device}"
    eager, graph = (train(NAME, flags + mode) for mode in (" --no-cudagraphs", ""))
    for ours, wanted in zip(graph.rows(), eager.rows(), strict=True):
        assert ours[:2] == wanted[:2] and ours[2] == pytest.approx(wanted[2], rel=1e-2, abs=1e-4)
