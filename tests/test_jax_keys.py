"""Compiled programs use no random key twice: JAX's own checker reads what is traced."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import random
from test_fast_td3 import SMALL, Forever

from cleanrl import dqn_jax, ppo_jax, pqn_jax
from cleanrl import fast_td3_continuous_action_jax as fast_td3
from cleanrl import ppo_continuous_action_brax_jax as brax_jax
from cleanrl import td3_continuous_action_jax as td3
from cleanrl_utils.environments.jax_envs import Gymnax, begin
from cleanrl_utils.replay.buffers_jax import ReplayMemory
from cleanrl_utils.speed.jax_learning import BackgroundTraining, Training


def check(function: Callable, *inputs: Any) -> None:
    with jax.debug_key_reuse(True):
        jax.jit(function).trace(*inputs)


def test_a_key_that_is_used_twice_is_found() -> None:
    with pytest.raises(jax.errors.KeyReuseError):
        check(lambda key: random.uniform(key) + random.normal(key), random.key(0))


@pytest.mark.parametrize("script", [ppo_jax, pqn_jax])
def test_on_policy_scripts_use_each_key_once(script: ModuleType) -> None:
    env = Gymnax.make("CartPole-v1")
    args = script.Args(num_envs=4, num_steps=8, num_minibatches=4, total_timesteps=320)

    def train(seed: jax.Array, env_seed: jax.Array) -> tuple:
        state = script.init(args, script.init_params(env, 1), seed)
        carry = state, begin(env, random.key(env_seed), args.num_envs)
        carry, _ = script.iterate(env, args, carry, None)
        return script.iterate(env, args, carry, None)

    check(train, 1, 2)


def test_fast_td3_uses_each_key_once() -> None:
    env: Any = Forever()
    args = fast_td3.Args(**SMALL)
    params = fast_td3.init_params(env, args, 1)
    first = begin(env, random.key(0), args.num_envs)

    def train(seed: jax.Array) -> tuple:
        carry = fast_td3.init(env, args, params, first, seed)
        carry, _ = fast_td3.iterate(env, args, first, carry, None)
        return fast_td3.iterate(env, args, first, carry, None)

    check(train, 1)


def test_ppo_with_physics_uses_each_key_once() -> None:
    env: Any = Forever()
    args = brax_jax.Args(num_envs=3, num_steps=8, num_minibatches=4, total_timesteps=240)
    first = begin(env, random.key(0), args.num_envs)

    def train(seed: jax.Array) -> tuple:
        state = brax_jax.init(env, args, brax_jax.init_params(env, 1), seed)
        carry = state, (first, jnp.zeros(args.num_envs))
        carry, _ = brax_jax.iterate(env, args, first, carry, None)
        return brax_jax.iterate(env, args, first, carry, None)

    check(train, 1)


def test_updates_from_a_memory_use_each_key_once() -> None:
    args = dqn_jax.Args()
    envs = dqn_jax.make_envs(args, "")
    memory = ReplayMemory(100, envs)
    functions = partial(dqn_jax.init, args, envs), partial(dqn_jax.update, args)
    training = Training(*functions, memory, 4)

    def updates(state: Any, sums: jax.Array, replay: Any) -> tuple:
        state, sums = training._update_packed(state, sums, replay)
        return training._update_packed(state, sums, replay)

    check(updates, training._packed, training._sums, memory.replay)


def test_updates_in_the_background_use_each_key_once() -> None:
    args = td3.Args(env_id="Pendulum-v1")
    envs = td3.make_envs(args, "")
    memory = ReplayMemory(100, envs, collect_steps=args.learn_every)
    functions = partial(td3.init, args, envs), partial(td3.update, args)
    training = BackgroundTraining(*functions, memory, 4, noises=1)
    schedule = ((True,),) * 3

    def updates(state: Any, sums: jax.Array, replay: Any, collected: jax.Array) -> tuple:
        state, sums, replay, _ = training._updates_packed(state, sums, replay, collected, schedule)
        return training._updates_packed(state, sums, replay, collected, schedule)

    check(updates, training._packed, training._sums, memory.replay, memory.take_collected())
