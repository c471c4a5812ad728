// Runs a function for many instances (in Python: ab.map). The function may read tensor values.
#pragma once

#include "autobatch/export.h"
#include "autobatch/options.h"

#include <cstddef>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace autobatch {

struct MapOptions : ScopeOptions {
  size_t max_live = 0;           // maximum number of unfinished instances; 0: no limit
  size_t stack_size = 1u << 20;  // bytes of address space for each instance, at least 16 KiB
};

// Whether the library was built with Boost.Context, which `map` and Engine need.
AUTOBATCH_API bool has_map();

// Calls body(0) ... body(count - 1) on this thread. Each call runs in a separate fiber, which has a
// separate stack. When a body reads the value of a pending tensor, the body is suspended and the
// next body runs. When all bodies wait, one flush computes the values that they need.
// for_each_instance() opens a scope, or joins the scope that is already open. If a body changes
// thread-local state of PyTorch (grad mode, autocast, ...), other bodies do not observe the change.
//
// If bodies throw, the exception of the body with the lowest index is rethrown. Bodies with lower
// indices run to their end. Suspended bodies with higher indices are ended by an exception that
// unwinds their stack. This exception is not derived from std::exception. Throws c10::Error if
// has_map() is false or if stack_size is below 16 KiB.
AUTOBATCH_API void for_each_instance(size_t count, const std::function<void(size_t)>& body,
                                     const MapOptions& options = {});

// Returns a std::vector with the results of body(0) ... body(count - 1), in this order. Returns
// nothing if `body` returns void. Throws the same errors as for_each_instance().
template <class Body>
auto map(size_t count, Body&& body, const MapOptions& options = {}) {
  using Result = std::invoke_result_t<Body&, size_t>;
  if constexpr (std::is_void_v<Result>) {
    for_each_instance(count, std::ref(body), options);
  } else {
    std::vector<std::optional<Result>> made(count);
    for_each_instance(count, [&](size_t i) { made[i].emplace(body(i)); }, options);
    std::vector<Result> results;
    results.reserve(count);
    for (std::optional<Result>& result : made) results.push_back(*std::move(result));
    return results;
  }
}

}  // namespace autobatch
