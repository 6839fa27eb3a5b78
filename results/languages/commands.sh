# How the models of this page were trained and measured. text is a folder of text in C4's layout whose urls name the works.
#
# A training run took 10 to 20 minutes on one core (Intel with AMX, bf16), a measurement 3 to 8.

python results/languages/split.py text runs/languages/text
for l in english french german spanish russian python; do
    python scripts/prepare_data.py text --files runs/languages/text/$l/train.json.gz --group-field work \
        --heldout-files runs/languages/text/$l/heldout.json.gz --vocab-size 4096 --out runs/languages/$l/data
    for s in 1 2; do
        python scripts/train.py configs/demo.yaml --corpus.path=runs/languages/$l/data --seed=$s \
            --save_folder=runs/languages/$l/seed=$s --run_name=$l
        targets=6400; [ $l != python ] || targets=1600
        python scripts/measure.py runs/languages/$l/seed=$s --out runs/languages/$l/influence-$s \
            --targets $targets --targets-per-block 16 --k 1,2,4,8,16 \
            --selectors leave-one-out-kl,leave-one-out,attention,random,nearest
    done
    python scripts/length.py runs/languages/$l/seed={1,2} --labels ${l^},${l^} --lengths 64,128,256,512,1024 \
        --windows 160 --out runs/languages/$l/length
done
