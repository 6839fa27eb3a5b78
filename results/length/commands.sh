# How the models of this page were trained and measured; loops stand for one command a model.
#
# The 1.0 M rung of the ladder is configs/length/pose.yaml, which at this learning rate trains what configs/ladder/1.0m.yaml
# does. Each cell was one scripts/train.py with --resume; provenance.json has the command, commit and start of each. The
# options of --select-with and needle --selectors are of commit 1d561127.

python scripts/prepare_data.py text --files books-train.*.json.gz \
    --heldout-files books-validation.00000-of-00001.json.gz --out runs/length/data
python scripts/sweep.py configs/length/{rope,random_start,pose,pose4,pose16,nope,alibi}.yaml \
    --grid seed=1,2 --out runs/encodings --jobs 2 -- --optimizer.learning_rate=3e-3
python scripts/sweep.py configs/ladder/{0.3m,0.6m,1.9m}.yaml --grid seed=1,2 --out runs/ladder --jobs 2
E=runs/encodings/config L=runs/ladder/config C=runs/length/data
checkpoints=() labels=""
add() { checkpoints+=("$1,seed=1$3" "$1,seed=2$3"); labels+=",$2,$2"; }
add $E=rope "RoPE"; add $E=random_start "RoPE random start"; add $E=pose "RoPE + PoSE (2 chunks)"
add $E=pose4 "RoPE + PoSE (4 chunks)"; add $E=pose16 "RoPE + PoSE (16 chunks)"; add $E=nope NoPE; add $E=alibi ALiBi
for x in 2 4 8; do add $E=rope "RoPE linear x $x" @linear:$x; done
for x in 2 4 8; do add $E=rope "RoPE NTK x $x" @ntk:$x; done
for x in 2 4 8; do add $E=rope "RoPE YaRN x $x" @yarn:$x; done
olmo-sparsity length "${checkpoints[@]}" --labels "${labels#,}" --corpus $C --out runs/length/together
checkpoints=() labels=""
add $L=0.3m "0.3 M"; add $L=0.6m "0.6 M"; add $E=pose "1.0 M"; add $L=1.9m "1.9 M"
olmo-sparsity length "${checkpoints[@]}" --labels "${labels#,}" --corpus $C --out runs/length/ladder
olmo-sparsity needle $E=rope,seed=1 $E=rope,seed=1@yarn:4 $E=pose,seed=1 $E=alibi,seed=1 $L=1.9m,seed=1 \
    --labels "RoPE,RoPE with YaRN x 4,RoPE + PoSE,ALiBi,RoPE + PoSE 1.9 M" --corpus $C --lengths 64,128,256,512 \
    --samples 60 --out runs/length/needle --selectors leave-one-out,gradient,attention,random,nearest
I="olmo-sparsity influence --corpus $C" S="--selectors leave-one-out,attention,random,nearest --targets 8000"
for one in $E={rope,pose},seed={1,2} $E={random_start,pose4,pose16,nope,alibi},seed=1 $L={0.3m,0.6m,1.9m},seed={1,2}; do
    $I $one $S --out runs/influence/${one##*/}
done
for one in $E=pose $L={0.3m,0.6m,1.9m}; do
    for pair in "1 2" "2 1"; do
        set -- $pair
        $I --select-with runs/influence/${one##*/},seed=$1 --evaluate-with $one,seed=$2 $S \
            --out runs/influence/${one##*/},seed=$1-$2
    done
done
beyond() { $I $1 --n-long 512 --n-short 128 --selectors random --targets $2 --out runs/influence-512-128/${1##*/}; }
for one in $E=pose,seed={1,2} $L=1.9m,seed={1,2} $E=rope,seed={1,2}@yarn:4; do beyond $one 4000; done
for one in $E={rope,alibi},seed=1; do beyond $one 1000; done
