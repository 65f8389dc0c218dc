"""Two-player games with known values and PettingZoo's interface: `--env-id players:Which`."""

import gymnasium as gym
import numpy as np

PLAYERS = ["first_0", "second_0"]


class Which:
    """One step; both see the same. The first player's best action is 0, the second's is 1."""

    length = 1
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    possible_agents = PLAYERS

    @classmethod
    def parallel_env(cls, render_mode: str | None = None) -> "Which":
        return cls()

    @property
    def unwrapped(self) -> "Which":
        return self

    def observation_space(self, player: str) -> gym.Space:
        return gym.spaces.Box(0, 255, (84, 84, 3), np.uint8)

    def action_space(self, player: str) -> gym.Space:
        return gym.spaces.Discrete(2)

    def see(self) -> dict[str, np.ndarray]:
        return {player: np.full((84, 84, 3), 20 * self.t, np.uint8) for player in PLAYERS}

    def reset(self, seed: int | None = None) -> tuple:
        self.t = 0
        return self.see(), {}

    def rewards(self, actions: dict[str, int]) -> dict[str, float]:
        return {
            player: float(action == PLAYERS.index(player)) for player, action in actions.items()
        }

    def ends(self, player: str) -> tuple[bool, bool]:
        return self.t >= self.length, False

    def step(self, actions: dict[str, int]) -> tuple:
        self.t += 1
        terminated, truncated = ({x: self.ends(x)[i] for x in actions} for i in (0, 1))
        return self.see(), self.rewards(actions), terminated, truncated, {}

    def render(self) -> np.ndarray:
        return np.full((64, 64, 3), 128, np.uint8)

    def close(self) -> None:
        pass


class Endless(Which):
    """Reward 1 for the first player and -1 for the second, truncated after 5 steps."""

    def see(self) -> dict[str, np.ndarray]:
        return dict.fromkeys(PLAYERS, np.full((84, 84, 3), 100, np.uint8))

    def rewards(self, actions: dict[str, int]) -> dict[str, float]:
        return {PLAYERS[0]: 1, PLAYERS[1]: -1}

    def ends(self, player: str) -> tuple[bool, bool]:
        return False, self.t >= 5


class Survivor(Which):
    """The first player dies after 2 steps, the second after 4; reward 3 per step alive."""

    def rewards(self, actions: dict[str, int]) -> dict[str, float]:
        return dict.fromkeys(actions, 3)

    def ends(self, player: str) -> tuple[bool, bool]:
        return self.t >= 2 * (1 + PLAYERS.index(player)), False
