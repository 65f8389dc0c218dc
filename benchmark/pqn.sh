#!/bin/sh
# PQN: all runs of docs/rl-algorithms/pqn.md. Run again, it does only what is missing.
set -e

# classic control on the CPU, 500,000 steps
python -m cleanrl_utils.benchmark \
    --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 \
    --command "python cleanrl/pqn.py --no-cuda" \
    --num-seeds 5 \
    --workers "${WORKERS:-1}"

# Atari on one GPU, 10 million steps
for script in pqn_atari_envpool pqn_atari_envpool_lstm; do
    python -m cleanrl_utils.benchmark \
        --env-ids Pong-v5 BeamRider-v5 Breakout-v5 MsPacman-v5 SpaceInvaders-v5 \
        --command "python cleanrl/$script.py" \
        --num-seeds 3 \
        --workers "${GPU_WORKERS:-1}"
done

# environments of gymnax, 500,000 steps: each run is thirty agents in one program
python -m cleanrl_utils.benchmark \
    --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 \
    --command "python cleanrl/pqn_jax.py --num-seeds 30" \
    --num-seeds 1 \
    --workers "${WORKERS:-1}"

# MinAtar by gymnax on one GPU, 10 million steps: each run is thirty agents in one program
python -m cleanrl_utils.benchmark \
    --env-ids Asterix-MinAtar Breakout-MinAtar Freeway-MinAtar SpaceInvaders-MinAtar \
    --command "python cleanrl/pqn_jax.py --num-seeds 30 --total-timesteps 10000000 --num-envs 128 \
        --num-steps 32 --num-minibatches 32 --update-epochs 2 --learning-rate 5e-4 \
        --q-lambda 0.65 --reward-scale 1 --exploration-fraction 0.1" \
    --num-seeds 1 \
    --workers "${GPU_WORKERS:-1}"
