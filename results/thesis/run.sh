#!/usr/bin/env bash
# Trains and measures the cells of the study: run.sh OUT [CELL ...], from the root of a clone; without cells all, in order;
# run.sh OUT list names them.
# A cell that was interrupted goes on; one that is complete is left as it is. Two workers divide the cells, an OUT for both.
#
#   data                              the corpus of `make verify`
#   train-MODEL-SEED                  MODEL: pose, rope, nope, alibi, window; control
#   further-control-SEED              a control trained further that has not learned a k; then its need and losses anew
#   again-control-SEED                the same once more, with more of the larger k
#   need-MODEL-SEED                   what targets need as text; L_short and L_inside of all targets
#   cache-MODEL-SEED                  what they need as cache
#   losses-MODEL-SEED-behind-WINDOWS  behind another document's text, so many windows together
#   losses-MODEL-SEED-gap-WINDOWS     ids apart, as far as in so many windows
#   losses-yarn2-SEED-inside          L_short and L_inside of RoPE with YaRN x 2 (yarn4: x 4), which is not trained
#   own-pose-SEED                     need and losses where eight windows of own text are there
#   greedy-pose-SEED-SHARD            need by greedy-kl, too, of the targets of a shard
#   texts-control, need-control-SEED, losses-control-SEED-behind-WINDOWS   the positive control
set -euo pipefail
out=$1
shift
run=${OLMO_SPARSITY:-olmo-sparsity}
window=256
near=32 # tokens of the short context, and targets of a block
n_long=$((window - near)) # the last target of a block reads n_long + near - 1 tokens: with them a window is full
blocks=${BLOCKS:-514} # one of every document that has a window and a block
own_blocks=${BLOCKS:-400}
steps=${STEPS:-} # of a trial: trainings of so many steps
ks=1,2,3,4,5,6,8,16
exact=leave-one-out-kl
contiguous=(--positions.scheme=contiguous --positions.target_length=null)

train() { # cell seed config options
  local cell=$1 seed=$2 config=$3
  shift 3
  if [[ -n $steps ]]; then set -- "$@" "--max_duration=$steps" "--scheduler.t_warmup=1"; fi
  $run train "$config" --resume "--seed=$seed" "--save_folder=$out/$cell" "$@"
}

train_model() { # model seed
  local options=("--corpus.path=$out/data")
  case $1 in
    pose) ;;
    rope) options+=("${contiguous[@]}") ;;
    nope) options+=("${contiguous[@]}" --model.rope=false --model.nope=true) ;;
    alibi) options+=("${contiguous[@]}" --model.rope=false --model.alibi=true) ;;
    window) options+=("${contiguous[@]}" --model.rope_window=56) ;;
    *) echo "no model $1" >&2; return 1 ;;
  esac
  train "train-$1-$2" "$2" configs/demo.yaml "${options[@]}"
}

train_control() { # seed stages before folder; parity of planted bits, of more in every stage, as in ../synthetic/study.sh text
  local shape=(--model.family=olmo --model.d_model=256 --model.n_heads=4 --model.n_layers=4 --model.mlp_ratio=4
    --model.weight_tying=true --model.vocab_size=4099 --model.max_sequence_length=65)
  local task=("--task.parameters.text=$out/data" "--task.parameters.train_length=[16,64]" --task.parameters.locality=null
    "--task.parameters.test_length=[16,64]" --positions.target_length=128)
  local how=(--optimizer.learning_rate=1e-3 --scheduler.t_warmup=50 --global_train_batch_size=32
    --device_train_microbatch_size=16 --evaluation.interval=250 --evaluation.windows=200)
  local stage least most duration before=()
  if [[ -n $3 ]]; then before=("--initial_weights=$3"); fi
  for stage in $2; do
    least=${stage%%-*}
    most=${stage#*-}
    duration=${most#*:}
    most=${most%:*}
    local options=("--max_duration=$duration" "--task.parameters.k_train_min=$least" "--task.parameters.k_train=$most"
      "--task.parameters.k_test=[$most]")
    if [[ $least == 4 ]]; then options+=(--evaluation.until=0.98); fi
    train "$4/$stage" "$1" configs/synthetic/planted-small.yaml "${shape[@]}" "${task[@]}" "${how[@]}" \
      "${options[@]}" "${before[@]}"
    before=("--initial_weights=$out/$4/$stage")
  done
}

refuse_unfinished() { # training
  local states=("$1"/step*/state.json)
  if ! grep -qs '"finished": true' "${states[-1]}"; then
    echo "$1 is not trained to its end: run its cell first" >&2
    return 1
  fi
}

train_further() { # seed before stages folder: a control that has not learned goes on from weights
  refuse_unfinished "$2"
  if [[ -e $out/need-control-$1 ]]; then
    echo "need-control-$1 is of the training before: remove it, and losses-control-$1-*" >&2
    return 1
  fi
  train_control "$1" "$3" "$2" "$4"
}

model_of_control() { # seed
  local folder=$out/train-control-$1
  if [[ -d $folder/again ]]; then
    echo "$folder/again/1-4:1000"
  elif [[ -d $folder/1-4:2000 ]]; then
    echo "$folder/1-4:2000"
  else
    echo "$folder/1-4:1000"
  fi
}

measure() { # cell model options
  local cell=$1 model=$2
  shift 2
  if [[ -f $out/$cell/result.json ]]; then return; fi
  refuse_unfinished "${model%@yarn:*}"
  $run measure "$model" --corpus "$out/data" --n-long $n_long --n-short $near --targets-per-block $near \
    --targets $((near * blocks)) --seed 0 --placebos none --out "$out/$cell" "$@"
}

measure_control() { # cell seed options
  local cell=$1 seed=$2
  shift 2
  if [[ -f $out/$cell/result.json ]]; then return; fi
  local model
  model=$(model_of_control "$seed")
  refuse_unfinished "$model"
  $run measure "$model" --text "$out/texts-control/planted.jsonl" \
    --tokenizer "$out/texts-control/tokenizer.json" --n-long 56 --n-short 8 --targets-per-block 1 \
    --targets "$(wc -l < "$out/texts-control/planted.jsonl")" --seed 0 --placebos none --tau 0.35 --out "$out/$cell" "$@"
}

path_of() { # model seed
  case $1 in
    yarn*) echo "$out/train-rope-$2@yarn:${1#yarn}" ;;
    *) echo "$out/train-$1-$2" ;;
  esac
}

cell() {
  local kind model seed context windows
  IFS=- read -r kind model seed context windows <<< "$1"
  local need=(--k "$ks" --selectors "$exact")
  local lost=(--selectors none)
  case $kind-$model-$context in
    data--) $run prepare-data docs --tokenizer results/checkpoint/tokenizer.json --out "$out/data" ;;
    train-control-) train_control "$seed" "1-1:250 1-2:500 4-4:1000 1-4:1000" "" "train-control-$seed" ;;
    further-control-)
      train_further "$seed" "$out/train-control-$seed/1-4:1000" 1-4:2000 "train-control-$seed" ;;
    again-control-)
      train_further "$seed" "$out/train-control-$seed/1-4:2000" "3-4:2000 1-4:1000" "train-control-$seed/again" ;;
    train-*-) train_model "$model" "$seed" ;;
    texts-control-) python results/thesis/planted.py "$out/data" "$out/texts-control" ;;
    need-control-) measure_control "$1" "$seed" "${need[@]}" ;;
    losses-control-behind) measure_control "$1" "$seed" "${lost[@]}" --before $((64 * (windows - 1))) ;;
    need-*-) measure "$1" "$(path_of "$model" "$seed")" "${need[@]}" ;;
    cache-*-)
      measure "$1" "$(path_of "$model" "$seed")" --k $ks --selectors $exact/cache:4 --keep-as cache:4
      ;;
    own-*-) # 2, 3, 4 and 8 windows, less a block
      measure "$1" "$(path_of "$model" "$seed")" "${need[@]}" --lengths 480,736,992,2016 \
        --targets $((near * own_blocks))
      ;;
    greedy-*-*) # the fifth word is part of a shard such as 1/10: written 1-10
      measure "$kind-$model-$seed" "$(path_of "$model" "$seed")" --k 1,2,3,4,5,6,8 --selectors "$exact,greedy-kl" \
        --shard "$context/$windows" ;;
    losses-*-inside) measure "$1" "$(path_of "$model" "$seed")" "${lost[@]}" ;;
    losses-*-behind) measure "$1" "$(path_of "$model" "$seed")" "${lost[@]}" --before $((window * (windows - 1))) ;;
    losses-*-gap) measure "$1" "$(path_of "$model" "$seed")" "${lost[@]}" --gap $((window * (windows - 1))) ;;
    *) echo "no cell $1" >&2; return 1 ;;
  esac
}

losses_of() { # model seed windows-behind windows-of-ids-apart
  local windows
  for windows in $3; do all+=("losses-$1-$2-behind-$windows"); done
  for windows in $4; do all+=("losses-$1-$2-gap-$windows"); done
}

all=(data texts-control)
for seed in 1 2 3; do # first: if no slope is seen here, the text half is not read
  all+=("train-control-$seed" "need-control-$seed")
  for windows in 2 3 4 8 16 32; do all+=("losses-control-$seed-behind-$windows"); done
done
for seed in 1 2 3; do
  all+=("train-pose-$seed" "need-pose-$seed" "cache-pose-$seed" "own-pose-$seed")
  losses_of pose "$seed" "2 3 4 8" "2 3 4 8"
done
for seed in 1 2 3; do
  all+=("train-rope-$seed" "need-rope-$seed")
  losses_of rope "$seed" "2 3 4" "2 3 4"
done
for model in nope alibi window; do
  for seed in 1 2 3; do
    all+=("train-$model-$seed" "need-$model-$seed")
    losses_of "$model" "$seed" "2 3 4" "2 4"
  done
done
for model in yarn2 yarn4; do
  for seed in 1 2 3; do
    all+=("losses-$model-$seed-inside")
    losses_of "$model" "$seed" "2 3 4" ""
  done
done
for seed in 1 2 3; do all+=("greedy-pose-$seed-1-10"); done

cells=("$@")
if [[ $# -eq 0 ]]; then cells=("${all[@]}"); fi
if [[ ${#cells[@]} -eq 1 && ${cells[0]} == list ]]; then
  printf '%s\n' "${all[@]}"
  exit
fi
for name in "${cells[@]}"; do cell "$name"; done
