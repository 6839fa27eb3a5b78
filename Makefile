# make figure2   from a fresh clone to runs/demo/figure2.png (8 to 14 minutes on 2 CPU cores, installation included)
# make figure2-seeds   two more runs, 5,600 targets of each, and the figure of all three in runs/seeds (an hour more)
# make verify    measures 100 recorded targets again, on weights that are in results/checkpoint (three minutes)
# make models    four blocks as in the study of the cache, on Python's library (6 minutes on 2 cores of a Zen 4, once installed)
# make test      every test but the long ones, on up to four cores; make test-slow runs those, one at a time
# make browser   installs Chromium from Debian's packages, for the test of the X-ray page, which skips without it
# make lint      ruff and mypy
# make docs      the documentation as a web site in build/docs, its links checked
# make clean     removes what make made: runs of the demo too, but no other runs; make distclean removes .venv too
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
RUN := runs/demo
SEEDS := runs/seeds
WEIGHTS := results/checkpoint
VERIFIED := runs/verify/data
MEASURED := --targets-per-block 16
WORKERS ?= logical
MODEL ?= HuggingFaceTB/SmolLM2-135M-Instruct
export GOMP_SPINCOUNT ?= 1000

.PHONY: figure2 figure2-seeds verify models install test test-slow browser lint docs clean distclean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed; say which with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Every stage finds out by itself whether it is done, so a second `make figure2` takes seconds.
figure2: $(INSTALLED)
	$(PY) scripts/prepare_data.py docs --out $(RUN)/data
	$(PY) scripts/train.py configs/demo.yaml --resume
	$(PY) scripts/measure.py $(RUN) --corpus $(RUN)/data --out $(RUN)/influence $(MEASURED) --targets 2400
	$(PY) scripts/figure2.py $(RUN)/influence --out $(RUN)

figure2-seeds: figure2
	$(PY) scripts/sweep.py configs/demo.yaml --grid seed=1,2 --out $(SEEDS) --jobs 2
	for run in $(RUN) $(SEEDS)/seed=1 $(SEEDS)/seed=2; do \
	  $(PY) scripts/measure.py $$run --corpus $(RUN)/data --out $$run/influence-5600 $(MEASURED) --targets 5600 || exit; \
	done
	$(PY) scripts/figure2.py $(RUN)/influence-5600 $(SEEDS)/seed=*/influence-5600 --out $(SEEDS)

verify: $(INSTALLED)
	$(PY) scripts/prepare_data.py docs --tokenizer $(WEIGHTS)/tokenizer.json --out $(VERIFIED)
	$(PY) -m olmo_sparsity.cli verify $(WEIGHTS)/influence --model $(WEIGHTS) --corpus $(VERIFIED)

models: $(INSTALLED)
	mkdir -p runs/models
	$(PY) results/models/texts.py library runs/models/library.jsonl
	$(PY) -m olmo_sparsity.cli measure $(MODEL) --text runs/models/library.jsonl --n-long 256 --n-short 32 --targets 128 \
	  --targets-per-block 32 --k 1,4,16,64 --selectors leave-one-out-kl/cache:4,attention,nearest,random \
	  --keep-as cache:4 --out runs/models/library
	$(PY) -m olmo_sparsity.cli figure2 runs/models/library

# A file of tests stays in one process. One thread each: PyTorch processes side by side slow each other tenfold otherwise.
# The longest test takes half a minute: one that takes ten hangs, fails, and is named.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m 'not slow' --timeout 600 -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-slow: $(INSTALLED)
	$(PY) -m pytest -m slow --timeout 3600

browser:
	@command -v chromium > /dev/null || { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends chromium; }

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(INSTALLED)
	$(PY) -m mkdocs build --strict --site-dir build/docs

clean:
	rm -rf $(RUN) $(SEEDS) $(dir $(VERIFIED)) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
