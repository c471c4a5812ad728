// The dispatch context in which an op was called: grad mode, inference mode, autocast and default
// dtype. The context is stored with every signature. Before a batch of the signature runs, the
// context is restored, regardless of the code that triggered the flush.
#pragma once

#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

namespace autobatch {

struct DispatchContext {
  bool grad_mode = true;
  bool inference_mode = false;
  bool autocast_cpu = false;
  bool autocast_cuda = false;
  c10::ScalarType autocast_cpu_dtype = c10::ScalarType::BFloat16;
  c10::ScalarType autocast_cuda_dtype = c10::ScalarType::Half;
  c10::ScalarType default_dtype = c10::ScalarType::Float;

  static DispatchContext current();
  bool autocast() const { return autocast_cpu || autocast_cuda; }
  // Packs the context into one word, for the key of a signature.
  uint64_t word() const;
};

struct CaptureState;

// The parts of the context that belong to the key of a cached call (CallKey).
struct CallContext {
  uint64_t word = 0;       // DispatchContext::word
  bool grad_mode = false;  // DispatchContext::grad_mode

  CallContext(const DispatchContext& context)
      : word(context.word()), grad_mode(context.grad_mode) {}
  // Equals CallContext(DispatchContext::current()), but is cheaper.
  explicit CallContext(const CaptureState& state);
};

// While the guard exists, the thread has the state `context`, except for grad mode. The guard does
// not set grad mode, because the executor decides whether autograd records a call. Before the guard
// is created, the thread's state must be clean (CleanState in flush.cpp).
class ContextGuard {
 public:
  explicit ContextGuard(const DispatchContext& context);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  DispatchContext before_;
  bool cache_before_;
  std::optional<c10::InferenceMode> inference_;
};

}  // namespace autobatch
