#!/usr/bin/env bash
# How the records of this study were measured, cell by cell; weeks of two threads, so take the lines that you want.
# It runs from the top of the repository. SDISTS: a folder of source distributions (sdists.txt). BOOKS.json.gz,
# CODE.json.gz: the texts (../texts.md). SMOLLM2, GEMMA: the .gguf files.
# Shards that a comment names went on from there: `study.py collect` adds new batches to a cell.
# Scripts at 00a07b20 did what a command does here: units.py added ways of keeping and a placebo to the runs of releases and
# of tau 0.1, policies.py measured. sdists.txt and sdists-licenses.csv are of texts.py at 00a07b20.
set -euo pipefail
: "${SMOLLM2:?}" "${GEMMA:?}" "${SDISTS:?}"

python results/models/texts.py sdists results/models/sdists.txt "$SDISTS"
python results/models/texts.py releases "$SDISTS" all.jsonl && python results/models/texts.py one-each releases.jsonl all.jsonl
python results/models/texts.py one-each books.jsonl BOOKS.json.gz && python results/models/texts.py one-each code.jsonl CODE.json.gz
for text in books code releases; do
  olmo-sparsity measure $SMOLLM2 --text $text.jsonl --selectors none --n-long 1024 --n-short 16 --targets 800 \
    --lengths 32,64,128,256,512 --out runs/recent/smollm2-$text-n1024
  olmo-sparsity measure $GEMMA --text $text.jsonl --selectors none --n-long 512 --n-short 16 --targets 800 \
    --lengths 32,64,128,256 --out runs/recent/gemma-$text-n512
done
for text in books code; do
  olmo-sparsity measure $SMOLLM2 --text $text.jsonl --n-long 256 --n-short 32 --targets 1600 \
    --targets-per-block 32 --k 1,4,16,64 --selectors leave-one-out-kl,attention,h2o,snapkv,nearest,random \
    --keep-as text,cache:4 --shard 1/25 --out runs/models/smollm2-$text-n256
done                                     # likewise books 3, 6, 8, 10, 11, 13, 16, 18, 24 and code 2, 6, 8, 11, 14, 20 of 25
olmo-sparsity measure $SMOLLM2 --text releases.jsonl --n-long 256 --n-short 32 --targets 832 \
  --targets-per-block 32 --k 1,4,16 --selectors leave-one-out-kl,attention,nearest,random --keep-as text,cache:4 \
  --out runs/models/smollm2-releases-n256      # was measured as 13 shards
for shard in 2/13 6/13 10/13; do
  olmo-sparsity measure $SMOLLM2 --text releases.jsonl --n-long 256 --n-short 32 --targets 832 --seed 1 \
    --targets-per-block 32 --k 1,4,16,64 --selectors leave-one-out-kl,attention,nearest,random --keep-as text,cache:4 \
    --shard $shard --out runs/models/smollm2-releases-seed-1-n256
done
for shard in 1/13 2/13 3/13 6/13 9/13; do
  olmo-sparsity measure $SMOLLM2 --text releases.jsonl --n-long 256 --n-short 32 --targets 832 \
    --targets-per-block 32 --k 1,4,16 --keep-as text,cache:4 --shard $shard --out runs/models/smollm2-screened-n256 \
    --selectors leave-one-out-kl@attention:32,leave-one-out-kl@input-x-gradient:32,input-x-gradient
done
for text in books code releases; do
  olmo-sparsity measure $SMOLLM2 --text $text.jsonl --tau 0.1 --n-long 256 --n-short 32 --targets 160 \
    --targets-per-block 16 --k 1,4,16,64 --selectors leave-one-out-kl,attention --keep-as text,cache:4,cache \
    --out runs/models/smollm2-$text-tau-0.1-n256      # in batches of one block
  python results/models/halves.py measure $SMOLLM2 $text.jsonl 256 32 160 results/models/halves-$text-tau-0.1.parquet
done
olmo-sparsity measure $SMOLLM2 --text releases.jsonl --n-long 256 --n-short 32 --targets 832 \
  --targets-per-block 32 --k 1,4 --selectors leave-one-out-kl,attention --keep-as text/word,text/neighbors,cache:4/word \
  --out runs/models/smollm2-units-n256
olmo-sparsity measure $SMOLLM2 --text releases.jsonl --n-long 256 --n-short 32 --targets 832 \
  --targets-per-block 32 --k 1,4,16 --selectors leave-one-out-kl --placebos placebo,same-group --keep-as text,cache:4 \
  --shard 1/3 --out runs/models/smollm2-document-n256
olmo-sparsity measure $SMOLLM2 --text releases.jsonl --n-long 1024 --n-short 32 --targets 416 \
  --targets-per-block 16 --k 1,4,8 --selectors leave-one-out-kl@attention:16,attention,nearest,random --keep-as text,cache:4 \
  --shard 1/7 --out runs/models/smollm2-releases-n1024     # 2/7, 4/7 and 6/7, too
for text in books code; do
  olmo-sparsity measure $SMOLLM2 --text $text.jsonl --n-long 1024 --n-short 32 --targets 160 \
    --targets-per-block 16 --k 1,4 --selectors leave-one-out-kl@attention:8,attention,nearest --keep-as text,cache:4 \
    --out runs/models/smollm2-$text-n1024      # in 3 shards
done
olmo-sparsity measure $GEMMA --text releases.jsonl --n-long 256 --n-short 32 --targets 832 \
  --targets-per-block 32 --k 1,4,16 --selectors leave-one-out-kl,attention,nearest,random --keep-as text,cache:4 \
  --shard 2/13 --out runs/models/gemma-releases-n256   # 5/13, 8/13, 10/13, 11/13, too; books and code: --targets 320, all
python results/models/texts.py joined joined.jsonl all.jsonl
olmo-sparsity measure $SMOLLM2 --text joined.jsonl --n-long 4096 --n-short 32 --targets 88 \
  --targets-per-block 8 --k 1,4,16,64 --selectors attention,nearest,random --keep-as text,cache:4 \
  --out runs/models/smollm2-joined-n4096
olmo-sparsity measure $SMOLLM2 --text joined.jsonl --n-long 4096 --n-short 32 --targets 88 \
  --targets-per-block 8 --k 1,4 --selectors leave-one-out-kl@attention:8 --keep-as text,cache:4 \
  --out runs/models/smollm2-joined-screened-n4096
olmo-sparsity length $SMOLLM2 $SMOLLM2@yarn:2 --text joined.jsonl \
  --lengths 1024,2048,4096,8192,16384 --windows 11 --out results/models/length
for text in books code releases; do
  python results/models/halves.py measure $SMOLLM2 $text.jsonl 256 32 800 results/models/halves-$text.parquet
done
for prefix in bos none; do
  olmo-sparsity measure $SMOLLM2 --text books.jsonl --selectors none --n-long 256 --n-short 16 --targets 800 \
    --lengths 32,64,128 --prefix $prefix --out runs/recent/smollm2-$prefix-books-n256
done
pip install longppl && python results/models/key_tokens.py SmolLM2-135M-Instruct books.jsonl results/models/key-tokens-books.json
olmo-sparsity needle $SMOLLM2 --text releases.jsonl --lengths 256,1024,4096 --ks 1,2,4 --depths 0,0.5 \
  --samples 13 --out results/models/needle
olmo-sparsity measure $SMOLLM2@untrained --text books.jsonl --selectors none --n-long 256 --n-short 16 --targets 160 \
  --lengths 32,64,128 --out runs/recent/smollm2-untrained-books-n256
python results/models/four_bits.py round results/checkpoint runs/models/four-bits
olmo-sparsity measure runs/models/four-bits --corpus runs/verify/data --n-long 128 --n-short 16 --targets 1600 --k 1,4 \
  --selectors leave-one-out-kl,random --keep-as text,cache --shard 1/1 --out runs/models/checkpoint-q4-n128
for text in books code; do
  olmo-sparsity measure $SMOLLM2 --text $text.jsonl --tau -1000 --n-long 256 --n-short 32 --targets 320 \
    --targets-per-block 16 --k 4,16,64,128 --selectors h2o,snapkv,attention,nearest,random --placebos none --keep-as cache:4 \
    --out runs/models/policies/$text
done
python results/models/policies.py collect runs/models/policies && python results/models/policies.py --figures results/models
python results/models/planted.py measure $SMOLLM2 books.jsonl runs/models/planted
python results/models/planted.py collect runs/models/planted && python results/models/planted.py --figures results/models
python results/models/study.py collect runs/models && python results/models/study.py --figures results/models
python results/models/context_lengths.py --figures results/models
olmo-sparsity xray $SMOLLM2 --text results/models/story/story.txt --n-long 320 --n-short 16 --out results/models/story
olmo-sparsity measure results/checkpoint --corpus runs/verify/data --targets 1600 --selectors leave-one-out-kl,attention,random \
  --keep-as text,cache,cache:4,text/word --out runs/kept-as
python scripts/figure2.py results/models/checkpoint --tables --resamples 1000 --out runs/kept-as
