# Makes copies of gather.cu that have one fault each. The tests must find all of the faults.
# planted_faults.inc includes all copies. Each copy has a separate namespace, and PLANTED_FAULTS(M)
# expands to M(namespace) for each copy.
#
# A fault consists of a namespace, the text that is replaced, and the new text.

set(_autobatch_faults
  "one_too_many" "i < table.total" "i <= table.total"
  "first_left_out" "blockDim.x + threadIdx.x" "blockDim.x + threadIdx.x + 1"
  "stride_too_long" "gridDim.x} * blockDim.x" "gridDim.x + 1} * blockDim.x"
  "next_unit" "offset_in(table.shapes[entry.shape], i - entry.start)"
              "offset_in(table.shapes[entry.shape], i - entry.start + 1)"
  "last_contribution" "c < entry.count" "c + 1 < entry.count"
  "other_contribution" "entry.first + c" "entry.first"
  "last_pair" "k < 8" "k < 6"
  "lookup_too_many" "i < layout.total" "i <= layout.total"
  "row_of_the_next" "rest = i - entry.start" "rest = i - entry.start + 1"
  "end_not_counted" "index += list.length" "index += list.length - 1"
  "length_is_in_range" "index >= list.length" "index > list.length"
  "list_left_out" "l < layout.lists" "l + 1 < layout.lists"
  "last_of_the_pack" "k < kWidth" "k + 1 < kWidth")

function(autobatch_plant_faults source directory)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
  file(READ "${source}" text)
  set(faults ${_autobatch_faults})
  set(includes "")
  set(names "")
  while(faults)
    list(POP_FRONT faults name from to)
    string(REPLACE "${from}" "${to}" planted "${text}")
    if(planted STREQUAL text)
      message(FATAL_ERROR "Autobatch: ${source} has no '${from}' to plant the fault ${name} in")
    endif()
    string(REPLACE "autobatch::cuda" "autobatch::${name}" planted "${planted}")
    file(CONFIGURE OUTPUT "${directory}/${name}.cu" CONTENT "${planted}" @ONLY)
    string(APPEND includes
      "namespace autobatch::${name} { using namespace cuda; }\n#include \"${name}.cu\"\n")
    string(APPEND names " M(${name}),")
  endwhile()
  file(CONFIGURE OUTPUT "${directory}/planted_faults.inc" @ONLY CONTENT
    "${includes}#define PLANTED_FAULTS(M)${names}\n")
endfunction()
