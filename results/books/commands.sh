# How the models of this page were trained and measured: commands of 1d561127, with loops in the place of single commands.
#
# The weights (bf16, 17.5 MB each) stood here up to that commit; weights.json has their configuration, SHA-256 and export
# command. length-three and n128-m16-three compare with a smaller model. Records of single targets are at d5a12850.
# Trained in bf16 on one core each of two (Intel Xeon with AMX), in 2.3 hours (the twin with plain RoPE 2.9), at commits
# aee4230, 660b5b4 and c7fcf6d. The runs of RoPE + PoSE began with max_duration: 3500, which became 4,000 at steps 977 and
# 959. Exported at 21dbbaa. Measured in fp32 at c7fcf6d to 5b80aee (result.json says which; length-three at 21dbbaa).
# Figure 6 has each run by itself. xray reads the first N tokens by default, so the passage of 738 now needs --whole.

python scripts/prepare_data.py text --vocab-size 8192 --out runs/books/data \
    --files books-train.*.json.gz books-more-train.*.json.gz \
    --heldout-files books-validation.*.json.gz books-more-validation.*.json.gz
python scripts/prepare_data.py text --heldout-files books-validation.*.json.gz \
    --tokenizer runs/books/data/tokenizer.json --out runs/books/three
for s in 1 2; do
    python scripts/train.py configs/books.yaml --seed=$s --save_folder=runs/books/seed-$s
    python scripts/export_hf.py runs/books/seed-$s --bf16 --out results/books/checkpoint-$s
done
python scripts/train.py configs/rope.yaml --base=configs/books.yaml --seed=1 --save_folder=runs/books/rope
cd results/books; R=../../runs/books
python ../../scripts/length.py checkpoint-1 checkpoint-2 $R/rope $R/rope@yarn:4 \
    --labels "RoPE + PoSE,RoPE + PoSE,RoPE,RoPE + YaRN" --corpus $R/data --windows 78 --out length \
    --lengths 128,256,512,1024,2048
python ../../scripts/length.py checkpoint-1 --labels "RoPE + PoSE" --corpus $R/three \
    --lengths 128,256,512 --windows 146 --out length-three
S=leave-one-out,leave-one-out-kl,leave-one-out-absolute,leave-one-in,leave-one-in-kl,gradient,input-x-gradient
I="python ../../scripts/influence.py --corpus $R/data --targets-per-block 16 --k 1,2,4,8,16"
S="--selectors $S,attention,random,nearest" F="--only-recovery"
P="--selectors leave-one-out-kl@input-x-gradient:16,leave-one-out@input-x-gradient:16,attention,random,nearest"
for s in 1 2; do
    $I checkpoint-$s --n-short 32 --targets 40000 $S --out n128-m32-seed-$s
    $I checkpoint-$s --n-long 128 --n-short 96 --targets 4000 $P $F --out n128-m96-seed-$s
    for m in 32 96; do
        $I checkpoint-$s --n-long 512 --n-short $m --targets 4000 $P $F --out n512-m$m-seed-$s
        $I checkpoint-$s --n-long 1024 --n-short $m --targets 2400 $P $F --out n1024-m$m-seed-$s
    done
    $I checkpoint-$s --n-long 1024 --n-short 512 --k 1,4 --targets 4000 --selectors random,nearest $F --out use-seed-$s
done
$I --select-with n128-m32-seed-1 --evaluate-with checkpoint-2 --n-short 32 --targets 40000 $F $S --out crossfit-1-2
$I --select-with n128-m32-seed-2 --evaluate-with checkpoint-1 --n-short 32 --targets 40000 $F $S --out crossfit-2-1
$I $R/rope --n-short 32 --targets 8000 $P --out rope-n128-m32
$I $R/rope@yarn:4 --n-long 1024 --n-short 512 --k 1,4 --targets 4000 --selectors random,nearest $F --out use-yarn
M="python ../../scripts/influence.py checkpoint-1 --targets 3000 --k 1,4 --only-recovery --selectors random,nearest"
$M --corpus $R/data --out n128-m16-seed-1
$M --corpus $R/three --out n128-m16-three
O=greedy,greedy-kl,spans,leave-one-out-tv,leave-one-in-tv,leave-one-in-absolute,saliency,integrated-gradients
$I checkpoint-1 --n-short 32 --k 1,2,4,8 --targets 4000 --only-recovery --out selectors-seed-1 \
    --selectors $O,leave-one-out-kl,leave-one-out
python ../../scripts/longppl.py checkpoint-1 --corpus $R/data --n-long 256 --n-short 32 --sliding-window 4 \
    --segments 200 --out longppl
python ../../scripts/xray.py checkpoint-1 --text xray/sherlock-holmes.txt --n-long 512 --n-short 32 \
    --out xray/sherlock-holmes
python ../../scripts/figure2.py n128-m32-seed-1 n128-m32-seed-2 --resamples 10000 --length length --out .
python ../../scripts/figure6.py n{128,512,1024}-m32-seed-1 n{128,512,1024}-m32-seed-2 --rows checkpoint \
    --columns n_long --labels "seed 1" "seed 1" "seed 1" "seed 2" "seed 2" "seed 2" --out . \
    --selectors leave-one-out-kl leave-one-out-kl@input-x-gradient:16 attention random nearest
python ../../scripts/compare.py n128-m32-seed-1 n128-m32-seed-2 --out compare.json
