# `make conformance` judges the built-in implementations, `make test` runs every test; both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The workers share the cores: threads of torch would only wait for one another.
export OMP_NUM_THREADS ?= 1
# Most tests start processes, which should not each compile every module.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: conformance test pytest campaign-ray lattice benchmark seeds ecosystem versions hostile report docs lint clean

# In the quick profile; OPTIONS='--mha-profile default' tries every boundary case, and rows of up to 4096 keys.
conformance: $(READY)
	$(BIN)/pytest conformance -q -n auto --dist worksteal --mha-profile quick $(OPTIONS)

# At once: most linters use one core.
test: $(READY)
	+$(MAKE) -j2 --no-print-directory lint pytest

# Many tests wait for processes that they have started, so that there is work for half as many workers again.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(3 * os.cpu_count() // 2)")
pytest: $(READY)
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal

# Every right class of tests/lattice conforms, and with a fault planted, fails; each kind of docs/coverage.md conforms.
# So do the correct classes of the other tests, on all cases of the quick profile (`make test` tries one of each property).
# LATTICE=60 LATTICE_SEED=1 for fewer classes, or for other cases; LATTICE=400-459 for some with rotations, norms and windows.
# Takes hours of one core.
LATTICE ?= 560
lattice: $(READY)
	rm -rf build/lattice
	LATTICE=$(LATTICE) $(BIN)/pytest tests/lattice $$(grep -rlE "support\.(effort|judging|readings|kinds)|mark\.(slow|mostly_slow)" tests --include="test_*.py" | grep -v lattice) -q -n auto --dist worksteal $(OPTIONS)
	$(BIN)/python tests/lattice/summary.py build/lattice

# Time and memory of all that conforms, on one thread and on all; OPTIONS='-k huge' for 8192 tokens, which takes hours.
benchmark: $(READY)
	env -u OMP_NUM_THREADS $(BIN)/pytest conformance --benchmark-only --mha-dtype float32 bfloat16 -k "not huge" $(OPTIONS)

# The kill matrix on ten seeds: every fault caught, and no implementation of ours.
seeds: $(READY)
	mkdir -p build
	for seed in 0 1 2 3 4 5 6 7 8 9; do \
		$(BIN)/mha faults --seed $$seed --json build/kills-$$seed.json || exit 1; \
		$(BIN)/pytest conformance -q -n auto --mha-seed $$seed $(OPTIONS) || exit 1; \
	done

# The adapters of other packages, against the packages themselves.
ADAPTERS := $(addprefix mha.implementations.ecosystem., sdpa_backends:math sdpa_backends:flash bert:eager \
	bert:sdpa gpt2:eager gpt2:sdpa llama:eager llama:sdpa vit:eager vit:sdpa timm_attention:fused timm_attention:unfused \
	xtransformers:implementation xtransformers:flash keras_mha:implementation)
# Those of kernels; some run for minutes of one core, in interpreters and reference evaluators.
ADAPTERS += $(addprefix mha.implementations.ecosystem., sdpa_backends:operator flex_kernel:implementation \
	$(addprefix transformers_functions:, gpt_oss_eager gemma2_eager sdpa_function flex_function mistral mistral_by_sdpa) \
	jax_attention:implementation jax_splash:implementation mlx_attention:implementation ring_merger:implementation \
	$(addprefix onnx_attention:, reference23 reference25 ort23 ort25 gqa) \
	$(addprefix sglang_kernels:, extend_attention extend_on_cache context_attention decode_attention merge_state))
# Of SGLang, whose dependencies need a GPU, only files are loaded. OPTIONS='-k mlx' for some.
ecosystem:
	$(PYTHON) -m venv .venv-ecosystem
	.venv-ecosystem/bin/pip install -q -c constraints.txt -e '.[ecosystem,kernels,parallel]'
	.venv-ecosystem/bin/pip install -q --no-deps sglang==0.5.23
	TRITON_INTERPRET=1 .venv-ecosystem/bin/pytest conformance -q -n auto --mha-profile quick --mha-dtype float32 \
		--mha-waivers implementations/ecosystem/waivers.toml $(OPTIONS) --mha-impl $(ADAPTERS)

# A few implementations with other versions of Python, torch and the dependencies, each in an environment of its own of
# up to 7 GB. ENVIRONMENTS=lowest for some; OPTIONS='--torch-index URL' for builds of torch without CUDA.
versions:
	cd tests && $(PYTHON) -m support.versions $(ENVIRONMENTS) $(OPTIONS)

# What each front end says of code that works against the judge. Takes most of an hour.
hostile: $(READY)
	cd tests && ../$(BIN)/python -m support.hostile_table

# The tests of campaigns on a Ray cluster, which is started on this machine; CI does without Ray (355 MB).
campaign-ray:
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/pip install -q -c constraints.txt -e '.[dev,ray]'
	.venv-ray/bin/pytest -q tests/campaign/test_campaign_ray.py $(OPTIONS)

# The site, in build/site. Its example of a report is that of `make report`, or else of two implementations.
DOCS_READY := $(VENV)/.docs-ready
docs: $(DOCS_READY) build/report.json
	PYTHONPATH=docs:tests $(BIN)/python -m generated build/docs
	rm -rf build/site
	$(BIN)/sphinx-build -q -W --keep-going -j auto -d build/doctrees build/docs build/site

# What conforms, and what does not.
TUTORIALS := $(addprefix mha.conformance.faults.tutorials:,vectorized minimal modular einops fused_qkv)
report: $(READY)
	mkdir -p build
	-$(BIN)/pytest conformance -q -n auto --dist worksteal --mha-profile quick --mha-dtype float32 \
		--mha-impl all $(TUTORIALS) --mha-report build/report.json $(OPTIONS)

build/report.json:
	mkdir -p build
	-$(BIN)/mha check torch_mha mha.conformance.faults.tutorials:fused_qkv --profile quick --dtype float32 \
		--report $@ > build/report.txt

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/types/mha && for part in spec implementations conformance; do ln -sfn ../../../$$part build/types/mha/$$part; done
	MYPYPATH=build/types $(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/lizard -l python -C 12 -T nloc=40 -w spec implementations conformance
	$(BIN)/python tests/style.py spec implementations conformance

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

$(DOCS_READY): $(READY)
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .venv-ecosystem .venv-ray build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
