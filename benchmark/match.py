"""Let two models of ppo_pettingzoo_ma_atari.py play against each other.

    python benchmark/match.py earlier.cleanrl_model later.cleanrl_model --games 50

Actions are drawn from the policies, as in training. The models change sides after each game.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cleanrl_utils.errors import require  # noqa: E402
from cleanrl_utils.running.evaluation import load_model  # noqa: E402
from cleanrl_utils.running.settings import Count, parse_command  # noqa: E402


@dataclass
class MatchArgs:
    models: tyro.conf.Positional[tuple[Path, Path]]
    """two model files of the same game"""
    games: Count = 50
    """number of games"""
    seed: int = 1
    """random seed of the games and of the actions"""
    env_id: str | None = None
    """the models' game, if it is your own: module:name"""


@torch.no_grad()
def play_game(env: gym.Env, agents: Sequence[Any], seed: int) -> np.ndarray:
    """The returns of both players; each agent acts for the player of its place."""
    obs, _ = env.reset(seed=seed)
    while True:
        views = torch.as_tensor(obs)
        actions = [agent.act(views[[i]], greedy=False).item() for i, agent in enumerate(agents)]
        obs, _, terminated, truncated, info = env.step(np.array(actions))
        if terminated or truncated:
            return info["returns"]


def play_match(env: gym.Env, agents: Sequence[Any], games: int, seed: int) -> np.ndarray:
    """(games, 2): the returns of both agents, who change sides after each game."""
    torch.manual_seed(seed)
    returns = []
    for game in range(games):
        swapped = game % 2 == 1
        of_players = play_game(env, agents[::-1] if swapped else agents, seed + game)
        returns.append(of_players[::-1] if swapped else of_players)
    return np.array(returns)


def main() -> None:
    args = parse_command(MatchArgs)
    torch.set_num_threads(1)  # single observations: more threads would only wait
    loaded = [load_model(path, env_id=args.env_id) for path in args.models]
    agents = [agent for agent, _, _ in loaded]
    (_, first, module), (_, second, _) = loaded
    for path, (_, settings, _) in zip(args.models, loaded, strict=True):
        which = f"{path} is a model of {settings.env_id}"
        require(first.env_id == settings.env_id, f"{which}, the other one of {first.env_id}")
    env = module.make_env(first.env_id, args.seed, 0, False, "", **first.env_settings)()
    two = getattr(env.unwrapped, "num_players", 1) == 2
    require(two, f"{args.models[0]}: {first.env_id} is not a game of two players")
    returns = play_match(env, agents, args.games, args.seed)
    env.close()
    for i, path in enumerate(args.models):
        won = (returns[:, i] > returns[:, 1 - i]).mean()
        print(
            f"{path}: wins {won:.0%} of {args.games} games, mean return {returns[:, i].mean():.1f}"
        )


if __name__ == "__main__":
    main()
