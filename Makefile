# Targets: demo, test, quick, check (what CI runs), check-machines, check-newest, lines, fuzz, bench,
# format, wheel, clean.
# Needs Python >= 3.11 and nothing else.
PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= auto
DRAWS  ?= 1
minutes ?= 1

BIN    := $(VENV)/bin
# Tests start many processes, which need not compile what the first has compiled.
PYTEST := env PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -W error -n $(JOBS) --maxprocesses 8 --dist worksteal -q
LAYER  := examples/res5a_branch2b.yaml
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo lint test quick check check-machines check-newest lines fuzz bench format wheel clean

help:
	@echo "make demo    compile a layer, check it on virtual ranks and on real processes, print its schedule; then a network:"
	@echo "             imported, compiled, trained on 4 processes beside one, and drawn"
	@echo "make test    ruff, pyright and the tests;  JOBS=n test processes (default: one a core); of tests and cases"
	@echo "             a share that moves with the commit (SAMPLE=n: that of n);  DRAWS=2 draws twice as many"
	@echo "make quick   the tests that take no minute: without kernels, whole modules, processes and measuring"
	@echo "make check   what CI runs: ruff, pyright, lines by room and every case of the tests"
	@echo "make check-machines   the tests that compute, as on other processors: old instructions, one core, more threads"
	@echo "make check-newest     a tier with the newest torch and triton that pip finds, and with the oldest allowed"
	@echo "make lines   lines by room, since=COMMIT: and how many there were then"
	@echo "make fuzz    files of every format with lines and fields changed, minutes=n of each (default: 1); format=graph: one"
	@echo "make bench   the studies of bench/ that need no GPU, argument or other package"
	@echo "make format  ruff's formatter and fixes"
	@echo "make wheel   dist/*.whl and dist/*.tar.gz"
	@echo "PYTHON=python3.12 chooses the interpreter of the environment, VENV=dir its place"

# The environment, once: made again when pyproject.toml changes.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "convgen needs Python >= 3.11: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev,plot]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/convgen compile $(LAYER) -o build
	$(BIN)/convgen check $(LAYER)
	$(BIN)/convgen check $(LAYER) --processes
	$(BIN)/convgen compile $(LAYER) --emit schedule
	$(BIN)/convgen import examples.resnet:small_resnet --input 8,3,32,32 -o build/small_resnet.yaml
	$(BIN)/convgen compile build/small_resnet.yaml --grid H=2,N=2 -o build
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --nproc-per-node 4 examples/train_resnet.py
	$(BIN)/convgen explain build/small_resnet.yaml --grid H=2,N=2 --plot build/small_resnet.png

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: lint
	DRAWS=$(DRAWS) $(PYTEST)

quick: $(VENV)/.installed
	$(PYTEST) -m "not slow"

check: lint lines
	CASES=all DRAWS=$(DRAWS) $(PYTEST)

check-machines: $(VENV)/.installed
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(PYTEST) -m machine
	LC_ALL=C taskset --cpu-list 0 $(PYTEST) -n 1 -m machine
	OMP_NUM_THREADS=3 $(PYTEST) -m machine

check-newest:
	@for kind in newest oldest; do \
	  echo "== $$kind"; \
	  test -x $(VENV)-$$kind/bin/python || $(PYTHON) -m venv $(VENV)-$$kind || exit 1; \
	  $(PYTHON) tests/environments.py $$kind > $(VENV)-$$kind/requirements.txt \
	  && $(VENV)-$$kind/bin/python -m pip install --quiet --upgrade --requirement $(VENV)-$$kind/requirements.txt \
	  && $(VENV)-$$kind/bin/python -m pip install --quiet --no-deps --editable . \
	  && $(VENV)-$$kind/bin/python -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)' \
	  && $(VENV)-$$kind/bin/pytest -W error -n $(JOBS) --maxprocesses 8 --dist worksteal -q -m versions || exit 1; \
	done

lines: $(VENV)/.installed
	@$(BIN)/python bench/lines.py $(since)

fuzz: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python bench/fuzz_files.py --minutes $(minutes) $(addprefix --format ,$(format))

# But what wants a GPU, an argument, another package, a folder or hours, and what others import.
NO_STUDIES := $(wildcard bench/kernel*.py) $(addsuffix .py,$(addprefix bench/,accuracy calibrated fake_device first_hour fuzz_files \
  lines network_step networks_distconv networks_gpu networks_jax networks_jax_step one_rank options overlap_could \
  overlap_ranks pinned plans prologues replay rows step_traffic tuned_training tuner_trust))
bench: $(VENV)/.installed
	@for script in $(filter-out $(NO_STUDIES),$(wildcard bench/*.py)); do echo "== $$script"; $(BIN)/python $$script || exit 1; done
	@for study in seconds ranks roles stages; do echo "== bench/plans.py $$study"; $(BIN)/python bench/plans.py $$study || exit 1; done

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/.installed
	$(BIN)/python -m hatchling build -d dist

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
