// Subgraphs that run as compiled code. For `cell(compile=True)`, a batch of calls is one compiled
// call on the stacked inputs, and so is its backward. The program that embeds the library sets the
// compiler (for Python it is torch_autobatch/_compiled.py, with PyTorch's Inductor).
#pragma once

#include "autobatch/export.h"
#include "autobatch/subgraph/subgraph.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace autobatch {

// The compiled code of a subgraph. Tensors are stacked and row-major, [n, *sizes]. Weights are
// passed as they are.
class CompiledSubgraph {
 public:
  // The tensors that backward needs of a batch.
  struct Saved {
    std::vector<at::Tensor> tensors;
    std::vector<uint8_t> stacked;  // by tensor: whether it has a row for each member
  };
  // The gradient of an operand, or one term of it.
  struct Gradient {
    enum class Kind : uint8_t {
      kStacked,  // [n, *sizes]
      kWhole,    // of a weight, summed over all members
      kProduct,  // BackwardBatch::add_product
      kRows      // BackwardBatch::add_rows, with rows `left` and indices `right`
    };
    Kind kind;
    size_t slot;
    at::Tensor left, right;
    int64_t skip = -1;
  };

  virtual ~CompiledSubgraph() = default;
  // Whether the code can run a batch of this many members.
  virtual bool runs(int64_t members) const = 0;
  virtual std::vector<at::Tensor> forward(at::ArrayRef<at::Tensor> operands, Saved& saved) = 0;
  // Returns the operands' gradients, from the `gradients` of the results in the bit set `reached`,
  // in order. There are at least two members.
  virtual std::vector<Gradient> backward(uint8_t reached, const Saved& saved,
                                         at::ArrayRef<at::Tensor> gradients) = 0;
};

// Returns null if the subgraph can't be compiled, after a warning to the user. `operands`: the
// stacked operands of one batch.
using SubgraphCompiler = std::function<std::unique_ptr<CompiledSubgraph>(
    const std::shared_ptr<const Rule>& plain, at::ArrayRef<at::Tensor> operands)>;
AUTOBATCH_INTERNAL void set_subgraph_compiler(SubgraphCompiler compiler);

// Returns the results that gradients can reach on their way from the results in `reached`,
// including `reached`. Adding a result of this set with a gradient of zero does not change any
// gradient.
AUTOBATCH_INTERNAL uint8_t closure_of(const Subgraph& subgraph, uint8_t reached);

// Returns a rule that runs the compiled code. Where the compiled code can't run, the rule behaves
// like the rule of make_subgraph_rule.
std::shared_ptr<const Rule> make_compiled_subgraph_rule(Subgraph subgraph);

}  // namespace autobatch
