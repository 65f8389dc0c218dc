"""The Atari variants of PPO: games, memory, EnvPool."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from probes import GAMMA, see_each_picture_once

from cleanrl_utils.environments import envpool as envs_module
from cleanrl_utils.environments.atari_wrappers import EnvPoolLives
from cleanrl_utils.running.evaluation import import_script, play

pytest.importorskip("ale_py")
pytest.importorskip("cv2")

QUICK = "--num-steps 20 --num-minibatches 2 --update-epochs 1 --checkpoints 1"


@pytest.mark.parametrize("env_id", ["BreakoutNoFrameskip-v4", "ALE/Breakout-v5"])
def test_the_chain_of_wrappers(env_id: str) -> None:
    env = import_script("ppo_atari").make_env(env_id, 1, 0, False, "")()
    assert env.observation_space == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    env.reset(seed=1)
    start = env.unwrapped.ale.getFrameNumber()
    env.step(0)
    assert env.unwrapped.ale.getFrameNumber() == start + 4
    env.close()


def test_a_game_is_one_episode_for_the_record_and_five_for_the_learner() -> None:
    make_env = import_script("ppo_atari").make_env
    envs = gym.vector.SyncVectorEnv([make_env("BreakoutNoFrameskip-v4", 1, 0, False, "")])
    envs.reset(seed=1)
    ends, games = 0, 0
    while not games:
        _, _, terminated, _, infos = envs.step(np.array([0]))
        ends += int(terminated[0])
        games += "_episode" in infos
    assert ends == 5
    envs.close()


def test_environments_in_processes_are_the_same_environments(train) -> None:
    flags = f"--env-id ALE/Breakout-v5 --total-timesteps 80 --num-envs 2 {QUICK}"
    assert train("ppo_atari", flags).rows() == train("ppo_atari", f"{flags} --async-envs").rows()


# -- LSTM -------------------------------------------------------------------------------------


def test_packed_episodes_are_what_the_agent_saw_step_by_step() -> None:
    module = import_script("ppo_atari_lstm")
    torch.manual_seed(0)
    num_steps, num_envs = 12, 5
    envs = type("Envs", (), {"single_action_space": gym.spaces.Discrete(3)})
    agent = module.Agent(envs)
    obs = torch.randint(256, (num_steps, num_envs, 1, 84, 84), dtype=torch.uint8)
    first = torch.rand(num_steps, num_envs) < 0.3
    begin = state = torch.randn(2, num_envs, 128) * ~first[0].unsqueeze(-1)
    seen = torch.zeros(num_steps, num_envs, 128)
    with torch.no_grad():
        for t in range(num_steps):
            _, state = agent.act(obs[t], state, first[t])
            seen[t] = state[0]
        for columns in (torch.arange(num_envs), torch.tensor([3, 1])):
            steps, states, sizes = module.pack(first, begin, columns)
            hidden = agent.remember(obs.flatten(0, 1)[steps], states, sizes)
            assert sorted(steps % num_envs) == sorted(columns.repeat(num_steps))
            torch.testing.assert_close(hidden, seen.flatten(0, 1)[steps], atol=1e-5, rtol=1e-4)


MEMORY = (
    f"--env-id probes:ProbeMemoryPixels-v0 --gamma {GAMMA} --num-envs 16 --num-steps 12"
    " --num-minibatches 2 --learning-rate 0.005 --no-anneal-lr --no-clip-vloss --clip-coef 0.2"
    " --ent-coef 0.001 --save-model --eval-episodes 20"
)


def test_only_the_lstm_remembers(train, monkeypatch) -> None:
    """Twenty episodes: random actions solve half of them, memory all."""
    see_each_picture_once(monkeypatch)
    done = train("ppo_atari_lstm", f"{MEMORY} --total-timesteps 5760 --update-epochs 8")
    returns = [value for _, tag, value in done.rows() if tag == "eval/episodic_return"]
    assert np.mean(returns) == 1
    # An episode takes five steps, the sixth resets; what follows it is the first of the next one.
    assert np.array_equal(np.flatnonzero(done.variables["first"][:, 0]) % 6, [0, 0, 0])
    assert np.array_equal(np.flatnonzero(done.variables["real"][:, 0] == 0), [5, 11])
    # Where one begins, what was remembered before is gone.
    agent, states = done.variables["agent"], torch.randn(2, 1, 128)
    obs, yes = torch.zeros(1, 1, 84, 84, dtype=torch.uint8), torch.tensor([True])
    fresh = agent.act(obs, agent.initial_state(1), yes)[1]
    assert torch.equal(agent.act(obs, states, yes)[1], fresh)
    assert not torch.equal(agent.act(obs, states, ~yes)[1], fresh)

    done = train("ppo_atari", f"{MEMORY} --total-timesteps 1920 --update-epochs 2")
    returns = [value for _, tag, value in done.rows() if tag == "eval/episodic_return"]
    assert 0.1 < np.mean(returns) < 0.9


def test_evaluation_marks_the_first_observation_of_an_episode() -> None:
    def make_env(*about: object) -> object:
        def thunk() -> gym.Env:
            env = import_script("ppo_atari_lstm").make_env(*about)()
            env.unwrapped.length = 5 if about[2] == 0 else 14  # the second outlasts two of these
            return env

        return thunk

    seen: list[tuple[bool, bool]] = []

    def policy(obs: np.ndarray, first: np.ndarray) -> np.ndarray:
        cues = abs(obs.mean((1, 2, 3)) - 127) > 50  # they show at first only
        seen.extend(zip(first.tolist(), cues.tolist(), strict=True))
        return np.zeros(2, int)

    play(policy, make_env, "probes:ProbeMemoryPixels-v0", 2, 1, False, "")
    assert all(first == cue for first, cue in seen)
    assert sum(first for first, _ in seen) == 4


# -- EnvPool ----------------------------------------------------------------------------------


def pool_of(game: str, **settings: object) -> object:
    pytest.importorskip("envpool")
    return envs_module.make_pool(game, num_envs=1, seed=3, **settings)


def lives_of(env: gym.Env) -> EnvPoolLives:
    while not isinstance(env, EnvPoolLives):
        env = env.env
    return env


@pytest.mark.parametrize("game, ends", [("Breakout", 10), ("Pong", 0), ("Freeway", 0)])
def test_evaluation_plays_and_sees_as_envpool_does(game: str, ends: int) -> None:
    """From the first frame on, at starts of games and of lives, with FIRE and without."""
    pool = pool_of(f"{game}-v5", noop_max=1, episodic_life=True, reward_clip=True)
    theirs, _ = pool.reset()
    env = import_script("ppo_atari_envpool").make_env(f"{game}-v5", 1, 0, False, "")()
    lives_of(env).noop_max = 1
    ours, _ = env.reset(seed=1)
    assert np.array_equal(ours, theirs[0])
    rng = np.random.default_rng(0)
    ended, count = False, 0
    for _ in range(400):
        action = rng.integers(env.action_space.n)
        theirs, reward, *over, _ = pool.step(np.array([action]))
        if ended:
            ours, _ = env.reset()
            assert reward == [0]
        else:
            ours, our_reward, *our_over, _ = env.step(action)
            assert our_reward == reward[0] and our_over == [flag[0] for flag in over]
        assert np.array_equal(ours[-1], theirs[0, -1])  # a new life's other frames differ
        ended = any(flag[0] for flag in over)
        count += ended
    assert count >= ends
    env.close()


@pytest.mark.parametrize("game, least", [("Breakout", 0), ("Freeway", 1)])
def test_evaluation_starts_at_as_many_frames_as_envpool(game: str, least: int) -> None:
    """EnvPool idles for 0 to 29 frames before FIRE, for 1 to 30 in a game without it."""
    env = import_script("ppo_atari_envpool").make_env(f"{game}-v5", 1, 0, False, "")()
    fire = 1 - least
    starts = [env.reset(seed=seed)[1]["episode_frame_number"] - fire for seed in range(100)]
    assert min(starts) == least and max(starts) == least + 29
    env.close()


def test_games_that_envpool_plays_are_logged_whole(train, monkeypatch) -> None:
    """Truncated games, here after 50 steps, are logged, too, and do not count towards the next."""
    pool_of("Breakout-v5")
    games: list[tuple[float, int]] = []
    scores = np.zeros(2)
    make_pool = envs_module.make_pool

    def short_games(task: str, **settings: object) -> object:
        pool = make_pool(task, max_episode_steps=50, **settings)
        step = pool.step

        def watched(actions: np.ndarray) -> tuple:
            result = step(actions)
            infos = result[-1]
            scores[:] += infos["reward"]
            for i in np.flatnonzero(infos["terminated"] | (infos["elapsed_step"] == 50)):
                if result[2][i] or result[3][i]:
                    games.append((scores[i], infos["elapsed_step"][i]))
                    scores[i] = 0
            return result

        pool.step = watched
        return pool

    monkeypatch.setattr(envs_module, "make_pool", short_games)
    flags = f"--env-id BreakoutNoFrameskip-v4 --num-envs 2 --total-timesteps 640 {QUICK}"
    done = train("ppo_atari_envpool", flags)
    returns = [value for _, tag, value in done.rows() if tag == "charts/episodic_return"]
    lengths = [value for _, tag, value in done.rows() if tag == "charts/episodic_length"]
    assert list(zip(returns, lengths, strict=True)) == games
    assert lengths.count(50) >= 6
    averages = [value for _, tag, value in done.rows() if tag == "charts/avg_episodic_return"]
    assert averages[-1] == pytest.approx(np.mean(returns[-20:]))
    # every end, of lives too, is followed by a step that counts for nothing
    real, ended = done.variables["real"].numpy(), done.variables["done"].numpy()
    assert np.array_equal(real[1:] == 0, ended[:-1] == 1)


def test_a_game_that_envpool_lacks_is_refused(train, capsys) -> None:
    pytest.importorskip("envpool")
    with pytest.raises(SystemExit) as stopped:
        train("ppo_atari_envpool", "--env-id Brakeout-v5")
    assert stopped.value.code == 2
    assert "Breakout-v5" in capsys.readouterr().err
