"""Board games of two players: whose turn it is, who wins, and rows of a vector environment."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pettingzoo.classic.tictactoe_v3", exc_type=ImportError)

from cleanrl import ppo_action_mask
from cleanrl_utils.environments import board_games
from cleanrl_utils.environments.board_games import SelfPlay
from cleanrl_utils.environments.making import make
from cleanrl_utils.running.evaluation import as_policy, load_model, play

GAME = "pettingzoo/tictactoe_v3"


@pytest.fixture
def empty_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_games, "RANDOM_MOVES", 0)


def make_rows(games: int = 1) -> SelfPlay:
    args = ppo_action_mask.Args(env_id=GAME, num_envs=2 * games)
    return ppo_action_mask.make_envs(args, "")


@pytest.mark.usefixtures("empty_board")
def test_the_waiting_player_has_one_action_and_both_see_the_result() -> None:
    rows = make_rows()
    assert rows.single_observation_space.shape == (18 + 1 + 9,) and rows.single_action_space.n == 9
    obs, _ = rows.reset(seed=1)
    moves = [0, 3, 1, 4, 2]  # the first player fills a row (a column of PettingZoo's board)
    for turn, move in enumerate(moves):
        mover = turn % 2
        masks = obs[:, 19:]
        assert masks[mover].sum() == 9 - turn and masks[1 - mover].tolist() == [1] + [0] * 8
        assert obs[mover, 18] == 1 and obs[1 - mover, 18] == 0  # whose turn it is
        own, others = obs[:, :18].reshape(2, 9, 2).sum(1).T
        assert (
            own.tolist() == [(turn + 1) // 2, turn // 2] and others.tolist() == own[::-1].tolist()
        )
        actions = np.zeros(2, np.int64)
        actions[mover] = move
        obs, rewards, terminated, truncated, _ = rows.step(actions)
    assert terminated.all() and not truncated.any() and rows.ended.all()
    assert rewards.tolist() == [1, -1]
    obs, rewards, terminated, *_ = rows.step(np.zeros(2, np.int64))  # only resets
    assert not obs[:, :18].any() and rewards.tolist() == [0, 0] and not terminated.any()


@pytest.mark.usefixtures("empty_board")
def test_a_full_board_is_a_draw() -> None:
    rows = make_rows()
    rows.reset(seed=1)
    for turn, move in enumerate([0, 1, 2, 4, 3, 5, 7, 6, 8]):
        actions = np.zeros(2, np.int64)
        actions[turn % 2] = move
        _, rewards, terminated, *_ = rows.step(actions)
    assert terminated.all() and rewards.tolist() == [0, 0]


@pytest.mark.usefixtures("empty_board")
def test_rows_of_several_games_belong_to_their_game() -> None:
    rows = make_rows(games=2)
    rows.reset(seed=1)
    obs, *_ = rows.step(np.array([4, 0, 8, 0]))  # the first players move
    own = obs[:, :18].reshape(4, 9, 2)[..., 0]
    assert [np.flatnonzero(x).tolist() for x in own] == [[4], [], [8], []]
    assert np.flatnonzero(obs[1, 19:] == 0).tolist() == [4]


def test_games_of_self_play_begin_with_random_moves() -> None:
    rows = make_rows()
    boards = set()
    numbers = set()
    for seed in range(60):
        obs, _ = rows.reset(seed=seed)
        number = int(obs[0, :18].sum())
        boards.add(obs[0, :18].tobytes())
        numbers.add(number)
        assert obs[number % 2, 19:].sum() == 9 - number and obs[1 - number % 2, 19:].sum() == 1
    assert {0, 1, 2, 3, 4} < numbers and len(boards) > 30


def test_a_saved_game_goes_on() -> None:
    rows = make_rows(games=2)
    obs, _ = rows.reset(seed=1)
    random = np.random.default_rng(1)
    for _ in range(13):
        obs, *_ = rows.step(np.array([random.choice(np.flatnonzero(x)) for x in obs[:, 19:]]))
    other = make_rows(games=2)
    other.reset(seed=2)
    other.load_state_dict(rows.state_dict())
    np.testing.assert_array_equal(other.obs, obs)
    actions = np.array([np.flatnonzero(x)[0] for x in obs[:, 19:]])
    np.testing.assert_array_equal(other.step(actions)[0], rows.step(actions)[0])


def test_a_random_opponent_moves_by_itself_and_begins_half_of_the_games() -> None:
    env = make(GAME)
    begins = []
    for seed in range(40):
        obs, _ = env.reset(seed=seed)
        begins.append(not obs["observation"][:18].any())
        own, over = 0, False
        while not over:
            obs, reward, over, _, _ = env.step(np.flatnonzero(obs["action_mask"])[0])
            own += 1
            assert obs["observation"][:18].reshape(9, 2)[:, 0].sum() == own
        assert reward in (-1, 0, 1)
    assert 10 < sum(begins) < 30


def test_it_learns_by_self_play_and_is_evaluated_against_a_random_opponent(train) -> None:
    game = "pettingzoo/connect_four_v3"
    flags = f"--env-id {game} --num-envs 16 --learning-rate 0.001 --total-timesteps 32768"
    done = train("ppo_action_mask", f"{flags} --save-model")
    agent, args, module = load_model(Path(done.folder) / "ppo_action_mask.cleanrl_model")
    returns = play(as_policy(agent), module.make_env, game, 100, 1, False, "")
    assert np.mean(returns) > 0.5  # a random player: 0


def test_an_odd_number_of_players_and_unknown_games_are_one_line(train, capfd) -> None:
    for flags, says in (
        (f"--env-id {GAME} --num-envs 3 --num-minibatches 3", "--num-envs must be even"),
        ("--env-id pettingzoo/ludo_v1", "pettingzoo/ludo_v1"),
    ):
        with pytest.raises(SystemExit) as stop:
            train("ppo_action_mask", flags)
        lines = capfd.readouterr().err.strip().splitlines()
        assert stop.value.code == 2 and len(lines) == 1 and says in lines[0], lines
