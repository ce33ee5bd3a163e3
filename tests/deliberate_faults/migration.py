"""Faults of what serves fairscale's names: rewriting of imports, unmodified code, redirected names."""

from __future__ import annotations

from tests.deliberate_faults.fault import Fault

_REWRITING, _MIGRATE = "tests/migration/test_rewriting.py", "tests/cli/test_migrate.py"
_INSTALL, _REDIRECTED = "tests/compat/test_install.py", "tests/compat/test_redirected.py"

FAULTS = [
    Fault(
        "migration",
        "scopes are ignored: every variable of that name is renamed",
        "shardkit/migration/rewriting.py",
        '            if scope.home("fairscale") in self._variables.renamed:\n',
        "            if self._variables.renamed:\n",
        ("tests/migration/test_drawn_imports.py::test_drawn_programs",),
    ),
    Fault(
        "migration",
        "a name that is taken is used",
        "shardkit/migration/rewriting.py",
        "name_is_free = all(binding.by is By.IMPORT for binding in ours)",
        "name_is_free = True",
        (f"{_REWRITING}::test_a_variable_that_others_know_keeps_its_name",),
    ),
    Fault(
        "migration",
        "what others may import is renamed",
        "shardkit/migration/rewriting.py",
        "            if name_is_free and not self._is_interface(scope):",
        "            if name_is_free:",
        (f"{_REWRITING}::test_a_variable_that_others_know_keeps_its_name",),
    ),
    Fault(
        "migration",
        "relative imports are taken for absolute ones",
        "shardkit/migration/rewriting.py",
        "        if node.level or node.module is None:",
        "        if node.module is None:",
        (f"{_REWRITING}::test_import_statements",),
    ),
    Fault(
        "migration",
        "`global fairscale` is not a use",
        "shardkit/migration/rewriting.py",
        "        elif isinstance(node, ast.Global | ast.Nonlocal):",
        "        elif isinstance(node, ast.Nonlocal):",
        (f"{_REWRITING}::test_the_variable_is_renamed_with_all_its_uses",),
    ),
    Fault(
        "migration",
        "always UTF-8, no byte order mark",
        "shardkit/migration/files.py",
        'tokenize.detect_encoding(io.BytesIO(data).readline)[0] if is_python else "utf-8"',
        '"utf-8"',
        (f"{_MIGRATE}::test_encoding_line_ends_and_permissions_stay",),
    ),
    Fault(
        "migration",
        "a failed write leaves its temporary file",
        "shardkit/checkpoint/files/writing.py",
        "        with contextlib.suppress(OSError):\n            os.unlink(temporary)",
        "        pass",
        (f"{_MIGRATE}::test_a_failed_write_leaves_the_file_whole",),
    ),
    Fault(
        "migration",
        "what changed meanwhile is overwritten",
        "shardkit/migration/files.py",
        "                raise _ChangedError",
        "                pass",
        (f"{_MIGRATE}::test_what_changed_meanwhile_is_not_overwritten",),
    ),
    Fault(
        "unmodified code",
        "modules loaded under shardkit's name get no second name at once",
        "shardkit/compat.py",
        "            _name_all_twice()",
        "            pass",
        (f"{_INSTALL}::test_every_module_is_shardkits",),
    ),
    Fault(
        "unmodified code",
        "spawned processes are not told",
        "shardkit/compat.py",
        "        multiprocessing.spawn.get_preparation_data = _preparation_data\n\n\ndef uninstall",
        "        pass\n\n\ndef uninstall",
        (f"{_INSTALL}::test_a_script_and_the_processes_it_starts",),
    ),
    Fault(
        "unmodified code",
        "`importlib.metadata` is not told",
        "shardkit/compat.py",
        'return [_Distribution()] if context.name in (None, "fairscale") else []',
        "return []",
        (f"{_INSTALL}::test_it_has_fairscales_version",),
    ),
    Fault(
        "unmodified code",
        "what shardkit lacks is left to other finders",
        "shardkit/compat.py",
        "        if found is None:\n",
        "        if found is None:\n            return None\n        if found is None:\n",
        (f"{_INSTALL}::test_what_is_missing_is_an_import_error",),
    ),
    Fault(
        "redirected names",
        "reading an attribute of the class returns something",
        "shardkit/redirected.py",
        '        raise RedirectedError(f"{getattr(cls, MARK)} (read: {attribute})")',
        "        return None",
        (f"{_REDIRECTED}::test_use_says_what_to_take",),
    ),
    Fault(
        "redirected names",
        "a dropped argument is let through",
        "shardkit/redirected.py",
        "                if kwargs.pop(name):",
        "                if kwargs.pop(name) and False:",
        ("tests/compat/test_older_paths.py::test_ssd_offload_is_refused",),
    ),
    Fault(
        "redirected names",
        "a folder with a cache hides a package",
        "shardkit/redirected.py",
        "        if found is not None and found.has_location:",
        "        if found is not None:",
        (f"{_REDIRECTED}::test_a_folder_that_only_holds_a_cache",),
    ),
    Fault(
        "redirected names",
        "entries of the table that stand for others' modules are not served",
        "shardkit/redirected.py",
        "    for home, names in REEXPORTED.get(path, {}).items():",
        "    for home, names in ():",
        (f"{_REDIRECTED}::test_the_table_is_served",),
    ),
]
