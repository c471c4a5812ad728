// This header is the API of torch-autobatch for LibTorch programs. The user's code is written for
// one example. Ops that are called while a scope is open are captured, and then run as a small
// number of batched calls. Values and gradients are the same as in eager mode.
//
//   {
//     autobatch::BatchScope scope;
//     for (const Tree& tree : minibatch) losses.push_back(model->forward(tree));
//     scope.close();  // throws if there is an error; the destructor must not throw
//   }
//   torch::stack(losses).sum().backward();
#pragma once

#include "autobatch/cell_function.h"
#include "autobatch/engine.h"
#include "autobatch/export.h"
#include "autobatch/map.h"
#include "autobatch/options.h"
#include "autobatch/report.h"
#include "autobatch/schedule.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

namespace autobatch {

class Scope;
struct Roots;

// From construction to close() or destruction, a BatchScope captures the ops that its thread calls.
// Scopes can be nested: an inner scope joins the outer scope, and its ops run when the outer scope
// ends. Backward of the roots of an inner scope runs when the inner scope is closed. A BatchScope
// must be used only on the thread that created it. A BatchScope must not be static or thread_local,
// because torch's thread-local state must outlive it.
class BatchScope {
 public:
  // Throws std::invalid_argument if `options.policy` is unknown.
  AUTOBATCH_API explicit BatchScope(const ScopeOptions& options = {});
  // Calls close(). If an exception is already being propagated, errors of close() are ignored. If
  // no exception is being propagated, an error terminates the program, because destructors must not
  // throw.
  AUTOBATCH_API ~BatchScope();
  BatchScope(const BatchScope&) = delete;
  BatchScope& operator=(const BatchScope&) = delete;

  // Computes all pending tensors. Throws the first error of a captured op.
  AUTOBATCH_API void flush();
  // Registers a root for backward. Call BatchScope::backward for each example, instead of
  // `root.backward(gradient)`. close() runs backward of all roots together, in batches. `gradient`
  // must have the shape of `root`; it may be undefined if `root` has one element. Throws c10::Error
  // if `gradient` is not valid, or if the scope is closed.
  AUTOBATCH_API void backward(const at::Tensor& root, const at::Tensor& gradient = {});
  // Ends the scope: computes all pending tensors, then runs backward of the roots. Throws the first
  // error of a captured op or of backward.
  AUTOBATCH_API void close();

  // Returns the report about the ops that were captured so far, and about their batches.
  AUTOBATCH_API const Report& report() const;

 private:
  std::shared_ptr<Scope> scope_;
  std::unique_ptr<Roots> roots_;
  int exceptions_;
  bool closed_ = false;
};

// Whether the value of the tensor is not computed yet. Any read of a pending tensor's value
// computes the tensor.
AUTOBATCH_API bool is_pending(const at::Tensor& tensor);

// Frees the cached schedules, and the memory that is cached for buffers of later scopes. Returns
// the number of freed bytes.
AUTOBATCH_API size_t empty_cache();

// Returns a text that describes the build. The text contains the versions of the library and of
// PyTorch, and the dispatch key that is used for capture. The text also tells whether CUDA kernels
// and autobatch::map are available.
AUTOBATCH_API std::string build_info();

}  // namespace autobatch
