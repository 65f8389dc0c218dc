#!/bin/sh
# TQC: all runs of docs/rl-algorithms/tqc.md. Run again, it does only what is missing.
set -e

# MuJoCo on one GPU, 1 million steps, with the authors' number of dropped quantiles
python -m cleanrl_utils.benchmark \
    --env-ids Humanoid-v4 Ant-v4 Walker2d-v4 \
    --command "python cleanrl/tqc_continuous_action.py --save-model" \
    --num-seeds 2 \
    --workers "${GPU_WORKERS:-1}"
python -m cleanrl_utils.benchmark \
    --env-ids Hopper-v4 \
    --command "python cleanrl/tqc_continuous_action.py --top-quantiles-to-drop-per-net 5 --save-model" \
    --num-seeds 2 \
    --workers "${GPU_WORKERS:-1}"
python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 \
    --command "python cleanrl/tqc_continuous_action.py --top-quantiles-to-drop-per-net 0 --save-model" \
    --num-seeds 2 \
    --workers "${GPU_WORKERS:-1}"
