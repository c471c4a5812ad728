// A scope for code of this library. It can be opened even while a flush or a backward pass of
// another scope runs on this thread.
#pragma once

#include "autobatch/export.h"
#include "autobatch/graph/thread_state.h"

#include <memory>

namespace autobatch {

class Scope;

// While an InnerScope exists, the ops of this thread are captured in a new scope. Ops on ordinary
// tensors are captured too. Other scopes of this thread are not affected.
class AUTOBATCH_INTERNAL InnerScope {
 public:
  InnerScope();
  ~InnerScope();  // drops pending nodes, unless finish() was called
  InnerScope(const InnerScope&) = delete;
  InnerScope& operator=(const InnerScope&) = delete;

  // Computes all pending tensors and closes the scope. Raises the errors of captured ops.
  void finish() { close(false); }

 private:
  void close(bool discard_errors);

  const CaptureState outer_;
  const bool was_included_, was_excluded_;
  std::shared_ptr<Scope> scope_;
};

}  // namespace autobatch
