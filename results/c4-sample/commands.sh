# How the model was trained and measured.

python scripts/prepare_data.py text --files c4-sample.0000[12]-of-00003.json.gz \
    --heldout-files c4-sample.00003-of-00003.json.gz --vocab-size 1024 --out runs/c4-sample/data
python scripts/train.py configs/demo.yaml --corpus.path=runs/c4-sample/data --save_folder=runs/c4-sample \
    --run_name=c4-sample --model.vocab_size=1024 --model.embedding_size=1024 --global_train_batch_size=4 \
    --max_duration=150 --scheduler.t_warmup=30 --optimizer.learning_rate=1e-3
python scripts/measure.py runs/c4-sample --corpus runs/c4-sample/data --out runs/c4-sample/influence \
    --n-long 64 --n-short 8 --tau 0.3 --targets 400
