.PHONY: check format test test-slow test-gpu floors scoreboard

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

test-slow:  ## the longest suites
	pytest -m slow

test-gpu:  ## what needs a CUDA device
	pytest -m "gpu and not slow"

scoreboard:  ## what the harness finds of known bugs
	harness faults --format markdown

floors:  ## measure again what the bounds were chosen from
	python tests/benchmarks/noise_floors.py
