"""Streaming of blocks for models larger than memory: a block's parameters are loaded only while it computes.

Source: Ren et al., "ZeRO-Infinity", arXiv 2104.07857, section 5; here a block's tensors move together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowbit.autograd import uncompiled
from lowbit.combinations import refusal
from lowbit.memory.estimator import WITHOUT_ESTIMATE
from lowbit.models.blocks import find_blocks
from lowbit.models.check import check_model
from lowbit.models.ties import storage
from lowbit.models.wrap import Wrapper, unwrap_all, wrap, wrapper_of
from lowbit.nn.experts import stack_experts_
from lowbit.offload.activations import unmodified
from lowbit.report import Report, report_on
from lowbit.storage.directory import ScratchDirectory
from lowbit.storage.mapped import drop_pages, mapped_like, read_ahead
from lowbit.storage.targets import side_stream
from lowbit.torch_private import FakeTensor, after_backward, graph_task, saved_tensors_hooks

__all__ = ["LEAST", "is_streamed", "stream_blocks_", "unstream_"]

#: Tensors with fewer bytes are not streamed.
LEAST = 4096


def stream_blocks_(
    model: nn.Module, to: str | os.PathLike[str] = "cpu", blocks: Iterable[nn.Module] | None = None
) -> Report:
    """Stream the parameters and buffers of each block from host memory or files, in place.

    On a CUDA device, a block's tensors are copied to it before its forward and its backward, and freed afterwards. The
    next block's tensors are prefetched on another stream. Between calls the tensors and their gradients are on the CPU,
    so the optimizer steps there. On the CPU, the tensors are mapped from files, and their pages are dropped after use.

    Results are bit-identical. Names, ``state_dict`` and optimizers work as before. Gradients of parameters stay in
    memory unless ``lowbit.optim.offload_(..., gradients=True)`` offloads them. Tensors smaller than 4 KiB, and tensors
    that share memory with a module outside the block, are not streamed. torch.compile does not compile the blocks.
    Files belong to this process: save the model with ``state_dict`` or ``lowbit.save_model``.

    Args:
        model: The model.
        to: ``"cpu"`` for pinned host memory, if the model is on a CUDA device; or a directory.
        blocks: Modules of the model. Default: ``find_blocks`` of the model.

    Returns:
        A Report; ``bytes_after`` are the bytes that stay in memory between calls.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: The model has no blocks, is streamed already, is on the meta device or has DTensors.
        ValueError: ``to="cpu"`` and the model is on the CPU.
        OSError: The disk is full. The model has not changed.
    """
    check_model(model)
    units = list(dict.fromkeys(find_blocks(model) if blocks is None else blocks))
    names = {id(module): name for name, module in model.named_modules()}
    if not units or not all(id(block) in names for block in units):
        raise ValueError(
            f"memory.stream_blocks_: expected blocks that are modules of the model, "
            f"{'got others' if units else f'found none in {type(model).__name__}'}; pass blocks=[...], taken from it"
        )
    if is_streamed(model):
        raise ValueError("memory.stream_blocks_: the model is streamed already; call lowbit.memory.unstream_ first")
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        raise ValueError(refusal("stream dtensor", "memory.stream_blocks_"))
    _require_data(model)
    tensors = [_movable(model, block) for block in units]
    if to == "cpu" and any(t.device.type == "cpu" for block_tensors in tensors for t in block_tensors):
        raise ValueError(
            'memory.stream_blocks_: to="cpu" is for models on CUDA devices, but this one is on the CPU; give a '
            "directory"
        )
    files = None if to == "cpu" else ScratchDirectory(to)
    stream = _Stream([_storage_class(block_tensors)(block_tensors, files) for block_tensors in tensors])
    for index, block in enumerate(units):
        stream.blocks[index].attach()
        wrap(block, Streamed(stream, index))
    stream.evict_all()
    report = report_on("memory.stream_blocks_", model, {names[id(block)]: block for block in units}, "streamed")
    return _without(report, "bytes_after", stream.blocks)


def unstream_(model: nn.Module) -> Report:
    """Undo ``stream_blocks_``, in place: all tensors are in memory again, on their device.

    Args:
        model: The model. One that is not streamed does not change.

    Returns:
        A Report; its bytes before are the bytes that were in memory between calls.

    Raises:
        ValueError: Something has replaced the forward of a block since. The model has not changed.
    """
    check_model(model)
    removed = unwrap_all(model, "memory.unstream_", Streamed)
    blocks = {path: model.get_submodule(path) for path, _ in removed}
    streamed = [wrapper.stream.blocks[wrapper.index] for _, wrapper in removed]
    for block in streamed:
        block.restore()
    stack_experts_(model)
    report = report_on("memory.unstream_", model, blocks, "in memory")
    return _without(report, "bytes_before", streamed)


def _without(report: Report, side: str, blocks: Iterable[_Mapped | _Copied]) -> Report:
    """Subtract the streamed tensors of blocks from one side of the report, ``bytes_before`` or ``bytes_after``."""
    sizes = [sum(tensor.nbytes for tensor in block.tensors) for block in blocks]
    rows = tuple(
        replace(row, **{side: getattr(row, side) - size}) for row, size in zip(report.layers, sizes, strict=True)
    )
    return replace(report, layers=rows, **{side: getattr(report, side) - sum(sizes)})


def is_streamed(model: nn.Module) -> bool:
    """Whether blocks of ``model`` are streamed."""
    return any(wrapper_of(module, Streamed) for module in model.modules())


WITHOUT_ESTIMATE["stream estimate"] = is_streamed


def _require_data(model: nn.Module) -> None:
    """Raise ValueError if tensors of ``model`` are fake or on the meta device."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, FakeTensor):
            raise ValueError(refusal("stream estimate", "memory.stream_blocks_"))
        if tensor.device.type == "meta":
            raise ValueError(
                f"memory.stream_blocks_: expected weights with data, but {name!r} is on the meta device; load them "
                f"first (lowbit.load_model, or model.to_empty(device=...) and load_state_dict)"
            )


def _movable(model: nn.Module, block: nn.Module) -> list[Tensor]:
    """The tensors of a block that share no memory with another tensor, each once."""
    tensors = list({id(t): t for t in (*block.parameters(), *block.buffers())}.values())
    inside = {id(module) for module in block.modules()}
    outside_modules = [module for module in model.modules() if id(module) not in inside]
    outside = {storage(t) for m in outside_modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
    separate = _separate(tensors)
    return [
        tensor
        for tensor in tensors
        if type(tensor) in (Tensor, nn.Parameter)
        and tensor.nbytes >= LEAST
        and id(tensor) in separate
        and storage(tensor) not in outside
    ]


def _separate(tensors: list[Tensor]) -> set[int]:
    """The ``id`` of tensors that overlap with no other one, including disjoint views of one storage."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault(storage(tensor), []).append(tensor)
    separate: set[int] = set()
    for views in by_storage.values():
        if len(views) > 1:
            views.sort(key=Tensor.data_ptr)
            apart = all(a.data_ptr() + a.nbytes <= b.data_ptr() for a, b in pairwise(views))
            if not apart or not all(view.is_contiguous() for view in views):
                continue
        separate.update(map(id, views))
    return separate


# -- the tensors of a block --------------------------------------------------------------------------------------------
class _Mapped:
    """CPU tensors that are mapped from files: the system reads them when they are used."""

    def __init__(self, tensors: list[Tensor], files: ScratchDirectory | None) -> None:
        assert files is not None
        self.tensors = tensors
        self.homes = [_filled(mapped_like(tensor, files), tensor) for tensor in tensors]

    def attach(self) -> None:
        for tensor, home in zip(self.tensors, self.homes, strict=True):
            tensor.data = home

    def start(self) -> None:
        for tensor in self.tensors:
            read_ahead(tensor)

    def load(self) -> None:
        """Nothing to do: the system loads pages on access."""

    def evict(self) -> None:
        for tensor in self.tensors:
            drop_pages(tensor)

    def restore(self) -> None:
        for tensor in self.tensors:
            tensor.data = tensor.detach().clone()


class _Copied:
    """Tensors that are on the CPU except between ``load`` and ``evict``, when they are on their device.

    Their gradients are on the CPU too, and accumulate there.
    """

    def __init__(self, tensors: list[Tensor], files: ScratchDirectory | None) -> None:
        self.tensors, self.files = tensors, files
        self.devices = [tensor.device for tensor in tensors]
        self.copies: list[Tensor] | None = None  # on the device; the copy may still be running
        self.loaded = False
        self.homes = [_filled(self._home(tensor), tensor) for tensor in tensors]
        self.versions = [0 for _ in tensors]
        self.gradients: list[Tensor | None] = [None for _ in tensors]

    def attach(self) -> None:
        for tensor, home in zip(self.tensors, self.homes, strict=True):
            gradient, tensor.grad = tensor.grad, None
            tensor.data = home
            tensor.grad = None if gradient is None else gradient.to("cpu")

    def _home(self, tensor: Tensor) -> Tensor:
        if self.files is not None:
            return mapped_like(tensor, self.files)
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)

    def start(self) -> None:
        """Start copying them to the device."""
        if self.copies is not None:
            return
        with torch.no_grad():
            self.copies = [_copied(home, device) for home, device in zip(self.homes, self.devices, strict=True)]

    def load(self) -> None:
        if self.loaded:
            return
        self.start()
        assert self.copies is not None
        for device in set(self.devices):
            if device.type == "cuda":
                torch.cuda.current_stream(device).wait_stream(side_stream(device))
        for index, (tensor, copy) in enumerate(zip(self.tensors, self.copies, strict=True)):
            if copy.is_cuda:
                copy.record_stream(torch.cuda.current_stream(copy.device))
            self.gradients[index], tensor.grad = tensor.grad, None
            tensor.data = copy
            self.versions[index] = tensor._version
        self.loaded = True

    @torch.no_grad()
    def evict(self) -> None:
        if self.loaded:
            for index, (tensor, home) in enumerate(zip(self.tensors, self.homes, strict=True)):
                if tensor._version != self.versions[index]:
                    home.copy_(tensor)  # such as running statistics of a BatchNorm
                gradient, before = tensor.grad, self.gradients[index]
                tensor.grad, self.gradients[index] = None, None
                tensor.data = home
                added = None if gradient is None else gradient.to("cpu")
                tensor.grad = before if added is None else added if before is None else before.add_(added)
        if self.files is not None:
            for home in self.homes:
                drop_pages(home)
        self.copies, self.loaded = None, False

    def restore(self) -> None:
        self.evict()
        for tensor, home, device in zip(self.tensors, self.homes, self.devices, strict=True):
            gradient, tensor.grad = tensor.grad, None
            tensor.data = home.to(device, copy=True)
            tensor.grad = None if gradient is None else gradient.to(device)

    def owner(self, tensor: Tensor) -> int | None:
        """Index of the loaded tensor with the same storage."""
        key = storage(tensor)
        return next((i for i, loaded in enumerate(self.tensors) if self.loaded and storage(loaded) == key), None)


def _filled(home: Tensor, tensor: Tensor) -> Tensor:
    home.copy_(tensor.detach())
    return home


def _storage_class(tensors: list[Tensor]) -> type[_Mapped] | type[_Copied]:
    return _Mapped if all(tensor.device.type == "cpu" for tensor in tensors) else _Copied


def _copied(home: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return home.to(device, copy=True)
    with torch.cuda.stream(side_stream(device)):
        return home.to(device, non_blocking=True)


# -- the order of blocks -----------------------------------------------------------------------------------------------
class _Stream:
    """The blocks of a model; the resident ones are in memory."""

    def __init__(self, blocks: list[_Mapped | _Copied]) -> None:
        self.blocks, self.resident = blocks, list[int]()
        self.backward = -1  # graph task of the running backward pass; all blocks are evicted at its end

    def use(self, index: int, direction: int) -> None:
        """Load block ``index``, prefetch the next one in this direction, and evict the rest."""
        following = index + direction
        needed = [index, following] if 0 <= following < len(self.blocks) else [index]
        for unneeded in [number for number in self.resident if number not in needed]:
            self.blocks[unneeded].evict()
        self.blocks[index].load()
        for number in needed[1:]:
            self.blocks[number].start()
        self.resident = needed

    def evict_all(self) -> None:
        for block in self.blocks:
            block.evict()
        self.resident = []

    def before_backward(self, index: int, _: Tensor) -> None:
        """A gradient hook of the block's outputs."""
        running = graph_task()
        if self.backward != running:
            self.backward = running
            after_backward(self.evict_all)
        self.use(index, -1)

    # -- weights that autograd saves ---------------------------------------------------------------------------------
    def pack(self, block: _Copied, outer: Any, tensor: Tensor) -> Any:
        """Save a loaded weight as its index and layout, anything else by the ``outer`` hooks."""
        number = block.owner(tensor)
        if number is not None:
            layout = (tensor.size(), tensor.stride(), tensor.storage_offset())
            return partial(self._weight, block, number, tensor._version, tensor.dtype, layout)
        if outer is None:
            return partial(unmodified, tensor, tensor._version)
        return partial(outer[1], outer[0](tensor))

    def _weight(self, block: _Copied, number: int, version: int, dtype: torch.dtype, layout: tuple[Any, ...]) -> Tensor:
        if not block.loaded:  # no hook has run if no gradient of the block's output is needed
            block.load()
            self.resident.append(self.blocks.index(block))
        return unmodified(block.tensors[number], version).detach().view(dtype).as_strided(*layout)


@dataclass(eq=False)
class Streamed(Wrapper):
    """The wrapper of block ``index``."""

    stream: _Stream
    index: int

    @uncompiled
    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        recomputing = graph_task() != -1
        self.stream.use(self.index, -1 if recomputing else 1)
        tensors = self.stream.blocks[self.index]
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if isinstance(tensors, _Mapped):  # the tensors that autograd saves stay valid
            output = forward(*args, **kwargs)
        else:
            outer = saved_tensors_hooks()
            pack = partial(self.stream.pack, tensors, outer)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved()):
                output = forward(*args, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(partial(self.stream.before_backward, self.index))
        return output
