// torch-autobatch for LibTorch programs. The code is written for one example. Ops called while a
// scope is open are captured, and run as few batched calls, with the values and gradients of eager
// mode.
//
//   {
//     autobatch::BatchScope scope;
//     for (const Tree& tree : minibatch) losses.push_back(model->forward(tree));
//     scope.close();  // here, so that an error can be caught
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

// Captures the ops that its thread calls, from construction to close() or destruction. Scopes nest:
// an inner scope joins the outer one, and everything runs when the outer scope ends. The exception
// is backward of the roots given to an inner scope, which runs when the inner scope is closed. A
// BatchScope must stay on its thread, and must not be static or thread_local, because torch's own
// thread-local state must outlive it.
class BatchScope {
 public:
  // Throws std::invalid_argument if `options.policy` is unknown.
  AUTOBATCH_API explicit BatchScope(const ScopeOptions& options = {});
  // Calls close(). Errors are dropped if an exception is already being propagated. Otherwise an
  // error terminates the program, because destructors must not throw.
  AUTOBATCH_API ~BatchScope();
  BatchScope(const BatchScope&) = delete;
  BatchScope& operator=(const BatchScope&) = delete;

  // Computes all pending tensors. Throws the first error of a captured op.
  AUTOBATCH_API void flush();
  // Registers a root, in place of a call of `root.backward(gradient)` for each example. close()
  // runs backward of all roots at once, batched. `gradient` has the shape of `root`; it may be
  // undefined if `root` has one element. Throws c10::Error otherwise, and after close().
  AUTOBATCH_API void backward(const at::Tensor& root, const at::Tensor& gradient = {});
  // Ends the scope: computes all pending tensors, then runs backward of the roots. Throws the first
  // error of a captured op or of backward.
  AUTOBATCH_API void close();

  // Returns the report of what was captured and how it ran so far.
  AUTOBATCH_API const Report& report() const;

 private:
  std::shared_ptr<Scope> scope_;
  std::unique_ptr<Roots> roots_;
  int exceptions_;
  bool closed_ = false;
};

// Whether the value of the tensor is not computed yet. Any read of the value computes it.
AUTOBATCH_API bool is_pending(const at::Tensor& tensor);

// Frees the memory cached for buffers of later scopes, and the cached schedules. Returns the number
// of bytes freed.
AUTOBATCH_API size_t empty_cache();

// Describes the build as text: versions of the library and of PyTorch, CUDA kernels, autobatch::map
// and the dispatch key used for capture.
AUTOBATCH_API std::string build_info();

}  // namespace autobatch
