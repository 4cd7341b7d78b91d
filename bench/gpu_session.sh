#!/usr/bin/env bash
# One session on a machine with a GPU, without network: build with CUDA, test, measure. Under nine minutes.
#
#   bench/gpu_session.sh OUTDIR            needs nvcc, cmake, a C++ compiler and a Python with torch (CUDA), triton,
#                                          pybind11, pytest, hypothesis
#   bench/gpu_session.sh OUTDIR --dry-run  the same steps without a GPU: builds nothing, tests skip, tiny cases
#
# Nothing is installed: the package is put together in a temporary directory and found through PYTHONPATH. A stage that
# fails or runs out of time does not stop the others. OUTDIR gets a log of each stage, gpu.md, gpu.json, probe.json,
# memory_cuda.md and summary.md; the summary is printed last, and the exit status is 0 if every stage succeeded.
# PYTHON names the interpreter.
set -u
out=${1:?usage: bench/gpu_session.sh OUTDIR [--dry-run]}
dry=${2:-}
python=${PYTHON:-python3}
repo=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$work/site
export PYTHONPATH=$site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TRITON_CACHE_DIR=$work/triton
began=$SECONDS
failed=0
summary=$out/summary.md
: >"$summary"

# stage NAME SECONDS COMMAND...: runs under a time limit, into NAME.log; one line of the summary says how it went.
stage() {
    local name=$1 limit=$2 start=$SECONDS status word
    shift 2
    echo "== $name (at most $limit s)"
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    case $status in
    0) word=ok ;;
    124 | 137) word="out of time after $limit s" ;;
    *) word="failed with status $status" ;;
    esac
    [ $status -eq 0 ] || failed=1
    echo "- $name: $word, $((SECONDS - start)) s; $(grep -v '^\s*$' "$out/$name.log" | tail -1 | cut -c1-160)" | tee -a "$summary"
    return $status
}

assemble() { # the package as an installation would lay it out
    mkdir -p "$site"
    cp -r "$repo/lowbit" "$site/lowbit"
    rm -rf "$site/lowbit/kernels"
    cp -r "$repo/kernels" "$site/lowbit/kernels"
    cp -r "$repo/bench" "$site/lowbit/bench"
}

build() {
    rm -f "$site"/lowbit/*.so
    local arch
    arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
    cmake -S "$repo" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$python")" \
        -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" -DLOWBIT_OUTPUT_DIR="$site/lowbit" -DLOWBIT_CUDA=ON \
        -DLOWBIT_TORCH_DIR="$("$python" -c 'import torch; print(torch.__path__[0])')" \
        -DLOWBIT_CUDA_ARCHITECTURES="$arch" &&
        cmake --build "$work/build" --parallel "$(nproc)" &&
        echo '{"notice": null}' >"$site/lowbit/_build.json"
}

check() { # what is here, and that the kernels load and agree on one call
    "$python" -P - <<'PY'
import torch, triton
import lowbit as lb
from lowbit.backends import registry
print("torch", torch.__version__, "triton", triton.__version__, "device", torch.cuda.get_device_name())
print("absent backends:", registry.absent() or "none")
x = torch.randn(33, 130)
for name in ("cuda", "triton"):
    with lb.use_backend(name):
        q = lb.quantize(x.cuda(), "mxfp8")
    assert torch.equal(q.codes.cpu(), lb.quantize(x, "mxfp8").codes), name
print("cuda and triton agree with the CPU")
PY
}

memcheck() { # every access of the CUDA kernels lies within its tensor, for every scheme at a ragged shape
    command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not here: not checked"; return 0; }
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 "$python" -P - <<'PY'
import itertools
import torch
import lowbit as lb
from lowbit.testing.inputs import schemes
from lowbit.testing.matmul import make_call
x = torch.randn(33, 131)
names = [str(scheme) for scheme in schemes()]
refused = 0
with lb.use_backend("cuda"):
    for name in names:
        try:
            held = lb.quantize(x.cuda(), name)
        except lb.BackendError:
            refused += 1
        else:
            lb.fake_quantize(held.dequantize(), name)
left, right = torch.randn(17, 131, device="cuda"), torch.randn(9, 131, device="cuda")
pairs = [(a, a) for a in names] + [(None, a) for a in names]
products = 0
for a, b in pairs:
    call = make_call(left if a else left.bfloat16(), right, a, b, out_dtype=torch.bfloat16)
    for impl in lb.impls("scaled_mm", "cuda"):
        if impl.backend == "cuda" and impl.supports(call) is None:
            impl.run((torch.empty(17, 9, dtype=torch.bfloat16, device="cuda"),), call)
            products += 1
torch.cuda.synchronize()
print(f"{len(names) - refused} schemes ({refused} refused) and {products} products, each access within its tensor")
PY
}

racecheck() { # no two threads of a block meet in shared memory without a barrier between them
    command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not here: not checked"; return 0; }
    compute-sanitizer --tool racecheck --racecheck-report analysis --error-exitcode 9 "$python" -P - <<'PY'
import torch
import lowbit as lb
from lowbit.testing.matmul import make_call
x = torch.randn(33, 256)
pairs = [("int8:row", "int8:row"), ("fp8_e4m3:row", "fp8_e4m3:row"), (None, "int4:group128"), ("mxfp8", "mxfp8"), (None, "nf4")]
products = 0
for name in ("cuda", "triton"):
    with lb.use_backend(name):
        for scheme in ("fp8_e4m3:tensor", "int8:row", "mxfp4", "nvfp4", "nf4", "uint4:group128:affine"):
            lb.fake_quantize(x.cuda(), scheme)
    for a, b in pairs:
        call = make_call(x.cuda() if a else x.cuda().bfloat16(), x.cuda(), a, b, out_dtype=torch.bfloat16)
        for impl in lb.impls("scaled_mm", "cuda"):
            if impl.backend == name and impl.supports(call) is None:
                impl.run((torch.empty(33, 33, dtype=torch.bfloat16, device="cuda"),), call)
                products += 1
weight = torch.nn.Parameter(torch.randn(64, 300, device="cuda"))
optimizer = lb.optim.AdamW4bit([weight])
weight.grad = torch.randn_like(weight)
optimizer.step()
torch.cuda.synchronize()
print(f"{products} products, 12 codecs and a step of an optimizer, no race in shared memory")
PY
}

probe() { (cd "$repo" && "$python" -P bench/gpu_probe.py "$out" "$@"); }

tests() {
    local workers=()
    "$python" -c 'import xdist' 2>/dev/null && [ "$dry" != --dry-run ] && workers=(-n "$(nproc)")
    cd "$repo" && LOWBIT_GPU_SAMPLES=0.1 OMP_NUM_THREADS=1 "$python" -P -m pytest -q -p no:cacheprovider "${workers[@]}" tests/backends/test_gpu.py
}

bench() { (cd "$repo" && "$python" -P bench/gpu_bench.py "$out" "$@"); }

memory() { "$python" -P -m lowbit bench memory --device cuda --out "$out"; }

export -f build check memcheck racecheck probe tests bench memory
export repo work site python out dry
assemble
if [ "$dry" = --dry-run ]; then
    stage tests 120 bash -c tests
    stage probe 60 bash -c 'probe --dry-run'
    stage bench 120 bash -c 'bench --dry-run'
else
    stage build 90 bash -c build
    stage check 30 bash -c check
    stage probe 25 bash -c probe
    stage memory 70 bash -c memory
    stage bench 60 bash -c 'bench --seconds 40'
    stage tests 180 bash -c tests
    stage memcheck 40 bash -c memcheck
    stage racecheck 40 bash -c racecheck
fi
{
    echo "- total: $((SECONDS - began)) s"
    echo
    [ -f "$out/gpu.md" ] && tail -n +3 "$out/gpu.md"
} >>"$summary"
cat "$summary"
exit $failed
