#include "autobatch/capture/call_cache.h"

#include "autobatch/capture/record_call.h"
#include "autobatch/common/device_traits.h"
#include "autobatch/graph/pending_tensor.h"

#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>

namespace autobatch {
namespace {

// Maximum number of CachedCalls. At this maximum, all CachedCalls are dropped, and later calls add
// new CachedCalls.
constexpr size_t kMostCachedCalls = 1 << 16;

// Bits that mark the word of a tensor, and the word of a number.
constexpr uint64_t kTensorMark = uint64_t{5} << 48;
constexpr uint64_t kNumberMark = uint64_t{6} << 48;

// Flags in the word of a tensor.
constexpr uint64_t kRequiresGrad = uint64_t{1} << 32;
constexpr uint64_t kGraphInput = uint64_t{1} << 33;
constexpr uint64_t kOdd = uint64_t{1} << 34;
constexpr uint64_t kCopy = uint64_t{1} << 35;
constexpr uint64_t kHandedOn = uint64_t{1} << 36;

// Returns which kernels attention may use (`torch.nn.attention.sdpa_kernel`).
uint64_t attention_settings() {
  const at::Context& context = at::globalContext();
  return (context.userEnabledFlashSDP() ? 1u : 0u) | (context.userEnabledMathSDP() ? 2u : 0u);
}

bool is_attention(const OpInfo& op) {
  static const OpInfo& attention = find_op("aten::scaled_dot_product_attention", "");
  return &op == &attention;
}

}  // namespace

CallWords::CallWords(const CachedCall* guess) : guess_(guess) {
  if (guess == nullptr) return;
  guessed_ = guess->words.data();
  num_guessed_ = guess->words.size();
}

void CallWords::stop_guessing() const {
  words_.append(guessed_, guessed_ + num_);
  guess_ = nullptr;
}

const Key& CallWords::written() const {
  if (guess_ != nullptr) stop_guessing();
  return words_;
}

Key& CallWords::written() {
  if (guess_ != nullptr) stop_guessing();
  return words_;
}

CallKey::CallKey(const OpInfo& op, Graph& graph, const CallContext& context,
                 const CachedCall* guess)
    : graph_(graph),
      words_(guess),
      weights_(op.weight_arguments),
      integral_only_(op.integral_only),
      is_view_(op.action == Action::kView),
      grad_mode_(context.grad_mode) {
  words_.push_back(reinterpret_cast<uint64_t>(&op));
  words_.push_back(context.word);
  if (is_attention(op)) words_.push_back(attention_settings());
}

CallKey::CallKey(uint64_t what, Graph& graph, const CallContext& context)
    : graph_(graph),
      words_(nullptr),
      integral_only_(false),
      is_view_(false),
      grad_mode_(context.grad_mode) {
  words_.push_back(what);
  words_.push_back(context.word);
  words_.push_back(attention_settings());
}

void CallKey::put_value(const Value& value, uint64_t flags) {
  words_.push_back(reinterpret_cast<uint64_t>(value.geometry));
  words_.push_back(kTensorMark | flags | static_cast<uint64_t>(value.dtype) |
                   static_cast<uint64_t>(value.device.type()) << 8 |
                   static_cast<uint64_t>(static_cast<uint8_t>(value.device.index())) << 16 |
                   (value.requires_grad ? kRequiresGrad : 0));
}

bool CallKey::is_ordinary(c10::TensorImpl& tensor,
                          const torch::autograd::AutogradMeta* meta) const {
  return is_plain(tensor) && (meta == nullptr || meta->fw_grad_ == nullptr) &&
         (!integral_only_ ||
          c10::isIntegralType(c10::typeMetaToScalarType(tensor.dtype()), true)) &&
         (!tensor.is_inference() || c10::InferenceMode::is_enabled());
}

void CallKey::put_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return append_none(words_);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->is_wrapped_number()) return put_number(*impl);
  const auto* meta = static_cast<torch::autograd::AutogradMeta*>(impl->autograd_meta());
  const bool requires_grad = meta != nullptr && (meta->requires_grad_ || meta->grad_fn_ != nullptr);
  valid_ = valid_ && is_ordinary(*impl, meta);
  if (!valid_) return;
  if (const PendingTensor* pending = as_pending(impl)) {
    const ValueId id = pending->graph() == &graph_ ? read_value(pending->value()) : kNone;
    valid_ = id != kNone && graph_.value(id).requires_grad == requires_grad;
    if (!valid_) return;
    any_pending_ = true;
    put_known(impl, id);
  } else {
    // A view requires grad if its base requires grad.
    const bool wants = requires_grad || (meta != nullptr && meta->requires_grad());
    const ValueId id = graph_.find_graph_input(tensor, wants);
    id == kNone ? put_new(tensor) : put_known(impl, id);
  }
}

// Returns the value that a call reads from a pending tensor. Returns kNone if the key cannot
// describe the value. A view op refers to the memory, and not to the value that was last written to
// the memory. Therefore a view op on written memory has no key.
ValueId CallKey::read_value(ValueId id) {
  return is_view_ && graph_.is_written(id) ? kNone : graph_.settled(id);
}

void CallKey::put_known(c10::TensorImpl* tensor, ValueId id) {
  const Value& value = graph_.value(id);
  Operand& operand = tensors_.emplace_back();
  operand.tensor = tensor;
  operand.id = id;
  if (!value.is_graph_input()) return put_value(value, 0);
  operand.asks = value.requires_grad;
  any_graph_input_ |= operand.asks;
  const GraphInput& graph_input = graph_.tape().graph_inputs[value.index];
  // The flag kHandedOn distinguishes tensors that a derivative formula passes on
  // (captured_gradient.h) from tensors of the user's code.
  const bool handed_on = as_pending(tensor) != nullptr && !value.requires_grad;
  put_value(value, kGraphInput | (graph_input.is_odd ? kOdd : 0) |
                       (graph_input.is_copy ? kCopy : 0) | (handed_on ? kHandedOn : 0));
  if (graph_input.is_copy) words_.push_back(reinterpret_cast<uint64_t>(graph_input.given));
  if (!graph_input.is_weight && value.parent == kNone) return;
  words_.push_back(graph_.identity(value));
  words_.push_back(static_cast<uint64_t>(value.offset));
}

// Adds the words of the value that the graph would add for the tensor. A weight gets the identity
// that it would get in the graph. The first calls of a block are usually the same as in the
// previous block, so in most cases the key is already in the cache.
void CallKey::put_new(const at::Tensor& tensor) {
  Value value;
  valid_ = graph_.describe_graph_input(tensor, value);
  Operand operand{tensor.unsafeGetTensorImpl()};
  operand.is_weight = (weights_ & 1) != 0 && value.requires_grad;
  operand.asks = value.requires_grad;
  any_graph_input_ = true;
  // The graph may use one value for this tensor and for a weight that is already in the graph
  // (Graph::weight_value_of).
  if (operand.is_weight && tensor.is_view() && !c10::GradMode::is_enabled()) valid_ = false;
  put_value(value, kGraphInput);
  if (operand.is_weight) {
    words_.push_back(graph_.identity_of_new(number_of_new(operand.tensor)));
    words_.push_back(0);
  }
  tensors_.push_back(operand);
}

// Returns how many other new tensors that require grad the graph will add before `tensor`.
uint32_t CallKey::number_of_new(const c10::TensorImpl* tensor) const {
  c10::SmallVector<const c10::TensorImpl*, 8> met;
  for (const Operand& operand : tensors_) {
    if (operand.id != kNone || !operand.tensor->requires_grad()) continue;
    if (std::find(met.begin(), met.end(), operand.tensor) == met.end()) {
      met.push_back(operand.tensor);
    }
  }
  return static_cast<uint32_t>(std::find(met.begin(), met.end(), tensor) - met.begin());
}

// Adds the words of a Python number that is passed as a tensor.
void CallKey::put_number(const c10::TensorImpl& number) {
  const c10::ScalarType type = c10::typeMetaToScalarType(number.dtype());
  valid_ = valid_ && has_host_memory(number.device()) && as_pending(&number) == nullptr &&
           c10::elementSize(type) <= sizeof(uint64_t);
  if (!valid_) return;
  uint64_t bits = 0;
  std::memcpy(&bits, number.data(), c10::elementSize(type));
  put_number(type, bits);
}

void CallKey::put_number(c10::ScalarType type, uint64_t bits) {
  words_.push_back(kNumberMark | static_cast<uint64_t>(type));
  words_.push_back(bits);
}

void CallKey::add_number(c10::ScalarType type, uint64_t bits) {
  put_number(type, bits);
  weights_ >>= 1;
}

void CallKey::add_list(at::ArrayRef<const at::Tensor*> tensors) {
  append_list_start(words_, tensors.size());
  for (const at::Tensor* tensor : tensors) put_tensor(*tensor);
  weights_ >>= 1;
}

void CallKey::put_scalar(const c10::Scalar& scalar) {
  if (scalar.isSymbolic() || scalar.isComplex()) {
    valid_ = false;
  } else if (scalar.isFloatingPoint()) {
    append_double(words_, scalar.toDouble());
  } else if (scalar.isBoolean()) {
    append_bool(words_, scalar.toBool());
  } else {
    append_int(words_, scalar.toLong());
  }
}

void CallKey::put_boxed(const c10::IValue& value) {
  if (value.isTensor()) return put_tensor(value.toTensor());
  if (value.isList() && !value.isIntList()) {
    const auto list = value.toListRef();
    const bool tensors = std::any_of(list.begin(), list.end(),
                                     [](const c10::IValue& item) { return item.isTensor(); });
    if (tensors || value.isTensorList()) {
      append_list_start(words_, list.size());
      for (const c10::IValue& item : list) {
        item.isTensor() ? put_tensor(item.toTensor()) : append_none(words_);
      }
      return;
    }
  }
  valid_ = valid_ && append_constant(words_.written(), value);
}

CachedCall* CallCache::look_up(const CallKey& key) const {
  const auto found = index_.find(hash_key(key.words()));
  if (found == index_.end()) return nullptr;
  for (CachedCall* r = found->second; r != nullptr; r = r->next) {
    if (r->words.size() == key.words().size() &&
        std::equal(r->words.begin(), r->words.end(), key.words().begin())) {
      return r;
    }
  }
  return nullptr;
}

const CachedCall* CallCache::find(const CallKey& key) {
  const CachedCall* found = key.guess();
  if (found == nullptr) found = look_up(key);
  if (found == nullptr) return nullptr;
  if (last_ != nullptr) last_->next_call = found;
  last_ = found;
  return found;
}

void CallCache::add(const CallKey& key, CachedCall cached) {
  if (entries_.size() >= kMostCachedCalls) {
    last_ = nullptr;
    index_.clear();
    entries_.clear();
  }
  if (look_up(key) != nullptr) return;
  cached.words.assign(key.words().begin(), key.words().end());
  CachedCall*& first = index_[hash_key(key.words())];
  cached.next = first;
  first = &entries_.emplace_back(std::move(cached));
}

}  // namespace autobatch
