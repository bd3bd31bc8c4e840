# `make demo` runs an example, `make test` checks everything; both first install what they need into .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: help demo test chromium test-page test-llama test-deep mutation lint types notebooks bench bench-accelerate bench-sweep bench-fit validate gpu clean

help:
	@echo "make demo    compare policies on two bundled scenarios; pictures and a timeline of the first go to out/"
	@echo "make test    lint, types, import rules and all tests (installs torch and transformers)"
	@echo "make test-page  the page in a browser (installs the extra page and Playwright, and with apt-get Chromium)"
	@echo "make test-llama  the tests that run llama.cpp (installs the package xllamacpp)"
	@echo "make test-deep  the same with more examples, whole cross products, and the notebooks"
	@echo "make mutation  plant 300 faults (SEED=2 for others), print those that the tests do not find, and the score (an hour and a half)"
	@echo "make notebooks  execute the notebooks and keep their outputs"
	@echo "make bench   measure the speed of the simulator and of the native kernel of CPU experts"
	@echo "make bench-sweep  time grids of hundreds of scenarios on all cores (9 minutes on two; keep the machine quiet)"
	@echo "make bench-fit  time trilane tune and fit (eight minutes on two cores; keep the machine quiet)"
	@echo "make bench-accelerate  compare generation with Hugging Face accelerate's offload (estimated: two minutes; keep the machine quiet)"
	@echo "make validate  measure policies on this machine's host lanes and compare with the simulation; into out/validation"
	@echo "make gpu     check, profile and validate a CUDA GPU, stage by stage; into out/gpu (examples/gpu.sh)"
	@echo "make lint    ruff and the import rules"
	@echo "make clean   remove .venv, out and caches"

# One policy of each kind; `trilane compare` without --policies plays all of them.
DEMO := --policies on-demand,llama.cpp,ktransformers,mixtral-offloading,moe-infinity,fiddler,hybrimoe,dali,smoe,daop,quasi-pf,best-exact,best-approx,oracle
# The routing of a large model, in a batch: without policies that need batch 1, or scores of experts that were not chosen.
REAL := --policies on-demand,llama.cpp,ktransformers,mixtral-offloading,moe-infinity,fiddler,hybrimoe,dali,best-exact,oracle --set trace=gpt-oss-20b --set model=gpt-oss-20b@mxfp4 --set hardware=rtx-3060-ti+ddr4-3200 --set batch=8 --set generated_tokens=64

# Both at once, each on half of the cores: the pictures of the first are drawn while the second still plays.
HALF = $$(( ($$(getconf _NPROCESSORS_ONLN) + 1) / 2 ))

demo: $(VENV)/simulator.stamp
	@mkdir -p out
	@$(BIN)/trilane compare $(REAL) --jobs $(HALF) > out/large.txt 2>&1 & large=$$!; \
	echo "trilane compare $(DEMO) --jobs $(HALF) --out out"; \
	$(BIN)/trilane compare $(DEMO) --jobs $(HALF) --out out || { kill $$large; exit 1; }; \
	echo "trilane compare $(REAL) --jobs $(HALF)"; \
	wait $$large; status=$$?; cat out/large.txt; exit $$status

# Two workers with one thread each: torch's own threads would compete for the same cores. Bytecode is kept whatever the
# surroundings say: tests start many processes.
test: lint types
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Chromium is Debian's or Ubuntu's; TRILANE_CHROMIUM names another. Root may install it, others with sudo.
HAS_CHROMIUM = { [ -n "$$TRILANE_CHROMIUM" ] || command -v chromium || command -v chromium-browser; } >/dev/null

chromium:
	@$(HAS_CHROMIUM) || { $(AS_ROOT) apt-get update -q && $(AS_ROOT) apt-get install -qy chromium; } || \
	  { echo "expected Chromium; install it, or name its file in TRILANE_CHROMIUM" >&2; exit 2; }

test-page: chromium $(VENV)/page.stamp
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m page tests/page

test-llama: $(VENV)/llama.stamp
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m llama

test-deep: lint types
	TRILANE_TESTS=deep PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

AS_ROOT = $$([ "$$(id -u)" = 0 ] || echo sudo)
SEED ?= 1

mutation: $(VENV)/tests.stamp
	$(PIP) -e '.[mutation]'
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.mutation --seed $(SEED)

lint: $(VENV)/tests.stamp
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache

types: $(VENV)/tests.stamp
	$(BIN)/mypy

notebooks: $(VENV)/tests.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.notebooks.renew

bench: $(VENV)/tests.stamp
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.cpu_kernel --write

bench-sweep: $(VENV)/simulator.stamp
	$(BIN)/python -m benchmarks.sweep_speed --write

bench-fit: $(VENV)/tests.stamp
	$(BIN)/python -m benchmarks.fit_speed --write

bench-accelerate: $(VENV)/tests.stamp
	$(BIN)/python -m benchmarks.beside_accelerate --write

# Keep the machine quiet: whatever else runs is measured too.
VALIDATED := naive-cpu,fiddler,on-demand,mixtral-offloading,dali,hybrimoe,smoe,daop,best-exact
VALIDATION ?= out/validation

validate: $(VENV)/tests.stamp
	mkdir -p $(VALIDATION) && rm -f $(VALIDATION)/profile.yaml
	$(BIN)/trilane profile -o $(VALIDATION)/profile.yaml --lanes host-lanes --model deepseek-v2-lite --batch 1,4 \
	  --context 16,32 --prompt 16 --policies $(VALIDATED) --quick
	$(BIN)/trilane validate examples/validation.yaml --profile $(VALIDATION)/profile.yaml --out $(VALIDATION) \
	  --json $(VALIDATION)/agreement.json

# STAGES=smoke runs one of them; LANES=host-lanes runs them without a GPU. A second run continues where the first stopped.
GPU_OUT ?= out/gpu
STAGES  ?=

gpu: $(VENV)/llama.stamp
	TRILANE=$(BIN)/trilane PYTHON=$(BIN)/python examples/gpu.sh $(GPU_OUT) $(STAGES)

clean:
	rm -rf $(VENV) out build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/simulator.stamp: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing the simulator into $(VENV) ..."
	$(PIP) -e .
	@touch $@

$(VENV)/tests.stamp: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing torch, transformers and the test tools into $(VENV) (a few minutes) ..."
	$(PIP) -e '.[torch,test]'
	@touch $@ $(VENV)/simulator.stamp

$(VENV)/llama.stamp: $(VENV)/tests.stamp
	$(PIP) -e '.[llama]'
	@touch $@

$(VENV)/page.stamp: $(VENV)/tests.stamp
	$(PIP) -e '.[page,browser]'
	@touch $@

$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { echo >&2 "$(PYTHON) is not there. Install it: sudo apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) --version >/dev/null 2>&1 || { echo >&2 "$(PYTHON) does not run; give the full path of a Python >= 3.11: make $(MAKECMDGOALS) PYTHON=/path/to/python3.13"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo >&2 "Trilane needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version). Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo >&2 "$(PYTHON) cannot make virtual environments. Install what is missing: sudo apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
