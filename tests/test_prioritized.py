"""Prioritised n-step replay against a naive one that keeps every transition in a list."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from episodes import FRAMES, STACK, Episodes, pictures
from gymnasium.spaces import Box, Discrete

from cleanrl_utils.errors import BadInput
from cleanrl_utils.replay import prioritized
from cleanrl_utils.replay.prioritized import (
    PrioritizedBatch,
    PrioritizedFrameReplayBuffer,
    find_leaves,
    set_leaves,
    tree_shapes,
)
from cleanrl_utils.running import checkpoint

CONTROL = Box(-1, 1, (2,), np.float32)
GAMMA = 0.9
on_both = pytest.mark.parametrize("on_gpu", [False, True], ids=["numpy", "tensors"])


def make(capacity: int, num_envs: int, on_gpu: bool = False, **settings: Any) -> Any:
    settings = {"gamma": GAMMA, **settings}
    memory = PrioritizedFrameReplayBuffer(capacity, FRAMES, CONTROL, num_envs, **settings)
    if on_gpu:  # work on tensors with static shapes instead of on NumPy views
        numbers = torch.arange(num_envs)
        memory.arrays = SimpleNamespace(**memory.tensors, **memory.staged, env_numbers=numbers)
        memory.on_cpu = False
    return memory


def fill(memory: Any, episodes: Episodes, turns: int) -> None:
    for _ in range(turns):
        obs, next_obs, *rest = episodes.step()
        memory.add(pictures(obs), pictures(next_obs), *rest)


def windows(episodes: Episodes, memory: Any) -> tuple[list[SimpleNamespace], list[list]]:
    """The transitions that can be drawn, and the steps of the window of each, by brute force."""
    known = {(e.turn, e.env): e for e in episodes.remembered}
    newest = episodes.turn - memory.n_step
    oldest = 0
    if episodes.turn > memory.num_vector_steps - STACK:
        oldest = episodes.turn - memory.num_vector_steps + STACK
    first = [e for e in episodes.remembered if oldest <= e.turn <= newest]
    steps = []
    for e in first:
        window = [e.step]
        for turn in range(e.turn + 1, e.turn + memory.n_step):
            if (turn, e.env) not in known:  # the reset step
                break
            window.append(known[turn, e.env].step)
        steps.append(window)
    return first, steps


def expected(steps: list[list]) -> list[torch.Tensor]:
    rows = []
    for window in steps:
        rewards = sum(GAMMA**k * step[3] for k, step in enumerate(window))
        discount = GAMMA ** len(window) * (1 - window[-1][4])
        rows.append((window[0][0], window[-1][1], window[0][2], rewards, discount))
    obs, next_obs, actions, *numbers = map(np.array, zip(*rows, strict=True))
    parts = (pictures(obs), pictures(next_obs), actions, *(x.astype(np.float32) for x in numbers))
    return list(map(torch.tensor, parts))


def slots_of(memory: Any, kept: list[SimpleNamespace]) -> torch.Tensor:
    slots = [e.turn * memory.num_envs + e.env for e in kept]
    return torch.tensor(slots, dtype=torch.int64) % memory.capacity


def leaves(memory: Any) -> torch.Tensor:
    return memory.tensors["priorities_0"].reshape(-1)[: memory.capacity]


@on_both
@pytest.mark.parametrize("n_step", [1, 3, 5])
@pytest.mark.parametrize("num_envs,capacity", [(1, 9), (1, 23), (3, 40), (8, 400)])
def test_windows_are_those_of_the_episodes(
    num_envs: int, capacity: int, n_step: int, on_gpu: bool
) -> None:
    memory = make(capacity, num_envs, on_gpu, n_step=n_step)
    episodes = Episodes(num_envs, seed=capacity)
    met: dict[str, int] = dict.fromkeys(("truncated", "terminated", "cut", "whole"), 0)
    for _ in range(4 * capacity // num_envs):
        fill(memory, episodes, 1)
        kept, steps = windows(episodes, memory)
        slots = slots_of(memory, kept)
        # exactly these can be drawn, and those that have never been drawn equally often
        assert torch.equal(leaves(memory).nonzero()[:, 0], slots.sort().values)
        assert set(leaves(memory).tolist()) <= {0, 1}
        if not kept:
            continue
        for got, want in zip(memory.read(slots), expected(steps), strict=True):
            assert got.shape == want.shape and torch.allclose(got, want, rtol=1e-5, atol=1e-6)
        for window in steps:
            met["cut"] += len(window) < n_step
            met["whole"] += len(window) == n_step
            met["terminated"] += window[-1][4]
        met["truncated"] += sum(e.truncated for e in kept)
    del met["cut" if n_step == 1 else "whole"]
    assert all(met.values()), met


def test_a_window_of_three_steps_by_hand() -> None:
    """Rewards 1, 2, 4, 8: an episode of three steps that is truncated, and the next one."""
    memory = PrioritizedFrameReplayBuffer(20, FRAMES, Discrete(5), n_step=3, gamma=0.5)
    seen = [pictures(np.array([[0, 0, 0, frame]])) for frame in range(1, 8)]
    for i, (reward, real) in enumerate([(1, 1), (2, 1), (4, 1), (0, 0), (8, 1), (16, 1), (32, 1)]):
        after = seen[i + 1] if i < 6 else seen[0]
        memory.add(seen[i], after, [i % 5], [reward], [i == 6], [real])
    slots = leaves(memory).nonzero()[:, 0]
    assert slots.tolist() == [0, 1, 2, 4]  # 3 is the reset step; 5 and 6 wait for their windows
    _, next_obs, actions, rewards, discounts = memory.read(slots)
    assert rewards.tolist() == [1 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4, 8 + 8 + 8]
    assert discounts.tolist() == [0.125, 0.25, 0.5, 0]  # the last one terminated
    assert next_obs[:3, -1, 0, 0].tolist() == [4, 4, 4]  # the real last observation
    assert actions.tolist() == [0, 1, 2, 4]


@on_both
@pytest.mark.parametrize("num_envs,capacity", [(1, 23), (3, 40), (5, 700)])
def test_priorities_are_those_of_a_dictionary(num_envs: int, capacity: int, on_gpu: bool) -> None:
    memory = make(capacity, num_envs, on_gpu, alpha=0.7, eps=0.01)
    episodes = Episodes(num_envs, seed=1)
    known: dict[tuple[int, int], float] = {}  # by (turn, environment)
    largest, rng = 1.0, np.random.default_rng(0)
    for turn in range(4 * capacity // num_envs):
        fill(memory, episodes, 1)
        kept, _ = windows(episodes, memory)
        known = {(e.turn, e.env): known.get((e.turn, e.env), largest) for e in kept}
        if kept and turn % 3 == 0:
            drawn = rng.integers(len(kept), size=8)  # some of them twice
            losses = rng.exponential(size=8)
            memory.update_priorities(slots_of(memory, kept)[drawn], torch.tensor(losses))
            new: dict[tuple[int, int], float] = {}
            for i, loss in zip(drawn, losses, strict=True):
                key = (kept[i].turn, kept[i].env)
                new[key] = max(new.get(key, 0), (loss + 0.01) ** 0.7)
            known |= new
            largest = max(largest, *new.values())
        want = torch.zeros(memory.capacity, dtype=torch.float64)
        want[slots_of(memory, kept)] = torch.tensor(list(known.values()), dtype=torch.float64)
        assert torch.allclose(leaves(memory), want, rtol=1e-12)
        for below, above in zip(memory.level_names, memory.level_names[1:], strict=False):
            rows = memory.tensors[below].sum(1)
            assert torch.allclose(memory.tensors[above].reshape(-1)[: len(rows)], rows, rtol=1e-12)


@on_both
@pytest.mark.parametrize("branches", [2, 3, 128])
def test_draws_are_in_proportion_to_priorities(
    on_gpu: bool, branches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prioritized, "BRANCHES", branches)
    memory = make(60, 3, on_gpu, alpha=1.0, eps=0.0)
    episodes = Episodes(3)
    fill(memory, episodes, 50)
    slots = slots_of(memory, windows(episodes, memory)[0])
    memory.update_priorities(slots, torch.arange(1, len(slots) + 1))
    torch.manual_seed(0)
    number = 200_000
    drawn = torch.cat([memory.sample(1000)[1] for _ in range(number // 1000)])
    counts = drawn.bincount(minlength=memory.capacity).double()
    mean = number * leaves(memory) / leaves(memory).sum()
    assert (counts[mean == 0] == 0).all()
    assert ((counts - mean).abs() <= 5 * mean.sqrt()).all()
    one = torch.cat([memory.sample(1)[1] for _ in range(2000)])  # independent draws
    assert len(one.unique()) > len(slots) / 2


@on_both
def test_draws_are_stratified(on_gpu: bool) -> None:
    """Of equal priorities, a batch that is as large as the memory draws from every part."""
    memory = make(60, 1, on_gpu)
    episodes = Episodes(1, ends=0)
    fill(memory, episodes, 50)
    number = len(leaves(memory).nonzero())
    for _ in range(20):
        drawn = memory.sample(number)[1].sort().values
        assert (drawn - leaves(memory).nonzero()[:, 0]).abs().max() <= 1


@on_both
def test_weights_correct_the_draws(on_gpu: bool) -> None:
    memory = make(60, 3, on_gpu, alpha=0.5, eps=0.0)
    episodes = Episodes(3)
    fill(memory, episodes, 50)
    slots = slots_of(memory, windows(episodes, memory)[0])
    memory.update_priorities(slots, torch.rand(len(slots)) + 0.1)
    probability = leaves(memory) / leaves(memory).sum()
    for beta in (0.0, 0.4, 1.0):
        memory.beta.fill_(beta)
        batch, drawn = memory.sample(32)
        want = (len(slots) * probability[drawn]) ** -beta
        assert torch.allclose(batch.weights, (want / want.max()).float())
        for got, read in zip(batch, memory.read(drawn), strict=False):
            assert torch.equal(got, read)
    assert batch.to("cpu") is batch and PrioritizedBatch._fields[-1] == "weights"


@on_both
def test_what_has_left_the_memory_stays_out(on_gpu: bool) -> None:
    memory = make(20, 1, on_gpu)
    episodes = Episodes(1, ends=0)
    fill(memory, episodes, 15)
    drawn = memory.sample(13)[1]  # of 13: stratified, so from all parts of the memory
    fill(memory, episodes, 12)
    before = leaves(memory).clone()
    assert (before[drawn] == 0).any() and (before[drawn] > 0).any()
    memory.update_priorities(drawn, torch.zeros(13))
    assert torch.equal(leaves(memory) > 0, before > 0)


@on_both
def test_rounding_never_leads_to_an_empty_leaf(on_gpu: bool) -> None:
    """Priorities that differ by 16 orders of magnitude, and masses at the very ends."""
    rng = np.random.default_rng(0)
    for branches in (2, 4, 16):
        levels: list[Any] = [np.zeros(x) for x in tree_shapes(1000, branches)]
        values = np.where(rng.random(1000) < 0.5, 0, 10 ** rng.uniform(-16, 0, 1000))
        values[-10:] = 0
        masses = np.concatenate([rng.random(5000), [0, 1, np.nextafter(1, 0), np.nextafter(1, 2)]])
        wrap: Callable = torch.tensor if on_gpu else np.array
        levels = [wrap(x) for x in levels]
        set_leaves(levels, wrap(np.arange(1000)), wrap(values))
        found = np.asarray(find_leaves(levels, wrap(masses) * levels[-1].sum()))
        assert (values[found] > 0).all()
        exact = np.searchsorted(values.cumsum(), masses[:-4] * values.sum(), side="right")
        assert (found[:-4] == exact).mean() > 0.999


def test_shapes_of_the_tree() -> None:
    assert tree_shapes(1_000_000, 128) == [(7813, 128), (62, 128), (1, 128)]
    assert tree_shapes(128, 128) == [(1, 128)]
    assert tree_shapes(5, 2) == [(3, 2), (2, 2), (1, 2)]


@on_both
@pytest.mark.parametrize("turns", [1, 6, 50, 200])
def test_saved_and_loaded_is_the_same(turns: int, on_gpu: bool, tmp_path: Path) -> None:
    first, second = (make(400, 3, on_gpu) for _ in range(2))
    episodes = Episodes(3)
    torch.manual_seed(0)

    def learn(memory: Any) -> tuple:
        torch.manual_seed(episodes.turn)
        memory.beta.fill_(0.5)
        batch, slots = memory.sample(16)
        memory.update_priorities(slots, torch.rand(16) + batch.weights)
        return *batch, slots

    for _ in range(turns):
        fill(first, episodes, 1)
        if leaves(first).any():
            learn(first)
    checkpoint.save(tmp_path / "x.safetensors", {"memory": first})
    # what was there before must not shine through
    fill(second, Episodes(3, seed=1, ends=0.01), 150)
    learn(second)
    second.load_state_dict(checkpoint.load(tmp_path / "x.safetensors")[1]["memory"])
    for _ in range(150):
        obs, next_obs, *rest = episodes.step()
        for memory in (first, second):
            memory.add(pictures(obs), pictures(next_obs), *rest)
        if leaves(first).any():
            assert all(torch.equal(a, b) for a, b in zip(learn(first), learn(second), strict=True))
        for name, level in first.tensors.items():
            if "prio" in name or name == "largest":
                assert torch.equal(level, second.tensors[name])
    second.clear()
    assert not leaves(second).any() and not second.tensors[second.level_names[-1]].any()


def test_a_checkpoint_holds_what_is_filled() -> None:
    memory = make(100_000, 2)
    fill(memory, Episodes(2), 10)
    assert sum(x.nbytes for x in memory.state_dict().values()) < memory.nbytes / 1000


def test_bad_input(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(BadInput):
        make(12, 2, n_step=3)
    message = capsys.readouterr().err
    assert "--buffer-size 12" in message and "--n-step 3" in message and "14" in message
    with pytest.raises(RuntimeError):
        make(14, 2, n_step=3).sample(1)  # empty: never rows that nobody wrote
    frames = Box(0, 255, (4, 84, 84), np.uint8)
    meta = PrioritizedFrameReplayBuffer(1_000_000, frames, Discrete(4), 8, "meta")
    held = sum(x.nbytes for x in meta.tensors.values())
    assert 84 * 84 * 1_000_000 < held == meta.nbytes < 6.7 * 2**30


@pytest.mark.gpu
def test_a_cuda_graph_holds_all_of_it() -> None:
    """Priorities that a graph sets are those of the CPU after the same draws."""
    settings: dict[str, Any] = {"gamma": GAMMA, "n_step": 3}
    ours = PrioritizedFrameReplayBuffer(60, FRAMES, CONTROL, 3, "cuda", **settings)
    reference = make(60, 3)
    episodes = Episodes(3)
    losses = torch.rand(16, device="cuda")

    def learn() -> tuple:
        batch, slots = ours.sample(16)
        ours.update_priorities(slots, losses)
        return *batch, slots

    def add() -> None:
        obs, next_obs, *rest = episodes.step()
        reference.add(pictures(obs), pictures(next_obs), *rest)
        ours.add(pictures(obs), pictures(next_obs), *rest)

    for _ in range(5):
        add()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm-up
        ours.beta.fill_(0.5)
        learn()
    torch.cuda.synchronize()
    ours.load_state_dict(reference.state_dict())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        *batch, slots = learn()
    for _ in range(150):
        add()
        losses.copy_(torch.rand(16))
        graph.replay()
        drawn = slots.cpu()
        assert (leaves(reference)[drawn] > 0).all()
        for got, want in zip(batch, reference.read(drawn), strict=False):
            assert torch.allclose(got.cpu(), want, rtol=1e-5)
        reference.update_priorities(drawn, losses.cpu())
        assert torch.allclose(leaves(ours).cpu(), leaves(reference), rtol=1e-9)
