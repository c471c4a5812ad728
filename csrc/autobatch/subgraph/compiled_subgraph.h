// Subgraphs that a compiler runs: of a cell that asks for it, a batch of uses is one compiled call
// on the stacked inputs, and so is its backward. What compiles is up to whoever embeds the library
// (Python's is torch_autobatch/_compiled.py, with PyTorch's Inductor).
#pragma once

#include "autobatch/export.h"
#include "autobatch/subgraph/subgraph.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace autobatch {

// What a compiler made of a subgraph. Tensors are stacked, row-major [n, *sizes], but weights,
// which come as they are.
class CompiledSubgraph {
 public:
  // What backward needs of a batch.
  struct Saved {
    std::vector<at::Tensor> tensors;
    std::vector<uint8_t> stacked;  // by tensor: it has a row for each member
  };
  // The gradient of an operand, or a part of it.
  struct Gradient {
    enum class Kind : uint8_t {
      kStacked,  // [n, *sizes]
      kWhole,    // of a weight, of all members together
      kProduct,  // BackwardBatch::add_product
      kRows      // BackwardBatch::add_rows: rows `left` at the indices `right`
    };
    Kind kind;
    size_t slot;
    at::Tensor left, right;
    int64_t skip = -1;
  };

  virtual ~CompiledSubgraph() = default;
  // Whether it can run so many members.
  virtual bool runs(int64_t members) const = 0;
  virtual std::vector<at::Tensor> forward(at::ArrayRef<at::Tensor> operands, Saved& saved) = 0;
  // Of gradients of the results in `reached`, in order; of at least two members.
  virtual std::vector<Gradient> backward(uint8_t reached, const Saved& saved,
                                         at::ArrayRef<at::Tensor> gradients) = 0;
};

// Null if it can't be compiled, of which it has told the user. `operands`: of some members.
using SubgraphCompiler = std::function<std::unique_ptr<CompiledSubgraph>(
    const std::shared_ptr<const Rule>& plain, at::ArrayRef<at::Tensor> operands)>;
AUTOBATCH_INTERNAL void set_subgraph_compiler(SubgraphCompiler compiler);

// The results that a gradient can reach on its way from those in `reached`, these included: to take
// part with a gradient of zero makes no difference to them.
AUTOBATCH_INTERNAL uint8_t closure_of(const Subgraph& subgraph, uint8_t reached);

// Runs as make_body_rule's where the compiled code can't.
std::shared_ptr<const Rule> make_compiled_subgraph_rule(Subgraph subgraph);

}  // namespace autobatch
