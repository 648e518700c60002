# make demo, make test: all the set-up anyone needs. Wants Python 3.11+ and a package index; the tests, a C++ compiler.
PYTHON ?= python3
PY := .venv/bin/python
STORE ?= runs/mlflow.db
PORT ?= 5000
# torch first, at the version pyproject.toml pins: deepspeed's build looks for it, and an open range fetches gigabytes.
TORCH = $(shell grep -o 'torch==[0-9.]*' pyproject.toml | head -n 1)
PLAIN = not ranks and not ray and not hosts
export OMP_NUM_THREADS ?= 1
# Where this is set, as containers do, each of the hundreds of processes that tests start compiles this project again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: schema demo test rehearsal test-fast lint docs mlflow install clean gpu gpu-tests gpu-bench gpu-packages gpu-wheels

demo: install
	$(PY) launch/demo.py

# Three rows beside each other, each with what the one before it leaves of the processors: the tests of Ray (which gives up when it cannot
# start in 30 s, so these come first) and of hosts, both of which mostly wait, and then lint; the tests of ranks, one at a time; the plain tests.
test: install
	@{ bad=0; for row in ray hosts; do $(PY) -m pytest -m $$row || bad=1; done; nice -n 10 $(MAKE) --no-print-directory lint && exit $$bad; } >.pytest_ray.log 2>&1 & ray=$$!; \
	nice -n 10 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "$(PLAIN)" >.pytest_plain.log 2>&1 & plain=$$!; \
	trap "pkill -INT -P $$ray,$$plain; kill $$ray $$plain" INT TERM; \
	nice -n 5 $(PY) -m pytest -m ranks; ranks=$$?; \
	wait $$ray; ray=$$?; cat .pytest_ray.log; wait $$plain; plain=$$?; cat .pytest_plain.log; [ $$ranks$$ray$$plain = 000 ]

# What the GPU of this machine does: its speed in under eight minutes, then its tests in six, each by what is worth most; results in
# $(OUT). Without a network, after `make gpu-wheels` elsewhere, with the Python that has torch (docs/performance.md).
OUT ?= runs/gpu
BENCH_SECONDS ?= 470
TEST_SECONDS ?= 360
GPU_PY ?= $(if $(wildcard $(PY)),$(PY),$(PYTHON))
gpu: gpu-bench gpu-tests

gpu-bench: gpu-packages
	@mkdir -p $(OUT)
	PYTHONPATH=.gpu-packages $(GPU_PY) launch/bench.py gpu json=$(OUT)/bench.json seconds=$(BENCH_SECONDS)

gpu-tests: gpu-packages
	@mkdir -p $(OUT)
	PYTHONPATH=.gpu-packages TEST_RESULTS=$(abspath $(OUT))/tests.jsonl timeout $(TEST_SECONDS) $(GPU_PY) -m pytest tests/gpu -m gpu -rs

gpu-packages:
	@[ ! -d .gpu-wheels ] || $(GPU_PY) -m pip install --quiet --no-index --no-deps --upgrade --target .gpu-packages .gpu-wheels/*.whl

gpu-wheels: install
	$(PY) tests/gpu/bring.py .gpu-wheels

# The README's three cluster commands on three hosts of this machine, one of which dies in each (root, iproute2, openssh-server, pdsh).
rehearsal: install
	$(PY) tests/multinode/rehearsal.py

# To run while working: neither ranks, nor Ray, nor hosts, nor tests of over a second.
test-fast: install
	$(PY) -m pytest -n 2 -m "$(PLAIN) and not slow"

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports --no-logo --no-cache

# JSON schemas of the files in configs/, by which editors complete and check them: to be made again when settings change.
schema: install
	for file in configs/schema/*.json; do $(PY) launch/$$(basename $$file .json).py --schema > $$file || exit; done

# The documentation with a page for each command, in runs/site.
docs: install
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict -f docs/site/mkdocs.yml
	@echo "open runs/site/index.html"

# The runs of a database, by default those of this folder, in a browser (docs/reviewing.md).
mlflow: install
	@test -f "$(STORE)" || { echo "$(STORE) does not exist: the first run makes <out>/mlflow.db (make mlflow STORE=FILE)" >&2; exit 2; }
	@echo "in a few seconds at http://127.0.0.1:$(PORT)/#/experiments/1/runs?workflowType=machine_learning&viewStateShareKey=overview"
	@MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(PY) -m mlflow server --workers 1 \
		--backend-store-uri "sqlite:///$(STORE)" --host 127.0.0.1 --port $(PORT)

install: .venv/.installed

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet '$(TORCH)' $$(grep -oE 'setuptools==[0-9.]*' pyproject.toml) wheel
	$(PY) -m pip install --quiet --no-build-isolation -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .gpu-wheels .gpu-packages runs/demo .pytest_plain.log .pytest_ray.log .mypy_cache .ruff_cache .pytest_cache
