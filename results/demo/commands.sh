# How the two more placebos were measured, at commit cd7a379 (there --placebos stood for two options).

S=leave-one-out,leave-one-out-kl,leave-one-out-tv,leave-one-out-absolute,leave-one-in,leave-one-in-kl,attention
for run in runs/demo runs/seeds/seed=1 runs/seeds/seed=2; do
    python scripts/measure.py $run --corpus runs/demo/data --out $run/placebos --targets 1600 --targets-per-block 16 \
        --placebos placebo,same-group,shuffled --selectors $S,saliency,input-x-gradient,random
done
