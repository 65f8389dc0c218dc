"""PPO and PPG on Procgen: names, seeds, network, scaled rewards, phases."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from probes import GAMMA, image

from cleanrl import ppg_procgen, ppo_procgen
from cleanrl_utils.environments import envpool as envs_module
from cleanrl_utils.environments.envpool import OneOfPool, make_pool

SCRIPTS = ["ppo_procgen", "ppg_procgen"]
TINY = "--num-envs 2 --num-steps 30 --num-minibatches 1 --gamma 0.9 --checkpoints 0"
PHASE = "--n-iteration 2 --e-auxiliary 1 --num-aux-rollouts 2"
procgen = pytest.mark.usefixtures("needs_procgen")


@pytest.fixture
def needs_procgen() -> None:
    pytest.importorskip("envpool")
    pytest.importorskip("envpool.procgen.procgen_envpool", exc_type=ImportError)  # it needs Qt


class ProbePool(gym.vector.SyncVectorEnv):
    """Probes in EnvPool's manner, their pictures so small that a network costs next to nothing."""

    def __init__(self, task: str, num_envs: int, seed: int):
        self.first_seed = seed
        space = gym.spaces.Box(0, 255, (3, 8, 8), np.uint8)

        def one() -> gym.Env:
            env = gym.make("probes:" + task.replace("-v0", "Pixels-v0"))
            return gym.wrappers.TransformObservation(env, shrink, space)

        super().__init__([one] * num_envs)

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset(seed=self.first_seed)

    def step(self, actions: Any) -> Any:
        *rest, infos = super().step(actions)
        infos["elapsed_step"] = np.array([env.unwrapped.t for env in self.envs])
        return *rest, infos


def shrink(pixels: np.ndarray) -> np.ndarray:
    return pixels[::11, ::11].transpose(2, 0, 1)


@pytest.fixture
def pool_of_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs_module, "make_pool", ProbePool)


def agent_of(module: Any) -> Any:
    torch.manual_seed(1)
    return module.Agent(ProbePool("ProbeBoth-v0", 1, 1))


# -- environments ------------------------------------------------------------------------------


@procgen
def test_games_go_by_procgens_names_and_by_envpools() -> None:
    import envpool

    names = "bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper"
    names += " leaper maze miner ninja plunder starpilot"
    tasks = envpool.list_all_envs()
    assert all(ppo_procgen.task_of(name) in tasks for name in names.split())
    assert ppo_procgen.task_of("starpilot") == "StarpilotEasy-v0"
    assert ppo_procgen.task_of("StarpilotHard-v0") == "StarpilotHard-v0"


@procgen
def test_seeds_reach_the_games_and_environments_differ() -> None:
    all_args = [ppo_procgen.Args(num_envs=3, seed=seed) for seed in (7, 7, 8)]
    first, again, other = (ppo_procgen.make_envs(args).obs for args in all_args)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[0], first[1])


@procgen
def test_one_of_a_pool_plays_as_the_pool_does() -> None:
    pool = make_pool("StarpilotEasy-v0", num_envs=1, seed=5)
    env = OneOfPool("StarpilotEasy-v0")
    pool_obs, _ = pool.reset()
    obs, _ = env.reset(seed=5)
    assert env.observation_space.contains(obs) and np.array_equal(pool_obs[0], obs)
    ended = False
    episodes = 0
    while episodes < 2:  # a pool resets itself in the step after an end
        pool_obs, pool_reward, pool_terminated, pool_truncated, _ = pool.step(np.array([9]))
        if ended:
            assert pool_reward == 0
            obs, _ = env.reset()
            ended = False
        else:
            obs, reward, terminated, truncated, _ = env.step(9)
            assert reward == pool_reward
            assert (terminated, truncated) == (pool_terminated[0], pool_truncated[0])
            ended = terminated or truncated
            episodes += ended
        assert np.array_equal(pool_obs[0], obs)


@procgen
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "flags, complaint",
    [
        ("--env-id starpilt", "nearest names: StarpilotEasy-v0"),
        ("--env-id CartPole-v1", "needs images and discrete actions"),
        ("--num-minibatches 7", "--num-minibatches must divide"),
        ("--total-timesteps 100", "--total-timesteps must be at least"),
    ],
)
def test_what_cannot_be_is_one_line(script: str, flags: str, complaint: str, train, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        train(script, flags)
    assert stop.value.code == 2 and complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", ["--n-iteration 0", "--e-auxiliary 0", "--num-aux-rollouts 3", "--n-aux-grad-accum 3"]
)
def test_phases_that_cannot_be_are_one_line(flags: str, train, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        train("ppg_procgen", flags)
    assert stop.value.code == 2 and flags.split()[0] in capsys.readouterr().err


def test_a_missing_library_is_named(monkeypatch, capsys) -> None:
    envpool = pytest.importorskip("envpool")

    def fail(*_: Any, **__: Any) -> None:
        raise ImportError("EnvPool Procgen requires the system Qt 5 runtime on Linux.")

    monkeypatch.setattr(envpool, "make", fail)
    with pytest.raises(SystemExit) as stop:
        make_pool("StarpilotEasy-v0")
    assert stop.value.code == 2 and "libqt5gui5 libqt5core5a" in capsys.readouterr().err


# -- networks ----------------------------------------------------------------------------------


def test_the_network_is_impalas() -> None:
    network = ppo_procgen.impala(3, 64, 64)
    # stages of 448 + 9,280, 4,640 + 36,992, 9,248 + 36,992 weights, then 2,048 to 256
    assert sum(x.numel() for x in network.parameters()) == 622_144
    assert network(torch.zeros(2, 3, 64, 64)).shape == (2, 256)
    assert ppo_procgen.impala(4, 21, 10)(torch.zeros(1, 4, 21, 10)).shape == (1, 256)  # rounds up


@pytest.mark.parametrize("module", [ppo_procgen, ppg_procgen])
def test_actions_are_samples_of_what_their_log_probabilities_say(module: Any) -> None:
    agent = agent_of(module)
    agent.actor.weight.data *= 30
    obs = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8).expand(4000, -1, -1, -1)
    with torch.no_grad():
        actions, logprob, value = agent.act_logprob_value(obs)
        again, entropy, _ = agent.get_logprob_entropy_value(obs, actions)
        policy = torch.distributions.Categorical(logits=agent(obs)[0])
        torch.testing.assert_close(logprob, policy.log_prob(actions))
        torch.testing.assert_close(logprob, again)
        torch.testing.assert_close(entropy, policy.entropy())
        torch.testing.assert_close(value, agent.get_value(obs))
        assert abs(actions.float().mean() - policy.probs[0, 1]) < 0.04
        assert (agent.act(obs) == policy.probs.argmax(-1)).all()


def test_weights_of_each_output_begin_with_the_same_norm() -> None:
    agent = agent_of(ppg_procgen)
    convs = [x for x in agent.network if isinstance(x, torch.nn.Conv2d)]
    inner = [x for x in agent.network.modules() if isinstance(x, torch.nn.Conv2d)]
    inner = [x for x in inner if not any(x is y for y in convs)]
    (last,) = [x for x in agent.network if isinstance(x, torch.nn.Linear)]
    heads = [agent.actor, agent.critic, agent.aux_critic]
    assert len(convs) == 3 and len(inner) == 12
    scale = (1 / 3**0.5 / 2**0.5) ** 0.5
    for layers, norm in ((convs, 1.0), (inner, scale), ([last], 1.4), (heads, 0.1)):
        for layer in layers:
            norms = layer.weight.flatten(1).norm(dim=1)
            torch.testing.assert_close(norms, torch.full_like(norms, norm))
            assert not layer.bias.any()


def test_only_the_auxiliary_critic_shapes_the_features() -> None:
    agent = agent_of(ppg_procgen)
    obs = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    _, value, aux_value = agent(obs)
    value.sum().backward()
    assert agent.critic.weight.grad is not None
    assert all(x.grad is None for x in agent.network.parameters())
    aux_value.sum().backward()
    assert all(x.grad.any() for x in agent.network.parameters())


# -- updates -----------------------------------------------------------------------------------


def aux_batch(rollouts: int = 4, steps: int = 5) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    obs = torch.randint(0, 256, (rollouts, steps, 3, 8, 8), dtype=torch.uint8, generator=random)
    old = torch.randn(rollouts, steps, 2, generator=random).log_softmax(-1)
    returns = torch.randn(rollouts, steps, generator=random)
    real = torch.ones(rollouts, steps)
    real[1, 2:4] = real[3, 0] = 0
    return [obs, old, returns, real]


def aux_step(batch: list[torch.Tensor], **settings: Any) -> tuple[dict[str, torch.Tensor], Any]:
    agent = agent_of(ppg_procgen)
    sgd = torch.optim.SGD(agent.parameters(), 0.01)
    args = ppg_procgen.Args(**{"max_grad_norm": 1e9, **settings})
    return ppg_procgen.aux_update(agent, sgd, args, *batch), agent


def test_auxiliary_losses_by_hand() -> None:
    obs, old, returns, real = batch = aux_batch()
    losses, after = aux_step(batch, beta_clone=0.7)
    agent = agent_of(ppg_procgen)
    logprobs, value, aux_value = agent(obs.flatten(0, 1))
    kept, target = real.flatten() > 0, returns.flatten()
    before = torch.distributions.Categorical(logits=old.flatten(0, 1))
    now = torch.distributions.Categorical(logits=logprobs)
    wanted = torch.stack([
        torch.distributions.kl_divergence(before, now)[kept].mean(),
        0.5 * (aux_value - target).square()[kept].mean(),
        0.5 * (value - target).square()[kept].mean(),
    ])  # fmt: skip
    torch.testing.assert_close(torch.stack(list(losses.values())), wanted.detach())
    (0.7 * wanted[0] + wanted[1] + wanted[2]).backward()
    for mine, theirs in zip(agent.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(mine - 0.01 * mine.grad, theirs, rtol=1e-4, atol=1e-6)


def test_gradients_add_up_to_those_of_the_whole_minibatch() -> None:
    losses, whole = aux_step(aux_batch(), num_aux_rollouts=4)
    same, parts = aux_step(aux_batch(), num_aux_rollouts=1, n_aux_grad_accum=4)
    torch.testing.assert_close(losses, same)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("pool_of_probes")
def test_a_phase_with_few_rollouts_uses_those_it_has(train) -> None:
    flags = "--env-id ProbeBoth-v0 --num-envs 1 --num-steps 8 --num-minibatches 1 --n-iteration 2"
    flags += " --total-timesteps 16 --e-auxiliary 1 --num-aux-rollouts 4 --checkpoints 0"
    done = train("ppg_procgen", flags)
    assert done.variables["args"].aux_minibatch_size == 2
    assert sum(tag == "losses/aux/kl_loss" for _, tag, _ in done.rows()) == 1


def test_auxiliary_gradients_are_clipped() -> None:
    _, agent = aux_step(aux_batch(), max_grad_norm=1e-3)
    before = agent_of(ppg_procgen).parameters()
    moved = [(x - y).square().sum() for x, y in zip(agent.parameters(), before, strict=True)]
    torch.testing.assert_close(
        torch.stack(moved).sum().sqrt(), torch.tensor(1e-5), rtol=0.02, atol=0
    )


@pytest.mark.parametrize("policy", [True, False])
def test_an_epoch_for_one_of_two_leaves_the_other_alone(policy: bool) -> None:
    agent, args = agent_of(ppg_procgen), ppg_procgen.Args()
    adam = torch.optim.Adam(agent.parameters(), 0.01)
    obs = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    numbers = [torch.randn(6) for _ in range(4)]  # log-probabilities, values, advantages, returns
    batch = [obs, torch.randint(0, 2, (6,)), *numbers, torch.ones(6)]
    ppg_procgen.update(agent, adam, args, True, True, *batch)  # Adam has momentum now
    before = {name: x.clone() for name, x in agent.named_parameters()}
    ppg_procgen.update(agent, adam, args, policy, not policy, *batch)
    moved = {name for name, x in agent.named_parameters() if not torch.equal(x, before[name])}
    critic = {"critic.weight", "critic.bias"}
    auxiliary = {"aux_critic.weight", "aux_critic.bias"}
    assert moved == (set(before) - critic - auxiliary if policy else critic)


# -- whole runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_rewards_are_scaled_by_the_returns_without_reset_steps(
    script: str, train, pool_of_probes
) -> None:
    flags = f"--env-id ProbeTruncation-v0 --total-timesteps 240 {TINY}"  # 5 steps, then a reset
    done = train(script, flags + (f" {PHASE}" if script == "ppg_procgen" else ""))
    variables = done.variables
    returns = np.cumsum(0.9 ** np.arange(5))  # 1, 1.9, 2.71 ...
    np.testing.assert_allclose(variables["return_stats"].std, returns.std(), rtol=1e-5)
    assert variables["return_stats"].count == 200
    scaled = variables["rewards"][variables["real"] > 0]
    np.testing.assert_allclose(scaled, 1 / returns.std(), rtol=1e-5)
    episodes = {tag: value for _, tag, value in done.rows() if "episodic" in tag}
    assert episodes == {"charts/episodic_return": 5, "charts/episodic_length": 5}


def test_a_phase_keeps_all_of_its_rollouts(train, pool_of_probes) -> None:
    flags = f"--env-id ProbeCue-v0 --total-timesteps 240 {TINY} {PHASE} --anneal-lr"
    done = train("ppg_procgen", flags)
    variables = done.variables
    # the phase's last rollout is the one that is still there
    for whole, part in (("phase_obs", "obs"), ("phase_returns", "returns"), ("phase_real", "real")):
        kept = torch.as_tensor(variables[whole])
        assert torch.equal(kept[2:], variables[part].transpose(0, 1)), whole
        if part != "real":  # ends come at the same steps in all of them
            assert not torch.equal(kept[:2], kept[2:]), whole
    real, advantages = variables["real"] > 0, variables["advantages"]
    torch.testing.assert_close(advantages[real].mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(advantages[real].std(), torch.tensor(1.0))
    assert (~real).any()
    # the learning rate falls through all of training, not anew in each phase
    rates = [value for _, tag, value in done.rows() if tag == "charts/learning_rate"]
    np.testing.assert_allclose(rates, 5e-4 * np.array([1, 0.75, 0.5, 0.25]), rtol=1e-6)
    assert sum(tag == "losses/aux/kl_loss" for _, tag, _ in done.rows()) == 2


def test_the_policys_limit_is_not_the_value_functions(train, pool_of_probes) -> None:
    """With two minibatches the second one has moved already, so each epoch passes the limit."""
    flags = f"--env-id ProbeBoth-v0 --total-timesteps 120 {TINY} {PHASE} --num-minibatches 2"
    flags += " --target-kl 1e-12 --learning-rate 0.01"
    for epochs, policy, value in (((3, 2), 1, 2), ((3, 1), 1, 1), ((1, 3), 1, 3)):
        e_policy, v_value = epochs
        done = train("ppg_procgen", f"{flags} --e-policy {e_policy} --v-value {v_value}")
        agent, adam = done.variables["agent"], done.variables["optimizer"]
        steps = [adam.state[head.weight]["step"] for head in (agent.actor, agent.critic)]
        assert steps == [2 * 2 * policy, 2 * 2 * value]  # rollouts, minibatches, epochs


def test_epochs_for_the_value_function_leave_the_policys_metrics_alone(
    train, pool_of_probes
) -> None:
    """The one step for the policy finds the policy that acted, whatever comes after it."""
    flags = f"--env-id ProbeBoth-v0 --total-timesteps 120 {TINY} {PHASE} --learning-rate 0.01"
    rows = train("ppg_procgen", f"{flags} --v-value 4").rows()
    for name in ("approx_kl", "old_approx_kl", "clipfrac"):
        found = [value for _, tag, value in rows if tag == f"losses/{name}"]
        assert len(found) == 2 and max(map(abs, found)) < 1e-6, (name, found)
    rows = train("ppg_procgen", f"{flags} --e-policy 4", "policy").rows()
    assert max(value for _, tag, value in rows if tag == "losses/approx_kl") > 1e-4


PROBE = (
    f"--gamma {GAMMA} --total-timesteps 4800 --learning-rate 0.002 --anneal-lr --ent-coef 0.05"
    " --num-envs 16 --num-steps 6 --num-minibatches 1 --no-clip-vloss"
)
PROBE_FLAGS = {
    "ppo_procgen": f"{PROBE} --update-epochs 4",
    "ppg_procgen": f"{PROBE} --v-value 2 --n-iteration 2 --num-aux-rollouts 16 --e-auxiliary 3",
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("probe", ["Both", "Truncation"])
def test_it_finds_the_known_values(script: str, probe: str, train, pool_of_probes) -> None:
    variables = train(script, f"--env-id Probe{probe}-v0 {PROBE_FLAGS[script]}").variables
    cues = [-1, 1] if probe == "Both" else [1]
    obs = torch.as_tensor(np.stack([shrink(image(cue)) for cue in cues]))
    wanted = torch.tensor([1.0, 1.0] if probe == "Both" else [1 / (1 - GAMMA)])
    agent, scale = variables["agent"], variables["return_stats"].std
    with torch.no_grad():
        torch.testing.assert_close(scale * agent.get_value(obs), wanted, rtol=0.1, atol=0)
        if probe == "Both":
            assert agent.act(obs).tolist() == [0, 1]
