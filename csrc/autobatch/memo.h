// Captured calls, remembered. What a call is captured as follows from its op, the dispatch context,
// what kinds of values its tensors are, and its other arguments. All of it in a row of words is a
// CallKey; a known one gives the node, or the views, without asking the rules again.
#pragma once

#include "autobatch/op_info.h"
#include "autobatch/signature.h"

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>

#include <deque>
#include <optional>
#include <string_view>
#include <type_traits>

namespace autobatch {

// Of one call. Arguments are added in order; the words are the same whether they come boxed or not.
class CallKey {
 public:
  CallKey(const OpInfo& op, Graph& graph, const DispatchContext& context);
  // Of something else than an op, which `what` stands for.
  CallKey(uint64_t what, Graph& graph, const DispatchContext& context);

  template <class T>
  void add(const T& value) {
    put(value);
    weights_ >>= 1;
  }
  void add_list(at::ArrayRef<const at::Tensor*> tensors);
  // A Python number where the op wants a tensor.
  void add_number(c10::ScalarType type, uint64_t bits);

  // Whether the key says all that matters. Not where an argument is no plain dense tensor, a
  // pending tensor of another graph, or memory that may be refilled.
  bool valid() const { return valid_; }
  const Key& words() const { return words_; }

  struct Operand {
    c10::TensorImpl* tensor = nullptr;
    ValueId id = kNone;      // kNone: an outside tensor that the graph has not seen
    bool is_weight = false;  // then: to be one
  };
  // The defined tensors, in order; Python numbers are words.
  const c10::SmallVector<Operand, 8>& tensors() const { return tensors_; }
  bool any_pending() const { return any_pending_; }
  // Whether autograd is on, as the context says.
  bool records() const { return records_; }

 private:
  template <class T>
  void put(const T& value);
  void put_tensor(const at::Tensor& tensor);
  void put_new(const at::Tensor& tensor);
  void put_number(c10::ScalarType type, uint64_t bits);
  void put_number(const c10::TensorImpl& number);
  void put_value(const Value& value, uint64_t flags);
  void put_scalar(const c10::Scalar& scalar);
  void put_boxed(const c10::IValue& value);
  uint32_t number_of_new(const c10::TensorImpl* tensor) const;

  Graph& graph_;
  Key words_;
  c10::SmallVector<Operand, 8> tensors_;
  uint64_t weights_ = 0;  // bit i: the i-th argument from here is a weight by its name
  bool valid_ = true;
  bool any_pending_ = false;
  bool integral_only_;
  bool records_;
};

// What became of a call.
struct Recipe {
  struct View {
    const Geometry* geometry;
    int64_t offset;      // from that of the tensor viewed
    Aparts aparts = {};  // of kNone: of the tensor viewed
  };

  Signature* signature = nullptr;           // of a node
  c10::SmallVector<uint32_t, 4> operands;   // into CallKey::tensors; kNone: not given
  c10::SmallVector<ResultMeta, 2> results;  // hidden ones last
  size_t visible = 0;
  c10::SmallVector<View, 2> views;  // where there is no signature
  bool list = false;                // one Tensor[] rather than so many results

  std::vector<uint64_t> words;  // the key
  Recipe* next = nullptr;       // of the same hash
};

class CallMemo {
 public:
  const Recipe* find(const CallKey& key) const;
  void add(const CallKey& key, Recipe recipe);

 private:
  std::deque<Recipe> entries_;                   // addresses stay valid
  ska::flat_hash_map<uint64_t, Recipe*> index_;  // by hash; the first of a chain
};

namespace detail {
template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;
template <class T>
inline constexpr bool is_optional<c10::OptionalArrayRef<T>> = true;
}  // namespace detail

template <class T>
void CallKey::put(const T& value) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    put_tensor(value);
  } else if constexpr (std::is_same_v<T, c10::IValue>) {
    put_boxed(value);
  } else if constexpr (std::is_same_v<T, at::TensorList> || std::is_same_v<T, at::ITensorListRef>) {
    append_list_start(words_, value.size());
    for (const at::Tensor& tensor : value) put_tensor(tensor);
  } else if constexpr (detail::is_optional<T>) {
    value.has_value() ? put(*value) : append_none(words_);
  } else if constexpr (std::is_same_v<T, c10::Scalar>) {
    put_scalar(value);
  } else if constexpr (std::is_same_v<T, c10::SymInt>) {
    const auto known = value.maybe_as_int();
    known.has_value() ? append_int(words_, *known) : void(valid_ = false);
  } else if constexpr (std::is_same_v<T, c10::SymIntArrayRef>) {
    append_int_list_start(words_, value.size());
    for (const c10::SymInt& item : value) {
      const auto known = item.maybe_as_int();
      known.has_value() ? words_.push_back(static_cast<uint64_t>(*known)) : void(valid_ = false);
    }
  } else if constexpr (std::is_same_v<T, at::IntArrayRef>) {
    append_int_list_start(words_, value.size());
    for (int64_t item : value) words_.push_back(static_cast<uint64_t>(item));
  } else if constexpr (std::is_same_v<T, bool>) {
    append_bool(words_, value);
  } else if constexpr (std::is_floating_point_v<T>) {
    append_double(words_, value);
  } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
    append_int(words_, static_cast<int64_t>(value));
  } else {
    static_assert(std::is_same_v<T, std::string_view>, "an argument of a kind without words");
    append_string(words_, value);
  }
}

}  // namespace autobatch
