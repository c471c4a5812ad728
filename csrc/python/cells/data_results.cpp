#include "python/cells/data_results.h"

#include "autobatch/capture/capture.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/scope/scope.h"

#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <vector>

namespace py = pybind11;

namespace autobatch {
namespace {

constexpr size_t kMostOfOne = size_t{64} << 10;

// Whether the tensor is an ordinary strided CPU tensor that requires no gradient.
bool is_data(const at::Tensor& tensor) {
  using c10::DispatchKey;
  const c10::DispatchKeySet keys = tensor.key_set();
  const bool is_wrapped = keys.has_any(
      c10::DispatchKeySet({DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
                           DispatchKey::Python, DispatchKey::Conjugate, DispatchKey::Negative}));
  return as_pending(tensor) == nullptr && !is_wrapped && tensor.device().is_cpu() &&
         tensor.layout() == at::kStrided && !tensor.requires_grad();
}

// Whether pending updates, or instances of a map, may still write to the memory of ordinary
// tensors.
bool may_be_stale() {
  Scope* scope = Scope::current();
  if (scope == nullptr) return false;
  const MemoryUpdates& updates = scope->updates();
  return !updates.waiting.empty() || !updates.claims.empty() || !updates.orders.empty();
}

void append(std::string& key, const void* bytes, size_t size) {
  key.append(static_cast<const char*>(bytes), size);
}

void append(std::string& key, int64_t number) { append(key, &number, sizeof number); }

// Appends the metadata and the elements of the tensor to the key. Returns false if the tensor is
// too large or is not contiguous.
bool append(std::string& key, const at::Tensor& tensor) {
  if (!tensor.is_contiguous() || tensor.nbytes() > kMostOfOne) return false;
  append(key, static_cast<int64_t>(tensor.scalar_type()) << 8 | tensor.dim());
  for (const int64_t size : tensor.sizes()) append(key, size);
  for (const int64_t stride : tensor.strides()) append(key, stride);
  append(key, tensor.const_data_ptr(), tensor.nbytes());
  return true;
}

// Appends the type and the value of a number to the key. Returns false if the object is neither a
// float nor an int of at most 64 bits.
bool append(std::string& key, PyObject* number) {
  if (PyFloat_CheckExact(number) != 0) {
    const double value = PyFloat_AS_DOUBLE(number);
    key += 'f';
    append(key, &value, sizeof value);
    return true;
  }
  int overflow = 0;
  if (PyLong_CheckExact(number) == 0) return false;
  key += 'i';
  append(key, static_cast<int64_t>(PyLong_AsLongLongAndOverflow(number, &overflow)));
  return overflow == 0;
}

bool are_data(const py::tuple& values) {
  return std::all_of(values.begin(), values.end(), [](py::handle value) {
    return !THPVariable_Check(value.ptr()) ||
           (THPVariable_CheckExact(value.ptr()) && is_data(THPVariable_Unpack(value.ptr())));
  });
}

// Returns the key of the values. Returns nothing if the values cannot be a key, for example because
// a tensor is too large.
std::optional<std::string> key_of(const py::tuple& values) {
  std::string key;
  append(key, static_cast<int64_t>(context_word()));
  for (const py::handle value : values) {
    const bool appended = THPVariable_Check(value.ptr())
                              ? append(key, THPVariable_Unpack(value.ptr()))
                              : append(key, value.ptr());
    if (!appended) return {};
  }
  return key;
}

bool share_memory(const at::Tensor& result, const py::tuple& values) {
  return std::any_of(values.begin(), values.end(), [&](py::handle value) {
    return THPVariable_Check(value.ptr()) &&
           THPVariable_Unpack(value.ptr()).storage().is_alias_of(result.storage());
  });
}

// Returns the results, and adds their size to `num_bytes`. A result that is a view of one of the
// values is copied. Returns nothing if a result cannot be stored.
std::optional<py::tuple> stored(const py::tuple& results, const py::tuple& values,
                                size_t& num_bytes) {
  py::tuple made(results.size());
  for (size_t k = 0; k < results.size(); ++k) {
    py::object result = results[k];
    if (THPVariable_Check(result.ptr())) {
      at::Tensor tensor = THPVariable_Unpack(result.ptr());
      if (!is_data(tensor)) return {};
      if (share_memory(tensor, values)) {
        if (!tensor.is_non_overlapping_and_dense()) return {};  // a copy would have other strides
        tensor = at::clone(tensor);
        result = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
      }
      num_bytes += tensor.storage().nbytes();
    }
    made[k] = std::move(result);
  }
  return made;
}

}  // namespace

py::object DataResults::find(const py::tuple& values) const {
  if (!are_data(values) || may_be_stale()) return py::none();
  const auto key = key_of(values);
  const auto found = key.has_value() ? known_.find(*key) : known_.end();
  return found == known_.end() ? py::object(py::bool_(false)) : found->second;
}

py::object DataResults::add(const py::tuple& values, const py::object& results) {
  auto key = key_of(values);
  if (!key.has_value()) return results;
  size_t num_bytes = key->size();
  py::object kept = results;
  if (py::isinstance<py::tuple>(results)) {
    auto made = stored(results, values, num_bytes);
    if (!made.has_value()) return results;
    kept = *made;
  }
  num_bytes_ += num_bytes;
  if (num_bytes_ > kMostBytes) {
    known_.clear();
    num_bytes_ = num_bytes;
  }
  known_[std::move(*key)] = kept;
  return kept;
}

}  // namespace autobatch
