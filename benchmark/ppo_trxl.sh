#!/bin/sh
# All runs of docs/rl-algorithms/ppo-trxl.md. Run again, it does only what is missing.
set -e

run() { # environment, then flags
    env_id=$1
    shift
    python -m cleanrl_utils.benchmark \
        --env-ids "$env_id" \
        --command "python cleanrl/ppo_trxl.py --async-envs $*" \
        --num-seeds 3 \
        --workers "${GPU_WORKERS:-1}"
}

# a T-maze on the CPU, in minutes: with a memory that reaches the first step, and with one that does not
for memory in 64 1; do
    name=ppo_trxl
    if [ "$memory" = 1 ]; then name=ppo_trxl_memory1; fi
    python -m cleanrl_utils.benchmark \
        --env-ids cleanrl_utils.environments.memory:TMaze-v0 \
        --command "python cleanrl/ppo_trxl.py --no-cuda --exp-name $name --total-timesteps 150000 \
            --anneal-steps 150000 --num-steps 128 --trxl-dim 32 --trxl-num-layers 1 --trxl-memory-length $memory \
            --init-lr 2e-3 --norm-adv --init-ent-coef 0.01 --torch-threads 1" \
        --num-seeds 3 \
        --workers "${WORKERS:-2}"
done

# memory lengths as the original chose them; episodes of the first take at most 119 steps
run MortarMayhem-Grid-v0 --norm-adv --trxl-memory-length 119 --total-timesteps 100000000
run MysteryPath-Grid-v0 --trxl-memory-length 96 --total-timesteps 100000000
run MortarMayhem-v0 --reconstruction-coef 0.1 --trxl-memory-length 275
run MysteryPath-v0 --trxl-memory-length 256
run SearingSpotlights-v0 --reconstruction-coef 0.1 --trxl-memory-length 256
