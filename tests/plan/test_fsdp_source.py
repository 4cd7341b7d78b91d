"""The hooks of torch's FSDP2 whose moments ``lowbit.plan.fitting.sharing`` has written down."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

GROUP = _fsdp_param_group.FSDPParamGroup

#: Digests of the code of torch 2.13, whose steps on several processes were compared with the moments.
SEEN = {
    "unshard": "d03485ae",
    "wait_for_unshard": "a108a1f6",
    "pre_forward": "0621b216",
    "post_forward": "15391eeb",
    "pre_backward": "7fdad848",
    "post_backward": "53d60d47",
    "foreach_reduce": "52eb6f96",
}


def digest(function: object) -> str:
    """Of a function's code, without comments, docstring and layout."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    body = tree.body[0].body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del body[0]
    return hashlib.blake2b(ast.unparse(tree).encode(), digest_size=4).hexdigest()


HOOKS = {
    "unshard": GROUP.unshard,
    "wait_for_unshard": GROUP.wait_for_unshard,
    "pre_forward": GROUP.pre_forward,
    "post_forward": GROUP.post_forward,
    "pre_backward": GROUP.pre_backward,
    "post_backward": GROUP.post_backward,
    "foreach_reduce": inspect.unwrap(_fsdp_collectives.foreach_reduce),
}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the moments are those of torch 2.13")
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_those_that_the_moments_were_taken_from(name):
    assert digest(HOOKS[name]) == SEEN[name], (
        f"{name} of FSDP2 is another one in torch {torch.__version__}: compare the moments of "
        f"lowbit/plan/fitting/sharing.py with it (tests/plan/test_gpus.py measures processes), then record its digest"
    )
