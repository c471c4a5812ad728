#include "autobatch/plan/fuse_cat_matmul.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/kernels/small_gemm.h"
#include "autobatch/plan/flush_graph.h"
#include "autobatch/plan/reader_counts.h"
#include "autobatch/rules/rule.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace autobatch {
namespace {

class CatMatmulFuser {
 public:
  CatMatmulFuser(Tape& tape, FlushGraph& graph, SignatureTable& signatures)
      : tape_(tape), graph_(graph), signatures_(signatures) {}

  size_t run() {
    if (!find_kinds()) return 0;
    for (uint32_t number = 0; number < graph_.size(); ++number) {
      const NodeId id = graph_.id(number);
      if (!is_product_[graph_.signature(number)]) continue;
      const NodeId cat = tape_.values[operand(id, 1)].node;
      if (cat == kNone || tape_.nodes[cat].signature->rule != &cat_rule()) continue;
      if (!is_left(cat) || !is_product(id) || !joins_rows(cat)) continue;
      if (suits(operand_value(id, 0), operand_value(cat, 0)) && is_alone(id)) collapse(number, cat);
    }
    if (!merges_.empty()) graph_.merge(merges_);
    return merges_.size();
  }

 private:
  // Whether the node runs in this flush and has not been merged.
  bool is_left(NodeId id) const { return tape_.nodes[id].state == NodeState::kNeeded; }

  ValueId operand(NodeId node, size_t slot) const {
    return tape_.operands[tape_.nodes[node].first_operand + slot];
  }
  const Value& operand_value(NodeId node, size_t slot) const {
    return tape_.values[operand(node, slot)];
  }

  // Finds the signatures of products. Returns false if the graph has no `cat`. Skips products that
  // were fused by an earlier flush that failed.
  bool find_kinds() {
    bool has_cat = false;
    for (const FlushGraph::Kind& kind : graph_.kinds()) {
      const Signature& signature = *kind.signature;
      const std::string& op = signature.op->name;
      is_product_.push_back((op == "aten::matmul" || op == "aten::mm") &&
                            signature.rule != &cat_product_rule() &&
                            signature.rule->report_name() == "native");
      has_cat |= signature.rule == &cat_rule();
    }
    return has_cat;
  }

  // Whether the node is a product W x of two matrices and W is trained. A W that is not trained is
  // usually the data of one instance.
  bool is_product(NodeId id) const {
    const Value& w = operand_value(id, 0);
    return tape_.values[w.base].is_graph_input() && w.requires_grad && is_by_row(w) &&
           operand_value(id, 1).geometry->dim() == 2;
  }

  // Whether the `cat` joins computed matrices along the rows, in a layout that the kernel reads.
  // All matrices must have the same number of rows, because kernels are compiled for that number.
  // Graph inputs are excluded, because user code may write to their memory before backward. In
  // eager mode such a write is not an error, because `cat` makes a copy.
  bool joins_rows(NodeId cat) const {
    const int64_t dim = tape_.nodes[cat].signature->arguments[1].toInt();
    if (dim != 0 && dim != -2) return false;
    const auto pieces = tape_.operands_of(tape_.nodes[cat]);
    const int64_t rows = tape_.values[pieces[0]].geometry->sizes[0];
    return std::all_of(pieces.begin(), pieces.end(), [&](ValueId id) {
      const Value& piece = tape_.values[id];
      return !piece.is_graph_input() && has_host_memory(piece.device) && is_by_row(piece) &&
             piece.geometry->sizes[0] == rows;
    });
  }

  // Whether the small-GEMM kernel supports the product of a part of W with a piece, and the
  // products that compute the gradients of W and of the piece. Caches the last result, because most
  // calls have the same geometries as the previous call.
  bool suits(const Value& w, const Value& piece) {
    const std::pair geometries(w.geometry, piece.geometry);
    if (geometries == asked_) return suits_;
    asked_ = geometries;
    const int64_t m = w.geometry->sizes[0], k = piece.geometry->sizes[0], n = columns(piece);
    return suits_ = suits_small_products(m, k, n) && suits_small_products(k, m, n) &&
                    suits_small_products(k, n, m);
  }

  static int64_t columns(const Value& value) { return value.geometry->sizes[1]; }
  static bool is_by_row(const Value& value) {
    const Geometry& g = *value.geometry;
    return value.dtype == c10::ScalarType::Float && g.dim() == 2 && g.strides[1] == 1 &&
           g.strides[0] >= g.sizes[1];
  }

  // Whether only the product reads the result of the `cat`. The product must read the whole result,
  // and must have the same dispatch context as the `cat`.
  bool is_alone(NodeId product) {
    if (!readers_.has_value()) readers_.emplace(tape_, graph_);
    const Signature& cat = *tape_.nodes[operand_value(product, 1).node].signature;
    return readers_->has_single_reader(operand(product, 1)) &&
           cat.context.word() == tape_.nodes[product].signature->context.word();
  }

  void collapse(uint32_t number, NodeId cat) {
    const NodeId product = graph_.id(number);
    tape_.nodes[cat].state = NodeState::kGone;
    Signature* signature = signature_of(product);
    merges_.push_back({number, graph_.number(cat), signature, 1});
    const ValueId weight = operand(product, 0);
    const auto first = static_cast<uint32_t>(tape_.operands.size());
    tape_.operands.push_back(weight);
    for (uint32_t i = 0; i < tape_.nodes[cat].num_operands; ++i) {
      tape_.operands.push_back(operand(cat, i));
    }
    Node& node = tape_.nodes[product];
    node.signature = signature;
    node.first_operand = first;
    node.num_operands = static_cast<uint32_t>(tape_.operands.size()) - first;
  }

  // Returns the signature of fused products with this weight, dispatch context and number of
  // columns.
  Signature* signature_of(NodeId product) {
    const Signature& plain = *tape_.nodes[product].signature;
    const Value& w = operand_value(product, 0);
    const Key key{reinterpret_cast<uint64_t>(&cat_product_rule()),
                  reinterpret_cast<uint64_t>(&plain),
                  tape_.graph_inputs[tape_.values[w.base].index].serial,
                  reinterpret_cast<uint64_t>(w.geometry),
                  static_cast<uint64_t>(w.offset),
                  static_cast<uint64_t>(columns(operand_value(product, 1)))};
    if (key != key_) {  // most calls have the key of the previous call
      signature_ = joined_signature(signatures_, key, plain, cat_product_rule(), 1,
                                    "of the pieces of a cat");
      key_ = key;
    }
    return signature_;
  }

  Tape& tape_;
  FlushGraph& graph_;
  SignatureTable& signatures_;
  std::vector<uint8_t> is_product_;  // for each kind: whether it is a product
  std::optional<ReaderCounts> readers_;
  std::pair<const Geometry*, const Geometry*> asked_;
  bool suits_ = false;
  Key key_;
  Signature* signature_ = nullptr;  // the signature with the key key_
  std::vector<FlushGraph::Merge> merges_;
};

}  // namespace

size_t fuse_cat_matmul(Tape& tape, FlushGraph& graph, SignatureTable& signatures) {
  return CatMatmulFuser(tape, graph, signatures).run();
}

}  // namespace autobatch
