"""FlattenParamsWrapper and FlatParameter against the plain module: values, gradients, state dicts, copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.flattening.wrapper import FlatParameter, FlattenParamsWrapper, no_key_translation
from tests.beside import reread


class Tied(nn.Module):
    """One module under two names, one weight in two modules, and twice in the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.again = self.first
        self.own = nn.Parameter(torch.randn(3))
        self.twin = self.own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.second(self.first(x) * self.own)) + self.twin


class Lists(nn.Module):
    """Parameters that aren't attributes of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList([nn.Parameter(torch.randn(n, 3)) for n in (1, 2)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(()))})
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for item in self.items:
            x = x + item.sum(0)
        return self.normed(x) * self.named["scale"]


class Recurrent(nn.Module):
    """Keeps a list of its weights apart from its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)[0]


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def half() -> nn.Module:
    return linears().to(torch.bfloat16)


MODELS = [linears, Tied, Lists, Recurrent, half]


def a_batch(model: nn.Module) -> torch.Tensor:
    return torch.randn(4, 3, dtype=next(model.parameters()).dtype)


def gradients(flat: FlattenParamsWrapper) -> Iterator[torch.Tensor]:
    return flat.get_param_views([p.grad for p in flat.flat_params])


@pytest.mark.parametrize("make", MODELS)
def test_trains_like_the_plain_module(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = make()
    flat = FlattenParamsWrapper(copy.deepcopy(plain))
    assert [n for n, _ in flat.named_parameters()] == ["flat_param_0"]
    assert flat.num_params_managed == len(list(plain.parameters()))
    one, other = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (plain, flat))
    for _ in range(3):
        x = a_batch(plain)
        for model, optimizer in ((plain, one), (flat, other)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
        for mine, theirs in zip(gradients(flat), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.grad, rtol=0, atol=0)
        one.step()
        other.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(flat.state_dict()[name], value)


def test_names_and_what_follows_them() -> None:
    net = linears()
    flat = FlattenParamsWrapper(net, [[net[0].weight], [net[3].weight, net[3].bias]], ["a", "b"])
    assert set(dict(flat.named_parameters())) == {
        "flat_param_a",
        "flat_param_b",
        *(f"_fpw_module.{n}" for n in ("0.bias", "1.weight", "1.bias")),
    }
    assert flat.metadata(1) == (
        ["_fpw_module.3.weight", "_fpw_module.3.bias"],
        [torch.Size([3, 5]), torch.Size([3])],
        [15, 3],
    )
    assert {"flat_param_a", "flat_param_b", "0.bias", "1.running_mean"} <= set(flat.flat_state_dict())
    assert set(flat.state_dict(prefix="x.")) == {f"x.{k}" for k in linears().state_dict()}
    assert flat[0] is net[0]
    assert flat.module is net
    assert [type(m) for m in flat] == [type(m) for m in net]
    with pytest.raises(LifecycleError, match="there are 2"):
        _ = flat.flat_param
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'nothing'"):
        _ = flat.nothing


def test_an_empty_list_flattens_nothing() -> None:
    flat = FlattenParamsWrapper(linears(), [])
    assert flat.flat_params == []
    assert flat.num_params_managed == 0
    assert set(flat.state_dict()) == set(flat.flat_state_dict()) == set(linears().state_dict())
    flat.load_state_dict(linears().state_dict())
    flat(torch.randn(2, 3)).sum().backward()


def test_a_generator_and_parameters_of_other_modules() -> None:
    net = linears()
    flat = FlattenParamsWrapper(net, (p for m in (net, nn.Linear(2, 2)) for p in m.parameters()))
    assert flat.num_params_managed == 6


def test_frozen_groups_stay_frozen() -> None:
    net = linears()
    net[0].requires_grad_(False)
    frozen = list(net[0].parameters())
    with pytest.raises(ConfigurationError, match=r"same requires_grad.*False: _fpw_module\.0\.weight"):
        FlattenParamsWrapper(net)
    assert isinstance(net[0].weight, nn.Parameter), "a refused module stays as it was"
    flat = FlattenParamsWrapper(net, [frozen, [p for p in net.parameters() if p.requires_grad]])
    flat(torch.randn(2, 3)).sum().backward()
    assert flat.flat_params[0].grad is None
    assert flat.flat_params[1].grad is not None
    with flat.unflatten_params():
        assert not net[0].weight.requires_grad
    assert not flat.flat_params[0].requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda n: {"param_list": [[n[0].weight], [n[0].weight, n[0].bias]]}, "more than one group"),
        (lambda n: {"flat_param_names": ["a", "b"]}, "1 groups"),
        (
            lambda n: {"param_list": [[n[0].weight], [n[0].bias]], "flat_param_names": ["a", "a"]},
            "distinct name",
        ),
        (lambda n: {"param_list": [["0.weight"]]}, "found a str"),
    ],
)
def test_bad_arguments(arguments: Callable[[Any], dict[str, Any]], message: str) -> None:
    net = linears()
    with pytest.raises(ConfigurationError, match=message):
        FlattenParamsWrapper(net, **arguments(net))
    net(torch.randn(2, 3))


def test_mixed_dtypes_and_flat_ones_are_refused() -> None:
    net = linears()
    net[3].to(torch.float64)
    with pytest.raises(ConfigurationError, match=r"torch\.float64: _fpw_module\.3\.weight"):
        FlattenParamsWrapper(net)
    with pytest.raises(ConfigurationError, match="aren't flat themselves"):
        FlattenParamsWrapper(FlattenParamsWrapper(linears()))
    with pytest.raises(ConfigurationError, match="at least one"):
        FlatParameter([])


@pytest.mark.parametrize("make", MODELS)
def test_what_is_written_while_unflattened_stays(make: Callable[[], nn.Module]) -> None:
    flat = FlattenParamsWrapper(make())
    original = flat.flat_param
    with flat.unflatten_params():
        assert flat.flat_params == []
        assert not flat.is_flattened
        for param in flat.parameters():
            assert type(param) is nn.Parameter
            nn.init.constant_(param, 2)
        x = a_batch(flat)
        inside = flat(x)
        with flat.unflatten_params():
            assert not flat.is_flattened
    assert flat.flat_param is original
    assert (original == 2).all()
    assert torch.equal(flat(x), inside)


def test_replaced_parameters_stay_too() -> None:
    flat = FlattenParamsWrapper(linears())
    with flat.unflatten_params():
        flat[0].weight.data = torch.full((5, 3), 3.0)
        flat[0].bias = nn.Parameter(torch.full((5,), 4.0))
    assert flat.flat_param[:20].tolist() == [3.0] * 15 + [4.0] * 5
    with flat.unflatten_params():
        flat.double()
    assert flat.flat_param.dtype == torch.float64
    flat(torch.randn(2, 3, dtype=torch.float64))
    with pytest.raises(LifecycleError, match=r"can't be flattened again"):
        with flat.unflatten_params():
            flat[0].weight = nn.Parameter(torch.zeros(1, 1))
    assert flat.is_flattened


def test_an_error_within_leaves_it_flattened() -> None:
    flat = FlattenParamsWrapper(linears())
    with pytest.raises(KeyError):
        with flat.unflatten_params():
            raise KeyError
    flat(torch.randn(2, 3)).sum().backward()
    assert flat.flat_param.grad is not None


def test_other_values_for_a_block() -> None:
    flat = FlattenParamsWrapper(linears())
    before = flat.flat_param.detach().clone()
    with flat.unflatten_params([torch.ones_like(before)]):
        assert (flat[0].weight == 1).all()
        with pytest.raises(LifecycleError):
            with flat.unflatten_params([before]):
                pass
    assert torch.equal(flat.flat_param, before)
    with pytest.raises(ConfigurationError, match="got one with 5"):
        with flat.unflatten_params([torch.ones(5)]):
            pass
    assert flat.is_flattened
    with pytest.raises(ConfigurationError, match="got 2"):
        flat.get_param_views([None, None])


def test_old_single_name_and_an_untouched_argument() -> None:
    flat, other = FlattenParamsWrapper(linears()), FlattenParamsWrapper(linears())
    saved = flat.flat_state_dict()
    saved["flat_param"] = saved.pop("flat_param_0")
    keys = list(saved)
    other.load_state_dict(saved)
    assert list(saved) == keys
    assert torch.equal(other.flat_param, flat.flat_param)


@pytest.mark.parametrize("flat_form", [True, False])
def test_missing_and_unexpected_keys_have_the_modules_names(flat_form: bool) -> None:
    flat = FlattenParamsWrapper(linears())
    saved = flat.flat_state_dict() if flat_form else flat.state_dict()
    del saved["1.running_mean"]
    saved["0.extra"] = torch.ones(1)
    result = flat.load_state_dict(saved, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["1.running_mean"], ["0.extra"])
    with pytest.raises(RuntimeError, match=r'Missing key.*"1\.running_mean"'):
        flat.load_state_dict(saved)
    assert flat.is_flattened


def test_partial_load_changes_what_it_names() -> None:
    flat = FlattenParamsWrapper(linears())
    before = flat.state_dict()["0.bias"].clone()
    flat.load_state_dict({"0.weight": torch.full((5, 3), 7.0)}, strict=False)
    assert (flat.flat_param[:15] == 7).all()
    assert torch.equal(flat.state_dict()["0.bias"], before)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("outer", ["plain", "flat"])
def test_wrappers_inside_of_modules(outer: str, assign: bool) -> None:
    def make() -> nn.Module:
        tree = nn.Sequential(FlattenParamsWrapper(nn.Linear(3, 3)), nn.BatchNorm1d(3), nn.Linear(3, 3))
        if outer == "flat":
            return FlattenParamsWrapper(tree, [*tree[1].parameters(), *tree[2].parameters()])
        return tree

    one, other = make().eval(), make().eval()
    keys = set(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).state_dict())
    assert set(one.state_dict()) == keys
    other.load_state_dict(copy.deepcopy(one.state_dict()), assign=assign)
    x = torch.randn(2, 3)
    assert torch.equal(one(x), other(x))
    other(x).sum().backward()
    assert isinstance(other[0].flat_param, FlatParameter)
    assert other[0].flat_param.grad is not None
    if isinstance(one, FlattenParamsWrapper):
        third: Any = make().eval()
        third.load_state_dict(one.flat_state_dict())
        assert torch.equal(one(x), third(x))


def test_versions_of_modules_travel() -> None:
    """A module's version decides how old entries are read; the plain module finds them under its own names."""
    flat = FlattenParamsWrapper(linears())
    versions = flat.state_dict()._metadata
    assert versions["1"] == versions["_fpw_module.1"] == {"version": 2}


def test_keys_as_they_are() -> None:
    flat = FlattenParamsWrapper(nn.Linear(2, 2))
    raw = {"flat_param_0": torch.ones(6)}
    with no_key_translation():
        assert flat.load_state_dict(raw).missing_keys == []
    assert (flat.flat_param == 1).all()


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_separate_and_whole(how: str, make: Callable[[], nn.Module]) -> None:
    flat = FlattenParamsWrapper(make()).eval()
    if how != "deepcopy" and make is Lists:
        pytest.skip("torch doesn't pickle parametrized modules")
    x = a_batch(flat)
    flat(x).sum().backward()
    if how == "deepcopy":
        made = copy.deepcopy(flat)
    elif how == "pickle":
        made = pickle.loads(pickle.dumps(flat))
    else:
        made = reread(flat, weights_only=False)
    assert made.flat_param is made.flat_params[0]
    assert made.flat_param is not flat.flat_param
    assert torch.equal(made(x), flat(x))
    with torch.no_grad():
        made.flat_param.zero_()
    module, name = next((m, n) for _, m, n in made._param_infos)
    assert (getattr(module, name) == 0).all(), (
        "original parameters are views of the copy's own flat parameter"
    )
    assert (flat.flat_param != 0).any()
    made(x).sum().backward()
    assert made.flat_param.grad is not None
    assert made.state_dict().keys() == flat.state_dict().keys()
    copy.deepcopy(nn.Sequential(flat))


def test_a_flat_parameter_pickles_by_itself() -> None:
    flat_param = FlatParameter([nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.zeros(3))], False)
    function, arguments, state = flat_param.__reduce_ex__(4)
    assert function is FlatParameter
    assert (arguments[0][0].tolist(), arguments[1]) == (flat_param.tolist(), False)
    assert state == ([4, 3], [torch.Size([2, 2]), torch.Size([3])], [], [])
    made = pickle.loads(pickle.dumps(flat_param))
    assert [v.shape for v in made.get_param_views()] == [(2, 2), (3,)]
    assert not copy.deepcopy(flat_param).requires_grad


def test_a_shard_needs_the_whole_for_its_views() -> None:
    flat_param = FlatParameter([nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.zeros(3))])
    flat_param.data = flat_param.data[:4]
    with pytest.raises(ConfigurationError, match="all 7 elements"):
        flat_param.get_param_views()
    assert [v.numel() for v in flat_param.get_param_views(torch.zeros(7))] == [4, 3]
    assert pickle.loads(pickle.dumps(flat_param)).numel() == 4


@pytest.mark.parametrize("convert", ["half", "double"])
def test_conversions_reach_members_at_once(convert: str) -> None:
    flat = FlattenParamsWrapper(linears())
    getattr(flat, convert)()
    assert flat[0].weight.dtype == flat.flat_param.dtype == flat[1].running_mean.dtype


def test_meta_construction() -> None:
    with torch.device("meta"):
        flat = FlattenParamsWrapper(linears())
    flat.to_empty(device="cpu")
    assert isinstance(flat.flat_param, FlatParameter)
    assert flat.flat_param is flat.flat_params[0]
    plain = linears()
    flat.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3)
    assert torch.equal(flat(x), plain(x))


@pytest.mark.parametrize("flat_form", [True, False])
def test_assigning_a_state_dict(flat_form: bool) -> None:
    flat, other = FlattenParamsWrapper(linears()), FlattenParamsWrapper(linears())
    with torch.device("meta"):
        flat = FlattenParamsWrapper(linears())
    flat.load_state_dict(other.flat_state_dict() if flat_form else other.state_dict(), assign=True)
    x = torch.randn(2, 3)
    assert torch.equal(flat(x), other(x))
    assert flat.flat_param.device.type == "cpu"


@pytest.mark.parametrize("whole", [True, False])
def test_compiled(whole: bool) -> None:
    plain = Tied()
    flat = FlattenParamsWrapper(copy.deepcopy(plain))
    x = torch.randn(2, 3)
    if whole:
        compiled: Any = torch.compile(flat, backend="eager")
    else:
        flat._fpw_module.compile(backend="eager")
        compiled = flat
    for _ in range(2):
        compiled(x).sum().backward()
        plain(x).sum().backward()
    for mine, param in zip(gradients(flat), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, param.grad)
    torch._dynamo.reset()


def test_eval_forward_between_training_forwards() -> None:
    flat = FlattenParamsWrapper(linears())
    x = torch.randn(2, 3)
    loss = flat(x).sum()
    with torch.no_grad():
        assert not flat(x).requires_grad
    with torch.inference_mode():
        flat(x)
    (loss + flat(x).sum()).backward()
    assert flat.flat_param.grad is not None
