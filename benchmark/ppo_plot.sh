#!/bin/sh
# Curves of the PPO family's results in benchmark/results, as runs/NAME.png and .svg.
set -e

mkdir -p runs
for results in benchmark/results/ppo*.json; do
    script=$(basename "$results" .json)
    python -m cleanrl_utils.rlops --results --exp-name "$script" --output-filename "runs/$script.png"
done
