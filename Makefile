# Works on a fresh machine with Python 3.11 or newer, make and git.
# Every target installs what it needs into .venv, once, and again when a dependency list changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two workers: the suite is sized for two cores, and more copies of torch cost more than they give.
TEST_WORKERS ?= 2
TEST_ARGS ?=
FINETUNE_ARGS ?=
# Programs, the first seed, a limit in seconds; tests/fuzz/run.py --help lists all.
FUZZ_ARGS ?= --count 5000 --seed 0
# Cases, the first seed, formats; tests/fuzz/files/run.py --help lists all.
FUZZ_FILES_ARGS ?= --count 20000 --seed 0
# Cases, the first seed, a limit in seconds; tests/fuzz/meshes/run.py --help lists all.
FUZZ_MESH_ARGS ?= --count 500 --seed 0
BENCH_ARGS ?=
MUTATION_ARGS ?=
SANITIZE_ARGS ?=
# --only PATTERN, --kind KIND, --one-per-family; what the file has already is not tried again.
SWEEP_ARGS ?=
SWEEP_OUT ?= runs/sweep.jsonl
# --only PATTERN of the names of node tests.
NODE_ARGS ?=
# --transformers-tests PATH and --scripts PATH of a checkout of transformers; --parts, --only TEXT.
OUTSIDERS_ARGS ?=

# Without bytecode on the disk, each process of a test compiles torch, transformers and Onward anew,
# which takes six seconds.
unexport PYTHONDONTWRITEBYTECODE
# pyright asks the package index for a newer version of itself at every start without this.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# With node's own limit of 4 GB pyright forgets what it has read of the libraries and reads it again,
# which doubles its time.
lint: export NODE_OPTIONS := --max-old-space-size=6144

.DEFAULT_GOAL := help
.PHONY: help finetune test test-tiny test-quick test-whole fuzz fuzz-files fuzz-mesh mutation sanitize triton false-alarms keras sweep node-tests outsiders lint format docs clean sdist wheel sbom arm
.PHONY: bench bench-ablation bench-row-demand bench-kernels bench-convergence bench-gpu

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Onward needs Python 3.11 or newer; choose one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras: .venv/.installed-hf,ort and so on.
# The native kernels are built by the installation, so their sources count as well.
NATIVE := setup.py $(wildcard src/onward/kernels/native/src/*)

# What a set of extras holds is not installed again by itself.
WITHIN-dev := test hf,ort hf,ort,viz docs
WITHIN-test := hf,ort hf,ort,viz
WITHIN-sweep := test hf,ort hf,ort,viz
WITHIN-hf,ort,viz := hf,ort

$(VENV)/.installed-%: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[$*]' --constraint constraints.txt
	@touch '$@' $(foreach extras,$(WITHIN-$*),'$(VENV)/.installed-$(extras)')

finetune: $(VENV)/.installed-hf,ort,viz ## fine-tune a small GPT-2 on padded batches, Onward beside eager PyTorch (dropout 0)
	$(BIN)/onward finetune --compare --dropout 0 --packing false --block_size 256 --output_dir runs/finetune-$$(date +%Y%m%d-%H%M%S) $(FINETUNE_ARGS)

test-tiny: $(VENV)/.installed-test ## see in seconds whether the installation works
	$(BIN)/python -m pytest tests/test_tiny.py -rs $(TEST_ARGS)

test-quick: $(VENV)/.installed-test ## run one case of every eighth test, about two minutes
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal --quick $(TEST_ARGS)

test: $(VENV)/.installed-test ## run the tests (TEST_ARGS="-k name" for some of them)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal $(TEST_ARGS)

test-whole: $(VENV)/.installed-test ## run every case of the tests that `make test` samples
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal --whole $(TEST_ARGS)

mutation: $(VENV)/.installed-test ## plant faults in the sources, and see that the tests find each (an hour; MUTATION_ARGS="-k plan")
	$(BIN)/python tests/mutation/run.py --jobs $(TEST_WORKERS) $(MUTATION_ARGS)

sanitize: $(VENV)/.installed-test ## run the kernels' tests under AddressSanitizer and UBSan (SANITIZE_ARGS="--thin 5")
	$(BIN)/python tests/kernels/sanitize.py $(SANITIZE_ARGS)

$(VENV)/.triton: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --no-compile triton --constraint constraints.txt
	@touch '$@'

triton: $(VENV)/.triton ## run every Triton kernel by Triton's interpreter; no GPU is needed
	$(BIN)/python -m pytest --whole tests/kernels/test_triton_interpreted.py $(TEST_ARGS)

keras: $(VENV)/.installed-test,keras-test ## train Keras models on TensorFlow, JAX and torch beside Keras itself (half an hour)
	$(BIN)/python -m pytest --whole tests/integrations/test_keras.py tests/integrations/test_other_frameworks.py $(TEST_ARGS)

false-alarms: $(VENV)/.installed-test ## verify right models 500 times: no alarm may be raised (half an hour)
	$(BIN)/python tests/faults/false_alarms.py

fuzz: $(VENV)/.installed-test ## train random programs beside eager PyTorch (FUZZ_ARGS="--only 17 --shrink")
	$(BIN)/python tests/fuzz/run.py --workers $(TEST_WORKERS) $(FUZZ_ARGS)

fuzz-files: $(VENV)/.installed-test ## load broken and hostile files of each format, from seeds (FUZZ_FILES_ARGS="--format onnx --show")
	$(BIN)/python tests/fuzz/files/run.py --workers $(TEST_WORKERS) $(FUZZ_FILES_ARGS)

fuzz-mesh: $(VENV)/.installed-test ## train random models on random meshes of 2 to 16 ranks in lockstep beside one rank (FUZZ_MESH_ARGS="--only 17")
	$(BIN)/python tests/fuzz/meshes/run.py --workers $(TEST_WORKERS) $(FUZZ_MESH_ARGS)

sweep: $(VENV)/.installed-sweep ## try every model class of transformers beside eager, write docs/models.md (hours; SWEEP_ARGS="--kind text")
	@mkdir -p $(dir $(SWEEP_OUT))
	$(BIN)/python -m pip install --quiet --no-deps timm --constraint constraints.txt
	$(BIN)/python tests/sweep/run.py --jobs $(TEST_WORKERS) --out $(SWEEP_OUT) $(SWEEP_ARGS)
	$(BIN)/python tests/sweep/page.py $(SWEEP_OUT) --rows tests/sweep/rows.jsonl --out docs/models.md
	@mv $(SWEEP_OUT) $(SWEEP_OUT).done # one that was interrupted goes on, one that is done begins anew

node-tests: $(VENV)/.installed-test ## run onnx's own node tests, results and gradients, write their table and docs/operators.md (two minutes)
	$(BIN)/python tests/nodes/run.py --jobs $(TEST_WORKERS) --write $(NODE_ARGS)

outsiders: $(VENV)/.installed-test ## run others' suites over Onward: torch's tables, and by path transformers' own tests and scripts
	$(BIN)/python -m pip install --quiet parameterized --constraint constraints.txt
	$(BIN)/python tests/outsiders/run.py $(OUTSIDERS_ARGS)

lint: $(VENV)/.installed-dev ## ruff check, ruff format --check, pyright (basic, then strict)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/pyright & basic=$$!; $(BIN)/pyright --project pyright-strict.json; strict=$$?; \
		wait $$basic && exit $$strict

format: $(VENV)/.installed-dev ## rewrite the sources in ruff's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-docs ## build the documentation site, in build/docs (half a minute)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --builder html --conf-dir docs . build/docs

bench: $(VENV)/.installed-hf,ort ## time Onward, eager and torch.compile on this CPU (BENCH_ARGS=--quick)
	$(BIN)/python benchmarks/cpu.py $(BENCH_ARGS)

bench-ablation: $(VENV)/.installed-hf,ort ## time Onward without each of its parts
	$(BIN)/python benchmarks/ablation.py $(BENCH_ARGS)

bench-row-demand: $(VENV)/.installed-hf,ort ## time padded and sparsely labelled training
	$(BIN)/python benchmarks/row_demand.py $(BENCH_ARGS)

bench-kernels: $(VENV)/.installed-hf,ort ## time each kernel beside the machine's ceilings
	$(BIN)/python benchmarks/kernel_times.py $(BENCH_ARGS)

bench-convergence: $(VENV)/.installed-hf,ort ## train with eager and with Onward, compare the losses
	$(BIN)/python benchmarks/convergence.py $(BENCH_ARGS)

bench-gpu: $(VENV)/.installed-hf,ort ## the same on one GPU, in under nine minutes
	$(BIN)/python benchmarks/gpu.py $(BENCH_ARGS)

# Files of a release do not depend on the hour: times in them are the last commit's.
sdist wheel: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || date +%s)

sdist: $(VENV)/.installed-dist ## make the source distribution, in dist/
	$(BIN)/python -m build --sdist --outdir dist .

wheel: $(VENV)/.installed-dist ## make two wheels, in dist/: with this machine's kernels, and one for every platform
	$(BIN)/python -m build --wheel --outdir dist .
	ONWARD_NATIVE=0 $(BIN)/python -m build --wheel --outdir dist .
	$(BIN)/twine check --strict dist/*.whl
	@for wheel in dist/*linux*.whl; do [ ! -e "$$wheel" ] || $(BIN)/auditwheel show "$$wheel"; done

arm: $(VENV)/.installed-test ## run the kernels as compiled for aarch64, under an emulator (three minutes; needs g++-aarch64-linux-gnu, qemu-user-static)
	$(BIN)/python tests/release/arm.py

sbom: $(VENV)/.installed-dist ## write the bill of materials of an installation, dist/onward.cdx.json (CycloneDX)
	$(PYTHON) -m venv --clear build/sbom
	ONWARD_NATIVE=0 build/sbom/bin/python -m pip install --quiet '.[hf,ort]' --constraint constraints.txt
	@mkdir -p dist
	$(BIN)/cyclonedx-py environment build/sbom --pyproject pyproject.toml --mc-type library \
		--output-reproducible --output-format JSON --output-file dist/onward.cdx.json

clean: ## remove build products and caches (not .venv, not runs/)
	rm -rf build dist src/*.egg-info .pytest_cache .ruff_cache
