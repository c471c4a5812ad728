// A cell is a function whose calls are captured as a whole.
//
//   auto node = autobatch::cell([&](const Tensor& left, const Tensor& right) {
//     const Tensor gates = linear(torch::cat({left, right}, 1));
//     ...
//     return std::make_tuple(h, c);
//   });
//
// The first call of each kind in a scope runs the function and stores the captured ops as a
// template. A later call of the same kind does not run the function. Instead, the library adds the
// same ops, with the tensors of this call as arguments. Batching, values and gradients are the same
// as for the plain function.
//
// Arguments and results may be tensors, numbers, enumerators and strings, alone or in pairs,
// tuples, arrays, vectors and optionals. Two calls are of the same kind if their tensors have equal
// shapes, dtypes, strides and requires_grad, and all other arguments are equal. Grad mode and
// autocast state must also be equal for both calls.
//
// The result of the function must depend only on the arguments and on constant state. Constant
// state consists of tensors and settings that do not change while the scope is open (parameters,
// the training flag of a module). ScopeOptions::check_cells detects violations of this rule. A cell
// throws if its function reads the value of a tensor. If the function writes in place, or calls an
// op that is not captured, the cell runs op by op. If a cell runs op by op, the report gives the
// reason.
#pragma once

#include "autobatch/export.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace autobatch {

class CellFunction;

namespace cell_detail {

// The flattened arguments or results of a call. The tensors are stored in order, and all other data
// is stored as 64-bit words. A model may call its cells thousands of times in each step, so the
// inline capacity is large enough to avoid a heap allocation in most calls.
struct Parts {
  c10::SmallVector<at::Tensor, 8> tensors;
  c10::SmallVector<uint64_t, 8> words;
};

// Reads Parts in the order in which they were written. The reader may move tensors out of the
// Parts.
struct Reader {
  at::Tensor* tensor;
  const uint64_t* word;
};

// Converts values of type T to Parts (`take`) and back (`make`). To support another type,
// specialise this template.
template <class T, class Enable = void>
struct Value {
  static_assert(!sizeof(T),
                "a cell takes and returns tensors, numbers, enumerators and strings, in "
                "pairs, tuples, arrays, vectors and optionals; the function of the cell can "
                "capture other values");
};

template <class T>
using value_of = Value<std::decay_t<T>>;

template <class T>
struct Value<T, std::enable_if_t<std::is_base_of_v<at::Tensor, T>>> {
  static void take(const T& value, Parts& parts) {
    parts.words.push_back(value.defined() ? 1 : 0);
    if (value.defined()) parts.tensors.push_back(value);
  }
  static T make(Reader& reader) {
    return *reader.word++ != 0 ? T(std::move(*reader.tensor++)) : T();
  }
};

template <class T>
struct Value<T, std::enable_if_t<std::is_arithmetic_v<T> || std::is_enum_v<T>>> {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  static void take(const T& value, Parts& parts) {
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(T));
    parts.words.push_back(word);
  }
  static T make(Reader& reader) {
    T value;
    std::memcpy(&value, reader.word++, sizeof(T));
    return value;
  }
};

template <>
struct Value<std::string> {
  static void take(std::string_view value, Parts& parts) {
    parts.words.push_back(value.size());
    for (const char letter : value) parts.words.push_back(static_cast<unsigned char>(letter));
  }
  static std::string make(Reader& reader) {
    std::string value(*reader.word++, '\0');
    for (char& letter : value) letter = static_cast<char>(*reader.word++);
    return value;
  }
};

// A std::string_view is supported only as an argument. A result of type std::string_view would
// refer to freed memory.
template <>
struct Value<std::string_view> {
  static void take(std::string_view value, Parts& parts) { Value<std::string>::take(value, parts); }
};
template <>
struct Value<const char*> : Value<std::string_view> {};
template <>
struct Value<char*> : Value<std::string_view> {};

template <class T>
struct Value<std::optional<T>> {
  static void take(const std::optional<T>& value, Parts& parts) {
    parts.words.push_back(value.has_value() ? 1 : 0);
    if (value) value_of<T>::take(*value, parts);
  }
  static std::optional<T> make(Reader& reader) {
    if (*reader.word++ == 0) return std::nullopt;
    return value_of<T>::make(reader);
  }
};

template <class T>
struct Value<std::vector<T>> {
  static void take(const std::vector<T>& values, Parts& parts) {
    parts.words.push_back(values.size());
    for (const auto& value : values) value_of<T>::take(value, parts);
  }
  static std::vector<T> make(Reader& reader) {
    std::vector<T> values;
    const uint64_t size = *reader.word++;
    values.reserve(size);
    for (uint64_t i = 0; i < size; ++i) values.push_back(value_of<T>::make(reader));
    return values;
  }
};

template <class... T>
struct Value<std::tuple<T...>> {
  static void take(const std::tuple<T...>& values, Parts& parts) {
    std::apply([&](const auto&... value) { (value_of<decltype(value)>::take(value, parts), ...); },
               values);
  }
  static std::tuple<T...> make([[maybe_unused]] Reader& reader) {
    // In a list with braces, C++ guarantees evaluation from left to right.
    return std::tuple<T...>{value_of<T>::make(reader)...};
  }
};

template <class A, class B>
struct Value<std::pair<A, B>> {
  static void take(const std::pair<A, B>& values, Parts& parts) {
    value_of<A>::take(values.first, parts);
    value_of<B>::take(values.second, parts);
  }
  static std::pair<A, B> make(Reader& reader) {
    return std::pair<A, B>{value_of<A>::make(reader), value_of<B>::make(reader)};
  }
};

template <class T, size_t kSize>
struct Value<std::array<T, kSize>> {
  static void take(const std::array<T, kSize>& values, Parts& parts) {
    for (const auto& value : values) value_of<T>::take(value, parts);
  }
  static std::array<T, kSize> make(Reader& reader) {
    std::array<T, kSize> values;
    for (auto& value : values) value = value_of<T>::make(reader);
    return values;
  }
};

// The part of a cell that does not depend on the types of its arguments and results.
class Function {
 public:
  AUTOBATCH_API explicit Function(std::string name);

  // Whether a call that starts now on this thread is captured as a whole. Returns false inside
  // another cell.
  AUTOBATCH_API bool is_captured() const;
  // Sets `results` from the template for this kind of call. Calls `run` if there is no template
  // yet, or if the function has to run for another reason. `run` must call the function and set
  // `results`.
  AUTOBATCH_API void call(const Parts& arguments, c10::function_ref<void()> run,
                          Parts& results) const;

 private:
  std::string name_;
  std::shared_ptr<CellFunction> function_;
};

// Returns a number that is unique for the list of types. The number distinguishes values that have
// the same bits but different types, such as 0 and 0.0.
template <class... T>
uint64_t number_of_types() {
  static const char place = 0;
  return reinterpret_cast<uintptr_t>(&place);
}

}  // namespace cell_detail

template <class F>
class Cell {
 public:
  Cell(F function, std::string name) : plain_(std::move(function)), function_(std::move(name)) {}

  template <class... Args>
  auto operator()(Args&&... args) const {
    using Result = std::decay_t<std::invoke_result_t<F&, Args&...>>;
    if (!function_.is_captured()) return Result(plain_(args...));
    cell_detail::Parts arguments, results;
    arguments.words.push_back(cell_detail::number_of_types<std::decay_t<Args>...>());
    (cell_detail::value_of<Args>::take(args, arguments), ...);
    std::optional<Result> made;
    const auto run = [&] {
      made.emplace(plain_(args...));
      cell_detail::value_of<Result>::take(*made, results);
    };
    function_.call(arguments, run, results);
    if (made.has_value()) return *std::move(made);
    cell_detail::Reader reader{results.tensors.data(), results.words.data()};
    return cell_detail::value_of<Result>::make(reader);
  }

 private:
  mutable F plain_;  // mutable: operator() of a module is not const
  cell_detail::Function function_;
};

// Returns a cell that calls `function`. Error messages and the report contain `name`.
template <class F>
Cell<std::decay_t<F>> cell(F&& function, std::string name = "cell") {
  return {std::forward<F>(function), std::move(name)};
}

}  // namespace autobatch
