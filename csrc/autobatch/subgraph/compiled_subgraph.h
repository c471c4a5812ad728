// Subgraphs that run as compiled code. For `cell(compile=True)`, a batch of calls runs as one call
// of compiled code, on the stacked inputs. The backward of the batch is also one call. The host
// (host_hooks.h) sets the compiler. In Python the compiler is torch_autobatch/_compiled.py, which
// uses PyTorch's Inductor.
#pragma once

#include "autobatch/export.h"
#include "autobatch/subgraph/subgraph.h"

#include <functional>
#include <memory>
#include <vector>

namespace autobatch {

// The compiled code of a subgraph. Inputs and results are stacked, row-major tensors of shape [n,
// *sizes]. Weights are not stacked.
class CompiledSubgraph {
 public:
  // The tensors of a batch that are saved for backward.
  struct Saved {
    std::vector<at::Tensor> tensors;
    std::vector<uint8_t> stacked;  // for each tensor: whether it has one row for each member
  };
  // The gradient of an operand, or one term of this gradient.
  struct Gradient {
    enum class Kind : uint8_t {
      kStacked,  // `left`: gradients of all members, [n, *sizes]
      kWhole,    // `left`: gradient of a weight, summed over all members
      kProduct,  // `left`, `right`: the factors for BackwardBatch::add_product
      kRows      // `left`, `right`: the rows and indices for BackwardBatch::add_rows
    };
    Kind kind;
    size_t slot;
    at::Tensor left, right;
    int64_t skip = -1;
  };

  virtual ~CompiledSubgraph() = default;
  // Whether the code can run a batch of `members` members.
  virtual bool runs(int64_t members) const = 0;
  virtual std::vector<at::Tensor> forward(at::ArrayRef<at::Tensor> operands, Saved& saved) = 0;
  // Returns the gradients of the operands. `gradients` are the gradients of the results in the bit
  // set `reached`, in the order of the results. The batch has at least two members.
  virtual std::vector<Gradient> backward(uint8_t reached, const Saved& saved,
                                         at::ArrayRef<at::Tensor> gradients) = 0;
};

// A function that compiles a subgraph. If the subgraph can't be compiled, the function warns the
// user and returns null. `operands`: the stacked operands of one batch.
using SubgraphCompiler = std::function<std::unique_ptr<CompiledSubgraph>(
    const std::shared_ptr<const Rule>& plain, at::ArrayRef<at::Tensor> operands)>;
AUTOBATCH_INTERNAL void set_subgraph_compiler(SubgraphCompiler compiler);

// Returns a bit set that contains `reached`, and all results that receive a gradient if backward
// starts at the results in `reached`. An additional gradient of zero for any of the returned
// results does not change other gradients.
AUTOBATCH_INTERNAL uint8_t closure_of(const Subgraph& subgraph, uint8_t reached);

// Returns a rule that runs the compiled code. If the compiled code can't run a batch, the rule
// behaves like the rule that make_subgraph_rule returns.
std::shared_ptr<const Rule> make_compiled_subgraph_rule(Subgraph subgraph);

}  // namespace autobatch
