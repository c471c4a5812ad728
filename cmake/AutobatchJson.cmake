# Defines Autobatch::json, the headers of nlohmann/json. The headers of ATen/functorch include
# nlohmann/json, but torch doesn't contain it. This file searches NLOHMANN_JSON_INCLUDE_DIR (a CMake
# or environment variable), torch's include directory, the Python package nlohmann-json, and an
# installed nlohmann_json, in this order.

set(_autobatch_json_hints "${NLOHMANN_JSON_INCLUDE_DIR}" "$ENV{NLOHMANN_JSON_INCLUDE_DIR}"
    "${AUTOBATCH_TORCH_ROOT}/include")
if(Python_EXECUTABLE)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u; s = u.find_spec('nlohmann_json'); print(s.submodule_search_locations[0] + '/include' if s else '')"
    OUTPUT_VARIABLE _autobatch_json_package OUTPUT_STRIP_TRAILING_WHITESPACE)
  list(APPEND _autobatch_json_hints "${_autobatch_json_package}")
endif()

find_path(_autobatch_json_include nlohmann/json.hpp NO_CACHE NO_DEFAULT_PATH
          PATHS ${_autobatch_json_hints})
if(_autobatch_json_include)
  add_library(Autobatch::json INTERFACE IMPORTED)
  target_include_directories(Autobatch::json INTERFACE "${_autobatch_json_include}")
else()
  find_package(nlohmann_json QUIET)
  if(NOT nlohmann_json_FOUND)
    message(FATAL_ERROR
      "Autobatch: nlohmann/json.hpp was not found; run 'pip install nlohmann-json' or "
      "'apt-get install nlohmann-json3-dev', or give -DNLOHMANN_JSON_INCLUDE_DIR=")
  endif()
  add_library(Autobatch::json ALIAS nlohmann_json::nlohmann_json)
endif()
