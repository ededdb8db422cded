# Every target sets up what it needs: virtual environment, packages, Debian packages when root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup check test docs demo bench lock clean

setup:
	@$(PYTHON) scripts/setup.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup
	$(BIN)/pytest

docs: setup
	$(BIN)/python scripts/docs.py

demo: setup
	$(BIN)/kansoku demo --html report.html

bench: setup
	$(BIN)/python -m benchmarks

lock:
	$(BIN)/uv pip compile pyproject.toml --all-extras --python-version 3.11 --universal --no-annotate --no-emit-index-url --no-header -o requirements-dev.lock

clean:
	rm -rf $(VENV) .lab runs report.html
