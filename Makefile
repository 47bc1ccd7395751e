# `make bench` and `make test` do everything on a fresh machine; .venv is made when it is missing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: bench test test-slow test-cuda test-xla benchmark reports clean

# Runs that a later one repeats: in reports/scoreboard.md, but neither drawn nor on the page.
REPEATED := $(addprefix results/,$(addsuffix .jsonl,\
  amd-epyc-x2/cpu-batch-of-4-over-micro_batch_size-20261123T211158Z amd-epyc-x2/peers-cpu-20261123T220652Z \
  amd-epyc-x2/peers-cpu-20261124T184819Z intel-xeon-x2/cpu-20261121T150006Z \
  intel-xeon-x2/cpu-float32-batch-of-4-over-micro_batch_size-20261123T165758Z \
  intel-xeon-x2/ddp-cpu-20261121T191116Z intel-xeon-x2/explored-20261123T162803Z \
  intel-xeon-x2/smoke-20261121T134409Z intel-xeon-x2/smoke-20261121T170706Z))
RESULTS := $(sort $(wildcard results/*/*.jsonl))
AGAINST := results/published --baseline results/intel-xeon-x2/cpu-20261121T115316Z.jsonl:baseline
OUT := reports

bench: .venv/.ready
	$(BIN)/bench run ladders/smoke.yaml

test: .venv/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest --numprocesses 2 --dist loadfile -m "not slow"

test-slow: .venv/.ready-test
	$(BIN)/pytest --numprocesses 2 --dist loadfile -m slow

# Options of its own: of pytest's plugins it takes pytest-xdist alone. All tests of one value share what it compiles.
test-cuda: .venv/.ready-test
	TORCHINDUCTOR_COMPILE_THREADS=4 $(BIN)/python -m pytest -o addopts="-q -rfEs --strict-markers -p no:cacheprovider" \
	  --numprocesses 4 --dist loadgroup -m cuda tests/test_on_cuda.py

# torch_xla pins a torch of its own, hence an environment of its own: 7 GB, for torch 2.9 comes with CUDA's libraries.
test-xla: .venv-xla/.ready
	PJRT_DEVICE=CPU .venv-xla/bin/pytest tests/test_xla.py

benchmark: .venv/.ready-test
	$(BIN)/pytest tests/test_benchmarks.py --benchmark-enable --benchmark-only

# All of reports/ from results/, byte for byte.
reports: .venv/.ready
	$(BIN)/bench report $(filter-out $(REPEATED),$(RESULTS)) $(AGAINST) --html --plots --out $(OUT)
	$(BIN)/bench report $(RESULTS) $(AGAINST) --out $(OUT)
	$(BIN)/bench trainings $(sort $(wildcard results/*/trainings/*)) --plots --out $(OUT)
	rm -f $(OUT)/plots/*.png

.venv/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	@echo "Installing torch and a few others into .venv: some minutes, about 2 GB with torch's build for CPUs"
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/.ready-test: .venv/.ready
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

.venv-xla/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-xla
	.venv-xla/bin/pip install --quiet --upgrade pip
	.venv-xla/bin/pip install --quiet --editable '.[test,xla]'
	touch $@

clean:
	rm -rf .venv .venv-xla
