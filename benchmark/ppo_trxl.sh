#!/bin/sh
# All runs of docs/rl-algorithms/ppo-trxl.md, on one GPU. Run again, it does only what is missing.
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

# memory lengths as the original chose them; episodes of the first take at most 119 steps
run MortarMayhem-Grid-v0 --norm-adv --trxl-memory-length 119 --total-timesteps 100000000
run MysteryPath-Grid-v0 --trxl-memory-length 96 --total-timesteps 100000000
run MortarMayhem-v0 --reconstruction-coef 0.1 --trxl-memory-length 275
run MysteryPath-v0 --trxl-memory-length 256
run SearingSpotlights-v0 --reconstruction-coef 0.1 --trxl-memory-length 256
