#!/bin/sh
# PPG: all runs of docs/rl-algorithms/ppg.md. Run again, it does only what is missing.
set -e

# Procgen on one GPU, 25 million steps
python -m cleanrl_utils.benchmark \
    --env-ids starpilot bossfight bigfish \
    --command "python cleanrl/ppg_procgen.py" \
    --num-seeds 3 \
    --workers "${GPU_WORKERS:-1}"
