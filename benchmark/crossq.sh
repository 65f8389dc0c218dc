#!/bin/sh
# CrossQ: all runs of docs/rl-algorithms/crossq.md. Run again, it does only what is missing.
set -e

# MuJoCo on one GPU, 300,000 steps; replay memory and all else on the GPU
python -m cleanrl_utils.benchmark \
    --env-ids Humanoid-v4 Walker2d-v4 \
    --command "python cleanrl/crossq_continuous_action.py --total-timesteps 300000 --save-model" \
    --num-seeds 2 \
    --workers "${GPU_WORKERS:-1}"

# the same in JAX
python -m cleanrl_utils.benchmark \
    --env-ids Humanoid-v4 Walker2d-v4 \
    --command "python cleanrl/crossq_continuous_action_jax.py --total-timesteps 300000 --save-model" \
    --num-seeds 2 \
    --workers "${GPU_WORKERS:-1}"
