#!/bin/sh
# TD3: all runs of docs/rl-algorithms/td3.md. Run again, it does only what is missing.
set -e

# MuJoCo on one GPU, 1 million steps; replay memory and all else on the GPU
python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 Walker2d-v4 Hopper-v4 \
    --command "python cleanrl/td3_continuous_action.py --save-model" \
    --num-seeds 3 \
    --workers "${GPU_WORKERS:-1}"

# actions with bounds other than -1 and 1: 0.4, 2 and 3
python -m cleanrl_utils.benchmark \
    --env-ids Humanoid-v4 Pusher-v5 InvertedPendulum-v4 \
    --command "python cleanrl/td3_continuous_action.py --total-timesteps 200000 --save-model" \
    --num-seeds 1 \
    --workers "${GPU_WORKERS:-1}"

# the same in JAX
python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 Walker2d-v4 Hopper-v4 \
    --command "python cleanrl/td3_continuous_action_jax.py --save-model" \
    --num-seeds 3 \
    --workers "${GPU_WORKERS:-1}"
