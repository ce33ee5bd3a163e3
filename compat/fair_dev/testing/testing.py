"""fairscale.fair_dev.testing.testing: helpers of fairscale's tests, which tests elsewhere use as well."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.multiprocessing.spawn import spawn

from shardkit.compat.redirected import redirected_names
from shardkit.errors import ConfigurationError
from shardkit.model_parallel.groups import (
    destroy_model_parallel,
    initialize_model_parallel,
    model_parallel_cuda_manual_seed,
    model_parallel_is_initialized,
)
from shardkit.types import AnyCallable, Args, StateDict, Tree

filename_mpi: str | None = None
available_devices = ["cpu", *(str(d) for d in [torch.accelerator.current_accelerator()] if d is not None)]

_redirected = redirected_names(__name__)


def __getattr__(name: str) -> Any:
    """Makes redirected names, and marks that skip tests, when asked for, since all else works without pytest."""
    devices = torch.accelerator.device_count()
    conditions: dict[str, tuple[bool, str]] = {
        "skip_if_cuda": (devices > 0, "runs on the CPU only, to save time"),
        "skip_if_no_cuda": (devices < 1, "needs a GPU"),
        "skip_if_single_gpu": (devices < 2, "needs two GPUs"),
        "skip_if_less_than_four_gpu": (devices < 4, "needs four GPUs"),
        "skip_if_py38": (sys.version_info[:2] == (3, 8), "not for Python 3.8"),
        "skip_if_py39_no_cuda": (devices < 1 and sys.version_info[:2] == (3, 9), "Python 3.9 needs a GPU"),
        "skip_due_to_flakyness": (True, "does not always pass"),
    }
    if name not in conditions:
        return _redirected(name)
    import pytest

    condition, reason = conditions[name]
    return pytest.mark.skipif(condition, reason=reason)


class DummyProcessGroup:
    """A process group in name only: a rank and a size, for what needs no communication."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def in_circle_ci() -> bool:
    return os.path.exists("/home/circleci")


def skip_a_test_if_in_CI() -> None:
    """Skips the calling test on CircleCI."""
    if in_circle_ci():
        import pytest

        pytest.skip("not on CircleCI")


@contextlib.contextmanager
def in_temporary_directory() -> Iterator[str]:
    """Makes a temporary directory the working directory; deleted afterwards."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            yield directory
        finally:
            os.chdir(before)


def set_random_seed(seed: int, model_parallel: bool = True) -> None:
    """Seeds the generators of Python, torch, numpy (if it is loaded), and of model parallelism (if it is set up)."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if model_parallel and model_parallel_is_initialized():
        model_parallel_cuda_manual_seed(seed)


def objects_are_equal(
    a: Tree,
    b: Tree,
    raise_exception: bool = False,
    dict_key: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> bool:
    """Says whether nested containers hold equal values, and tensors that are close, of one shape, dtype and device.

    Args:
        raise_exception: raise where they differ.
        dict_key: path to show in the error.
        rtol, atol: as of :func:`torch.testing.assert_close`, for all tensors (fairscale: only for outermost ones).

    Raises:
        AssertionError, ValueError: they differ, and ``raise_exception`` is set; ValueError for types, keys, lengths.
    """
    try:
        _compare(a, b, dict_key or "", rtol, atol)
    except (AssertionError, ValueError):
        if raise_exception:
            raise
        return False
    return True


def _compare(a: Tree, b: Tree, path: str, rtol: float | None, atol: float | None) -> None:
    if type(a) is not type(b):
        raise ValueError(f"{path}: {type(a)} and {type(b)}")
    if isinstance(a, (list, tuple)):
        a, b = dict(enumerate(a)), dict(enumerate(b))
    if isinstance(a, dict):
        if a.keys() != b.keys():
            raise ValueError(f"{path}: keys {list(a)} and {list(b)}")
        for key in a:
            _compare(a[key], b[key], f"{path}[{key!r}]", rtol, atol)
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text: f"{path}: {text}")
    elif a != b:
        raise AssertionError(f"{path}: {a!r} and {b!r}")


def check_same_model_params(model_a: nn.Module, model_b: nn.Module, message: str = "") -> None:
    """Raises AssertionError unless parameters and buffers are close."""
    ours, theirs = ([*m.parameters(), *m.buffers()] for m in (model_a, model_b))
    for a, b in zip(ours, theirs, strict=True):
        if not torch.allclose(a, b, atol=1e-3):
            raise AssertionError(f"models differ: {a} and {b}\n{message}")


def check_same_models_across_ranks(
    model: nn.Module,
    process_group: dist.ProcessGroup | None,
    params_should_be_equal: bool,
    check_broadcast_buffers: bool,
) -> None:
    """Raises AssertionError on all ranks unless their models agree (collective; fairscale: on rank 0).

    Args:
        process_group: ranks to compare; None for all.
        params_should_be_equal: False: nothing has to agree, the ranks only meet.
        check_broadcast_buffers: compare buffers, too.
    """
    for tensor in [*model.parameters(), *(model.buffers() if check_broadcast_buffers else ())]:
        tensor = tensor.detach().contiguous()
        everywhere = [torch.empty_like(tensor) for _ in range(dist.get_world_size(process_group))]
        dist.all_gather(everywhere, tensor, group=process_group)
        if params_should_be_equal and any(not torch.equal(everywhere[0], other) for other in everywhere):
            raise AssertionError(f"models differ between ranks: {everywhere}")


def state_dict_norm(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the sum of the norms of a state dict's tensors, [1]."""
    return torch.stack([v.float().norm() for v in state.values()]).sum().reshape(1)


def dump_all_tensors(rank: int) -> None:
    """Prints all tensors that are alive; on rank 0."""
    for x in gc.get_objects() if rank == 0 else ():
        if issubclass(type(x), torch.Tensor):
            print(type(x), x.shape, x.dtype, x.device)


def find_tensor_by_shape(target_shape: tuple[int, ...], only_param: bool = True) -> bool:
    """Says whether a tensor of this shape is alive.

    Args:
        only_param: look at parameters only.
    """
    kind = torch.nn.Parameter if only_param else torch.Tensor
    # type(), not isinstance(): the latter runs code of what it finds (proxies, lazy modules)
    return any(x.shape == tuple(target_shape) for x in gc.get_objects() if issubclass(type(x), kind))


# ------------------------------------------------------------ processes
def make_cudnn_deterministic() -> None:
    """Makes cuDNN and matrix products give the same bits each time: no autotuning, no TF32."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")


def dist_init(rank: int, world_size: int, filename: str, filename_rpc: str = "") -> bool:
    """Joins a process group of ranks on one machine that meet in a file: NCCL where there are GPUs, else gloo.

    Args:
        rank, world_size: this rank and how many there are.
        filename: the file, the same on all ranks.
        filename_rpc: a second one; starts torch.distributed.rpc too.

    Returns:
        False, and nothing was done, if there are GPUs but fewer than ranks.
    """
    accelerators = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator()
    if 0 < accelerators < world_size:
        return False
    os.environ["WORLD_SIZE"] = str(world_size)
    os.environ["RANK"] = str(rank)
    backend = dist.get_default_backend_for_device("cpu")
    if kind is not None and accelerators:
        torch.accelerator.set_device_index(rank % accelerators)
        backend = dist.get_default_backend_for_device(kind)
    dist.init_process_group(backend, rank=rank, world_size=world_size, init_method=f"file://{filename}")
    if filename_rpc:
        from torch.distributed import rpc

        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{filename_rpc}")
        rpc.init_rpc(f"Test{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    return True


def teardown() -> None:
    """Leaves what :func:`dist_init` joined; harmless if that was nothing."""
    destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    if dist.rpc.is_available():
        with contextlib.suppress(RuntimeError):  # rpc was not started
            dist.rpc.shutdown(graceful=False)


def rmf(filename: str) -> None:
    """Deletes a file if it exists."""
    Path(filename).unlink(missing_ok=True)


@contextlib.contextmanager
def temp_files_ctx(num: int) -> Iterator[tuple[str, ...]]:
    """Makes that many empty temporary files, which are deleted afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(k)) for k in range(num)]
        for file in files:
            file.touch()
        yield tuple(map(str, files))


def get_worker_map() -> dict[int, str]:
    """Returns each rank's name for torch.distributed.rpc."""
    return {rank: f"Test{rank}" for rank in range(dist.get_world_size())}


def get_world_sizes() -> list[int]:
    """Lists 1, 2, 4 and 8, as far as there are devices: none without an accelerator."""
    return [n for n in (1, 2, 4, 8) if n <= torch.accelerator.device_count()]


def test_runner(
    rank: int,
    test_func: AnyCallable,
    deterministic: bool = False,  # noqa: PT028 (no test)
    *args: Tree,
    **kwargs: Tree,
) -> None:
    """Calls ``test_func(rank, *args, **kwargs)``, with ``deterministic`` after seeding."""
    if deterministic:
        make_cudnn_deterministic()
        torch.manual_seed(1357)
    test_func(rank, *args, **kwargs)


test_runner.__test__ = False  # type: ignore[attr-defined]  # where it is imported, pytest would collect it


def spawn_for_all_world_sizes(
    test_func: AnyCallable,
    world_sizes: Sequence[int] | None = None,
    args: Args = (),
    deterministic: bool = False,
) -> None:
    """Calls ``test_func(rank, world_size, file, file for rpc, *args)`` in a process for each rank of each world size.

    Args:
        test_func: can be pickled.
        world_sizes: default: :func:`get_world_sizes`.
        args: further arguments.
        deterministic: see :func:`test_runner`.
    """
    for world_size in get_world_sizes() if world_sizes is None else world_sizes:
        with temp_files_ctx(2) as files:
            spawn(test_runner, (test_func, deterministic, world_size, *files, *args), nprocs=world_size)


def worker_process(
    rank: int,
    world_size: int,
    filename: str,
    filename_rpc: str,
    func: AnyCallable,
    args: Args,
    error_queue: SimpleQueue[str],
) -> None:
    """Calls ``func(*args)`` in a rank of :func:`torch_spawn`, with process groups and pipelines' model parallelism."""
    if not dist_init(rank, world_size, filename, filename_rpc):
        teardown()
        return
    try:
        initialize_model_parallel(1, world_size, pipeline_backend="gloo")
        with torch.backends.cudnn.flags(benchmark=False, deterministic=True):
            func(*args)
    except BaseException as error:
        if type(error).__name__ != "Skipped":  # pytest's, for the process that started this one
            raise
        error_queue.put(str(error))
    finally:
        teardown()


def torch_spawn(world_sizes: Sequence[int] | None = None) -> Callable[[AnyCallable], AnyCallable]:
    """Decorates a function that is to be tested on ranks: its module gets ``test_<name>``, which pytest collects.

    The function takes the test's fixtures and parameters; ``rank`` among them is not passed.

    Args:
        world_sizes: default: :func:`get_world_sizes`.

    Raises:
        ConfigurationError: its name begins with ``test``: pytest would run it as it is.
    """

    def prepare_test(func: AnyCallable) -> AnyCallable:
        if func.__name__.startswith("test"):
            raise ConfigurationError(
                f"a function under @torch_spawn gets its test as test_{func.__name__}; its own name must not begin "
                "with test"
            )
        names = [name for name in inspect.signature(func).parameters if name != "rank"]

        @functools.wraps(func)
        def replacement(**kwargs: Tree) -> None:
            skipped = multiprocessing.get_context("spawn").SimpleQueue()
            args = tuple(kwargs[name] for name in names)
            spawn_for_all_world_sizes(worker_process, world_sizes, (func, args, skipped))
            if not skipped.empty():
                import pytest

                pytest.skip(skipped.get())

        func.__globals__[f"test_{func.__name__}"] = replacement
        return func

    return prepare_test


# ------------------------------------------------------------ models
class IdentityLayer(nn.Module):
    """A parameter as a module: forward returns it.

    Args:
        scale: standard deviation of its values.
    """

    def __init__(self, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(scale * torch.randn(size))

    def forward(self, *_: object, **__: object) -> torch.Tensor:
        return self.weight


class _Block(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(embed_dim)
        self.ln_2 = nn.LayerNorm(embed_dim)
        self.attn = nn.MultiheadAttention(embed_dim, num_heads)
        self.mlp = nn.Sequential(
            nn.Linear(embed_dim, embed_dim * 4), nn.GELU(), nn.Linear(embed_dim * 4, embed_dim)
        )

    def forward(self, *inputs: torch.Tensor, **kwargs: object) -> torch.Tensor:
        x = self.ln_1(inputs[0])  # [T, B, E]
        hidden = torch.full((len(x), len(x)), -torch.inf, device=x.device, dtype=x.dtype).triu(1)
        x = x + self.attn(x, x, x, attn_mask=hidden, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """A small image-GPT.

    Args:
        embed_dim, num_heads, num_layers: of the transformer.
        num_classes: number of classes of a sequence.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        num_positions: int,
        num_vocab: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.sos = nn.Parameter(torch.randn(embed_dim))  # start of sequence
        self.token_embeddings = nn.Embedding(num_vocab, embed_dim)
        self.position_embeddings = nn.Embedding(num_positions, embed_dim)
        self.layers = nn.ModuleList(_Block(embed_dim, num_heads) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_vocab, bias=False)
        self.clf_head = nn.Linear(embed_dim, num_classes)

    def forward(
        self, x: torch.Tensor, classify: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Returns logits of tokens [T, B, vocabulary]; with ``classify``, logits of classes [B, classes] before them.

        Args:
            x: tokens [T, B], int64.
            classify: whether to classify the sequence too.
        """
        h = self.token_embeddings(x)  # [T, B, E]
        h = torch.cat([self.sos.expand(1, x.shape[1], -1), h[:-1]])
        h = h + self.position_embeddings(torch.arange(len(x), device=x.device))[:, None]
        for layer in self.layers:
            h = layer(h)
        h = self.ln_f(h)
        logits = self.head(h)
        return (self.clf_head(h.mean(0)), logits) if classify else logits


class DeviceAndTypeCheckModule(nn.Module):
    """A layer and a loss that raise AssertionError where a tensor has not the dtype or device that is expected.

    Args:
        expected_*: what to expect; None: anything.
    """

    def __init__(
        self,
        expected_input_dtype: torch.dtype | None = None,
        expected_input_device: torch.device | None = None,
        expected_param_dtype: torch.dtype | None = None,
        expected_param_device: torch.device | None = None,
        expected_loss_dtype: torch.dtype | None = None,
        expected_loss_device: torch.device | None = None,
        expected_buffer_dtype: torch.dtype | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name.startswith("expected_")}
        super().__init__()
        vars(self).update(given)
        self.linear = nn.Linear(5, 5)
        self.buffer: torch.Tensor
        self.register_buffer("buffer", torch.rand(5))

    def _check(self, what: str, tensor: torch.Tensor) -> None:
        for fact in ("dtype", "device"):
            found, expected = getattr(tensor, fact), vars(self).get(f"expected_{what}_{fact}")
            if expected is not None and found != expected:
                raise AssertionError(f"{what}.{fact} is {found}, expected {expected}")

    def forward(self, *input: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Returns a number, from input [B, 5]."""
        self._check("input", input[0])
        self._check("param", self.linear.weight)
        self._check("buffer", self.buffer)
        loss = (self.linear(input[0] + self.buffer) + self.buffer).sum()
        self._check("loss", loss)
        return loss


# ------------------------------------------------------------ gradients of two micro-batches, and AdaScale's gains
_Matrix = list[list[float]]


def _mean(rows: _Matrix) -> list[float]:
    """Returns the mean gradient, as fp32 has it."""
    return torch.tensor(rows).mean(0).tolist()  # type: ignore[no-any-return]


def _adascale(iterations: list[_Matrix], gain: float) -> StateDict:
    """Makes one case of [iterations][2 micro-batches][2 features] and the gain after the last."""
    given = {"input": iterations[0]} if len(iterations) == 1 else {"inputs": iterations}
    grad = _mean(iterations[-1])
    return {**given, "expected_gain": gain, "expected_grad": [grad, grad], "expected_bias_grad": [1.0, 1.0]}


adascale_test_data: list[StateDict] = [
    _adascale([[[1.0, 0], [0, 1.0]]], 4.0 / 3),
    _adascale([[[1.0, 1.0], [1.0, 1.0]]], 1.0000001249999846),
    _adascale([[[-1.0, 1.0], [1.0, -1.0]]], 2.0),
    _adascale([[[1.0, 4.0], [5.0, 0.5]]], 1.4688796680497926),
    _adascale([[[-0.2, 3.0], [5.0, 0.5]]], 1.8472893901708),
    # smoothing takes part from the second iteration on
    _adascale([[[-0.2, 3.3], [5.2, 0.7]], [[1.0, 4.0], [3.1, 0.1]]], 1.6720968158031417),
]

_THREE: list[_Matrix] = [
    [[1.0, 0.0, 2.0], [2.0, 0.0, 1.0]],
    [[0.0, 1.0, 2.0], [2.0, 1.0, 0]],
    [[3.0, 1.0, 2.0], [2.0, 1.0, -1.0]],
]
corr_mean_test_data: list[StateDict] = [
    {
        "inputs": _THREE,
        "expected_grad": [_mean(rows) for rows in _THREE],
        "expected_corr": [0.5, -1.0, 0.327327],  # Pearson's, of the two micro-batches
        "expected_cos_similarity": [float("nan"), 0.8165, 0.8433],
    }
]
