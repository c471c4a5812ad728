// A scope that code of this library opens, also while a flush or a backward pass of another scope
// runs on this thread.
#pragma once

#include "autobatch/export.h"
#include "autobatch/graph/thread_state.h"

#include <memory>

namespace autobatch {

class Scope;

// While an object exists, the ops of this thread are captured in a new scope, also ops on ordinary
// data. Other scopes of this thread are not affected.
class AUTOBATCH_INTERNAL InnerScope {
 public:
  InnerScope();
  ~InnerScope();  // drops what is pending, unless finish() was called
  InnerScope(const InnerScope&) = delete;
  InnerScope& operator=(const InnerScope&) = delete;

  // Closes the scope: computes everything that is pending. Raises errors of ops.
  void finish() { close(false); }

 private:
  void close(bool discard_errors);

  const CaptureState outer_;
  const bool was_included_, was_excluded_;
  std::shared_ptr<Scope> scope_;
};

}  // namespace autobatch
