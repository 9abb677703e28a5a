"""Writes the libraries that a CUDA build of torch links, without CUDA.

    python libraries.py TORCH_LIB_DIR TARGET_DIR FAKECUDART_CPP INCLUDE_DIR [LIBRARY ...]

Every name that torch's libraries, and those named at the end, import from NVIDIA's becomes a function. libcudart is
compiled from FAKECUDART_CPP, completed with functions that return "not supported"; the
others say their name and abort.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

PREFIXES = {
    "libcurand.so": r"curand",
    "libnccl.so": r"nccl",
    "libcufile.so": r"cuFile",
    "libcusparseLt.so": r"cusparseLt",
    "libcuda.so": r"cu[A-Z](?!ile)",
}
"""Of libraries whose symbols have no version: how their names begin."""

ANSWERS = {
    "ncclGetVersion": "int ncclGetVersion(int *v) { *v = 22907; return 0; }",
    "cudnnGetVersion": "size_t cudnnGetVersion(void) { return 92000; }",
    "cudnnGetCudartVersion": "size_t cudnnGetCudartVersion(void) { return 13000; }",
    "cuDevicePrimaryCtxGetState": (
        "int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *active)"
        " { (void)d; if (f) *f = 0; *active = 1; return 0; }"
    ),
}
"""What is asked although nothing is computed with it."""

MANAGEMENT = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **d) { *d = (void *)1; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *n, void *all) { *n = 0; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void *d, char *info) { /* after the version: none */
  for (int i = 4; i < 32; ++i) info[i] = 0;
  return 0;
}
"""
"""libnvidia-ml, which the allocator opens for expandable segments; 3 is "not supported"."""


def run(*command: str | Path) -> str:
    return subprocess.run(
        [str(c) for c in command], check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def imports(libraries: list[Path]) -> tuple[dict[str, set[str]], dict[str, str]]:
    """Names that they import by the library that has them, and symbol versions."""
    needed: set[str] = set()
    names: dict[str, set[str]] = defaultdict(set)
    plain: set[str] = set()
    versions: dict[str, str] = {}
    for library in libraries:
        needed.update(re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", library)))
        for part in run("readelf", "-VW", library).split("File: ")[1:]:
            if label := re.search(r"Name: (\S+)", part):
                versions[part.split()[0]] = label[1]
        for line in run("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            (names[version] if version else plain).add(name)
    ours = [n for n in needed if re.match(r"lib(cu|nv|nccl)", n)]
    found = {soname: set(names.get(versions.get(soname, ""), ())) for soname in ours}
    for soname in ours:
        prefix = PREFIXES.get(re.sub(r"\.so.*", ".so", soname))
        if prefix:
            found[soname] |= {n for n in plain if re.match(prefix, n)}
    return found, versions


def failing(name: str, soname: str) -> str:
    if name in ANSWERS:
        return ANSWERS[name]
    if soname.startswith("libcudart"):
        return (
            "int fakecuda_unsupported(const char*);\n"
            f'int {name}(void) {{ return fakecuda_unsupported("{name}"); }}'
        )
    if soname.startswith("libcupti"):
        return f"int {name}(void) {{ return 15; }}"
    return f'int {name}(void) {{ fprintf(stderr, "fakecuda: {name} was called\\n"); abort(); }}'


def main() -> None:
    torch_lib, target, runtime, include, *more = map(Path, sys.argv[1:])
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        fake = work / "fakecudart.o"
        run(
            "g++",
            "-std=c++17",
            "-O2",
            "-g1",
            "-fPIC",
            "-Wall",
            "-c",
            runtime,
            "-o",
            fake,
            f"-I{include}",
        )
        defined = set(re.findall(r" T (\w+)", run("nm", fake)))
        found, versions = imports([*torch_lib.glob("lib*.so"), *more])
        for soname, names in sorted(found.items()):
            is_runtime = soname.startswith("libcudart")
            missing = sorted(names - defined if is_runtime else names)
            source, script = work / "stub.c", work / "version"
            source.write_text(
                "#include <stdio.h>\n#include <stdlib.h>\n"
                + "\n".join(failing(name, soname) for name in missing)
            )
            script.write_text(f"{versions.get(soname, soname)} {{ global: *; }};\n")
            run("gcc", "-w", "-O1", "-fPIC", "-c", source, "-o", work / "stub.o")
            run(
                "g++",
                "-shared",
                f"-Wl,-soname,{soname}",
                f"-Wl,--version-script={script}",
                work / "stub.o",
                *([fake] if is_runtime else []),
                "-lpthread",
                "-o",
                target / soname,
            )
            print(f"{soname}: {len(names)} names, {len(missing)} of them fail")
        source.write_text(MANAGEMENT)
        run(
            "gcc",
            "-w",
            "-O1",
            "-fPIC",
            "-shared",
            source,
            "-o",
            target / "libnvidia-ml.so.1",
        )


if __name__ == "__main__":
    main()
