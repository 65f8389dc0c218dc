#!/bin/sh
# SimBaV2: all runs of docs/rl-algorithms/simbav2.md. Run again, it does only what is missing.
set -e

# MuJoCo on one GPU; the learning rate is that of the first 300,000 steps of a million
python -m cleanrl_utils.benchmark \
    --env-ids Hopper-v4 Humanoid-v4 \
    --command "python cleanrl/simbav2_continuous_action.py --total-timesteps 300000 --final-lr 8.5e-5 --save-model" \
    --num-seeds 2 \
    --workers "${GPU_WORKERS:-1}"
