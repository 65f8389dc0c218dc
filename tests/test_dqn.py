"""What only DQN and C51 have: schedules in environment steps, target updates, the projection."""

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from cleanrl import c51, c51_atari, dqn
from cleanrl_utils.errors import BadInput
from cleanrl_utils.running.evaluation import build, save_model
from cleanrl_utils.speed.inference import PolicyOnDevice, inference


def test_projection_of_a_case_computed_by_hand() -> None:
    atoms = torch.tensor([-1.0, 0.0, 1.0])
    probs = torch.tensor([[0.2, 0.3, 0.5], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    returns = torch.tensor(
        [
            [-0.75, 0.25, 1.25],  # between atoms, and beyond the last one
            [1.0, 1.0, 1.0],  # an episode that ended with reward 1
            [-7.0, 0.0, 0.0],  # beyond the first one
        ]
    )
    wanted = torch.tensor(
        [
            # -0.75: 0.75 of 0.2 to -1, the rest to 0; 0.25: 0.75 of 0.3 to 0, the rest to 1
            [0.15, 0.05 + 0.225, 0.075 + 0.5],
            [0.0, 0.0, 1.0],
            [1.0, 0.0, 0.0],
        ]
    )
    assert torch.allclose(c51.project(probs, returns, atoms), wanted, atol=1e-6)


def test_projection_keeps_mass_and_mean() -> None:
    atoms = torch.linspace(-10, 10, 51)
    probs = torch.rand(64, 51).softmax(-1)
    returns = torch.rand(64, 1) * 2 - 1 + 0.5 * atoms  # all within the atoms' range
    projected = c51.project(probs, returns, atoms)
    assert torch.allclose(projected.sum(1), torch.ones(64), atol=1e-5)
    assert torch.allclose(projected @ atoms, (probs * returns).sum(1), atol=1e-4)


@pytest.mark.parametrize("v_min, v_max, n_atoms", [(-10, 10, 51), (-100, 100, 101), (-1, 3, 7)])
@pytest.mark.parametrize("script", [c51, c51_atari])
def test_mass_on_an_atom_stays_there(script, v_min: int, v_max: int, n_atoms: int) -> None:
    """Reward 0 and gamma 1 map the atoms onto themselves, however often."""
    atoms = torch.linspace(v_min, v_max, n_atoms)
    first = torch.rand(8, n_atoms).softmax(-1)
    probs = first
    for _ in range(1000):
        probs = script.project(probs, atoms.expand(8, -1), atoms)
    assert (probs - first).abs().max() < 1e-6


def test_epsilon_falls_in_a_line_and_stays() -> None:
    epsilons = [dqn.linear_schedule(1, 0.1, 90, step) for step in (0, 30, 90, 1000)]
    assert epsilons == pytest.approx([1, 0.7, 0.1, 0.1])
    assert dqn.linear_schedule(1, 0.1, 0, 0) == 0.1  # no exploration phase at all


def test_target_network_moves_by_tau() -> None:
    network, target = nn.Linear(3, 2), nn.Linear(3, 2)
    ours, theirs = network.weight.detach().clone(), target.weight.detach().clone()
    dqn.update_target(network, target, 0.25)
    assert torch.allclose(target.weight, 0.25 * ours + 0.75 * theirs)
    dqn.update_target(network, target, 1.0)
    assert torch.equal(target.weight, ours) and torch.equal(target.bias, network.bias)


def q_network(module, num_actions: int = 3):
    spaces = SimpleNamespace(
        single_observation_space=gym.spaces.Box(-1, 1, (4,), np.float32),
        single_action_space=gym.spaces.Discrete(num_actions),
    )
    return build(module.QNetwork, spaces, module.Args())


@pytest.mark.parametrize("module", [dqn, c51], ids=["dqn", "c51"])
def test_targets_bootstrap_unless_terminated(module) -> None:
    """The loss of the same transition, terminated or not, against the formula written out."""
    torch.manual_seed(0)
    network = q_network(module)
    target = q_network(module)
    obs = torch.rand(1, 4).repeat(2, 1)
    next_obs = torch.rand(1, 4).repeat(2, 1)
    batch = (
        obs,
        next_obs,
        torch.tensor([1, 1]),
        torch.tensor([2.0, 2.0]),
        torch.tensor([0.0, 1.0]),
    )
    settings = {}
    if module is c51:  # it is all but sure that some values cannot be: they count as 1e-5
        network[-1].bias.data[::3] -= 20
        settings = {"min_probability": 1e-5}
    args = module.Args(gamma=0.9, **settings)
    losses = []
    for i in range(2):
        transition = [x[i : i + 1] for x in batch]
        no_change = torch.optim.SGD(network.parameters(), lr=0.0)
        metrics = module.update(network, target, no_change, args, *transition)
        losses.append(metrics["losses/td_loss" if module is dqn else "losses/loss"].item())
    written_out = td_losses if module is dqn else c51_losses
    with torch.no_grad():
        wanted = written_out(network, target, obs[:1], next_obs[:1])
    assert losses == pytest.approx([float(x) for x in wanted], rel=1e-4)


def td_losses(network: Any, target: Any, obs: torch.Tensor, next_obs: torch.Tensor) -> list[Any]:
    """DQN's losses of action 1 with a reward of 2, not terminated and terminated."""
    q = network(obs)[0, 1]
    best = target(next_obs).max()
    return [(q - (2 + 0.9 * best)).square(), (q - 2).square()]


def c51_losses(network: Any, target: Any, obs: torch.Tensor, next_obs: torch.Tensor) -> list[Any]:
    """C51's losses of action 1 with a reward of 2, not terminated and terminated."""
    logprobs = network.get_logits(obs)[0, 1].log_softmax(-1).clamp(np.log(1e-5))
    probs = target.get_logits(next_obs)[0].softmax(-1)
    best = probs[(probs @ network.atoms).argmax()]
    losses = []
    for returns in (2 + 0.9 * network.atoms, 2 + 0 * network.atoms):
        places = np.clip((returns.numpy() + 100) / 2, 0, 100)  # between the atoms
        projected = np.zeros(101)
        for place, probability in zip(places, best, strict=True):
            projected += np.maximum(0, 1 - np.abs(place - np.arange(101))) * float(probability)
        losses.append(-(torch.as_tensor(projected) * logprobs).sum())
    return losses


@pytest.mark.parametrize(
    "certainty, floor, listens", [(5.0, 1e-5, True), (20.0, 1e-5, False), (20.0, 0.0, True)]
)
def test_c51_with_a_floor_does_not_listen_where_it_is_sure(certainty, floor, listens) -> None:
    network, target = q_network(c51), q_network(c51)
    network[-1].bias.data[60] = certainty  # of the first action's return: 20
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    batch = torch.rand(8, 4), torch.rand(8, 4), torch.zeros(8, dtype=torch.long)
    numbers = torch.zeros(8), torch.ones(8)  # rewards; all are terminated: the return is 0
    args = c51.Args(min_probability=floor)
    c51.update(network, target, optimizer, args, *batch, *numbers)
    assert (network[-1].bias.grad.abs().max() > 1e-6) == listens


def test_compiled_c51_does_not_compute_the_floor_in_every_update() -> None:
    """NumPy's log would be an operation on a CPU tensor in the compiled program."""
    floors = []

    def collect(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        floors.extend(node.kwargs.get("min") for node in graph.graph.nodes)
        return graph.forward

    network, target = q_network(c51), q_network(c51)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    batch = torch.rand(8, 4), torch.rand(8, 4), torch.zeros(8, dtype=torch.long)
    update = torch.compile(c51.update, backend=collect)
    args = c51.Args(min_probability=1e-5)
    update(network, target, optimizer, args, *batch, torch.zeros(8), torch.ones(8))
    assert pytest.approx(np.log(1e-5)) in [x for x in floors if isinstance(x, float)]


@pytest.mark.parametrize("num_envs", [1, 4, 7])
def test_updates_do_not_depend_on_the_number_of_environments(
    num_envs: int, train, monkeypatch
) -> None:
    """280 steps: gradient steps at 60, 65, ..., 280; target updates at 60, 80, ..., 280."""
    updates, moves = [], []
    step, lerp = torch.optim.Adam.step, torch.Tensor.lerp_
    monkeypatch.setattr(torch.optim.Adam, "step", lambda *a: (updates.append(1), step(*a)))
    monkeypatch.setattr(torch.Tensor, "lerp_", lambda *a: (moves.append(1), lerp(*a)))
    flags = f"--total-timesteps 280 --num-envs {num_envs} --learning-starts 56 --train-frequency 5"
    done = train("dqn", f"{flags} --target-network-frequency 20 --batch-size 8 --checkpoints 1")
    assert len(updates) == len(range(60, 281, 5))
    assert len(moves) == len(range(60, 281, 20)) * len(
        list(done.variables["q_network"].parameters())
    )
    rows = done.rows()
    assert [row[0] for row in rows if row[1] == "losses/td_loss"] == [100, 200]
    # each environment's every step is remembered, but not the one after each end, which only reset
    ends = [row[0] for row in rows if row[1] == "charts/episodic_return"]
    assert len(done.variables["memory"]) == 280 - sum(end < 280 for end in ends)


def test_too_early_a_start_is_refused() -> None:
    with pytest.raises(BadInput) as refused:
        dqn.Args(num_envs=8, learning_starts=7)
    assert "--learning-starts" in refused.value.message


@pytest.mark.parametrize("module", [dqn, c51])
def test_numpy_computes_what_torch_does(module: ModuleType) -> None:
    network = q_network(module)
    forward = inference(network, torch.device("cpu"), module.Args(num_envs=8))
    assert not isinstance(forward, PolicyOnDevice)
    with torch.no_grad():
        for weight in network.parameters():  # as an optimiser does: in place, afterwards
            weight.add_(0.1)
        obs = np.random.default_rng(0).normal(size=(8, 4))
        assert np.allclose(forward(obs), network(torch.tensor(obs).float()), rtol=1e-4, atol=2e-3)


class Noisy(nn.Module):
    """Draws random numbers in its forward pass, as layers for exploration do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.layer(obs) + torch.randn(2)


def test_random_numbers_are_new_in_every_forward_pass() -> None:
    forward = inference(Noisy(), torch.device("cpu"), dqn.Args())
    obs = np.zeros((1, 4), np.float32)
    assert not np.array_equal(forward(obs).copy(), forward(obs))


def test_torch_computes_what_numpy_does_not() -> None:
    cpu = torch.device("cpu")
    pictures = nn.Sequential(nn.Conv2d(4, 8, 3))
    assert isinstance(inference(pictures, cpu, dqn.Args()), PolicyOnDevice)
    assert isinstance(inference(q_network(dqn), cpu, dqn.Args(num_envs=9)), PolicyOnDevice)


@pytest.mark.parametrize("name", ["dqn", "c51"])
def test_weights_that_the_original_saved_are_played(name: str, tmp_path: Path) -> None:
    """Its networks hold the same layers under the name `network`."""
    from cleanrl_utils.evals import c51_eval, dqn_eval

    module, evaluate = {"dqn": (dqn, dqn_eval), "c51": (c51, c51_eval)}[name]
    envs = gym.vector.SyncVectorEnv([module.make_env("CartPole-v1", 1, 0, False, "")])
    network = build(module.QNetwork, envs, module.Args())
    ours = network.state_dict()
    theirs = {key if key == "atoms" else f"network.{key}": x for key, x in ours.items()}
    settings = {"n_atoms": 101, "v_min": -100, "v_max": 100}
    saved = theirs if name == "dqn" else {"model_weights": theirs, "args": settings}
    torch.save(saved, tmp_path / "q_network.pth")

    def play(path: Path) -> list[float]:
        return evaluate.evaluate(
            path, module.make_env, "CartPole-v1", 3, "x", module.QNetwork, capture_video=False
        )

    save_model(tmp_path / "ours", network, module.Args(), name)
    assert play(tmp_path / "q_network.pth") == play(tmp_path / "ours")
    short = {key: x for key, x in theirs.items() if key != "network.0.bias"}
    narrow = theirs | {"network.0.weight": torch.zeros(120, 3)}
    odd = {"0.bias": short, "0.weight": narrow, "more than weights": (theirs, theirs)}
    for says, weights in odd.items():
        bare = name == "dqn" or isinstance(weights, tuple)
        odd_one = weights if bare else {"model_weights": weights, "args": settings}
        torch.save(odd_one, tmp_path / "odd")
        with pytest.raises(BadInput) as stop:
            play(tmp_path / "odd")
        assert says in stop.value.message and "\n" not in stop.value.message
    if name == "c51":
        torch.save(theirs, tmp_path / "odd")
        with pytest.raises(BadInput):
            play(tmp_path / "odd")
