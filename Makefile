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

# Unit tests on every core. Then the real parts: those that mostly wait for daemons two at a time,
# then those that measure, one at a time with nothing beside them. A real part that fails is tried
# again at once, then in a process of its own with its daemons started anew, and the summaries say
# that it was: eight daemons on two cores can miss a deadline that is not the product's.
ALONE := $(addprefix tests/real/,attach burst diagnose fabric node report roce trace_record)
REAL := --reruns 1 --reruns-delay 2 --durations 20 -rR
AGAIN := --last-failed --last-failed-no-failures none
test: setup
	$(BIN)/pytest tests/unit tests/corpus -n auto --dist loadfile
	$(BIN)/pytest tests/real $(addprefix --ignore=,$(ALONE)) -n 2 --dist loadfile $(REAL) \
	  || $(BIN)/pytest tests/real $(addprefix --ignore=,$(ALONE)) $(REAL) $(AGAIN)
	$(BIN)/pytest $(ALONE) $(REAL) || $(BIN)/pytest $(ALONE) $(REAL) $(AGAIN)

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
