# Whether to build the CUDA kernels. Sets AUTOBATCH_WITH_CUDA and, if so, defines
#   Autobatch::torch_cuda   libc10_cuda and the CUDA runtime, which torch brings or the toolkit has
#
# That takes a torch with CUDA, and a toolkit (nvcc) of the same major version. Without them the
# library works on CUDA devices all the same, by ATen.

set(AUTOBATCH_CUDA "AUTO" CACHE STRING "CUDA kernels: AUTO (where they can be built), ON or OFF")
set(AUTOBATCH_CUDA_ARCHITECTURES "" CACHE STRING
    "As CMAKE_CUDA_ARCHITECTURES, from 70 on; default: all major ones")

set(AUTOBATCH_WITH_CUDA OFF)
set(_autobatch_no_cuda "")
if(NOT AUTOBATCH_CUDA)
  set(_autobatch_no_cuda "AUTOBATCH_CUDA is ${AUTOBATCH_CUDA}")
endif()

if(NOT _autobatch_no_cuda)
  find_library(_autobatch_c10_cuda c10_cuda PATHS "${AUTOBATCH_TORCH_ROOT}/lib"
               NO_DEFAULT_PATH NO_CACHE)
  if(NOT _autobatch_c10_cuda)
    set(_autobatch_no_cuda "torch has none")
  endif()
endif()

# Which CUDA torch is built with.
set(_autobatch_torch_cuda "")
if(NOT _autobatch_no_cuda AND EXISTS "${AUTOBATCH_TORCH_ROOT}/version.py")
  file(STRINGS "${AUTOBATCH_TORCH_ROOT}/version.py" _autobatch_torch_cuda
       REGEX "^cuda.* = '[0-9.]+'" LIMIT_COUNT 1)
  string(REGEX MATCH "[0-9]+" _autobatch_torch_cuda "${_autobatch_torch_cuda}")
endif()

# Torch's wheels bring the runtime as a Python package, and nvcc is one too (nvidia-cuda-nvcc): from
# CUDA 13 on they lie in one folder. Libraries there have a name with a version only, by which
# FindCUDAToolkit doesn't find them.
if(NOT _autobatch_no_cuda AND _autobatch_torch_cuda)
  get_filename_component(_autobatch_cuda_package
    "${AUTOBATCH_TORCH_ROOT}/../nvidia/cu${_autobatch_torch_cuda}" ABSOLUTE)
  if(EXISTS "${_autobatch_cuda_package}/bin/nvcc" AND NOT CUDAToolkit_ROOT
     AND NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    set(CUDAToolkit_ROOT "${_autobatch_cuda_package}")
  endif()
  if(CUDAToolkit_ROOT STREQUAL _autobatch_cuda_package)
    find_library(CUDA_CUDART NAMES "libcudart.so.${_autobatch_torch_cuda}"
                 PATHS "${_autobatch_cuda_package}/lib" NO_DEFAULT_PATH)
  endif()
endif()

if(NOT _autobatch_no_cuda)
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_FOUND OR NOT CUDAToolkit_NVCC_EXECUTABLE)
    set(_autobatch_no_cuda "there is no toolkit (nvcc)")
  elseif(_autobatch_torch_cuda AND NOT _autobatch_torch_cuda EQUAL CUDAToolkit_VERSION_MAJOR)
    set(_autobatch_no_cuda
      "torch is built with CUDA ${_autobatch_torch_cuda}, and the toolkit is ${CUDAToolkit_VERSION}")
  endif()
endif()

if(_autobatch_no_cuda)
  if(AUTOBATCH_CUDA AND NOT AUTOBATCH_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "Autobatch: no CUDA kernels: ${_autobatch_no_cuda}")
  endif()
  message(STATUS "Autobatch: no CUDA kernels: ${_autobatch_no_cuda}")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER "${CUDAToolkit_NVCC_EXECUTABLE}")
endif()
if(AUTOBATCH_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "${AUTOBATCH_CUDA_ARCHITECTURES}")
elseif(NOT CMAKE_CUDA_ARCHITECTURES)
  if(CUDAToolkit_VERSION VERSION_LESS 13)
    # These know devices that are too old for the kernels; which are left to ATen.
    set(CMAKE_CUDA_ARCHITECTURES "70-real;80-real;90")
  elseif(CMAKE_VERSION VERSION_LESS 3.23)
    set(CMAKE_CUDA_ARCHITECTURES "75-real;80-real;90")
  else()
    set(CMAKE_CUDA_ARCHITECTURES "all-major")
  endif()
endif()
enable_language(CUDA)
# As a library, which is torch's where the program runs: CMake would link a second one statically.
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
set(AUTOBATCH_WITH_CUDA ON)
add_library(Autobatch::torch_cuda INTERFACE IMPORTED)
target_link_libraries(Autobatch::torch_cuda INTERFACE "${_autobatch_c10_cuda}" "${CUDA_CUDART}")
message(STATUS "Autobatch: CUDA kernels with ${CUDAToolkit_NVCC_EXECUTABLE} ${CUDAToolkit_VERSION}")
