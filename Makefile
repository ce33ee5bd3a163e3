# Each target creates the environment it needs; a second call finds it ready (a stamp file).
#
#   make demo    trains on real data with 2 ranks: DDP, OSS, ShardedDDP and FSDP beside one process
#   make test    tests on the newest torch, in under 10 minutes on two cores
#   make test-rest  the others: programs as users start them, long trainings, the oldest supported torch with the XLA
#                 backend, and `make streams`
#   make quick   some tests of every part, newest torch only: for the daily loop, under 2 minutes
#   make plain   some tests of every part where nothing but torch is installed, as far as Python can tell: no numpy
#   make check   ruff, mypy, import-linter; prints how large the house is, beside the goals
#   make fuzz     damages and forges 10,000 files; trains all families to the same bits on 1 to 8 ranks; draws new programs
#                 for MINUTES=10, keeps what fails as tests
#   make faults   puts some 360 faults into a copy of the source, one after the other: tests have to notice each
#   make streams  contract, wrappers, optimizers and drawn programs on ranks with a simulated device that has streams
#   make bench   shardkit, fairscale, DDP, FSDP1, FSDP2 and others interleaved in one run
#   make gpu     on a machine with GPUs: tests and benchmarks there, at most 25 minutes; writes docs/GPU.md
#                (GPU='--only "bench 124M"' for a part of it)
#   make newest  core tests on torch 2.15.0, a CUDA build of 6 GB that works without a GPU
#   make torch-tpu PLUGIN=FILE  the backend "tpu" on torch_tpu itself, compiled for the CPU by XLA's plugin
#   make docs    HTML documentation in docs/_build/html

PYTHON ?= python3
# The newest torch tested, and the oldest supported one: torch_xla needs exactly its own version of torch.
TORCH ?= torch==2.13.0
TORCH_XLA ?= torch==2.9.0 torch_xla==2.9.0

# What a plain "pip install torch" gives.
TORCH_NEWEST ?= torch==2.15.0

CORE := .venv
XLA := .venv-xla
TPU := .venv-tpu
NEWEST := .venv-newest
comma := ,
empty :=
space := $(empty) $(empty)
PIP_FLAGS := --quiet --disable-pip-version-check --no-input

# One thread a rank: ranks share the cores, and more threads only get in each other's way.
export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED := 1

.PHONY: help demo demo-xla test test-rest test-core test-xla plain quick streams fuzz faults check format bench gpu newest torch-tpu docs clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

# torch comes first and pinned: an open range would fetch the newest build, with gigabytes of CUDA packages.
define make_venv
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info < (3, 14) else \
	  "shardkit needs Python 3.10 to 3.13, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
	@echo "setting up $(1) ($(2)); once, takes a few minutes"
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@$(1)/bin/python -m pip install $(PIP_FLAGS) --upgrade pip setuptools
	@$(1)/bin/python -m pip install $(PIP_FLAGS) $(2)
	@PYTHONWARNINGS=ignore $(1)/bin/python -m pip install $(PIP_FLAGS) --editable '.[$(3)]'
	@touch $(1)/.ready
endef

$(CORE)/.ready: pyproject.toml
	$(call make_venv,$(CORE),$(TORCH),$(subst $(space),$(comma),test demo lint libraries plots checkpoints data metrics docs))

$(XLA)/.ready: pyproject.toml
	$(call make_venv,$(XLA),$(TORCH_XLA),$(subst $(space),$(comma),test demo checkpoints data))


demo: $(CORE)/.ready
	@$(CORE)/bin/python examples/digits.py

demo-xla: $(XLA)/.ready
	@$(XLA)/bin/python examples/digits.py --backend xla

# Two runs at once, for half of each is waiting. Both are reported, whatever they give; the second one's report comes from
# a file, when both are through.
define at_once
	@first=0; second=0; log=$$(mktemp); \
	$(MAKE) --no-print-directory --keep-going $(2) >$$log 2>&1 & other=$$!; \
	trap 'kill $$other; exit 130' INT TERM; \
	$(MAKE) --no-print-directory --keep-going $(1) || first=$$?; \
	wait $$other || second=$$?; \
	cat $$log; rm -f $$log; \
	test $$first -eq 0 || echo "make $@: the first run failed"; \
	test $$second -eq 0 || echo "make $@: the second run failed"; \
	test $$first -eq 0 -a $$second -eq 0
endef

# A part that takes half of the time of `make test`.
HALF := $(addprefix tests/,backends border compat differential)
# What starts programs of its own, as users start them: most of the time goes to processes that import torch. And what
# takes longest: trainings to the same bits, with batches that are skipped, and that go on with other numbers of ranks.
PROGRAMS := $(addprefix tests/,cli clients doctor estimate examples faults figures gpu integrations pages rehearsal running \
  seeds testing tracing test_launch.py test_packaging.py backends/test_late_machine.py border/test_same_bits.py \
  checkpoint_tools/test_memory.py compat/test_fair_dev.py out_of_memory/test_skipping.py reduction/test_fixed_order.py \
  $(addprefix training_checkpoints/test_,moving.py resume.py whole_or_not.py))

test: $(CORE)/.ready
	$(call at_once,test-core WITHOUT='$(PROGRAMS) $(HALF)',test-core TESTS='$(HALF)' WITHOUT='$(PROGRAMS)')

test-rest: $(CORE)/.ready $(XLA)/.ready
	$(call at_once,test-xla streams STREAMS=tests/fsdp,test-core plain streams TESTS='$(PROGRAMS)' \
	  STREAMS='$(filter-out tests/fsdp,$(STREAMS))')

TESTS := tests
WITHOUT :=
test-core: $(CORE)/.ready
	@echo "== tests on $(TORCH)"
	@$(CORE)/bin/python -m pytest -m "not xla" $(addprefix --ignore ,$(WITHOUT)) $(TESTS)

# The oldest torch runs the contract, what is compared with one process, and XLA. Left out there: what doesn't depend on
# torch's version, what is drawn at random, long trainings in a fixed order of sums, examples that XLA runs too, and
# how processes start, get lost and end.
NEWEST_ONLY := $(addprefix tests/,estimate doctor differential figures gpu cli migration parity testing faults compat \
  out_of_memory checkpoint_tools adascale/test_adascale.py activations/test_recurrent.py compression/test_training.py \
  $(addprefix examples/test_,data_files.py memory_plan.py) \
  checkpoint/test_files.py $(addprefix clients/test_,torchrun.py fsdp2_trainer.py) $(addprefix running/test_,run.py started.py) \
  rehearsal/test_scripts.py $(addprefix tracing/test_,command.py metrics.py) \
  $(addprefix training_checkpoints/test_,whole_or_not.py resume.py) $(addprefix fsdp/test_,align.py large.py one_order.py) \
  backends/test_lifetimes.py $(addprefix border/test_,libraries.py same_bits.py) \
  $(addprefix whole_parameters/test_,oss.py plan.py rules.py state.py) \
  $(addprefix pages/test_,api_page.py errors_page.py notebooks.py pictures.py support.py tutorials.py) \
  $(addprefix test_,deliberate_faults.py docs.py launch.py house.py logging.py packaging.py summary.py))
NEWEST_ONLY_TESTS := $(addprefix tests/examples/test_examples.py::test_,full_runs_reach_97_percent under_torchrun \
  all_strategies_on_four_ranks torchrun_with_another_number_of_ranks_is_refused readme_example \
  rewards_are_learned_and_an_engine_keeps_up) \
  tests/examples/test_training.py::test_mnist_as_a_process \
  "tests/examples/test_vit_training.py::test_trains_saves_goes_on_and_tests[gloo2]" \
  $(addprefix tests/fsdp/test_uneven.py::test_,drawn_steps_on_simulated_ranks drawn_errors_on_simulated_ranks \
  other_layers_on_many_ranks) $(addprefix tests/reduction/test_fixed_order.py::test_,twenty_steps \
  a_training_goes_on_with_other_ranks drawn_trainings replicas) \
  tests/seeds/test_commands.py::test_without_data_as_processes \
  $(addprefix tests/,test_bad_input.py::test_a_rank_that_dies_during_backward \
  moe/test_moe.py::test_inputs_that_change_on_one_rank extra/test_slow_momentum.py::test_nodes_of_several_ranks \
  extra/test_adam.py::test_within_oss \
  model_parallel/test_model_parallel.py::test_llama backends/test_gloo.py::test_sockets_of_a_rank \
  backends/test_gloo.py::test_a_new_default_group_after_the_first_was_destroyed \
  evaluation/test_gathering.py::test_dtypes_have_to_agree)

# Of the contract: ranks of this process have the collectives that they are, whatever torch's version.
NEWEST_WORLDS := gloo4 or simulated3 or simulated4 or streams

test-xla: $(XLA)/.ready
	@echo "== tests on $(TORCH_XLA)"
	@$(XLA)/bin/python -m pytest -m "not oracle" -k "not (test_contract and ($(NEWEST_WORLDS)))" \
	  $(addprefix --ignore ,$(NEWEST_ONLY)) $(addprefix --deselect ,$(NEWEST_ONLY_TESTS)) tests

# Some tests of every part, each file a few seconds at most; what starts many processes is left to `make test`.
QUICK := $(addprefix tests/,test_layout.py test_docs.py test_house.py test_summary.py activations adascale checks evaluation flattening \
  compression/test_blocks.py model_parallel moe optimizers oss parity pipeline reduction sharded_ddp torch_seams wrapping \
  checkpoint/test_prefix.py compat/test_older_paths.py compat/test_redirected.py migration/test_rewriting.py \
  $(addprefix fsdp/test_,backward_plan.py compat.py fully_shard.py groups.py order.py store.py) \
  $(addprefix extra/test_,adam.py auto_shard.py dynamic_loss_scaler.py gossip_graphs.py mevo.py offload.py) \
  $(addprefix backends/test_,contract.py gloo.py simulated.py watchdog.py) \
  $(addprefix border/test_,inside.py kept_views.py optimizers.py wrappers.py) \
  $(addprefix whole_parameters/test_,plan.py rules.py training.py) figures/test_scale_figures.py)
QUICK_WITHOUT := compile or gloo3 or gloo4 or simulated3 or simulated4 or that_change_on_one_rank

quick: $(CORE)/.ready
	@$(CORE)/bin/python -m pytest -q -m "not xla" -k "not ($(QUICK_WITHOUT))" $(QUICK)

check: $(CORE)/.ready
	@status=0; \
	for tool in "ruff check" "ruff format --check" mypy lint-imports; do \
	  echo "== $$tool"; $(CORE)/bin/$$tool || status=1; \
	done; \
	echo "== the house"; $(CORE)/bin/python -m tests.house_table || status=1; \
	exit $$status

format: $(CORE)/.ready
	$(CORE)/bin/ruff check --fix
	$(CORE)/bin/ruff format

MINUTES ?= 10
fuzz: $(CORE)/.ready
	@$(CORE)/bin/python -m tests.file_mutations --count 10000
	@$(CORE)/bin/python -m tests.reduction.test_fixed_order
	@$(CORE)/bin/python -m tests.differential.fuzz --minutes $(MINUTES)

ONLY ?=
faults: $(CORE)/.ready $(XLA)/.ready
	@$(CORE)/bin/python -m tests.deliberate_faults $(if $(ONLY),--only '$(ONLY)')

$(NEWEST)/.ready: pyproject.toml
	$(call make_venv,$(NEWEST),$(TORCH_NEWEST),$(subst $(space),$(comma),test demo libraries plots checkpoints data metrics))

# Without fairscale: it is tried on the torch of `make test`.
newest: $(NEWEST)/.ready
	@echo "== tests on $(TORCH_NEWEST)"
	@$(NEWEST)/bin/python -m pytest -m "not xla and not oracle" $(TESTS)

$(TPU)/.ready: pyproject.toml
	$(call make_venv,$(TPU),$(TORCH),$(subst $(space),$(comma),test tpu))

# XLA's plugin for CPUs takes libtpu's place: XLA builds it as //xla/pjrt/c:pjrt_c_api_cpu_plugin.so.
PLUGIN ?=
torch-tpu: $(TPU)/.ready
	@test -f "$(PLUGIN)" || { echo "make torch-tpu PLUGIN=FILE: needs XLA's PJRT plugin for CPUs"; exit 1; }
	@SHARDKIT_PJRT_CPU="$(abspath $(PLUGIN))" $(TPU)/bin/python -m pytest -q -k torch_tpu tests/backends/test_torch_tpu.py tests/backends/test_contract.py \
	  tests/backends/test_late_device.py tests/backends/test_late_programs.py

PLAIN := $(addprefix tests/,doctor fsdp/test_fully_shard.py fsdp/test_fsdp.py::test_mistakes_are_named_on_every_rank oss/test_flat_segments.py \
  sharded_ddp/test_buffers.py training_checkpoints/test_several.py checkpoint/test_prefix.py \
  border/test_copies.py::test_the_state_of_an_oss_that_was_never_stepped compat/test_older_paths.py::test_broadcast_object \
  running/test_run.py::test_a_program_that_launches_twice backends/test_contract.py)
plain: $(CORE)/.ready
	@echo "== tests with $(TORCH) alone"
	@PYTHONPATH=tests/torch_alone $(CORE)/bin/python -c 'import torch; torch.ones(1).numpy()' 2>&1 | grep -q "Numpy is not available"
	@PYTHONPATH=tests/torch_alone $(CORE)/bin/python -m pytest -q -m "not xla and not oracle" \
	  -k "not (gloo3 or gloo4 or gloo1 or simulated or late or tpu or streams or cuda)" $(PLAIN)

STREAMS := $(addprefix tests/,backends/test_contract.py fsdp compression sharded_ddp oss adascale model_parallel pipeline moe \
  evaluation clients test_grad_scaler.py differential/test_fsdp_truth.py differential/test_sharded_ddp_truth.py \
  $(addprefix whole_parameters/test_,exact.py state.py training.py))
# Simulated ranks with streams have run the contract in `make test`; how deep units may lie is no matter of a device.
streams: $(CORE)/.ready
	@$(CORE)/bin/python -m pytest -q -m "not xla and not oracle" --device streams \
	  -k "not (test_contract and (simulated or streams))" --ignore tests/fsdp/test_large.py $(STREAMS)

bench: $(CORE)/.ready
	@$(CORE)/bin/python tests/benchmarks/compare.py $(BENCH)

GPU ?=
gpu: $(CORE)/.ready
	@$(CORE)/bin/python -m tests.gpu $(GPU)

docs: $(CORE)/.ready
	@$(CORE)/bin/python -m sphinx -W --keep-going -q docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:
	rm -rf $(CORE) $(XLA) $(TPU) $(NEWEST) build dist docs/_build *.egg-info
