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
from cleanrl_utils.running.losses import Losses, Means
from cleanrl_utils.running.rng import derive_seed
from cleanrl_utils.running.run import PixelArgs, Run, parse_args, require
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share
from cleanrl_utils.speed.graphs import accelerate, capture
from cleanrl_utils.speed.inference import inference


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
    """number of parallel environments; other settings count steps summed over environments"""
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
    """number of steps of the online phase before its first gradient step"""
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

    # differs from dqn_atari.py: three phases
    def __post_init__(self) -> None:
        super().__post_init__()
        self.teacher_iterations = self.teacher_steps // self.num_envs
        self.online_start = self.teacher_iterations + self.offline_steps
        self.num_iterations = self.online_start + self.total_timesteps // self.num_envs
        steps = self.teacher_iterations * self.num_envs, self.offline_steps, self.total_timesteps
        self.phases = dict(zip(("teacher", "offline", "online"), steps, strict=True))
        require(min(steps) >= 0, "--teacher-steps and --offline-steps must not be negative")
        plays = self.num_iterations > self.online_start
        require(plays, "--total-timesteps must be at least --num-envs")
        data = self.teacher_iterations > 0 or self.offline_steps == 0
        require(data, "--offline-steps needs --teacher-steps of at least --num-envs to learn from")
        require(self.temperature > 0, "--temperature must be greater than 0")
        two = self.teacher_model is not None and self.teacher_policy_hf_repo is not None
        require(not two, "name one teacher: --teacher-model FILE or --teacher-policy-hf-repo NAME")
        enough = self.learning_starts >= self.num_envs  # for the first batch to be drawn from
        require(enough, f"--learning-starts must be at least --num-envs, {self.num_envs}")


def make_env(
    env_id: str, seed: int, idx: int, capture_video: bool, video_folder: str, **env_kwargs: Any
) -> Callable:
    """A function that makes one environment; the first of them may be filmed."""
    if is_atari(env_id):  # the wrappers skip frames, not the game; gray is fastest from ALE itself
        env_kwargs = {"frameskip": 1, "obs_type": "grayscale"} | env_kwargs

    def thunk() -> gym.Env:
        env = make(env_id, video_folder if capture_video and idx == 0 else None, **env_kwargs)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        if is_atari(env_id):
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


def make_envs(args: Args, video_folder: str) -> gym.vector.VectorEnv:
    """Next-step autoreset: the step after an episode's end only resets, its action is ignored."""
    kwargs = args.env_settings | {"capture_video": args.capture_video, "video_folder": video_folder}
    thunks = [make_env(args.env_id, args.seed + i, i, **kwargs) for i in range(args.num_envs)]
    return AsyncVectorEnv(thunks) if args.async_envs else SyncVectorEnv(thunks)


class Residual(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int):
        super().__init__()
        convs = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        self.layers = nn.Sequential(nn.ReLU(), convs[0], nn.ReLU(), convs[1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def impala(channels: int, height: int, width: int) -> nn.Sequential:
    """The larger network of IMPALA, https://arxiv.org/abs/1802.01561, without its LSTM."""
    layers: list[nn.Module] = []
    for outputs in (16, 32, 32):
        conv = nn.Conv2d(channels, outputs, 3, padding=1)
        pool = nn.MaxPool2d(3, stride=2, padding=1)  # halves, and rounds up
        layers += [conv, pool, Residual(outputs), Residual(outputs)]
        channels = outputs
        height = (height + 1) // 2
        width = (width + 1) // 2
    last = nn.Linear(channels * height * width, 256)
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), last, nn.ReLU())


# differs from dqn_atari.py: IMPALA's residual network
class QNetwork(nn.Sequential):
    """Q-values of all actions, by the residual network of IMPALA."""

    def __init__(self, envs: gym.vector.VectorEnv):
        network = impala(*envs.single_observation_space.shape)
        super().__init__(network, nn.Linear(256, envs.single_action_space.n))

    def forward(self, obs: Tensor) -> Tensor:
        return super().forward(obs / 255)  # obs: bytes, (batch, 4, 84, 84)

    def act(self, obs: Tensor, greedy: bool = True) -> Tensor:
        return self(obs).argmax(-1)  # the training loop explores


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """From `start` at step 0 to `end` at step `duration`, and `end` from there on."""
    return end if step >= duration else start + (end - start) * step / duration


def act(
    q_values: Callable, obs: np.ndarray, epsilon: float, rng: np.random.Generator, num_actions: int
) -> np.ndarray:
    """Greedy actions, or with probability epsilon random ones, independently per environment."""
    explore = rng.random(len(obs)) < epsilon
    actions = rng.integers(num_actions, size=len(obs))
    if not explore.all():
        actions = np.where(explore, actions, np.asarray(q_values(obs)).argmax(-1))
    return actions


def get_distill_coeff(returns: np.ndarray, teacher_return: float, args: Args) -> float:
    """max(1 - student's / teacher's return, 0); 1 until the student has played enough episodes."""
    # divided by the absolute value, so that it is positive for negative returns as well
    behind = (teacher_return - returns.mean()) / (abs(teacher_return) or 1)
    return args.distill_weight * (1.0 if np.isnan(behind) else max(behind, 0.0))


# differs from dqn_atari.py: a distillation loss beside the TD loss
def update(
    q_network: QNetwork,
    target_network: QNetwork,
    teacher: nn.Module,
    optimizer: optim.Optimizer,
    distill_coeff: Tensor,
    args: Args,
    *batch: Tensor,
) -> Losses:
    """One gradient step; returns its losses and the mean predicted Q-value."""
    obs, next_obs, actions, rewards, terminated = batch
    with torch.no_grad():
        # Only termination stops the bootstrap; after truncation, next_obs is the last observation.
        best_next = target_network(next_obs).amax(1)
        td_target = rewards + args.gamma * best_next * (1 - terminated)
        teacher_logprobs = (teacher(obs) / args.temperature).log_softmax(1)
    all_values = q_network(obs)
    q_values = all_values.gather(1, actions.unsqueeze(1)).squeeze(1)
    td_loss = F.mse_loss(q_values, td_target)
    # KL(teacher || student) of their softmax policies, averaged over the batch
    logprobs = (all_values / args.temperature).log_softmax(1)
    distill_loss = (teacher_logprobs.exp() * (teacher_logprobs - logprobs)).sum(1).mean()
    loss = td_loss + distill_coeff * distill_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {
        "losses/loss": loss.detach(),
        "losses/td_loss": td_loss.detach(),
        "losses/distill_loss": distill_loss.detach(),
        "losses/q_values": q_values.detach().mean(),
    }


@torch.no_grad()
def update_target(network: nn.Module, target_network: nn.Module, tau: float) -> None:
    """target = tau * network + (1 - tau) * target"""
    for target, source in zip(target_network.parameters(), network.parameters(), strict=True):
        target.lerp_(source, tau)


# tags of the losses in the offline phase
OFFLINE = {
    "losses/loss": "charts/offline/loss",
    "losses/td_loss": "charts/offline/q_loss",
    "losses/distill_loss": "charts/offline/distill_loss",
}

if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    device = run.device
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Discrete, "sac_continuous_action.py")
    num_actions = envs.single_action_space.n

    teacher = load_teacher(args, envs, ["dqn_atari", run.script.stem], device)
    q_network = QNetwork(envs).to(device)
    target_network = QNetwork(envs).to(device)
    target_network.load_state_dict(q_network.state_dict())
    adam = dict(fused=True, capturable=device.type == "cuda")
    optimizer = optim.Adam(q_network.parameters(), args.learning_rate, **adam)
    memory = make_memory(FrameReplayBuffer, envs, args, device)
    teacher_q_values = inference(teacher, device, args)
    q_values = inference(q_network, device, args)
    losses = Means()
    distill_coeff = torch.full((), args.distill_weight, device=device)
    update_student = partial(update, q_network, target_network, teacher, optimizer)
    train = accelerate(partial(update_student, distill_coeff, args), device, args)

    @partial(capture, device=memory.device, args=args)  # sampling, too, if the memory is on the GPU
    def learn() -> None:
        batch = memory.sample(args.batch_size).to(device)
        losses.add(train(*batch))

    rng = np.random.default_rng(args.seed)
    teacher_return = np.zeros(())
    returns = np.full(10, np.nan)  # of the student's latest episodes

    state = dict(q_network=q_network, target_network=target_network, optimizer=optimizer)
    state |= dict(teacher=teacher, memory=memory, losses=losses, distill_coeff=distill_coeff)
    state |= dict(rng=rng, teacher_return=teacher_return, recent_returns=returns)
    envs.reset(seed=args.seed)
    start = run.resume(args.num_iterations, **state, envs=envs)
    obs = envs.obs
    ended = envs.ended
    if start == 0:
        teacher_return[...] = np.mean(run.play(teacher, args.teacher_eval_episodes, args.end_e))
        run.log({"charts/teacher/avg_episodic_return": teacher_return}, 0)
        run.say(f"the teacher's mean return is {teacher_return:.2f}")

    # Teacher phase: the teacher fills the memory, with fewer and fewer random actions.
    for iteration in range(start, args.teacher_iterations):
        steps = iteration * args.num_envs
        epsilon = linear_schedule(args.start_e, args.end_e, args.teacher_steps, steps)
        actions = act(teacher_q_values, obs, epsilon, rng, num_actions)
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        memory.add(obs, next_obs, actions, rewards, terminated, ~ended)
        obs = next_obs
        ended = terminated | truncated
        run.log_episodes(infos, steps + args.num_envs, "teacher/")
        run.checkpoint(iteration + 1)

    # Offline phase: the student learns from the teacher's transitions and Q-values.
    for iteration in range(max(start, args.teacher_iterations), args.online_start):
        learn()
        step = iteration - args.teacher_iterations + 1
        global_step = args.phases["teacher"] + step
        if step % args.target_network_frequency == 0:
            update_target(q_network, target_network, args.tau)
        if step % 100 == 0 or step == args.offline_steps:
            means = losses.take()
            run.log({OFFLINE[tag]: means[tag] for tag in OFFLINE}, global_step)
        if step % 100_000 == 0 or step == args.offline_steps:
            played = run.play(q_network, args.teacher_eval_episodes, args.end_e)
            run.log({"charts/offline/avg_episodic_return": np.mean(played)}, global_step)
        run.evaluate(q_network, global_step)
        run.checkpoint(iteration + 1)

    # Online phase: DQN; the better the student is, the smaller is the distillation loss's weight.
    for iteration in range(max(start, args.online_start), args.num_iterations):
        if iteration == args.online_start:
            memory.clear()
            envs.reset(seed=derive_seed(args.seed, iteration))
            obs = envs.obs
            ended = envs.ended

        # Act.
        steps = (iteration - args.online_start) * args.num_envs
        exploring = args.exploration_fraction * args.total_timesteps  # steps; offline steps count
        epsilon = linear_schedule(args.start_e, args.end_e, exploring, args.offline_steps + steps)
        actions = act(q_values, obs, epsilon, rng, num_actions)

        # differs from dqn_atari.py: counts the steps of the student
        # Learn; a GPU does so while the environments step. Steps are summed over environments, so
        # --num-envs changes neither the number of updates nor their order.
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

        # differs from dqn_atari.py: updates the weight of the distillation loss
        # Step the environments; a step that only reset one of them is not stored.
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        memory.add(obs, next_obs, actions, rewards, terminated, ~ended)
        obs = next_obs
        ended = terminated | truncated
        run.log_episodes(infos, global_step)
        if "_episode" in infos:
            returns[:] = [*returns, *infos["episode"]["r"][infos["_episode"]]][-len(returns) :]
            distill_coeff.fill_(get_distill_coeff(returns, float(teacher_return), args))
        run.evaluate(q_network, global_step)
        run.checkpoint(iteration + 1)

    run.finish(q_network)
