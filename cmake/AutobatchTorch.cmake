# Finds torch and defines
#   Autobatch::torch           torch's headers, libc10 and libtorch_cpu
#   Autobatch::torch_python    libtorch_python, if it exists
#   AUTOBATCH_TORCH_VERSION    the full version, such as "2.13.0+cpu"; empty if unknown
#
# Uses the first of these that exists: AUTOBATCH_TORCH_ROOT (a directory with include/ and lib/),
# the result of an earlier find_package(Torch), AUTOBATCH_TORCH_BESIDE (also such a directory), the
# torch of Python_EXECUTABLE, the torch in CMAKE_PREFIX_PATH (a LibTorch archive, or
# torch.utils.cmake_prefix_path), AUTOBATCH_TORCH_BEFORE (also such a directory).
#
# This file doesn't call TorchConfig.cmake of torch. In a torch with CUDA, TorchConfig.cmake stops
# with an error if the CUDA toolkit isn't installed. This library doesn't need the toolkit.

if(TARGET Autobatch::torch)
  return()
endif()

# Ends this file because torch was not found. In find_package(Autobatch), sets Autobatch_FOUND to
# false, so that QUIET and OPTIONAL have their usual effect. In the build of this library, stops
# with an error.
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
  # find_spec doesn't import torch. An import would take seconds.
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
# The release number, without "+cpu" or ".dev2026...", can be compared with other versions.
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
