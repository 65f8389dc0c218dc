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

# Candidates that have not had three seeds yet; those that work move to tuned.toml.
python -m cleanrl_utils.benchmark \
    --env-ids MountainCarContinuous-v0 \
    --command "python cleanrl/ppo_continuous_action.py --total-timesteps 200000 --num-envs 16 --num-steps 256 --no-anneal-lr --gamma 0.999 --gae-lambda 0.98 --exp-name ppo_continuous_action_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids MountainCarContinuous-v0 \
    --command "python cleanrl/rpo_continuous_action.py --total-timesteps 200000 --num-envs 16 --num-steps 256 --no-anneal-lr --gamma 0.999 --gae-lambda 0.98 --exp-name rpo_continuous_action_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids Pendulum-v1 \
    --command "python cleanrl/ppo_continuous_action.py --total-timesteps 200000 --num-envs 4 --num-steps 1024 --num-minibatches 64 --learning-rate 1e-3 --gamma 0.9 --exp-name ppo_continuous_action_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids Pendulum-v1 \
    --command "python cleanrl/rpo_continuous_action.py --total-timesteps 200000 --num-envs 4 --num-steps 1024 --num-minibatches 64 --learning-rate 1e-3 --gamma 0.9 --exp-name rpo_continuous_action_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

# Box2D: pip install -r requirements/requirements-box2d.txt
python -m cleanrl_utils.benchmark \
    --env-ids LunarLander-v3 \
    --command "python cleanrl/ppo.py --total-timesteps 1000000 --num-envs 8 --num-steps 1024 --num-minibatches 128 --no-anneal-lr --gamma 0.999 --gae-lambda 0.98 --exp-name ppo_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids LunarLander-v3 \
    --command "python cleanrl/dqn.py --total-timesteps 300000 --buffer-size 300000 --learning-starts 1000 --learning-rate 6e-4 --train-frequency 1 --exploration-fraction 0.2 --end-e 0.02 --exp-name dqn_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids LunarLanderContinuous-v3 \
    --command "python cleanrl/ppo_continuous_action.py --total-timesteps 1000000 --num-envs 8 --num-steps 1024 --num-minibatches 128 --update-epochs 4 --no-anneal-lr --gamma 0.999 --gae-lambda 0.98 --ent-coef 0.01 --exp-name ppo_continuous_action_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids LunarLanderContinuous-v3 BipedalWalker-v3 \
    --command "python cleanrl/sac_continuous_action.py --total-timesteps 500000 --buffer-size 300000 --gamma 0.98 --tau 0.02 --exp-name sac_continuous_action_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"

python -m cleanrl_utils.benchmark \
    --env-ids BipedalWalker-v3 \
    --command "python cleanrl/ppo_continuous_action.py --total-timesteps 5000000 --num-envs 32 --num-steps 2048 --num-minibatches 1024 --gamma 0.999 --clip-coef 0.18 --no-anneal-lr --exp-name ppo_continuous_action_tuned --save-model" \
    --num-seeds 3 \
    --workers "${WORKERS:-1}"
