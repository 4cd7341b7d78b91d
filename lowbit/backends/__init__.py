"""Backends: tables of kernels. Each backend is a module with ``IMPLS`` and ``unavailable()``."""

from __future__ import annotations

from importlib import import_module

from lowbit.backends import dispatch, native, registry, steps

#: Names of the backends, which are modules of this package.
BACKENDS = ("reference", "cpu", "cuda", "triton", "delegated")


def _load() -> None:
    for name in BACKENDS:
        module = import_module(f"lowbit.backends.{name}")
        reason = module.unavailable()
        if reason is None:
            registry.add(native.with_warning(module.IMPLS) if name == "reference" else module.IMPLS)
        else:
            registry.set_absent(name, reason)
    dispatch.register_all()
    steps.register()


_load()
