#!/usr/bin/env bash
# Usage: scripts/bootstrap.sh VENV [build] [test] [lint] [real] [catch2] [benchmark]
#
# Creates the virtual environment VENV, and installs the packages of the named dependency groups in
# pyproject.toml. For `build`, also installs torch. Installs missing Debian packages if apt-get can
# be used. Takes little time if nothing is missing. Environment variables: PYTHON, TORCH_SPEC (see
# the Makefile).
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ $(uname) != Linux ]]; then
  echo "error: torch-autobatch builds on Linux only; this is $(uname)" >&2
  exit 1
fi

VENV=$1
shift
GROUPS_WANTED="$*"
TORCH_SPEC=${TORCH_SPEC:-torch==2.13.0}

say() { printf '%s\n' "$*" >&2; }
die() {
  say "$@"
  exit 1
}
wants() { [[ " $GROUPS_WANTED " == *" $1 "* ]]; }

# --- nothing to do? -------------------------------------------------------------------------------
STAMP="$VENV/.bootstrapped-${GROUPS_WANTED// /-}"
WANTED="$(cat pyproject.toml scripts/bootstrap.sh | cksum) $TORCH_SPEC ${PYTHON:-}"
if [[ -x $VENV/bin/python && -f $STAMP && $(<"$STAMP") == "$WANTED" ]]; then
  exit 0
fi

# Two runs of this script at the same time would interfere with each other, so a run takes a lock.
exec 9>"${TMPDIR:-/tmp}/autobatch-bootstrap-$(id -u).lock"
if command -v flock >/dev/null; then flock 9; fi

# --- the interpreter ------------------------------------------------------------------------------
recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  if [[ -n ${PYTHON:-} ]]; then
    command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON was not found"
    recent "$PYTHON" || die "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1); 3.11 or later is needed"
    command -v "$PYTHON"
    return
  fi
  local name
  for name in python3 python python3.14 python3.13 python3.12 python3.11; do
    if command -v "$name" >/dev/null && recent "$name"; then
      command -v "$name"
      return
    fi
  done
  die "missing: Python 3.11 or later; run: apt-get install python3 python3-venv python3-dev" \
    "(or name an interpreter with PYTHON=)"
}
PYTHON_FOUND=$(find_python)

# --- Debian packages ------------------------------------------------------------------------------
compiles() { printf '%s\n' "$1" | c++ -std=c++20 -x c++ -fsyntax-only - >/dev/null 2>&1; }

missing_packages() {
  if ! wants build; then return; fi
  command -v c++ >/dev/null || echo g++
  command -v cmake >/dev/null || echo cmake
  # Only Debian's Python is divided into several packages.
  local real
  real=$("$PYTHON_FOUND" -c 'import os, sys; print(os.path.realpath(sys._base_executable or sys.executable))')
  local package=python3
  [[ $real == /usr/bin/python3.* ]] && package=$(basename "$real")
  if [[ ! -x $VENV/bin/python ]] && ! "$PYTHON_FOUND" -c 'import venv, ensurepip' 2>/dev/null; then
    echo "$package-venv"
  fi
  "$PYTHON_FOUND" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    echo "$package-dev"
  if wants catch2 && ! compiles '#include <catch2/catch.hpp>' &&
    ! compiles '#include <catch2/catch_test_macros.hpp>'; then
    echo catch2
  fi
  if wants benchmark && ! compiles '#include <benchmark/benchmark.h>'; then
    echo libbenchmark-dev
  fi
}

as_root() {
  if [[ $(id -u) == 0 ]]; then "$@"; else sudo -n "$@"; fi
}
may_install() {
  command -v apt-get >/dev/null || return 1
  [[ $(id -u) == 0 ]] || { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }
}

install() {
  local command=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@")
  as_root "${command[@]}" >/dev/null 2>&1 ||
    { as_root apt-get update -q >/dev/null 2>&1 || true; as_root "${command[@]}" >/dev/null; }
}

mapfile -t MISSING < <(missing_packages)
if ((${#MISSING[@]})); then
  if may_install; then
    say "installing Debian packages: ${MISSING[*]}"
    install "${MISSING[@]}" || true
  fi
  mapfile -t MISSING < <(missing_packages)
  ((${#MISSING[@]} == 0)) || die "missing: ${MISSING[*]}; run: apt-get install ${MISSING[*]}"
fi
# autobatch::map needs Boost.Context. If the package can't be installed, everything else is still
# built and tested.
if wants catch2 && may_install && ! compiles '#include <boost/context/fiber.hpp>'; then
  install libboost-context-dev 2>/dev/null || true
fi
if wants build && ! compiles '#include <concepts>
#include <span>
template <std::integral T> T f(T x) { return x; }'; then
  die "missing: a C++20 compiler ($(c++ --version | head -n 1) is too old); run: apt-get install g++"
fi

# --- the virtual environment ----------------------------------------------------------------------
torch_of() { # PYTHON: prints the version of torch if it is 2.11 or later
  "$1" -c 'import torch, re
r = re.match(r"\d+\.\d+", torch.__version__).group()
assert tuple(map(int, r.split("."))) >= (2, 11)
print(torch.__version__)' 2>/dev/null
}

same_python() {
  [[ $("$1" -c 'import sys; print(sys.version_info[:2])') == $("$2" -c 'import sys; print(sys.version_info[:2])') ]]
}

if [[ -x $VENV/bin/python && -n ${PYTHON:-} ]] && ! same_python "$VENV/bin/python" "$PYTHON_FOUND"; then
  die "$VENV was made with $("$VENV/bin/python" --version); run 'make distclean' to make it again with $PYTHON"
fi
if [[ ! -x $VENV/bin/python ]]; then
  if found=$(torch_of "$PYTHON_FOUND"); then
    say "making $VENV, with torch $found of $PYTHON_FOUND"
    "$PYTHON_FOUND" -m venv --system-site-packages "$VENV"
    # If that interpreter belongs to a virtual environment, --system-site-packages does not include
    # the packages of this environment. A .pth file adds them.
    if ! torch_of "$VENV/bin/python" >/dev/null; then
      "$PYTHON_FOUND" -c 'import sysconfig; print(sysconfig.get_path("purelib")); print(sysconfig.get_path("platlib"))' |
        sort -u >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent-environment.pth"
    fi
  else
    say "making $VENV"
    "$PYTHON_FOUND" -m venv "$VENV"
  fi
fi

# --- Python packages ------------------------------------------------------------------------------
requirements() { # GROUP...: prints the requirements of these groups that are missing
  "$VENV/bin/python" - "$*" "$TORCH_SPEC" <<'PYTHON'
import importlib.metadata
import re
import sys
import sysconfig
import tomllib
from pathlib import Path

groups, torch_spec = sys.argv[1].split(), sys.argv[2]
with Path("pyproject.toml").open("rb") as file:
    pinned = tomllib.load(file)["dependency-groups"]
own = Path(sysconfig.get_path("purelib")).resolve()


def missing(requirement: str) -> bool:
    name = re.split(r"[<>=!~ \[;]", requirement)[0]
    version = requirement.partition("==")[2]
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return True
    # Any version of an inherited package is accepted, because the machine may have no network.
    inherited = Path(str(found.locate_file(""))).resolve() != own
    if inherited or not version:
        return False
    return found.version.partition("+")[0] != version.partition("+")[0]


if "build" in groups and missing(torch_spec):
    print(torch_spec)
for group in groups:
    for requirement in pinned.get(group, []):
        if missing(requirement):
            print(requirement)
PYTHON
}

install_packages() { # OPTION... -- REQUIREMENT...
  local options=()
  while [[ $1 != -- ]]; do
    options+=("$1")
    shift
  done
  shift
  (($#)) || return 0
  say "installing into $VENV: $*"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "${options[@]}" "$@" ||
    die "missing: $*; run: $VENV/bin/python -m pip install ${options[*]} $*"
}

mapfile -t NEEDED < <(requirements ${GROUPS_WANTED//real/})
install_packages -- "${NEEDED[@]}"
if wants real; then # without dependencies, because these may include another torch
  mapfile -t NEEDED < <(requirements real)
  install_packages --no-deps -- "${NEEDED[@]}"
fi
if wants build; then
  "$VENV/bin/python" -c 'import sys; sys.path[:] = [p for p in sys.path if p]; import torch' ||
    die "torch in $VENV can't be imported"
fi

printf '%s' "$WANTED" >"$STAMP"
