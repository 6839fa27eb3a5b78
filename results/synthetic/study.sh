#!/bin/bash
# The study of this folder, from the root of a clone: bash results/synthetic/study.sh all, or a part: PART [SEEDS] [TASK...]
# Goes on where it was when the same command is given again. JOBS processes at a time; OPTIONS: further ones of learn, train, sparse and addition.
# Eight minutes of one GPU: JOBS=8 OPTIONS="--device_train_microbatch_size=64 --compile.mode=reduce-overhead --compile.from_steps=0" \
#   timeout --signal=USR1 480 bash results/synthetic/study.sh sparse 1,2,3,4,5,6,7,8      # and `rest`, with 240
set -euo pipefail
trap : USR1 # the runs save, and this waits for them
JOBS=${JOBS:-2} OUT=${OUT:-runs/synthetic} SEEDS=${2:-1,2,3} TASKS=("${@:3}")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PY=${PY:-.venv/bin/python} OUT
[ ${#TASKS[@]} -gt 0 ] || TASKS=(scratchpad_parity copy addition variable_assignment)

# 20 x the steps after which PPC is right on 99 % of the longest training samples, over three seeds (part learn, budget 20000)
declare -A BUDGET=([scratchpad_parity]=11750 [copy]=5000 [addition]=68500 [variable_assignment]=35000)
# Trials of PPC, seed 11: at 1e-3 80 to 96 % of sums of 10 digits were right for 5,000 steps, at 5e-4 99.5 % after 3,500
declare -A RATE=([addition]=--optimizer.learning_rate=5e-4)
PPC='{scheme: predicted, rotate: ids}'
COUPLED='{scheme: coupled, rotate: ids}'
ROPE='{scheme: contiguous, rotate: ids}'
NOPE='{scheme: contiguous, rotate: none}'
POSE='{scheme: pose, rotate: ids}'
RANDOM_START='{scheme: random_start, rotate: ids}'
SCHEMES=${SCHEMES:-$PPC,$COUPLED,$ROPE,$POSE,$RANDOM_START,$NOPE}
CELL='positions=scheme-${positions.scheme}-rotate-${positions.rotate},seed=${seed}' # of the run's own config

# Prompts of 16 to 64 tokens of books, the text of results/retrieval; the planted tokens stand anywhere in them.
# Five layers had K_train 2 right after 250 steps, and three not after 500 (single trials, other test samples)
IN_TEXT=(--task.parameters.text=runs/retrieval/data --model.vocab_size=1027 --model.max_sequence_length=65
         "--task.parameters.train_length=[16,64]" "--task.parameters.test_length=[16,640]" "--task.parameters.k_test=[1,2,4,8]"
         --task.parameters.locality=null --positions.target_length=1024 --positions.table_size=1024
         --model.n_layers=5 --global_train_batch_size=32 --device_train_microbatch_size=16)

learn() { # until 99 % of the longest training samples are right, or the budget is spent, at a constant learning rate
    local task
    for task in "${TASKS[@]}"; do
        $PY scripts/sweep.py configs/synthetic/$task-small.yaml --grid "positions=$SCHEMES" --grid seed="$SEEDS" \
            --out $OUT/learn/$task --jobs "$JOBS" -- --max_duration=${BUDGET[$task]} --scheduler.alpha_f=1 ${RATE[$task]-} \
            --evaluation.interval="${INTERVAL:-250}" --evaluation.until=0.99 --evaluation.windows=200 ${OPTIONS-}
    done
}

train() { # from there as many steps as the config has, the learning rate falling to zero; then the test
    local task
    for task in "${TASKS[@]}"; do
        $PY scripts/sweep.py configs/synthetic/$task-small.yaml --grid "positions=$SCHEMES" --grid seed="$SEEDS" \
            --out $OUT/train/$task --jobs "$JOBS" --evaluate "--samples 200 --seed 1" \
            -- --initial_weights="$OUT/learn/$task/$CELL" --scheduler.t_warmup=50 ${OPTIONS-}
    done
}

attentions() { # PPC on addition with attentions that do, and do not, thin out with the number of tokens
    $PY scripts/sweep.py configs/synthetic/addition-small.yaml --grid seed="$SEEDS" --out $OUT/addition --jobs "$JOBS" \
        --grid 'model={family: gpt_neox},{family: olmo},{family: olmo, attention: entmax}' --evaluate "--samples 200 --seed 1" \
        -- ${OPTIONS-}
}

windows() { # without skips, whose sides would not see each other, within a window of ids or not
    $PY scripts/sweep.py configs/synthetic/addition-small.yaml --grid seed="$SEEDS" --grid model.rope_window="${1:-3,5,7,10,null}" \
        --out $OUT/addition-window --jobs "$JOBS" --evaluate "--samples 200 --seed 1" \
        -- --model.family=olmo --positions.skip_probability=0 ${OPTIONS-}
}

longer() { # sums of twice as many digits, within twice the window
    $PY scripts/sweep.py configs/synthetic/addition-small.yaml --grid seed="$SEEDS" --out $OUT/addition-longer --jobs "$JOBS" \
        --evaluate "--samples 200 --seed 1" -- --model.family=olmo --positions.skip_probability=0 --model.rope_window=10 \
        "--task.parameters.train_length=[1,20]" --model.max_sequence_length=65 ${OPTIONS-}
}

addition() {
    attentions && windows && longer
}

rest() { # the seven cells of addition that the records lack, at once
    SEEDS=3 attentions &
    SEEDS=2,3 windows 3 &
    SEEDS=2,3 longer &
    until wait; do :; done # a signal ends a wait
}

products() { # PPC on addition of up to four numbers (two levels of ids) and on multiplication by a digit
    local task
    for task in multi_addition digit_multiplication; do
        $PY scripts/sweep.py configs/synthetic/$task-small.yaml --grid seed="$SEEDS" --out $OUT/products/$task --jobs "$JOBS" \
            --evaluate "--samples 200 --seed 1"
    done
}

found() { # of the models of planted text: accuracy by how far the planted tokens stand, and the selectors' recall of them
    local scheme k seed run distance
    for scheme in contiguous pose coupled; do
        for k in 1 2 4 8; do
            for seed in ${SEEDS//,/ }; do
                run=$OUT/text/$scheme/$k/seed=$seed
                for distance in 1,64 65,128 129,256 257,640; do
                    $PY scripts/exact_match.py "$run" --lengths 640 --ks $k --parameters "{distance: [$distance], train_length: [640, 640]}" \
                        --samples 200 --seed 1 --out "$run/distance=$distance"
                done
                [ $scheme = coupled ] || [ -f "$run/recall/recall.json" ] || $PY results/synthetic/recall.py --checkpoint "$run" --length 64 \
                    --ks $k --seed 1 --selectors leave-one-out,leave-one-out-kl,attention,random --out "$run/recall"
            done
        done
    done
}

needs() { # PPC on parity with ids in a share of the samples, and with wrong ids; with those found in plain RoPE models (learn)
    local parity=configs/synthetic/scratchpad_parity-small.yaml task seed by found
    local how=(--jobs "$JOBS" --evaluate "--samples 200 --seed 1")
    $PY scripts/sweep.py $parity --grid positions.coupled_share=1,0.5,0.2,0.1,0.05 --grid seed="$SEEDS" \
        --out $OUT/needs/share "${how[@]}"
    $PY scripts/sweep.py $parity --grid positions.id_noise=0.05,0.1,0.2,0.4 --grid seed="$SEEDS" --out $OUT/needs/noise "${how[@]}"
    for task in scratchpad_parity copy; do
        for seed in ${SEEDS//,/ }; do
            for by in leave-one-out-kl attention; do
                found=$OUT/needs/found/$task/$by/seed=$seed
                mkdir -p "$found"
                COLUMNS=1000 $PY results/synthetic/couple.py "$OUT/learn/$task/positions=scheme-contiguous-rotate-ids,seed=$seed" --by $by \
                    --out "$found" | tee -a /dev/stderr | sed -n 's/^train with //p' >"$found.options"
                [ -s "$found.options" ] || continue
                xargs $PY results/synthetic/couple.py train configs/synthetic/$task-small.yaml --resume --seed="$seed" \
                    --save_folder="$found/trained" <"$found.options"
                $PY results/synthetic/couple.py exact_match "$found/trained" --samples 200 --seed 1
            done
        done
    done
}

grow() { # NAME CONFIG STAGE... -- OPTION...: each goes on from the weights of the one before; the learning rate falls to zero
    # STAGE: K:STEPS, k from 1 to K, is tested. MIN-K:STEPS prepares, for so many steps or until 98 % are right at k = K (of 200 in training)
    local name=$1 config=$2 before='' stage k options tested
    local -a stages=() given=()
    shift 2
    while [ "$1" != -- ]; do stages+=("$1") && shift; done
    for stage in "${stages[@]}"; do
        k=${stage%:*} tested="--samples 200 --seed 1 --lengths $LENGTHS"
        options=("--task.parameters.k_train=${k#*-}" "--max_duration=${stage#*:}" --scheduler.t_warmup=50)
        options+=(--optimizer.learning_rate=1e-3 "${@:2}")
        if [[ $k = *-* ]]; then
            tested="--samples 20 --seed 2"
            options+=("--task.parameters.k_train_min=${k%-*}" "--task.parameters.k_test=[${k#*-}]")
            options+=(--evaluation.until=0.98 --evaluation.interval=250 --evaluation.windows=200)
        fi
        [ -z "$before" ] || options+=("--initial_weights=$OUT/$name/$before/seed=\${seed}")
        read -ra given <<<"${OPTIONS-}"
        $PY scripts/sweep.py configs/synthetic/$config-small.yaml --grid seed="$SEEDS" --out "$OUT/$name/$k" --jobs "$JOBS" \
            --evaluate "$tested" -- "${options[@]}" "${given[@]}"
        before=$k
    done
}

sparse() { # after k from 1 to 6, a model was wrong where 5 or 6 of the planted bits are on, which is rare: hence 4-6
    LENGTHS=20,50,100,150,250,500 grow sparse sparse_parity 1-1:2000 1-4:6000 4:1500 4-6:6000 6:1500 5-8:8000 8:2000 \
        6-10:8000 10:2000 7-12:8000 12:2000 --
}

text() { # planted tokens in books; from k = 8 alone (8-8) 98 % at 64 tokens fell to 72 % when trained on 1 to 8: hence 5-8
    local scheme
    for scheme in contiguous pose coupled; do
        LENGTHS=16,32,64,128,256,640 grow text/$scheme planted 1:250 2:500 4-4:1000 4:1000 5-8:4000 8:1000 -- "${IN_TEXT[@]}" \
            --positions.scheme=$scheme
    done
}

all() { # needs takes models of learn, found those of text
    local part
    for part in learn train sparse addition products needs text found; do $part; done
}

declare -F "${1-}" >/dev/null || { echo "give one of: $(compgen -A function -X grow | xargs)" >&2 && exit 2; }
"$1"
