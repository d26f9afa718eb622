# make demo   set up .venv and improve the built-in policy (SEED=1 for another seed)
# make test   set up .venv with the development extras and run the whole test suite
# make test-fast   the part that needs no simulator, cluster or whole run: at most 4 minutes on two cores
# make lint   ruff and mypy
PYTHON ?= python3
VENV ?= .venv
SEED ?= 0

PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-fast lint clean

demo: $(VENV)/.installed
	$(VENV)/bin/vlarl train --run.seed $(SEED)

test: $(VENV)/.installed-dev
	$(PYTEST)

test-fast: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Stamps: a second call installs nothing unless what is installed from has changed.
$(VENV)/.installed: pyproject.toml constraints.txt scripts/install.sh
	PYTHON=$(PYTHON) scripts/install.sh $(VENV)
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt scripts/install.sh
	PYTHON=$(PYTHON) scripts/install.sh $(VENV) dev
	touch $@ $(VENV)/.installed
