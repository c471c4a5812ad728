#include "autobatch/plan/memory_plan.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/rules/rule.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

namespace autobatch {
namespace {

// Minimum size of a batch's results that get a separate slab. For smaller results, the cost of a
// separate slab exceeds the benefit.
constexpr int64_t kLeastSpan = int64_t{1} << 12;  // in bytes
// Approximate size in bytes of a slab for backward. Backward frees these slabs one by one.
constexpr int64_t kLeastSaved = int64_t{1} << 16;
// How long results are needed.
enum class Lifetime : uint8_t {
  kSaved,  // until the backward of a batch has read the results
  kHeld,   // until the tensors that hold the results have copies
  kBrief,  // until the last batch that reads the results has run
};

// The results k of all nodes of one signature, for one k.
struct Output {
  const Value* first = nullptr;  // first result; all results have its dtype and device
  int64_t length = 0;            // total number of elements
  uint32_t batches = 0;
  uint32_t last_span = kNone;
  // The slabs for the next results, indexed by lifetime and by OutputSpan::spanning.
  std::array<std::array<uint32_t, 2>, 3> slabs{{{kNone, kNone}, {kNone, kNone}, {kNone, kNone}}};
  uint32_t grad = kNone;
};

// The results k of all members of one batch, for one k.
struct OutputSpan {
  uint32_t output = 0;
  uint32_t before = kNone;       // previous span of the same output
  uint32_t first = 0, last = 0;  // first and last member, as node numbers
  uint32_t last_use = 0;         // the last batch that writes or reads the span
  uint32_t last_saver = kNone;   // the last batch whose backward reads the span
  int64_t length = 0;            // number of elements
  // A batch reads this span and the next or previous span of the same output as one range.
  bool spanning = false;
  bool goes_on = false;  // this span forms one range with the span `before`
  bool held = false;     // whether the user holds a result or a later flush reads a result
};

// The memory of a span.
struct SpanLayout {
  Allocation first;  // place of the first result
  int64_t step = 0;  // elements from one result to the next; -1 if the lengths differ
};

// The position of a node's results. Result k of the node is in the span `span` + k.
struct NodeSlot {
  uint32_t span;   // first span of the node's batch
  uint32_t index;  // index of the node among the batch's members
};

// The last result that the members of a batch have read so far in one operand slot.
struct LastRead {
  uint32_t slot = kNone;
  uint32_t span = kNone;
  uint32_t producer = kNone;
  bool saves = false;  // whether the batch's backward reads this operand
};

class Placer {
 public:
  Placer(FlushRecord& record, const PlacementNeeds& needs)
      : record_(record),
        tape_(record.tape),
        needs_(needs),
        graph_(needs.graph),
        batches_(std::span(record.batches).subspan(needs.first_batch)),
        first_output_(graph_.kinds().size(), kNone),
        slots_(pooled_array<NodeSlot>(graph_.size())) {}

  void run() {
    add_outputs();
    find_held();
    if (!graph_.earlier().empty()) find_saved_earlier();
    find_uses();
    place();
  }

 private:
  uint32_t num_results(const BatchRecord& batch) const {
    return graph_.kind(graph_.members(batch).front()).num_results;
  }

  void add_outputs() {
    first_span_.reserve(batches_.size());
    spans_.reserve(batches_.size());
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      const std::span<const uint32_t> members = graph_.members(batches_[b]);
      const uint32_t results = num_results(batches_[b]);
      uint32_t& first = first_output_[graph_.signature(members.front())];
      if (first == kNone) {
        first = static_cast<uint32_t>(outputs_.size());
        for (uint32_t k = 0; k < results; ++k) {
          outputs_.emplace_back().first = &tape_.values[graph_.first_value(members.front()) + k];
        }
      }
      first_span_.push_back(static_cast<uint32_t>(spans_.size()));
      for (uint32_t i = 0; i < members.size(); ++i) slots_[members[i]] = {first_span_[b], i};
      for (uint32_t k = 0; k < results; ++k) add_span(b, first + k, members, k);
    }
  }

  void add_span(uint32_t b, uint32_t number, std::span<const uint32_t> members, uint32_t k) {
    Output& output = outputs_[number];
    const int64_t length = length_of(members, k);
    ++output.batches;
    output.length += length;
    const auto span = static_cast<uint32_t>(spans_.size());
    spans_.push_back({.output = number,
                      .before = std::exchange(output.last_span, span),
                      .first = members.front(),
                      .last = members.back(),
                      .last_use = b,
                      .length = length});
  }

  int64_t length_of(std::span<const uint32_t> members, uint32_t k) const {
    if (graph_.is_even(members)) {
      return graph_.extent(members.front(), k) * static_cast<int64_t>(members.size());
    }
    int64_t length = 0;
    for (const uint32_t number : members) length += graph_.extent(number, k);
    return length;
  }

  void note_saved(uint32_t b, uint32_t span) {
    if (std::exchange(spans_[span].last_saver, b) != b) saved_.emplace_back(b, span);
  }

  // Whether the user or a later flush may read the result `base`.
  bool is_read_later(ValueId base) { return tape_.is_read(base) || tape_.is_looked_at(base); }

  // Records that the backward of batch `b` reads a result of an earlier flush.
  void note_saved_earlier(uint32_t b, ValueId base) {
    const uint32_t slab = record_.store.places[base].slab;
    const auto [saver, is_new] = saver_of_earlier_.emplace(slab, b);
    if (!is_new && std::exchange(saver->second, b) == b) return;
    batches_[b].saved.push_back(slab);
    ++record_.store.savers[slab];
  }

  void find_held() {
    if (needs_.held != nullptr) {
      for (ValueId base : *needs_.held) {
        const Value& value = tape_.values[base];
        const uint32_t number = graph_.number(value.node);
        if (number != kNone) spans_[slots_[number].span + value.index].held = true;
      }
      return;
    }
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      const uint32_t results = num_results(batches_[b]);
      for (const uint32_t number : graph_.members(batches_[b])) {
        const ValueId first = graph_.first_value(number);
        for (uint32_t k = 0; k < results; ++k) {
          if (is_read_later(first + k)) spans_[first_span_[b] + k].held = true;
        }
      }
    }
  }

  // Finds the results of earlier flushes that the backward of this flush's batches reads.
  void find_saved_earlier() {
    // For each node: the reads by this node of results of earlier flushes.
    std::vector<std::span<const FlushGraph::EarlierRead>> of(graph_.size());
    const auto all = graph_.earlier();
    for (size_t first = 0, i = 1; i <= all.size(); ++i) {
      if (i < all.size() && all[i].reader == all[first].reader) continue;
      of[all[first].reader] = all.subspan(first, i - first);
      first = i;
    }
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      if (!saves(batches_[b])) continue;
      for (const uint32_t number : graph_.members(batches_[b])) {
        for (const FlushGraph::EarlierRead& read : of[number]) {
          if (batches_[b].rule->reads(read.slot)) note_saved_earlier(b, read.base);
        }
      }
    }
  }

  static bool saves(const BatchRecord& batch) { return batch.needs_grad && batch.rule->saves(); }

  void find_uses() {
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      const BatchRecord& batch = batches_[b];
      const bool is_saving = saves(batch);
      const uint32_t results = is_saving ? num_results(batch) : 0;
      for (uint32_t k = 0; k < results; ++k) {
        if (batch.rule->reads_result(k)) note_saved(b, first_span_[b] + k);
      }
      last_reads_.fill({});
      for (const uint32_t number : graph_.members(batch)) note_reads(b, number, is_saving);
    }
  }

  void note_reads(uint32_t b, uint32_t number, bool is_saving) {
    const FlushGraph::Read* read = graph_.reads(number);
    for (const uint32_t producer : graph_.producers(number)) {
      const uint32_t slot = read->slot();
      const uint32_t span = slots_[producer].span + (read++)->result();
      LastRead& last = last_reads_[slot % last_reads_.size()];
      if (last.slot != slot) {
        last = {slot, kNone, kNone, is_saving && batches_[b].rule->reads(slot)};
      }
      if (last.span != span) {
        if (spans_[span].first == producer) note_range(last, span);
        spans_[span].last_use = b;
        if (last.saves) note_saved(b, span);
      }
      last.span = span;
      last.producer = producer;
    }
  }

  // Detects that a batch reads two consecutive spans of one output as one range. In one operand
  // slot, the batch has just read the last result of one span and now reads the first result of the
  // next span.
  void note_range(const LastRead& last, uint32_t span) {
    if (last.span == kNone || spans_[span].before != last.span) return;
    if (spans_[last.span].last != last.producer) return;
    spans_[last.span].spanning = spans_[span].spanning = spans_[span].goes_on = true;
  }

  Lifetime lifetime_of(const OutputSpan& span) const {
    if (needs_.keep_all || span.last_saver != kNone) return Lifetime::kSaved;
    return span.held ? Lifetime::kHeld : Lifetime::kBrief;
  }

  static int64_t bytes(const Output& output, int64_t length) {
    return length * static_cast<int64_t>(c10::elementSize(output.first->dtype));
  }

  // Whether the span gets a new slab, instead of space in the existing slab `last`. Spans that a
  // batch reads as one range share a slab.
  bool goes_apart(const Output& output, const OutputSpan& span, Lifetime lifetime,
                  uint32_t last) const {
    if (last == kNone) return true;
    if (span.goes_on && layouts_[span.before].first.slab == last) return false;
    if (lifetime == Lifetime::kBrief) return bytes(output, span.length) >= kLeastSpan;
    return lifetime == Lifetime::kSaved &&
           bytes(output, record_.store.lengths[last]) >= kLeastSaved;
  }

  bool has_large_spans(const Output& output) const {
    return bytes(output, output.length) >= kLeastSpan * output.batches;
  }

  void place() {
    Store& store = record_.store;
    first_slab_ = static_cast<uint32_t>(store.lengths.size());
    store.places.resize(tape_.values.size());
    store.last_use.assign(batches_.size(), {});
    layouts_.resize(spans_.size());
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      const BatchRecord& batch = batches_[b];
      const uint32_t results = num_results(batch);
      for (uint32_t k = 0; k < results; ++k) {
        const OutputSpan& span = spans_[first_span_[b] + k];
        SpanLayout& layout = layouts_[first_span_[b] + k];
        Output& output = outputs_[span.output];
        const uint32_t slab = choose_slab(output, span);
        // Separate gradient buffers are not used on devices where the cost of an additional call
        // for each span exceeds the benefit.
        const bool separate = !wants_few_launches(output.first->device) && has_large_spans(output);
        if (separate || output.grad == kNone) output.grad = add_gradient();
        layout.first = {slab, output.grad, store.lengths[slab], store.grad_lengths[output.grad]};
        store.lengths[slab] += span.length;
        store.grad_lengths[output.grad] += span.length;
        const std::span<const uint32_t> members = graph_.members(batch);
        layout.step = graph_.is_even(members) ? graph_.extent(members.front(), k) : -1;
        if (layout.step < 0) place_one_by_one(members, k, layout.first);
      }
    }
    place_even();
    for (const auto& [slab, last] : slab_last_use_) {
      if (last != kNone) store.last_use[last].push_back(slab);
    }
    store.slabs.resize(store.lengths.size());
    note_savers();
    note_held();
  }

  uint32_t choose_slab(Output& output, const OutputSpan& span) {
    const Lifetime lifetime = lifetime_of(span);
    uint32_t& slab = output.slabs[static_cast<size_t>(lifetime)][span.spanning ? 1 : 0];
    if (goes_apart(output, span, lifetime, slab)) slab = add_slab(span.last_use);
    uint32_t& last = slab_last_use_[slab - first_slab_].second;
    last = lifetime == Lifetime::kBrief ? std::max(last, span.last_use) : kNone;
    return slab;
  }

  void note_savers() {
    Store& store = record_.store;
    store.savers.resize(store.lengths.size(), 0);
    std::vector<uint32_t> last_saver(slab_last_use_.size(), kNone);  // of each new slab
    for (const auto& [b, number] : saved_) {
      const uint32_t slab = layouts_[number].first.slab;
      if (std::exchange(last_saver[slab - first_slab_], b) == b) continue;
      batches_[b].saved.push_back(slab);
      ++store.savers[slab];
    }
  }

  void note_held() {
    Store& store = record_.store;
    store.holders.resize(store.lengths.size(), 0);
    std::vector<uint8_t> is_held(slab_last_use_.size(), 0);  // whether a new slab is held
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      for (uint32_t k = 0; k < num_results(batches_[b]); ++k) {
        const uint32_t number = first_span_[b] + k;
        const uint32_t slab = layouts_[number].first.slab;
        store.holders[slab] += batches_[b].count;
        if (lifetime_of(spans_[number]) != Lifetime::kHeld) continue;
        if (std::exchange(is_held[slab - first_slab_], 1) == 0) store.held.push_back(slab);
      }
    }
  }

  uint32_t add_slab(uint32_t last_use) {
    const auto slab = static_cast<uint32_t>(record_.store.lengths.size());
    record_.store.lengths.push_back(0);
    slab_last_use_.emplace_back(slab, last_use);
    return slab;
  }

  uint32_t add_gradient() {
    record_.store.grad_lengths.push_back(0);
    return static_cast<uint32_t>(record_.store.grad_lengths.size() - 1);
  }

  void place_one_by_one(std::span<const uint32_t> members, uint32_t k, Allocation place) {
    for (const uint32_t number : members) {
      record_.store.places[graph_.first_value(number) + k] = place;
      place.offset += graph_.extent(number, k);
      place.grad_offset += graph_.extent(number, k);
    }
  }

  // Fills Store::places for the results whose spans have a constant step. Visits the results in
  // capture order, which is the order of the entries in memory.
  void place_even() {
    for (uint32_t number = 0; number < graph_.size(); ++number) {
      const NodeSlot spot = slots_[number];
      Allocation* places = record_.store.places.data() + graph_.first_value(number);
      const uint32_t results = graph_.kind(number).num_results;
      for (uint32_t k = 0; k < results; ++k) {
        const SpanLayout& layout = layouts_[spot.span + k];
        if (layout.step < 0) continue;
        const int64_t offset = spot.index * layout.step;
        const Allocation& first = layout.first;
        places[k] = {first.slab, first.grad, first.offset + offset, first.grad_offset + offset};
      }
    }
  }

  FlushRecord& record_;
  Tape& tape_;
  const PlacementNeeds& needs_;
  const FlushGraph& graph_;
  std::span<BatchRecord> batches_;      // the batches of this flush
  std::vector<uint32_t> first_output_;  // for each signature: index of its first output
  std::vector<Output> outputs_;
  PooledArray<NodeSlot> slots_;       // indexed by node number
  std::vector<uint32_t> first_span_;  // for each batch: index of its first span
  std::vector<OutputSpan> spans_;
  std::vector<SpanLayout> layouts_;     // the layout of each span
  std::array<LastRead, 8> last_reads_;  // indexed by operand slot modulo 8
  // Pairs (batch, span) for which the backward of the batch reads the span.
  std::vector<std::pair<uint32_t, uint32_t>> saved_;
  // For each slab of an earlier flush: the last batch whose backward reads the slab.
  std::unordered_map<uint32_t, uint32_t> saver_of_earlier_;
  uint32_t first_slab_ = 0;
  // Pairs (new slab, last batch that uses it). The batch is kNone if the slab is needed after all
  // batches have run.
  std::vector<std::pair<uint32_t, uint32_t>> slab_last_use_;
};

}  // namespace

void place_values(FlushRecord& record, const PlacementNeeds& needs) { Placer(record, needs).run(); }

}  // namespace autobatch
