#!/bin/sh
# Tuned settings: the runs of docs/rl-algorithms/tuned.md. Run again, it does only what is missing.
set -e

# Settings of cleanrl_utils/running/tuned.toml; the MinAtar games are in ppo.sh and pqn.sh.
python -m cleanrl_utils.benchmark \
    --env-ids Acrobot-v1 \
    --command "python cleanrl/ppo_jax.py --tuned --num-seeds 5 --exp-name ppo_jax_tuned --save-model" \
    --num-seeds 1 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids Acrobot-v1 \
    --command "python cleanrl/pqn_jax.py --tuned --num-seeds 5 --exp-name pqn_jax_tuned --save-model" \
    --num-seeds 1 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids MountainCar-v0 \
    --command "python cleanrl/pqn_jax.py --tuned --num-seeds 5 --exp-name pqn_jax_tuned --save-model" \
    --num-seeds 1 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids FrozenLake-v1 \
    --command "python cleanrl/ppo.py --tuned --exp-name ppo_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids FrozenLake-v1 \
    --command "python cleanrl/dqn.py --tuned --exp-name dqn_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids MountainCarContinuous-v0 Pendulum-v1 \
    --command "python cleanrl/ppo_continuous_action.py --tuned --exp-name ppo_continuous_action_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids MountainCarContinuous-v0 \
    --command "python cleanrl/rpo_continuous_action.py --tuned --exp-name rpo_continuous_action_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids MountainCar-v0 \
    --command "python cleanrl/dqn.py --tuned --eval-episodes 20 --exp-name dqn_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids Pendulum-v1 \
    --command "python cleanrl/sac_continuous_action.py --tuned --eval-episodes 20 --exp-name sac_continuous_action_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

# Box2D: pip install -r requirements/requirements-box2d.txt
python -m cleanrl_utils.benchmark \
    --env-ids LunarLander-v3 \
    --command "python cleanrl/ppo.py --tuned --exp-name ppo_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids LunarLanderContinuous-v3 \
    --command "python cleanrl/ppo_continuous_action.py --tuned --exp-name ppo_continuous_action_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids LunarLanderContinuous-v3 \
    --command "python cleanrl/rpo_continuous_action.py --tuned --exp-name rpo_continuous_action_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids LunarLander-v3 \
    --command "python cleanrl/dqn.py --tuned --eval-episodes 20 --exp-name dqn_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

for script in ppo_continuous_action rpo_continuous_action; do
    python -m cleanrl_utils.benchmark \
        --env-ids BipedalWalker-v3 \
        --command "python cleanrl/$script.py --tuned --eval-episodes 20 --exp-name ${script}_tuned --save-model" \
        --num-seeds 3 \
        --workers "${WORKERS:-1}"
done
