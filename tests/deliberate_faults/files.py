"""Faults of files and what is in them: reading pickles as data, writing whole files, state and facts that ranks compare."""

from __future__ import annotations

from tests.deliberate_faults.fault import Fault

_LOADING, _FILES = "tests/checkpoint/test_loading.py", "tests/checkpoint/test_files.py"
_FACTS, _STATE = "tests/checks/test_facts.py", "tests/optimizers/test_state_shapes.py"

FAULTS = [
    Fault(
        "loading",
        "pickles may call what they name",
        "shardkit/checkpoint/loading.py",
        "        unknown = sorted(named_globals(source) - set(self._names))\n",
        "        import importlib\n\n        from .data_pickle import Function\n\n        self._names = dict(self._names)\n"
        "        for name in named_globals(source) - set(self._names):\n"
        "            module, _, attribute = name.rpartition('.')\n"
        "            self._names[name] = Function(getattr(importlib.import_module(module), attribute))\n"
        "        unknown: list[str] = []\n",
        (f"{_LOADING}::test_what_calls_is_refused",),
    ),
    Fault(
        "loading",
        "what is called need not be a function",
        "shardkit/checkpoint/data_pickle.py",
        "        if type(function) is not Function or type(arguments) is not tuple:",
        "        if type(arguments) is not tuple:",
        (f"{_LOADING}::test_what_torch_allows_and_data_needs_not",),
    ),
    Fault(
        "loading",
        "numpy scalars are not data",
        "shardkit/checkpoint/rebuilding.py",
        '        found[f"{module}.scalar"] = Function(_scalar)\n',
        "",
        (f"{_LOADING}::test_state_dicts_are_data",),
    ),
    Fault(
        "loading",
        "tensors may go beyond their storage",
        "shardkit/checkpoint/rebuilding.py",
        "        if (last + 1) * dtype.itemsize > storage.memory.nbytes():",
        "        if False:",
        (f"{_LOADING}::test_what_torch_allows_and_data_needs_not",),
    ),
    Fault(
        "loading",
        "arrays may be shorter than their bytes",
        "shardkit/checkpoint/rebuilding.py",
        "    if torch.Size(shape).numel() * kind.itemsize != len(data):",
        "    if False:",
        (f"{_LOADING}::test_what_torch_allows_and_data_needs_not",),
    ),
    Fault(
        "loading",
        "checksums are not compared",
        "shardkit/checkpoint/archive.py",
        "        if self._has_checksums and crc != entry.CRC:",
        "        if False:",
        (f"{_LOADING}::test_every_flipped_bit_of_a_tensor_is_found",),
    ),
    Fault(
        "loading",
        "the first tensor that is cut is not named",
        "shardkit/checkpoint/loading.py",
        "                self._say_what_is_cut(damage)\n",
        "",
        (f"{_LOADING}::test_a_truncated_file_is_refused_and_its_first_cut_tensor_named",),
    ),
    Fault(
        "writing",
        "what was written beside is copied, not renamed",
        "shardkit/checkpoint/writing.py",
        "        os.replace(temporary, target)\n",
        "        import shutil\n\n        shutil.copyfile(temporary, target)\n",
        (f"{_FILES}::test_a_kill_at_any_moment_leaves_a_whole_file",),
    ),
    Fault(
        "writing",
        "what could not be written is not said",
        "shardkit/checkpoint/writing.py",
        "    except OSError as error:\n        raise FileNotWrittenError(",
        "    except ZeroDivisionError as error:\n        raise FileNotWrittenError(",
        (f"{_FILES}::test_a_limit_of_a_files_size_leaves_the_old_one",),
    ),
    Fault(
        "writing",
        "permissions are those of a new file",
        "shardkit/checkpoint/writing.py",
        "    os.chmod(temporary, stat.S_IMODE(old.st_mode))\n",
        "",
        (f"{_FILES}::test_permissions_and_links_stay",),
    ),
    Fault(
        "facts",
        "what is no fact is taken",
        "shardkit/checks/facts.py",
        '    raise ValueError(f"the tag {tag!r}")',
        "    return value",
        (f"{_FACTS}::test_what_is_sent_instead_is_refused",),
    ),
    Fault(
        "facts",
        "tuples arrive as lists",
        "shardkit/checks/facts.py",
        "        return tuple(map(_untagged, parts))",
        "        return [*map(_untagged, parts)]",
        (f"{_FACTS}::test_facts_arrive_as_they_are",),
    ),
    Fault(
        "facts",
        "a pickle that a rank sends is run",
        "shardkit/checks/facts.py",
        "        return _untagged(json.loads(data))",
        "        import pickle\n\n        return _untagged(json.loads(data)) if data[:1] != b'\\x80' else pickle.loads(data)",
        (f"{_FACTS}::test_a_pickle_that_a_rank_sends_is_not_run",),
    ),
    Fault(
        "state",
        "shapes are not compared",
        "shardkit/optimizers/state_shapes.py",
        "                and value.shape != expected\n",
        "                and value.dim() < 0\n",
        (f"{_STATE}::test_oss_refuses_state_of_other_shapes_on_all_ranks",),
    ),
    Fault(
        "state",
        "state that differs between ranks is loaded",
        "shardkit/optimizers/same_state.py",
        "            if found != known:",
        "            if False:",
        ("tests/border/test_loaded_state.py::test_ranks_of_an_oss_load_the_same",),
    ),
    Fault(
        "state",
        "a rank that can't load tells nobody",
        "shardkit/optimizers/same_state.py",
        "        if what is not None:\n",
        "        if False:\n",
        ("tests/border/test_loaded_state.py::test_ranks_of_an_oss_load_the_same",),
    ),
    Fault(
        "state",
        "shards of other world sizes are taken",
        "shardkit/fsdp/local_checkpoint.py",
        '        if note["world_size"] != group.world_size:',
        "        if False:",
        (f"{_STATE}::test_shards_of_other_ranks_and_models_are_refused_on_all_ranks",),
    ),
    Fault(
        "state",
        "another rank's shards are taken",
        "shardkit/fsdp/local_checkpoint.py",
        '        if note["rank"] != group.rank:',
        "        if False:",
        (f"{_STATE}::test_shards_of_other_ranks_and_models_are_refused_on_all_ranks",),
    ),
    Fault(
        "state",
        "shards of other ranks are joined with their padding",
        "shardkit/fsdp/local_checkpoint.py",
        "shards.append(shard[: shard.numel() - padding])",
        "shards.append(shard)",
        ("tests/fsdp/test_fsdp.py::test_local_state_dicts_consolidate_without_a_process_group",),
    ),
    Fault(
        "ckpt",
        "tables of contents of distributed checkpoints may call what they name",
        "shardkit/checkpoint_tools/metadata.py",
        "        found = _NAMES.get((module, name))\n",
        "        found = _NAMES.get((module, name)) or super().find_class(module, name)\n",
        ("tests/checkpoint_tools/test_conversions.py::test_forged_files_run_nothing",),
    ),
    Fault(
        "ckpt",
        "conversions don't compare checksums of what they read",
        "shardkit/checkpoint_tools/stored.py",
        "        if self._place.crc is not None and self._crc != self._place.crc:",
        "        if False:",
        ("tests/checkpoint_tools/test_verify.py::test_what_torch_wrote_has_checksums_of_tensors",),
    ),
    Fault(
        "checkpoints",
        "what is written in the background is no copy",
        "shardkit/training_checkpoints/data_file.py",
        "            yield values.clone() if copied else values",
        "            yield values",
        ("tests/training_checkpoints/test_whole_or_not.py::test_training_goes_on_while_it_is_written",),
    ),
    Fault(
        "checkpoints",
        "old checkpoints go before the new one has its name",
        "shardkit/training_checkpoints/saves.py",
        "        folders.finish(self.temporary, self.folder, self.step)\n"
        "        folders.keep_newest(self.folder, self.keep, self.step)\n",
        "        folders.keep_newest(self.folder, 0, -1)\n"
        "        folders.finish(self.temporary, self.folder, self.step)\n",
        ("tests/training_checkpoints/test_whole_or_not.py::test_killed_at_any_moment",),
    ),
    Fault(
        "checkpoints",
        "a restored rank takes the beginning of each record",
        "shardkit/training_checkpoints/reading.py",
        "source = source.narrow(dim, first - copy.chunk.offsets[dim], size)",
        "source = source.narrow(dim, 0, size)",
        ("tests/training_checkpoints/test_moving.py::test_everybody_reads[fsdp-3]",),
    ),
]
