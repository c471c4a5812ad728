# Finds torch and defines
#   Autobatch::torch           its headers, libc10 and libtorch_cpu
#   Autobatch::torch_python    libtorch_python, where there is one
#   AUTOBATCH_TORCH_VERSION    the full version, "2.13.0+cpu", where it is known
#
# Looks, in this order, at: AUTOBATCH_TORCH_ROOT (a directory with include/ and lib/), a
# find_package(Torch) that was run before, AUTOBATCH_TORCH_BESIDE (the same, if it exists), the torch
# of Python_EXECUTABLE, CMAKE_PREFIX_PATH (a LibTorch archive, or torch.utils.cmake_prefix_path),
# AUTOBATCH_TORCH_BEFORE (the same, if it exists).
#
# Torch's own TorchConfig.cmake isn't called from here, because that of a CUDA build stops with an
# error where the CUDA toolkit isn't installed, and nothing in this library needs the toolkit.

if(TARGET Autobatch::torch)
  return()
endif()

# Ends this file: as find_package's answer, which QUIET and OPTIONAL are for, or as our own build's
# error.
macro(_autobatch_no_torch message)
  if(CMAKE_FIND_PACKAGE_NAME STREQUAL "Autobatch")
    set(Autobatch_FOUND FALSE)
    set(Autobatch_NOT_FOUND_MESSAGE "${message}")
    return()
  endif()
  message(FATAL_ERROR "Autobatch: ${message}")
endmacro()

if(NOT AUTOBATCH_TORCH_ROOT AND TORCH_INSTALL_PREFIX AND TARGET torch)
  set(AUTOBATCH_TORCH_ROOT "${TORCH_INSTALL_PREFIX}")
  set(_autobatch_torch_imported ON)
endif()

if(NOT AUTOBATCH_TORCH_ROOT AND AUTOBATCH_TORCH_BESIDE
   AND EXISTS "${AUTOBATCH_TORCH_BESIDE}/include/ATen/ATen.h")
  get_filename_component(AUTOBATCH_TORCH_ROOT "${AUTOBATCH_TORCH_BESIDE}" ABSOLUTE)
endif()

if(NOT AUTOBATCH_TORCH_ROOT AND Python_EXECUTABLE)
  # find_spec doesn't import torch, which would take seconds.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE _autobatch_torch_root OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(_autobatch_torch_root)
    set(AUTOBATCH_TORCH_ROOT "${_autobatch_torch_root}")
  elseif(AUTOBATCH_BUILD_PYTHON)
    message(FATAL_ERROR
      "Autobatch: ${Python_EXECUTABLE} has no torch; install it first (torch>=2.11), or name "
      "another interpreter with -DPython_EXECUTABLE=")
  endif()
endif()

if(NOT AUTOBATCH_TORCH_ROOT)
  find_path(_autobatch_torch_include ATen/ATen.h NO_CACHE PATH_SUFFIXES include ../../include)
  if(NOT _autobatch_torch_include AND AUTOBATCH_TORCH_BEFORE
     AND EXISTS "${AUTOBATCH_TORCH_BEFORE}/include/ATen/ATen.h")
    set(_autobatch_torch_include "${AUTOBATCH_TORCH_BEFORE}/include")
  endif()
  if(NOT _autobatch_torch_include)
    _autobatch_no_torch(
      "torch was not found; give -DPython_EXECUTABLE= (a Python that has torch) or -DCMAKE_PREFIX_PATH= (a LibTorch directory)")
  endif()
  get_filename_component(AUTOBATCH_TORCH_ROOT "${_autobatch_torch_include}/.." ABSOLUTE)
endif()

set(AUTOBATCH_TORCH_VERSION "")
if(EXISTS "${AUTOBATCH_TORCH_ROOT}/version.py")
  file(STRINGS "${AUTOBATCH_TORCH_ROOT}/version.py" _autobatch_torch_version
       REGEX "^__version__ = " LIMIT_COUNT 1)
  string(REGEX REPLACE "^[^'\"]*['\"]([^'\"]*)['\"].*$" "\\1"
         AUTOBATCH_TORCH_VERSION "${_autobatch_torch_version}")
elseif(EXISTS "${AUTOBATCH_TORCH_ROOT}/build-version")
  file(STRINGS "${AUTOBATCH_TORCH_ROOT}/build-version" AUTOBATCH_TORCH_VERSION LIMIT_COUNT 1)
endif()
# The release, without "+cpu" or ".dev2026...": what may be compared.
string(REGEX MATCH "^[0-9]+\\.[0-9]+(\\.[0-9]+)?" _autobatch_torch_release
       "${AUTOBATCH_TORCH_VERSION}")
if(_autobatch_torch_release VERSION_LESS 2.11 AND _autobatch_torch_release)
  _autobatch_no_torch(
    "torch ${AUTOBATCH_TORCH_VERSION} in ${AUTOBATCH_TORCH_ROOT} is too old: 2.11 or later is needed")
endif()

add_library(Autobatch::torch INTERFACE IMPORTED)
if(_autobatch_torch_imported)
  target_link_libraries(Autobatch::torch INTERFACE ${TORCH_LIBRARIES})
else()
  foreach(_lib c10 torch_cpu)
    find_library(_autobatch_${_lib} ${_lib} PATHS "${AUTOBATCH_TORCH_ROOT}/lib"
                 NO_DEFAULT_PATH NO_CACHE REQUIRED)
    add_library(Autobatch::${_lib} SHARED IMPORTED)
    set_target_properties(Autobatch::${_lib} PROPERTIES
      IMPORTED_LOCATION "${_autobatch_${_lib}}")
    target_link_libraries(Autobatch::torch INTERFACE Autobatch::${_lib})
  endforeach()
  target_include_directories(Autobatch::torch INTERFACE
    "${AUTOBATCH_TORCH_ROOT}/include"
    "${AUTOBATCH_TORCH_ROOT}/include/torch/csrc/api/include")
endif()

find_library(_autobatch_torch_python torch_python PATHS "${AUTOBATCH_TORCH_ROOT}/lib"
             NO_DEFAULT_PATH NO_CACHE)
if(_autobatch_torch_python)
  add_library(Autobatch::torch_python SHARED IMPORTED)
  set_target_properties(Autobatch::torch_python PROPERTIES
    IMPORTED_LOCATION "${_autobatch_torch_python}")
  target_link_libraries(Autobatch::torch_python INTERFACE Autobatch::torch)
endif()

message(STATUS "Autobatch: torch ${AUTOBATCH_TORCH_VERSION} in ${AUTOBATCH_TORCH_ROOT}")
