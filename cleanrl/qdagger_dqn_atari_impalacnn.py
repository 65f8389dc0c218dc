"""QDagger for Atari games: a DQN student with IMPALA's network learns from a DQN teacher.

    python cleanrl/qdagger_dqn_atari_impalacnn.py --teacher-model dqn_atari.cleanrl_model

Paper: https://arxiv.org/abs/2206.01626. Every detail with its reason: docs/rl-algorithms/qdagger.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from cleanrl_utils.environments import atari_wrappers as atari
from cleanrl_utils.environments.making import is_atari, make, require_spaces
from cleanrl_utils.environments.vector import AsyncVectorEnv, SyncVectorEnv
from cleanrl_utils.replay.buffers import FrameReplayBuffer, make_memory
from cleanrl_utils.running.evaluation import load_teacher
from cleanrl_utils.running.metrics import Means
from cleanrl_utils.running.rng import derive_seed
from cleanrl_utils.running.run import PixelArgs, Run, parse_args, require
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share


@dataclass
class Args(PixelArgs):
    env_id: str = "BreakoutNoFrameskip-v4"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 10_000_000
    """number of environment steps of the student, after those of the teacher and the offline phase
"""
    learning_rate: NonNegative = 1e-4
    """learning rate of Adam"""
    num_envs: Count = 1
    """number of parallel environments; other settings count steps of single environments"""
    buffer_size: Count = 1_000_000
    """number of transitions in the replay memory; 1,000,000 take 6.6 GiB"""
    buffer_device: Literal["auto", "cpu", "cuda"] = "auto"
    """device of the replay memory; auto: the networks' device, if it has room"""
    gamma: Share = 0.99
    """discount factor"""
    tau: Share = 1.0
    """coefficient of the soft update of the target network: 1 copies the network"""
    target_network_frequency: Count = 1000
    """update the target network every this many steps"""
    batch_size: Count = 32
    """number of transitions per gradient step"""
    start_e: Share = 1
    """probability of a random action at the start (epsilon)"""
    end_e: Share = 0.01
    """probability of a random action at the end of exploration (epsilon)"""
    exploration_fraction: Share = 0.1
    """fraction of --total-timesteps over which epsilon falls from --start-e to --end-e"""
    learning_starts: Natural = 80_000
    """number of steps before the first gradient step"""
    train_frequency: Count = 4
    """number of steps per gradient step"""
    teacher_model: str | None = None
    """model file of the teacher, trained with dqn_atari.py or this script"""
    teacher_policy_hf_repo: str | None = None
    """repository of the teacher on the Hugging Face hub, as entity/name; unset, and no
    --teacher-model: cleanrl/ENV_ID-EXP_NAME-seed1"""
    teacher_model_exp_name: str = "dqn_atari"
    """experiment name of the teacher on the Hugging Face hub"""
    teacher_eval_episodes: Count = 10
    """number of episodes that evaluate the teacher, and the student in the offline phase"""
    teacher_steps: Count = 500_000
    """number of environment steps with which the teacher fills the replay memory"""
    offline_steps: Natural = 500_000
    """number of gradient steps of the offline phase"""
    temperature: NonNegative = 1.0
    """softmax temperature that turns Q-values into the policies of student and teacher"""
    distill_weight: NonNegative = 1.0
    """coefficient of the distillation loss; 0: the teacher only fills the memory"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.teacher_turns = self.teacher_steps // self.num_envs
        self.online_turn = self.teacher_turns + self.offline_steps  # the first one of the student
        self.num_turns = self.online_turn + self.total_timesteps // self.num_envs
        steps = self.teacher_turns * self.num_envs, self.offline_steps, self.total_timesteps
        self.phases = dict(zip(("teacher", "offline", "online"), steps, strict=True))
        require(min(steps) >= 0, "--teacher-steps and --offline-steps must not be negative")
        require(self.num_turns > self.online_turn, "--total-timesteps must be at least --num-envs")
        data = self.teacher_turns > 0 or self.offline_steps == 0
        require(data, "--offline-steps needs --teacher-steps of at least --num-envs to learn from")
        require(self.temperature > 0, "--temperature must be greater than 0")
        two = self.teacher_model is not None and self.teacher_policy_hf_repo is not None
        require(not two, "name one teacher: --teacher-model FILE or --teacher-policy-hf-repo NAME")
        enough = self.learning_starts >= self.num_envs  # for the first batch to be drawn from
        require(enough, f"--learning-starts must be at least --num-envs, {self.num_envs}")


# same as ppo_atari.py
def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment; the first of them may be filmed."""

    def thunk() -> gym.Env:
        # the wrappers skip frames, not the game; gray is fastest from the console itself
        game = {"frameskip": 1, "obs_type": "grayscale"} if is_atari(env_id) else {}
        film = video_folder if capture_video and idx == 0 else None
        env = make(env_id, film, **game, **env_kwargs)
        env = gym.wrappers.RecordEpisodeStatistics(env)  # of whole games, rewards unclipped
        if game:
            env = atari.NoopReset(env, noop_max=30)
            env = atari.MaxAndSkip(env, skip=4)
            env = atari.EpisodicLife(env)
            env = atari.FireReset(env)  # where a game has FIRE
        else:
            env = atari.Grayscale(env)
        env = atari.ClipReward(env)
        env = gym.wrappers.ResizeObservation(env, (84, 84))
        env = gym.wrappers.FrameStackObservation(env, 4)
        env.action_space.seed(seed)
        return env

    return thunk


# same as ppo_atari.py
def make_envs(args: Args, video_folder: str) -> gym.vector.VectorEnv:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored."""

    def one(i: int) -> Callable:
        seed = args.seed + i
        return make_env(args.env_id, seed, i, args.capture_video, video_folder, **args.env_settings)

    vector = AsyncVectorEnv if args.async_envs else SyncVectorEnv
    return vector([one(i) for i in range(args.num_envs)])


# same as ppo_procgen.py
class Residual(nn.Module):
    """What two convolutions add to their input."""

    def __init__(self, channels: int):
        super().__init__()
        convs = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        self.layers = nn.Sequential(nn.ReLU(), convs[0], nn.ReLU(), convs[1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


# same as ppo_procgen.py
def impala(channels: int, height: int, width: int) -> nn.Sequential:
    """The larger network of IMPALA's paper, https://arxiv.org/abs/1802.01561, without memory."""
    layers: list[nn.Module] = []
    for outputs in (16, 32, 32):
        conv = nn.Conv2d(channels, outputs, 3, padding=1)
        pool = nn.MaxPool2d(3, stride=2, padding=1)  # halves, and rounds up
        layers += [conv, pool, Residual(outputs), Residual(outputs)]
        channels, height, width = outputs, (height + 1) // 2, (width + 1) // 2
    last = nn.Linear(channels * height * width, 256)
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), last, nn.ReLU())


class QNetwork(nn.Sequential):
    """The value of every action, by IMPALA's residual network."""

    def __init__(self, envs: gym.vector.VectorEnv):
        network = impala(*envs.single_observation_space.shape)
        super().__init__(network, nn.Linear(256, envs.single_action_space.n))

    def forward(self, obs: Tensor) -> Tensor:
        return super().forward(obs / 255)  # of bytes, (batch, 4, 84, 84)

    def act(self, obs: Tensor, greedy: bool = True) -> Tensor:
        return self(obs).argmax(-1)  # exploration is the training loop's


# same as dqn.py
def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """From `start` at step 0 to `end` at step `duration`, and `end` from there on."""
    return end if step >= duration else start + (end - start) * step / duration


def act(
    q_values: Callable, obs: np.ndarray, epsilon: float, rng: np.random.Generator, num_actions: int
) -> np.ndarray:
    """The best actions, except where an environment explores, by a coin of its own."""
    explore = rng.random(len(obs)) < epsilon
    actions = rng.integers(num_actions, size=len(obs))
    if not explore.all():
        actions = np.where(explore, actions, np.asarray(q_values(obs)).argmax(-1))
    return actions


def get_distill_coeff(returns: np.ndarray, teacher_return: float, args: Args) -> float:
    """max(1 - student's / teacher's return, 0); 1 until the student has played enough episodes."""
    # by the size of the teacher's, so that a student below a teacher below 0 still learns from it
    behind = (teacher_return - returns.mean()) / (abs(teacher_return) or 1)
    return args.distill_weight * (1.0 if np.isnan(behind) else max(behind, 0.0))


def update(
    q_network: QNetwork,
    target_network: QNetwork,
    teacher: nn.Module,
    optimizer: optim.Optimizer,
    distill_coeff: Tensor,
    args: Args,
    *batch: Tensor,
) -> Tensor:
    """One gradient step; returns its losses and the mean of the predicted values."""
    obs, next_obs, actions, rewards, terminated = batch
    with torch.no_grad():
        # Only termination ends the sum of rewards; a truncated episode's next_obs is its own last.
        best_next = target_network(next_obs).amax(1)
        td_target = rewards + args.gamma * best_next * (1 - terminated)
        teacher_logprobs = (teacher(obs) / args.temperature).log_softmax(1)
    all_values = q_network(obs)
    q_values = all_values.gather(1, actions.unsqueeze(1)).squeeze(1)
    td_loss = F.mse_loss(q_values, td_target)
    # KL divergence from the student's policy to the teacher's: summed over actions, a mean over
    # the batch, like the TD loss
    logprobs = (all_values / args.temperature).log_softmax(1)
    distill_loss = (teacher_logprobs.exp() * (teacher_logprobs - logprobs)).sum(1).mean()
    loss = td_loss + distill_coeff * distill_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return torch.stack([loss, td_loss, distill_loss, q_values.mean()]).detach()


# same as dqn.py
@torch.no_grad()
def update_target(network: nn.Module, target_network: nn.Module, tau: float) -> None:
    """target = tau * network + (1 - tau) * target"""
    for target, source in zip(target_network.parameters(), network.parameters(), strict=True):
        target.lerp_(source, tau)


TAGS = ["losses/loss", "losses/td_loss", "losses/distill_loss", "losses/q_values"]
OFFLINE = ["charts/offline/loss", "charts/offline/q_loss", "charts/offline/distill_loss"]

if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    device = run.device
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Discrete, "sac_continuous_action.py")
    num_actions = envs.single_action_space.n

    teacher = load_teacher(args, envs, ["dqn_atari", run.script.stem], device)
    q_network, target_network = QNetwork(envs).to(device), QNetwork(envs).to(device)
    target_network.load_state_dict(q_network.state_dict())
    adam = dict(fused=True, capturable=device.type == "cuda")
    optimizer = optim.Adam(q_network.parameters(), args.learning_rate, **adam)
    memory = make_memory(FrameReplayBuffer, envs, args, device)
    teacher_q_values, q_values = run.inference(teacher), run.inference(q_network)
    sample = partial(memory.sample, args.batch_size)
    losses = Means(*TAGS)
    distill_coeff = torch.full((), args.distill_weight, device=device)
    networks = q_network, target_network, teacher
    update_networks = partial(update, *networks, optimizer, distill_coeff, args)
    learn = run.accelerate(update_networks, sample, losses)
    rng = np.random.default_rng(args.seed)
    teacher_return, returns = np.zeros(()), np.full(10, np.nan)  # the student's latest

    state = dict(q_network=q_network, target_network=target_network, optimizer=optimizer)
    state |= dict(teacher=teacher, memory=memory, losses=losses, distill_coeff=distill_coeff)
    state |= dict(rng=rng, teacher_return=teacher_return, recent_returns=returns)
    envs.reset(seed=args.seed)
    start = run.resume(args.num_turns, **state, envs=envs)
    obs, ended = envs.obs, envs.ended
    if start == 0:
        teacher_return[...] = np.mean(run.play(teacher, args.teacher_eval_episodes, args.end_e))
        run.log({"charts/teacher/avg_episodic_return": teacher_return}, 0)
        run.say(f"the teacher's mean return is {teacher_return:.2f}")

    # First phase: the teacher plays, with less and less chance, and fills the memory.
    for turn in range(start, args.teacher_turns):
        steps = turn * args.num_envs
        epsilon = linear_schedule(args.start_e, args.end_e, args.teacher_steps, steps)
        actions = act(teacher_q_values, obs, epsilon, rng, num_actions)
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        memory.add(obs, next_obs, actions, rewards, terminated, ~ended)
        obs, ended = next_obs, terminated | truncated
        run.log_episodes(infos, steps + args.num_envs, "teacher/")
        run.checkpoint(turn + 1)

    # Second phase: the student learns from what the teacher did, and from what it would do.
    for turn in range(max(start, args.teacher_turns), args.online_turn):
        learn()
        step = turn - args.teacher_turns + 1
        global_step = args.phases["teacher"] + step
        if step % args.target_network_frequency == 0:
            update_target(q_network, target_network, args.tau)
        if step % 100 == 0 or step == args.offline_steps:
            run.log(dict(zip(OFFLINE, losses.take().values(), strict=False)), global_step)
        if step % 100_000 == 0 or step == args.offline_steps:
            played = run.play(q_network, args.teacher_eval_episodes, args.end_e)
            run.log({"charts/offline/avg_episodic_return": np.mean(played)}, global_step)
        run.evaluate(q_network, global_step)
        run.checkpoint(turn + 1)

    # Third phase: the student plays itself, as DQN; the better it is, the less it is taught.
    for turn in range(max(start, args.online_turn), args.num_turns):
        if turn == args.online_turn:
            memory.clear()
            envs.reset(seed=derive_seed(args.seed, turn))
            obs, ended = envs.obs, envs.ended

        # Act.
        steps = (turn - args.online_turn) * args.num_envs
        exploring = args.exploration_fraction * args.total_timesteps  # steps
        epsilon = linear_schedule(args.start_e, args.end_e, exploring, args.offline_steps + steps)
        actions = act(q_values, obs, epsilon, rng, num_actions)

        # Learn, while a GPU can do so beside the environments' next step. Each environment's step
        # is counted, so that --num-envs changes neither the number of updates nor their order.
        for step in range(steps + 1, steps + args.num_envs + 1):
            global_step = args.phases["teacher"] + args.offline_steps + step
            learning = step > args.learning_starts
            if learning and step % args.train_frequency == 0:
                learn()
            if learning and step % args.target_network_frequency == 0:
                update_target(q_network, target_network, args.tau)
            if step % 100 == 0:
                charts = {"charts/epsilon": epsilon, "charts/distill_coeff": distill_coeff}
                run.log(losses.take() | charts, global_step)

        # Step, and remember it unless it only reset an environment whose episode had ended.
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        memory.add(obs, next_obs, actions, rewards, terminated, ~ended)
        obs, ended = next_obs, terminated | truncated
        run.log_episodes(infos, global_step)
        if "_episode" in infos:
            returns[:] = [*returns, *infos["episode"]["r"][infos["_episode"]]][-len(returns) :]
            distill_coeff.fill_(get_distill_coeff(returns, float(teacher_return), args))
        run.evaluate(q_network, global_step)
        run.checkpoint(turn + 1)

    run.finish(q_network)
