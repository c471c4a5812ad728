// The examples of CONTRIBUTING.md, word for word (tests/python/package/test_documentation.py).
#include "../catch.h"
#include "../schedule_test.h"
#include "../scope_test.h"
#include "autobatch/rules/batch.h"
#include "autobatch/rules/rule.h"

#include <ATen/ops/glu.h>
#include <ATen/ops/glu_backward.h>

#include <cstdint>
#include <numeric>
#include <string_view>

namespace autobatch {
namespace {

using at::Tensor;

// glu(x, dim) over the last dimension, for any number of rows.
class GluRule final : public Rule {
 public:
  bool capture(NodeBuilder& builder) const override {
    const Value x = builder.operand(0);
    if (!is_float(x) || !row_major(x) || x.geometry->numel == 0) return false;
    const int64_t dim = builder.argument(1).toInt();
    const auto& sizes = x.geometry->sizes;
    if (sizes.empty() || sizes.back() % 2 != 0) return false;  // eager raises the error
    if (dim != -1 && dim != x.geometry->dim() - 1) return false;
    builder.key(dtype_word(x));
    builder.key(static_cast<uint64_t>(sizes.back()));
    at::DimVector out(sizes.begin(), sizes.end());
    out.back() /= 2;
    builder.result(out, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const int64_t width = batch.operand_value(0, 0).geometry->sizes.back();
    Tensor out = batch.output_rows(0, width / 2);
    at::glu_out(out, batch.rows(0, width), 1);
  }

  void backward(BackwardBatch& batch) const override {
    const int64_t width = batch.operand_value(0, 0).geometry->sizes.back();
    batch.add(0, at::glu_backward(batch.grad_rows(0, width / 2), batch.rows(0, width), 1));
  }
};

// Runs every node alone, in the order of capture. A baseline for other policies.
class SingleNodePolicy final : public Policy {
 public:
  std::string_view name() const override { return "single"; }

  Schedule schedule(const ScheduleInput& graph) const override {
    Schedule result;
    result.order.resize(graph.num_nodes());
    std::iota(result.order.begin(), result.order.end(), 0);
    result.batch_begin.resize(graph.num_nodes() + 1);
    std::iota(result.batch_begin.begin(), result.batch_begin.end(), 0);
    return result;
  }
};

}  // namespace

TEST_CASE("single runs every node alone", "[schedule]") {
  ScheduleGraph graph;
  graph.add("leaf");
  graph.add("leaf");
  const Schedule schedule = SingleNodePolicy().schedule(graph.view());
  validate(graph.view(), schedule);
  CHECK(schedule.num_batches() == 2);
}

TEST_CASE("the rule of CONTRIBUTING.md is a native rule", "[contributing]") {
  RuleTable table;
  table.push_back({"aten::glu", new GluRule()});
  CHECK(table[0].rule->report_name() == "native");
}

TEST_CASE("scope: glu of any number of rows", "[scope]") {
  const Tensors x = {leaf({3, 6}), leaf({1, 6}), leaf({5, 6})};
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) out.push_back(at::glu(at::tanh(t), -1));
    return out;
  });
  CHECK(row_of(report, "aten::glu").batches == 1);
}

}  // namespace autobatch
