#include "graph_test.h"

namespace autobatch {
namespace {

// --- geometry ---

TEST_CASE("graph: equal geometries are one object", "[graph]") {
  GeometryTable table;
  const Geometry* a = table.intern({2, 3}, {3, 1});
  CHECK(a == table.intern_contiguous({2, 3}));
  CHECK(a != table.intern({2, 3}, {1, 2}));
  CHECK(a != table.intern({3, 2}, {2, 1}));
  CHECK(a->numel == 6);
  CHECK(a->extent == 6);
  CHECK(a->contiguous);
  CHECK(a->canonical == a);
}

TEST_CASE("graph: what a geometry knows of its memory", "[graph]") {
  GeometryTable table;
  const Geometry* gaps = table.intern({2, 3}, {8, 2});
  CHECK(gaps->extent == 8 + 2 * 2 + 1);
  CHECK_FALSE(gaps->contiguous);
  CHECK_FALSE(gaps->overlapping);
  CHECK(gaps->canonical == table.intern_contiguous({2, 3}));
  const Geometry* turned = table.intern({3, 2}, {1, 3});
  CHECK(turned->canonical == turned);
  CHECK_FALSE(turned->overlapping);
  CHECK(table.intern({2, 3}, {0, 1})->overlapping);        // expand
  CHECK(table.intern({4, 3}, {1, 1})->overlapping);        // unfold
  CHECK_FALSE(table.intern({1, 3}, {0, 1})->overlapping);  // one row only
  const Geometry* empty = table.intern({0, 3}, {3, 1});
  CHECK(empty->numel == 0);
  CHECK(empty->extent == 0);
  CHECK(empty->contiguous);
  CHECK(table.intern({}, {})->extent == 1);
}

// --- graph inputs ---

TEST_CASE("graph: an outside tensor is one value while it holds the same", "[graph]") {
  TestGraph g;
  Tensor x = constant({3});
  const ValueId first = g.graph.value_of(x);
  CHECK(g.graph.value_of(x) == first);
  CHECK(g.graph.value_of(x.alias()) != first);  // another object: another value
  x.requires_grad_(true);
  const ValueId differentiable = g.graph.value_of(x);
  CHECK(differentiable != first);
  CHECK(g.graph.value(differentiable).requires_grad);
  x.set_data(constant({3}));
  CHECK(g.graph.value_of(x) != differentiable);
}

TEST_CASE("graph: weights over the same memory are one", "[graph]") {
  TestGraph g;
  const Tensor w = constant({3, 3});
  const ValueId first = g.graph.weight_value_of(w.t());
  CHECK(g.graph.weight_value_of(w.t()) == first);
  {
    const at::NoGradGuard no_grad;
    CHECK(g.graph.find_graph_input(w.t()) == first);
    CHECK(g.graph.find_graph_input(w[0]) == kNone);
    w.add_(1);
    CHECK(g.graph.find_graph_input(w.t()) == kNone);
  }
  CHECK(g.graph.weight_value_of(w) != first);
  CHECK(g.graph.weight_value_of(w[0]) != g.graph.weight_value_of(w[1]));
}

TEST_CASE("graph: foreign memory is copied at each use, as a weight while it holds the same",
          "[graph]") {
  TestGraph g;
  std::vector<double> buffer{1, 2, 3};
  const Tensor x = at::from_blob(buffer.data(), {3}, at::kDouble);
  const ValueId first = g.graph.value_of(x);
  CHECK(g.graph.value_of(x) != first);
  const ValueId weight = g.graph.weight_value_of(x);
  CHECK(g.graph.weight_value_of(x) == weight);
  buffer[1] = 7;
  const ValueId refilled = g.graph.weight_value_of(x);
  CHECK(refilled != weight);
  const auto second_of = [&](ValueId id) {
    return g.graph.tape().graph_inputs[g.graph.value(id).index].data[1].item<double>();
  };
  CHECK(second_of(weight) == 2);
  CHECK(second_of(refilled) == 7);
}

TEST_CASE("graph: whether pending ops read a tensor's memory", "[graph]") {
  TestGraph g;
  const Tensor x = constant({2, 3});
  CHECK_FALSE(g.graph.reads_storage_of(x));
  g.graph.value_of(x[0]);
  CHECK(g.graph.reads_storage_of(x));
  CHECK(g.graph.reads_storage_of(x[1]));
  CHECK_FALSE(g.graph.reads_storage_of(x.clone()));
  CHECK_FALSE(g.graph.reads_storage_of(Tensor()));
}

TEST_CASE("graph: identities", "[graph]") {
  TestGraph g;
  Signature op;
  const Tensor x = constant({3}), y = constant({3});
  const ValueId a = g.graph.value_of(x), b = g.graph.value_of(y);
  const ValueId c = g.add(op), d = g.add(op);
  const ValueId part = g.view(c, 2, 1);
  const auto identity = [&](ValueId id) { return g.graph.identity(g.graph.value(id)); };
  CHECK(identity(part) == identity(c));
  std::vector<uint64_t> all{identity(a), identity(b), identity(c), identity(d)};
  std::sort(all.begin(), all.end());
  CHECK(std::unique(all.begin(), all.end()) == all.end());
  g.graph.take();
  CHECK(g.graph.empty());
  CHECK_FALSE(g.graph.reads_storage_of(x));
}

// --- written memory ---

TEST_CASE("graph: values stand for themselves until something is written", "[graph]") {
  TestGraph g;
  Signature op;
  const ValueId base = g.add(op);
  const ValueId part = g.view(base, 2, 1);
  CHECK_FALSE(g.graph.has_writes());
  CHECK(g.graph.memory_of(base) == nullptr);
  CHECK(g.graph.current(base) == base);
  CHECK(g.graph.current(part) == part);
}

TEST_CASE("graph: after a write to the whole, views are views of what was written", "[graph]") {
  TestGraph g;
  Signature op;
  const ValueId base = g.add(op), part = g.view(base, 2, 1), content = g.add(op), other = g.add(op);
  Memory& memory = g.graph.make_memory(base);
  CHECK(memory.content == base);
  CHECK(&g.graph.make_memory(base) == &memory);
  memory.content = content;
  CHECK(g.graph.current(base) == content);
  const Value now = g.graph.value(g.graph.current(part));
  CHECK(now.base == content);
  CHECK(now.offset == 1);
  CHECK(now.geometry == g.graph.value(part).geometry);
  CHECK(g.graph.current(other) == other);
  {
    const Graph::RawGuard raw(g.graph);
    CHECK(g.graph.current(base) == base);
    CHECK(g.graph.current(part) == part);
  }
  CHECK(g.graph.current(base) == content);
  g.graph.forget_memories();
  CHECK(g.graph.current(base) == base);
}

TEST_CASE("graph: a part that was written is what was written there", "[graph]") {
  TestGraph g;
  Signature op;
  const ValueId base = g.add(op), part = g.view(base, 2, 1), again = g.view(base, 2, 1);
  const ValueId source = g.add(op, {}, true, g.geometries->intern_contiguous({2}));
  Memory& memory = g.graph.make_memory(base);
  memory.requires_grad = true;
  memory.writes.push_back({g.graph.value(part).geometry, 1, source});
  CHECK(g.graph.current(part) == source);
  CHECK(g.graph.current(again) == source);
  CHECK(g.graph.requires_grad_now(base));
  CHECK(g.graph.requires_grad_now(part));
  CHECK_FALSE(g.graph.value(base).requires_grad);
}

TEST_CASE("graph: what was written, and when, by former contents", "[graph]") {
  TestGraph g;
  Signature op;
  const ValueId base = g.add(op), content = g.add(op);
  Memory& memory = g.graph.make_memory(base);
  memory.contents.push_back(content);
  g.graph.note_written(memory, 2);
  CHECK(g.graph.tape().written_at.at(base) == 2);
  CHECK(g.graph.tape().written_at.at(content) == 2);
  g.graph.note_version(content, 5);
  g.graph.forget_memories();
  CHECK(g.graph.make_memory(content).version == 5);  // the count continues
}

TEST_CASE("graph: fresh values", "[graph]") {
  TestGraph g;
  Signature op;
  const ValueId fresh = g.add(op), viewed = g.add(op), written = g.add(op);
  const ValueId computed = g.add(op, {fresh});
  const ValueId graph_input = g.graph.value_of(constant({3}));
  CHECK(g.graph.is_fresh(fresh));
  CHECK_FALSE(g.graph.is_fresh(computed));
  CHECK_FALSE(g.graph.is_fresh(graph_input));
  const ValueId part = g.view(viewed, 2, 0);
  CHECK(g.graph.is_fresh(viewed));
  CHECK(g.graph.is_fresh(part));  // no other tensor is on its memory
  const Tensor held = g.hold(part);
  CHECK_FALSE(g.graph.is_fresh(viewed));
  g.graph.make_memory(written);
  CHECK_FALSE(g.graph.is_fresh(written));
}

// --- tensors ---

TEST_CASE("graph: a tensor stands for its value until it dies", "[graph]") {
  TestGraph g;
  Signature op;
  const ValueId a = g.add(op), b = g.add(op, {}, true);
  Tensor held = g.hold(a);
  CHECK_FALSE(held.requires_grad());
  CHECK(g.graph.value(a).tensor == as_pending(held));
  g.graph.move_tensor(a, b);
  CHECK(g.graph.value(a).tensor == nullptr);
  CHECK(g.graph.value(b).tensor == as_pending(held));
  CHECK(number_of(held) == b);
  held.reset();
  CHECK(g.graph.value(b).tensor == nullptr);
  CHECK(g.hold(b).requires_grad());
}

TEST_CASE("graph: a tensor that dies on another thread is taken note of", "[graph]") {
  TestGraph g;
  Signature op;
  const ValueId a = g.add(op), b = g.add(op);
  Tensor dying = g.hold(a);
  const Tensor staying = g.hold(b);
  std::thread([&] { dying.reset(); }).join();
  g.graph.settle_orphans();
  CHECK(g.graph.value(a).tensor == nullptr);
  CHECK(g.graph.value(b).tensor == as_pending(staying));
}

TEST_CASE("graph: a tensor that is dying on another thread is held or gone", "[graph]") {
  Signature op;
  for (int round = 0; round < 500; ++round) {
    TestGraph g;
    const ValueId a = g.add(op);
    Tensor dying = g.hold(a);
    PendingTensor* known = g.graph.value(a).tensor;
    std::thread other([&] { dying.reset(); });
    auto held = known->hold();  // `known` stays valid memory even if the tensor has died
    if (held != nullptr) CHECK(held->value() == a);
    other.join();
    if (held != nullptr) CHECK(g.graph.value(a).tensor == held.get());
    held.reset();
    g.graph.settle_orphans();
    CHECK(g.graph.value(a).tensor == nullptr);
  }
}

TEST_CASE("graph: one that ends loses its tensors, and they say so", "[graph]") {
  Signature op;
  auto g = std::make_unique<TestGraph>();
  const Tensor lost = g->hold(g->add(op));
  Tensor dying = g->hold(g->add(op));
  std::thread([&] { dying.reset(); }).join();
  g.reset();
  CHECK_FALSE(is_pending(lost));
  REQUIRE(as_pending(lost) != nullptr);
  CHECK(as_pending(lost)->is_lost());
  CHECK_THROWS_WITH(lost.const_data_ptr(), ContainsSubstring("its scope ended"));
}

TEST_CASE("graph: a pending tensor's metadata is that of an ordinary one", "[graph]") {
  const std::vector<Tensor> kinds = {
      at::empty({}),
      at::empty({5}),
      at::empty({0}),
      at::empty({3, 4}),
      at::empty({3, 0}),
      at::empty({1, 4, 1}),
      at::empty({2, 3, 4}),
      at::empty({3, 4}).t(),
      at::empty({4, 1}).t(),
      at::empty({3, 1}).expand({3, 4}),
      at::empty({4, 6}).slice(1, 0, 6, 2),
      at::empty({2, 3, 4, 5}),
      at::empty({2, 3, 4, 5}, at::MemoryFormat::ChannelsLast),
      at::empty({2, 3, 4, 5, 2}),
      at::empty({2, 3, 4, 5, 2}, at::MemoryFormat::ChannelsLast3d),
      at::empty({1, 2, 1, 2, 1, 2}),
  };
  Signature op;
  TestGraph g;
  for (const Tensor& kind : kinds) {
    CAPTURE(kind.sizes(), kind.strides());
    const Geometry* geometry = g.geometries->intern(kind.sizes(), kind.strides());
    const Tensor pending = g.hold(g.add(op, {}, false, geometry));
    CHECK(pending.sizes() == kind.sizes());
    CHECK(pending.strides() == kind.strides());
    CHECK(pending.numel() == kind.numel());
    CHECK(pending.storage_offset() == kind.storage_offset());
    CHECK(pending.suggest_memory_format() == kind.suggest_memory_format());
    CHECK(pending.is_non_overlapping_and_dense() == kind.is_non_overlapping_and_dense());
    for (const at::MemoryFormat format :
         {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast,
          at::MemoryFormat::ChannelsLast3d}) {
      CHECK(pending.is_contiguous(format) == kind.is_contiguous(format));
    }
  }
}

}  // namespace
}  // namespace autobatch
