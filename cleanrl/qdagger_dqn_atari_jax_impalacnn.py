"""QDagger in JAX, for Atari games: a DQN student with IMPALA's network learns from a DQN teacher.

    python cleanrl/qdagger_dqn_atari_jax_impalacnn.py --teacher-model dqn_atari_jax.cleanrl_model

Paper: https://arxiv.org/abs/2206.01626. Every detail with its reason: docs/rl-algorithms/qdagger.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import Array, random

from cleanrl_utils.environments import atari_wrappers as atari
from cleanrl_utils.environments.making import is_atari, make, require_spaces
from cleanrl_utils.environments.vector import AsyncVectorEnv, SyncVectorEnv
from cleanrl_utils.replay.buffers_jax import Batch, FrameMemory
from cleanrl_utils.running.evaluation import load_teacher
from cleanrl_utils.running.rng import derive_seed
from cleanrl_utils.running.run import Run, RunArgs, parse_args, require
from cleanrl_utils.running.settings import Count, Natural, NonNegative, Share
from cleanrl_utils.speed.jax_learning import Training
from cleanrl_utils.speed.jax_tools import FlaxModel, Params


@dataclass
class Args(RunArgs):
    env_id: str = "BreakoutNoFrameskip-v4"
    """id of the environment; your own as module:Id"""
    total_timesteps: Count = 10_000_000
    """number of environment steps of the student, after those of the teacher and the offline phase
"""
    learning_rate: NonNegative = 1e-4
    """learning rate of Adam"""
    num_envs: Count = 1
    """number of parallel environments; other settings count steps summed over environments"""
    async_envs: bool = False
    """run each environment in a process of its own"""
    buffer_size: Count = 1_000_000
    """number of transitions in the replay memory; 1,000,000 take 6.6 GiB"""
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
    """model file of the teacher, trained with dqn_atari_jax.py or this script"""
    teacher_policy_hf_repo: str | None = None
    """repository of the teacher on the Hugging Face hub, as entity/name; unset, and no
    --teacher-model: cleanrl/ENV_ID-EXP_NAME-seed1"""
    teacher_model_exp_name: str = "dqn_atari_jax"
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

    # differs from dqn_atari_jax.py: three phases
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


def residual(x: Array) -> Array:
    """In a Flax module: the input, and what two convolutions add to it."""
    y = nn.Conv(x.shape[-1], (3, 3))(nn.relu(x))
    return x + nn.Conv(x.shape[-1], (3, 3))(nn.relu(y))


# differs from dqn_atari_jax.py: IMPALA's residual network
class QNetwork(nn.Module):
    """Q-values of all actions, by the residual network of IMPALA."""

    num_actions: int

    @nn.compact
    def __call__(self, obs: Array) -> Array:
        x = jnp.moveaxis(obs, 1, -1) / 255  # from bytes, (batch, 4, 84, 84)
        for features in (16, 32, 32):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))  # halves, and rounds up
            x = residual(residual(x))
        x = nn.relu(nn.Dense(256)(nn.relu(x).reshape(len(x), -1)))
        return nn.Dense(self.num_actions)(x)

    def act(self, obs: Array) -> Array:
        return self(obs).argmax(-1)  # the training loop explores


def make_network(envs: gym.vector.VectorEnv, args: Args) -> QNetwork:
    return QNetwork(int(envs.single_action_space.n))


class Agent(FlaxModel):
    """The agent as model files hold it and evaluations play it."""

    @classmethod
    def from_args(cls, envs: gym.vector.VectorEnv, args: Args) -> Self:
        return cls(make_network(envs, args), {})  # load_state_dict brings the rest


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


# differs from dqn_atari_jax.py: the teacher's parameters
class State(NamedTuple):
    """Everything that learning changes, and the teacher."""

    q_network: TrainState  # parameters and their optimiser
    target_network: Params
    teacher: Params
    key: Array


# differs from dqn_atari_jax.py: the teacher's parameters
def init(args: Args, envs: gym.vector.VectorEnv, teacher: Params) -> State:
    network = make_network(envs, args)
    key = random.key(args.seed)
    params = network.init(key, np.zeros(envs.observation_space.shape, np.uint8))
    adam = optax.adam(args.learning_rate)
    q_network = TrainState.create(apply_fn=network.apply, params=params, tx=adam)
    return State(q_network, params, teacher, random.fold_in(key, 1))


# differs from dqn_atari_jax.py: a distillation loss beside the TD loss
def get_loss(
    params: Params, state: State, args: Args, batch: Batch, teacher_q: Array, distill_coeff: Array
) -> tuple[Array, dict]:
    """The loss, and metrics; `teacher_q` are the teacher's Q-values."""
    # Only termination stops the bootstrap; after truncation, next_obs is the last observation.
    q_network = state.q_network.apply_fn
    best_next = q_network(state.target_network, batch.next_obs).max(1)
    td_target = batch.rewards + args.gamma * best_next * (1 - batch.terminated)
    all_values = q_network(params, batch.obs)
    q_values = jnp.take_along_axis(all_values, batch.actions[:, None], 1).squeeze(1)
    td_loss = jnp.square(q_values - td_target).mean()
    # KL(teacher || student) of their softmax policies, averaged over the batch
    teacher_logprobs = nn.log_softmax(teacher_q / args.temperature)
    logprobs = nn.log_softmax(all_values / args.temperature)
    kl = (jnp.exp(teacher_logprobs) * (teacher_logprobs - logprobs)).sum(1)
    distill_loss = kl.mean()
    loss = td_loss + distill_coeff * distill_loss
    metrics = {"losses/loss": loss, "losses/td_loss": td_loss, "losses/distill_loss": distill_loss}
    return loss, metrics | {"losses/q_values": q_values.mean()}


# differs from dqn_atari_jax.py: the teacher's Q-values of the batch
def update(
    args: Args, teacher: FlaxModel, state: State, batch: Batch, distill_coeff: Array
) -> tuple[State, list[dict]]:
    """One gradient step, and its metrics."""
    teacher_q = teacher.network.apply(state.teacher, batch.obs)
    gradient = jax.grad(get_loss, has_aux=True)
    params = state.q_network.params
    grads, metrics = gradient(params, state, args, batch, teacher_q, distill_coeff)
    return state._replace(q_network=state.q_network.apply_gradients(grads=grads)), [metrics]


def update_target(args: Args, state: State) -> State:
    """target = tau * network + (1 - tau) * target"""
    target = optax.incremental_update(state.q_network.params, state.target_network, args.tau)
    return state._replace(target_network=target)


# tags of the losses in the offline phase
OFFLINE = {
    "losses/loss": "charts/offline/loss",
    "losses/td_loss": "charts/offline/q_loss",
    "losses/distill_loss": "charts/offline/distill_loss",
}

if __name__ == "__main__":
    args = parse_args(Args)
    run = Run(args, make_env)
    envs = make_envs(args, run.videos)
    require_spaces(envs, args.env_id, gym.spaces.Discrete, "sac_continuous_action_jax.py")
    num_actions = envs.single_action_space.n

    teacher = load_teacher(args, envs, ["dqn_atari_jax", run.script.stem], run.device)
    agent = Agent.from_args(envs, args)
    memory = FrameMemory(args.buffer_size, envs)
    distill_coeff = jnp.float32(1.0)
    init_state = partial(init, args, envs, teacher.params)
    update_state = partial(update, args, teacher)
    training = Training(init_state, update_state, memory, args.batch_size, distill_coeff)
    q_values = training.policy(lambda x, obs: x.q_network.apply_fn(x.q_network.params, obs))
    teacher_q_values = training.policy(lambda x, obs: teacher.network.apply(x.teacher, obs))
    target_update = partial(update_target, args)
    rng = np.random.default_rng(args.seed)
    teacher_return = np.zeros(())
    returns = np.full(10, np.nan)  # of the student's latest episodes

    state = dict(training=training, memory=memory, rng=rng, envs=envs)
    state |= dict(teacher_return=teacher_return, recent_returns=returns)
    envs.reset(seed=args.seed)
    start = run.resume(args.num_iterations, **state)
    obs = envs.obs
    ended = envs.ended
    if start == 0:
        played = run.play(teacher, args.teacher_eval_episodes, args.end_e)
        teacher_return[...] = np.mean(played)
        run.log({"charts/teacher/avg_episodic_return": teacher_return}, 0)
        run.say(f"the teacher's mean return is {teacher_return:.2f}")
    distill_coeff = jnp.float32(get_distill_coeff(returns, float(teacher_return), args))

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
        training.update(distill_coeff)
        step = iteration - args.teacher_iterations + 1
        global_step = args.phases["teacher"] + step
        if step % args.target_network_frequency == 0:
            training.change(target_update)
        if step % 100 == 0 or step == args.offline_steps:
            means = training.metrics()
            run.log({OFFLINE[tag]: means[tag] for tag in OFFLINE}, global_step)
        if step % 100_000 == 0 or step == args.offline_steps:
            agent.params = training.state.q_network.params
            played = run.play(agent, args.teacher_eval_episodes, args.end_e)
            run.log({"charts/offline/avg_episodic_return": np.mean(played)}, global_step)
        if run.evaluation_due(global_step):
            agent.params = training.state.q_network.params
            run.evaluate(agent, global_step)
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

        # differs from dqn_atari_jax.py: counts the steps of the student
        # Learn; a GPU computes while the environments step. Steps are summed over environments, so
        # --num-envs changes neither the number of updates nor their order.
        for step in range(steps + 1, steps + args.num_envs + 1):
            global_step = args.phases["teacher"] + args.offline_steps + step
            learning = step > args.learning_starts
            if learning and step % args.train_frequency == 0:
                training.update(distill_coeff)
            if learning and step % args.target_network_frequency == 0:
                training.change(target_update)
            if step % 100 == 0:
                charts = {"charts/epsilon": epsilon, "charts/distill_coeff": distill_coeff}
                run.log(training.metrics() | charts, global_step)

        # differs from dqn_atari_jax.py: updates the weight of the distillation loss
        # Step the environments. A step that only reset one of them is not stored.
        next_obs, rewards, terminated, truncated, infos = envs.step(actions)
        memory.add(obs, next_obs, actions, rewards, terminated, ~ended)
        obs = next_obs
        ended = terminated | truncated
        run.log_episodes(infos, global_step)
        if "_episode" in infos:
            returns[:] = [*returns, *infos["episode"]["r"][infos["_episode"]]][-len(returns) :]
            distill_coeff = jnp.float32(get_distill_coeff(returns, float(teacher_return), args))
        if run.evaluation_due(global_step):
            agent.params = training.state.q_network.params
            run.evaluate(agent, global_step)
        run.checkpoint(iteration + 1)

    agent.params = training.state.q_network.params
    run.finish(agent)
