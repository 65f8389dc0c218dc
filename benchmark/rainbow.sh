#!/bin/sh
# Rainbow: all runs of docs/rl-algorithms/rainbow.md. Run again, it does only what is missing.
set -e

# Pong on one GPU, 1 million steps
python -m cleanrl_utils.benchmark \
    --env-ids PongNoFrameskip-v4 \
    --command "python cleanrl/rainbow_atari.py --save-model --total-timesteps 1000000 --num-envs 4 \
        --async-envs --learning-starts 20000 --target-network-frequency 1000 \
        --learning-rate 2.5e-4" \
    --num-seeds 3 \
    --workers "${GPU_WORKERS:-1}"

# Atari on one GPU, 10 million steps; replay memory and all else on the GPU
python -m cleanrl_utils.benchmark \
    --env-ids PongNoFrameskip-v4 BeamRiderNoFrameskip-v4 BreakoutNoFrameskip-v4 \
    --command "python cleanrl/rainbow_atari.py --save-model" \
    --num-seeds 3 \
    --workers "${GPU_WORKERS:-1}"
