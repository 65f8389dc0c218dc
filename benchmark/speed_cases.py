"""What benchmark/speed.py runs for each script, and the same settings for other libraries."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Case:
    """A task and flags for a script; `peer` and `policy` are arguments of the other libraries."""

    env_id: str
    steps: int  # on a CPU; ten times as many on a GPU
    flags: str = ""
    algorithm: str = ""  # of stable-baselines3, SB3-Contrib and SBX; empty: no peer
    peer: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=lambda: {"net_arch": [64, 64]})
    num_envs: int = 1
    normalise: bool = False


# The two scripts that are not here need the model of a teacher; they are dqn_atari with a larger
# network.
NOT_MEASURED = {"qdagger_dqn_atari_impalacnn", "qdagger_dqn_atari_jax_impalacnn"}

CHEETAH = "HalfCheetah-v4"
PONG = "PongNoFrameskip-v4"
BREAKOUT = "Breakout-v5"

FREE = {"CartPole-v1", CHEETAH}  # free_env.py can stand in for these environments
NOT_FREE = {"ppo_jax", "pqn_jax"}  # their environments are written in JAX

ON_POLICY = dict(n_epochs=4, clip_range_vf=0.2, ent_coef=0.01)
DQN = dict(
    buffer_size=10_000,
    batch_size=128,
    learning_starts=10_000,
    train_freq=10,
    target_update_interval=500,
    exploration_fraction=0.5,
)
DQN_ATARI = dict(buffer_size=10_000, batch_size=32, learning_starts=200, train_freq=4)
OFF_POLICY = dict(buffer_size=100_000, batch_size=256, learning_starts=1000, train_freq=1)
FEW_STEPS = OFF_POLICY | {"learning_starts": 200}

WALK = "--learning-starts 1000 --buffer-size 100000"
HEAVY = "--learning-starts 200 --buffer-size 100000"  # an update takes tenths of a second
FRAMES = "--learning-starts 200 --buffer-size 10000"

CASES = {
    # PPO and its variants
    "ppo": Case(
        "CartPole-v1",
        40_000,
        algorithm="PPO",
        peer=ON_POLICY | {"n_steps": 128, "batch_size": 128},
        num_envs=4,
    ),
    "ppo_continuous_action": Case(
        CHEETAH,
        16_384,
        algorithm="PPO",
        peer=dict(n_steps=2048, batch_size=64, n_epochs=10, clip_range_vf=0.2),
        normalise=True,
    ),
    "rpo_continuous_action": Case(CHEETAH, 16_384),
    "ppo_action_mask": Case("Taxi-v4", 40_000),
    "ppo_multi_input": Case("cleanrl_utils.environments.examples:LookAndListen-v0", 20_000),
    "ppo_recurrent": Case("cleanrl_utils.environments.memory:CartPoleNoVel-v1", 40_960),
    "ppo_trxl": Case("cleanrl_utils.environments.memory:TMaze-v0", 8_192, "--num-envs 4"),
    "ppo_atari": Case(
        PONG,
        3_072,
        algorithm="PPO",
        peer=ON_POLICY | {"n_steps": 128, "batch_size": 256, "clip_range_vf": 0.1},
        policy={},
        num_envs=8,
    ),
    "ppo_atari_lstm": Case(PONG, 3_072),
    "ppo_atari_multigpu": Case(PONG, 3_072),
    "ppo_pettingzoo_ma_atari": Case("pong_v3", 6_144),
    "ppo_atari_envpool": Case(BREAKOUT, 5_120),
    "ppo_atari_envpool_xla_jax": Case(BREAKOUT, 5_120),
    "ppo_atari_envpool_xla_jax_scan": Case(BREAKOUT, 5_120),
    "ppo_rnd_envpool": Case(
        "MontezumaRevenge-v5", 3_072, "--num-envs 8 --num-iterations-obs-norm-init 1"
    ),
    "ppo_procgen": Case("starpilot", 32_768),
    "ppg_procgen": Case("starpilot", 32_768, "--n-iteration 1"),
    "ppo_jax": Case("CartPole-v1", 500_000),
    "ppo_continuous_action_brax_jax": Case("inverted_pendulum", 1_000_000, "--num-envs 256"),
    "ppo_continuous_action_isaacgym": Case("Cartpole", 100_000, "--num-envs 256"),
    # Q-learning
    "dqn": Case("CartPole-v1", 30_000, algorithm="DQN", peer=DQN, policy={"net_arch": [120, 84]}),
    "c51": Case("CartPole-v1", 30_000),
    "c51_jax": Case("CartPole-v1", 30_000),
    "pqn": Case("CartPole-v1", 40_000),
    "pqn_jax": Case("CartPole-v1", 500_000),
    "dqn_atari": Case(PONG, 3_000, FRAMES, algorithm="DQN", peer=DQN_ATARI, policy={}),
    "c51_atari": Case(PONG, 3_000, FRAMES),
    "c51_atari_jax": Case(PONG, 3_000, FRAMES),
    "rainbow_atari": Case(PONG, 3_000, FRAMES),
    "pqn_atari_envpool": Case(BREAKOUT, 5_120),
    "pqn_atari_envpool_lstm": Case(BREAKOUT, 5_120),
    # actor-critics
    "sac_atari": Case(PONG, 1_200, FRAMES),
    "tqc_continuous_action": Case(
        CHEETAH,
        2_000,
        WALK,
        algorithm="TQC",
        peer=OFF_POLICY,
        policy={"net_arch": {"pi": [256, 256], "qf": [512, 512, 512]}, "n_critics": 5},
    ),
    "simbav2_continuous_action": Case(CHEETAH, 2_000, WALK),
    "crossq_continuous_action": Case(
        CHEETAH,
        600,
        HEAVY,
        algorithm="CrossQ",
        peer=FEW_STEPS,
        policy={"net_arch": {"pi": [256, 256], "qf": [2048, 2048]}},
    ),
    "droq_continuous_action": Case(CHEETAH, 600, HEAVY),
    "fast_td3_continuous_action_jax": Case(
        "inverted_pendulum",
        20_000,
        "--num-envs 128 --batch-size 1024 --buffer-size 100000 --segment-steps 20",
    ),
}
for name in ("sac", "td3", "ddpg"):
    CASES[f"{name}_continuous_action"] = Case(
        CHEETAH, 4_000, WALK, name.upper(), peer=OFF_POLICY, policy={"net_arch": [256, 256]}
    )
ACTOR_CRITICS = [f"{name}_continuous_action" for name in ("sac", "td3", "ddpg", "crossq")]
for name in ("dqn", "dqn_atari", *ACTOR_CRITICS):
    CASES[f"{name}_jax"] = CASES[name]
