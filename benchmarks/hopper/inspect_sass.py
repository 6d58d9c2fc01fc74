"""Compile a Mosaic GPU kernel to SASS on a machine without a GPU.

`compile_lowered(lowered, folder)` hands the kernel's module to XLA's own MosaicGpuCompile, with a pretend CUDA driver
(/opt/v-lab/stub) that says "sm_90", and leaves PTX, the ptxas report and SASS in `folder`.
"""

import ctypes
import os
import pathlib
import re
import subprocess
import sys

import jax

SITE = pathlib.Path(jax.__file__).parent.parent
STUB = "/opt/v-lab/stub"


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


def main(code_path, folder, *kernels):
    """Child process: read the saved module, compile it, leave dumps in the folder."""
    compile_module(pathlib.Path(code_path).read_bytes())


def compile_lowered(lowered, folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    [module] = modules_of(lowered)
    path = folder / "module.bin"
    path.write_bytes(module)
    root = SITE / "nvidia" / "cu13"
    env = dict(
        os.environ,
        LD_LIBRARY_PATH=STUB,
        MOSAIC_GPU_CUDA_ROOT=str(root),
        PATH=f"{root}/bin:{os.environ['PATH']}",
        MOSAIC_GPU_RUNTIME_LIB_PATH=str(SITE / "jax_cuda13_plugin" / "libmosaic_gpu_runtime.so"),
        MOSAIC_GPU_DUMP_TO=str(folder),
        MOSAIC_GPU_DUMP_PTXAS="1",
        JAX_PLATFORMS="cpu",
    )
    done = subprocess.run([sys.executable, __file__, str(path), str(folder)], env=env, capture_output=True, text=True)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    return done


def summary(folder):
    """Registers, spills and instruction counts from the dumps."""
    folder = pathlib.Path(folder)
    text = "\n".join(p.read_text(errors="replace") for p in folder.iterdir() if p.suffix in (".ptxas", ".txt"))
    found = {}
    for key, pattern in (
        ("registers", r"Used (\d+) registers"),
        ("stack", r"(\d+) bytes stack frame"),
        ("spill_stores", r"(\d+) bytes spill stores"),
        ("spill_loads", r"(\d+) bytes spill loads"),
    ):
        match = re.search(pattern, text)
        found[key] = int(match.group(1)) if match else None
    found["serialized"] = "serializ" in text
    for sass in folder.glob("*.sass*"):
        body = sass.read_text()
        for name in (
            "HGMMA",
            "WARPGROUP.DEPBAR",
            "WARPGROUP.ARRIVE",
            "MUFU.EX2",
            "STL",
            "LDL",
            "BSSY",
            "FMUL",
            "FFMA",
            "FMNMX",
            "FADD",
            "MOV",
            "SHFL",
            "SYNCS",
            "F2FP",
        ):
            found[name] = len(re.findall(rf"\b{re.escape(name)}\b", body))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
