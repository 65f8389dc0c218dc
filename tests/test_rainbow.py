"""What only Rainbow has: noisy layers, dueling streams, double and weighted n-step targets."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from batches import NUM_ACTIONS, PIXELS
from torch import Tensor, nn

from cleanrl import rainbow_atari as rainbow
from cleanrl_utils.errors import BadInput
from cleanrl_utils.running.losses import Means
from cleanrl_utils.speed.graphs import accelerate, capture


def q_network(**settings: Any) -> tuple[rainbow.QNetwork, rainbow.Args]:
    args = rainbow.Args(**settings)
    return rainbow.QNetwork(PIXELS, args), args


def pictures(size: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(
        np.random.default_rng(seed).integers(0, 256, (size, 4, 84, 84), np.uint8)
    )


def test_noise_is_factorised_and_drawn_per_batch() -> None:
    layer = rainbow.NoisyLinear(3, 5, sigma=0.6)
    assert torch.allclose(layer.sigma_weight, torch.full((5, 3), 0.6 / 3**0.5))
    assert torch.allclose(layer.sigma_bias, torch.full((5,), 0.6 / 3**0.5))
    assert layer.weight.abs().max() <= 3**-0.5
    with torch.no_grad():  # every number its own
        layer.sigma_weight.copy_(torch.rand(5, 3))
        layer.sigma_bias.copy_(torch.rand(5))
    x = torch.rand(7, 3)
    torch.manual_seed(3)
    found = layer(x)
    torch.manual_seed(3)
    noise = torch.randn(8)
    noise = noise.sign() * noise.abs() ** 0.5
    weight = layer.weight + layer.sigma_weight * torch.outer(noise[3:], noise[:3])
    bias = layer.bias + layer.sigma_bias * noise[3:]
    assert torch.allclose(found, x @ weight.T + bias, atol=1e-6)
    assert not torch.allclose(layer(x), found)  # the next batch has another noise
    assert torch.equal(layer(x, noisy=False), nn.functional.linear(x, layer.weight, layer.bias))
    found.sum().backward()
    assert all(p.grad.abs().min() > 0 for p in layer.parameters())  # type: ignore[union-attr]


def test_dueling_streams() -> None:
    """The advantages of the actions have mean 0, atom by atom; the rest is the value stream."""
    network, _ = q_network()
    obs = pictures(2)
    with torch.no_grad():
        logits = network.get_logits(obs, noisy=False)
        hidden = network.value_hidden(network.features(obs / 255), noisy=False).relu()
        value = network.value(hidden, noisy=False)
        assert logits.shape == (2, NUM_ACTIONS, 51)
        assert torch.allclose(logits.mean(1), value, atol=1e-5)
        assert (logits - value[:, None]).abs().max() > 1e-3
        q_values = network(obs, noisy=False)
        assert torch.allclose(q_values, (logits.softmax(-1) * network.atoms).sum(-1), atol=1e-5)


def test_evaluation_has_no_noise_and_draws_no_random_numbers() -> None:
    network, _ = q_network(noisy_sigma=10.0)
    obs = pictures(16)
    with torch.no_grad():
        before = torch.get_rng_state()
        actions = network.act(obs)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(actions, network(obs, noisy=False).argmax(-1))
        sampled = [network.act(obs, greedy=False) for _ in range(4)]
    assert any(not torch.equal(actions, other) for other in sampled)


def test_loss_of_a_batch_written_out() -> None:
    torch.manual_seed(0)
    settings = {"noisy_sigma": 0.0, "n_atoms": 11, "v_min": -5.0, "v_max": 5.0}
    network, args = q_network(**settings)
    target, _ = q_network(**settings)
    with torch.no_grad():  # certain enough for the best actions to differ
        for layer in (network.advantage, target.advantage):
            layer.weight.mul_(30)
    obs, next_obs = pictures(8), pictures(8, seed=1)
    actions = torch.arange(8) % NUM_ACTIONS
    rewards = torch.linspace(-4, 7, 8)
    discounts = torch.tensor([0.9**3, 0.9**2, 0.9, 0, 0.9**3, 0, 0.5, 1])
    weights = torch.linspace(0.1, 1, 8)
    still = torch.optim.SGD(network.parameters(), lr=0.0)
    batch = (obs, next_obs, actions, rewards, discounts, weights)
    losses, priorities = rainbow.update(network, target, still, args, *batch)

    atoms = np.linspace(-5, 5, 11)
    with torch.no_grad():
        logprobs = network.get_logits(obs, noisy=False).log_softmax(-1).double().numpy()
        online = network(next_obs, noisy=False).argmax(1)
        probs = target.get_logits(next_obs, noisy=False).softmax(-1).double().numpy()
        assert (online != target(next_obs, noisy=False).argmax(1)).any()  # double counts
    wanted = []
    for i in range(8):
        spread = np.zeros(11)
        for atom, p in zip(atoms, probs[i, online[i]], strict=True):
            place = np.clip(rewards[i].item() + discounts[i].item() * atom, -5, 5) + 5
            spread += p * np.maximum(0, 1 - np.abs(place - np.arange(11)))
        wanted.append(-(spread * logprobs[i, actions[i]]).sum())
    assert priorities.tolist() == pytest.approx(wanted, rel=1e-4)
    loss = np.mean(np.array(wanted) * weights.numpy())
    assert losses["losses/loss"].item() == pytest.approx(loss, rel=1e-4)
    chosen = logprobs[np.arange(8), actions.numpy()]
    assert losses["losses/q_values"].item() == pytest.approx(
        np.mean(np.exp(chosen) @ atoms), rel=1e-3
    )
    assert not priorities.requires_grad


def test_weights_scale_gradients_not_priorities() -> None:
    network, args = q_network(noisy_sigma=0.0)
    target, _ = q_network(noisy_sigma=0.0)
    grads, found = [], []
    for weight in (1.0, 0.25):
        still = torch.optim.SGD(network.parameters(), lr=0.0)
        numbers = torch.ones(2), torch.full((2,), 0.9), torch.full((2,), weight)
        batch = pictures(2), pictures(2, seed=1), torch.tensor([0, 1]), *numbers
        found.append(rainbow.update(network, target, still, args, *batch)[1])
        grads.append(network.value.bias.grad.clone())  # type: ignore[union-attr]
    assert torch.equal(*found) and torch.allclose(grads[0], 4 * grads[1], atol=1e-7)


def test_settings_that_cannot_be(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(BadInput) as refused:
        rainbow.Args(num_envs=8, learning_starts=23)
    assert "--n-step * --num-envs, 24" in refused.value.message
    rainbow.Args(num_envs=8, learning_starts=24)


def test_each_pass_of_an_update_has_its_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes over next_obs, and that over obs: the target network is noisy, too."""
    network, args = q_network(n_atoms=3)
    target, _ = q_network(n_atoms=3)
    drawn = []
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *a, **k: drawn.append(randn(*a, **k)) or drawn[-1])
    before = network.value.sigma_weight.clone()
    numbers = torch.ones(2), torch.full((2,), 0.9), torch.ones(2)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    batch = pictures(2), pictures(2, seed=1), torch.tensor([0, 1]), *numbers
    rainbow.update(network, target, optimizer, args, *batch)
    assert len(drawn) == 3 * 4  # four layers each
    assert len({noise[0].item() for noise in drawn}) == len(drawn)
    assert not torch.equal(network.value.sigma_weight, before)  # the noise is learned


def test_noise_alone_explores(train: Callable) -> None:
    """The observation never changes: without noise, the same action would be chosen each time."""
    done = train(
        "rainbow_atari",
        "--env-id probes:ProbeTruncationPixels-v0 --start-e 0 --end-e 0 --total-timesteps 40"
        " --learning-starts 40 --buffer-size 90 --torch-threads 1 --checkpoints 0",
    )
    actions = done.variables["memory"].tensors["rows"][:40, 0]
    assert 4 < actions.sum() < 36


@pytest.mark.parametrize("num_envs", [1, 3])
def test_the_settings_of_a_run(
    num_envs: int, train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    betas = []
    copied = []
    sample = rainbow.PrioritizedFrameReplayBuffer.sample
    lerp = Tensor.lerp_

    def sample_and_note(memory: Any, batch_size: int) -> tuple:
        betas.append(memory.beta.item())
        return sample(memory, batch_size)

    monkeypatch.setattr(rainbow.PrioritizedFrameReplayBuffer, "sample", sample_and_note)
    monkeypatch.setattr(Tensor, "lerp_", lambda *a: (copied.append(a[2]), lerp(*a)))
    flags = f"--total-timesteps 90 --num-envs {num_envs} --learning-starts 9 --train-frequency 10"
    done = train(
        "rainbow_atari",
        f"--env-id probes:ProbeTruncationPixels-v0 {flags} --batch-size 4 --buffer-size 90"
        " --torch-threads 1 --prioritized-replay-beta 0.1 --checkpoints 0 --n-step 2 --gamma 0.5"
        " --prioritized-replay-alpha 0.7 --prioritized-replay-eps 0.01 --tau 0.25"
        " --target-network-frequency 20",
    )
    # Steps are summed over environments.
    assert betas == pytest.approx([0.1 + 0.9 * step / 90 for step in range(10, 91, 10)])
    num_parameters = len(list(done.variables["q_network"].parameters()))
    assert copied == [0.25] * 4 * num_parameters  # after 20, 40, 60 and 80 steps
    assert done.variables["optimizer"].param_groups[0]["eps"] == 1.5e-4
    memory = done.variables["memory"]
    assert (memory.n_step, memory.alpha, memory.eps) == (2, 0.7, 0.01)
    assert memory.powers.tolist() == [1, 0.5, 0.25]
    priorities = memory.tensors["priorities_0"]
    assert len(priorities[priorities > 0].unique()) > 5  # new ones, and those of their losses


def learn_on_gpu(cudagraphs: bool, updates: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    torch.cuda.manual_seed(0)
    device = torch.device("cuda")
    network, args = q_network(buffer_size=500, batch_size=16, cudagraphs=cudagraphs)
    target, _ = q_network()
    network.to(device), target.to(device)
    args.num_envs = 2
    optimizer = torch.optim.Adam(network.parameters(), 1e-3, fused=True, capturable=True)
    replay = partial(rainbow.PrioritizedFrameReplayBuffer, n_step=3)
    memory = rainbow.make_memory(replay, PIXELS, args, device)
    losses = Means()
    train = accelerate(partial(rainbow.update, network, target, optimizer, args), device, args)

    @partial(capture, device=memory.device, args=args)
    def learn() -> None:
        batch, slots = memory.sample(args.batch_size)
        metrics, priorities = train(*batch.to(device))
        memory.update_priorities(slots, priorities)
        losses.add(metrics)

    rng = np.random.default_rng(0)
    for i in range(updates + 10):
        obs, next_obs = rng.integers(256, size=(2, 2, 4, 84, 84), dtype=np.uint8)
        ends = rng.random(2) < 0.1
        memory.add(obs, next_obs, rng.integers(3, size=2), rng.normal(size=2), ends, [True, True])
        if i >= 10:
            memory.beta.fill_(i / (updates + 10))
            learn()
    state = network.state_dict() | {"priorities": memory.tensors["priorities_0"]}
    return {key: value.double().cpu() for key, value in state.items()}


@pytest.mark.gpu
def test_a_graph_learns_what_eager_code_learns() -> None:
    start, eager, graph = (learn_on_gpu(*x) for x in ((False, 0), (False, 40), (True, 40)))
    for key, value in eager.items():
        difference = (graph[key] - value).norm() / value.norm().clamp(min=1e-8)
        assert difference < 1e-2, key
    assert max((eager[key] - start[key]).abs().max() for key in eager) > 0.01
