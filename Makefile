# `make help` lists the targets. Packages are installed again only if a pin has changed.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=
PROBES ?=
DEMO_ARGS ?=
SPEED_ARGS ?=
REGRESSION_ARGS ?=
UV ?= uv

PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check
STAMPS := $(VENV)/.stamps
PINS := requirements/requirements.txt requirements/constraints.txt pyproject.toml
TEST_EXTRAS := dev atari envpool procgen mujoco dm_control box2d pettingzoo jax playground optuna plot cloud docs

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-quick test-kills test-probes lint format docs docs-serve bench-speed bench-regression lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z%_-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMPS)/base ## create .venv with the packages that every script needs

demo: $(STAMPS)/base ## train PPO on CartPole-v1, evaluate it, draw its curve, record a video
	$(PY) -m cleanrl_utils.demo $(DEMO_ARGS)

test: $(STAMPS)/test ## install the test packages and run all tests; PYTEST_ARGS="-k ppo"
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

test-quick: $(STAMPS)/test ## the tests that take a few seconds each, in under three minutes
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadgroup \
		-m "not slow and not long and not gpu" $(PYTEST_ARGS)

test-kills: $(STAMPS)/test ## kill -9 twenty runs at random moments, resume each, compare bytes
	KILLS=5 OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) tests/test_kills.py

test-probes: $(STAMPS)/test ## five seeds of every probe use at most half of its tolerance
	OMP_NUM_THREADS=1 $(PY) tests/check_probes.py $(PROBES)

lint: $(STAMPS)/dev ## check format, lint, spelling, types and the Dockerfile
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(VENV)/bin/codespell
	$(PY) -m mypy
	$(PY) -m cleanrl_utils.sync
	$(VENV)/bin/hadolint Dockerfile

format: $(STAMPS)/dev ## format the code and apply the fixes of lint
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

docs: $(STAMPS)/docs ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

docs-serve: $(STAMPS)/docs ## serve the documentation locally, with live reload
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve

bench-regression: $(STAMPS)/jax ## train small tasks and compare with committed runs; REGRESSION_ARGS="--check"
	OMP_NUM_THREADS=1 $(PY) -m cleanrl_utils.regression $(REGRESSION_ARGS)

bench-speed: $(STAMPS)/peers ## compare steps per second with other libraries; SPEED_ARGS="--help"
	$(PY) benchmark/speed.py $(SPEED_ARGS)

install-%: $(STAMPS)/% ## install the packages of an extra, e.g. make install-atari
	@echo "$* is installed in $(VENV)"

lock: ## update requirements/constraints.txt (needs uv)
	@set -e; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	for file in requirements/requirements*.txt; do \
		sed '/^-[ce] /d' "$$file" > "$$tmp/$${file##*/}"; \
	done; \
	cp requirements/constraints.txt "$$tmp/pins"; \
	$(UV) pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header \
		$(UV_ARGS) "$$tmp"/*.txt --output-file "$$tmp/pins" > /dev/null; \
	{ head -n 1 requirements/constraints.txt; cat "$$tmp/pins"; } > "$$tmp/new"; \
	cp "$$tmp/new" requirements/constraints.txt

clean: ## remove builds and caches, but not .venv and runs/
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { \
		echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version 2> /dev/null || echo missing):" \
			"choose one with make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo "$(PYTHON) cannot make environments; on Debian: apt-get install python3-venv" >&2; exit 2; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/base: $(PINS) | $(STAMPS)/venv
	$(INSTALL) -r requirements/requirements.txt
	@touch $@

$(STAMPS)/%: requirements/requirements-%.txt $(PINS) | $(STAMPS)/venv
	$(INSTALL) -r $<
	@touch $(STAMPS)/base $@

$(STAMPS)/playground $(STAMPS)/memory_gym: $(STAMPS)/%: requirements/requirements-%.txt requirements/no-deps.txt $(PINS) | $(STAMPS)/venv
	$(INSTALL) -r $<
	$(INSTALL) --no-deps -r requirements/no-deps.txt
	@touch $(STAMPS)/base $@

# One call, so that pip sees all pins at once.
$(STAMPS)/test: $(wildcard requirements/*.txt) requirements/system.sh pyproject.toml | $(STAMPS)/venv
	requirements/system.sh
	$(INSTALL) $(TEST_EXTRAS:%=-r requirements/requirements-%.txt)
	$(INSTALL) --no-deps -r requirements/no-deps.txt
	@touch $(STAMPS)/base $(STAMPS)/memory_gym $(TEST_EXTRAS:%=$(STAMPS)/%) $@
