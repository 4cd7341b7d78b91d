"""Triton is asked once for each kind of arguments."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

#: In a process of its own, because interpreted kernels are not compiled.
SCRIPT = """
import itertools, torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature
from lowbit.kernels import start
from lowbit.kernels.cases import cases
from lowbit.kernels.spec import Launch

def own(one):
    kernel = one.kernel
    binder = create_function_from_signature(kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", 90, 32)))
    _, specialization, _ = binder(**one.arguments)
    return str(specialization)

data = torch.zeros(1 << 16, dtype=torch.uint8)
def variants(one):
    for value in (1, 2, 3, 16, 48, 2**31 - 1, 2**31 + 15):
        for shift in (0, 8):
            arguments = dict(one.arguments)
            for parameter in one.kernel.params:
                given = arguments[parameter.name]
                if isinstance(given, torch.Tensor):
                    size = given.element_size()
                    arguments[parameter.name] = data[shift : shift + 16].view(given.dtype)
                elif isinstance(given, int) and not parameter.is_constexpr:
                    arguments[parameter.name] = value
            yield one._replace(arguments=arguments)

seen = {}
for case in [case for case in cases() if case.fast][::7]:
    for one in case.launches:
        for variant in variants(one):
            ours, theirs = start.specialization(variant), (variant.kernel, own(variant))
            assert seen.setdefault(ours, theirs) == theirs, (case.name, ours)
print(len(seen))

class Kernel:
    def __init__(self, like): self.params, self.asked, self.started = like.params, 0, []
    def __getitem__(self, grid):
        def ask(**arguments):
            self.asked += 1
            return self.compiled()
        return ask
    def compiled(self):
        kernel = self
        class Compiled:
            def __getitem__(self, grid): return lambda *arguments: kernel.started.append((grid, arguments))
        return Compiled()

torch.cuda.current_device = lambda: 0
one = next(variants(next(case for case in cases() if case.fast).launches[0]))
kernel = Kernel(one.kernel)
for _ in range(3):
    start.run([Launch(kernel, (7,), one.arguments)])
assert kernel.asked == 1 and len(kernel.started) == 2, (kernel.asked, len(kernel.started))
grid, given = kernel.started[0]
assert grid == (7, 1, 1) and len(given) == len(kernel.params)
"""


@pytest.mark.slow
def test_kinds_are_told_apart_where_triton_tells_them_apart_and_each_is_asked_for_once():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
