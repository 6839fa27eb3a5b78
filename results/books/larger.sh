#!/usr/bin/env bash
# 14 million parameters on one GPU, four minutes each: RoPE + PoSE, from windows of 1,024 to ids of 4,096, and plain RoPE.
# Or 124 million of RoPE + PoSE in five minutes, and what far tokens give them, in three.
#
#   python scripts/prepare_data.py text --files books*-train.*.json.gz --heldout-files books*-validation.*.json.gz \
#       --vocab-size 8192 --limit-tokens 26000000 --out runs/larger/data          # 52 MB
#   bash results/books/larger.sh runs/larger/data runs/larger
#   SECONDS_EACH=60 bash results/books/larger.sh runs/demo/data /tmp/larger --model.vocab_size=4096 \
#       --model.embedding_size=4096 --model.d_model=64 --model.n_heads=2 --global_train_batch_size=4 \
#       --device_train_microbatch_size=4 --max_duration=20 --scheduler.t_warmup=3       # on a CPU, to try it
#   RUNS=pose SECONDS_EACH=300 bash results/books/larger.sh runs/larger/data runs/124m --model.d_model=768 --model.n_heads=12 \
#       --model.n_layers=20 --device_train_microbatch_size=32 --optimizer.learning_rate=6e-4 --max_duration=2000
#   python results/models/gpu.py runs/124m/pose BOOKS.jsonl runs/124m/measured --n-long 1024 --minutes 3
#
# 64 windows x 1,024 tokens = 65,536 tokens a step; 3,174 steps = 208 million tokens, 8 epochs. A run that is not done
# in its time saves and is exported as it is. Leaves OUT/{pose,rope}: metrics, and weights in bf16 (28 MB each).
set -eu
export PYTHONPATH=${PYTHONPATH:-.}
[ $# -ge 2 ] || { echo "give the corpus and a folder for the result; see the head of this file" >&2 && exit 2; }
data=$1 out=$2
shift 2
shape=(--corpus.path="$data" --model.d_model=384 --model.n_heads=6 --model.max_sequence_length=1024
  --global_train_batch_size=64 --device_train_microbatch_size=64 --max_duration=3174 --scheduler.t_warmup=100
  --optimizer.learning_rate=1.5e-3 --save_interval=500 "$@")
declare -A run=(
  [pose]="configs/books.yaml --positions.target_length=4096"
  [rope]="configs/rope.yaml --base=configs/books.yaml")
for name in ${RUNS:-pose rope}; do
  # shellcheck disable=SC2086
  timeout --preserve-status --signal=USR1 "${SECONDS_EACH:-240}" "${PY:-python3}" scripts/train.py ${run[$name]} "${shape[@]}" \
    --save_folder="$out/work/$name" --resume || [ $? = 85 ]
  rm -rf "${out:?}/$name"
  "${PY:-python3}" scripts/export_hf.py "$out/work/$name" --bf16 --out "$out/$name"
  cp "$out/work/$name"/{metrics.jsonl,provenance.json} "$out/$name"
done
