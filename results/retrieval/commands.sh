# How the models of this page were trained and measured. --selectors is there up to ac4b384b.

python scripts/prepare_data.py text --files books-train.*.json.gz --heldout-files books-validation.*.json.gz \
    books-more-validation.*.json.gz --vocab-size 1024 --group-field url --out runs/retrieval/data
D=--corpus.path=runs/retrieval/data S=runs/retrieval/short L=runs/retrieval/long
python scripts/sweep.py configs/length/{alibi,nope,rope}.yaml --grid seed=1,2 --out $S --jobs 2 \
    -- --base=configs/retrieval/short.yaml $D
train() { python scripts/sweep.py configs/length/$1.yaml --grid seed=1,2 --out $L/$1 --jobs 2 -- \
    --base=configs/retrieval/long.yaml $D '--initial_weights='$S'/config='$2',seed=${seed}'; }
train rope rope; train pose rope; train alibi alibi; train nope nope
python scripts/needle.py $L/rope/seed=1 $L/rope/seed=2 $L/rope/seed=1@yarn:4 $L/rope/seed=2@yarn:4 $L/pose/seed=1 \
    $L/pose/seed=2 $L/nope/seed=1 $L/nope/seed=2 $L/alibi/seed=1 $L/alibi/seed=2 --corpus runs/retrieval/data \
    --labels "RoPE,RoPE,RoPE + YaRN,RoPE + YaRN,RoPE + PoSE,RoPE + PoSE,NoPE,NoPE,ALiBi,ALiBi" --unseen-keys \
    --lengths 32,64,128,256,512,1024 --ks 1,2,4,8 --samples 60 --recall-length 128 --out results/retrieval \
    --selectors leave-one-out,leave-one-out-kl,input-x-gradient,attention,random
