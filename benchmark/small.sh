#!/bin/sh
# Small runs on a CPU: they show that a script learns, and no more. Run again, it does only what is
# missing. The scores of full runs come from the other files of this folder.
set -e

run() { # run ENV_ID SCRIPT.py FLAGS...
    env_id=$1
    shift
    python -m cleanrl_utils.benchmark --env-ids "$env_id" --command "python cleanrl/$*" \
        --num-seeds 1 --workers "${WORKERS:-1}"
}

# on-policy, default settings
run BreakoutNoFrameskip-v4 ppo_atari.py --exp-name ppo_atari_small \
    --total-timesteps 500000 --torch-threads 1 --save-model
run BreakoutNoFrameskip-v4 ppo_atari_lstm.py --exp-name ppo_atari_lstm_small \
    --total-timesteps 200000 --torch-threads 1 --save-model
run Breakout-v5 ppo_atari_envpool_xla_jax.py --exp-name ppo_atari_envpool_xla_jax_small \
    --total-timesteps 200000 --save-model
run Breakout-v5 pqn_atari_envpool_lstm.py --exp-name pqn_atari_envpool_lstm_small \
    --total-timesteps 200000 --torch-threads 1 --save-model

run Freeway-v5 ppo_rnd_envpool.py --exp-name ppo_rnd_envpool_small --num-envs 8 \
    --num-iterations-obs-norm-init 10 --total-timesteps 500000 --torch-threads 1 --save-model
run Freeway-v5 ppo_atari_envpool.py --exp-name ppo_atari_envpool_small \
    --total-timesteps 500000 --torch-threads 1
run pong_v3 ppo_pettingzoo_ma_atari.py --exp-name ppo_pettingzoo_ma_atari_small \
    --total-timesteps 1200000 --torch-threads 1 --save-model

python -m cleanrl_utils.benchmark --env-ids BreakoutNoFrameskip-v4 \
    --num-seeds 1 --workers "${WORKERS:-1}" \
    --command "torchrun --standalone --nnodes=1 --nproc_per_node=2 cleanrl/ppo_atari_multigpu.py \
        --exp-name ppo_atari_multigpu_small --local-num-envs 4 --total-timesteps 150000 \
        --torch-threads 1 --save-model"

# Q-learning, scaled to few steps: exploration, target network and replay memory
few="--learning-starts 2000 --target-network-frequency 500 --save-model"
explore="--exploration-fraction 0.2 --end-e 0.02"
run RoadRunnerNoFrameskip-v4 dqn_atari.py --exp-name dqn_atari_small $few $explore \
    --total-timesteps 100000 --buffer-size 100000 --learning-rate 2.5e-4 --torch-threads 1
run RoadRunnerNoFrameskip-v4 dqn_atari_jax.py --exp-name dqn_atari_jax_small $few $explore \
    --total-timesteps 50000 --buffer-size 50000 --learning-rate 2.5e-4
run RoadRunnerNoFrameskip-v4 c51_atari_jax.py --exp-name c51_atari_jax_small $few $explore \
    --total-timesteps 50000 --buffer-size 50000
run RoadRunnerNoFrameskip-v4 rainbow_atari.py --exp-name rainbow_atari_small $few $explore \
    --total-timesteps 50000 --buffer-size 50000 --learning-rate 2.5e-4 --torch-threads 1
run CrazyClimberNoFrameskip-v4 sac_atari.py --exp-name sac_atari_small --total-timesteps 50000 \
    --buffer-size 50000 --learning-starts 2000 --target-network-frequency 500 --batch-size 32 \
    --no-autotune --alpha 0.05 --torch-threads 1 --save-model
run RoadRunnerNoFrameskip-v4 dqn_atari_jax.py --exp-name qdagger_jax_teacher $few $explore \
    --total-timesteps 100000 --buffer-size 100000 --learning-rate 2.5e-4

# students of the models of dqn_atari_small and qdagger_jax_teacher
few="--teacher-steps 10000 --teacher-eval-episodes 5 --buffer-size 20000 --learning-starts 500"
few="$few --target-network-frequency 500 --learning-rate 2.5e-4 --save-model"
teacher() {
    ls -t runs/RoadRunnerNoFrameskip-v4__"$1"__1__*/"$1".cleanrl_model | head -n 1
}
run RoadRunnerNoFrameskip-v4 qdagger_dqn_atari_impalacnn.py --exp-name qdagger_small $few \
    --offline-steps 4000 --total-timesteps 16000 --torch-threads 1 \
    --teacher-model "$(teacher dqn_atari_small)"
run RoadRunnerNoFrameskip-v4 qdagger_dqn_atari_jax_impalacnn.py --exp-name qdagger_jax_small \
    $few --offline-steps 6000 --total-timesteps 20000 --batch-size 16 \
    --teacher-model "$(teacher qdagger_jax_teacher)"

# continuous control
run Pendulum-v1 droq_continuous_action.py --exp-name droq_small \
    --total-timesteps 6000 --learning-starts 1000 --save-model --eval-episodes 20
run Pendulum-v1 crossq_continuous_action_jax.py --exp-name crossq_jax_small \
    --critic-width 128 --learning-starts 1000 --total-timesteps 20000 --save-model \
    --eval-episodes 10
run Pendulum-v1 simbav2_continuous_action.py --exp-name simbav2_small \
    --gamma 0.975 --critic-width 64 --learning-starts 1000 --total-timesteps 15000 \
    --torch-threads 1 --no-cuda --save-model --eval-episodes 10
run inverted_pendulum fast_td3_continuous_action_jax.py --exp-name fast_td3_small \
    --num-envs 16 --batch-size 256 --total-timesteps 250000 --buffer-size 100000 \
    --learning-starts 160 --actor-width 128 --critic-width 128 --gamma 0.99 --v-min -100 \
    --v-max 100 --save-model --eval-episodes 10
