# Every target sets up .venv by itself; only Python 3.11 or newer and make are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BROWSER := $(VENV)/.browser
DOCS := $(VENV)/.docs
FUZZ := $(VENV)/.fuzz
RELEASE := $(VENV)/.release

.PHONY: test demo test-all test-gpu check format bench reproduce reproduce-gpu docs build fuzz soak lock release-check clean

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2

# Film review sentences: fit, compare with logistic regression, explain. Model and report go to demo/.
demo: $(INSTALLED)
	$(BIN)/vecroute demo --out demo

# The walk of a new user goes on from test to test, so the tests of a file stay in one process.
test-all: $(INSTALLED) $(BROWSER) $(DOCS)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu"

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A short run on any machine; docs/performance.md has the commands of the full ones.
BENCH := build/bench
bench: $(INSTALLED)
	rm -rf $(BENCH)
	$(BIN)/python benchmarks/scaling.py --short --seconds 0.05 --results $(BENCH)
	$(BIN)/python benchmarks/heads.py --short --seconds 0.05 --results $(BENCH)
	$(BIN)/python benchmarks/attention.py --short --seconds 0.05 --results $(BENCH)
	$(BIN)/python benchmarks/credit.py --short --results $(BENCH)
	$(BIN)/python benchmarks/classifier.py --short --results $(BENCH)
	$(BIN)/python benchmarks/plots.py --results $(BENCH)

# Every claim at small size on a CPU, a few minutes; docs/reproduce.md lists the claims and their full commands.
reproduce: bench
	$(BIN)/python benchmarks/sharded_model.py --check --short --results $(BENCH)
	$(BIN)/python benchmarks/side_by_side.py --short --parts throughput explain --results $(BENCH)
	$(BIN)/python scripts/tables.py --check

# All claims that need a GPU, about 90 minutes on one H200. Each step takes at most 20 and leaves a file in
# build/gpu, so that an interrupted run resumes at the next step; make gpu-cost runs one step alone.
# DATA is the folder with texts and images, AGAINST the file with the authors' layer.
AGAINST := heinsen_routing.py
DATA := data
GPU_STEPS := cost speed attention accuracy images faithfulness use
reproduce-gpu: $(GPU_STEPS:%=build/gpu/%.done)
.PHONY: $(GPU_STEPS:%=gpu-%)
gpu-cost: build/gpu/cost.done
gpu-speed: build/gpu/speed.done
gpu-attention: build/gpu/attention.done
gpu-accuracy: build/gpu/accuracy.done
gpu-images: build/gpu/images.done
gpu-faithfulness: build/gpu/faithfulness.done
gpu-use: build/gpu/use.done

build/gpu/cost.done: | $(INSTALLED)
	$(BIN)/python benchmarks/scaling.py --device cuda --modes fp32 --cases axes busy headline longest --against $(AGAINST)
	mkdir -p build/gpu && touch $@

build/gpu/speed.done: | $(INSTALLED)
	$(BIN)/python benchmarks/scaling.py --device cuda --modes tf32 bf16 --cases headline --against $(AGAINST)
	$(BIN)/python benchmarks/scaling.py --device cuda --cases ten-million --implementations fused
	$(BIN)/python benchmarks/eager.py --device cuda --against $(AGAINST)
	$(BIN)/python benchmarks/heads.py --device cuda --against $(AGAINST)
	mkdir -p build/gpu && touch $@

build/gpu/attention.done: | $(INSTALLED)
	$(BIN)/python benchmarks/attention.py --device cuda --modes fp32 tf32 bf16
	$(BIN)/python benchmarks/credit.py --device cuda
	$(BIN)/python benchmarks/out_of_core.py --device cuda --n-out 100
	mkdir -p build/gpu && touch $@

build/gpu/accuracy.done: | $(INSTALLED)
	$(BIN)/python benchmarks/accuracy.py --device cuda --tasks sst2 sst5 imdb --data $(DATA) --save build/heads
	mkdir -p build/gpu && touch $@

build/gpu/images.done: | $(INSTALLED)
	$(BIN)/python benchmarks/accuracy.py --device cuda --tasks cifar10 --data $(DATA) --save build/heads
	$(BIN)/python benchmarks/patches.py --device cuda --data $(DATA) --weights build/heads
	mkdir -p build/gpu && touch $@

build/gpu/faithfulness.done: build/gpu/accuracy.done
	$(BIN)/python benchmarks/faithfulness.py --device cuda --data $(DATA) --weights build/heads
	$(BIN)/python benchmarks/faithfulness.py --device cuda --data $(DATA) --weights build/heads --check
	mkdir -p build/gpu && touch $@

build/gpu/use.done: | $(INSTALLED)
	$(BIN)/python benchmarks/classifier.py --device cuda
	$(BIN)/python benchmarks/throughput.py --device cuda --data $(DATA)
	$(BIN)/python benchmarks/side_by_side.py --device cuda --parts throughput explain
	mkdir -p build/gpu && touch $@

# The site, in build/site; a warning is an error. The variable silences a note on the next major version of MkDocs.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is in build/site. To look at it, with its search: http://127.0.0.1:8000 after"
	@echo "  $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

build: $(INSTALLED)
	$(BIN)/python -m build --no-isolation

# Random and damaged input for every reader, so many seconds for each; what was worth keeping is in tests/fuzz/seeds.
SECONDS := 20
fuzz: $(INSTALLED) $(FUZZ)
	$(BIN)/python -m tests.fuzz.run --seconds $(SECONDS)

# 64 clients against a server of this machine, 2 % of their requests hostile.
soak: $(INSTALLED)
	$(BIN)/python benchmarks/soak.py --minutes 10

lock: $(INSTALLED) $(RELEASE)
	$(BIN)/python scripts/lock.py

# What must hold before a release: lock file, wheel, README in an empty environment, licences, bill of materials.
release-check: $(INSTALLED) $(BROWSER) $(DOCS) $(FUZZ) $(RELEASE)
	$(BIN)/python scripts/release_check.py

# The stamp is written last, so an interrupted installation starts again.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("vecroute needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,demo]"
	touch $@

# Tests of the page drive a real browser; where there is none they say so and skip.
$(BROWSER): $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[browser]"
	command -v chromium || (apt-get update && apt-get install --yes chromium) || echo "chromium cannot be installed"
	touch $@

$(DOCS): $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

$(FUZZ): $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[fuzz]"
	touch $@

$(RELEASE): $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[release]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
