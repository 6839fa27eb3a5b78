#!/usr/bin/env bash
# Measures the cells of the study: run.sh TEXTS SMOLLM2 GEMMA OUT [CELL ...]; without cells all but those of N 4,096, in order.
# TEXTS has books.jsonl, code.jsonl, releases.jsonl, and books-long.jsonl for N of 1,024 and more.
# A cell that was interrupted goes on; one that is complete is left as it is.
# CACHE: the OUT of results/cache/run.sh, or of `results/cache/study.py restore OUT`. Where it has the cell of the same name,
# the reference is read from its effects, as far as the definitions agree: where near tokens are read again.
set -euo pipefail
here=$(dirname "$0")
texts=$1 smollm2=$2 gemma=$3 out=$4
shift 4
judge=${EVICTION:-olmo-sparsity eviction}
needles=${NEEDLES:-python $here/needles.py}
every=all,h2o:mean=1,h2o:mean=1:blind=1
few_observers=snapkv:window=8:blind=1 # 32, as SnapKV has, are all that a small budget of N 256 keeps
aware=snapkv,h2o,tova,keydiff,expected-attention,ada-snapkv,random,nearest
blind=streaming-llm,knorm,kvzip,snapkv:blind=1,random
three=leave-one-out-kl,halving-kl,presence-gradient
some=snapkv,snapkv:blind=1,h2o,h2o:blind=1,keydiff,expected-attention,streaming-llm,random
cell() {
  local model text kind long
  IFS=- read -r model text kind <<< "$1"
  long=$text
  [[ $text == books ]] && long=books-long
  local path=$smollm2
  [[ $model == gemma ]] && path=$gemma
  # as in results/cache/run.sh, so that the blocks are the same ones
  declare -A n256=([books]=26 [code]=16 [releases]=14) n1024=([books]=8 [code]=16 [releases]=7)
  declare -A n4096=([books]=4 [code]=3 [releases]=3)
  declare -A references=([books]=4 [code]=3 [releases]=3)
  declare -A horizon=([books]=4 [code]=3 [releases]=3) gemma256=([books]=10 [code]=8 [releases]=8)
  [[ $model == gemma ]] && n256[$text]=${gemma256[$text]}
  local known=()
  if [[ -f ${CACHE:-}/$1/result.json ]]; then
    known=(--effects "$CACHE/$1")
  elif [[ $kind == n* && $kind != needles ]]; then
    echo "$1: CACHE has no complete cell of this name, so that its reference is measured" >&2
  fi
  local common=(--n-short 32 --out "$out/$1" "${known[@]}")
  case $kind in
    n256)
      $judge "$path" --text "$texts/$text.jsonl" --n-long 256 --targets-per-block 32 --blocks "${n256[$text]}" \
        --policies "$every,$few_observers" "${common[@]}"
      ;;
    n1024)
      # of the 16 of code the first eight have effects
      [[ $text == code ]] && common+=(--only-blocks 0-7)
      $judge "$path" --text "$texts/$long.jsonl" --n-long 1024 --targets-per-block 16 --blocks "${n1024[$text]}" \
        --policies "$every" "${common[@]}"
      ;;
    n4096)
      $judge "$path" --text "$texts/$long.jsonl" --n-long 4096 --targets-per-block 16 --blocks "${n4096[$text]}" \
        --policies "$some" --near reread "${common[@]}"
      ;;
    references)
      $judge "$path" --text "$texts/$text.jsonl" --n-long 256 --targets-per-block 32 --blocks "${references[$text]}" \
        --policies snapkv,h2o,random --near kept --placebo --references "$three" "${common[@]}"
      ;;
    horizon)
      $judge "$path" --text "$texts/$long.jsonl" --n-long 256 --targets-per-block 512 --blocks "${horizon[$text]}" \
        --policies "$aware" --budgets 6%,12%,25% --near kept \
        --references leave-one-out-kl,leave-one-out-kl:first=16 "${common[@]}"
      ;;
    blindhorizon)
      $judge "$path" --text "$texts/$long.jsonl" --n-long 256 --targets-per-block 512 --blocks "${horizon[$text]}" \
        --policies "$blind" --budgets 6%,12%,25% --near reread --references none "${common[@]}"
      ;;
    needles) $needles "$path" "$texts/books.jsonl" "$out/$1" --policies "$every,$few_observers" ;;
    *) echo "no cell $1" >&2; return 1 ;;
  esac
}

cells=("$@")
if [[ $# -eq 0 ]]; then
  for kind in n256 n1024; do
    for text in code releases books; do cells+=("smollm2-$text-$kind"); done
  done
  cells+=(smollm2-books-needles)
  for kind in references horizon blindhorizon; do
    for text in code releases books; do cells+=("smollm2-$text-$kind"); done
  done
  for text in code releases books; do cells+=("gemma-$text-n256"); done
fi
for name in "${cells[@]}"; do cell "$name"; done
