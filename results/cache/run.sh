#!/usr/bin/env bash
# Measures the cells of the study: run.sh TEXTS SMOLLM2 GEMMA OUT [CELL ...]; without cells all, in order.
# TEXTS has books.jsonl, code.jsonl, releases.jsonl, and books-long.jsonl for N of 1,024 and more.
# A cell that was interrupted goes on; one that is complete is left as it is.
set -euo pipefail
texts=$1 smollm2=$2 gemma=$3 out=$4
shift 4
measure=${MEASURE:-olmo-sparsity measure}
exact=leave-one-out-kl/cache:4
ladder=text:4,text:4/before:1,text:4/before:2,text:4/before:4,text:4/before:16,text:4/behind:2,text:4/ranked:2,text:4/drawn:2
ladder+=,cache:4/read:1,cache:4/read:2,cache:4/read:4,cache:4/read:16,cache:4

run() { # cell model text options
  local cell=$1 model=$2 text=$3
  shift 3
  $measure "$model" --text "$texts/$text.jsonl" --n-short 32 --scores --out "$out/$cell" "$@"
}

cell() {
  local model text kind long
  IFS=- read -r model text kind <<< "$1"
  long=$text
  [[ $text == books ]] && long=books-long
  local path=$smollm2
  [[ $model == gemma ]] && path=$gemma
  declare -A n256=([books]=832 [code]=512 [releases]=448) n1024=([books]=208 [code]=256 [releases]=224)
  declare -A n4096=([books]=64 [code]=48 [releases]=48)
  local few=(--k 1,2,4,8,16,32,64,128 --selectors "$exact,attention,snapkv" --keep-as cache:4)
  local many=(--k 1,2,4,8,16,32,64,128,256 --selectors "$exact,attention,snapkv" --keep-as cache:4)
  [[ $kind == n4096 ]] && many[3]+=",$exact@attention:256"
  local short=(--n-long 256 --targets-per-block 32 --targets "${n256[$text]}")
  local another=(--n-long 256 --targets-per-block 32 --targets 256 --seed 1)
  case $kind in
    n256) run "$1" "$path" "$text" "${short[@]}" "${few[@]}" --effects ;;
    ladder) run "$1" "$path" "$text" "${another[@]}" --k 1,4,16 --selectors "$exact" --keep-as "$ladder" \
      --placebos placebo,other-target ;;
    nulls) run "$1" "$path" "$text" "${another[@]}" --k 1,4,16 --selectors "$exact,random" --keep-as cache:4,text:4/before:2 \
      --placebos placebo,same-group,shuffled,other-target ;;
    n1024) run "$1" "$path" "$long" --n-long 1024 --targets-per-block 16 --targets "${n1024[$text]}" "${many[@]}" --effects ;;
    n4096) run "$1" "$path" "$long" --n-long 4096 --targets-per-block 16 --targets "${n4096[$text]}" "${many[@]}" --effects ;;
    *) echo "no cell $1" >&2; return 1 ;;
  esac
}

cells=("$@")
if [[ $# -eq 0 ]]; then
  for kind in n256 ladder nulls n1024; do
    for text in code releases books; do cells+=("smollm2-$text-$kind"); done
  done
  for kind in n256 ladder nulls; do
    for text in code releases books; do cells+=("gemma-$text-$kind"); done
  done
  cells+=(smollm2-books-n4096 smollm2-code-n4096 smollm2-releases-n4096 gemma-code-n1024 gemma-releases-n1024)
fi
for name in "${cells[@]}"; do cell "$name"; done
