# How the weights were trained, exported and measured.

python scripts/prepare_data.py docs --out runs/demo/data
python scripts/train.py configs/demo.yaml --save_folder=runs/demo-long --run_name=demo-long --max_duration=2200
python scripts/export_hf.py runs/demo-long --bf16 --out results/checkpoint
python scripts/prepare_data.py docs --tokenizer results/checkpoint/tokenizer.json --out runs/verify/data
python scripts/measure.py results/checkpoint --corpus runs/verify/data --out results/checkpoint/influence \
    --targets 1600 --targets-per-block 16
