"""Pipelines in one process against the plain module: values, gradients, random layers, statistics, skip connections."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.nn.pipe import Pipe, is_checkpointing, is_recomputing
from shardkit.nn.pipe.batchnorm import DeferredBatchNorm
from shardkit.nn.pipe.pipe import BalanceError, split_module
from shardkit.nn.pipe.pipeline import clock_cycles
from shardkit.nn.pipe.skip import Namespace, pop, skippable, stash, verify_skippables
from shardkit.pipeline.pipe import checkpointed_cells, ticks

assert_close = torch.testing.assert_close
modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])


def cpus(number: int) -> list[str]:
    return ["cpu"] * number


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)
    )


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def both(module: nn.Sequential, x: Any, **arguments: Any) -> tuple[Any, Any]:
    """Outputs of the plain module and of the pipe, after backward of each; gradients of inputs are compared too."""
    piped = Pipe(copy.deepcopy(module), **arguments)
    outputs, inputs = [], []
    for model in (module, piped):
        own = tuple(
            t.clone().requires_grad_(t.is_floating_point()) for t in (x if isinstance(x, tuple) else (x,))
        )
        torch.manual_seed(11)
        output = model(own if isinstance(x, tuple) else own[0])
        loss = sum((t.square() * torch.arange(1, len(t) + 1).view(-1, *[1] * (t.dim() - 1))).sum()
                   for t in (output if isinstance(output, tuple) else (output,)))  # fmt: skip
        loss.backward()
        outputs.append(output)
        inputs.append([t.grad for t in own])
    assert_close(inputs[1], inputs[0])
    assert_close(gradients(piped), gradients(module))
    return outputs[0], outputs[1]


# ------------------------------------------------------------------------------------------ the plain module's numbers
@modes
@pytest.mark.parametrize("balance", [[6], [2, 4], [1, 2, 3], [1] * 6])
@pytest.mark.parametrize(("rows", "chunks"), [(8, 1), (8, 4), (7, 3), (3, 5)])
def test_numbers(balance: list[int], rows: int, chunks: int, checkpoint: str) -> None:
    module = plain()
    x = torch.randn(rows, 5)
    expected, found = both(
        module, x, balance=balance, devices=cpus(len(balance)), chunks=chunks, checkpoint=checkpoint
    )
    assert_close(found, expected)


class Swap(nn.Module):
    """Two tensors, one of them of integers, in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        values, numbers = pair
        return self.linear(values) * (numbers.unsqueeze(1) + 1), numbers + 1


@modes
def test_tuples(checkpoint: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Swap(), Swap(), Swap()).double()
    x = (torch.randn(7, 4).double(), torch.arange(7))
    piped = Pipe(copy.deepcopy(module), [1, 2], devices=cpus(2), chunks=3, checkpoint=checkpoint)
    for model in (module, piped):
        values, numbers = model(x)
        assert numbers.tolist() == list(range(3, 10))
        values.square().sum().backward()
    assert_close(piped(x), module(x))
    assert_close(gradients(piped), gradients(module))


@modes
def test_random_layers_draw_the_same_numbers_again(checkpoint: str) -> None:
    """With one micro-batch the numbers are those of the plain module; checkpointing keeps them with several."""
    module = nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2)
    )
    x = torch.randn(9, 6)
    expected, found = both(module, x, balance=[2, 3], devices=cpus(2), checkpoint=checkpoint)
    assert_close(found, expected)
    results = []
    for mode in (checkpoint, "never"):
        torch.manual_seed(5)
        piped = Pipe(copy.deepcopy(module), [2, 3], devices=cpus(2), chunks=3, checkpoint=mode)
        piped.zero_grad()
        piped(x).square().sum().backward()
        results.append((gradients(piped), torch.rand(1)))
    assert_close(results[0], results[1], rtol=0, atol=0)


def test_checkpointing_keeps_inputs_only() -> None:
    """Which layers keep activations, and when they run again."""
    seen: list[tuple[bool, bool, bool]] = []

    class Watch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((is_checkpointing(), is_recomputing(), torch.is_grad_enabled()))
            return x * 2

    first, plainly, again = (True, False, False), (False, False, True), (False, True, True)
    expected = {
        "always": [first, first, again, again],
        "except_last": [first, plainly, again],
        "never": [plainly, plainly],
    }
    for checkpoint, calls in expected.items():
        piped = Pipe(
            nn.Sequential(nn.Linear(2, 2), Watch()), [2], devices=cpus(1), chunks=2, checkpoint=checkpoint
        )
        seen.clear()
        piped(torch.randn(4, 2)).sum().backward()
        assert seen == calls
        seen.clear()
        piped.eval()
        piped(torch.randn(4, 2)).sum().backward()
        assert seen == [plainly, plainly], "in eval mode nothing is checkpointed"
        seen.clear()
        with torch.no_grad():
            piped.train()(torch.randn(4, 2))
        assert seen == [(False, False, False)] * 2


def test_cells_run_in_clock_order_and_backward_in_reverse() -> None:
    order: list[tuple[str, int, int]] = []

    class Mark(nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            i = int(x[0, 0].item())
            order.append(("forward", i, self.stage))
            x = x * 1
            x.register_hook(lambda _: order.append(("backward", i, self.stage)))
            return x

    piped = Pipe(
        nn.Sequential(Mark(0), Mark(1), Mark(2)), [1, 1, 1], devices=cpus(3), chunks=3, checkpoint="never"
    )
    piped(torch.arange(3.0).view(3, 1).requires_grad_()).sum().backward()
    cells = [cell for tick in clock_cycles(3, 3) for cell in tick]
    assert cells == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2)]
    assert [o[1:] for o in order[:9]] == cells
    backward = [o[1:] for o in order[9:]]
    assert sorted(backward) == sorted(cells)
    for stage in range(3):  # the last micro-batch first: it is the one that forward left last
        assert [i for i, j in backward if j == stage] == [2, 1, 0]


@pytest.mark.parametrize("m", range(1, 6))
@pytest.mark.parametrize("n", range(1, 6))
def test_every_cell_has_its_tick(m: int, n: int) -> None:
    tick_of = {cell: k for k, cells in enumerate(ticks(m, n)) for cell in cells}
    assert sum(map(len, ticks(m, n))) == len(tick_of) == m * n
    assert len(list(ticks(m, n))) == m + n - 1
    for (i, j), k in tick_of.items():
        assert 0 <= i < m
        assert 0 <= j < n
        for before in ((i - 1, j), (i, j - 1)):  # the partition is free, the micro-batch has come
            assert tick_of.get(before, -1) < k


def test_what_keeps_no_activations() -> None:
    assert [checkpointed_cells(mode, 4) for mode in ("always", "except_last", "never")] == [4, 3, 0]


def test_frozen_parameters_and_inputs_without_gradients() -> None:
    module = plain()
    for layer in module[:3]:
        layer.requires_grad_(False)
    x = torch.randn(6, 5)
    piped = Pipe(copy.deepcopy(module), [2, 4], devices=cpus(2), chunks=3, checkpoint="always")
    for model in (module, piped):
        model(x).sum().backward()
    assert_close(gradients(piped), gradients(module))
    module.requires_grad_(False)
    assert not Pipe(module, [2, 4], devices=cpus(2), chunks=3)(x).requires_grad


# ------------------------------------------------------------------------------------------ batch norms
@modes
@pytest.mark.parametrize("momentum", [0.2, None])
def test_deferred_batch_norm(checkpoint: str, momentum: float | None) -> None:
    """Running statistics are those of mini-batches, whatever they are cut into; also of short ones."""
    norm = nn.BatchNorm2d(3, momentum=momentum)
    module = nn.Sequential(nn.Identity(), norm)
    truth = copy.deepcopy(norm)
    piped = Pipe(module, [1, 1], devices=cpus(2), chunks=4, checkpoint=checkpoint, deferred_batch_norm=True)
    assert isinstance(piped[1], DeferredBatchNorm)
    for rows in (8, 7, 3):
        x = torch.randn(rows, 3, 4, 5) * 3 + 1
        truth(x)
        piped(x.requires_grad_()).sum().backward()
    assert_close(piped[1].running_mean, truth.running_mean)
    assert_close(piped[1].running_var, truth.running_var)
    assert piped[1].num_batches_tracked == truth.num_batches_tracked
    assert_close(piped.eval()(x), truth.eval()(x))


def test_deferred_batch_norm_is_converted_with_its_tensors() -> None:
    module = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2).double()), nn.BatchNorm1d(2, affine=False)
    )
    module[2].eval()
    module[1].append(module[2])
    module.append(module[2])
    weight = module[1][0].weight
    converted = DeferredBatchNorm.convert_deferred_batch_norm(module, 3)
    assert converted[1][0].weight is weight
    assert converted[1][0].sum.dtype == torch.float64
    assert converted[2].weight is None
    assert not converted[2].training
    assert converted[1][1] is converted[3] is converted[2]
    converted[1][0](torch.ones(4, 2, dtype=torch.float64))  # sums of one micro-batch of three
    anew = DeferredBatchNorm.convert_deferred_batch_norm(converted[1][0], 2)
    assert anew.sum.abs().sum() == anew.counter == 0
    assert anew.running_mean is converted[1][0].running_mean
    assert DeferredBatchNorm.convert_deferred_batch_norm(converted, 3)[2] is converted[2]
    kept = DeferredBatchNorm.convert_deferred_batch_norm(nn.BatchNorm1d(2, track_running_stats=False))
    assert type(kept) is nn.BatchNorm1d


def test_plain_batch_norms_update_once_under_checkpointing() -> None:
    norm = nn.BatchNorm1d(4)
    x = torch.randn(8, 4)
    piped = Pipe(nn.Sequential(copy.deepcopy(norm)), [1], devices=cpus(1), chunks=2, checkpoint="always")
    for part in x.chunk(2):
        norm(part)
    piped(x).sum().backward()
    assert_close(piped[0].running_mean, norm.running_mean)
    assert piped[0].num_batches_tracked == 2


# ------------------------------------------------------------------------------------------ skip connections
@skippable(stash=["skip"])
class Stash(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        yield stash("skip", x * 3)
        return self.linear(x)


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        skip = yield pop("skip")
        return x if skip is None else x + skip.square()


@modes
@pytest.mark.parametrize("balance", [[6], [1, 5], [3, 3], [1, 1, 2, 1, 1]])
def test_skip_connections(balance: list[int], checkpoint: str) -> None:
    """Nested ones, within a partition, to the next and over several."""
    outer, inner = Namespace(), Namespace()
    torch.manual_seed(0)
    module = nn.Sequential(
        Stash().isolate(outer), Stash().isolate(inner), nn.Linear(4, 4), nn.Dropout(0), Pop().isolate(inner),
        Pop().isolate(outer),
    )  # fmt: skip
    x = torch.randn(7, 4)
    expected, found = both(
        module, x, balance=balance, devices=cpus(len(balance)), chunks=3, checkpoint=checkpoint
    )
    assert_close(found, expected)


def test_skip_of_none_and_of_what_is_returned() -> None:
    @skippable(stash=["a", "b"])
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            yield stash("a", None)
            yield stash("b", x)
            return x

    @skippable(pop=["a", "b"])
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            assert (yield pop("a")) is None
            return x * (yield pop("b"))

    module = nn.Sequential(nn.Linear(3, 3), Two(), Both())
    for checkpoint in ("always", "never"):
        expected, found = both(
            module, torch.randn(4, 3), balance=[2, 1], devices=cpus(2), chunks=2, checkpoint=checkpoint
        )
        assert_close(found, expected)
        module.zero_grad()


def test_names_of_skippables() -> None:
    assert repr(Stash(2)).startswith("@skippable(Stash(")
    assert list(nn.Sequential(Stash(2)).state_dict()) == ["0.module.linear.weight", "0.module.linear.bias"]
    one = Stash().isolate(ns := Namespace(), only=["skip"])
    assert list(one.stashable()) == [(ns, "skip")]
    assert copy.deepcopy(one).namespaced("skip") == (ns, "skip")
    assert pickle.loads(pickle.dumps(ns)) == ns != Namespace()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([Stash], "no module declared 'skip' as poppable but stashed"),
        ([Pop], "'0' declared 'skip' as poppable but it was not stashed"),
        ([Stash, Stash, Pop], "'1' redeclared 'skip' as stashable"),
        ([Stash, Pop, Pop], "'2' redeclared 'skip' as poppable"),
        ([skippable(stash=["x"], pop=["x"])(nn.Identity)], "both as stashable and as poppable"),
    ],
)
def test_skippables_that_do_not_match(layers: list[Any], message: str) -> None:
    module = nn.Sequential(*(layer() for layer in layers))
    with pytest.raises(TypeError, match=message):
        verify_skippables(module)
    with pytest.raises(TypeError, match="one or more pairs"):
        Pipe(module, [len(module)], devices=cpus(1))


def _broken(commands: list[Any]) -> nn.Module:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            for command in commands:
                _ = yield command
            return x

    return skippable(stash=["s"], pop=["p"])(Layer)()


@pytest.mark.parametrize(
    ("commands", "error", "message"),
    [
        ([pop("p")], RuntimeError, "'s' must be stashed but have not"),
        ([stash("s", None)], RuntimeError, "'p' must be popped but have not"),
        ([stash("other", None)], RuntimeError, "'other' has not been declared as stashable"),
        ([pop("other")], RuntimeError, "'other' has not been declared as poppable"),
        ([pop("p"), pop("p")], RuntimeError, "'p' is popped a second time"),
        (["nonsense"], TypeError, "'nonsense' is not a command"),
    ],
)
def test_skippables_that_misbehave(commands: list[Any], error: type[Exception], message: str) -> None:
    first, last = skippable(stash=["p"])(_Stasher)(), skippable(pop=["s"])(nn.Identity)()
    piped = Pipe(nn.Sequential(first, _broken(commands), last), [1, 1, 1], devices=cpus(3))
    with pytest.raises(error, match=message):
        piped(torch.randn(2, 2))


class _Stasher(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        yield stash("p", x)
        return x


def test_pop_without_stash() -> None:
    with pytest.raises(RuntimeError, match="'skip' has not been stashed"):
        Pop()(torch.randn(2))


# ------------------------------------------------------------------------------------------ the module
def test_what_a_pipe_is() -> None:
    module = plain()
    layers = list(module)
    piped = Pipe(module, [1, 2, 3], devices=cpus(4), chunks=2)
    assert piped.balance == [1, 2, 3]
    assert piped.devices == [torch.device("cpu")] * 3
    assert (piped.chunks, piped.checkpoint, len(piped)) == (2, "except_last", 6)
    assert list(piped) == layers
    assert [piped[i] for i in range(-6, 6)] == layers * 2
    with pytest.raises(IndexError):
        piped[6]
    assert list(piped.state_dict())[:3] == [
        "partitions.0.0.weight", "partitions.0.0.bias", "partitions.1.2.weight",
    ]  # fmt: skip
    again = copy.deepcopy(piped)
    x = torch.randn(3, 5)
    assert_close(again(x), piped(x))
    assert_close(pickle.loads(pickle.dumps(piped))(x), piped(x))
    assert next(piped.double().parameters()).dtype == torch.float64
    assert piped.to(torch.float32)(x).dtype == torch.float32
    named = nn.Sequential()
    named.add_module("first", nn.Linear(1, 1))
    assert "partitions.0.first.weight" in Pipe(named, [1], devices=cpus(1)).state_dict()


@pytest.mark.parametrize("move", [
    lambda p: p.cuda(), lambda p: p.cpu(), lambda p: p.to("cpu"), lambda p: p.to(device="cpu"), lambda p: p.to(0),
    lambda p: p.to(torch.zeros(1)), lambda p: p.to(torch.device("cpu"), torch.float64),
])  # fmt: skip
def test_moving_is_refused(move: Any) -> None:
    with pytest.raises(TypeError, match="denied to move"):
        move(Pipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=cpus(1)))


def test_an_empty_module() -> None:
    piped = Pipe(nn.Sequential(), [], devices=[])
    x = torch.randn(2)
    assert piped(x) is x
    assert len(piped) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"balance": None}, ValueError, "balance is required"),
        ({"balance": [2]}, ValueError, r"different length \(module: 3, sum of balance: 2\)"),
        ({"balance": [0, 3]}, ValueError, "positive integer"),
        ({"balance": [1, 1, 1]}, IndexError, r"too few devices .*\(devices: 2, partitions: 3\)"),
        ({"chunks": 0}, ValueError, "number of chunks must be positive"),
        ({"checkpoint": "INVALID"}, ValueError, "checkpoint is not one of"),
        ({"module": nn.Linear(1, 1)}, TypeError, "must be nn.Sequential"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    with pytest.raises(error, match=message):
        Pipe(**{"module": module, "balance": [1, 2], "devices": cpus(2), **arguments})
    with pytest.raises(BalanceError):
        split_module(module, [1], [torch.device("cpu")])


def test_shared_layers_and_parameters() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="duplicate children"):
        Pipe(nn.Sequential(layer, layer), [2], devices=cpus(1))
    tied = nn.Linear(2, 2)
    tied.weight = layer.weight
    module = nn.Sequential(layer, tied)
    x = torch.randn(4, 2)
    both(module, x, balance=[1, 1], devices=cpus(2), chunks=2)
    with pytest.raises(ValueError, match=r"duplicate parameters on distinct devices .*weight \(2, 2\)"):
        Pipe(module, [1, 1], devices=["cpu", "meta"])
    assert layer.weight.device.type == "cpu", "nothing was moved"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.zeros(2, 1)], "expected Tensor, but got list"),
        ("text", "got str"),
        ((torch.zeros(2, 1), None), "got NoneType"),
    ],
)
def test_inputs_of_other_kinds(value: Any, message: str) -> None:
    piped = Pipe(nn.Sequential(nn.Identity()), [1], devices=cpus(1))
    with pytest.raises(TypeError, match=message):
        piped(value)


def test_results_of_other_kinds_and_uneven_tuples() -> None:
    class Listing(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return [x]

    with pytest.raises(TypeError, match="got list"):
        Pipe(nn.Sequential(Listing(), nn.Identity()), [1, 1], devices=cpus(2))(torch.zeros(2, 1))
    piped = Pipe(nn.Sequential(nn.Identity()), [1], devices=cpus(1), chunks=4)
    with pytest.raises(ConfigurationError, match="same 4 micro-batches"):
        piped((torch.zeros(8, 1), torch.zeros(3, 1)))
    with pytest.raises(ConfigurationError, match="same 4 micro-batches"):
        piped(())


def test_errors_of_layers_come_out_and_leave_nothing() -> None:
    class Fails(nn.Module):
        wrong = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.wrong:
                raise ZeroDivisionError
            return x

    module = nn.Sequential(Stash(), Fails(), Pop())
    piped = Pipe(module, [1, 1, 1], devices=cpus(3), chunks=2)
    with pytest.raises(ZeroDivisionError):
        piped(torch.randn(4, 4))
    assert not is_checkpointing()
    Fails.wrong = False
    piped(torch.randn(4, 4)).sum().backward()
    with pytest.raises(LifecycleError, match="has not been stashed"):
        Pop()(torch.randn(2))


# ------------------------------------------------------------------------------------------ devices
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@modes
@pytest.mark.parametrize("devices", [["cuda"] * 3, ["cuda", "cpu", "cuda"], ["cpu", "cuda", "cpu"]])
def test_devices(devices: list[str], checkpoint: str) -> None:
    """Partitions on an accelerator and on the host in turn; random numbers of both come again."""
    torch.manual_seed(0)
    ns = Namespace()
    module = nn.Sequential(
        Stash().isolate(ns),
        nn.Linear(4, 4),
        nn.Dropout(0.5),
        nn.Linear(4, 4),
        Pop().isolate(ns),
        nn.Linear(4, 2),
    )
    results = []
    for mode in (checkpoint, "never"):
        torch.manual_seed(3)
        piped = Pipe(copy.deepcopy(module), [1, 3, 2], devices=devices, chunks=3, checkpoint=mode)
        output = piped(torch.randn(7, 4, device=devices[0]))
        assert output.device.type == devices[-1]
        output.square().sum().backward()
        results.append([output.detach(), *gradients(piped)])
        torch.cuda.synchronize()
    assert_close(results[0], results[1], rtol=0, atol=0)
    module[2] = nn.Identity()
    piped = Pipe(copy.deepcopy(module), [1, 3, 2], devices=devices, chunks=3, checkpoint=checkpoint)
    x = torch.randn(7, 4)
    for model, own in ((module, x), (piped, x.to(devices[0]))):
        model(own).square().sum().backward()
    assert_close([g.cpu() for g in gradients(piped)], gradients(module))
    assert_close(piped(x.to(devices[0])).cpu(), module(x))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_default_devices() -> None:
    piped = Pipe(nn.Sequential(nn.Linear(2, 2)), [1])
    assert piped.devices == [torch.device("cuda:0")]
