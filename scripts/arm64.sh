#!/usr/bin/env bash
# Usage: scripts/arm64.sh [TORCH_VERSION]
#
# Compiles the C++ library and its example for 64-bit Arm, with PyTorch's wheel for Arm. Then trains
# the example's model under qemu, and compares the result with eager. All files are in build/arm64.
# Needs pip and these Debian packages:
#   g++-aarch64-linux-gnu qemu-user-static cmake ninja-build unzip
# The Python module is not built. autobatch::map is not built either, because it needs Boost.Context
# for Arm.
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=${1:-2.13.0}
PYTHON=${PYTHON:-.venv/bin/python}
WORK=$PWD/build/arm64
ROOT=$WORK/torch-$VERSION
export PATH="$PWD/.venv/bin:$PATH"

for tool in aarch64-linux-gnu-g++ qemu-aarch64-static unzip cmake ninja; do
  command -v $tool >/dev/null || {
    echo "missing: $tool; run: apt-get install g++-aarch64-linux-gnu qemu-user-static cmake ninja-build unzip" >&2
    exit 1
  }
done

download() { # REQUIREMENT...: downloads wheels for 64-bit Arm, without dependencies
  local platforms=(--platform manylinux2014_aarch64) glibc
  for glibc in 17 25 26 27 28; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
  "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    "${platforms[@]}" -d "$ROOT" "$@"
}

if [[ ! -f $ROOT/torch/version.py ]]; then
  download "torch==$VERSION"
  unzip -qo "$ROOT"/torch-*.whl 'torch/include/*' 'torch/lib/*' torch/version.py -d "$ROOT"
  # This wheel is built with CUDA. So libtorch_cpu loads these two libraries, but does not use them
  # here.
  runtime=$(unzip -p "$ROOT"/torch-*.whl '*/METADATA' | sed -n 's/^Requires-Dist: cuda-toolkit.*==\([0-9]*\.[0-9]*\).*/\1/p')
  if [[ -n $runtime ]]; then
    download "nvidia-cuda-runtime==$runtime.*" "nvidia-cuda-cupti==$runtime.*"
    for wheel in "$ROOT"/nvidia*.whl; do unzip -qo "$wheel" -d "$ROOT"; done
  fi
  rm "$ROOT"/*.whl
fi

CROSS=(-G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux
  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
  -DAUTOBATCH_TORCH_ROOT="$ROOT/torch"
  # The dependencies of torch's libraries are found when these libraries are loaded.
  -DCMAKE_SHARED_LINKER_FLAGS=-Wl,--allow-shlib-undefined
  -DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined)

cmake -S . -B "$WORK/library" "${CROSS[@]}" -DPython_EXECUTABLE="$(realpath -s "$PYTHON")" \
  -DAUTOBATCH_BUILD_PYTHON=OFF -DAUTOBATCH_BUILD_TESTS=OFF -DAUTOBATCH_BOOST_CONTEXT=OFF \
  -DAUTOBATCH_CUDA=OFF -DAUTOBATCH_WERROR="${AUTOBATCH_WERROR:-OFF}" >/dev/null
cmake --build "$WORK/library" -j "${CMAKE_BUILD_PARALLEL_LEVEL:-2}"
cmake --install "$WORK/library" --prefix "$WORK/installed" >/dev/null

cmake -S examples/cmake_project -B "$WORK/example" "${CROSS[@]}" \
  -DCMAKE_FIND_ROOT_PATH="$WORK/installed" -DAutobatch_DIR="$WORK/installed/lib/cmake/Autobatch" >/dev/null
cmake --build "$WORK/example"

file -b "$WORK/example/tree_lstm" 2>/dev/null | cut -d, -f1-2 || true
OMP_NUM_THREADS=1 qemu-aarch64-static -L /usr/aarch64-linux-gnu \
  -E LD_LIBRARY_PATH="$WORK/installed/lib:$ROOT/torch/lib:$ROOT/nvidia/cu13/lib" \
  "$WORK/example/tree_lstm" examples/cmake_project/trees.txt --check --epochs 1 --hidden 16
