#!/bin/sh
# QDagger: all runs of docs/rl-algorithms/qdagger.md, each taught by the model of a run of dqn.sh
# with the same seed. Run again, it does only what is missing.
set -e

for env_id in PongNoFrameskip-v4 BeamRiderNoFrameskip-v4 BreakoutNoFrameskip-v4; do
    for seed in 1 2 3; do
        for backend in "" "_jax"; do
            # the newest one, if there are several
            teacher=$(ls -t runs/"${env_id}__dqn_atari${backend}__${seed}__"*/*.cleanrl_model | head -n 1)
            python -m cleanrl_utils.benchmark \
                --env-ids "$env_id" \
                --command "python cleanrl/qdagger_dqn_atari${backend}_impalacnn.py --save-model --teacher-model $teacher" \
                --num-seeds 1 \
                --start-seed "$seed" \
                --workers "${GPU_WORKERS:-1}"
        done
    done
done
