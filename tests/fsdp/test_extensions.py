"""Parameters whose class says what is gathered of them (torch's extensions of the all-gather), beside FSDP2."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import shardkit
from shardkit import fully_shard, sharding_of
from shardkit.checkpoint.tools import Conversion, convert
from shardkit.checkpoint.tools.hugging_face import read_weights
from shardkit.errors import ConfigurationError, LifecycleError, RankFailedError, RankMismatchError
from shardkit.torch_seams.tensors import named_parts
from tests.beside import batch
from tests.doors import DOORS
from tests.pools import on_ranks, rank_pool

aten = torch.ops.aten
_SAME_CLASS = (
    aten.detach.default, aten.view.default, aten.as_strided.default, aten.slice.Tensor, aten.split.Tensor,
    aten.new_zeros.default, aten.clone.default, aten._to_copy.default, aten.empty_like.default,
)  # fmt: skip


class Wrapping(torch.Tensor):
    """Holds a tensor, and runs every operation on it."""

    pads = True

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *_: object) -> Any:
        return cls(inner["_data"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(
            *tree_map_only(Wrapping, lambda t: t._data, args),
            **tree_map_only(Wrapping, lambda t: t._data, kwargs or {}),
        )
        if func not in _SAME_CLASS:
            return (
                args[0]
                if func.__name__.split(".")[0].endswith("_") and isinstance(args[0], Wrapping)
                else out
            )
        return tree_map_only(torch.Tensor, cls, out)

    def padded(self, mesh: Any, rows: int) -> torch.Tensor:
        full = self._data.new_zeros(
            -(-rows // mesh.size()) if self.pads else len(self._data), *self._data.shape[1:]
        )
        full[: len(self._data)] = self._data
        return full


class InHalf(Wrapping):
    """Travels in bfloat16."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        assert mesh.ndim == 1
        assert outer_stride == (outer_size[1], 1)
        assert isinstance(module, nn.Linear)
        assert isinstance(mp_policy, MixedPrecisionPolicy)
        return (self.padded(mesh, outer_size[0]).bfloat16(),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        (tensor,) = outputs
        assert tensor.dtype == torch.bfloat16
        assert metadata is None
        if out is None:
            upcast = tensor.to(param_dtype)
            return upcast, (tensor, upcast)
        if param_dtype == tensor.dtype:
            assert out.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        else:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(tensor[: len(out)])
        return None


class Unpadded(InHalf):
    """Says what it has, and not what all ranks have room for."""

    pads = False


class Columns(InHalf):
    """Is made of its values, the other way round."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["turned"], None

    @property
    def turned(self) -> torch.Tensor:
        return self._data.t()


class Quantized(Wrapping):
    """Travels as codes of one byte with a scale for each row, and computes as a class of its own; the first form."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        scale = self._data.abs().amax(1, keepdim=True) / 127
        return ((self._data / scale).round().to(torch.int8), scale), (self._data.dtype,)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        assert metadata == (param_dtype,)
        codes, scale = outputs
        if out is None:
            values = codes * scale
            return Wrapping(values), (codes, scale, values)
        assert isinstance(out, Wrapping)
        torch.mul(codes, scale, out=out._data)
        return None


class Sealed(Wrapping):
    """Is itself in any dtype, and gives no values."""

    def dequantize(self) -> Any:
        raise NotImplementedError("sealed")


class Gathered(Quantized):
    """Is gathered as one that gives no values."""

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        made = super().fsdp_post_all_gather(*args, **kwargs)
        return made and (Sealed(made[0]._data), made[1])


class Net(nn.Module):
    """Linear layers of rows that two ranks divide, or not; some of another class."""

    def __init__(self, kind: Any, hidden: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 6))
        self.head = nn.Linear(6, 4)
        if kind is not None:
            for layer in self.layers[::2]:
                layer.weight = nn.Parameter(kind(layer.weight.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def _plain(model: nn.Module) -> dict[str, torch.Tensor]:
    locals_ = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {n: (t._data if isinstance(t, Wrapping) else t).detach() for n, t in locals_.items()}


def _trained(by: Any, rank: int, kind: Any, hidden: int, policy: Any, mesh: Any) -> tuple[Net, list[float]]:
    model, losses = Net(kind, hidden), []
    for part in (model.layers, model):
        by(part, mp_policy=policy, mesh=mesh, **({"dtensors": True} if by is fully_shard else {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return model, losses


def _beside(rank: int, kind: Any, hidden: int, policy: Any, mesh: Any) -> Net:
    (ours, losses), (theirs, wanted) = (
        _trained(by, rank, kind, hidden, policy, mesh) for by in (fully_shard, fsdp2)
    )
    assert losses == pytest.approx(wanted, rel=1e-6)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert type(p.to_local()) is type(q.to_local())  # type: ignore[attr-defined]
        assert p.placements == q.placements  # type: ignore[attr-defined]
    torch.testing.assert_close(_plain(ours), _plain(theirs))
    return ours


class Codes(nn.Parameter):
    """As bitsandbytes has them: how to read the numbers is an attribute."""

    quant_state: tuple[str, float]


def _metadata(rank: int) -> None:
    model = Net(None)
    codes = Codes(model.head.weight.detach(), requires_grad=False)
    codes.quant_state = ("nf4", 0.5)
    model.head.weight = codes
    seen = []
    model.head.register_forward_pre_hook(lambda m, _: seen.append((type(m.weight), m.weight.quant_state)))
    fully_shard(model, dtensors=True)
    for _ in range(2):
        model(batch(rank, 0)).sum().backward()
    assert seen == [(Codes, ("nf4", 0.5))] * 2


def _in_other_ways(rank: int, ranks: int = 2) -> None:
    """Values of rank 0, gradients that add up, state dicts, summoned values, dtypes, the meta device."""
    model, one = Net(InHalf), Net(None)
    if rank:
        nn.init.ones_(model.layers[0].weight._data)
    fully_shard(model, dtensors=True)
    with torch.no_grad():
        for layer in one.layers[::2]:
            layer.weight.copy_(layer.weight.bfloat16())
    with sharding_of(model).no_sync():
        model(batch(rank, 0)).sum().backward()
    model(batch(rank, 1)).sum().backward()
    for step in range(2):
        for part in range(ranks):
            (one(batch(part, step)).sum() / ranks).backward()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]
    again = fully_shard(Net(InHalf), dtensors=True)
    for p in again.parameters():
        nn.init.zeros_(p.to_local())  # type: ignore[attr-defined]
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(batch(rank, 0)), one(batch(rank, 0)))
    with sharding_of(again).summon_full_params():
        torch.testing.assert_close(again.layers[0].weight.detach(), one.layers[0].weight.detach())
    with (
        pytest.raises(LifecycleError, match=r"'layers\.0\.weight' was written to"),
        sharding_of(again).summon_full_params(),
    ):
        again.layers[0].weight.detach().zero_()
    torch.testing.assert_close(again(batch(rank, 0)), one(batch(rank, 0)))
    with torch.device("meta"):
        empty = fully_shard(Net(InHalf), dtensors=True)
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    torch.testing.assert_close(empty(batch(rank, 0)), one(batch(rank, 0)))


def _refused(rank: int) -> None:
    with pytest.raises(ConfigurationError, match=r"'layers\.0\.weight' is a InHalf"):
        fully_shard(Net(InHalf))
    with pytest.raises(RankMismatchError, match="fsdp_pre_all_gather"):
        fully_shard(Net(Unpadded, 7), dtensors=True)(batch(rank, 0))
    with pytest.raises(ConfigurationError, match="offloading is for plain parameters"):
        fully_shard(Net(InHalf), dtensors=True, offload=shardkit.OffloadPolicy(parameters=True))
    with pytest.raises(ConfigurationError, match=r"'layers\.0\.weight', a InHalf, .* have no names"):
        fully_shard(Net(InHalf), mesh=init_device_mesh("cpu", (1, 2)), dtensors=True)
    model = fully_shard(Net(InHalf), dtensors=True)
    with pytest.raises(ConfigurationError, match="has a class with fsdp_pre_all_gather"):
        copy.deepcopy(model)


class Fitted(InHalf):
    """Has a number beside its tensors that follows from their values."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_data"], {"scale": float(self._data.abs().max())}


class Untold(InHalf):
    """Has something beside its tensors that does not say what it is."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_data"], object()


class Zeroed(InHalf):
    """Has a zero point beside its tensors, which all that is made of it has; or as an attribute alone."""

    zero, says = 3, True

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if not self.says:
            self.hidden = self.zero
        return ["_data"], {"zero": self.zero} if self.says else None


class OtherZero(Zeroed):
    zero = 4


class HiddenZero(Zeroed):
    says = False


class OtherHidden(OtherZero):
    says = False


for _kind in (OtherZero, HiddenZero, OtherHidden):  # classes of one name
    _kind.__qualname__ = "Zeroed"


def _not_saved(rank: int) -> None:
    """Parts that are not those of the whole; facts that are not."""
    trained, frozen = ([Net(kind) for kind in (Columns, Fitted, Untold)] for _ in range(2))
    for each in frozen:
        each.layers.requires_grad_(False)
    for model in (fully_shard(each, dtensors=True) for each in (*frozen, *trained)):
        for refused in (
            lambda model=model: shardkit.save_training(tempfile.mkdtemp(), step=0, model=model),
            lambda model=model: sharding_of(model).sharded_state_dict(),
            lambda model=model: sharding_of(model).export(),
        ):
            with pytest.raises(ConfigurationError, match="has a class with fsdp_pre_all_gather"):
                refused()


def _not_cast(rank: int) -> None:
    """What a class has no values of in another dtype is told on all ranks, before anything comes."""
    for kind, is_sharded in ((Sealed, True), (Sealed, False), (Gathered, True)):
        model = Net(kind)
        model.layers.requires_grad_(False)
        others = None if is_sharded else {layer.weight for layer in model.layers[::2]}
        fully_shard(model.head, dtensors=True)
        sharding = sharding_of(fully_shard(model, dtensors=True, ignored_params=others))
        for way in (
            lambda sharding=sharding: sharding.export(dtype=torch.bfloat16),
            lambda sharding=sharding: sharding.export(dtype=torch.bfloat16, on=1, to=pytest.fail),
            lambda model=model: shardkit.save_weights(model, "/nowhere", dtype=torch.bfloat16),
        ):
            said = (
                r"'layers\.0\.weight' is a Sealed, which gives no values of torch\.bfloat16 \(NotImplemented"
            )
            with pytest.raises(ConfigurationError, match=said):
                way()
        assert len(list(sharding.export())) == 6


def _zeroed(kind: Any, sharded: bool) -> Net:
    model = Net(kind)
    model.layers.requires_grad_(False)
    return fully_shard(model, dtensors=True) if sharded else model  # type: ignore[no-any-return]


def _restored_into_another(rank: int, folders: str, kind: Any, other: Any, sharded: bool) -> None:
    folder = f"{folders}/{kind.says}{sharded}"
    saved, model = _zeroed(kind, sharded), _zeroed(other, sharded)
    shardkit.save(folder, step=1, model=saved)
    with torch.no_grad():
        model.head.bias.add_(1)
    before = {n: t.clone() for n, t in _plain(model).items()}
    said = r"not in the checkpoint are layers\.0\.weight is Zeroed of .*4.*; not in the model are .*3"
    with pytest.raises(ConfigurationError, match=said):
        shardkit.restore(folder, model=model)
    if sharded:
        dcp.save({"m": sharding_of(saved).sharded_state_dict()}, checkpoint_id=f"{folder}/dcp")
        with pytest.raises(dcp.api.CheckpointException, match=r"Missing key.*weight is Zeroed of .*4"):
            dcp.load({"m": sharding_of(model).sharded_state_dict()}, checkpoint_id=f"{folder}/dcp")
    _same(_plain(model), before)
    again = _zeroed(kind, sharded)
    nn.init.zeros_(again.head.bias)
    shardkit.restore(folder, model=again)
    _same(_plain(again), _plain(saved))


def _facts_are_compared(rank: int, folders: str) -> None:
    """What stands beside tensors is that of the checkpoint's, or nothing is restored; the same on all ranks."""
    with pytest.raises(RankMismatchError, match=r"layers\.0\.weight.*Zeroed .*'zero': 3"):
        fully_shard(Net(OtherZero if rank else Zeroed), dtensors=True)
    for sharded in (True, False):
        _restored_into_another(rank, folders, Zeroed, OtherZero, sharded)
        _restored_into_another(rank, folders, HiddenZero, OtherHidden, sharded)


def _names_are_told_apart(rank: int, folder: str) -> None:
    """A buffer, or a parameter, has the name of a tensor that another is made of."""
    for sharded, is_buffer in ((False, True), (True, True), (True, False), (False, False)):
        model = Net(Zeroed)
        model.layers.requires_grad_(False)
        taken = nn.Parameter(torch.ones(5), requires_grad=not is_buffer)
        if is_buffer:
            model.layers[0].register_buffer("_weight__data", taken.data)
        else:
            model.layers[0].register_parameter("_weight__data", taken)
        ways = [lambda model=model: shardkit.save(f"{folder}/names", step=1, model=model)]
        ways += [lambda model=model: shardkit.restore(f"{folder}/TrueTrue", model=model)]
        if sharded:
            fully_shard(model, dtensors=True)
            ways += [lambda model=model: sharding_of(model).sharded_state_dict()]
        for way in ways:
            with pytest.raises(ConfigurationError, match=r"saved as 'layers\.0\._weight__data': give one"):
                way()
        assert not list(Path(folder, "names").glob("step-*"))


def _frozen(rank: int) -> None:
    """What is exported is what is gathered, and stays when the model goes on; saved is what ranks have."""
    model, other = Net(InHalf, 7), Net(InHalf, 7)
    torch.manual_seed(1)
    for each in (model, other):
        nn.init.normal_(each.layers[0].weight._data)
        each.layers[0].requires_grad_(False)
        each.layers[2].weight = nn.Parameter(each.layers[2].weight._data)
    weight = model.layers[0].weight._data.clone()
    fully_shard(model, dtensors=True)
    fully_shard(other, dtensors=True)
    dtype: torch.dtype | None
    for dtype in (None, torch.float64):
        found = dict(sharding_of(model).export(dtype=dtype))["layers.0.weight"]
        model(batch(rank, 0)).sum().backward()
        torch.testing.assert_close(found, weight.bfloat16().to(found.dtype), rtol=0, atol=0)
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    shardkit.save(folder[0], step=1, model=model)
    shardkit.restore(folder[0], model=other)
    torch.testing.assert_close(_plain(other), _plain(model), rtol=0, atol=0)
    few = Net(InHalf, 1)
    few.layers[0].requires_grad_(False)
    few.layers[2].weight = nn.Parameter(few.layers[2].weight._data)
    with pytest.raises(ConfigurationError, match="has a class with fsdp_pre_all_gather"):
        sharding_of(fully_shard(few, dtensors=True)).sharded_state_dict()


def _torchaos(rank: int, ranks: int = 2) -> None:
    """Its NF4 (frozen, of several tensors), weights of int8 that train, and those that don't, of rows that ranks don't
    divide; all compute as before.
    """
    if importlib.util.find_spec("torchao") is None:
        return  # where torch is older
    torchao = importlib.import_module("torchao")
    nf4 = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    int8 = importlib.import_module("torchao.prototype.quantized_training")
    torch.manual_seed(0)
    frozen = nn.Linear(256, 256 * ranks, bias=False)
    frozen.weight = nn.Parameter(nf4.to_nf4(frozen.weight.detach()), requires_grad=False)
    frozen.forward = lambda x: nf4.linear_nf4(x, frozen.weight)
    model = nn.Sequential(nn.Linear(6, 256), frozen, nn.Linear(256 * ranks, 8, bias=False), nn.Linear(8, 7))
    model.extend([nn.Linear(7, 5), nn.Linear(5, 3)])
    torchao.quantize_(model, int8.int8_weight_only_quantized_training(), lambda _, name: name == "2")
    by_row = importlib.import_module("torchao.quantization").Int8WeightOnlyConfig()
    torchao.quantize_(model, by_row, lambda _, name: name == "3")
    by_tensor = importlib.import_module("torchao.quantization")
    whole = by_tensor.PerTensor()  # one scale for all of a weight
    torchao.quantize_(model, by_tensor.Int8WeightOnlyConfig(granularity=whole), lambda _, name: name == "4")
    model[5].weight = nn.Parameter(
        by_tensor.Float8Tensor.from_hp(model[5].weight.detach(), granularity=whole)
    )
    model[3:].requires_grad_(False)
    one, x = copy.deepcopy(model), batch(0, 0)
    one[1].forward = lambda x: nf4.linear_nf4(x, one[1].weight)
    one(x).sum().backward()
    if rank:
        model[4].weight.scale.mul_(2)  # values are rank 0's
    fully_shard(model, dtensors=True)
    for _ in range(2):
        model.zero_grad()
        out = model(x)
        torch.testing.assert_close(out, one(x))
        out.sum().backward()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        assert type(p._local_tensor) is type(q) or type(q) is nn.Parameter  # type: ignore[attr-defined]
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]
    state = {n: v.clone() for n, v in model.state_dict().items() if n[0] in "345"}
    model[3].weight._local_tensor.qdata.zero_()
    assert not torch.equal(model(x), one(x))
    model[5].weight._local_tensor.scale.zero_()
    model.load_state_dict(state, strict=False)
    torch.testing.assert_close(model(x), one(x))


@on_ranks(2)
def test_training_beside_fsdp2(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _beside(rank, InHalf, 7, half, mesh)
    model = _beside(rank, InHalf, 8, MixedPrecisionPolicy(), mesh)
    seen = []
    model.layers[0].register_forward_pre_hook(lambda m, _: seen.append(m.weight))
    model(batch(rank, 0)).sum().backward()
    with pytest.raises(LifecycleError, match=r"layers\.0\.weight"):
        seen[0] + 1
    _beside(rank, Quantized, 8, MixedPrecisionPolicy(), mesh)
    for part in (_metadata, _in_other_ways, _torchaos, _refused, _not_saved, _not_cast, _frozen):
        part(rank)


class Noted(InHalf):
    """Gets a scale beside its tensor after it was sharded, as torchao's are given one."""

    scale: torch.Tensor | None = None

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [*(["scale"] if self.scale is not None else []), "_data"], None


def _training(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Weights of 7 and 6 rows (of torchao's 48) that are gathered as less than they are updated with."""
    if kind == "float8":
        model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 48), nn.Linear(48, 3))
        of_torchao = importlib.import_module("torchao.float8")
        config = of_torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        of_torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, n: n == "1")
    else:
        model = Net({"own": InHalf, "noted": Noted}[kind], 7)
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) / 4)
    fully_shard(model, dtensors=True)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def _wholes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = dict(model.named_parameters())
    for name, p in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[p].items()}
    wholes = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in found.items()}
    return {n: v.detach() * 1 for n, v in wholes.items()}  # plain also where nothing is gathered


def _trained_leave(rank: int, kind: str, folder: str) -> None:
    model, optimizer = _training(kind, 0)
    for step in range(2):
        _step(model, optimizer, batch(rank, step))
    if kind == "noted":
        for layer in model.layers[::2]:  # type: ignore[index,union-attr]
            layer.weight._local_tensor.scale = torch.ones(())
    sharding, kept = sharding_of(model), _wholes(model, optimizer)
    weights = {n: v for n, v in kept.items() if n in dict(model.named_parameters())}
    _same(dict(sharding.export()), weights)
    _same(dict(sharding.export(dtype=torch.bfloat16)), {n: v.bfloat16() for n, v in weights.items()})
    received, sent = (
        {n: torch.zeros_like(v, dtype=torch.bfloat16) for n, v in weights.items()},
        shardkit.SentWeights(),
    )
    shardkit.save_weights(model, f"{folder}/files")
    shardkit.save(folder, step=2, model=model, optimizer=optimizer)
    dcp.save({"model": sharding.sharded_state_dict()}, checkpoint_id=f"{folder}/dcp")
    if rank == 0:
        _same({n: v.read() for n, v in read_weights(f"{folder}/files").items()}, weights)
        torch.save(kept, f"{folder}/kept")
    for _ in range(2):
        for name, change in sharding.export(dtype=torch.bfloat16, since=sent):
            change.apply(received[name])  # type: ignore[operator,union-attr]
        _same(received, {n: v.bfloat16() for n, v in _wholes(model, optimizer).items() if n in weights})
        _step(model, optimizer, batch(0, 5))  # of all ranks alike


def _trained_come_back(rank: int, kind: str, folder: str) -> None:
    """Another number of ranks; into a training that has not begun, and into one whose gathered values are kept."""
    kept = torch.load(f"{folder}/kept")
    weights = {n: kept[n] for n, _ in _training(kind, 1)[0].named_parameters()}
    for warm in (False, True):
        model, optimizer = _training(kind, 1)
        if warm:
            model.set_reshard_after_backward(False)  # type: ignore[operator]
            _step(model, optimizer, batch(rank, 3))
            model(batch(rank, 3)).sum().backward()
        dcp.load({"model": sharding_of(model).sharded_state_dict()}, checkpoint_id=f"{folder}/dcp")
        _same({n: v for n, v in _wholes(model, optimizer).items() if n in weights}, weights)
        again, x = _training(kind, 1), batch(0, 5)
        if warm:
            again[0].set_reshard_after_backward(False)  # type: ignore[operator]
            _step(*again, batch(rank, 3))
            again[0](batch(rank, 3)).sum().backward()
        shardkit.restore(folder, model=again[0], optimizer=again[1])
        _same(_wholes(*again), kept)
        exported = dict(sharding_of(again[0]).export())
        assert {type(value) for value in exported.values()} == {torch.Tensor}
        _same(exported, weights)
        fresh, fresh_optimizer = _training(kind, 2)
        shardkit.restore(folder, model=fresh, optimizer=fresh_optimizer)
        for each in (model, again[0]):
            torch.testing.assert_close(each(x), fresh(x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["own", "noted", "float8"])
def test_trained_weights_leave_and_come_back(kind: str, tmp_path: Path) -> None:
    if kind == "float8" and importlib.util.find_spec("torchao") is None:
        pytest.skip("where torch is older")
    rank_pool(2).run(_trained_leave, kind, str(tmp_path))
    for world_size in (3, 1, 2):
        rank_pool(world_size).run(_trained_come_back, kind, str(tmp_path))


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_stands_beside_tensors_is_compared(ranks: int, tmp_path: Path) -> None:
    rank_pool(ranks).run(_facts_are_compared, str(tmp_path))
    rank_pool(ranks).run(_names_are_told_apart, str(tmp_path))


def _weights_written(rank: int, folder: str) -> None:
    """Nothing is written where two tensors have one name; kinds of one name are told apart by their dtypes."""
    model = _quantized("float8 row", 0)
    model[2]._weight_scale = nn.Parameter(torch.ones(2))
    fully_shard(model, dtensors=True)
    kind = RankFailedError if rank else ConfigurationError
    with pytest.raises(kind, match=r"a tensor's name is '2\._weight_scale', which another one"):
        shardkit.save_weights(model, f"{folder}/files")
    assert not Path(folder, "files").exists()
    shardkit.save(folder, step=1, model=_sharded_anew("float8 row", 0))
    for sharded in (True, False):
        model = _quantized("float8 row", 1)
        for layer in model[1:3]:
            half = type(layer.weight).from_hp(layer.weight.dequantize().bfloat16())
            layer.weight = nn.Parameter(half, requires_grad=False)
        if sharded:
            fully_shard(model, dtensors=True)
        said = (
            r"not in the checkpoint are 1\.weight is Float8Tensor of .*bfloat16.*; not in the model .*float32"
        )
        with pytest.raises(ConfigurationError, match=said):
            shardkit.restore(folder, model=model)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="where torch is older")
def test_names_and_facts_of_quantized_weights(tmp_path: Path) -> None:
    rank_pool(2).run(_weights_written, str(tmp_path))


def _quantized(kind: str, seed: int) -> nn.Sequential:
    """Weights of 7 and 5 rows with scales of their own or one for all of a weight, beside others that train."""
    of_torchao, torchao = importlib.import_module("torchao.quantization"), importlib.import_module("torchao")
    torch.manual_seed(seed)
    if kind == "nf4":
        nf4 = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
        model = nn.Sequential(nn.Linear(6, 256), nn.Linear(256, 768, bias=False), nn.Linear(768, 3))
        model[1].weight = nn.Parameter(nf4.to_nf4(model[1].weight.detach()), requires_grad=False)
        return model
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 5), nn.Linear(5, 3))
    by = of_torchao.PerTensor() if "tensor" in kind else of_torchao.PerRow()
    for layer in model[1:3]:
        if "int8" in kind:
            torchao.quantize_(layer, of_torchao.Int8WeightOnlyConfig(granularity=by))
        else:
            weight = of_torchao.Float8Tensor.from_hp(layer.weight.detach(), granularity=by)
            layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.requires_grad_(False)
    return model


def _parts(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t for name, p in model.named_parameters() for n, t in named_parts(name, p.detach()).items()}


def _plain_in(dtype: torch.dtype, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: (p.dequantize() if hasattr(p, "qdata") else p).to(dtype) for n, p in weights.items()}


def _same(found: Any, expected: Any) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (found[name], value)))


def _sharded_anew(kind: str, seed: int, **options: Any) -> nn.Module:
    model = _quantized(kind, seed)
    fully_shard(model[1], dtensors=True, **options)
    return fully_shard(model, dtensors=True, **options)  # type: ignore[no-any-return]


def _quantized_leaves(rank: int, kind: str, folder: str) -> None:
    """What is exported and written is what one process has."""
    one, model = _quantized(kind, 0), _sharded_anew(kind, 0)
    sharding, sent = sharding_of(model), shardkit.SentWeights()
    whole = {n: p.detach() for n, p in one.named_parameters()}
    exported = dict(sharding.export())
    plain = _plain_in(torch.bfloat16, whole)
    _same(dict(sharding.export(dtype=torch.bfloat16)), plain)
    with pytest.raises(ConfigurationError, match="dtype= is not named"):
        sharding.export(since=sent)
    received = {n: torch.zeros_like(p) for n, p in plain.items()}
    for once in (True, False, False):
        for name, change in sharding.export(dtype=torch.bfloat16, since=sent):
            assert once or not change.runs  # type: ignore[union-attr]
            change.apply(received[name])  # type: ignore[operator]
    _same(received, plain)
    model(batch(0, 0)).sum().backward()  # what was given stays when the model goes on
    for name, weight in exported.items():
        assert type(weight) is type(whole[name])
        _same(named_parts(name, weight), named_parts(name, whole[name]))
    shardkit.save_weights(model, f"{folder}/files")
    shardkit.save_weights(model, f"{folder}/half", dtype=torch.float16)
    shardkit.save(folder, step=1, model=model)
    dcp.save({"model": sharding.sharded_state_dict()}, checkpoint_id=f"{folder}/dcp")
    shardkit.save(f"{folder}/own", step=1, extra={"weights": sharding.sharded_state_dict()})
    again = shardkit.restore(f"{folder}/own").extra["weights"]
    words = {n: again.pop(n) for n in list(again) if isinstance(again[n], str)}
    assert all(name.endswith(f".weight is {word}") for name, word in words.items())
    assert len(words) == len(one) - 2
    _same(again, _parts(one))
    if rank:
        return
    _same({n: v.read() for n, v in read_weights(f"{folder}/files").items()}, _parts(one))
    _same({n: v.read() for n, v in read_weights(f"{folder}/half").items()}, _plain_in(torch.float16, whole))
    for made in ("step-00000001", "dcp"):
        notes = convert(f"{folder}/{made}", f"{folder}/{made} converted", Conversion("hf"))
        assert "left out, since safetensors files hold tensors alone: 1.weight is " in str(notes.notes)
        _same({n: v.read() for n, v in read_weights(f"{folder}/{made} converted").items()}, _parts(one))
    if kind == "nf4":
        return
    torchao = importlib.import_module("torchao.prototype.safetensors.safetensors_support")
    facts = torchao.flatten_tensor_state_dict(dict(one.state_dict()))[1]  # as torchao reads its own files
    read = {n: v.read() for n, v in read_weights(f"{folder}/files").items()}
    again, _ = torchao.unflatten_tensor_state_dict(read, facts)
    one.load_state_dict(again)
    _same(_parts(one), read)


def _quantized_comes_back(rank: int, kind: str, folder: str, frozen: Any) -> None:
    """Another number of ranks, other values before."""
    one, x = _quantized(kind, 0), batch(0, 0)
    for by_torch in (False, True):
        model = _sharded_anew(kind, 1, reshard=shardkit.ReshardPolicy(frozen=frozen))
        assert not torch.equal(model(x), one(x))
        if by_torch:
            dcp.load({"model": sharding_of(model).sharded_state_dict()}, checkpoint_id=f"{folder}/dcp")
        else:
            shardkit.restore(folder, model=model)
        torch.testing.assert_close(model(x), one(x))
        _same(
            {n: t for name, v in sharding_of(model).export() for n, t in named_parts(name, v).items()},
            _parts(one),
        )
    model = _sharded_anew(kind, 1)
    model(x)
    model.load_state_dict(_sharded_anew(kind, 0).state_dict(), assign=True)
    torch.testing.assert_close(model(x), one(x))
    if rank == 0 and torch.distributed.get_world_size() == 1:
        plain = _quantized(kind, 1)
        shardkit.restore(folder, model=plain)
        _same(_parts(plain), _parts(one))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="where torch is older")
@pytest.mark.parametrize("kind", ["nf4", "int8 tensor", "int8 row", "float8 tensor", "float8 row"])
def test_quantized_weights_leave_and_come_back(kind: str, tmp_path: Path) -> None:
    rank_pool(3).run(_quantized_leaves, kind, str(tmp_path))
    for world_size, frozen in ((2, "keep"), (4, "host"), (1, "reshard")):
        rank_pool(world_size).run(_quantized_comes_back, kind, str(tmp_path), frozen)


class Own(torch.Tensor):
    """Is a tensor with memory of its own, and says what is gathered."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.as_subclass(torch.Tensor),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)


@on_ranks(1, 2, 3)
def test_modules_that_list_no_dtensors_refuse_them(rank: int, world_size: int) -> None:
    """Raw errors came from inside of the first forward, or of sharding."""
    words = r"lists no DTensors .* a Own, has a class with fsdp_pre_all"
    for door in (door for door in DOORS if door != "dtensors"):
        with pytest.raises(ConfigurationError, match=words):
            DOORS[door](Net(lambda data: data.as_subclass(Own)))
