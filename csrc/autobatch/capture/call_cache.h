// A cache of captured calls. The result of capturing a call depends on the op, the dispatch
// context, the metadata of the tensors (and the identity of weights), and the other arguments. A
// CallKey encodes all of these as a sequence of words. If the cache contains the key, the cached
// call provides the node or the views, and no rule runs.
#pragma once

#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/signature.h"

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <deque>
#include <optional>
#include <string_view>
#include <type_traits>

namespace autobatch {

struct CachedCall;

// The words of a CallKey under construction. After a given call, a program usually makes the same
// next call as before. This expected call is the guess. Each new word is compared with the guess.
// Until a word differs from the guess, no word is stored. If no word differs, no look-up is needed.
class CallWords {
 public:
  explicit CallWords(const CachedCall* guess);
  void push_back(uint64_t word) {
    if (guess_ != nullptr) [[likely]] {
      if (num_ < num_guessed_ && guessed_[num_] == word) [[likely]] {
        ++num_;
        return;
      }
      stop_guessing();
    }
    words_.push_back(word);
  }
  // Returns the guess if the words equal all words of the guess, else null.
  const CachedCall* guess() const { return num_ == num_guessed_ ? guess_ : nullptr; }
  const Key& written() const;
  Key& written();

 private:
  void stop_guessing() const;

  mutable const CachedCall* guess_;
  const uint64_t* guessed_ = nullptr;
  size_t num_guessed_ = 0;
  size_t num_ = 0;  // number of words that match the guess, while there is a guess
  mutable Key words_;
};

// The key of one call. Arguments are added in order. Boxed and unboxed arguments have the same
// words.
class CallKey {
 public:
  // `guess` is a call that probably has the same key.
  CallKey(const OpInfo& op, Graph& graph, const CallContext& context,
          const CachedCall* guess = nullptr);
  // Makes a key for a call of something other than an op (a cell). `what` identifies the called
  // object.
  CallKey(uint64_t what, Graph& graph, const CallContext& context);

  template <class T>
  void add(const T& value) {
    put(value);
    weights_ >>= 1;
  }
  void add_list(at::ArrayRef<const at::Tensor*> tensors);
  // Adds a Python number in place of a tensor.
  void add_number(c10::ScalarType type, uint64_t bits);

  // Whether the key describes the call completely. The result is false, for example, if an argument
  // is not a plain dense tensor or is pending in another graph. The result is also false for memory
  // that may be written to without an op (foreign_memory.h).
  bool valid() const { return valid_; }
  const Key& words() const { return words_.written(); }
  const CachedCall* guess() const { return words_.guess(); }

  struct Operand {
    c10::TensorImpl* tensor = nullptr;
    ValueId id = kNone;      // kNone: a graph input that is not in the graph yet
    bool is_weight = false;  // a new graph input that becomes a weight
    bool asks = false;       // a graph input whose gradient edge is needed (Graph::need_gradient)
  };
  // The defined tensor arguments, in order. Python numbers are not included.
  const c10::SmallVector<Operand, 8>& tensors() const { return tensors_; }
  c10::SmallVector<Operand, 8>& tensors() { return tensors_; }
  bool any_pending() const { return any_pending_; }
  // Whether a tensor has to be added to the graph, or the gradient edge of a graph input is needed.
  bool any_graph_input() const { return any_graph_input_; }
  // Whether grad mode is on, according to the context.
  bool grad_mode() const { return grad_mode_; }

 private:
  template <class T>
  void put(const T& value);
  void put_tensor(const at::Tensor& tensor);
  bool is_ordinary(c10::TensorImpl& tensor, const torch::autograd::AutogradMeta* meta) const;
  ValueId read_value(ValueId id);
  void put_known(c10::TensorImpl* tensor, ValueId id);
  void put_new(const at::Tensor& tensor);
  void put_number(c10::ScalarType type, uint64_t bits);
  void put_number(const c10::TensorImpl& number);
  void put_value(const Value& value, uint64_t flags);
  void put_scalar(const c10::Scalar& scalar);
  void put_boxed(const c10::IValue& value);
  uint32_t number_of_new(const c10::TensorImpl* tensor) const;

  Graph& graph_;
  CallWords words_;
  c10::SmallVector<Operand, 8> tensors_;
  uint64_t weights_ = 0;  // bit i: the i-th of the next arguments has the name of a weight
  bool valid_ = true;
  bool any_pending_ = false;
  bool any_graph_input_ = false;
  bool integral_only_;
  bool is_view_;
  bool grad_mode_;
};

// How a call was captured: as a node, or as views.
struct CachedCall {
  struct View {
    const Geometry* geometry;
    int64_t offset;                 // relative to the offset of the viewed tensor
    ElementMaps element_maps = {};  // ElementMap::of == kNone: the viewed tensor
  };

  Signature* signature = nullptr;           // the node's signature; null if the call returned views
  c10::SmallVector<uint32_t, 4> operands;   // indices into CallKey::tensors(); kNone: omitted
  c10::SmallVector<ResultMeta, 2> results;  // hidden results are last
  size_t visible = 0;                       // number of results that are not hidden
  c10::SmallVector<View, 2> views;          // the results if `signature` is null
  bool list = false;                        // the views form one Tensor[]

  bool returns_list() const { return signature == nullptr ? list : signature->returns_list; }

  std::vector<uint64_t> words;                    // the words of the CallKey
  CachedCall* next = nullptr;                     // next entry with the same hash
  mutable const CachedCall* next_call = nullptr;  // the expected next call
};

class CallCache {
 public:
  // Returns the expected next call: the call that last followed the most recently found call.
  // Returns null if no such call is known.
  const CachedCall* next() const { return last_ != nullptr ? last_->next_call : nullptr; }
  const CachedCall* find(const CallKey& key);
  void add(const CallKey& key, CachedCall cached);

 private:
  CachedCall* look_up(const CallKey& key) const;

  const CachedCall* last_ = nullptr;
  std::deque<CachedCall> entries_;                   // a deque, so addresses stay valid
  ska::flat_hash_map<uint64_t, CachedCall*> index_;  // key: hash; value: head of a linked list
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
    static_assert(std::is_same_v<T, std::string_view>, "arguments of this type have no words");
    append_string(words_, value);
  }
}

}  // namespace autobatch
