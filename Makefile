# Every target sets up what it needs: a Python from 3.11 on and a C++ compiler are enough.
# The first call makes .venv (pip's own settings, such as PIP_FIND_LINKS, choose the torch build).

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
READY := $(VENV)/.ready
# Test processes side by side; each starts ranks of its own.
JOBS ?= 2

export MEGABLOCKS_REQUIRE_NATIVE := 1
# Tests start many processes; without this each compiles every module anew where the shell asks so.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all drill check bench clean

demo: $(READY)  ## Train, save, resume, export: MODEL= gpt, hybrid or mamba, DATA= text, OUT= folder
	$(RUN) examples/demo.py $(if $(MODEL),--model "$(MODEL)") $(if $(DATA),--data "$(DATA)") \
		$(if $(OUT),--out "$(OUT)")

test: $(READY)  ## What a change must pass, on JOBS= processes; ARGS= goes to pytest
	$(RUN) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-all: $(READY)  ## The same with the big counts and matrices, late messages, and mutations
	$(RUN) -m pytest -m "not drill and not gpu" $(ARGS)
	$(RUN) -m pytest --delayed tests/groups tests/parallel tests/layers tests/export
	$(RUN) tools/mutate.py

drill: $(READY)  ## Kills, full disks, broken networks
	$(RUN) -m pytest -m drill $(ARGS)

check: $(READY)  ## Style, types and who may import whom
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m pyright
	$(VENV)/bin/lint-imports

bench: $(READY)  ## Timings, as JSON lines
	$(RUN) benchmarks/run.py $(ARGS)

clean:
	rm -rf $(VENV) .oracles build dist out

$(READY): pyproject.toml constraints.txt CMakeLists.txt $(wildcard cpp/*)
	@test -n "$(PYTHON)" || { echo "PYTHON= must name a Python from 3.11 on" >&2; exit 1; }
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt scikit-build-core nanobind cmake ninja
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@
