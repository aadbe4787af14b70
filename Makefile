# `make demo` and `make test` set themselves up in .venv; nothing else needs to be prepared.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS := .peers/.installed

PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

.PHONY: demo test peers test-extensive test-all lint docs schemas clean

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Pipeplan needs Python 3.11 or newer; say which: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing into $(VENV), which takes a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

# What a change needs: every room and every command, in minutes.
test: $(INSTALLED)
	$(PYTEST)

# Megatron-core, torchtitan, DeepSpeed and others that tests compare with, in a folder of their own.
peers: $(PEERS)

$(PEERS): tests/peers.txt $(INSTALLED)
	rm -rf .peers
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--no-build-isolation --target .peers -r tests/peers.txt
	@touch $@

# What `test` leaves out: tests marked extensive, their properties with all random examples.
test-extensive: $(INSTALLED) $(PEERS)
	$(PYTEST) -m extensive --hypothesis-profile full

# Both in one run, all properties with all random examples.
test-all: $(INSTALLED) $(PEERS)
	$(PYTEST) -m 'extensive or not extensive' --hypothesis-profile full

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

schemas: $(INSTALLED)
	for kind in plan graph cluster job runtime costs sweep sync-trace moves train; do \
		$(BIN)/pipeplan verify --schema $$kind > schemas/$$kind.json || exit 1; \
	done

clean:
	rm -rf $(VENV) .peers demo build dist site *.egg-info
