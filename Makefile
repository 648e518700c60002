# make demo, make test: all the set-up anyone needs. Wants Python 3.11+ and a package index; the tests, a C++ compiler.
PYTHON ?= python3
PY := .venv/bin/python
# torch first, at the version pyproject.toml pins: deepspeed's build looks for it, and an open range fetches gigabytes.
TORCH = $(shell grep -o 'torch==[0-9.]*' pyproject.toml | head -n 1)
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint install clean

demo: install
	$(PY) launch/demo.py

# Ranks wait for each other in busy loops, and Ray gives up when it cannot start in 30 s: one test of them at a time, and
# what is beside them comes second.
test: install lint
	@nice -n 10 $(PY) -m pytest -m "not cluster" >.pytest_rest.log 2>&1 & rest=$$!; trap "kill $$rest" INT TERM; \
	$(PY) -m pytest -m cluster; first=$$?; \
	wait $$rest; rest=$$?; cat .pytest_rest.log; [ $$first$$rest = 00 ]

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

install: .venv/.installed

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet '$(TORCH)' $$(grep -oE 'setuptools==[0-9.]*' pyproject.toml) wheel
	$(PY) -m pip install --quiet --no-build-isolation -e '.[dev]'
	touch $@

clean:
	rm -rf .venv runs/demo .pytest_rest.log .mypy_cache .ruff_cache .pytest_cache
