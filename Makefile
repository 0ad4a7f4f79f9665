# Every target works as the first command on a fresh machine: it makes .venv once, and again only when a
# pyproject.toml or the constraints change.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test test-slow test-full lint format docs package package-full release-check bench results-small results

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# `make venv CONSTRAINTS=` (your own torch) is remembered in the environment that it made.
-include $(VENV)/constraints.mk
CONSTRAINTS ?= constraints/cpu.txt

# Demo and tests run on the CPU, also where a GPU is; two ranks share the machine.
CPU := PATH="$(CURDIR)/$(BIN):$$PATH" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1

DEMO_OUT ?= out/demo
PYTEST_ARGS ?=
BENCH_ARGS ?=
RESULTS_ARGS ?=

help:
	@echo 'make demo    pre-train a small BERT in two phases with VRLAMB under ZeRO-2, two ranks, CPU -> $(DEMO_OUT)'
	@echo 'make test    the tests, CPU, except for those marked slow (PYTEST_ARGS="-k lamb" for some)'
	@echo 'make test-slow  the tests marked slow;  make test-full  all tests, those marked nightly too'
	@echo 'make lint    ruff and mypy; shellcheck, hadolint and the compose schema on docker/ and scripts/'
	@echo 'make format  let ruff rewrite what it can'
	@echo 'make docs    the site, with the API from docstrings -> out/site; its links are checked'
	@echo 'make package  sdists and wheels, installed into a fresh environment and run there (package-full: with all dependencies)'
	@echo 'make release-check  list the addresses that must be filled in before a release'
	@echo 'make bench   measure collectives, kernels and training steps on all GPUs -> out/benchmarks'
	@echo 'make results-small  test the claims of the paper, small sizes, CPU, minutes -> docs/MEASUREMENTS.md, docs/figures'
	@echo 'make results  the same in full size on a GPU'
	@echo 'make venv    only the environment (.venv); CONSTRAINTS= for your own torch on a GPU machine'

venv: $(STAMP)

# The last release of Megatron-Core for each Python. Its dependencies are for GPUs, and its tests here need none; so are
# those of NeMo AutoModel.
MEGATRON := 'megatron-core==0.16.1; python_version < "3.12"' 'megatron-core==0.19.2; python_version >= "3.12"'
AUTOMODEL := nemo-automodel==0.7.0

# Without vision: a torchvision that is not built for this very torch breaks transformers, too; its tests are left out.
# DS_BUILD_OPS=0: no DeepSpeed op is compiled at installation; none is needed. pip would compile to bytecode on one core.
$(STAMP): pyproject.toml recipes/pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'ds_vrgd needs Python 3.11 or newer; name one with: make PYTHON=python3.12' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo 'python3 -m venv failed: install the venv package of your Python (Debian: python3-venv)' >&2; exit 1; }
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --use-pep517 --no-compile $(addprefix -c ,$(CONSTRAINTS)) -e '.[deepspeed,hf,dev]' -e 'recipes[bert,plot]'
	-$(BIN)/python -m pip install --no-deps --no-compile $(MEGATRON)  # where it cannot be had, its test fails
	-$(BIN)/python -m pip install --no-deps --no-compile $(AUTOMODEL)  # likewise
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # torch has a file for newer Pythons
	@echo 'CONSTRAINTS ?= $(CONSTRAINTS)' > $(VENV)/constraints.mk
	@touch $@

demo: $(STAMP)
	$(CPU) LOCAL_SIZE=2 $(BIN)/deepspeed --log_level warning --num_gpus 2 scripts/pretrain_bert.py \
	  --deepspeed_config configs/ds_vrgd.json --run configs/demo.yaml --output $(DEMO_OUT) --resume auto

test: $(STAMP)
	$(CPU) $(BIN)/python -m pytest -m 'not slow and not nightly' $(PYTEST_ARGS)

# What test leaves out and CI runs.
test-slow: $(STAMP)
	$(CPU) $(BIN)/python -m pytest -m 'slow and not nightly' $(PYTEST_ARGS)

test-full: $(STAMP)
	$(CPU) $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck .ci/run docker/*.sh $(wildcard scripts/*.sh scripts/*.sbatch)
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cpu
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker/compose.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/wish.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/ci.yml

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site's tools are installed by the first `make docs`, and not by `make venv`.
docs: $(VENV)/.installed-docs
	$(BIN)/python scripts/site_pages.py out/site-pages
	DS_VRGD_SITE_FOOTER="ds_vrgd $$($(BIN)/python -c 'from importlib import metadata; print(metadata.version("ds_vrgd"))')" \
	  $(BIN)/zensical build --clean --strict
	$(BIN)/python scripts/check_site.py out/site
	@echo 'To read it, with search: $(BIN)/python -m http.server --bind 127.0.0.1 --directory out/site, then http://127.0.0.1:8000'

$(VENV)/.installed-docs: $(STAMP)
	$(BIN)/python -m pip install $(addprefix -c ,$(CONSTRAINTS)) zensical mkdocstrings-python
	@touch $@

# Installing all dependencies takes minutes: package lends the fresh environment those of .venv.
package: $(STAMP)
	scripts/check_package.sh

package-full: $(STAMP)
	scripts/check_package.sh --full

# Fails while a file names the placeholder of an address that does not exist yet.
release-check:
	@$(PYTHON) scripts/check_release.py

# All GPUs, all parts. BENCH_ARGS="--only steps --models large" for a part of it.
bench: $(STAMP)
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo 'make bench measures GPUs, and torch finds none here: nothing was measured. On the CPU,' \
	    '$(BIN)/python -m benchmarks runs all of it on a tiny model, to show that it works.' >&2; exit 1; }
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# Both resume where they were stopped (out/evidence). RESULTS_ARGS="linear" for one of the experiments.
results-small: $(STAMP)
	$(CPU) OMP_NUM_THREADS=2 $(BIN)/python -m evidence $(RESULTS_ARGS) --size small
	$(BIN)/python -m evidence report $(RESULTS_ARGS)

results: $(STAMP)
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo 'make results needs a GPU, and torch finds none here: nothing was measured. make results-small' \
	    'runs the small sizes on the CPU.' >&2; exit 1; }
	$(BIN)/python -m evidence $(RESULTS_ARGS) --size full
	$(BIN)/python -m evidence report $(RESULTS_ARGS)
