"""Every Atari wrapper on a real ROM, against the same game played without it."""

from functools import cache, partial
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import pytest

from cleanrl_utils.environments.atari_wrappers import (
    ClipReward,
    EpisodicLife,
    FireReset,
    Grayscale,
    MaxAndSkip,
    NoopReset,
)
from cleanrl_utils.errors import BadInput

gym.register_envs(ale_py)
BREAKOUT, PONG = "BreakoutNoFrameskip-v4", "PongNoFrameskip-v4"
NOOP, FIRE = 0, 1


def game(env_id: str = BREAKOUT, max_frames: int = 108_000, **options: Any) -> gym.Env:
    """Make a game with episode statistics; `max_frames` truncates it."""
    options = {"frameskip": 1, "max_num_frames_per_episode": max_frames, **options}
    return gym.wrappers.RecordEpisodeStatistics(gym.make(env_id, **options))


@cache
def frames_of_first_life() -> int:
    """The number of FIRE steps until Breakout's first life is lost (the game is deterministic)."""
    env = EpisodicLife(game())
    env.reset(seed=0)
    steps, terminated = 0, False
    while not terminated:
        _, _, terminated, _, info = env.step(FIRE)
        steps += 1
    assert info["lives"] == 4
    return steps


@pytest.mark.parametrize("env_id", [BREAKOUT, PONG])
def test_noop_reset_starts_at_random_frames(env_id: str) -> None:
    env = NoopReset(game(env_id))
    starts, again = (
        [env.reset(seed=seed)[1]["episode_frame_number"] for seed in (1, *[None] * 15)]
        for _ in range(2)
    )
    assert starts == again
    assert min(starts) >= 1 and max(starts) <= 30 and len(set(starts)) > 7
    assert len({env.reset(seed=seed)[1]["episode_frame_number"] for seed in range(5)}) > 1


def test_noop_reset_survives_the_end_of_a_game() -> None:
    env = NoopReset(game(max_frames=5))
    for _ in range(8):
        _, info = env.reset()
        assert info["episode_frame_number"] < 5 and "episode" not in info


@pytest.mark.parametrize("env_id", [BREAKOUT, PONG])
@pytest.mark.parametrize("end", [101, 102, 103, 104])
def test_max_and_skip_shows_the_last_frames_only(env_id: str, end: int) -> None:
    """The game ends on each of the four frames of a skip: no frame of an earlier step is shown."""
    plain = game(env_id, end)
    env = MaxAndSkip(game(env_id, end))
    plain.reset(seed=3)
    env.reset(seed=3)
    rng = np.random.default_rng(0)
    number = 0
    done = False
    while not done:
        action = int(rng.integers(env.action_space.n))
        frames = []
        total = 0.0
        for _ in range(min(4, end - number)):
            frame, reward, *_ = plain.step(action)
            frames.append(frame)
            total += reward
        number += len(frames)
        obs, reward, terminated, truncated, info = env.step(action)
        assert np.array_equal(obs, np.max(frames[-2:], axis=0))
        assert obs.dtype == np.uint8 and reward == total
        assert info["episode_frame_number"] == number
        done = terminated or truncated
    assert number == end and info["episode"]["l"] == end


def test_max_and_skip_adds_up_rewards() -> None:
    plain, env = game(PONG), MaxAndSkip(game(PONG))
    for each in (plain, env):
        each.reset(seed=0)
    for _ in range(2):  # so that the first point, at frame 255, falls in the midst of a skip
        plain.step(NOOP)
        env.env.step(NOOP)
    sums = []
    for _ in range(70):
        rewards = [plain.step(NOOP)[1] for _ in range(4)]
        assert rewards[-1] == 0
        sums.append(sum(rewards))
        assert env.step(NOOP)[1] == sums[-1]
    assert sum(sums) == -1


@pytest.mark.parametrize("env_id", [BREAKOUT, "ALE/Breakout-v5"])
def test_episodic_life_ends_the_episode_but_not_the_game(env_id: str) -> None:
    env = EpisodicLife(game(env_id))
    _, info = env.reset(seed=0)
    total, lives, frame, episodes = 0.0, [info["lives"]], 0, 0
    while "episode" not in info:
        _, reward, terminated, truncated, info = env.step(FIRE)
        total += float(reward)
        assert info["episode_frame_number"] == frame + 1
        frame = info["episode_frame_number"]
        if info["lives"] < lives[-1]:
            lives.append(info["lives"])
            assert terminated and not truncated
            episodes += 1
            if "episode" not in info:  # the game goes on, one idle frame later
                _, info = env.reset()
                assert info["lives"] == lives[-1] and info["episode_frame_number"] == frame + 1
                frame += 1
        else:
            assert not terminated
    assert lives == [5, 4, 3, 2, 1, 0] and episodes == 5
    assert info["episode"]["r"] == total and info["episode"]["l"] == frame
    _, info = env.reset()  # after the last life it is a new game
    assert info["lives"] == 5 and info["episode_frame_number"] == 0


def test_episodic_life_seeds_and_early_resets_start_a_new_game() -> None:
    env = EpisodicLife(game())
    first, _ = env.reset(seed=0)
    for _ in range(frames_of_first_life()):
        *_, info = env.step(FIRE)
    assert info["lives"] == 4
    obs, info = env.reset(seed=0)  # a life was just lost, yet a seed asks for a known state
    assert info["lives"] == 5 and info["episode_frame_number"] == 0
    assert np.array_equal(obs, first)
    for _ in range(50):
        env.step(FIRE)
    _, info = env.reset()  # in mid-life
    assert info["lives"] == 5 and info["episode_frame_number"] == 0


def test_episodic_life_survives_a_game_that_ends_in_the_idle_step() -> None:
    frames = frames_of_first_life() + 1
    env = EpisodicLife(game(max_frames=frames))
    env.reset(seed=0)
    for _ in range(frames - 1):
        *_, terminated, truncated, info = env.step(FIRE)
    assert terminated and not truncated and "episode" not in info
    _, info = env.reset()
    assert info["lives"] == 5 and info["episode_frame_number"] == 0
    assert info["episode"]["l"] == frames  # the game that just ended is not forgotten
    assert not any(env.step(FIRE)[2:4])


def test_episodic_life_leaves_the_last_life_to_the_game() -> None:
    """At 0 lives the game may continue for some frames: only its own end counts."""

    class Countdown(gym.Wrapper):
        lives = iter([3, 3, 2, 2, 1, 1, 0, 0])

        def step(self, action: int) -> tuple:
            *step, info = super().step(action)
            return *step, info | {"lives": next(self.lives)}

    env = EpisodicLife(Countdown(game()))
    env.reset(seed=0)
    ends = [env.step(NOOP)[2] for _ in range(8)]
    assert ends == [True, False, True, False, True, False, False, False]  # 5 to 3, to 2, to 1


def test_episodic_life_without_lives() -> None:
    """Pong has no lives: a lost point must not end an episode."""
    env = EpisodicLife(MaxAndSkip(game(PONG)))
    env.reset(seed=0)
    points, done = 0.0, False
    while not done:
        _, reward, terminated, truncated, info = env.step(NOOP)
        points += float(reward)
        done = terminated or truncated
    assert points == info["episode"]["r"] == -21


def test_fire_reset_starts_the_game() -> None:
    """After the reset the ball is in play: no-ops lose a life; without FIRE nothing moves."""
    for wrapper, lives in ((FireReset, 4), (EpisodicLife, 5)):
        env = wrapper(EpisodicLife(game()))
        env.reset(seed=0)
        left = [env.step(NOOP)[4]["lives"] for _ in range(200)]
        assert min(left) == lives


def test_fire_reset_presses_nothing_in_a_game_without_fire() -> None:
    for env_id, pressed in (("ALE/Freeway-v5", 0), (BREAKOUT, 2)):
        env = FireReset(game(env_id))
        _, info = env.reset(seed=0)
        assert info["episode_frame_number"] == pressed


def test_fire_reset_survives_an_episode_that_ends_inside_it() -> None:
    frames = frames_of_first_life() + 2  # FIRE comes after the idle step of EpisodicLife
    for late in (0, 1):  # the game ends with FIRE, or with the action after it
        env = FireReset(EpisodicLife(game(max_frames=frames + late)))
        _, info = env.reset(seed=0)
        assert info["episode_frame_number"] == 2 and "seeds" in info
        terminated = False
        while not terminated:
            *_, terminated, truncated, info = env.step(FIRE)
        assert info["episode_frame_number"] == frames - 2 and not truncated
        _, info = env.reset()  # so the game starts anew, FIRE and the other pressed again
        assert info["lives"] == 5 and info["episode_frame_number"] == 2
        assert info["episode"]["l"] == frames + late
        assert not any(env.step(FIRE)[2:4])


def test_fire_reset_gives_up_where_fire_always_ends_the_episode() -> None:
    env = FireReset(EpisodicLife(game(max_frames=1)))
    _, info = env.reset(seed=0)
    assert info["episode_frame_number"] == 0 and info["lives"] == 5 and info["episode"]["l"] == 1


@pytest.mark.parametrize("env_id,kinds", [(PONG, {-1, 0}), ("SpaceInvadersNoFrameskip-v4", {0, 1})])
def test_clip_reward_is_the_sign(env_id: str, kinds: set[int]) -> None:
    plain = game(env_id)
    env = ClipReward(game(env_id))
    plain.reset(seed=0)
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    clipped = set()
    raw = set()
    for _ in range(800):
        action = int(rng.integers(6))
        _, reward, *_ = env.step(action)
        _, original, *_ = plain.step(action)
        assert reward == np.sign(original)
        clipped.add(reward)
        raw.add(original)
    assert clipped == kinds and (env_id == PONG or max(raw) > 1)


def chain(env_id: str, max_frames: int) -> gym.Env:
    """The chain of ppo_atari.py and dqn_atari.py."""
    env: gym.Env = EpisodicLife(MaxAndSkip(NoopReset(game(env_id, max_frames))))
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = FireReset(env)
    env = gym.wrappers.ResizeObservation(ClipReward(env), (84, 84))
    env = gym.wrappers.GrayscaleObservation(env)
    return gym.wrappers.FrameStackObservation(env, 4)


@pytest.mark.parametrize("env_id", [BREAKOUT, "ALE/Breakout-v5", "ALE/Pong-v5"])
def test_chain_in_vector_environments(env_id: str) -> None:
    """Sync and Async in next-step autoreset: the same bytes, and whole games reported."""
    thunks = [partial(chain, env_id, max_frames) for max_frames in (200, 300)]
    sync, asynchronous = gym.vector.SyncVectorEnv(thunks), gym.vector.AsyncVectorEnv(thunks)
    obs, _ = sync.reset(seed=[1, 2])
    assert obs.shape == (2, 4, 84, 84) and obs.dtype == np.uint8
    assert np.array_equal(obs, asynchronous.reset(seed=[1, 2])[0])
    rng, games, ended, episodes = np.random.default_rng(0), [], np.zeros(2, bool), 0
    for _ in range(90):
        actions = rng.integers(sync.single_action_space.n, size=2)
        obs, reward, terminated, truncated, info = sync.step(actions)
        other = asynchronous.step(actions)
        for ours, theirs in zip((obs, reward, terminated, truncated), other):
            assert np.array_equal(ours, theirs)
        assert set(np.unique(reward)) <= {-1, 0, 1}
        if ended.any():  # that step was a reset: a padded stack, no reward, and not over at once
            first = obs[ended]
            assert (first == first[:, :1]).all() and not reward[ended].any()
            assert not (terminated | truncated)[ended].any()
        ended = terminated | truncated
        episodes += ended.sum()
        if "episode" in info:
            games += [(i, int(info["episode"]["l"][i])) for i in np.flatnonzero(info["_episode"])]
    sync.close()
    asynchronous.close()
    assert {i for i, _ in games} == {0, 1} and all(n <= (200, 300)[i] for i, n in games)
    assert episodes > len(games) if "Breakout" in env_id else episodes == len(games)


def test_what_shows_no_pictures_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput) as error:
        Grayscale(gym.make("CartPole-v1"))
    assert "--env-id CartPole-v1" in error.value.message and "images" in error.value.message


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Box(0, 255, (20, 20, 1), np.uint8),
        gym.spaces.Box(0, 255, (3, 20, 20), np.uint8),
        gym.spaces.Box(0, 1, (20, 20, 3), np.float32),
    ],
)
def test_images_that_are_not_rgb_are_one_line(space: gym.Space, capsys) -> None:
    env = gym.Env()
    env.observation_space = space
    with pytest.raises(SystemExit) as stop:
        Grayscale(env)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert "needs Box(0, 255, (height, width, 3), uint8)" in said
