// A loop over instances whose code may read values in the middle, for C++ (Python has ab.map).
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
  size_t max_live = 0;           // so many instances at most are under way at a time; 0: no limit
  size_t stack_size = 1u << 20;  // bytes of address space for each of those, at least 16 KiB
};

// Whether the library was built with Boost.Context, which `map` needs.
AUTOBATCH_API bool has_map();

// Calls body(0) ... body(count - 1), each in a fiber with a stack of its own, on this thread. Where
// one reads a value it is suspended and the next one goes on; when all wait, one flush computes
// what they wait for. Opens a scope, or joins the one that is open. What a body changes of the
// thread's state (grad mode, autocast, ...) is its own.
//
// If bodies throw, the exception of the first of them, by number, is thrown here: those before it
// run on, those after it are ended where they stand, by an exception that is no std::exception.
// Throws if !has_map().
AUTOBATCH_API void for_each_instance(size_t count, const std::function<void(size_t)>& body,
                                     const MapOptions& options = {});

// The results of body(0) ... body(count - 1), in this order.
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
