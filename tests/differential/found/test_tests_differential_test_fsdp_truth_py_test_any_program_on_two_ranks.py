"""Found by drawing: rank 0 failed with RuntimeError:"""

# ruff: noqa: E501, F401, I001
from math import inf, nan

import torch

from tests.programs.running import check_against_truth
from tests.programs.spec import Look
from tests.programs.spec import ModelSpec
from tests.programs.spec import Node
from tests.programs.spec import OptimizerSpec
from tests.programs.spec import Program
from tests.programs.spec import Reload
from tests.programs.spec import Step
from tests.programs.spec import Train
from tests.programs.spec import Unit


def test_found() -> None:
    check_against_truth(
        Program(
            model=ModelSpec(
                nodes=(Node(kind="linear", unit=Unit(disable_reshard_on_root=False, align=4)),), width=3
            ),
            options=Unit(disable_reshard_on_root=False, align=4),
            steps=(Train(), Train(), Step(closure=True), Look(), Reload(form="consolidated"), Look()),
        ),
        2,
    )
