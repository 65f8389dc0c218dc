"""Self-play: observations, rewards and learning of each player, in PettingZoo's and known games."""

import importlib.util
import re
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from players import PLAYERS, Which
from probes import GAMMA, see_each_picture_once

from cleanrl_utils.running.evaluation import import_script

pytest.importorskip("cv2")
NAME = "ppo_pettingzoo_ma_atari"
ROOT = Path(__file__).resolve().parent.parent
GAMES = ["pong_v3", "surround_v2", "tennis_v3", "basketball_pong_v3"]
LEARN = (
    f"--gamma {GAMMA} --num-envs 4 --num-steps 10 --num-minibatches 1 --learning-rate 0.002"
    " --ent-coef 0 --torch-threads 1 --checkpoints 1"
)


def make(env_id: str) -> gym.Env:
    return import_script(NAME).make_env(env_id, 1, 0, False, "")()


@pytest.mark.parametrize("env_id", GAMES)
def test_each_player_sees_the_game_and_who_it_is(env_id: str) -> None:
    pytest.importorskip("pettingzoo.atari.pong_v3")
    env = make(env_id)
    assert env.observation_space == gym.spaces.Box(0, 255, (2, 6, 84, 84), np.uint8)
    start, _ = env.reset(seed=1)
    game = env.unwrapped.game
    before = game.frame
    views, reward, terminated, truncated, info = env.step(np.array([1, 2]))
    assert game.frame == before + 4 and not terminated and not truncated
    assert np.array_equal(views[0, :4], views[1, :4]) and views[0, :4].max() > 10
    assert (views[:, 4:] == np.eye(2)[:, :, None, None]).all()
    assert info["rewards"].shape == (2,) and info["rewards"][0] == reward
    # the frames are a stack: the newest one of then is the one before the newest of now
    assert np.array_equal(start[0, 3], views[0, 2])
    env.close()


def test_seeds_make_games_differ() -> None:
    """The game is deterministic: only the number of no-op frames at the start differs."""
    pytest.importorskip("pettingzoo.atari.pong_v3")
    env, seen = make("pong_v3"), []
    for seed in (1, 1, 2):
        env.reset(seed=seed)
        random = np.random.default_rng(0)
        seen.append([env.step(random.integers(6, size=2))[0] for _ in range(80)])
    assert np.array_equal(seen[0], seen[1]) and not np.array_equal(seen[0], seen[2])


def test_the_brighter_of_two_frames_as_ale_shows_them() -> None:
    """Every fourth frame and the one before it, gray, from the console itself."""
    pytest.importorskip("pettingzoo.atari.pong_v3")
    env = make("pong_v3")
    env.reset(seed=1)
    game = env.unwrapped.game
    step, screens = game.step, []

    def watched(actions: dict) -> tuple:
        result = step(actions)
        screens.append((game.ale.getScreenGrayscale()[..., 0], list(actions.values())))
        return result

    game.step = watched
    views, *_ = env.step(np.array([3, 2]))
    assert [actions for _, actions in screens] == [[3, 2]] * 4
    import cv2

    wanted = cv2.resize(np.maximum(screens[2][0], screens[3][0]), (84, 84), interpolation=3)
    assert np.array_equal(views[1, 3], wanted)


def test_a_game_to_its_end() -> None:
    """Both players take no-ops in Surround until it ends; lengths count steps of four frames."""
    pytest.importorskip("pettingzoo.atari.surround_v2")
    env = make("surround_v2")
    env.reset(seed=1)
    terminated, steps = False, 0
    totals = np.zeros(2)
    while not terminated:
        _, _, terminated, truncated, info = env.step(np.zeros(2, int))
        totals += info["rewards"]
        steps += 1
    assert info["dead"].all() and not truncated
    assert info["episode"]["l"] == steps > 500
    assert np.array_equal(info["returns"], totals) and info["episode"]["r"] == totals[0]


def test_the_dead_take_no_part(train) -> None:
    flags = "--env-id players:Survivor --num-envs 2 --num-steps 7 --total-timesteps 14"
    done = train(NAME, f"{flags} --num-minibatches 1 --torch-threads 1")
    rewards, terminated, ended, real = done.variables["record"][:, :, 0]
    # 4 steps, then one that only resets; the first player is there for 2 of them, rewards are signs
    assert real.T.tolist() == [[1, 1, 0, 0, 0, 1, 1], [1, 1, 1, 1, 0, 1, 1]]
    assert rewards.T.tolist() == [[1, 1, 0, 0, 0, 1, 1], [1, 1, 1, 1, 0, 1, 1]]
    assert ended.T.tolist() == [[0, 1, 1, 1, 0, 0, 1], [0, 0, 0, 1, 0, 0, 0]]
    assert np.array_equal(terminated, ended)
    logged = {tag: value for _, tag, value in done.rows() if "episodic" in tag}
    assert logged == {
        **{"charts/episodic_return": 6, "charts/episodic_length": 4},
        **{"charts/episodic_return-player0": 6, "charts/episodic_length-player0": 4},
        **{"charts/episodic_return-player1": 12, "charts/episodic_length-player1": 4},
    }


def values_of(done, env_id: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and greedy actions of both players at the start."""
    obs = torch.as_tensor(make(env_id).reset(seed=1)[0])
    agent = done.variables["agent"]
    with torch.no_grad():
        return agent.get_value(obs), agent.act(obs)


def test_one_network_plays_both_sides(train, monkeypatch) -> None:
    """Both see the same frames, and the best actions are opposite."""
    see_each_picture_once(monkeypatch)
    flags = "--env-id players:Which --total-timesteps 640 --save-model --eval-episodes 2"
    done = train(NAME, f"{flags} {LEARN}")
    values, actions = values_of(done, "players:Which")
    assert actions.tolist() == [0, 1] and (values - 1).abs().max() < 0.1
    found = [(tag, value) for _, tag, value in done.rows() if tag.startswith("eval/")]
    assert found == [("eval/episodic_return", 1), ("eval/episodic_length", 1)] * 2


def test_time_limits_are_no_ends(train, monkeypatch) -> None:
    see_each_picture_once(monkeypatch)
    done = train(
        NAME,
        f"--env-id players:Endless --total-timesteps 800 {LEARN} --no-clip-vloss --gae-lambda 1",
    )
    values, _ = values_of(done, "players:Endless")
    assert (values - torch.tensor([10.0, -10])).abs().max() < 1


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--env-id pong_v2", "pong_v3"),
        ("--env-id players:Nobody", "--env-id players:Nobody: "),
        ("--env-id nowhere:Which", "--env-id nowhere:Which: "),
        ("--env-id players:Which --num-envs 3", "--num-envs must be a multiple of the 2 players"),
    ],
)
def test_what_cannot_be_played_is_refused(flags: str, words: str, train, capsys) -> None:
    pytest.importorskip("pettingzoo.atari")
    with pytest.raises(SystemExit) as stopped:
        train(NAME, f"{flags} --num-steps 128")
    assert stopped.value.code == 2 and words in capsys.readouterr().err


class OneChannel(Which):
    def observation_space(self, player: str) -> gym.Space:
        return gym.spaces.Box(0, 255, (60, 70, 1), np.uint8)

    def see(self) -> dict[str, np.ndarray]:
        space = self.observation_space("")
        return {player: np.full(space.shape, 9, space.dtype) for player in PLAYERS}


class NoChannel(OneChannel):
    def observation_space(self, player: str) -> gym.Space:
        return gym.spaces.Box(0, 255, (60, 70), np.uint8)


class Vectors(OneChannel):
    def observation_space(self, player: str) -> gym.Space:
        return gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)


class Floats(OneChannel):
    def observation_space(self, player: str) -> gym.Space:
        return gym.spaces.Box(0, 1, (84, 84, 3), np.float32)


@pytest.mark.parametrize("name", ["OneChannel", "NoChannel"])
def test_own_games_may_be_gray(name: str, train) -> None:
    obs, _ = make(f"{__name__}:{name}").reset(seed=1)
    assert obs.shape == (2, 6, 84, 84) and (obs[:, :4] == 9).all()
    flags = f"--env-id {__name__}:{name} --num-envs 2 --num-steps 4 --total-timesteps 8"
    train(NAME, f"{flags} --num-minibatches 1 --update-epochs 1 --torch-threads 1")


@pytest.mark.parametrize("name, words", [("Vectors", "(5,) float32"), ("Floats", "float32")])
def test_own_games_without_pictures_are_refused(name: str, words: str, train, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        train(NAME, f"--env-id {__name__}:{name} --num-envs 2 --num-steps 4 --total-timesteps 8")
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and len(lines) == 1, lines
    assert "--env-id" in lines[0] and words in lines[0]


class Knows:
    """Acts as the best player of Which: by the channel that names the player."""

    def act(self, obs: torch.Tensor, greedy: bool) -> torch.Tensor:
        return obs[:, 5, 0, 0]


class Zero:
    def act(self, obs: torch.Tensor, greedy: bool) -> torch.Tensor:
        return torch.zeros(len(obs), dtype=torch.long)


@pytest.fixture
def match(monkeypatch):
    spec = importlib.util.spec_from_file_location("match_tool", ROOT / "benchmark" / "match.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "match_tool", module)
    spec.loader.exec_module(module)
    return module


def test_two_models_change_sides_after_each_game(match) -> None:
    env = make("players:Which")
    returns = match.play_match(env, [Knows(), Zero()], games=4, seed=1)
    assert returns.tolist() == [[1, 0], [1, 1], [1, 0], [1, 1]]


def test_a_match_of_saved_models(match, train, monkeypatch, capsys) -> None:
    done = train(NAME, f"--env-id players:Which --total-timesteps 40 --save-model {LEARN}")
    (model,) = done.folder.glob("*.cleanrl_model")
    words = ["match.py", str(model), str(model), "--games", "3"]
    monkeypatch.setattr(sys, "argv", [*words, "--env-id", "players:Which"])
    match.main()
    printed = capsys.readouterr().out
    assert len(re.findall(r"wins \d+% of 3 games, mean return [01]\.\d$", printed, re.M)) == 2
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="2"):
        match.main()


def test_games_in_processes_are_the_same_games(train) -> None:
    flags = "--env-id players:Survivor --num-envs 4 --num-steps 10 --total-timesteps 40"
    flags += " --torch-threads 1 --update-epochs 1"
    assert train(NAME, flags).rows() == train(NAME, f"{flags} --async-envs").rows()
