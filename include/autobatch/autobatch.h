// torch-autobatch for LibTorch programs: write the code for one example; what runs while a scope is
// open is captured, and runs as few batched calls, with eager's values and gradients.
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

// While one lives, the ops that its thread calls are captured. Scopes nest: an inner one joins the
// outer one, and everything runs when that ends, but for the roots given to an inner one. Not to be
// moved to another thread, and not to be static or thread_local: torch's own thread-local state
// must outlive it.
class BatchScope {
 public:
  // Throws std::invalid_argument if there is no such policy.
  AUTOBATCH_API explicit BatchScope(const ScopeOptions& options = {});
  // As close(). An error is dropped if an exception is under way already; else it ends the program,
  // as errors in destructors do.
  AUTOBATCH_API ~BatchScope();
  BatchScope(const BatchScope&) = delete;
  BatchScope& operator=(const BatchScope&) = delete;

  // Computes everything that is pending. Throws the first error of a captured op.
  AUTOBATCH_API void flush();
  // Where a loop would call `root.backward()` for each example: remembers the root, and close()
  // runs all of them as one batched backward.
  AUTOBATCH_API void backward(const at::Tensor& root, const at::Tensor& gradient = {});
  // Ends the scope: flush(), and backward of the roots. What may throw does so here.
  AUTOBATCH_API void close();

  // What was captured and how it ran, so far.
  AUTOBATCH_API const Report& report() const;

 private:
  std::shared_ptr<Scope> scope_;
  std::unique_ptr<Roots> roots_;
  int exceptions_;
  bool closed_ = false;
};

// Whether the tensor's value is still to be computed. Anything that reads it computes it.
AUTOBATCH_API bool is_pending(const at::Tensor& tensor);

// Gives back the memory that is kept for the next scope's buffers, and the schedules that are kept,
// and says how many bytes it was.
AUTOBATCH_API size_t empty_cache();

// What the library was built with, for people: its version, PyTorch's, CUDA kernels or not.
AUTOBATCH_API std::string build_info();

}  // namespace autobatch
