#!/bin/sh
# FastTD3: all runs of docs/rl-algorithms/fast-td3.md. Run again, it does only what is missing.
set -e

# DM control suite of MuJoCo Playground on one GPU, 50 million steps
python -m cleanrl_utils.benchmark \
    --env-ids playground/CheetahRun playground/WalkerRun \
    --command "python cleanrl/fast_td3_continuous_action_jax.py --save-model" \
    --num-seeds 3 \
    --workers "${GPU_WORKERS:-1}"

# the same tasks and steps by PPO, with the settings of Brax's PPO for this suite: an update has
# 2048 x 480 steps (theirs: 16 rollouts of 30 steps each), 16 epochs and minibatches of 30,720 steps
python -m cleanrl_utils.benchmark \
    --env-ids playground/CheetahRun playground/WalkerRun \
    --command "python cleanrl/ppo_continuous_action_brax_jax.py --total-timesteps 50000000 \
        --num-envs 2048 --num-steps 480 --num-minibatches 32 --update-epochs 16 --gamma 0.995 \
        --ent-coef 0.01 --save-model" \
    --num-seeds 3 \
    --workers "${GPU_WORKERS:-1}"
