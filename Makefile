# Every target makes and reuses .venv by itself: Python 3.10+ and make are the whole set-up.
#   make chat                          the shipped model, or MODEL=folder|alias|hub-id ARGS="--ctx 32K ..."
#   make serve                         the same over HTTP, OpenAI-compatible (docs/SERVER.md)
#   make quick                         the tests that catch most, in a minute of two free cores
#   make real-model                    fetch a small real checkpoint (93 MB), kept in ~/.cache: to judge
#                                      methods on, not for its answers
#   make lint test                     what a change must pass; make format first
#   make docs-check                    run the commands of README.md and docs/*.md
#   make studies-test                  the tests of tools/studies, which make test leaves out
#   make test-arm                      tests/kernels_cpu on an ARM that QEMU emulates (docs/MACHINES.md)
#   make wheel                         a wheel that carries compiled kernels, into dist/
#   make bench kernels check-gpu eval compare pocket    measurements and tools; ARGS goes to the program
PYTHON ?= python3
MODEL ?=
ARGS ?=
PY = .venv/bin/python
PIP = $(PY) -m pip --disable-pip-version-check
READY = .venv/.runtime
READY_DEV = .venv/.dev
READY_SERVE = .venv/.serve

.PHONY: chat serve test quick studies-test test-arm lint format bench kernels check-gpu eval compare pocket docs-check real-model wheel clean

chat: $(READY)
	@$(PY) -m engine.chat $(if $(MODEL),--model "$(MODEL)") $(ARGS)

serve: $(READY_SERVE)
	@$(PY) -m engine.serve $(if $(MODEL),--model "$(MODEL)") $(ARGS)

test: $(READY_DEV)
	@$(PY) tests/run.py $(ARGS)

quick: $(READY_DEV)
	@$(PY) tests/run.py --quick $(ARGS)

studies-test: $(READY_DEV)
	@$(PY) tests/run.py tests/studies $(ARGS)

lint: $(READY_DEV)
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy

format: $(READY_DEV)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

test-arm: $(READY_DEV)
	@$(PY) -m tools.arm $(ARGS)

bench: $(READY_DEV)
	@$(PY) -m tools.bench $(ARGS)

kernels: $(READY_DEV)
	@$(PY) -m tools.compile_kernels $(ARGS)

check-gpu: $(READY_DEV)
	@$(PY) -m tools.check_gpu $(ARGS)

eval: $(READY)
	@$(PY) -m tools.compare --methods omnikv@6.67 --tail 256 --turns 1 --no-controls --out eval-out \
		$(if $(MODEL),--model "$(MODEL)") $(ARGS)

compare: $(READY)
	@$(PY) -m tools.compare $(if $(MODEL),--model "$(MODEL)") $(ARGS)

pocket: $(READY)
	@$(PY) -m tools.studies.pocket.train $(ARGS)

docs-check: $(READY_DEV)
	@$(PY) -m tools.repo.docs_check $(ARGS)

real-model: $(READY)
	@$(PY) -m tools.real_model $(ARGS)

wheel: $(READY_DEV)
	@$(PY) -m tools.release.wheel $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# a venv knows its clone: `.venv/bin/python -m engine.chat` runs in any folder
KNOW_CLONE = import os, sysconfig; folder = sysconfig.get_path("purelib"); \
	print(os.path.relpath(".", folder), file=open(os.path.join(folder, "omnikv-clone.pth"), "w"))

# install PACKAGES: of what pip says, a line per package that is megabytes, and the last ones
define install
	@rm -f .venv/.failed
	@{ $(PIP) install $(1) || touch .venv/.failed; } | \
		awk '/(Downloading|Using cached) .*MB\)|^Installing|^Successfully/ {print; fflush()}' >&2
	@test ! -e .venv/.failed
endef

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "needs Python 3.10 or newer, found " + sys.version.split()[0] + ": make PYTHON=/path/to/python3")'
	@echo 'making .venv (once)' >&2
	@$(PYTHON) -m venv .venv
	@$(PY) -c '$(KNOW_CLONE)'

$(READY): requirements.txt | .venv/bin/python
	@echo 'installing torch and what it needs into .venv, once, in minutes: 1.7 GB of disk with a CPU' >&2
	@echo 'build of torch, some 6 GB with the CUDA build, which Linux gets from most indexes' >&2
	$(call install,-r requirements.txt)
	@touch $@

$(READY_SERVE): pyproject.toml $(READY)
	@echo 'installing starlette, uvicorn and llguidance into .venv, once: some MB' >&2
	$(call install,'starlette>=1.0.1' 'uvicorn>=0.34' 'llguidance>=1.7')
	@touch $@

$(READY_DEV): requirements-dev.txt $(READY)
	@echo 'installing the packages of requirements-dev.txt into .venv, once: 0.3 GB of disk' >&2
	$(call install,-r requirements-dev.txt)
	@touch $@
