// Cells of C++ functions: what autobatch::cell is behind its templates.
#include "autobatch/cell_function.h"

#include "autobatch/capture.h"
#include "autobatch/cell.h"
#include "autobatch/scope.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>

namespace autobatch::cell_detail {
namespace {

constexpr size_t kMostTemplates = 4096;  // in one scope; further kinds of calls just run

// What a template keeps besides its tensors.
using Words = std::vector<uint64_t>;

const Words& words_of(const CellTemplate& made) {
  return *static_cast<const Words*>(made.host.get());
}

uint64_t next_id() {
  static std::atomic<uint64_t> next{1};
  // No address of an op's table entry is odd, and Python's cells end in other bits.
  return next++ << 8 | 0x7D;
}

// One call while a scope captures.
class Use {
 public:
  Use(const std::string& name, uint64_t id, Scope& scope, const Parts& arguments,
      const std::function<void()>& run, Parts& results)
      : name_(name), id_(id), scope_(scope), arguments_(arguments), run_(run), results_(results) {}

  void call() {
    Key key;
    if (!make_key(key)) return run_();
    if (CellTemplate* known = scope_.cells().find(key)) {
      if (known->num_steps() == 0) return run_();
      if (scope_.options().check_cells) return check(*known);
      c10::SmallVector<at::Tensor, 4> outputs;
      if (known->apply(scope_, arguments_.tensors, outputs)) {
        results_.tensors.assign(outputs.begin(), outputs.end());
        results_.words = words_of(*known);
        return;
      }
      scope_.cells().remove(key);
    }
    scope_.cells().size() < kMostTemplates ? trace() : run_();
  }

 private:
  bool make_key(Key& key) const {
    return CellTable::make_key(scope_, id_, arguments_.tensors, arguments_.words, key);
  }

  // Runs the function all the same, and compares what it captures.
  void check(const CellTemplate& known) {
    CellTrace trace(scope_, arguments_.tensors);
    run_();
    const std::unique_ptr<CellTemplate> now = trace.finish(results_.tensors);
    std::string difference;
    if (results_.words != words_of(known)) difference = "another constant result";
    if (difference.empty()) difference = now ? known.difference(*now) : trace.why();
    TORCH_CHECK(difference.empty(), "autobatch: the cell '", name_, "'", at(current_site()),
                " does not do at this call what it did at the first one with the same kinds of "
                "arguments: ",
                difference,
                ". A cell's result must depend on its arguments and on what stays the same while "
                "the scope is open.");
  }

  void trace() {
    CellTrace trace(scope_, arguments_.tensors);
    run_();
    TORCH_CHECK(!trace.has_read(), "autobatch: the cell '", name_, "' reads a tensor's value",
                at(trace.site()), " (", trace.why(),
                "), so that its result may depend on more than its arguments. Return the tensor "
                "and read it outside, or don't make a cell of this function.");
    const bool ragged = scope_.tables().ragged_cells.count(id_) != 0;
    std::unique_ptr<CellTemplate> made = trace.finish(results_.tensors, ragged ? 0 : id_);
    if (!made) {
      scope_.report().at_once.push_back(
          {name_, "captured op by op: " + trace.why(), trace.site(), 1});
      made = std::make_unique<CellTemplate>();  // without steps: so it is called plainly
    }
    made->host = std::make_shared<Words>(results_.words);
    Key key;  // now that it is known which inputs are weights
    if (make_key(key)) scope_.cells().add(key, std::move(made), scope_.tables());
  }

  static std::string at(const std::string& site) { return site.empty() ? "" : " at " + site; }

  const std::string& name_;
  uint64_t id_;
  Scope& scope_;
  const Parts& arguments_;
  const std::function<void()>& run_;
  Parts& results_;
};

}  // namespace

Function::Function(std::string name) : name_(std::move(name)), id_(next_id()) {}

bool Function::is_captured() const {
  Scope* scope = capturing_scope();
  // A cell in a cell is a part of it.
  return scope != nullptr && scope->options().cells && CellTrace::current() == nullptr &&
         may_recall(*scope);
}

void Function::call(const Parts& arguments, const std::function<void()>& run,
                    Parts& results) const {
  Use(name_, id_, *capturing_scope(), arguments, run, results).call();
}

}  // namespace autobatch::cell_detail
