"""PTX, SASS, registers and spills of Mosaic GPU kernels for Hopper, on a machine without a GPU.

    mkdir -p STUB && gcc -shared -fPIC -o STUB/libcuda.so.1 benchmarks/hopper/cuda_stub.c
    python benchmarks/hopper/inspect_sass.py --stub STUB --out OUT benchmarks/hopper/attention 8k/best d64causal/best

The kernel's folder has a plan.py whose `variants()` gives {name: function that lowers it for CUDA}; without names,
all are compiled. Each kernel's module goes to XLA's own Mosaic GPU compiler, in a process that finds a pretend CUDA
driver in STUB, one that says "sm_90". Needs jax 0.11 or newer with its CUDA 13 plugin
(`pip install "jax[cuda13]"`, which brings ptxas and nvdisasm). Linux only.

Prints a line a kernel, and leaves module, PTX, the report of ptxas, SASS and log in OUT/NAME. `serialized` means that
ptxas makes each wgmma wait for the one before. Counts of instructions are of the whole kernel, not of a loop.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax

SITE = pathlib.Path(jax.__file__).parent.parent
CHILD = "--compile-module"
NUMBERS = {
    "registers": r"Used (\d+) registers",
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
}
INSTRUCTIONS = (
    *("HGMMA", "WARPGROUP.DEPBAR", "WARPGROUP.ARRIVE", "MUFU.EX2", "STL", "LDL", "BSSY"),
    *("FMUL", "FFMA", "FMNMX", "FADD", "MOV", "SHFL", "SYNCS", "F2FP"),
)


def modules_of(lowered):
    """The serialised Mosaic GPU modules inside a lowered computation."""
    from jax._src.lib.mlir import ir

    found = []

    def visit(operation):
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and "mosaic_gpu" in str(attributes["call_target_name"]):
            config = (
                attributes["mhlo.backend_config"]
                if "mhlo.backend_config" in attributes
                else attributes["backend_config"]
            )
            found.append(ir.StringAttr(config["module"]).value_bytes)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    return found


def compile_module(module):
    import jax_plugins.xla_cuda13 as plugin

    library = ctypes.CDLL(plugin._get_library_path())
    library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.MosaicGpuCompile.restype = ctypes.c_void_p
    if not library.MosaicGpuCompile(module, len(module)):
        raise RuntimeError("MosaicGpuCompile failed")


def compile_lowered(lowered, folder, stub):
    """Compile the one kernel of a lowered computation in a process of its own, and leave the dumps in the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    [module] = modules_of(lowered)
    path = folder / "module.bin"
    path.write_bytes(module)
    root = SITE / "nvidia" / "cu13"
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(stub.resolve()),
        "MOSAIC_GPU_CUDA_ROOT": str(root),
        "PATH": f"{root}/bin:{os.environ['PATH']}",
        "MOSAIC_GPU_RUNTIME_LIB_PATH": str(SITE / "jax_cuda13_plugin" / "libmosaic_gpu_runtime.so"),
        "MOSAIC_GPU_DUMP_TO": str(folder.resolve()),
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, __file__, CHILD, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"no SASS; the end of {folder / 'log.txt'}:\n{done.stderr[-600:]}")


def summary(folder):
    """Registers, spills and instruction counts from the dumps."""
    text = "\n".join(p.read_text(errors="replace") for p in folder.iterdir() if p.suffix in (".ptxas", ".txt"))
    found = {}
    for key, pattern in NUMBERS.items():
        match = re.search(pattern, text)
        found[key] = int(match.group(1)) if match else None
    found["serialized"] = "serializ" in text
    for sass in folder.glob("*.sass*"):
        body = sass.read_text()
        for name in INSTRUCTIONS:
            found[name] = len(re.findall(rf"\b{re.escape(name)}\b", body))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stub", type=pathlib.Path, required=True, help="folder with the pretend libcuda.so.1")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the dumps")
    parser.add_argument("kernel", type=pathlib.Path, help="folder of the kernel, with its plan.py")
    parser.add_argument("names", nargs="*", metavar="NAME", help="variants; all without")
    options = parser.parse_args()
    if not (options.stub / "libcuda.so.1").exists():
        parser.error(f"no libcuda.so.1 in {options.stub}; --help says how to make it")
    sys.path.insert(0, str(options.kernel.resolve()))
    from plan import variants

    known = variants()
    if unknown := set(options.names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for name in options.names or known:
        folder = options.out / name
        compile_lowered(known[name](), folder, options.stub)
        print(name, summary(folder), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        compile_module(pathlib.Path(sys.argv[2]).read_bytes())
    else:
        main()
