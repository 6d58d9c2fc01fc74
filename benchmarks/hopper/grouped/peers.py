"""torch's grouped product (torch._grouped_mm), one dense product (cuBLAS by torch.mm) and a copy, for bench.py."""

from __future__ import annotations

import torch
from plan import SHAPES, sizes_of

COPIED_BYTES = 1 << 32


def grouped(where, which, kind, operands):
    """The grouped product of a pass, on the operands of ours, as a function."""
    a, b = (torch.from_dlpack(x) for x in operands)
    ends = torch.tensor(sizes_of(where, kind).cumsum(), dtype=torch.int32, device="cuda")
    if which == "lhs":
        b = b.transpose(1, 2)
    elif which == "rhs":
        a = a.t()
    return lambda: torch._grouped_mm(a, b, offs=ends)


def dense(where):
    """One product with M, K and N of the shape, as a function."""
    m, k, n, _ = SHAPES[where]
    a, b = (torch.randn(*x, device="cuda", dtype=torch.bfloat16) for x in ((m, k), (k, n)))
    return lambda: torch.mm(a, b)


def copy():
    """A large copy as a function; it moves twice COPIED_BYTES."""
    x = torch.empty(COPIED_BYTES, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    return lambda: y.copy_(x)


def wait():
    torch.cuda.synchronize()
