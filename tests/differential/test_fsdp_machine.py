"""One model taken through any legal order of moves, compared with the plain model after each move.

The ranks keep the model between moves; what is legal, :class:`tests.programs.legality.Ledger` says.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.differential.keeping import keep
from tests.pools import rank_pool
from tests.programs.legality import Ledger, meaningful
from tests.programs.optimizers import STEPLESS
from tests.programs.result import compare_moment, tolerance_for
from tests.programs.running import FUZZ, check_against_truth, examples, keep_rank, move_rank
from tests.programs.spec import (
    AnyStep,
    Evaluate,
    Fail,
    Inspect,
    Look,
    OptimizerSpec,
    Peek,
    Program,
    Reload,
    Step,
    Summon,
    Train,
    ZeroGrad,
)
from tests.programs.strategies import PEEKS, clips, freezings, modes, trees, unit_options
from tests.programs.truth import Truth


class Machine(RuleBasedStateMachine):
    """The moves; a move that nobody promises anything about is left out."""

    world_size = 2

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        root = data.draw(unit_options())
        model = data.draw(trees(root, plain=False, dtype="float64"))
        optimizer = OptimizerSpec(data.draw(st.sampled_from(STEPLESS)))
        routing = data.draw(st.sampled_from(["same", "by_rank", "rank_0"]))
        self.program = Program(model, root, optimizer, routing=routing)
        assume(meaningful(self.program))
        self.steps: list[AnyStep] = []
        self.ledger = Ledger(model.kinds, root)
        self.truth = Truth(self.program, self.world_size)
        self.pool: Any = rank_pool(self.world_size)
        self.pool.run(keep_rank, "shardkit", self.program)

    def move(self, step: AnyStep) -> None:
        if not self.ledger.allows(step):
            return
        self.ledger.note(step)
        self.steps.append(step)
        try:
            want = self.truth.do(step)
            got = [pickle.loads(b) for b in self.pool.run(move_rank, "shardkit", step)]
            for rank, (mine, other) in enumerate(zip(got, want, strict=True)):
                compare_moment(rank, mine, other, tolerance_for(self.program))
        except Exception as error:
            program = dataclasses.replace(self.program, steps=tuple(self.steps))
            self.steps.clear()
            if FUZZ > 1:
                keep(check_against_truth, (program, self.world_size), {}, error)
            raise AssertionError(f"{program}\non {self.world_size} ranks: {error}") from error

    @rule(data=st.data(), no_sync=st.booleans())
    def train(self, data: st.DataObject, no_sync: bool) -> None:
        self.move(Train(data.draw(modes(self.program.model.kinds, self.program.options)), no_sync))

    @precondition(lambda self: self.ledger.reduced and not self.ledger.waiting)
    @rule(zero=st.sampled_from([None, ZeroGrad(), ZeroGrad("optimizer", False)]), closure=st.booleans())
    def step(self, zero: ZeroGrad | None, closure: bool) -> None:
        self.move(Step(closure))
        if zero is not None:
            self.move(zero)

    @precondition(lambda self: self.ledger.reduced and not self.ledger.waiting)
    @rule(step=clips())
    def clip(self, step: AnyStep) -> None:
        self.move(step)

    @rule(who=st.sampled_from(["wrapper", "optimizer"]), to_none=st.booleans())
    def zero_grad(self, who: Any, to_none: bool) -> None:
        self.move(ZeroGrad(who, to_none))

    @rule(mode=st.sampled_from(["no_grad", "inference", "dropped"]))
    def evaluate(self, mode: str) -> None:
        self.move(Evaluate(mode))

    @rule(how=st.sampled_from(PEEKS))
    def peek(self, how: str) -> None:
        self.move(Peek(how))

    @rule()
    def look(self) -> None:
        self.move(Look())

    @rule(write=st.booleans())
    def summon(self, write: bool) -> None:
        self.move(Summon(write))

    @rule(
        form=st.sampled_from(["full", "local", "consolidated"]), optimizer=st.sampled_from(["full", "local"])
    )
    def reload(self, form: str, optimizer: str) -> None:
        self.move(Reload(form, optimizer))

    @precondition(lambda self: not self.ledger.waiting and not self.program.model.head_frozen)
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        self.move(ZeroGrad())
        self.move(data.draw(freezings(self.program.model)))

    @rule(where=st.sampled_from(["forward", "backward", "no_sync"]))
    def fail(self, where: str) -> None:
        self.move(Fail(where))

    @rule(optimizer=st.booleans())
    def inspect(self, optimizer: bool) -> None:
        self.move(Inspect(optimizer))

    def teardown(self) -> None:
        if getattr(self, "steps", None):  # it has not failed
            self.move(Look())


class MachineOfThree(Machine):
    """The same on a number of ranks that divides little."""

    world_size = 3


def _drawn(count: int) -> Any:
    return examples(count)  # they are settings as well as a decorator


TestTwoRanks = Machine.TestCase
TestTwoRanks.settings = settings(_drawn(12), stateful_step_count=20)
TestThreeRanks = MachineOfThree.TestCase
TestThreeRanks.settings = settings(_drawn(8), stateful_step_count=20)
