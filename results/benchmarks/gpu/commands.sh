# What was measured on the H200; --part is --only in later versions. The parts ran at the commits of the tables.
# Seed 3 of the small models was trained beside seed 2, at first without the mode. Profiles are of one step by PyTorch's
# profiler, after ten, with a script that is not kept.

for part in checkpoint agreement resume influence zero2 targets train-150m-eager train-150m-compiled; do
    python3 scripts/benchmark.py gpu --part $part --out runs/gpu --data runs/books/data --minutes 3 
done
python3 scripts/train.py configs/pose-c4-150m.yaml --corpus.path=runs/books/data --model.vocab_size=8192 \
    --model.embedding_size=8192 --model.eos_token_id=0 --model.pad_token_id=0 --global_train_batch_size=32 \
    --device_train_microbatch_size=32 --optimizer.learning_rate=1e-3 --scheduler.t_warmup=100 --max_duration=1130 \
    --save_interval=1130 --evaluation.interval=1130 --save_num_checkpoints_to_keep=1 --checkpoints.keep_every=null \
    --time_limit=80 --save_folder=runs/books/h200
OPTIONS="--device_train_microbatch_size=64 --save_interval=20000 --compile.mode=reduce-overhead --compile.from_steps=0" \
    JOBS=4 INTERVAL=1000 bash results/synthetic/study.sh learn 2 addition
