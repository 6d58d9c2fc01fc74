"""torch's grouped product (torch._grouped_mm) for each pass, one dense product (cuBLAS by torch.mm) and a copy.

    python benchmarks/hopper/grouped/torch_bench.py OUT_FOLDER

Times are the median of 20 calls by CUDA events. Lines are printed and written to OUT_FOLDER/torch.txt, microseconds
and the copy's TB/s to OUT_FOLDER/torch.json. bench.py runs this by itself.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics

import torch
from plan import SHAPES, sizes_of

CALLS = 20
COPIED_BYTES = 1 << 32


def timed(function, *arguments):
    """Median microseconds of a call."""
    for _ in range(3):
        function(*arguments)
    times = []
    for _ in range(CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function(*arguments)
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in times) * 1e3


def drawn(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def passes(m, k, n, groups):
    """{pass: function of the ends of the groups}."""
    lhs, rhs, dout = drawn(m, k), drawn(groups, k, n), drawn(m, n)
    mm = torch._grouped_mm
    return {
        "forward": lambda offs: mm(lhs, rhs, offs=offs),
        "lhs": lambda offs: mm(dout, rhs.transpose(1, 2), offs=offs),
        "rhs": lambda offs: mm(lhs.t(), dout, offs=offs),
    }


def times_of(label):
    """{"dense", "forward uneven", "forward even", ..: microseconds or the exception} of a shape."""
    m, k, n, groups = SHAPES[label]
    found = {"dense": timed(torch.mm, drawn(m, k), drawn(k, n))}
    for which, call in passes(m, k, n, groups).items():
        for sizes in ("uneven", "even"):
            ends = torch.tensor(sizes_of(label, sizes == "even").cumsum(), dtype=torch.int32, device="cuda")
            try:
                found[f"{which} {sizes}"] = timed(call, ends)
            except Exception as error:  # noqa: BLE001 - it stands in the table; the other passes go on
                found[f"{which} {sizes}"] = error
    return found


def line_of(label, what, time):
    if isinstance(time, Exception):
        return f"{label:5}{what:16} FAILED {str(time)[:150]}"
    m, k, n, _ = SHAPES[label]
    return f"{label:5}{what:16}{time:9.1f} us {2 * m * k * n / time / 1e6:6.1f} TFLOP/s"


def copy_rate():
    """TB/s of a large copy, counting both ways."""
    x = torch.empty(COPIED_BYTES, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    return 2 * COPIED_BYTES / timed(y.copy_, x) / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, metavar="OUT_FOLDER", help="made if there is none")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lines, found = [], {}
    for label in SHAPES:
        times = times_of(label)
        lines += [line_of(label, what, time) for what, time in times.items()]
        found[label] = {what: time for what, time in times.items() if not isinstance(time, Exception)}
        torch.cuda.empty_cache()
    found["copy"] = copy_rate()
    lines.append(f"copy {found['copy']:.2f} TB/s")
    print("\n".join(lines))
    (options.out / "torch.txt").write_text("\n".join(lines) + "\n")
    (options.out / "torch.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
