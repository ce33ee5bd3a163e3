"""Faults of what keeps a job going: its place in the data, stopping, and what traces say of it."""

from __future__ import annotations

from tests.deliberate_faults.fault import Fault

_DATA, _STOPPING = "tests/data/test_data.py", "tests/running/test_stopping.py"

FAULTS = [
    Fault(
        "data",
        "a batch counts as used when the loop asks for the next one",
        "shardkit/data/loader.py",
        "            self._used = min(self._used + order.batch, end)\n            yield batch\n",
        "            yield batch\n            self._used = min(self._used + order.batch, end)\n",
        (f"{_DATA}::test_a_place_is_what_was_handed_out",),
    ),
    Fault(
        "data",
        "transforms are seeded by the sample, not by the epoch",
        "shardkit/data/seeding.py",
        '_mixed(self._seed, asked.epoch, asked.number, "sample")',
        '_mixed(self._seed, 0, asked.number, "sample")',
        (f"{_DATA}::test_values_are_those_of_the_sample_with_any_workers_and_ranks",),
    ),
    Fault(
        "data",
        "the parts of a batch go to ranks in reverse",
        "shardkit/data/order.py",
        "        first = start + rank * each\n",
        "        first = start + (ranks - 1 - rank) * each\n",
        (
            f"{_DATA}::test_every_sample_once_while_ranks_come_and_go",
            f"{_DATA}::test_with_torchdata_on_another_number_of_ranks",
        ),
    ),
    Fault(
        "data",
        "samples draw from the generators of the training",
        "shardkit/data/seeding.py",
        "        torch.set_rng_state(of_torch)\n",
        "",
        (f"{_DATA}::test_generators_of_the_training_process_are_not_touched",),
    ),
    Fault(
        "data",
        "workers of a rank that is gone go on",
        "shardkit/data/worker.py",
        "            os._exit(0)  # see [Note: orphans]\n",
        "            pass\n",
        (f"{_DATA}::test_workers_of_a_rank_that_is_gone_end",),
    ),
    Fault(
        "running",
        "a rank stops as soon as it was asked",
        "shardkit/running/stopping.py",
        "        if counts.answer:\n",
        "        if counts.answer or self.is_asked:\n",
        (f"{_STOPPING}::test_all_ranks_stop_at_the_same_step",),
    ),
]
