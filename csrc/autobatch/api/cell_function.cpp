// Cells of C++ functions. This file contains the part of autobatch::cell that does not depend on
// types.
#include "autobatch/cell_function.h"

#include "autobatch/capture/capture.h"
#include "autobatch/cells/cell_template.h"
#include "autobatch/scope/scope.h"

#include <memory>
#include <string>
#include <utility>

namespace autobatch::cell_detail {
namespace {

// The words that describe a call's results (Parts::words). The template owns the words.
using Words = c10::SmallVector<uint64_t, 8>;

const Words& words_of(const CellTemplate& made) {
  return *static_cast<const Words*>(made.host.get());
}

// One call of a cell while a scope captures.
class Use {
 public:
  Use(const std::string& name, CellFunction& function, Scope& scope, const Parts& arguments,
      c10::function_ref<void()> run, Parts& results)
      : name_(name),
        function_(function),
        scope_(scope),
        arguments_(arguments),
        run_(run),
        results_(results) {}

  void call() {
    Scope::Lock lock(scope_);  // held while all steps of a template are applied
    Key key;
    CellTable::Known inputs;
    if (!make_key(key, &inputs)) return run(lock);
    if (CellTemplate* known = scope_.cells().find(key)) {
      if (known->num_steps() == 0) return run(lock);
      if (scope_.options().check_cells) return lock.release(), check(*known);
      if (known->apply(scope_, arguments_.tensors, results_.tensors, inputs)) {
        results_.words = words_of(*known);
        return;
      }
      scope_.cells().remove(key);
    }
    if (scope_.cells().is_full()) return run(lock);
    lock.release();
    trace();
  }

 private:
  void run(Scope::Lock& lock) const {
    lock.release();
    run_();
  }

  bool make_key(Key& key, CellTable::Known* known = nullptr) const {
    return CellTable::make_key(scope_, function_.id(), arguments_.tensors, arguments_.words, key,
                               known);
  }

  // Runs the function although a template exists, and compares the captured ops with the template.
  void check(const CellTemplate& known) {
    CellTrace trace(scope_, arguments_.tensors);
    run_();
    const std::unique_ptr<CellTemplate> now = trace.finish(results_.tensors);
    std::string difference;
    if (results_.words != words_of(known)) difference = "a different constant result";
    if (difference.empty()) difference = now ? known.difference(*now) : trace.why();
    if (!difference.empty()) raise_different(name_, difference);
  }

  void trace() {
    CellTrace trace(scope_, arguments_.tensors);
    run_();
    trace.check_no_read(name_);
    std::unique_ptr<CellTemplate> made = trace.finish(results_.tensors, &function_);
    if (!made) {
      scope_.report().at_once.push_back(
          {name_, "captured op by op: " + trace.why(), trace.site(), 1, ""});
      made = std::make_unique<CellTemplate>();  // has no steps: later calls run the plain function
    }
    made->host = std::make_shared<Words>(results_.words);
    Key key;  // a new key: only the trace shows which inputs are weights
    if (make_key(key)) scope_.cells().add(key, std::move(made), function_);
  }

  const std::string& name_;
  CellFunction& function_;
  Scope& scope_;
  const Parts& arguments_;
  c10::function_ref<void()> run_;
  Parts& results_;
};

}  // namespace

Function::Function(std::string name)
    : name_(std::move(name)), function_(std::make_shared<CellFunction>()) {}

bool Function::is_captured() const {
  Scope* scope = capturing_scope();
  // A cell within a cell is traced as part of the outer cell.
  return scope != nullptr && scope->options().cells && CellTrace::current() == nullptr &&
         may_apply_cells(*scope);
}

void Function::call(const Parts& arguments, c10::function_ref<void()> run, Parts& results) const {
  Use(name_, *function_, *capturing_scope(), arguments, run, results).call();
}

}  // namespace autobatch::cell_detail
