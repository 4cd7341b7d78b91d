"""This torch has what ``lowbit/torch_private.py`` uses of it, and it does what the docstrings there say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit import torch_private as private


def test_a_backward_pass_has_a_number_nodes_and_an_end():
    seen, ended = [], []
    x = torch.ones(3, requires_grad=True)
    before = private.sequence_number()
    y = (x * 2).exp()
    assert private.sequence_number() > before and private.graph_task() == -1

    def hook(grad: torch.Tensor) -> None:
        seen.append((private.graph_task(), private.current_node()._sequence_nr()))
        private.after_backward(lambda: ended.append(len(seen)))

    y.register_hook(hook)
    y.sum().backward()
    assert seen[0][0] >= 0 and before <= seen[0][1] < private.sequence_number() and ended == [1]


def test_hooks_of_gradients_are_read_and_replaced():
    param, calls = nn.Parameter(torch.ones(2)), []
    assert private.gradient_hooks(param) == {}
    param.register_post_accumulate_grad_hook(calls.append)
    hooks = private.gradient_hooks(param)
    assert len(hooks) == 1
    private.set_gradient_hooks(param, {})
    param.sum().backward()
    assert not calls
    private.set_gradient_hooks(param, hooks)
    param.sum().backward()
    assert len(calls) == 1


def test_hooks_of_saved_tensors_begin_and_end():
    packed = []
    pack, unpack = (lambda x: packed.append(x) or x), (lambda x: x)
    assert private.saved_tensors_hooks() is None
    private.push_saved_tensors_hooks(pack, unpack)
    try:
        assert private.saved_tensors_hooks() == (pack, unpack)
        torch.ones(2, requires_grad=True).exp()
    finally:
        private.pop_saved_tensors_hooks()
    assert private.saved_tensors_hooks() is None and len(packed) == 1


def test_versions_of_tensors():
    x = torch.ones(2)
    alias = private.with_version_of(x)
    x.add_(1)
    assert alias._version == x._version == 1 and alias.data_ptr() == x.data_ptr()
    with private.preserved_version(x):
        x.add_(1)
    assert x._version == 1 and x.tolist() == [3.0, 3.0]


def test_transforms_of_torch_func_and_forward_mode():
    levels = []

    def square(x: torch.Tensor) -> torch.Tensor:
        levels.append((private.functorch_level(), private.transforms_tensors()))
        return x * x

    torch.func.grad(square)(torch.tensor(2.0))
    with torch.autograd.forward_ad.dual_level():
        square(torch.tensor(2.0))
    square(torch.tensor(2.0))
    assert levels == [(1, (True, False)), (None, (False, True)), (None, (False, False))]


def test_guards_skip_autograd_and_subclasses():
    class Loud(torch.Tensor):
        __torch_function__ = private.disabled_torch_function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise RuntimeError("called")

    loud = private.make_subclass(Loud, torch.ones(2))
    with pytest.raises(RuntimeError, match="called"):
        loud + 1
    with private.below_torch_dispatch():
        assert type(loud + 1) is torch.Tensor
    x = torch.ones(2, requires_grad=True)
    with private.below_autograd():
        assert not (x * 2).requires_grad
    assert hasattr(private.single_level_function(), "apply")
    with private.single_level_functions():
        pass


def test_fake_tensors_refuse_addresses_and_modes_are_left():
    with private.FakeTensorMode() as mode:
        fake = torch.ones(2)
        assert private.is_fake(fake) and isinstance(fake, private.FakeTensor)
        with private.without_modes():
            assert not private.is_fake(torch.ones(2))
        with pytest.raises(private.DataDependentOutputException):
            fake.sum().item()
        with pytest.raises(private.DynamicOutputShapeException):
            fake.nonzero()
    meta = torch.empty(2, device="meta")
    private.refuse_data_pointer(meta)
    assert mode is not None and private.fake_tensor_log.name == "torch._subclasses.fake_tensor"


def test_holders_of_a_storage_are_counted():
    x = torch.ones(2)
    alone = private.storage_holders(x)
    view = x[:1]
    assert private.storage_holders(x) == alone + 1 and len(view) == 1


def test_kernels_without_public_names():
    a, b = torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)
    assert private.int_mm(a, b).unique().tolist() == [16]
    one = torch.ones(())
    product = private.scaled_mm(
        torch.ones(16, 32).to(torch.float8_e4m3fn), torch.ones(16, 32).to(torch.float8_e4m3fn).t(), one, one,
        out_dtype=torch.float32,
    )  # fmt: skip
    assert product.unique().tolist() == [32.0]
    tensors = [torch.ones(2), torch.ones(3)]
    private.foreach_add_(tensors, 1)
    private.foreach_copy_(tensors[:1], [torch.zeros(2)])
    assert [x.tolist() for x in tensors] == [[0.0, 0.0], [2.0, 2.0, 2.0]]
    private.assert_async(torch.tensor(True))
    with pytest.raises(RuntimeError, match="no input"):
        private.assert_async(torch.tensor(False), "no input")


def test_what_torch_knows_of_devices():
    assert private.dispatches_to("aten::add.Tensor", "CPU") and not private.dispatches_to("aten::linear", "CPU")
    assert private.has_foreach_kernels(torch.device("cuda")) and not private.profiling()
    assert isinstance(private.multiplies_bf16(), bool) and private.DeviceType.CPU is not None


def test_classes_of_layers_and_operators():
    assert isinstance(nn.Conv2d(1, 1, 1), private.ConvNd) and isinstance(nn.BatchNorm1d(1), private.BatchNorm)
    assert isinstance(nn.ConvTranspose2d(1, 1, 1), private.ConvTransposeNd)
    assert isinstance(nn.InstanceNorm1d(1), private.NormBase) and isinstance(nn.MaxPool2d(2), private.MaxPoolNd)
    assert isinstance(nn.AvgPool2d(2), private.AvgPoolNd)
    assert isinstance(torch.ops.aten.add.Tensor, private.OpOverload)


def test_shards_of_this_process(tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        param = dist.tensor.distribute_tensor(torch.ones(4), mesh)
        private.set_local_part(param, torch.zeros(4))
        assert private.local_part(param).tolist() == [0.0] * 4
    finally:
        dist.destroy_process_group()


def test_a_wrapper_subclass_has_a_shape_and_no_memory():
    class Empty(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    made = private.make_wrapper_subclass(
        Empty, (2, 3), strides=(1, 2), dtype=torch.bfloat16, device="cpu", storage_size=0
    )
    assert type(made) is Empty and made.shape == (2, 3) and made.stride() == (1, 2) and made.dtype == torch.bfloat16
    assert made.untyped_storage().nbytes() == 0


def test_modules_under_fully_shard_are_known(tmp_path):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert not private.is_fully_sharded(model[0])
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        assert private.is_fully_sharded(model[0]) and not private.is_fully_sharded(model[1])
    finally:
        torch.distributed.destroy_process_group()


def test_ops_of_quantized_graphs():
    ops, x = private.decomposed_ops(), torch.tensor([[-3.0, 0.24, 1.0], [0.0, 0.5, 200.0]])
    codes = ops.quantize_per_tensor(x, 0.5, 1, -128, 127, torch.int8)
    assert codes.tolist() == [[-5, 1, 3], [1, 2, 127]]
    assert ops.dequantize_per_tensor(codes, 0.5, 1, -128, 127, torch.int8).tolist() == [[-3, 0, 1], [0, 0.5, 63]]
    scale, zero = torch.tensor([[0.5], [2.0]]), torch.zeros(2, 1, dtype=torch.int64)
    rows = ops.quantize_per_token(x, scale, zero, -127, 127, torch.int8)
    assert ops.dequantize_per_token(rows, scale, zero, -127, 127, torch.int8, torch.float32).tolist() == [
        [-3, 0, 1], [0, 0, 200]
    ]  # fmt: skip
    groups = ops.dequantize_per_channel_group(
        torch.tensor([[1, 2, 3, 4]], dtype=torch.int8), torch.tensor([[0.5, 2.0]]), torch.tensor([[1, 0]]), -8, 7,
        torch.int8, 2, torch.float32,
    )  # fmt: skip
    assert groups.tolist() == [[0, 0.5, 6, 8]]
    channels = ops.dequantize_per_channel(codes, torch.tensor([1.0, 2.0]), None, 0, -128, 127, torch.int8)
    assert channels.tolist() == [[-5, 1, 3], [2, 4, 254]]
