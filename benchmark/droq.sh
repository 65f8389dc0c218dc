#!/bin/sh
# DroQ: all runs of docs/rl-algorithms/droq.md. Run again, it does only what is missing.
set -e

# MuJoCo on one GPU, 100,000 steps; replay memory and all else on the GPU
python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 \
    --command "python cleanrl/droq_continuous_action.py --total-timesteps 100000 --save-model" \
    --num-seeds 2 \
    --workers "${GPU_WORKERS:-1}"
