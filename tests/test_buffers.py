"""Replay memory against a naive one that keeps every transition of made-up episodes in a list."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from episodes import FRAMES, STACK, Episodes, everything, pictures
from gymnasium.spaces import Box, Discrete

from cleanrl_utils.errors import BadInput
from cleanrl_utils.replay import free_memory
from cleanrl_utils.replay.buffers import (
    Batch,
    FrameReplayBuffer,
    ReplayBuffer,
    compact,
    stack_slots,
)
from cleanrl_utils.running import checkpoint

VECTOR = Box(-np.inf, np.inf, (3,), np.float32)
CONTROL = Box(-1, 1, (2,), np.float32)


def vectors(stacks: np.ndarray) -> np.ndarray:
    return stacks[..., :3].astype(np.float32)


def fill(buffer: ReplayBuffer | FrameReplayBuffer, episodes: Episodes, turns: int) -> None:
    see = vectors if isinstance(buffer, ReplayBuffer) else pictures
    for _ in range(turns):
        obs, next_obs, *rest = episodes.step()
        buffer.add(see(obs), see(next_obs), *rest)


def expected(kept: list[SimpleNamespace], see: Callable[[np.ndarray], np.ndarray]) -> Batch:
    obs, next_obs, actions, rewards, terminated = map(np.array, zip(*(e.step for e in kept)))
    parts = (see(obs), see(next_obs), actions, rewards, terminated.astype(np.float32))
    return Batch(*map(torch.tensor, parts))


def assert_same(got: Batch, want: Batch) -> None:
    for name, a, b in zip(Batch._fields, got, want, strict=True):
        assert a.shape == b.shape and torch.equal(a, b), name


def as_on_gpu(buffer: ReplayBuffer | FrameReplayBuffer) -> None:
    """Let it work on tensors with static shapes, as on the GPU, instead of on NumPy views."""
    numbers = torch.arange(buffer.num_envs)
    buffer.arrays = SimpleNamespace(**buffer.tensors, **buffer.staged, env_numbers=numbers)
    buffer.on_cpu = False
    buffer.load_state_dict({name: x.clone() for name, x in buffer.state_dict().items()})


@pytest.mark.parametrize("on_gpu", [False, True], ids=["numpy", "tensors"])
@pytest.mark.parametrize("num_envs,capacity", [(1, 7), (3, 20), (5, 5), (4, 1000)])
def test_rows_are_the_last_real_transitions(num_envs: int, capacity: int, on_gpu: bool) -> None:
    buffer, episodes = ReplayBuffer(capacity, VECTOR, CONTROL, num_envs), Episodes(num_envs)
    if on_gpu:
        as_on_gpu(buffer)
    for _ in range(40):
        fill(buffer, episodes, 1)
        kept = episodes.remembered[-capacity:]
        assert len(buffer) == len(kept)
        got = everything(buffer)
        start = len(episodes.remembered) % capacity if len(kept) == capacity else 0
        assert_same(Batch(*(x.roll(-start, 0) for x in got)), expected(kept, vectors))


@pytest.mark.parametrize("on_gpu", [False, True], ids=["numpy", "tensors"])
@pytest.mark.parametrize("num_envs,capacity", [(1, 5), (1, 23), (3, 40), (8, 400)])
def test_stacks_are_those_of_the_environments(num_envs: int, capacity: int, on_gpu: bool) -> None:
    buffer = FrameReplayBuffer(capacity, FRAMES, CONTROL, num_envs)
    episodes = Episodes(num_envs, seed=capacity)
    if on_gpu:
        as_on_gpu(buffer)
    turns, truncated = capacity // num_envs, 0
    for _ in range(3 * turns):
        fill(buffer, episodes, 1)
        # all but the oldest, whose stack has lost a frame to the newest
        oldest = episodes.turn - turns + STACK if episodes.turn > turns - STACK else 0
        kept = [e for e in episodes.remembered if e.turn >= oldest]
        assert len(buffer) == len(kept)
        if kept:
            assert_same(everything(buffer), expected(kept, pictures))
            truncated += sum(e.truncated for e in kept)
    assert truncated  # whose next_obs so was their own last observation, not the next episode's


@pytest.mark.parametrize("kind,space", [(ReplayBuffer, VECTOR), (FrameReplayBuffer, FRAMES)])
@pytest.mark.parametrize("on_gpu", [False, True], ids=["numpy", "tensors"])
def test_samples_are_uniform(kind: type, space: Box, on_gpu: bool) -> None:
    buffer, episodes = kind(60, space, CONTROL, 3), Episodes(3)
    fill(buffer, episodes, 50)
    if on_gpu:
        as_on_gpu(buffer)
    torch.manual_seed(0)
    rewards, number = everything(buffer).rewards, 200_000
    drawn = torch.cat([buffer.sample(1000).rewards for _ in range(number // 1000)])
    counts = (drawn[:, None] == rewards).sum(0).double()
    assert counts.sum() == number  # nothing else was drawn
    mean = number / len(buffer)
    assert (counts - mean).abs().max() < 5 * mean**0.5


def test_truncated_episode_keeps_its_last_observation() -> None:
    """Two steps by hand: the episode is truncated at 2, and the next one starts at 7."""
    for buffer, see in (
        (ReplayBuffer(10, VECTOR, Discrete(5)), vectors),
        (FrameReplayBuffer(10, FRAMES, Discrete(5)), pictures),
    ):
        stacks = [[1, 1, 1, 1], [1, 1, 1, 2], [7, 7, 7, 7], [7, 7, 7, 8]]
        see_one = [see(np.array([stack])) for stack in stacks]
        buffer.add(see_one[0], see_one[1], [4], [1.0], [False], [True])  # truncated
        buffer.add(see_one[1], see_one[2], [3], [0.0], [False], [False])  # the reset step
        buffer.add(see_one[2], see_one[3], [2], [2.0], [True], [True])
        batch = everything(buffer)
        assert torch.equal(batch.next_obs[0], torch.tensor(see_one[1][0]))
        assert torch.equal(batch.obs[1], torch.tensor(see_one[2][0]))
        assert batch.actions.tolist() == [4, 2] and batch.actions.dtype == torch.int64
        assert batch.terminated.tolist() == [0.0, 1.0] and batch.rewards.tolist() == [1.0, 2.0]


def test_shapes_of_spaces() -> None:
    buffer = ReplayBuffer(10, Box(0, 1, (2, 3)), Box(0, 1, (2, 2)), num_envs=2)
    obs, actions = np.random.rand(2, 2, 3), np.random.rand(2, 2, 2)
    buffer.add(obs, obs + 1, actions, [1, 2], [False, True], [True, True])
    batch = everything(buffer)
    assert torch.equal(batch.next_obs, torch.tensor(obs + 1, dtype=torch.float32))
    assert torch.equal(batch.actions, torch.tensor(actions, dtype=torch.float32))
    frames = FrameReplayBuffer(10, Box(0, 255, (4, 84, 84), np.uint8), Discrete(6))
    picture = np.random.default_rng(0).integers(0, 256, (1, 4, 84, 84), np.uint8)
    frames.add(picture, picture, [5], [1], [True], [True])
    batch = frames.sample(32)
    assert batch.obs.shape == batch.next_obs.shape == (32, 4, 84, 84)
    assert batch.obs.dtype == torch.uint8 and batch.actions.shape == batch.rewards.shape == (32,)
    assert (batch.obs[:, -1].numpy() == picture[:, -1]).all()


@pytest.mark.parametrize("kind,space", [(ReplayBuffer, VECTOR), (FrameReplayBuffer, FRAMES)])
@pytest.mark.parametrize("turns", [1, 6, 50])
def test_saved_and_loaded_is_the_same(kind: type, space: Box, turns: int, tmp_path: Path) -> None:
    first, episodes = kind(60, space, CONTROL, 3), Episodes(3)
    fill(first, episodes, turns)
    checkpoint.save(tmp_path / "x.safetensors", {"memory": first})
    second = kind(60, space, CONTROL, 3)
    fill(second, Episodes(3, seed=1, ends=0.01), 70)  # what was there before must not shine through
    second.load_state_dict(checkpoint.load(tmp_path / "x.safetensors")[1]["memory"])
    see = vectors if kind is ReplayBuffer else pictures
    for _ in range(70):
        assert len(first) == len(second)
        torch.manual_seed(turns)
        one = first.sample(64)
        torch.manual_seed(turns)
        assert_same(second.sample(64), one)
        obs, next_obs, *rest = episodes.step()
        for buffer in (first, second):
            buffer.add(see(obs), see(next_obs), *rest)


@pytest.mark.parametrize("kind,space", [(ReplayBuffer, VECTOR), (FrameReplayBuffer, FRAMES)])
def test_saved_memory_is_no_larger_than_its_contents(kind: type, space: Box) -> None:
    buffer = kind(100_000, space, CONTROL, 2)
    fill(buffer, Episodes(2), 10)
    assert sum(x.nbytes for x in buffer.state_dict().values()) < buffer.nbytes / 1000


@pytest.mark.parametrize("kind,space", [(ReplayBuffer, VECTOR), (FrameReplayBuffer, FRAMES)])
def test_another_size_cannot_continue(
    kind: type, space: Box, capsys: pytest.CaptureFixture
) -> None:
    full = kind(60, space, CONTROL, 3)
    fill(full, Episodes(3), 50)
    with pytest.raises(BadInput):
        kind(90, space, CONTROL, 3).load_state_dict(full.state_dict())
    assert "--buffer-size" in capsys.readouterr().err


def test_too_little_memory_is_said_at_once(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput) as error:
        ReplayBuffer(10**12, VECTOR, CONTROL)
    assert error.value.code == 2
    message = capsys.readouterr().err.strip()
    assert "--buffer-size" in message and "--buffer-device" in message and "\n" not in message
    monkeypatch.setattr(free_memory, "free_memory", lambda device: 2**30)
    with pytest.raises(BadInput):
        FrameReplayBuffer(1_000_000, Box(0, 255, (4, 84, 84), np.uint8), Discrete(4))
    size = int(capsys.readouterr().err.split("at most ")[1].split(",")[0])
    assert 100_000 < size < 2**30 / 84**2  # the size it proposes does fit
    FrameReplayBuffer(size, Box(0, 255, (4, 84, 84), np.uint8), Discrete(4), device="meta")


def test_free_memory_of_machine_and_container(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, files = torch.device("cpu"), {"/proc/meminfo": 8 * 2**20}
    monkeypatch.setattr(free_memory, "_number", lambda path, name="": files.get(path))
    assert free_memory.free_memory(cpu) == 8 * 2**30
    files |= {"/sys/fs/cgroup/memory.max": 3 * 2**30, "/sys/fs/cgroup/memory.stat": 2**30}
    assert free_memory.free_memory(cpu) == 2 * 2**30
    files.clear()
    assert free_memory.free_memory(cpu) > 0  # a system without these files
    monkeypatch.undo()
    if sys.platform == "linux":
        assert 2**20 < free_memory.free_memory(cpu) < 2**50


def test_a_million_atari_steps_take_less_than_8_gib() -> None:
    space = Box(0, 255, (4, 84, 84), np.uint8)
    buffer = FrameReplayBuffer(1_000_000, space, Discrete(18), num_envs=8, device="meta")
    assert buffer.capacity == 1_000_000
    held = sum(x.nbytes for x in buffer.tensors.values())
    assert 84 * 84 * 1_000_000 < held == buffer.nbytes < 8 * 2**30


def test_too_small_a_memory(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(BadInput):
        ReplayBuffer(3, VECTOR, CONTROL, num_envs=4)
    with pytest.raises(BadInput):
        FrameReplayBuffer(8, FRAMES, CONTROL, num_envs=2)
    assert capsys.readouterr().err.count("--buffer-size") == 2
    with pytest.raises(RuntimeError):
        ReplayBuffer(3, VECTOR, CONTROL).sample(1)  # empty: never rows that nobody wrote


def test_index_arithmetic_in_jax() -> None:
    """JAX scripts keep their memory in JAX arrays; the arithmetic can be the same."""
    jnp = pytest.importorskip("jax.numpy")
    rng = np.random.default_rng(0)
    real, slot, age = rng.random(6) < 0.5, rng.integers(0, 40, 9), rng.integers(0, 4, 9)
    back = np.arange(3, -2, -1)
    for a, b in zip(compact(real, 7, 10), compact(jnp.asarray(real), 7, 10), strict=True):
        assert np.array_equal(a, b)
    ours = stack_slots(slot, age, back, 2, 40)
    assert np.array_equal(ours, stack_slots(*map(jnp.asarray, (slot, age, back)), 2, 40))
    assert np.array_equal(ours, (slot[:, None] - 2 * np.minimum(back, age[:, None])) % 40)


def test_import_without_torch() -> None:
    code = "import sys, cleanrl_utils.replay.buffers; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_deterministic_mode_is_left_as_it_was() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        buffer = ReplayBuffer(10, VECTOR, CONTROL)
        as_on_gpu(buffer)
        fill(buffer, Episodes(1), 3)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind,space", [(ReplayBuffer, VECTOR), (FrameReplayBuffer, FRAMES)])
def test_cuda_graphs_hold_insert_and_sample(kind: type, space: Box) -> None:
    see = vectors if kind is ReplayBuffer else pictures
    ours, reference = kind(60, space, CONTROL, 3, "cuda"), kind(60, space, CONTROL, 3)
    episodes = Episodes(3)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # warm-up
        fill(ours, Episodes(3), 1), ours.sample(256)
    torch.cuda.synchronize()
    ours.load_state_dict(kind(60, space, CONTROL, 3).state_dict())
    insert, draw = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(insert):
        ours.insert()
    with torch.cuda.graph(draw):
        batch = ours.sample(256)
    for _ in range(70):
        obs, next_obs, *rest = episodes.step()
        reference.add(see(obs), see(next_obs), *rest)
        ours.stage(see(obs), see(next_obs), *rest)
        insert.replay()
        draw.replay()
        known = everything(reference)
        for i in range(0, 256, 16):  # every drawn row is a transition of the reference, whole
            row = (known.rewards == batch.rewards[i].cpu()).nonzero()[0, 0]
            assert_same(Batch(*(x[i].cpu() for x in batch)), Batch(*(x[row] for x in known)))
    drawn = batch.rewards.clone()
    draw.replay()
    assert not torch.equal(drawn, batch.rewards)  # a replay draws anew
    state, want = ours.state_dict(), reference.state_dict()
    assert all(torch.equal(state[name].cpu(), want[name]) for name in want)
