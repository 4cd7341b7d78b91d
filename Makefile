# Native code; `make help` lists the targets.
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

.PHONY: help build clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## Build the native libraries in place (only what changed)
	LOWBIT_NATIVE=1 $(PYTHON) setup.py -q build_ext --inplace

clean: ## Remove what the build made
	rm -rf build dist *.egg-info lowbit/*.so lowbit/_build.json
