#!/bin/sh
# DQN: all runs of docs/rl-algorithms/dqn.md. Run again, it does only what is missing.
set -e

# classic control on the CPU, 500,000 steps
python -m cleanrl_utils.benchmark \
    --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 \
    --command "python cleanrl/dqn.py --no-cuda --save-model" \
    --num-seeds 5 \
    --workers "${WORKERS:-2}"

# Atari on one GPU, 10 million steps; replay memory and all else on the GPU
python -m cleanrl_utils.benchmark \
    --env-ids PongNoFrameskip-v4 BeamRiderNoFrameskip-v4 BreakoutNoFrameskip-v4 \
    --command "python cleanrl/dqn_atari.py --save-model" \
    --num-seeds 3 \
    --workers "${GPU_WORKERS:-1}"

# the same in JAX
python -m cleanrl_utils.benchmark \
    --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 \
    --command "python cleanrl/dqn_jax.py --no-cuda --save-model" \
    --num-seeds 5 \
    --workers "${WORKERS:-2}"

python -m cleanrl_utils.benchmark \
    --env-ids PongNoFrameskip-v4 BeamRiderNoFrameskip-v4 BreakoutNoFrameskip-v4 \
    --command "python cleanrl/dqn_atari_jax.py --save-model" \
    --num-seeds 3 \
    --workers "${GPU_WORKERS:-1}"
