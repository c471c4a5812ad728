# Decides whether to build the CUDA kernels. Sets AUTOBATCH_WITH_CUDA. If it is ON, defines
#   Autobatch::torch_cuda   libc10_cuda and the CUDA runtime of torch or of the toolkit
#
# The kernels need a torch with CUDA, and a CUDA toolkit (nvcc) of the same major version. Without
# the kernels, the library still works on CUDA devices, and uses ATen's kernels.

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

# The CUDA version that torch was built with.
set(_autobatch_torch_cuda "")
if(NOT _autobatch_no_cuda AND EXISTS "${AUTOBATCH_TORCH_ROOT}/version.py")
  file(STRINGS "${AUTOBATCH_TORCH_ROOT}/version.py" _autobatch_torch_cuda
       REGEX "^cuda.* = '[0-9.]+'" LIMIT_COUNT 1)
  string(REGEX MATCH "[0-9]+" _autobatch_torch_cuda "${_autobatch_torch_cuda}")
endif()

# Torch's wheels depend on a Python package that contains the CUDA runtime. There is also a Python
# package with nvcc (nvidia-cuda-nvcc). Since CUDA 13, both packages install into one folder.
# FindCUDAToolkit doesn't find the libraries in this folder, because their names always contain a
# version.
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
    # These toolkits support devices that are too old for the kernels. On such devices the library
    # uses ATen's kernels.
    set(CMAKE_CUDA_ARCHITECTURES "70-real;80-real;90")
  elseif(CMAKE_VERSION VERSION_LESS 3.23)
    set(CMAKE_CUDA_ARCHITECTURES "75-real;80-real;90")
  else()
    set(CMAKE_CUDA_ARCHITECTURES "all-major")
  endif()
endif()
enable_language(CUDA)
# The kernels use the CUDA runtime library that torch loads. By default, CMake would link a second
# runtime statically.
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
set(AUTOBATCH_WITH_CUDA ON)
add_library(Autobatch::torch_cuda INTERFACE IMPORTED)
target_link_libraries(Autobatch::torch_cuda INTERFACE "${_autobatch_c10_cuda}" "${CUDA_CUDART}")
message(STATUS "Autobatch: CUDA kernels with ${CUDAToolkit_NVCC_EXECUTABLE} ${CUDAToolkit_VERSION}")
