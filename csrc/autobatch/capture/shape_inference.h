// Infers the metadata of an op's results without running the op on its data.
#pragma once

#include "autobatch/capture/call_cache.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/view_ops.h"
#include "autobatch/rules/rule.h"

namespace autobatch {

// Infers the metadata of the op's results by running eager's own kernels on zeros. If the result
// sizes might depend on the values, the kernels also run on ones. Meta kernels are used only for
// large operands, and only if these kernels import no Python modules. (Most Meta kernels are
// written in Python, and the first call imports PyTorch's compiler.) Meta kernels also accept
// arguments that eager rejects, and return results with other strides than eager. Sets `list` if
// the op returns one Tensor[]. Returns false if the metadata cannot be inferred, if a result is an
// argument or a view of an argument, or if the op raises an error.
bool infer_results(const NodeBuilder& builder, std::vector<ResultMeta>& results, bool& list);

// These functions make sample data for ops that fail for singular matrices. `is_matrix` returns
// whether the tensor can have such data. `fill_with_identity` makes the matrices nearly equal to
// the identity. Dimensions that repeat the same memory (`expand`) are filled once.
bool is_matrix(const at::Tensor& tensor);
void fill_with_identity(const at::Tensor& matrices);

// Whether this thread runs an op only to infer the metadata of its results.
AUTOBATCH_INTERNAL bool is_trying();

// Infers the views that a view op makes, by address arithmetic or through the op's Meta kernel. The
// outcome is kAsk if the arguments are wrong, or if the results are not views of argument 0's
// memory with argument 0's dtype.
void infer_views(const OpInfo& op, at::ArrayRef<c10::IValue> arguments, ViewResult& result);
// Sets View::element_maps of `views` if argument 0 is pending, requires grad, and overlaps itself
// or is a view of a value that overlaps itself. An element map gives the positions of the view's
// elements among the elements of the overlapping value (graph.h: ElementMap). If the positions
// cannot be inferred, the map is omitted. Returns false if the result depends on more than argument
// 0's geometry.
bool infer_element_maps(const OpInfo& op, at::ArrayRef<c10::IValue> arguments, Graph& graph,
                        c10::SmallVectorImpl<CachedCall::View>& views);

}  // namespace autobatch
