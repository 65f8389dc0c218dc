#!/bin/sh
# SAC on Atari games: the runs of docs/rl-algorithms/sac.md. Run again, it does only what is missing.
set -e

# on one GPU, 5 million steps; replay memory and all else on the GPU
python -m cleanrl_utils.benchmark \
    --env-ids PongNoFrameskip-v4 BeamRiderNoFrameskip-v4 BreakoutNoFrameskip-v4 \
    --command "python cleanrl/sac_atari.py --save-model" \
    --num-seeds 3 \
    --workers "${GPU_WORKERS:-1}"
