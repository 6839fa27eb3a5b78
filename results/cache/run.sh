#!/usr/bin/env bash
# Measures the cells of the study: run.sh TEXTS SMOLLM2 GEMMA OUT [CELL ...]; without cells all, in order.
# TEXTS has books.jsonl, code.jsonl, releases.jsonl (../models/run.sh), and for N of 1,024 and more books-long.jsonl: all
# stretches of the same 13 books, `../models/texts.py joined OUT books-validation*.gz books-more-validation*.gz`, in this order.
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
  declare -A blocks=(
    [smollm2-books-n256]=26 [smollm2-code-n256]=16 [smollm2-releases-n256]=14
    [gemma-books-n256]=10 [gemma-code-n256]=8 [gemma-releases-n256]=8
    [smollm2-books-n1024]=8 [smollm2-code-n1024]=16 [smollm2-releases-n1024]=7
    [gemma-code-n1024]=12 [gemma-releases-n1024]=8
    [smollm2-books-n4096]=4 [smollm2-code-n4096]=3 [smollm2-releases-n4096]=3
  )
  local of_ladder=6
  [[ $model == gemma ]] && of_ladder=4
  local count=${blocks[$1]:-$of_ladder}
  local few=(--k 1,2,4,8,16,32,64,128 --selectors "$exact,attention,snapkv" --keep-as cache:4)
  local many=(--k 1,2,4,8,16,32,64,128,256 --selectors "$exact,attention,snapkv" --keep-as cache:4)
  [[ $kind == n4096 ]] && many[3]+=",$exact@attention:256"
  local short=(--n-long 256 --targets-per-block 32 --targets $((32 * count)))
  local far=(--targets-per-block 16 --targets $((16 * count)))
  case $kind in
    n256) run "$1" "$path" "$text" "${short[@]}" "${few[@]}" --effects ;;
    ladder) run "$1" "$path" "$text" "${short[@]}" --seed 1 --k 1,4,16 --selectors "$exact" --keep-as "$ladder" \
      --placebos placebo,other-target ;;
    nulls) run "$1" "$path" "$text" "${short[@]}" --seed 1 --k 1,4,16 --selectors "$exact,random" \
      --keep-as cache:4,text:4/before:2 --placebos placebo,same-group,shuffled,other-target ;;
    n1024) run "$1" "$path" "$long" --n-long 1024 "${far[@]}" "${many[@]}" --effects ;;
    n4096) run "$1" "$path" "$long" --n-long 4096 "${far[@]}" "${many[@]}" --effects ;;
    *) echo "no cell $1" >&2; return 1 ;;
  esac
}

cells=("$@")
if [[ $# -eq 0 ]]; then
  for kind in n256 ladder nulls n1024 n4096; do
    for text in code releases books; do cells+=("smollm2-$text-$kind"); done
  done
  for kind in n256 ladder; do
    for text in code releases books; do cells+=("gemma-$text-$kind"); done
  done
  cells+=(gemma-code-n1024 gemma-releases-n1024)
fi
for name in "${cells[@]}"; do cell "$name"; done
