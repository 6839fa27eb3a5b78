#!/bin/bash
# The study of this folder, a part at a time, from the root of a clone: bash results/encodings/study.sh PART [SEEDS]
# Each part goes on where it was when the same command is given again. DATA has the text; JOBS processes at a time.
set -euo pipefail
DATA=${DATA:-data} JOBS=${JOBS:-2} OUT=runs/encodings SEEDS=${2:-1,2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PY=${PY:-.venv/bin/python} OUT

TRAINED=(rope random_start random_float pose pose4 pose16 nope alibi hybrid ssmax fox entmax asentmax scale-invariant
    dape-v2 sparsek)
declare -A LABELS=(
    [rope]="RoPE" [random_start]="RoPE random start" [random_float]="RoPE random float" [pose]="RoPE + PoSE (2 chunks)"
    [pose4]="RoPE + PoSE (4 chunks)" [pose16]="RoPE + PoSE (16 chunks)" [nope]="NoPE" [alibi]="ALiBi"
    [hybrid]="hybrid" [ssmax]="SSMax" [fox]="FoX" [entmax]="entmax" [asentmax]="ASEntmax"
    [scale-invariant]="scale-invariant" [dape-v2]="DAPE v2" [sparsek]="SparseK" [drope]="DroPE"
    [ssmax-late]="SSMax late" [rope@linear:4]="RoPE linear x 4" [rope@ntk:4]="RoPE NTK x 4"
    [rope@yarn:4]="RoPE YaRN x 4" [rope@yarn:16]="RoPE YaRN x 16" [rope@log-n:4]="RoPE log-n"
)
MODELS=("${TRAINED[@]}" drope ssmax-late rope@linear:4 rope@ntk:4 rope@yarn:4)

checkpoint() { # NAME[@SCALING] SEED
    echo "$OUT/config=${1%@*},seed=$2${1#"${1%@*}"}"
}

prepare() {
    $PY scripts/prepare_data.py text --files "$DATA"/books{,-more}-train.*.json.gz \
        --heldout-files "$DATA"/books{,-more}-validation.*.json.gz --vocab-size 4096 --group-field url --out $OUT/data
}

train() { # the last two go on from RoPE's weights
    local configs=("${TRAINED[@]/#/configs/length/}")
    configs=("${configs[@]/%/.yaml}")
    $PY scripts/sweep.py "${configs[@]}" --grid seed="$SEEDS" --out $OUT --jobs "$JOBS" -- --corpus.path=$OUT/data
    $PY scripts/sweep.py "${configs[@]}" configs/length/{drope,ssmax-late}.yaml --grid seed="$SEEDS" --out $OUT \
        --jobs "$JOBS" -- --corpus.path=$OUT/data
}

influence() { # inside the window: which of 112 far tokens matter; beyond it: what 512 tokens give over the window's 128
    local name seed
    for seed in ${SEEDS//,/ }; do
        for name in "${MODELS[@]}"; do
            echo "$(checkpoint "$name" "$seed") $OUT/inside/$name,seed=$seed --n-short 16 --n-long 128 \
                --selectors leave-one-out-kl,leave-one-out,random"
            echo "$(checkpoint "$name" "$seed") $OUT/beyond/$name,seed=$seed --n-short 128 --n-long 512 \
                $([ "$name" = fox ] && echo --tau 0.1) --selectors random --k 4"
        done
    done | xargs -P "$JOBS" -L 1 bash -c 'olmo-sparsity measure "$0" \
        --corpus $OUT/data --out "$1" --targets 8000 --targets-per-block 16 "${@:2}"'
}

length() { # Mesa reads in chunks, and its attention is not to be had: apart
    local name seed checkpoints=() labels="" mesa=() mesa_labels=""
    local options=(--corpus $OUT/data --lengths 128,256,512,1024,2048 --windows 128)
    for name in "${MODELS[@]}" rope@yarn:16 rope@log-n:4; do
        for seed in ${SEEDS//,/ }; do
            checkpoints+=("$(checkpoint "$name" "$seed")")
            labels+=",${LABELS[$name]}"
        done
    done
    $PY results/encodings/attention.py "${checkpoints[@]}" --labels "${labels#,}" "${options[@]}" --out $OUT/length
    for seed in ${SEEDS//,/ }; do
        mesa+=("$(checkpoint rope "$seed")")
        mesa_labels+=",RoPE Mesa"
    done
    $PY results/encodings/mesa.py "${mesa[@]}" --factor 16 --labels "${mesa_labels#,}" "${options[@]}" \
        --out $OUT/length-mesa
}

control() { # RoPE trained on windows of 512 with as many tokens: how much there is to use
    $PY scripts/sweep.py configs/length/rope.yaml --grid seed="$SEEDS" --out $OUT/rope-512 --jobs "$JOBS" \
        -- --corpus.path=$OUT/data --model.max_sequence_length=512 --global_train_batch_size=8 \
        --device_train_microbatch_size=2
    for seed in ${SEEDS//,/ }; do
        olmo-sparsity measure $OUT/rope-512/seed="$seed" --corpus $OUT/data --out $OUT/rope-512/beyond-"$seed" \
            --targets 8000 --targets-per-block 16 --n-short 128 --n-long 512 --selectors random --k 4
    done
}

needles() { # short windows first; position schemes go on from RoPE's weights
    local data=runs/retrieval/data short=$OUT/needles/short long=$OUT/needles/long name first attentions=()
    $PY scripts/prepare_data.py text --files "$DATA"/books-train.*.json.gz --heldout-files \
        "$DATA"/books{,-more}-validation.*.json.gz --vocab-size 1024 --group-field url --out $data
    for name in "${TRAINED[@]}"; do
        case $name in random_* | pose*) ;; *) attentions+=("configs/length/$name.yaml") ;; esac
    done
    $PY scripts/sweep.py "${attentions[@]}" --grid seed="$SEEDS" --out $short --jobs "$JOBS" \
        -- --base=configs/retrieval/short.yaml --corpus.path=$data --optimizer.learning_rate=2e-3
    for name in "${TRAINED[@]}"; do
        case $name in random_* | pose*) first=rope ;; *) first=$name ;; esac
        echo "$name $first"
    done | short=$short long=$long data=$data SEEDS=$SEEDS xargs -P "$JOBS" -L 1 bash -c '$PY scripts/sweep.py \
        configs/length/$0.yaml --grid seed=$SEEDS --out $long/$0 -- --base=configs/retrieval/long.yaml \
        --corpus.path=$data --optimizer.learning_rate=2e-3 "--initial_weights=$short/config=$1,seed=\${seed}"'
    local checkpoints=() labels=""
    for name in "${TRAINED[@]}" rope@linear:4 rope@ntk:4 rope@yarn:4; do
        for seed in ${SEEDS//,/ }; do
            checkpoints+=("$long/${name%@*}/seed=$seed${name#"${name%@*}"}") # "@linear:4", or nothing
            labels+=",${LABELS[$name]}"
        done
    done
    olmo-sparsity needle "${checkpoints[@]}" --labels "${labels#,}" --corpus $data --unseen-keys \
        --lengths 64,128,256,512,1024 --ks 1,8 --samples 60 --out $OUT/needles/measured
}

cost() { # with nothing else running, at commit e96ef8f3: later ones have no `benchmark.py encodings`
    local configs=("${TRAINED[@]/#/configs/length/}")
    $PY scripts/benchmark.py encodings "${configs[@]/%/.yaml}" --json >results/encodings/cost.json
}

collect() { # every measurement as a cell of one study: its name is its path below OUT; texts are left out
    local here=results/encodings
    mkdir -p $here/length-mesa
    cp $OUT/length/length.{json,parquet} $here
    cp $OUT/length-mesa/length.{json,parquet} $here/length-mesa
    [ ! -e $OUT/needles/measured ] || cp $OUT/needles/measured/needle.{json,parquet} $here
    $PY - <<'END'
import os
from dataclasses import replace
from pathlib import Path

from analysis import load, save_study

out = Path(os.environ["OUT"])
cells = {f"{part}/{path.name}": path for part in ("beyond", "inside") for path in sorted((out / part).iterdir())}
cells |= {f"control/rope-512,seed={path.name[-1]}": path for path in sorted(out.glob("rope-512/beyond-*"))}
save_study("results/encodings", {cell: replace(load(path), texts=None) for cell, path in cells.items()})
END
}

figures() { # the tables, correlations and figure of the page; correlations at other lengths are printed
    local times
    $PY results/encodings/study.py --figures results/encodings
    for times in 2 8 16; do
        $PY results/encodings/study.py $times
    done
}

declare -F "${1-}" >/dev/null || { echo "give one of: $(compgen -A function -X checkpoint | xargs)" >&2 && exit 2; }
"$1"
