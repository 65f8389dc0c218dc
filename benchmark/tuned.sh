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

# Candidates that have not had three seeds yet; those that work move to tuned.toml.
python -m cleanrl_utils.benchmark \
    --env-ids Pendulum-v1 \
    --command "python cleanrl/sac_continuous_action.py --total-timesteps 30000 --learning-starts 1000 --exp-name sac_continuous_action_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids MountainCar-v0 \
    --command "python cleanrl/dqn.py --total-timesteps 200000 --learning-rate 1e-3 --buffer-size 50000 --learning-starts 1000 --train-frequency 2 --exploration-fraction 0.2 --end-e 0.02 --exp-name dqn_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids LunarLander-v3 \
    --command "python cleanrl/dqn.py --total-timesteps 400000 --num-envs 4 --learning-rate 5e-4 --buffer-size 100000 --learning-starts 5000 --train-frequency 4 --tau 0.01 --target-network-frequency 4 --exploration-fraction 0.15 --end-e 0.01 --exp-name dqn_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids BipedalWalker-v3 \
    --command "python cleanrl/ppo_continuous_action.py --total-timesteps 1000000 --num-envs 16 --num-steps 512 --num-minibatches 64 --update-epochs 8 --learning-rate 7e-4 --no-clip-vloss --exp-name ppo_continuous_action_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids BipedalWalker-v3 \
    --command "python cleanrl/sac_continuous_action.py --total-timesteps 500000 --buffer-size 300000 --gamma 0.98 --tau 0.02 --exp-name sac_continuous_action_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"
