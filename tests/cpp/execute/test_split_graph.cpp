#include "autobatch/backward/backward.h"
#include "graph_test.h"

#include <algorithm>

namespace autobatch {
namespace {

const auto kReason = std::make_shared<const std::string>("of no account");

// Splits a hand-written graph. The destructor marks the split's tensors as lost, since no test
// computes them.
struct Divided {
  Divided(TestGraph& g, const Tensors& targets) {
    std::vector<ValueId> ids;
    for (const Tensor& target : targets) ids.push_back(number_of(target));
    const std::vector<NodeId> chosen = g.graph.choose(ids);
    split = g.graph.split(ids, chosen, g.signatures);
  }
  ~Divided() {
    for (Value& value : split.tape.values) {
      if (value.tensor != nullptr) value.tensor->lose(kReason);
    }
  }
  Divided(const Divided&) = delete;
  Divided& operator=(const Divided&) = delete;

  Split split;
};

// Returns the signatures of the nodes that are still to run.
std::vector<const Signature*> ops_of(const Tape& tape) {
  std::vector<const Signature*> ops;
  for (const Node& node : tape.nodes) {
    if (node.state != NodeState::kGone) ops.push_back(node.signature);
  }
  return ops;
}

// Marks the values that a live tensor or a node still to run refers to, and the values that these
// are views of.
std::vector<uint8_t> known_values(const Tape& tape) {
  std::vector<uint8_t> known(tape.values.size(), 0);
  const auto mark = [&](ValueId id) {
    for (; id != kNone; id = tape.values[id].parent) known[id] = 1;
  };
  for (const Node& node : tape.nodes) {
    if (node.state == NodeState::kGone) continue;
    for (uint32_t k = 0; k < node.num_values; ++k) mark(node.first_value + k);
    for (ValueId operand : tape.operands_of(node)) mark(operand);
  }
  for (ValueId id = 0; id < tape.values.size(); ++id) {
    if (tape.values[id].tensor != nullptr) mark(id);
  }
  return known;
}

// Checks that all ids in the tape are consistent.
void check_tape(const Tape& tape) {
  const std::vector<uint8_t> known = known_values(tape);
  for (ValueId id = 0; id < tape.values.size(); ++id) {
    if (!known[id]) continue;
    CAPTURE(id);
    const Value& value = tape.values[id];
    REQUIRE(value.base <= id);
    CHECK((value.base == id) == (value.parent == kNone));
    CHECK(tape.values[value.base].node == value.node);
    if (value.is_graph_input()) {
      REQUIRE(value.index < tape.graph_inputs.size());
      CHECK(tape.graph_inputs[value.index].value == value.base);
    } else {
      REQUIRE(value.node < tape.nodes.size());
      CHECK(tape.nodes[value.node].first_value + value.index == value.base);
      CHECK(tape.nodes[value.node].state != NodeState::kGone);
    }
    if (value.tensor != nullptr) CHECK(value.tensor->value() == id);
    bool listed = value.parent == kNone;
    for (ValueId view = tape.values[value.base].next_view; view != kNone;
         view = tape.values[view].next_view) {
      listed = listed || view == id;
    }
    CHECK(listed);
  }
  for (NodeId id = 0; id < tape.nodes.size(); ++id) {
    if (tape.nodes[id].state == NodeState::kGone) continue;
    CAPTURE(id);
    CHECK(tape.nodes[id].number == kNone);
    for (ValueId operand : tape.operands_of(tape.nodes[id])) {
      if (operand == kNone) continue;
      REQUIRE(operand < tape.values.size());
      CHECK((tape.values[operand].is_graph_input() || tape.values[operand].node < id));
    }
  }
}

TEST_CASE("split: what the target needs, and what joins in its batches", "[split]") {
  TestGraph g;
  Signature first, second, third;
  const ValueId a = g.add(first), b = g.add(first);
  const ValueId a2 = g.add(second, {a}), b3 = g.add(third, {b}), b2 = g.add(second, {b3});
  const Tensor target = g.hold(a2), other = g.hold(b3), joins_not = g.hold(b2);
  const Divided d(g, {target});
  check_tape(d.split.tape);
  check_tape(g.graph.tape());
  // `b` runs in the batch of `a`. `b2` has the target's signature but depends on `b3`, which does
  // not run.
  CHECK(ops_of(d.split.tape) == std::vector<const Signature*>{&first, &first, &second});
  CHECK(ops_of(g.graph.tape()) == std::vector<const Signature*>{&third, &second});
  REQUIRE(d.split.exports.size() == 1);
  const Node& reader = g.graph.tape().nodes[g.graph.value(b3).node];  // its NodeId is unchanged
  CHECK(g.graph.value(g.graph.tape().operands_of(reader)[0]).is_graph_input());
}

TEST_CASE("split: what nobody holds is on neither side", "[split]") {
  TestGraph g;
  Signature first, second, third;
  const ValueId a = g.add(first);
  g.add(first);
  g.add(second, {a});
  const Tensor target = g.hold(a), other = g.hold(g.add(third, {a}));
  const Divided d(g, {target});
  CHECK(d.split.tape.nodes.size() == 1);
  CHECK(g.graph.num_waiting() == 1);
}

TEST_CASE("split: all of it where nothing would stay", "[split]") {
  TestGraph g;
  Signature first, second;
  const ValueId a = g.add(first);
  const Tensor target = g.hold(g.add(second, {a}));
  const Divided d(g, {target});
  CHECK(d.split.tape.nodes.size() == 2);
  CHECK(d.split.exports.empty());
  CHECK(g.graph.empty());
  CHECK(g.graph.tape().values.empty());
}

TEST_CASE("choose: what was computed need not run again, and is there to be read", "[split]") {
  TestGraph g;
  Signature first, second, third;
  const ValueId a = g.add(first);
  const ValueId b = g.add(second, {a});
  const Tensor target = g.hold(b), later = g.hold(g.add(third, {a}));
  CHECK(g.graph.choose({b}) == std::vector<NodeId>{0, 1});
  CHECK(g.graph.num_waiting() == 3);
  g.graph.note_computed({0, 1}, {0, 1}, true);
  CHECK(g.graph.num_waiting() == 1);
  CHECK(g.graph.is_computed(1));
  CHECK(g.graph.choose({b}).empty());
  const Tensor reader = g.hold(g.add(second, {b}));
  CHECK(g.graph.choose({}) == std::vector<NodeId>{2, 3});
}

TEST_CASE("choose: what nobody can reach is forgotten", "[split]") {
  TestGraph g;
  Signature first, second;
  g.add(first);
  const Tensor kept = g.hold(g.add(second));
  CHECK(g.graph.choose({}) == std::vector<NodeId>{1});
  CHECK(g.graph.num_waiting() == 1);
}

TEST_CASE("split: what was computed goes with the part, under the numbers it tells", "[split]") {
  TestGraph g;
  Signature first, second, third;
  const Tensor kept = g.hold(g.add(first));  // stays in g.graph
  const ValueId a = g.add(second);
  const Tensor held = g.hold(a), target = g.hold(g.add(third, {a}));
  const auto record = std::make_shared<FlushRecord>();
  record->store.places.resize(g.graph.tape().values.size());
  record->order = g.graph.choose({a});
  CHECK(record->order == std::vector<NodeId>{1});
  g.graph.set_open_record(record);
  g.graph.note_computed(record->order, record->order, true);
  const Divided d(g, {target});
  check_tape(d.split.tape);
  check_tape(g.graph.tape());
  CHECK(d.split.tape.nodes.size() == 2);
  CHECK(d.split.nodes == std::vector<NodeId>{1, 2});
  CHECK(d.split.values[number_of(held)] == a);
  CHECK(g.graph.num_computed() == 0);
  CHECK(g.graph.num_waiting() == 1);
}

TEST_CASE("choose: in order of capture, whatever was ready before", "[split]") {
  TestGraph g;
  Signature first, second;
  const Tensor early = g.hold(g.add(first)), other = g.hold(g.add(second));
  CHECK(g.graph.choose({number_of(other)}) == std::vector<NodeId>{1});
  g.graph.note_computed({1}, {1}, true);
  const ValueId a = g.add(first), b = g.add(first, {a}), c = g.add(first, {b});
  const Tensor last = g.hold(c), target = g.hold(a);
  // `early` joins, and so do nodes whose operands all run in the same part.
  CHECK(g.graph.choose({a}) == std::vector<NodeId>{0, 2, 3, 4});
}

TEST_CASE("choose: what dies between reads is forgotten, with what only it needs", "[split]") {
  TestGraph g;
  Signature first, second, third;
  const ValueId a = g.add(first), b = g.add(second, {a});
  Tensor dies = g.hold(b);
  const Tensor kept = g.hold(g.add(third));
  CHECK(g.graph.choose({number_of(kept)}) == std::vector<NodeId>{2});
  g.graph.note_computed({2}, {2}, true);
  CHECK(g.graph.num_waiting() == 2);
  dies = Tensor();
  const Tensor target = g.hold(g.add(first));
  CHECK(g.graph.choose({number_of(target)}) == std::vector<NodeId>{3});
  g.graph.note_computed({3}, {3}, true);
  CHECK(g.graph.num_waiting() == 0);
}

TEST_CASE("split: numbers are given anew once most nodes are finished", "[split]") {
  TestGraph g;
  Signature first, second, third;
  const Tensor w = constant({3, 3}), x = constant({3});
  const ValueId weight = g.graph.weight_value_of(w), in = g.graph.value_of(x);
  const uint64_t identity = g.graph.identity(g.graph.value(weight));
  Tensors targets;
  for (int i = 0; i < 5000; ++i) targets.push_back(g.hold(g.add(first, {weight})));
  const ValueId a = g.add(second, {in});
  const Tensor view = g.hold(g.view(a, 2, 1)), reader = g.hold(g.add(third, {a, weight}));
  const Divided d(g, targets);
  const size_t before = g.graph.tape().nodes.size();
  g.graph.compact();
  REQUIRE(before == 5002);
  CHECK(g.graph.tape().nodes.size() == 2);
  CHECK(ops_of(g.graph.tape()) == std::vector<const Signature*>{&second, &third});
  check_tape(g.graph.tape());
  CHECK(g.graph.value(number_of(view)).tensor == as_pending(view));
  CHECK(g.graph.value(number_of(view)).offset == 1);
  CHECK(g.graph.identity(g.graph.value(g.graph.weight_value_of(w.alias()))) == identity);
  CHECK(g.graph.value_of(x) == g.graph.tape().operands_of(g.graph.tape().nodes[0])[0]);
  CHECK(g.graph.choose({number_of(view)}) == std::vector<NodeId>{0});
}

TEST_CASE("split: views go where their memory is, with all they are views of", "[split]") {
  TestGraph g;
  Signature first, second, third;
  const ValueId a = g.add(first), b = g.add(second);
  const ValueId part = g.view(a, 2, 1);
  const ValueId part_of_part = g.view(part, 1, 2);
  const ValueId other = g.view(b, 2, 0);
  const Tensor target = g.hold(part_of_part), whole = g.hold(a), rest = g.hold(other);
  const Tensor reader = g.hold(g.add(third, {part}));
  const Divided d(g, {target});
  check_tape(d.split.tape);
  check_tape(g.graph.tape());
  CHECK(d.split.tape.values[number_of(target)].offset == 2);
  CHECK(d.split.tape.values[number_of(target)].tensor == as_pending(target));
  CHECK(d.split.tape.values[number_of(whole)].tensor == as_pending(whole));
  CHECK(g.graph.value(number_of(rest)).tensor == as_pending(rest));
  CHECK(g.graph.value(number_of(reader)).tensor == as_pending(reader));
  // The reader's operand is a view of the graph input that replaces `a`.
  const Node& node = g.graph.tape().nodes[g.graph.value(number_of(reader)).node];
  const Value& operand = g.graph.value(g.graph.tape().operands_of(node)[0]);
  CHECK(operand.is_graph_input());
  CHECK(operand.offset == 1);
  REQUIRE(d.split.exports.size() == 1);
  CHECK(operand.index == d.split.exports[0].graph_input);
}

TEST_CASE("split: weights keep their identity, outside tensors their numbers", "[split]") {
  TestGraph g;
  Signature first, second;
  const Tensor w = constant({3, 3}), x = constant({3}), unused = constant({3});
  const ValueId weight = g.graph.weight_value_of(w);
  const uint64_t identity = g.graph.identity(g.graph.value(weight));
  const ValueId in = g.graph.value_of(x);
  g.graph.value_of(unused);
  const Tensor target = g.hold(g.add(first, {in, weight}));
  const Tensor other = g.hold(g.add(second, {in}));
  const Divided d(g, {target});
  check_tape(d.split.tape);
  check_tape(g.graph.tape());
  const ValueId again = g.graph.weight_value_of(w.alias());
  CHECK(g.graph.identity(g.graph.value(again)) == identity);
  CHECK(g.graph.value_of(x) == in);
  CHECK_FALSE(g.graph.reads_storage_of(unused));
  CHECK(d.split.tape.graph_inputs.size() == 2);
}

TEST_CASE("split: new values have identities that no former one had", "[split]") {
  TestGraph g;
  Signature first, second;
  std::vector<uint64_t> seen;
  const auto note = [&](ValueId id) { seen.push_back(g.graph.identity(g.graph.value(id))); };
  const ValueId a = g.add(first), b = g.add(second);
  note(a), note(b);
  const Tensor target = g.hold(a), stays = g.hold(b);
  const Divided d(g, {target});
  for (int i = 0; i < 3; ++i) note(g.add(first));
  note(g.graph.value_of(constant({3})));
  std::sort(seen.begin(), seen.end());
  CHECK(std::unique(seen.begin(), seen.end()) == seen.end());
}

TEST_CASE("split: times of writes are counted on either side", "[split]") {
  TestGraph g;
  Signature first, second, third;
  const ValueId a = g.add(first), b = g.add(second), c = g.add(second), e = g.add(third);
  const Tensor target = g.hold(a), tb = g.hold(b), tc = g.hold(c), te = g.hold(e);
  g.graph.note_written(Memory{c, {}, {b, c}, {}, 1, false}, 3);
  g.graph.note_written(Memory{a, {}, {a}, {}, 1, false}, 3);
  g.graph.note_version(c, 4);
  const Divided d(g, {target});
  CHECK(d.split.tape.written_at.at(number_of(target)) == 1);
  const Tape& rest = g.graph.tape();
  CHECK(rest.written_at.at(number_of(tb)) == 3);
  CHECK(rest.written_at.at(number_of(tc)) == 3);
  CHECK(rest.written_at.count(a) == 0);
  CHECK(rest.written_at.count(number_of(te)) == 0);
  CHECK(rest.versions.at(number_of(tc)) == 4);
}

TEST_CASE("split: exports are filled with what was computed", "[split]") {
  TestGraph g;
  Signature first, second;
  const ValueId a = g.add(first);
  const Tensor target = g.hold(a), reader = g.hold(g.add(second, {a}));
  const Divided d(g, {target});
  REQUIRE(d.split.exports.size() == 1);
  const Tensor computed = constant({3});
  g.graph.fill_exports(d.split, {autobatch::Computed{computed, nullptr}});
  const GraphInput& graph_input = g.graph.tape().graph_inputs[d.split.exports[0].graph_input];
  CHECK(graph_input.tensor.is_same(computed));
  CHECK(graph_input.data.const_data_ptr() == computed.const_data_ptr());
  CHECK(graph_input.counted);
  CHECK(g.graph.value_of(computed) == graph_input.value);
  CHECK(g.graph.reads_storage_of(computed));
}

TEST_CASE("split: what reads a lost export is lost, and nothing else", "[split]") {
  TestGraph g;
  Signature first, second, third;
  const ValueId a = g.add(first), b = g.add(second);
  const Tensor target = g.hold(a), stays = g.hold(b);
  const ValueId reader = g.add(third, {b, a});
  const Tensor reads = g.hold(reader), view = g.hold(g.view(reader, 1, 2));
  const Tensor later = g.hold(g.add(second, {reader}));
  const Divided d(g, {target});
  const auto why = std::make_shared<const std::string>("it failed");
  g.graph.fill_exports(d.split, {autobatch::Computed{Tensor(), why}});
  for (const Tensor& lost : {reads, view, later}) {
    CHECK(as_pending(lost)->is_lost());
    CHECK_THROWS_WITH(lost.const_data_ptr(), ContainsSubstring("it failed"));
  }
  CHECK(is_pending(stays));
  CHECK(g.graph.value(number_of(stays)).tensor == as_pending(stays));
}

// --- in a scope ---

TEST_CASE("split: a read runs what it needs, and the rest stays pending", "[split]") {
  const Tensors x = leaves(4, {3});
  BatchScope scope;
  Tensors h, deep;
  for (const Tensor& t : x) h.push_back(at::tanh(t));
  for (const Tensor& t : h) deep.push_back(at::exp(t).sum());
  h[1].const_data_ptr();
  for (const Tensor& t : h) CHECK_FALSE(is_pending(t));  // all ran in one batch
  for (const Tensor& t : deep) CHECK(is_pending(t));
  REQUIRE(scope.report().flushes.size() == 1);
  CHECK(scope.report().flushes[0].nodes == 4);
  scope.flush();
  CHECK(scope.report().flushes[1].nodes == 8);
  for (size_t i = 0; i < x.size(); ++i) {
    const Tensor eager = at::exp(at::tanh(x[i])).sum();
    check_same(deep[i], eager);
    check_same(gradients(deep[i], {x[i], h[i]})[0], gradients(eager, {x[i]})[0]);
  }
}

TEST_CASE("split: gradients cross it, whoever holds what", "[split]") {
  const Tensors x = leaves(3, {4});
  const Tensor w = leaf({4, 4});
  const bool held = GENERATE(true, false);
  check_program(joined({x, {w}}), [&] {
    Tensors out, all;
    for (const Tensor& t : x) {
      const Tensor h = at::tanh(at::linear(t, w));
      const Tensor part = h.narrow(0, 1, 2);
      out.push_back(at::exp(part).sum() + at::linear(h, w).sum());
      if (held) out.push_back(h), out.push_back(part);
      all.push_back(h.sum());
    }
    (void)all[1].item();
    for (const Tensor& t : x) out.push_back(at::linear(at::tanh(t), w) * all[0]);
    return out;
  });
}

TEST_CASE("split: many reads, one after the other", "[split]") {
  const Tensors x = leaves(3, {4});
  const Tensor w = leaf({4, 4});
  check_program(joined({x, {w}}), [&] {
    Tensors h = x, out;
    for (int step = 0; step < 4; ++step) {
      for (Tensor& t : h) t = at::tanh(at::linear(t, w));
      for (const Tensor& t : h) out.push_back(at::sigmoid(t.sum()));
      (void)out[out.size() - 2].item();
    }
    return out;
  });
}

TEST_CASE("split: the part fails, the rest goes on without it", "[split]") {
  const Tensor w = leaf({4, 3});
  const Tensor x = leaf({3});
  const Tensor wrong = at::tensor({1, 4}, at::kLong);
  Tensor apart, reads;
  {
    BatchScope scope;
    const Tensor bad = at::embedding(w, wrong);
    apart = at::exp(x);
    reads = bad * 2 + at::exp(x);
    CHECK_THROWS_AS(bad.sum().item(), c10::Error);
    CHECK(is_pending(apart));
    CHECK_THROWS_AS(reads.const_data_ptr(), c10::Error);
    SECTION("flushed") {}
    SECTION("a tensor is written to") {
      Tensor buffer = constant({3});
      buffer.add_(1);
      const at::NoGradGuard no_grad;
      Tensor(x).mul_(2);  // `apart` reads x
    }
    SECTION("captured on") {
      const Tensor more = at::exp(apart) + at::linear(w, w).sum();
      CHECK(at::isfinite(more).all().item<bool>());
    }
    SECTION("differentiated") {
      apart.sum().backward();
      check_same(x.grad(), at::exp(x).detach());
    }
  }
  CHECK_FALSE(is_pending(apart));
  CHECK(apart.grad_fn() != nullptr);
  CHECK_THROWS_AS(reads + 1, c10::Error);
}

}  // namespace
}  // namespace autobatch
