// The dispatch context an op was called in: grad mode, inference mode, autocast, default dtype.
// Kept with every node, and set again when its batch runs, whatever triggered the flush.
#pragma once

#include <ATen/ThreadLocalState.h>
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
  // All of it in one word of a signature's key.
  uint64_t word() const;
};

struct CaptureState;

// What a call's key has of the context.
struct CallContext {
  uint64_t word = 0;     // DispatchContext::word
  bool records = false;  // DispatchContext::grad_mode

  CallContext(const DispatchContext& context) : word(context.word()), records(context.grad_mode) {}
  // Of DispatchContext::current(), without making one.
  explicit CallContext(const CaptureState& state);
};

// Puts the thread into `context` for its lifetime (grad mode excepted: the executor decides
// whether a call is recorded). Expects a clean state underneath; see CleanStateGuard.
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
