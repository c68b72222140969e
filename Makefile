# make demo       a swarm on this machine: a volunteer is killed, one comes late, and the bootstrap peer is killed; prints a
#                 table, a plot and text that the model generates; 2 minutes
# make test       what every change must keep; five minutes on two cores
# make test-long  further cases of simulated stories, more real processes, tests of benchmarks and research; fifteen minutes
# make test-web   the page in a browser, beside a live swarm and for 200 members; installs Chromium where it may; three
#                 minutes. Its pictures: make test-web WEB_SHOTS=docs/page
# make coverage   the pure packages, with every line and branch covered; nightly
# make faults     real processes, killed and frozen at many moments, or all at once; the loss of any one or two of three;
#                 damaged memory; joining over thin lines; needs an otherwise idle machine; 30 minutes
# make churn      real processes, one started or killed every 12 s, and the bootstrap killed; 10 minutes. Another length or
#                 seed: make churn CHURN_SECONDS=120 CHURN_SEED=7
# make replay     a swarm of real processes on two texts, then replayed in one process; four islands with the rounds that
#                 `new` writes, then with rounds of 5 s, beside a replay and a trial; 30 minutes, or less:
#                 make replay PLANNED_SECONDS=60
# make homes      real processes behind home routers in separate networks: two homes with README's commands, and a few
#                 reachable peers among many that are not; caps on a line, held for minutes; 25 minutes
# make internet   real processes on an internet of namespaces with lines and routers as homes have them (root and
#                 /dev/net/tun); 5 minutes a scene. Others: make internet INTERNET="mixed bad --how commands --plays 5"
# make attacks    strangers and lying members against real processes, one attack at a time; writes the figures to
#                 attacks.json; 45 minutes. Longer attacks, or some: make attacks ATTACK_SECONDS=60 TEST_FLAGS="-k ruins"
# make fuzz       a million inputs for what strangers' bytes reach (tests/fuzz), with atheris; 5 minutes
# make clocks     real processes: a founder whose clock is ahead by ten minutes or a day and is then set right, a stopped
#                 peer, and a simulated night of a laptop; 30 minutes. On a busy machine: make clocks CLOCKS_ROUND_SECONDS=4
# make own-loop   users' own training loops in real processes: killed and restarted, with data workers, compiled, idle,
#                 and on a GPU where there is one; 10 minutes
# make ranks      islands of several ranks in real processes: replicated and sharded beside a plain and a slow one, ranks
#                 that are killed or hang, restarts; 20 minutes. A shorter run: make ranks RANKS_SECONDS=120
# make guest      the owner's commands on a real peer: pause, resume, limits, leave, a quota; prints how long each takes;
#                 4 minutes
# make rivals     tests of the benchmarks that compare with other systems; 5 minutes
# make size       130 simulated members and a newcomer that reaches three of them; the rosters of a run of 200 members that
#                 come and go every 30 cycles; the longer stories of simulated swarms; two dozen real processes in five rows,
#                 all killed at once and restarted; 16 minutes
# make crash-matrix  a simulated peer, killed or stopped at every step of a round and in every role; then twelve such cases
#                 with real processes, ten times each: an hour. Fewer times: make crash-matrix CRASH_REPEATS=1
# make learning   the trials for evidence (research/README.md); days, continues where it was stopped
# make bench      measures everything in docs/performance.md, on an otherwise idle machine, and draws it; 30 minutes
# make extras     installs the packages of the extras (transformers, Lightning, TensorBoard, notebooks) into .venv-extras
# make examples   runs every example with the commands of its README, every notebook, and the tests that need the extras;
#                 builds wheel and sdist, installs them into an empty environment elsewhere, and trains there
# make release    builds wheel and sdist into dist, checks what is in them, installs each into an empty environment of every
#                 Python from 3.11 to 3.13 on this machine, trains with two peers from the wheel, and writes SHA256SUMS and
#                 RELEASE_NOTES.md; 20 minutes, and 6 GB of disk at a time
# make models     models and texts that one organiser brings, in real processes, and all tests of them; texts that peers
#                 share; archivists, one of them killed and restarted; exports loaded with transformers; 20 minutes
# make files      every kind of file that people have, and models of many families, five of them in real processes; 15 minutes
# make reference  generates the pages of docs/reference
# make docs       builds the documents as a site into build/site, checks their links, and runs the commands that they mark
#                 as runnable; half a minute
# make gauges     measures the code: its size and shape, and the modules on the ways of messages through it; 1 minute
# make check      style and types
# make format     formats with ruff
# make clean      removes what the other targets created
#
# All but `clean` first create .venv and install what pyproject.toml and constraints.txt name; they do so again only after
# one of these files has changed. Nothing is installed outside .venv and .venv-extras.

PYTHON ?= python3
# Additional arguments for pip, such as: make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS ?=
# Arguments for the demo, such as: make demo DEMO_FLAGS="--peers 3 --seconds 200 --json figures.json"
DEMO_FLAGS ?=
# Additional arguments for pytest, such as: make test TEST_FLAGS="-x -k merge"
TEST_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Compiles numba's loops for all peers on this machine: 10 s, or 1 s if they have not changed since.
COMPILE_LOOPS := $(VENV)/bin/python -c 'from p2p_diloco.span.known_answer import warm_up; warm_up()'

# A separate environment that uses the packages of .venv (torch is large) and adds those of the extras, which peers do not
# need.
EXTRAS := hf,lightning,notebooks,track
EXTRAS_VENV := .venv-extras
EXTRAS_STAMP := $(EXTRAS_VENV)/.installed
FILE_TESTS := tests/text tests/session/test_model_families.py

# One worker more than cores, because tests of real processes mostly wait. An idle worker takes over tests of the others.
IN_PARALLEL := -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --dist worksteal

LINE_TESTS := $(addprefix tests/swarm/test_,homes.py caps.py shares.py measured_share.py)
REPAIR_TESTS := $(addprefix tests/swarm/test_,repair_processes.py thin_donor.py thin_lines.py thin_network.py)
PURE_TESTS := tests/span_log tests/outer tests/codec tests/protocol
# Folders, not module names: a file that no test imports counts as uncovered.
PURE_ROOMS := --cov=p2p_diloco/span_log --cov=p2p_diloco/outer --cov=p2p_diloco/codec --cov=p2p_diloco/protocol

.PHONY: demo test test-long test-web coverage faults churn replay homes internet attacks fuzz clocks own-loop guest ranks rivals size crash-matrix learning extras examples release models files bench reference docs gauges check format clean install
.DEFAULT_GOAL := demo

demo: $(STAMP)
	@$(COMPILE_LOOPS)
	$(BIN)/python examples/local-swarm/demo.py $(DEMO_FLAGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "not (long or slow or wall_clock)" tests $(TEST_FLAGS)

# Whole swarms of real processes run alone, because their rounds have deadlines.
test-long: $(STAMP) $(EXTRAS_STAMP)
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "slow and not long" tests $(TEST_FLAGS)
	$(EXTRAS_VENV)/bin/python -m pytest $(IN_PARALLEL) -m "long or not long" $(FILE_TESTS) $(TEST_FLAGS)
	$(EXTRAS_VENV)/bin/python -m pytest -s -m long tests/processes/test_families.py -k llama $(TEST_FLAGS)
	$(BIN)/python -m pytest -m "wall_clock and not (long or slow)" tests/swarm/test_faults.py tests/internet $(TEST_FLAGS)

WEB_SHOTS ?=
test-web: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e ".[web]"
	tests/web/install_programs build/promtool
	PATH="$(CURDIR)/build/promtool/usr/bin:$$PATH" WEB_SHOTS=$(WEB_SHOTS) $(BIN)/python -m pytest -s -m "long or not long" tests/web $(TEST_FLAGS)

faults: $(STAMP)
	P2P_DILOCO_MOST_BUSY_SHARE=0 $(BIN)/python -m pytest -m "long or not long" tests/swarm/test_faults.py $(TEST_FLAGS)
	$(BIN)/python -m pytest -s -m "long or not long" $(REPAIR_TESTS) $(TEST_FLAGS)
	$(BIN)/python -m pytest -s -m long tests/processes/test_losses.py tests/swarm/test_without_numba.py tests/session/test_start.py $(TEST_FLAGS)

CHURN_SECONDS ?= 600
CHURN_SEED ?= 1
churn: $(STAMP)
	CHURN_SECONDS=$(CHURN_SECONDS) CHURN_SEED=$(CHURN_SEED) $(BIN)/python -m pytest -s -m "long or not long" tests/swarm/test_churn.py $(TEST_FLAGS)

PLANNED_SECONDS ?= 300
replay: $(STAMP)
	$(BIN)/python -m pytest -s -m "long or not long" tests/swarm/test_replay_processes.py tests/research/test_replay.py $(TEST_FLAGS)
	PLANNED_SECONDS=$(PLANNED_SECONDS) $(BIN)/python -m pytest -s -m long tests/processes/test_planned.py $(TEST_FLAGS)

ATTACK_SECONDS ?= 25
ATTACKS ?= attacks.json
attacks: $(STAMP)
	P2P_DILOCO_ATTACK_SECONDS=$(ATTACK_SECONDS) P2P_DILOCO_FIGURES=$(ATTACKS) $(BIN)/python -m pytest -s -m "long or not long" tests/processes/test_hostility.py $(TEST_FLAGS)

INPUTS ?= 1000000
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	$(BIN)/python -m tests.fuzz.run --inputs $(INPUTS)

homes: $(STAMP)
	$(BIN)/python -m pytest -s -m "long or not long" $(LINE_TESTS) $(TEST_FLAGS)

INTERNET ?= near good mixed far bad one-lan both-homes
internet: $(STAMP)
	@$(COMPILE_LOOPS)
	$(BIN)/python -m internet $(INTERNET)

CLOCKS_ROUND_SECONDS ?= 1
clocks: $(STAMP)
	CLOCKS_ROUND_SECONDS=$(CLOCKS_ROUND_SECONDS) $(BIN)/python -m pytest -s -m long tests/processes/test_clocks.py tests/swarm/test_wrong_clocks.py $(TEST_FLAGS)

guest: $(STAMP)
	$(BIN)/python -m pytest -s -m long tests/processes/test_guest.py tests/session/test_guest_watch.py $(TEST_FLAGS)

own-loop: $(STAMP)
	$(BIN)/python -m pytest -m "long or not long" tests/swarm/test_own_loops.py tests/processes/test_own_loop.py $(TEST_FLAGS)
	$(BIN)/python -m pytest -s -m "long or not long" tests/processes/test_gpu.py tests/span/test_device.py tests/research/test_stack.py $(TEST_FLAGS)

RANKS_SECONDS ?= 300
ranks: $(STAMP)
	RANKS_SECONDS=$(RANKS_SECONDS) $(BIN)/python -m pytest -s -m "long or not long" $(wildcard tests/swarm/test_rank*.py tests/processes/test_rank*.py) $(TEST_FLAGS)

rivals: $(STAMP)
	$(BIN)/python -m pytest -m "long or not long" tests/benchmarks/processes $(TEST_FLAGS)

size: $(STAMP)
	$(BIN)/python -m pytest -s -m long tests/simulator tests/research tests/swarm/test_many_peers.py tests/swarm/test_announced_traffic.py tests/swarm/test_one_liar.py tests/swarm/test_small_swarms.py $(TEST_FLAGS)
	$(BIN)/python -m pytest -s -m "long or not long" tests/swarm/test_many_processes.py $(TEST_FLAGS)

CRASH_REPEATS ?= 10
crash-matrix: $(STAMP)
	$(BIN)/python -m simulator crashes
	P2P_DILOCO_CRASH_REPEATS=$(CRASH_REPEATS) $(BIN)/python -m pytest -rP -n 4 --dist worksteal -m long tests/processes/test_crash_matrix.py $(TEST_FLAGS)

# Evidence, by the rules of research/README.md, the primary comparison first. Finished trials are stored, so this can be
# stopped at any time; it goes on where it was. DEVICE=cuda plays it on a GPU.
DEVICE ?= cpu
TRIALS := research/results/trials.jsonl
PROSE := $(VENV)/prose.txt
RESEARCH = $(BIN)/python -m research
PLAYED = --device $(DEVICE) --keep $(TRIALS)
learning: $(STAMP)
	$(RESEARCH) prose $(PROSE)
	for islands in 4 8 16; do \
		$(RESEARCH) tune --islands $$islands $(PLAYED) --rows primary,falling,means || exit 1; \
		for name in primary falling means; do \
			$(RESEARCH) $$name --islands $$islands $(PLAYED) && \
			$(RESEARCH) $$name --islands $$islands $(PLAYED) --data $(PROSE) || exit 1; \
		done; \
	done
	for islands in 4 8 16; do \
		for name in waiting lost slow late in-rows few-bits one-machine cycles; do \
			$(RESEARCH) tune --rows $$name --islands $$islands $(PLAYED) && \
			$(RESEARCH) $$name --islands $$islands $(PLAYED) || exit 1; \
		done; \
	done

# The measurements. An empty value skips one, as in:
# make bench BENCH_AVERAGING=2x1M:none:1 BENCH_STATE= BENCH_MEMORY= BENCH_FAILURES= BENCH_TRAINING= BENCH_TO=/tmp/figures
# Averaging: PEERSxPARAMETERS:AGAINST:REPEAT, several. State: MEGABYTES:DONORS:REPEAT, several. Others: their flags.
BENCH_AVERAGING ?= 4x10M:hivemind,gloo:5 2x1M:hivemind,gloo:5 4x1M:hivemind,gloo:5 8x10M:gloo:3 2x50M:hivemind:3 8x50M:none:3
BENCH_VECTORS ?= --parameters 1M
BENCH_STATE ?= 800:3:3
BENCH_TRAINING ?= --repeat 2 --against $(BENCH_TRAINERS)
BENCH_MEMORY ?= --peers 2 --parameters 10M,40M
BENCH_FAILURES ?= --islands 1,2,4,8,16
BENCH_GOODPUT ?= $(if $(BENCH_FAILURES),--costs $(BENCH_TO)/failures.json)
BENCH_TO ?= benchmarks/figures
# torchft takes part if `python -m benchmarks install-torchft` has installed it.
ASK_FOR_TORCHFT := from benchmarks.training.torchft_environment import torchft_interpreter as ask; ask()
BENCH_TRAINERS = $(shell $(BIN)/python -c '$(ASK_FOR_TORCHFT)' 2>/dev/null && echo blocking,torchft || echo blocking)

# The n-th part of such a value, and the n-th side of 4x10M.
part = $(word $2,$(subst :, ,$1))
side = $(word $2,$(subst x, ,$(call part,$1,1)))
define NEWLINE


endef
averaging = $(BIN)/python -m benchmarks averaging --peers $(call side,$1,1) --parameters $(call side,$1,2) \
  --against $(call part,$1,2) --repeat $(call part,$1,3) --json $(BENCH_TO)/averaging-$(call part,$1,1).json$(NEWLINE)
state = $(BIN)/python -m benchmarks state --megabytes $(call part,$1,1) --donors $(call part,$1,2) \
  --repeat $(call part,$1,3) --json $(BENCH_TO)/state-$(call part,$1,1)MB.json$(NEWLINE)
# A benchmark with the given flags; nothing if there are none.
other = $(if $2,$(BIN)/python -m benchmarks $1 $2 --json $(BENCH_TO)/$1.json)

# A benchmark that fails stops this; earlier figures are kept, and `python benchmarks/figures/draw.py benchmarks/figures`
# draws them. Training comes last, because it creates networks, which not every machine allows.
bench: $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e ".[plots]"
	mkdir -p $(BENCH_TO)
	$(foreach one,$(BENCH_AVERAGING),$(call averaging,$(one)))
	$(call other,vectors,$(BENCH_VECTORS))
	$(foreach one,$(BENCH_STATE),$(call state,$(one)))
	$(call other,memory,$(BENCH_MEMORY))
	$(call other,failures,$(BENCH_FAILURES))
	$(call other,goodput,$(BENCH_GOODPUT))
	$(call other,training,$(BENCH_TRAINING))
	$(BIN)/python benchmarks/figures/draw.py $(BENCH_TO)

EXTRAS_TESTS := tests/status/test_tensorboard.py $(wildcard tests/swarm/test_*_callback.py tests/processes/test_*_callback.py)
extras: $(EXTRAS_STAMP)

examples: $(EXTRAS_STAMP)
	$(EXTRAS_VENV)/bin/python -m pytest -m "long or not long" $(EXTRAS_TESTS) $(TEST_FLAGS)
	$(EXTRAS_VENV)/bin/python -m pytest -s -m "long or not long" tests/processes/test_examples.py tests/processes/test_demo.py $(TEST_FLAGS)
	PIP_FLAGS="$(PIP_FLAGS)" $(BIN)/python -m pytest -s -m long tests/processes/test_wheel.py $(TEST_FLAGS)

release: $(STAMP)
	PIP_FLAGS="$(PIP_FLAGS)" $(BIN)/python -m release

MODEL_TESTS := $(addprefix tests/training/test_,micro_batch.py blocks.py sampling.py llama.py) tests/session/test_run_model.py
models: $(EXTRAS_STAMP)
	$(EXTRAS_VENV)/bin/python -m pytest -m "long or not long" $(MODEL_TESTS) $(TEST_FLAGS)
	$(EXTRAS_VENV)/bin/python -m pytest -s -m long tests/processes/test_models.py tests/processes/test_archivists.py tests/session/test_archivist.py $(TEST_FLAGS)
	$(BIN)/python -m pytest -s -m "long or not long" tests/swarm/test_shared_text.py tests/session/test_text_and_averaging.py $(TEST_FLAGS)

# Over 120 kinds of files, and models of many families, each with its result; then five families in real processes.
files: $(EXTRAS_STAMP)
	$(EXTRAS_VENV)/bin/python -m pytest -v -m "long or not long" $(FILE_TESTS) $(TEST_FLAGS)
	$(EXTRAS_VENV)/bin/python -m pytest -s -m long tests/processes/test_families.py $(TEST_FLAGS)

$(EXTRAS_STAMP): $(STAMP)
	$(BIN)/python -m benchmarks.side_environment $(EXTRAS_VENV) -c constraints.txt $(PIP_FLAGS) -e ".[$(EXTRAS)]"
	@touch $@

coverage: $(STAMP)
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "not long" $(PURE_TESTS) $(PURE_ROOMS) --cov-branch --cov-report=term --cov-fail-under=100 $(TEST_FLAGS)

gauges: $(STAMP)
	$(BIN)/python -m gauges

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e ".[docs]"
	$(BIN)/python docs/site.py

reference: $(STAMP)
	$(BIN)/python docs/generate.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)

# An interrupted installation leaves no stamp, so the next make starts it again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_FLAGS) -e ".[dev,page]"
	$(COMPILE_LOOPS)
	@touch $@

clean:
	rm -rf $(VENV) $(EXTRAS_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
