#!/bin/bash
# The study of this folder, from the root of a clone: bash results/theory/study.sh all, or a part: PART [SEEDS]
# Goes on where it was when the same command is given again. JOBS processes at a time.
set -euo pipefail
JOBS=${JOBS:-2} OUT=runs/theory SEEDS=${2:-1,2,3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PY=${PY:-.venv/bin/python}

TUPLES=configs/synthetic/planted-tuples.yaml REAL=configs/synthetic/planted-small.yaml
# Tuples: few steps, so that there is an error to grow; after 1,000 it was about 2e-6 (k = K_train = 2, seed 1)
FEW=(--max_duration=500)
# GPT-NeoX: trained on up to 50 tokens, k = 3, it is right on all of 100 samples after 2,500 of 4,000 such steps (seed 1)
NEOX=(--global_train_batch_size=32 --device_train_microbatch_size=32 --max_duration=2500 --optimizer.learning_rate=1e-3
      --positions.target_length=1024)
LENGTHS=10,20,30,50,70,100,150,200,300,400,600,1000
# L_local = L / 4, of tuples that of the task
OF_LENGTH='{train_length: [10, 20], locality: 5},{train_length: [15, 30], locality: 7},{train_length: [20, 50], locality: 12}'
LOCAL='--model.tuples.locality=${task.parameters.locality}'
PAIRS=(--task.parameters.k_train=2 "--task.parameters.k_test=[2]")

sweep() { # NAME CONFIG [GRID...] -- [OPTION...]: each is tested up to 20 L
    local name=$1 config=$2 grids=()
    shift 2
    while [ "$1" != -- ]; do grids+=(--grid "$1") && shift; done
    $PY scripts/sweep.py "$config" "${grids[@]}" --grid seed="$SEEDS" --out "$OUT/$name" --jobs "$JOBS" \
        --evaluate "--samples 300 --seed 1 --lengths $LENGTHS" \
        -- "--task.parameters.test_length=[10,1000]" "${@:2}"
}

bound() { # over k and L: tuples of k tokens, and GPT-NeoX on the same samples
    local grids=(task.parameters.k_train=1,2,3 "task.parameters=$OF_LENGTH")
    local tested="--task.parameters.k_test=['\${task.parameters.k_train}']"
    sweep bound/tuples $TUPLES "${grids[@]}" -- \
        '--model.tuples.size=${task.parameters.k_train}' "$LOCAL" "$tested" "${FEW[@]}"
    sweep bound/gpt_neox $REAL "${grids[@]}" -- "$tested" "${NEOX[@]}"
}

spread() { # how far apart the planted tokens are
    local grids=(task.parameters.position_distribution=uniform,adjacent,stretched task.parameters.locality=3,12,24)
    sweep spread/tuples $TUPLES "${grids[@]}" -- "$LOCAL" "${PAIRS[@]}" "${FEW[@]}"
    sweep spread/gpt_neox $REAL "${grids[@]}" -- "${NEOX[@]}" "${PAIRS[@]}"
}

assumptions() { # tuples without locality, without relativity
    sweep assumptions $TUPLES model.tuples.relative=true,false model.tuples.locality=null,12 -- "${PAIRS[@]}" "${FEW[@]}"
}

coupling() { # planted tokens that stand anywhere, with and without ids that bring them together
    local anywhere=(--task.parameters.locality=null --positions.table_size=1024 "${PAIRS[@]}")
    sweep coupling/tuples $TUPLES positions.scheme=contiguous,coupled model.tuples.locality=null,12 -- \
        "${anywhere[@]}" "${FEW[@]}"
    sweep coupling/gpt_neox $REAL positions.scheme=contiguous,pose,coupled -- \
        "${NEOX[@]}" "${anywhere[@]}"
    sweep coupling/olmo $REAL model.rope_window=null,12 -- "${NEOX[@]}" "${anywhere[@]}" --model.family=olmo \
        --positions.scheme=coupled # attention to every id, and within 12
}

minimax() { # each step on the lengths that are worst
    local groups=(task.length_groups=null,4)
    sweep minimax/tuples $TUPLES "${groups[@]}" -- "${PAIRS[@]}" --global_train_batch_size=512 \
        --device_train_microbatch_size=512 "${FEW[@]}"
    sweep minimax/gpt_neox $REAL "${groups[@]}" -- "${PAIRS[@]}" "${NEOX[@]}" --global_train_batch_size=128 \
        --device_train_microbatch_size=128
}

all() {
    local part
    for part in assumptions bound spread coupling minimax; do $part; done
}

declare -F "${1-}" >/dev/null || { echo "give one of: $(compgen -A function -X sweep | xargs)" >&2 && exit 2; }
"$1"
