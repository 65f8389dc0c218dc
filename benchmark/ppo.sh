#!/bin/sh
# The PPO family: all runs of docs/rl-algorithms/ppo.md. Run again, it does only what is missing.
set -e

# classic control on the CPU, 500,000 steps
python -m cleanrl_utils.benchmark \
    --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 \
    --command "python cleanrl/ppo.py --no-cuda" \
    --num-seeds 5 \
    --workers "${WORKERS:-2}"

# Taxi with and without masks, and the known test of masking
python -m cleanrl_utils.benchmark \
    --env-ids Taxi-v4 \
    --command "python cleanrl/ppo_action_mask.py --no-cuda --num-envs 8 --learning-rate 2.5e-3 \
        --total-timesteps 250000" \
    --num-seeds 5 \
    --workers "${WORKERS:-2}"
python -m cleanrl_utils.benchmark \
    --env-ids Taxi-v4 \
    --command "python cleanrl/ppo.py --no-cuda --num-envs 8 --learning-rate 2.5e-3" \
    --num-seeds 5 \
    --workers "${WORKERS:-2}"
python -m cleanrl_utils.benchmark \
    --env-ids cleanrl_utils.environments.examples:MostlyInvalid-v0 \
    --command "python cleanrl/ppo_action_mask.py --no-cuda --gamma 0.4 --gae-lambda 0 \
        --total-timesteps 5000 --num-steps 250 --num-minibatches 20 --update-epochs 10 \
        --learning-rate 3e-3 --no-anneal-lr --save-model --eval-episodes 20" \
    --num-seeds 5 \
    --workers "${WORKERS:-2}"

# board games by self-play
python -m cleanrl_utils.benchmark \
    --env-ids pettingzoo/tictactoe_v3 \
    --command "python cleanrl/ppo_action_mask.py --no-cuda --num-envs 64 --num-steps 64 \
        --num-minibatches 8 --learning-rate 1e-3 --ent-coef 0.02 --total-timesteps 2000000 \
        --save-model --eval-episodes 400" \
    --num-seeds 3 \
    --workers "${WORKERS:-2}"
python -m cleanrl_utils.benchmark \
    --env-ids pettingzoo/connect_four_v3 \
    --command "python cleanrl/ppo_action_mask.py --no-cuda --num-envs 128 --num-steps 64 \
        --learning-rate 1e-3 --ent-coef 0.02 --total-timesteps 1000000 \
        --save-model --eval-episodes 400" \
    --num-seeds 3 \
    --workers "${WORKERS:-2}"

# a picture and a vector, two actions
python -m cleanrl_utils.benchmark \
    --env-ids cleanrl_utils.environments.examples:LookAndListen-v0 \
    --command "python cleanrl/ppo_multi_input.py --no-cuda --total-timesteps 20000 \
        --learning-rate 1e-3" \
    --num-seeds 5 \
    --workers "${WORKERS:-2}"

# MuJoCo on the CPU, 1 million steps
python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 Walker2d-v4 Hopper-v4 InvertedPendulum-v4 Humanoid-v4 Pusher-v5 \
    --command "python cleanrl/ppo_continuous_action.py --no-cuda" \
    --num-seeds 3 \
    --workers "${WORKERS:-2}"

# dm_control on the CPU, 1 million steps, without and with RPO's noise
for script in ppo_continuous_action rpo_continuous_action; do
    python -m cleanrl_utils.benchmark \
        --env-ids dm_control/cartpole-balance-v0 dm_control/walker-walk-v0 \
            dm_control/ball_in_cup-catch-v0 \
        --command "python cleanrl/$script.py --no-cuda --total-timesteps 1000000" \
        --num-seeds 3 \
        --workers "${WORKERS:-2}"
done

# velocities hidden, on the CPU: with a GRU, and without memory
memory=cleanrl_utils.environments.memory
for command in "ppo_recurrent.py" "ppo.py --total-timesteps 300000"; do
    python -m cleanrl_utils.benchmark \
        --env-ids $memory:CartPoleNoVel-v1 \
        --command "python cleanrl/$command --no-cuda" \
        --num-seeds 5 \
        --workers "${WORKERS:-2}"
done
python -m cleanrl_utils.benchmark \
    --env-ids $memory:PendulumNoVel-v1 \
    --command "python cleanrl/ppo_recurrent.py --no-cuda --total-timesteps 300000 --gamma 0.9 \
        --reward-scale 0.05 --update-epochs 10 --num-steps 200 --num-minibatches 8" \
    --num-seeds 5 \
    --workers "${WORKERS:-2}"

# Atari on one GPU, 10 million steps
for script in ppo_atari_envpool ppo_atari_envpool_xla_jax ppo_atari_envpool_xla_jax_scan; do
    python -m cleanrl_utils.benchmark \
        --env-ids Pong-v5 BeamRider-v5 Breakout-v5 \
        --command "python cleanrl/$script.py" \
        --num-seeds 3 \
        --workers "${GPU_WORKERS:-1}"
done
for script in ppo_atari ppo_atari_lstm; do
    python -m cleanrl_utils.benchmark \
        --env-ids PongNoFrameskip-v4 BeamRiderNoFrameskip-v4 BreakoutNoFrameskip-v4 \
        --command "python cleanrl/$script.py --async-envs" \
        --num-seeds 3 \
        --workers "${GPU_WORKERS:-1}"
done

# the same by two processes; where there are several GPUs, a run gets two of them
python -m cleanrl_utils.benchmark \
    --env-ids PongNoFrameskip-v4 BeamRiderNoFrameskip-v4 BreakoutNoFrameskip-v4 \
    --command "torchrun --standalone --nnodes=1 --nproc_per_node=2 cleanrl/ppo_atari_multigpu.py --local-num-envs 4 --async-envs" \
    --num-seeds 3 \
    --gpus-per-run 2 \
    --workers "${GPU_WORKERS:-1}"

# Procgen on one GPU, 25 million steps
python -m cleanrl_utils.benchmark \
    --env-ids starpilot bossfight bigfish \
    --command "python cleanrl/ppo_procgen.py" \
    --num-seeds 3 \
    --workers "${GPU_WORKERS:-1}"

# Atari for two on one GPU, 20 million steps: what counts is the length of games
python -m cleanrl_utils.benchmark \
    --env-ids pong_v3 surround_v2 tennis_v3 basketball_pong_v3 \
    --command "python cleanrl/ppo_pettingzoo_ma_atari.py --async-envs" \
    --num-seeds 3 \
    --workers "${GPU_WORKERS:-1}"

# simulation on one GPU, 30 million steps: by torch, and all in one JAX program
python -m cleanrl_utils.benchmark \
    --env-ids Ant Humanoid Cartpole \
    --command "python cleanrl/ppo_continuous_action_isaacgym.py" \
    --num-seeds 3 \
    --workers "${GPU_WORKERS:-1}"
python -m cleanrl_utils.benchmark \
    --env-ids ant halfcheetah humanoid \
    --command "python cleanrl/ppo_continuous_action_brax_jax.py" \
    --num-seeds 3 \
    --workers "${GPU_WORKERS:-1}"

# environments of gymnax, 500,000 steps
python -m cleanrl_utils.benchmark \
    --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 \
    --command "python cleanrl/ppo_jax.py --no-cuda" \
    --num-seeds 5 \
    --workers "${WORKERS:-1}"

# MinAtar by gymnax on one GPU, 10 million steps: each run is thirty agents in one program
python -m cleanrl_utils.benchmark \
    --env-ids Asterix-MinAtar Breakout-MinAtar Freeway-MinAtar SpaceInvaders-MinAtar \
    --command "python cleanrl/ppo_jax.py --num-seeds 30 --total-timesteps 10000000 --num-envs 64 \
        --num-minibatches 8 --learning-rate 1e-3" \
    --num-seeds 1 \
    --workers "${GPU_WORKERS:-1}"
