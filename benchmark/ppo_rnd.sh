#!/bin/sh
# Random Network Distillation: the runs of docs/rl-algorithms/ppo-rnd.md. Run again, it does only
# what is missing.
set -e

# 20 million steps on one GPU: the way out of the first room
python -m cleanrl_utils.benchmark \
    --env-ids MontezumaRevenge-v5 \
    --command "python cleanrl/ppo_rnd_envpool.py --total-timesteps 20000000" \
    --num-seeds 1 \
    --workers "${GPU_WORKERS:-1}"
