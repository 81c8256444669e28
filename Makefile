# hiera-train: make a virtual environment, try it, test it. `make` lists the targets.
#
#   make quickstart ARGS="--set train.steps=60"
#   make test PYTHON=python3.12 VENV=~/hiera JOBS=4

SHELL := /bin/bash
VENV ?= .venv
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
ARGS ?=
# The first of these that is new enough makes the environment.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NO_HARDWARE := not gpu and not multigpu and not system
HIERA_IMAGE ?= localhost/hiera-train:latest
SLURM_TESTS := tests/system/test_slurm.py tests/system/test_slurm_jobs.py tests/system/test_cluster_tools.py
IMAGE_TESTS := tests/system/test_kube_play.py tests/system/test_docker_play.py
CLUSTER_TESTS := $(SLURM_TESTS) $(IMAGE_TESTS)
# One thread a process: the tests are many small ones, run side by side.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

.PHONY: venv
venv: $(INSTALLED) ## make .venv and install hiera-train with all that the tests need

$(INSTALLED): pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"{sys.executable} is Python {sys.version.split()[0]}; 3.11 or newer is needed")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python && $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -e ".[dev,quickstart]"
	@touch $@

.PHONY: quickstart
quickstart: $(INSTALLED) ## pre-train a small Hiera on real photographs, on the CPU, in minutes
	$(BIN)/hiera-train --config quickstart $(ARGS)
	@echo
	@echo "Train on your own: $(BIN)/hiera-train --config quickstart --set run.name=mine --set data.path=FOLDER"

.PHONY: test
test: $(INSTALLED) ## all tests that need no GPU and no root
	$(PYTEST) -m "$(NO_HARDWARE)" -n $(JOBS) --dist worksteal --ignore tests/ops tests
	TRITON_INTERPRET=1 $(PYTEST) -m "$(NO_HARDWARE)" -n $(JOBS) --dist worksteal tests/ops

# torch and Triton are exchanged, and NumPy for Triton's interpreter; of their CUDA libraries the newer ones serve.
# What they warn of is their own. Without the 0.5: the kernels of one compiled step take the interpreter half a minute.
OLDEST := $(abspath $(VENV)/oldest)
WITH_OLDEST := PYTHONPATH=$(OLDEST) $(PYTEST) -m "$(NO_HARDWARE)" -n $(JOBS) --dist worksteal \
  -W 'ignore:`torch.jit.script:DeprecationWarning' -W 'ignore:Conversion of an array:DeprecationWarning'

.PHONY: test-oldest
test-oldest: $(INSTALLED) ## launcher, training, compilation and kernels with the oldest torch and Triton that are promised
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(OLDEST) $(shell cat tests/oldest.txt)
	@PYTHONPATH=$(OLDEST) $(BIN)/python tests/oldest.py
	$(WITH_OLDEST) tests/launch/test_launcher.py tests/optim/test_compile.py tests/optim/test_training.py \
	  $(addprefix tests/train/,test_allocator.py test_train_units.py test_trouble.py test_initial.py)
	TRITON_INTERPRET=1 $(WITH_OLDEST) tests/ops/test_batched_sums.py tests/ops/test_fast_compiled.py -k "not 0.5"

.PHONY: test-system
test-system: $(INSTALLED) ## tests that need root and Debian packages (.ci/run installs those)
	$(PYTEST) -m system --ignore tests/image $(CLUSTER_TESTS:%=--ignore %) tests

.PHONY: test-cluster
test-cluster: test-slurm ## test-slurm, then the image as pods and through Docker's API (root, podman; make image first)
	@podman image exists $(HIERA_IMAGE) || { echo "podman has no image $(HIERA_IMAGE); make image builds it"; exit 1; }
	HIERA_IMAGE=$(HIERA_IMAGE) HIERA_NO_SKIP=1 $(PYTEST) -m system $(IMAGE_TESTS)

.PHONY: test-slurm
test-slurm: $(INSTALLED) ## a real three-node Slurm on this machine, torchx's nightly, kubectl (root)
	@$(BIN)/python -m tests.system.slurm_lab --check
	HIERA_NO_SKIP=1 $(PYTEST) -m system $(SLURM_TESTS)

.PHONY: image
image: ## build the container image with docker or buildah; PLATFORM=linux/arm64 for GH200; docs/container.md
	docker/build.sh $(ARGS)

.PHONY: image-smoke
image-smoke: $(INSTALLED) ## run the built image under podman in many ways (root)
	$(PYTEST) -m system tests/image

.PHONY: test-image
test-image: $(INSTALLED) ## build the image with buildah, then image-smoke (root, Debian's podman; a quarter of an hour)
	tests/image/preflight.sh
	ENGINE=buildah docker/build.sh $(ARGS)
	$(MAKE) image-smoke

.PHONY: test-gpu
test-gpu: $(INSTALLED) ## tests that need an NVIDIA GPU; those that need two run where there are two
	$(BIN)/python -m pytest -q -p no:benchmark -m "gpu or multigpu" tests

.PHONY: check
check: $(INSTALLED) ## format, lint, types, imports' direction and the quick tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "$(NO_HARDWARE) and not slow" -n $(JOBS) tests/test_repository.py tests/config tests/data

.PHONY: format
format: $(INSTALLED) ## format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: bench
bench: $(INSTALLED) ## benchmarks against FAIR's Hiera and hiera-optim, on a GPU; ARGS are passed on
	$(BIN)/python -m benchmarks.run $(ARGS)

.PHONY: clean
clean: ## remove caches and build products; keeps .venv and runs/
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
