#!/usr/bin/env bash
# Chooses training text, trains on it and measures: run.sh OUT [CELL ...], from the root of a clone; without cells all,
# in order; run.sh OUT list names them. OUT is the folder of ../run.sh, whose corpus and first model are used, and made
# where they are missing; cells of this study go to OUT/selected.
# A cell that was interrupted goes on; one that is complete is left as it is. Workers divide the cells after `chosen`.
#
#   ranking              what the far context of every training document is worth to train-pose-1
#   chosen               scores, and the thirds as text
#   data-THIRD           top, easy, random-2, random-3, random-4 as corpora
#   train-THIRD-SEED     THIRD: top, random, easy; RoPE + PoSE
#   heldout-THIRD-SEED   losses of the held-out targets of ../README.md
#   length               loss by position of all nine
set -euo pipefail
thesis=$1
out=$1/selected
shift
run=${OLMO_SPARSITY:-olmo-sparsity}
blocks=${BLOCKS:-514} # those of ../run.sh
ranked_blocks=${RANKED_BLOCKS:-13771} # four of 128 targets of each of 4,130 documents, where it has so many
windows=${WINDOWS:-256}
steps=${STEPS:-} # of a trial: trainings of so many steps
thirds=(random top easy)
seeds=(2 3 4)

refuse_unfinished() { # training
  local states=("$1"/step*/state.json)
  if ! grep -qs '"finished": true' "${states[-1]}"; then
    echo "$1 is not trained to its end: run its cell first" >&2
    return 1
  fi
}

measure() { # cell model options
  local cell=$1 model=$2
  shift 2
  if [[ -f $out/$cell/result.json ]]; then return; fi
  refuse_unfinished "$model"
  $run measure "$model" --corpus "$thesis/data" --n-short 32 --seed 0 --selectors none \
    --placebos placebo --out "$out/$cell" "$@"
}

train() { # third seed
  local corpus=$1
  if [[ $1 == random ]]; then corpus=random-$2; fi
  local options=("--corpus.path=$out/data-$corpus")
  if [[ -n $steps ]]; then options+=("--max_duration=$steps" "--scheduler.t_warmup=1"); fi
  $run train configs/demo.yaml --resume "--seed=$2" "--save_folder=$out/train-$1-$2" "${options[@]}"
}

length() {
  if [[ -f $out/length/length.json ]]; then return; fi
  local models=() labels=() third seed
  for third in "${thirds[@]}"; do
    for seed in "${seeds[@]}"; do
      refuse_unfinished "$out/train-$third-$seed"
      models+=("$out/train-$third-$seed")
      labels+=("$third")
    done
  done
  $run length "${models[@]}" --labels "$(IFS=,; echo "${labels[*]}")" --corpus "$thesis/data" \
    --lengths 128,256,512,1024 --windows "$windows" --out "$out/length"
}

cell() {
  local kind third seed
  IFS=- read -r kind third seed <<< "$1"
  case $kind in
    ranking)
      if [[ -f $out/ranking/result.json ]]; then return; fi
      bash results/thesis/run.sh "$thesis" data train-pose-1
      measure ranking "$thesis/train-pose-1" --split train --n-long 256 --targets-per-block 128 \
        --targets $((128 * ranked_blocks))
      ;;
    chosen)
      if [[ -f $out/chosen/scores.json ]]; then return; fi
      python results/thesis/selected/choose.py "$thesis/data" "$out/ranking" "$out/chosen"
      ;;
    data)
      $run prepare-data text --files "$out/chosen/${1#data-}.jsonl" --heldout-files "$out/chosen/heldout.jsonl" \
        --group-field group --tokenizer "$thesis/data/tokenizer.json" --no-decontaminate --near-copy-tokens 0 \
        --out "$out/$1"
      ;;
    train) train "$third" "$seed" ;;
    heldout) # contexts end with the window, as in ../run.sh
      measure "$1" "$out/train-$third-$seed" --n-long 224 --targets-per-block 32 --targets $((32 * blocks))
      ;;
    length) length ;;
    *) echo "no cell $1" >&2; return 1 ;;
  esac
}

all=(ranking chosen data-top data-easy)
for seed in "${seeds[@]}"; do all+=("data-random-$seed"); done
for seed in "${seeds[@]}"; do
  for third in "${thirds[@]}"; do all+=("train-$third-$seed" "heldout-$third-$seed"); done
done
all+=(length)

cells=("$@")
if [[ $# -eq 0 ]]; then cells=("${all[@]}"); fi
if [[ ${#cells[@]} -eq 1 && ${cells[0]} == list ]]; then
  printf '%s\n' "${all[@]}"
  exit
fi
for name in "${cells[@]}"; do cell "$name"; done
