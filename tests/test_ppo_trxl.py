"""What the transformer's memory must do beyond what every script must."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from probes import GAMMA
from torch import Tensor
from torch.distributions import Categorical
from torch.nn import functional as F

from cleanrl_utils.environments.making import NO_DEPS
from cleanrl_utils.running.evaluation import import_script

script = import_script("ppo_trxl")
VECTORS = gym.spaces.Box(-1, 1, (3,), np.float32)
PICTURES = gym.spaces.Box(0, 255, (84, 84, 3), np.uint8)
SMALL = "--trxl-dim 16 --trxl-num-heads 2 --torch-threads 1"


def agent_of(space: gym.Space, actions: gym.Space, **settings: Any) -> Any:
    torch.manual_seed(0)
    envs = type("Envs", (), {"single_observation_space": space, "single_action_space": actions})
    sizes = dict(trxl_dim=16, trxl_num_heads=2, trxl_num_layers=2, trxl_memory_length=4)
    return script.Agent(envs, script.Args(**(sizes | settings)))


def test_a_step_sees_so_many_rows_before_it_of_its_own_episode() -> None:
    positions = torch.tensor(
        [
            [5, 6, 7, 0, 1, 2, 3],  # an episode goes on, ends, and another one begins
            [9, 9, 0, 1, 2, 3, 0],  # one begins with the rollout and ends within it
        ]
    )
    steps = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
    seen = [
        [[0, 1], [], [3], [3, 4], [4, 5]],
        [[], [3, 4], [2, 3], [2], []],
    ]
    found = script.window(steps, positions, length=2)
    assert [[np.flatnonzero(x).tolist() for x in env] for env in found] == seen


@pytest.mark.parametrize("marks", ["absolute", "learned", ""])
@pytest.mark.parametrize("space", [VECTORS, PICTURES], ids=["vectors", "pictures"])
def test_all_at_once_is_what_the_agent_saw_step_by_step(space: Any, marks: str) -> None:
    """Two rollouts of 7 steps, with a memory of 4: as the script collects, learns and evaluates."""
    actions = gym.spaces.MultiDiscrete([3, 2])
    agent = agent_of(space, actions, trxl_positional_encoding=marks)
    num_steps, num_envs, length = 7, 5, 4
    first = torch.rand(2 * num_steps, num_envs) < 0.2
    first[0] = True
    obs = np.stack([[space.sample() for _ in range(num_envs)] for _ in first])
    obs, state = torch.as_tensor(obs), agent.initial_state(num_envs)
    memory = torch.zeros(2, num_envs, length + num_steps, 16)
    positions = torch.zeros(num_envs, length + num_steps, dtype=torch.long)
    position = torch.zeros(num_envs, dtype=torch.long)
    with torch.no_grad():
        for begin in (0, num_steps):
            memory[:, :, :length] = memory[:, :, -length:].clone()
            positions[:, :length] = positions[:, -length:].clone()
            hidden = torch.zeros(num_envs, num_steps, 16)
            for step in range(num_steps):
                now, row = first[begin + step], length + step
                position = torch.where(now, 0, position + 1)
                positions[:, row] = position
                past = memory[:, :, step:row], position
                chosen, hidden[:, step], memory[:, :, row] = agent.step(
                    obs[begin + step], *past, greedy=True
                )
                evaluated, state = agent.act(obs[begin + step], state, now)
                assert torch.equal(chosen, evaluated) and chosen.shape == (num_envs, 2)
                assert torch.equal(state[0][:, :, -1], memory[:, :, row])
            steps = torch.rand(num_envs, num_steps).argsort(1)  # in any order
            mine = obs[begin : begin + num_steps].transpose(0, 1)
            visible = script.window(steps, positions, length)
            every = torch.arange(num_envs).unsqueeze(1)
            again, inputs = agent.attend(mine[every, steps], memory, positions, visible)
            torch.testing.assert_close(again, hidden[every, steps], atol=1e-5, rtol=1e-4)
            remembered = memory[:, every, length + steps]
            torch.testing.assert_close(inputs, remembered, atol=1e-5, rtol=1e-4)


def test_attention_is_scaled_by_the_size_of_a_head() -> None:
    torch.manual_seed(0)
    layer = script.Layer(16, num_heads=4)
    x, memory = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    visible = torch.rand(2, 3, 5) < 0.7
    visible[0, 0] = False  # sees nothing

    def apart(z: Tensor) -> Tensor:
        return torch.stack(z.split(4, -1), 1)

    kept = layer.norm_memory(memory)
    queries, keys = apart(layer.query(layer.norm_query(x))), apart(layer.key(kept))
    values, mask = apart(layer.value(kept)), visible.unsqueeze(1)
    heard = F.scaled_dot_product_attention(queries, keys, values, mask, scale=1 / 4**0.5)
    heard = torch.cat(heard.unbind(1), -1)
    heard[0, 0] = 0
    x1 = x + layer.out(heard)
    wanted = x1 + layer.linear(layer.norm(x1)).relu()
    torch.testing.assert_close(layer(x, memory, visible), wanted)


def test_biases_begin_at_zero_and_places_differ() -> None:
    agent = agent_of(PICTURES, gym.spaces.Discrete(4), reconstruction_coef=1.0)
    biases = {name: x for name, x in agent.named_parameters() if name.endswith("bias")}
    assert len(biases) > 20 and not any(x.any() for x in biases.values())
    marks = agent.encode(torch.arange(300))
    assert marks.shape == (300, 16)
    assert torch.cdist(marks, marks).fill_diagonal_(1).min() > 0.05
    assert torch.equal(marks[0], torch.tensor([0.0] * 8 + [1.0] * 8))  # sines, then cosines


def test_an_action_of_several_parts() -> None:
    agent = agent_of(VECTORS, gym.spaces.MultiDiscrete([3, 2]))
    hidden, actions = torch.randn(6, 4, 16), torch.randint(2, (6, 4, 2))
    logits = agent.actor(hidden)
    parts = Categorical(logits=logits[..., :3]), Categorical(logits=logits[..., 3:])
    logprob, entropy, _ = agent.get_logprob_entropy_value(hidden, actions)
    each = zip(parts, actions.unbind(-1), strict=True)
    torch.testing.assert_close(logprob, sum(part.log_prob(x) for part, x in each))
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts))


PROBE = f"--env-id probes:ProbeMemory-v0 --gamma {GAMMA} {SMALL}"


def test_the_first_gradient_finds_the_policy_that_acted(train) -> None:
    """Nothing has changed yet: if the ratio is not 1 everywhere, learning saw another past."""
    flags = f"{PROBE} --num-envs 3 --num-steps 10 --total-timesteps 300 --trxl-memory-length 4"
    flags += " --num-minibatches 1 --update-epochs 1 --no-clip-vloss --init-lr 0.01 --checkpoints 3"
    flags += " --anneal-steps 150 --final-lr 0.005 --init-ent-coef 0.1 --final-ent-coef 0"
    done = train("ppo_trxl", flags)
    rows = done.rows()
    assert [value for _, tag, value in rows if tag == "losses/clipfrac"] == [0.0] * 10
    assert all(abs(value) < 1e-6 for _, tag, value in rows if tag.endswith("approx_kl"))
    rates = [value for _, tag, value in rows if tag == "charts/learning_rate"]
    np.testing.assert_allclose(rates, [0.01, 0.009, 0.008, 0.007, 0.006, *[0.005] * 5])
    coefs = [value for _, tag, value in rows if tag == "charts/entropy_coefficient"]
    np.testing.assert_allclose(coefs, [0.1, 0.08, 0.06, 0.04, 0.02, *[0.0] * 5], atol=1e-9)
    # all of the squared error, not half of it, over real transitions
    real, advantages = done.variables["real"], done.variables["advantages"]
    wanted = advantages[real > 0].square().mean()
    torch.testing.assert_close(done.variables["losses"][-1]["losses/value_loss"], wanted)
    assert not real.all()


def test_it_remembers_what_is_in_reach(train) -> None:
    """Of twenty episodes chance gets half right. The cue is four steps back where it counts, and
    with rollouts of four steps always in another one."""
    flags = f"{PROBE} --num-envs 64 --num-steps 4 --num-minibatches 2 --init-lr 0.005"
    flags += " --clip-coef 0.2 --trxl-num-layers 1 --save-model --eval-episodes 20 --checkpoints 2"
    for length, total, low, high in ((4, 12800, 1, 1), (3, 2560, 0.1, 0.9)):
        done = train("ppo_trxl", f"{flags} --trxl-memory-length {length} --total-timesteps {total}")
        returns = [value for _, tag, value in done.rows() if tag == "eval/episodic_return"]
        assert low <= np.mean(returns) <= high
        # an episode takes five steps, the sixth only resets
        positions, real = (done.variables[name].numpy() for name in ("positions", "real"))
        assert (np.diff(positions) % 6 == 1).all() and positions.max() == 5
        assert np.array_equal(real.T == 0, positions[:, length:] == 5)
    lengths = [value for _, tag, value in done.rows() if tag == "episode/l_mean"]
    assert set(lengths) == {5.0} and len(lengths) < total // 256  # in some rollouts none ended
    assert 0 < done.variables["metrics"].get("episode/t_mean", 1) < 60


QUICK = "--total-timesteps 160 --num-envs 2 --num-steps 40 --num-minibatches 2 --update-epochs 1"


def test_memory_gym_with_two_actions_at_once_and_pictures_drawn_again(train) -> None:
    pytest.importorskip("memory_gym")
    flags = f"--env-id SearingSpotlights-v0 {QUICK} {SMALL} --reconstruction-coef 0.1"
    rows = train("ppo_trxl", f"{flags} --async-envs --init-lr 0.001").rows()
    losses = [value for _, tag, value in rows if tag == "losses/reconstruction_loss"]
    assert losses[0] > losses[-1] > 0


def test_without_memory_gym_it_says_what_to_install(train, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "memory_gym", None)
    with pytest.raises(SystemExit) as stopped:
        train("ppo_trxl", f"{QUICK} {SMALL}")
    assert stopped.value.code == 2 and NO_DEPS in capsys.readouterr().err


def test_the_line_that_installs_memory_gym_is_the_same_everywhere() -> None:
    """The extra and its file cannot: no resolver puts a Gymnasium of 2023 beside ours."""
    installs = (ROOT / "requirements" / "no-deps.txt").read_text().splitlines()
    assert any(line.startswith("memory-gym==") for line in installs)
    named = ["requirements/requirements-memory_gym.txt", "pyproject.toml"]
    named += ["docs/get-started/installation.md", "docs/rl-algorithms/ppo-trxl.md"]
    for name in named:
        assert NO_DEPS in (ROOT / name).read_text(), name
    makefile = (ROOT / "Makefile").read_text()
    rule = makefile[makefile.index("$(STAMPS)/memory_gym:") :].split("\n\n")[0]
    assert NO_DEPS.removeprefix("pip install ") in rule


SLEEPER = """
import sys, time
from cleanrl_utils.environments.making import make
make(*sys.argv[1:]).reset(seed=1)  # pygame has started
print("here", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("words", ["MortarMayhem-Grid-v0", "CartPole-v1 videos"])
def test_a_process_that_draws_with_pygame_can_be_ended(words: str, tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    if words.startswith("Mortar"):
        pytest.importorskip("memory_gym")
    command = [sys.executable, "-c", SLEEPER, *words.split()]
    quiet = dict(cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with subprocess.Popen(command, text=True, **quiet) as child:
        try:
            assert child.stdout.readline() == "here\n"
            child.terminate()
            assert child.wait(20) == -signal.SIGTERM
        finally:
            child.kill()


class FloatPictures(gym.Env):
    action_space = gym.spaces.Discrete(2)

    def __init__(self, size: int = 84):
        self.observation_space = gym.spaces.Box(0, 1, (size, size, 3), np.float32)


gym.register("FloatPictures-v0", FloatPictures)
gym.register("SmallFloatPictures-v0", FloatPictures, kwargs={"size": 20})


BAD = {
    "--env-id FloatPictures-v0": "--env-id FloatPictures-v0: images must be of bytes",
    "--env-id SmallFloatPictures-v0": "--env-id SmallFloatPictures-v0: images must be of bytes",
    "--trxl-num-heads 5": "--trxl-num-heads",
    "--trxl-memory-length 0": "--trxl-memory-length",
    "--num-minibatches 3": "--num-minibatches",
    "--anneal-steps 0": "--anneal-steps",
    "--trxl-positional-encoding relative": "--trxl-positional-encoding",
    "--env-id CartPole-v1 --reconstruction-coef 1": "--reconstruction-coef",
    "--env-id probes:ProbeBothContinuous-v0": "--env-id",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_line(flags: str, train, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        train("ppo_trxl", f"{SMALL} --env-id CartPole-v1 {flags}")
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and len(lines) == 1 and BAD[flags] in lines[0], lines
