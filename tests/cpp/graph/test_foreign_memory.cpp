#include "autobatch/graph/foreign_memory.h"
#include "graph_test.h"

namespace autobatch {
namespace {

at::Tensor given_away(bool trained) {
  at::Tensor tensor = at::ones({3}).set_requires_grad(trained);
  tensor.storage().unsafeGetStorageImpl()->set_resizable(false);  // as Tensor.numpy() does
  return tensor;
}

TEST_CASE("foreign memory: a parameter is as before once the array is gone", "[graph]") {
  const at::Tensor parameter = given_away(true);
  c10::Storage array = parameter.storage();
  CHECK_FALSE(owns_memory(parameter));
  array = c10::Storage();
  CHECK(owns_memory(parameter));
  CHECK_FALSE(owns_memory(given_away(false)));  // not a parameter
}

TEST_CASE("foreign memory: what dlpack has is told from others", "[graph]") {
  const at::Tensor given = at::ones({3}), other = at::ones({3});
  note_given_away(given, /*unmarked=*/true);
  CHECK_FALSE(owns_memory(given));
  CHECK(owns_memory(other));
}

TEST_CASE("foreign memory: what pending ops read is copied before it is given away", "[graph]") {
  Graph graph(std::make_shared<GeometryTable>());
  at::Tensor tensor = at::ones({2, 6});
  const at::Tensor column = tensor.slice(1, 0, 6, 3);
  const ValueId id = graph.value_of(column);
  keep_what_is_read(graph, tensor);
  CHECK(graph.find_graph_input(column) == id);
  tensor.fill_(2);
  CHECK(graph.find_graph_input(column) == kNone);
  CHECK(graph.tape().graph_inputs[graph.value(id).index].data.eq(1).all().item<bool>());
}

TEST_CASE("foreign memory: a copy of another dtype is no copy", "[graph]") {
  CHECK(is_as_copied(at::zeros({3}), at::zeros({3})));
  CHECK_FALSE(is_as_copied(at::zeros({3}), at::zeros({3}, at::kInt)));
  CHECK_FALSE(is_as_copied(at::zeros({3}, at::kDouble), at::zeros({3})));
}

}  // namespace
}  // namespace autobatch
