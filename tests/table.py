"""One row per script: what every test of tests/test_scripts.py needs to know about it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

PPO_TAGS = [
    "charts/episodic_return",
    "charts/episodic_length",
    "charts/learning_rate",
    "charts/SPS",
    "losses/value_loss",
    "losses/policy_loss",
    "losses/entropy",
    "losses/old_approx_kl",
    "losses/approx_kl",
    "losses/clipfrac",
    "losses/explained_variance",
]


@dataclass
class Script:
    """A script and how to test it; `values` and `acts` read its global variables after training."""

    name: str
    env_id: str
    quick: str  # flags of a run that takes gradient steps within seconds
    tags: list[str]  # metrics that such a run must have logged
    probe: str = ""  # flags to learn a probe environment
    no_probe: str = ""  # why it has no probe
    probe_suffix: str = ""  # Continuous, Pixels, Masked or Parts
    probes: list[str] = field(
        default_factory=lambda: ["Constant", "Cue", "Discount", "Action", "Both", "Truncation"]
    )
    values: Callable[[dict[str, Any], np.ndarray], np.ndarray] | None = None  # (n, *obs) -> (n,)
    acts: Callable[[dict[str, Any], np.ndarray], np.ndarray] | None = None  # greedy actions
    tolerance: float = 0.1  # of a probe's values
    needs: list[str] = field(default_factory=list)  # packages without which it is skipped
    video: bool = True
    replays: bool = True  # its environments can be saved: checkpoints change nothing
    checkpoints: int = 3  # of the run that is killed and resumed
    discrete: bool = True
    prepare: Callable[[str], None] = lambda env_id: None  # makes files that a run needs

    def __str__(self) -> str:
        return self.name


def torch_call(function: Callable, obs: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return function(torch.as_tensor(obs)).numpy()


PPO_CONTINUOUS_QUICK = (
    "--total-timesteps 2048 --num-envs 2 --num-steps 64 --num-minibatches 2 --update-epochs 2"
)
PPO_CONTINUOUS_PROBE = (
    "--total-timesteps 8000 --learning-rate 0.005 --num-envs 4 --num-steps 32"
    " --num-minibatches 4 --update-epochs 4"
)

DQN_TAGS = ["charts/SPS", "losses/td_loss", "losses/q_values"]
PQN_TAGS = ["charts/learning_rate", "charts/epsilon", *DQN_TAGS]
C51_TAGS = ["charts/SPS", "losses/loss", "losses/q_values"]
DQN_QUICK = "--learning-starts 100 --train-frequency 10 --buffer-size 700 --batch-size 16"
DQN_PROBE = (
    "--total-timesteps 1500 --learning-starts 100 --train-frequency 2 --learning-rate 0.003"
    " --target-network-frequency 30 --buffer-size 2000"
)
DQN_PIXELS_PROBE = (
    "--total-timesteps 400 --learning-starts 50 --train-frequency 2 --learning-rate 0.0003"
    " --target-network-frequency 16 --buffer-size 1000 --exploration-fraction 1"
)
C51_PROBE = "--v-min -20 --v-max 20 --n-atoms 41"


def unscaled_values(variables: dict[str, Any], obs: np.ndarray) -> np.ndarray:
    """The critic's values, scaled back to the original rewards."""
    scale = float(variables["return_stats"].std)
    return scale * torch_call(variables["agent"].get_value, obs)


ATARI_QUICK = "--total-timesteps 320 --num-steps 20 --num-minibatches 2 --update-epochs 1"
# games of at most 200 frames, 50 steps: training and evaluation see several whole episodes
SHORT_GAMES = "--env-kwargs max_num_frames_per_episode=200"
SHORT_ATARI_QUICK = (
    f"--total-timesteps 192 --num-steps 16 --num-minibatches 2 --update-epochs 1 {SHORT_GAMES}"
)
ATARI_PROBE = (
    "--total-timesteps 1280 --num-steps 8 --num-minibatches 1 --learning-rate 0.001 --ent-coef 0"
)
PROCGEN_QUICK = "--total-timesteps 192 --num-envs 2 --num-steps 8 --num-minibatches 2"
PROCGEN_NEEDS = ["envpool", "envpool.procgen.procgen_envpool"]  # the second needs Qt


def lstm_values(variables: dict[str, Any], obs: np.ndarray) -> np.ndarray:
    """Values of the first observations of episodes."""
    agent = variables["agent"]
    first = np.ones(len(obs), bool)

    def value(obs: Any) -> Any:
        _, state = agent.act(obs, agent.initial_state(len(obs)), obs.new_tensor(first).bool())
        return agent.critic(state[0]).squeeze(-1)

    return torch_call(value, obs)


def recurrent_actions(variables: dict[str, Any], obs: np.ndarray) -> np.ndarray:
    """Greedy actions of a recurrent agent for the first observations of episodes."""
    agent = variables["agent"]
    state = agent.initial_state(len(obs))
    return torch_call(lambda obs: agent.act(obs, state, state[0, :, 0] == 0)[0], obs)


def trxl_of(variables: dict[str, Any], obs: np.ndarray, what: Callable) -> np.ndarray:
    """`what` of the actions and hidden states for the first observations of episodes."""
    agent = variables["agent"]
    step = lambda obs: agent.step(obs, *agent.initial_state(len(obs)), greedy=True)[:2]  # noqa: E731
    return torch_call(lambda obs: what(agent, *step(obs)), obs)


DDPG_TAGS = ["charts/episodic_return", "charts/episodic_length", "charts/SPS"]
DDPG_TAGS += ["losses/qf1_values", "losses/qf1_loss", "losses/actor_loss"]
TD3_TAGS = [*DDPG_TAGS, "losses/qf2_values", "losses/qf2_loss", "losses/qf_loss"]
QUANTILE_TAGS = [f"losses/{x}" for x in ("qf_values", "qf_loss", "actor_loss", "alpha")]
OFF_POLICY_QUICK = (
    "--total-timesteps 600 --learning-starts 200 --num-envs 2 --batch-size 16 --buffer-size 500"
)
OFF_POLICY_PROBE = (
    "--total-timesteps 1200 --learning-starts 200 --batch-size 64 --buffer-size 2000 --tau 0.1"
)


# Values with running statistics fluctuate: a tolerance of 0.2, too much for Discount; that the
# policy climbs its critics is in tests/test_crossq.py.
CROSSQ_PROBE = (
    "--total-timesteps 1200 --learning-starts 200 --batch-size 256 --buffer-size 2000"
    " --critic-width 64 --no-autotune --alpha 0.001"
)
DROQ_PROBE = (
    "--total-timesteps 600 --learning-starts 200 --batch-size 64 --buffer-size 2000 --tau 0.05"
    " --utd-ratio 4 --q-lr 0.001 --policy-lr 0.001 --no-autotune --alpha 0.001"
)


def critic_values(variables: dict[str, Any], obs: np.ndarray) -> np.ndarray:
    """Values of the policy's actions; with two critics, the smaller one."""
    agent = variables["agent"]

    def value(obs: Any) -> Any:
        critics = agent.critics if hasattr(agent, "critics") else agent.critic
        values = critics(obs, agent.actor.act(obs))
        return values.amin(0) if values.ndim == 2 else values

    return torch_call(value, obs)


def quantile_values(variables: dict[str, Any], obs: np.ndarray) -> np.ndarray:
    """Means of all quantiles for the policy's actions."""
    agent = variables["agent"]
    return torch_call(lambda obs: agent.critics(obs, agent.actor.act(obs)).mean((0, 2)), obs)


def unscaled_critic_values(variables: dict[str, Any], obs: np.ndarray) -> np.ndarray:
    """critic_values of critics that learn from normalised observations and scaled rewards."""
    agent = variables["agent"]

    def value(obs: Any) -> Any:
        q_values = agent.critics(agent.actor.normalise(obs), agent.actor.act(obs))[1]
        return agent.actor.reward_scale * q_values.amin(0)

    return torch_call(value, obs)


def jax_actions(variables: dict[str, Any], obs: np.ndarray) -> np.ndarray:
    """Greedy actions of a JAX policy."""
    return variables["agent"].act(obs)


def jax_critic_values(variables: dict[str, Any], obs: np.ndarray) -> np.ndarray:
    """critic_values for JAX."""
    state = variables["training"].state
    critics = state.critics if hasattr(state, "critics") else state.critic
    values = np.asarray(critics.apply_fn(critics.params, obs, jax_actions(variables, obs)))
    return values.min(0) if values.ndim == 2 else values


def jax_q_values(variables: dict[str, Any], obs: np.ndarray) -> np.ndarray:
    """Q-values of the best actions."""
    agent = variables["agent"]
    method = "q_values" if hasattr(agent.network, "q_values") else "__call__"
    return np.asarray(agent.network.apply(agent.params, obs, method=method)).max(1)


def untrained_teacher(name: str, env_id: str) -> None:
    """Write an untrained model of dqn_atari or dqn_atari_jax, always the same, as a teacher."""
    import gymnasium as gym
    import torch

    from cleanrl_utils.running.evaluation import import_script, save_model

    torch.manual_seed(0)
    module = import_script(name)
    args = module.Args(env_id=env_id, exp_name=name)
    envs = gym.vector.SyncVectorEnv([module.make_env(env_id, 1, 0, False, "")])
    if name == "dqn_atari":
        agent = module.QNetwork(envs)
    else:
        agent = module.Agent.from_args(envs, args)
        agent.params = module.init(args, envs).q_network.params
    envs.close()
    save_model(Path("teacher.cleanrl_model"), agent, args, name)


QDAGGER_TAGS = ["charts/teacher/avg_episodic_return", "charts/offline/avg_episodic_return"]
QDAGGER_TAGS += ["charts/teacher/episodic_return", "charts/episodic_return", "charts/epsilon"]
QDAGGER_TAGS += [f"charts/offline/{name}" for name in ("loss", "q_loss", "distill_loss")]
QDAGGER_TAGS += [*DQN_TAGS, "losses/loss", "losses/distill_loss", "charts/distill_coeff"]
TEACHER = "--teacher-model teacher.cleanrl_model --teacher-eval-episodes 2"
QDAGGER_QUICK = (
    f"{TEACHER} --teacher-steps 90 --offline-steps 12 --total-timesteps 100 --num-envs 2"
    " --learning-starts 20 --train-frequency 20 --buffer-size 100 --batch-size 2"
)

SCRIPTS = [
    Script(
        name="ppo",
        env_id="CartPole-v1",
        checkpoints=100,
        quick="--total-timesteps 2048 --num-steps 64",
        tags=PPO_TAGS,
        probe="--total-timesteps 4000 --learning-rate 0.005 --num-steps 32 --ent-coef 0",
        values=lambda g, obs: torch_call(g["agent"].get_value, obs),
        acts=lambda g, obs: torch_call(g["agent"].act, obs),
    ),
    Script(
        name="ppo_action_mask",
        env_id="probes:ProbeTruncationMasked-v0",
        quick="--total-timesteps 2048 --num-steps 64",
        tags=PPO_TAGS,
        probe="--total-timesteps 4000 --learning-rate 0.005 --num-steps 32 --ent-coef 0",
        probe_suffix="Masked",
        probes=["Both", "Truncation"],
        values=lambda g, obs: torch_call(g["agent"].get_value, obs),
        acts=lambda g, obs: torch_call(g["agent"].act, obs) % 2,
    ),
    Script(
        name="ppo_multi_input",
        env_id="probes:ProbeTruncationParts-v0",
        quick="--total-timesteps 1024 --num-steps 64",
        tags=PPO_TAGS,
        probe="--total-timesteps 4000 --learning-rate 0.003 --num-steps 32 --ent-coef 0",
        probe_suffix="Parts",
        probes=["Both", "Truncation"],
        values=lambda g, obs: torch_call(g["agent"].get_value, obs),
        acts=lambda g, obs: torch_call(g["agent"].act, obs)[:, 0],
    ),
    Script(
        name="ppo_atari",
        env_id="BreakoutNoFrameskip-v4",
        checkpoints=100,
        quick=f"{SHORT_ATARI_QUICK} --num-envs 2",
        tags=PPO_TAGS,
        probe=f"{ATARI_PROBE} --num-envs 4",
        probe_suffix="Pixels",
        probes=["Both", "Truncation"],
        values=lambda g, obs: torch_call(g["agent"].get_value, obs),
        acts=lambda g, obs: torch_call(g["agent"].act, obs),
        needs=["ale_py", "cv2"],
    ),
    Script(
        name="ppo_atari_lstm",
        env_id="BreakoutNoFrameskip-v4",
        quick=f"{SHORT_ATARI_QUICK} --num-envs 2",
        tags=PPO_TAGS,
        probe="--total-timesteps 1600 --num-steps 8 --num-minibatches 1 --learning-rate 0.0003"
        " --ent-coef 0 --num-envs 4 --no-clip-vloss",
        probe_suffix="Pixels",
        probes=["Truncation"],
        values=lstm_values,
        needs=["ale_py", "cv2"],
    ),
    Script(
        name="ppo_recurrent",
        env_id="cleanrl_utils.environments.memory:CartPoleNoVel-v1",
        checkpoints=100,
        quick="--total-timesteps 2048 --num-envs 4 --num-steps 64 --num-minibatches 2",
        tags=PPO_TAGS,
        probe="--total-timesteps 6000 --learning-rate 0.005 --num-envs 8 --num-steps 12"
        " --reward-scale 1",
        # not Discount: its second cue never begins an episode, where values are compared
        probes=["Constant", "Cue", "Action", "Both", "Truncation"],
        values=lstm_values,
        acts=recurrent_actions,
    ),
    Script(
        name="ppo_trxl",
        env_id="MortarMayhem-Grid-v0",
        checkpoints=100,
        quick=f"{ATARI_QUICK} --num-envs 2 --torch-threads 1 --trxl-dim 32 --trxl-num-layers 2"
        " --trxl-memory-length 16",
        tags=[*PPO_TAGS, "charts/entropy_coefficient", "losses/reconstruction_loss"]
        + [f"episode/{x}_mean" for x in ("r", "l", "value", "advantage")],
        probe="--total-timesteps 6400 --anneal-steps 6400 --init-lr 0.005 --final-lr 0.0005"
        " --num-envs 8 --num-steps 12 --num-minibatches 4 --update-epochs 4 --no-clip-vloss"
        " --max-grad-norm 10 --trxl-dim 32 --trxl-num-layers 1 --trxl-memory-length 6"
        " --torch-threads 1",
        probes=["Both", "Truncation"],
        values=lambda g, obs: trxl_of(g, obs, lambda agent, _, h: agent.critic(h).squeeze(-1)),
        acts=lambda g, obs: trxl_of(g, obs, lambda agent, actions, _: actions),
        needs=["memory_gym"],
    ),
    Script(
        name="ppo_atari_envpool",
        no_probe="EnvPool's environments; the update is that of ppo_atari",
        env_id="Breakout-v5",
        replays=False,
        quick=f"{ATARI_QUICK} --num-envs 2",
        tags=[*PPO_TAGS, "charts/avg_episodic_return"],
        needs=["ale_py", "cv2", "envpool"],
    ),
    Script(
        name="ppo_procgen",
        no_probe="EnvPool's environments; its own are in tests/test_procgen.py",
        env_id="starpilot",
        replays=False,
        quick=f"{PROCGEN_QUICK} --update-epochs 1",
        tags=PPO_TAGS,
        needs=PROCGEN_NEEDS,
    ),
    Script(
        name="ppg_procgen",
        no_probe="EnvPool's environments; its own are in tests/test_procgen.py",
        env_id="starpilot",
        replays=False,
        quick=f"{PROCGEN_QUICK} --n-iteration 2 --e-auxiliary 1 --num-aux-rollouts 2",
        tags=[*PPO_TAGS, *(f"losses/aux/{x}_loss" for x in ("kl", "aux_value", "real_value"))],
        needs=PROCGEN_NEEDS,
    ),
    Script(
        name="ppo_rnd_envpool",
        no_probe="EnvPool's environments; its own are in tests/test_rnd.py",
        env_id="Breakout-v5",
        replays=False,
        quick=f"{ATARI_QUICK} --num-envs 2 --num-iterations-obs-norm-init 1",
        tags=[
            *(*PPO_TAGS, "charts/avg_episodic_return"),
            *("charts/episode_curiosity_reward", "losses/fwd_loss"),
        ],
        needs=["ale_py", "cv2", "envpool"],
    ),
    Script(
        name="ppo_pettingzoo_ma_atari",
        no_probe="games for two; its own are in tests/test_multi_agent.py",
        env_id="players:Which",
        quick=f"{ATARI_QUICK} --num-envs 2 --torch-threads 1",
        tags=[
            *PPO_TAGS,
            *(f"charts/episodic_{x}-player{i}" for x in ("return", "length") for i in (0, 1)),
        ],
        needs=["cv2"],
    ),
    *(
        Script(
            name=name,
            no_probe="EnvPool's environments; tests/test_jax_envpool.py has the masks",
            env_id="Breakout-v5",
            replays=False,
            quick=f"{ATARI_QUICK} --num-envs 2 --total-timesteps 600",  # so that a game ends
            tags=[*PPO_TAGS, "charts/avg_episodic_return", "charts/avg_episodic_length"],
            needs=["ale_py", "cv2", "envpool", "jax"],
        )
        for name in ("ppo_atari_envpool_xla_jax", "ppo_atari_envpool_xla_jax_scan")
    ),
    Script(
        name="ppo_atari_multigpu",
        env_id="BreakoutNoFrameskip-v4",
        quick=f"{SHORT_ATARI_QUICK} --local-num-envs 2",
        tags=PPO_TAGS,
        probe=f"{ATARI_PROBE} --local-num-envs 4",
        probe_suffix="Pixels",
        probes=["Both"],
        values=lambda g, obs: torch_call(g["agent"].get_value, obs),
        acts=lambda g, obs: torch_call(g["agent"].act, obs),
        needs=["ale_py", "cv2"],
    ),
    Script(
        name="ppo_continuous_action",
        env_id="probes:ProbeBothContinuous-v0",
        checkpoints=100,
        quick=PPO_CONTINUOUS_QUICK,
        tags=PPO_TAGS,
        probe=PPO_CONTINUOUS_PROBE,
        probe_suffix="Continuous",
        # not Constant: a reward that never varies has no scale to be divided by
        probes=["Cue", "Discount", "Action", "Both", "Truncation"],
        values=unscaled_values,
        acts=lambda g, obs: torch_call(g["agent"].act, obs),
        discrete=False,
    ),
    Script(
        name="rpo_continuous_action",
        env_id="probes:ProbeBothContinuous-v0",
        quick=PPO_CONTINUOUS_QUICK,
        tags=PPO_TAGS,
        probe=PPO_CONTINUOUS_PROBE,
        probe_suffix="Continuous",
        probes=["Cue", "Truncation"],
        values=unscaled_values,
        discrete=False,
    ),
    Script(
        name="sac_continuous_action",
        env_id="Pendulum-v1",
        checkpoints=100,
        quick=OFF_POLICY_QUICK,
        tags=[*TD3_TAGS, "losses/alpha", "losses/alpha_loss"],
        probe=f"{OFF_POLICY_PROBE} --q-lr 0.001 --policy-lr 0.001 --no-autotune --alpha 0.001",
        probe_suffix="Continuous",
        probes=["Cue", "Discount", "Both", "Truncation"],
        values=critic_values,
        acts=lambda g, obs: torch_call(g["agent"].actor.act, obs),
        discrete=False,
    ),
    Script(
        name="tqc_continuous_action",
        env_id="Pendulum-v1",
        quick=f"{OFF_POLICY_QUICK} --critic-width 16 --n-critics 3 --n-quantiles 5",
        tags=[*DDPG_TAGS[:3], *QUANTILE_TAGS],
        probe=f"{OFF_POLICY_PROBE} --q-lr 0.001 --policy-lr 0.001 --no-autotune --alpha 0.001"
        " --critic-width 64 --n-critics 2 --n-quantiles 5 --top-quantiles-to-drop-per-net 1",
        probe_suffix="Continuous",
        probes=["Discount", "Both", "Truncation"],
        values=quantile_values,
        acts=lambda g, obs: 2 * torch_call(g["agent"].actor.act, obs),  # the bounds are -2 and 2
        discrete=False,
    ),
    Script(
        name="simbav2_continuous_action",
        env_id="Pendulum-v1",
        quick=f"{OFF_POLICY_QUICK} --critic-width 16",
        tags=[*DDPG_TAGS[:3], *QUANTILE_TAGS],
        # atoms up to 10 standard deviations: the value of Truncation is larger than all returns
        probe=f"{OFF_POLICY_PROBE} --learning-rate 0.003 --final-lr 0.0003 --no-autotune"
        " --alpha 0.001 --critic-width 32 --max-return 10",
        probe_suffix="Continuous",
        probes=["Discount", "Both", "Truncation"],
        values=unscaled_critic_values,
        acts=lambda g, obs: 2 * torch_call(g["agent"].actor.act, obs),
        discrete=False,
    ),
    Script(
        name="crossq_continuous_action",
        env_id="Pendulum-v1",
        quick=f"{OFF_POLICY_QUICK} --critic-width 64",
        tags=[*TD3_TAGS, "losses/alpha", "losses/alpha_loss"],
        probe=CROSSQ_PROBE,
        probe_suffix="Continuous",
        probes=["Cue", "Truncation"],
        tolerance=0.2,
        values=critic_values,
        acts=lambda g, obs: torch_call(g["agent"].actor.act, obs),
        discrete=False,
    ),
    Script(
        name="droq_continuous_action",
        env_id="Pendulum-v1",
        quick=f"{OFF_POLICY_QUICK} --utd-ratio 3",
        tags=[*TD3_TAGS, "losses/alpha", "losses/alpha_loss"],
        probe=DROQ_PROBE,
        probe_suffix="Continuous",
        probes=["Discount", "Both", "Truncation"],
        values=critic_values,
        acts=lambda g, obs: torch_call(g["agent"].actor.act, obs),
        discrete=False,
    ),
    Script(
        name="sac_atari",
        env_id="BreakoutNoFrameskip-v4",
        quick="--total-timesteps 400 --learning-starts 200 --num-envs 2 --torch-threads 1"
        " --batch-size 4 --buffer-size 300 --update-frequency 10 --target-network-frequency 50"
        f" {SHORT_GAMES}",
        tags=[*(tag for tag in TD3_TAGS if "episodic" not in tag), "losses/alpha"],
        # the policy learns slowly, after the critics: what has become certain hardly changes
        probe="--total-timesteps 400 --learning-starts 100 --torch-threads 1 --batch-size 32"
        " --buffer-size 1000 --q-lr 0.0005 --policy-lr 0.00003 --update-frequency 2"
        " --target-network-frequency 4 --tau 0.5 --no-autotune --alpha 0.03",
        probe_suffix="Pixels",
        probes=["Both", "Truncation"],
        values=lambda g, obs: torch_call(g["agent"].critics, obs).min(0).max(1),
        acts=lambda g, obs: torch_call(g["agent"].actor.act, obs),
        needs=["ale_py", "cv2"],
    ),
    Script(
        name="td3_continuous_action",
        env_id="Pendulum-v1",
        quick=OFF_POLICY_QUICK,
        tags=TD3_TAGS,
        probe=f"{OFF_POLICY_PROBE} --learning-rate 0.001",
        probe_suffix="Continuous",
        probes=["Discount", "Both", "Truncation"],
        values=critic_values,
        acts=lambda g, obs: torch_call(g["agent"].actor.act, obs),
        discrete=False,
    ),
    Script(
        name="ddpg_continuous_action",
        env_id="Pendulum-v1",
        quick=OFF_POLICY_QUICK,
        tags=DDPG_TAGS,
        probe=f"{OFF_POLICY_PROBE} --learning-rate 0.001",
        probe_suffix="Continuous",
        probes=["Both", "Truncation"],
        values=critic_values,
        acts=lambda g, obs: torch_call(g["agent"].actor.act, obs),
        discrete=False,
    ),
    Script(
        name="dqn",
        env_id="CartPole-v1",
        checkpoints=100,
        quick=f"--total-timesteps 1200 --num-envs 2 --target-network-frequency 50 {DQN_QUICK}",
        tags=[*DQN_TAGS, "charts/episodic_return", "charts/episodic_length"],
        probe=DQN_PROBE,
        values=lambda g, obs: torch_call(g["q_network"], obs).max(1),
        acts=lambda g, obs: torch_call(g["q_network"].act, obs),
    ),
    Script(
        name="c51",
        env_id="CartPole-v1",
        checkpoints=100,
        quick=f"--total-timesteps 1200 --num-envs 2 --target-network-frequency 50 {DQN_QUICK}",
        tags=[*C51_TAGS, "charts/episodic_return", "charts/episodic_length"],
        probe=f"{DQN_PROBE} {C51_PROBE}",
        values=lambda g, obs: torch_call(g["q_network"], obs).max(1),
        acts=lambda g, obs: torch_call(g["q_network"].act, obs),
    ),
    Script(
        name="dqn_atari",
        env_id="BreakoutNoFrameskip-v4",
        quick=f"--total-timesteps 240 --num-envs 2 --torch-threads 1 {DQN_QUICK} {SHORT_GAMES}",
        tags=DQN_TAGS,
        probe=f"{DQN_PIXELS_PROBE} --batch-size 32 --torch-threads 1",
        probe_suffix="Pixels",
        probes=["Both", "Truncation"],
        values=lambda g, obs: torch_call(g["q_network"], obs).max(1),
        acts=lambda g, obs: torch_call(g["q_network"].act, obs),
        needs=["ale_py", "cv2"],
    ),
    Script(
        name="c51_atari",
        env_id="BreakoutNoFrameskip-v4",
        quick=f"--total-timesteps 240 --num-envs 2 --torch-threads 1 {DQN_QUICK} {SHORT_GAMES}",
        tags=C51_TAGS,
        probe=f"{DQN_PIXELS_PROBE} {C51_PROBE} --batch-size 32 --torch-threads 1",
        probe_suffix="Pixels",
        probes=["Both"],
        values=lambda g, obs: torch_call(g["q_network"], obs).max(1),
        acts=lambda g, obs: torch_call(g["q_network"].act, obs),
        needs=["ale_py", "cv2"],
    ),
    Script(
        name="rainbow_atari",
        env_id="BreakoutNoFrameskip-v4",
        quick=f"--total-timesteps 240 --num-envs 2 --torch-threads 1 {DQN_QUICK} {SHORT_GAMES}",
        tags=C51_TAGS,
        probe=f"{DQN_PIXELS_PROBE} {C51_PROBE} --batch-size 16 --torch-threads 1"
        " --total-timesteps 280",
        probe_suffix="Pixels",
        probes=["Both", "Truncation"],
        values=lambda g, obs: torch_call(partial(g["q_network"], noisy=False), obs).max(1),
        acts=lambda g, obs: torch_call(g["q_network"].act, obs),
        needs=["ale_py", "cv2"],
    ),
    Script(
        name="sac_continuous_action_jax",
        env_id="Pendulum-v1",
        quick=OFF_POLICY_QUICK,
        tags=[*TD3_TAGS, "losses/alpha", "losses/alpha_loss"],
        probe=f"{OFF_POLICY_PROBE} --q-lr 0.001 --policy-lr 0.001 --no-autotune --alpha 0.001",
        probe_suffix="Continuous",
        probes=["Both", "Truncation"],
        values=jax_critic_values,
        acts=jax_actions,
        needs=["flax"],
        discrete=False,
    ),
    Script(
        name="crossq_continuous_action_jax",
        env_id="Pendulum-v1",
        quick=f"{OFF_POLICY_QUICK} --critic-width 64",
        tags=[*TD3_TAGS, "losses/alpha", "losses/alpha_loss"],
        probe=CROSSQ_PROBE,
        probe_suffix="Continuous",
        probes=["Cue", "Truncation"],
        tolerance=0.2,
        values=jax_critic_values,
        acts=jax_actions,
        needs=["flax"],
        discrete=False,
    ),
    Script(
        name="td3_continuous_action_jax",
        env_id="Pendulum-v1",
        quick=OFF_POLICY_QUICK,
        tags=TD3_TAGS,
        probe=f"{OFF_POLICY_PROBE} --learning-rate 0.001",
        probe_suffix="Continuous",
        probes=["Both", "Truncation"],
        values=jax_critic_values,
        acts=jax_actions,
        needs=["flax"],
        discrete=False,
    ),
    Script(
        name="ddpg_continuous_action_jax",
        env_id="Pendulum-v1",
        quick=OFF_POLICY_QUICK,
        tags=DDPG_TAGS,
        probe=f"{OFF_POLICY_PROBE} --learning-rate 0.001",
        probe_suffix="Continuous",
        probes=["Both", "Truncation"],
        values=jax_critic_values,
        acts=jax_actions,
        needs=["flax"],
        discrete=False,
    ),
    Script(
        name="dqn_jax",
        env_id="CartPole-v1",
        checkpoints=100,
        quick=f"--total-timesteps 1200 --num-envs 2 --target-network-frequency 50 {DQN_QUICK}",
        tags=[*DQN_TAGS, "charts/episodic_return", "charts/episodic_length"],
        probe=DQN_PROBE,
        values=jax_q_values,
        acts=jax_actions,
        needs=["flax"],
    ),
    Script(
        name="c51_jax",
        env_id="CartPole-v1",
        quick=f"--total-timesteps 1200 --num-envs 2 --target-network-frequency 50 {DQN_QUICK}",
        tags=[*C51_TAGS, "charts/episodic_return", "charts/episodic_length"],
        probe=f"{DQN_PROBE} {C51_PROBE}",
        values=jax_q_values,
        acts=jax_actions,
        needs=["flax"],
    ),
    Script(
        name="dqn_atari_jax",
        env_id="BreakoutNoFrameskip-v4",
        quick=f"--total-timesteps 240 --num-envs 2 {DQN_QUICK} {SHORT_GAMES}",
        tags=DQN_TAGS,
        probe=f"{DQN_PIXELS_PROBE} --batch-size 8",
        probe_suffix="Pixels",
        probes=["Both", "Truncation"],
        values=jax_q_values,
        acts=jax_actions,
        needs=["ale_py", "cv2", "flax"],
    ),
    Script(
        name="c51_atari_jax",
        env_id="BreakoutNoFrameskip-v4",
        quick=f"--total-timesteps 240 --num-envs 2 {DQN_QUICK} {SHORT_GAMES}",
        tags=C51_TAGS,
        probe=f"{DQN_PIXELS_PROBE} {C51_PROBE} --batch-size 8",
        probe_suffix="Pixels",
        probes=["Both"],
        values=jax_q_values,
        acts=jax_actions,
        needs=["ale_py", "cv2", "flax"],
    ),
    Script(
        name="qdagger_dqn_atari_impalacnn",
        no_probe="needs a teacher; its own are in tests/test_qdagger.py",
        env_id="probes:ProbeTruncationPixels-v0",
        quick=f"{QDAGGER_QUICK} --torch-threads 1",
        tags=QDAGGER_TAGS,
        needs=["cv2"],
        prepare=partial(untrained_teacher, "dqn_atari"),
    ),
    Script(
        name="qdagger_dqn_atari_jax_impalacnn",
        no_probe="needs a teacher; its own are in tests/test_qdagger.py",
        env_id="probes:ProbeTruncationPixels-v0",
        quick=QDAGGER_QUICK,
        tags=QDAGGER_TAGS,
        needs=["cv2", "flax"],
        prepare=partial(untrained_teacher, "dqn_atari_jax"),
    ),
    Script(
        name="ppo_jax",
        no_probe="gymnax's environments; its own are in tests/test_jax_ppo.py",
        env_id="CartPole-v1",
        quick="--total-timesteps 4096 --num-steps 64",
        tags=PPO_TAGS,
        needs=["gymnax"],
    ),
    Script(
        name="pqn",
        env_id="CartPole-v1",
        checkpoints=100,
        quick="--total-timesteps 2048 --num-steps 64",
        tags=[*PQN_TAGS, "charts/episodic_return", "charts/episodic_length"],
        probe="--total-timesteps 4000 --learning-rate 0.005 --num-steps 32",
        values=lambda g, obs: torch_call(g["q_network"], obs).max(1),
        acts=lambda g, obs: torch_call(g["q_network"].act, obs),
    ),
    *(
        Script(
            name=name,
            no_probe="EnvPool's environments; probes of its own are in tests/test_pqn.py",
            env_id="Breakout-v5",
            replays=False,
            quick=f"{ATARI_QUICK} --num-envs 2 --total-timesteps 480",
            tags=[*PQN_TAGS, "charts/avg_episodic_return"],
            needs=["ale_py", "cv2", "envpool"],
        )
        for name in ("pqn_atari_envpool", "pqn_atari_envpool_lstm")
    ),
    Script(
        name="pqn_jax",
        no_probe="gymnax's environments; probes of its own are in tests/test_pqn_jax.py",
        env_id="CartPole-v1",
        quick="--total-timesteps 4096 --num-envs 4 --num-steps 64 --num-minibatches 4",
        tags=PQN_TAGS,
        needs=["gymnax"],
    ),
    Script(
        name="ppo_continuous_action_isaacgym",
        no_probe="Brax's environments; resets are in tests/test_isaacgym.py",
        env_id="Cartpole",
        quick="--total-timesteps 1024 --num-envs 8 --num-steps 8",
        tags=PPO_TAGS,
        needs=["brax"],
        discrete=False,
    ),
    Script(
        name="ppo_continuous_action_brax_jax",
        no_probe="Brax's environments; its loss is in tests/test_jax_ppo.py",
        env_id="inverted_pendulum",
        quick="--total-timesteps 512 --num-envs 4 --num-steps 8 --num-minibatches 2",
        tags=PPO_TAGS,
        needs=["brax"],
        discrete=False,
    ),
    Script(
        name="fast_td3_continuous_action_jax",
        no_probe="Brax's environments; probes of its own are in tests/test_fast_td3.py",
        env_id="inverted_pendulum",
        quick="--total-timesteps 840 --num-envs 4 --segment-steps 40 --learning-starts 40"
        " --batch-size 16 --buffer-size 400 --actor-width 16 --critic-width 16",
        tags=TD3_TAGS,
        needs=["brax"],
        discrete=False,
    ),
]
