"""Within an instruction set, kernels use what more the processor has; an older one, which lacks it, must do as well.

``LOWBIT_WITHOUT`` hides features from a process, in which the products are then tested again.
"""

from __future__ import annotations

import pytest
from support.older import ask_for_instruction_sets, check_products
from support.processes import run_processes
from support.variants import isas
from torch.multiprocessing import ProcessRaisedException

#: What an older processor of the same instruction set lacks, youngest first.
LEVELS = {
    "without matrix registers": ("amx_tile",),
    "Cooper Lake": ("avx512_vbmi",),
    "Ice Lake": ("avx512_bf16",),
    "Cascade Lake": ("avx512_vbmi", "avx512_bf16"),
    "Skylake": ("avx512_vbmi", "avx512_bf16", "avx512_vnni"),
}


@pytest.mark.slow
@pytest.mark.skipif("avx512" not in isas(), reason="this processor has no AVX-512")
@pytest.mark.parametrize("level", LEVELS)
def test_products_on_an_older_processor(level):
    from lowbit import _native

    hidden = tuple(f for f in LEVELS[level] if f in _native.cpu_features())
    if not hidden:
        pytest.skip(f"this processor has none of {', '.join(LEVELS[level])} itself")
    run_processes(check_products, (hidden,), 1)


@pytest.mark.skipif(not isas(), reason="without the compiled extension")
def test_an_unknown_feature_is_an_error():
    told = "LOWBIT_WITHOUT: unknown processor feature 'avx1024'"
    with pytest.raises(ProcessRaisedException, match=told):
        run_processes(ask_for_instruction_sets, (("avx1024",),), 1)
