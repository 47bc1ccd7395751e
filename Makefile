# `make bench` and `make test` do everything on a fresh machine; .venv is made when it is missing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: bench test test-slow test-cuda test-xla benchmark reports gpu wheels clean

AGAINST := --baseline results/intel-xeon-x2/cpu-20261121T115316Z.jsonl:baseline
CLIMB := results/amd-epyc-25-17-1-x2/cpu-20261127T220339Z.jsonl
OUT := reports
README := $(if $(filter reports,$(OUT)),README.md)

bench: .venv/.ready
	$(BIN)/bench quick

test: .venv/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest --numprocesses 2 --dist loadfile -m "not slow"

test-slow: .venv/.ready-test
	$(BIN)/pytest --numprocesses 2 --dist loadfile -m slow

# Options of its own: of pytest's plugins it takes pytest-xdist alone. All tests of one value share what it compiles.
test-cuda: .venv/.ready-test
	TORCHINDUCTOR_COMPILE_THREADS=4 $(BIN)/python -m pytest -o addopts="--import-mode importlib -q -rfEs --strict-markers -p no:cacheprovider" \
	  --numprocesses 4 --dist loadgroup -m cuda tests/gpt2/device/test_on_cuda.py

# torch_xla pins a torch of its own, hence an environment of its own: 7 GB, for torch 2.9 comes with CUDA's libraries.
test-xla: .venv-xla/.ready
	PJRT_DEVICE=CPU .venv-xla/bin/pytest tests/gpt2/device/test_xla.py

benchmark: .venv/.ready-test
	$(BIN)/pytest tests/system/test_benchmarks.py --benchmark-enable --benchmark-only

# All of reports/ and the scoreboard in README.md, from results/, byte for byte.
reports: .venv/.ready
	rm -rf $(OUT)/plots $(OUT)/*.md $(OUT)/*/*.md
	$(BIN)/bench report results $(AGAINST) --html --plots --out $(OUT)
	$(BIN)/bench trainings results/*/trainings --plots --out $(OUT)
	rm -f $(OUT)/plots/*.png
	$(if $(README),$(BIN)/bench report $(CLIMB) --update $(README))

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

# Half an hour on a rented GPU (docs/gpu.md), by the torch that PYTHON has. WHEELS: a folder of packages, for machines
# without a network; DATA: the corpus, or synthetic; FOLDER: where the results go.
MINUTES ?= 30
WHEELS ?=
gpu: .venv-gpu/.ready
	.venv-gpu/bin/python -m bench.campaign --minutes $(MINUTES) $(if $(DATA),--data $(DATA)) $(if $(FOLDER),--out $(FOLDER))

# The environment sees PYTHON's packages by a .pth file, which also holds where PYTHON is itself of a virtual environment.
# torch is not among what pip is asked for, and the constraint keeps it from taking another one.
INSTALL = .venv-gpu/bin/pip install --quiet --disable-pip-version-check $(if $(WHEELS),--no-index --find-links $(WHEELS)) \
  --constraint .venv-gpu/torch.txt
NAMES = import tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
  names = project["project"]["dependencies"] + project["build-system"]["requires"]; \
  print("\n".join(name for name in names if not name.startswith("torch")))
.venv-gpu/.ready: pyproject.toml
	$(PYTHON) -c 'import torch' || { echo "make gpu takes the torch that is there: make gpu PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv-gpu
	$(PYTHON) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' > .venv-gpu/torch.pth
	mv .venv-gpu/torch.pth "$$(.venv-gpu/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	.venv-gpu/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > .venv-gpu/torch.txt
	.venv-gpu/bin/python -c '$(NAMES)' > .venv-gpu/names.txt
	$(INSTALL) --requirement .venv-gpu/names.txt
	$(INSTALL) --no-deps --no-build-isolation --editable .
	-$(INSTALL) pytest pytest-xdist
	touch $@

# Whatever make gpu installs, into the folder WHEELS.
wheels:
	test -n "$(WHEELS)" || { echo "name the folder: make wheels WHEELS=wheels"; exit 1; }
	mkdir -p $(WHEELS) && $(PYTHON) -c '$(NAMES)' > $(WHEELS)/names.txt
	$(PYTHON) -m pip download --quiet --dest $(WHEELS) --requirement $(WHEELS)/names.txt pytest pytest-xdist

clean:
	rm -rf .venv .venv-xla .venv-gpu
