#include "autobatch/placement.h"

#include "autobatch/rules.h"

#include <algorithm>
#include <array>
#include <utility>

namespace autobatch {
namespace {

// Where a batch's results are smaller than this, memory of their own costs more than it saves.
constexpr int64_t kLeastPiece = int64_t{1} << 12;  // bytes
// What is saved for backward goes in pieces of about this size, as backward comes by.
constexpr int64_t kLeastSaved = int64_t{1} << 18;

// How long results are needed.
enum class Fate : uint8_t {
  kSaved,  // until a batch's backward has read them
  kHeld,   // until the tensors that look at them have copies
  kBrief,  // until the last batch has read them
};

// Output k of one signature, in all of its batches.
struct Output {
  const Value* first = nullptr;  // whose type and device are those of all
  int64_t length = 0;            // elements
  uint32_t batches = 0;
  uint32_t last_batch = kNone;
  // Where the next results go, by fate, and whether they stay together.
  std::array<std::array<uint32_t, 2>, 3> slabs{{{kNone, kNone}, {kNone, kNone}, {kNone, kNone}}};
  uint32_t grad = kNone;
};

// Output k of one batch.
struct Piece {
  uint32_t output = 0;
  uint32_t last_use = 0;        // the last batch that writes or reads it
  uint32_t last_saver = kNone;  // the last batch whose backward reads it
  int64_t length = 0;           // elements
  // A batch reads it and the next batch's (or the one before) as one range.
  bool spanning = false;
  bool held = false;  // the user holds some of it, or it is read later
  uint32_t slab = kNone;
};

// What a batch read last in one of its operands.
struct LastRead {
  uint32_t reader = kNone, source = kNone;  // batches
  NodeId node = kNone;
  uint32_t piece = kNone;
};

class Placer {
 public:
  Placer(FlushRecord& record, const PlacementNeeds& needs)
      : record_(record),
        tape_(record.tape),
        needs_(needs),
        batches_(std::span(record.batches).subspan(needs.first_batch)),
        first_output_(needs.num_signatures, kNone) {}

  void run() {
    add_outputs();
    find_held();
    find_uses();
    place();
  }

 private:
  const Node& first_node(const BatchRecord& batch) const {
    return tape_.nodes[record_.order[batch.first]];
  }

  void add_outputs() {
    batch_of_.resize(tape_.nodes.size(), kNone);
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      const BatchRecord& batch = batches_[b];
      const Node& node = first_node(batch);
      uint32_t& first = first_output_[node.signature->local];
      if (first == kNone) {
        first = static_cast<uint32_t>(outputs_.size());
        for (uint32_t k = 0; k < node.num_values; ++k) {
          outputs_.emplace_back().first = &tape_.values[node.first_value + k];
        }
      }
      first_piece_.push_back(static_cast<uint32_t>(pieces_.size()));
      for (uint32_t k = 0; k < node.num_values; ++k) {
        ++outputs_[first + k].batches;
        pieces_.push_back({.output = first + k, .last_use = b});
      }
      next_batch_.push_back(kNone);
      if (node.num_values > 0) {
        const uint32_t before = std::exchange(outputs_[first].last_batch, b);
        if (before != kNone) next_batch_[before] = b;
      }
      for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
        batch_of_[record_.order[i]] = b;
        for (uint32_t k = 0; k < node.num_values; ++k) {
          pieces_[first_piece_[b] + k].length += needs_.reads.extent(record_.order[i], k);
        }
      }
      for (uint32_t k = 0; k < node.num_values; ++k) {
        outputs_[first + k].length += pieces_[first_piece_[b] + k].length;
      }
    }
  }

  // Of a result that is computed.
  uint32_t piece_of(const Value& base) const {
    return first_piece_[batch_of_[base.node]] + base.index;
  }

  void note_saved(uint32_t b, uint32_t piece) {
    if (std::exchange(pieces_[piece].last_saver, b) != b) saved_.emplace_back(b, piece);
  }

  void note_held(uint32_t piece, ValueId id) {
    pieces_[piece].held = true;
    held_.emplace_back(piece, id);
  }

  // Whether something will read the result after these batches.
  bool is_read_later(ValueId base) const {
    if (!needs_.read_later.empty() && needs_.read_later[base] != 0) return true;
    return tape_.is_looked_at(base);
  }

  // Of a result that was computed before these batches.
  void note_saved_earlier(uint32_t b, ValueId base) {
    const uint32_t slab = record_.store.places[base].slab;
    saver_of_earlier_.resize(record_.store.slabs.size(), kNone);
    if (std::exchange(saver_of_earlier_[slab], b) == b) return;
    batches_[b].saved.push_back(slab);
    ++record_.store.savers[slab];
  }

  void find_held() {
    if (needs_.held != nullptr) {
      for (ValueId base : *needs_.held) {
        const Value& value = tape_.values[base];
        if (batch_of_[value.node] != kNone) note_held(piece_of(value), base);
      }
      return;
    }
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      const BatchRecord& batch = batches_[b];
      const uint32_t num_values = first_node(batch).num_values;
      for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
        const ValueId first = tape_.nodes[record_.order[i]].first_value;
        for (uint32_t k = 0; k < num_values; ++k) {
          if (is_read_later(first + k)) note_held(first_piece_[b] + k, first + k);
        }
      }
    }
  }

  void find_uses() {
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      const BatchRecord& batch = batches_[b];
      const Rule& rule = *batch.rule;
      const bool saves = batch.needs_grad && rule.saves();
      const Node& first = first_node(batch);
      for (uint32_t k = 0; saves && k < first.num_values; ++k) {
        if (rule.reads_result(k)) note_saved(b, first_piece_[b] + k);
      }
      for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
        for (const Read& read : needs_.reads.of(record_.order[i])) {
          const uint32_t source = batch_of_[read.node];
          if (source == kNone) {
            const ValueId base = tape_.nodes[read.node].first_value + read.result;
            if (saves && rule.reads(read.slot)) note_saved_earlier(b, base);
            continue;
          }
          const uint32_t number = first_piece_[source] + read.result;
          note_range(b, read, number);
          Piece& piece = pieces_[number];
          if (saves && piece.last_saver != b && rule.reads(read.slot)) note_saved(b, number);
          piece.last_use = b;
        }
      }
    }
  }

  // Of a batch's reads in one operand: whether those of one batch's last result and those of the
  // next batch's first follow each other, as they do where it reads all of both.
  void note_range(uint32_t b, const Read& read, uint32_t piece) {
    const uint32_t source = batch_of_[read.node];
    LastRead& last = last_reads_[read.slot % last_reads_.size()];
    if (last.reader == b && last.source != source && next_batch_[last.source] == source &&
        pieces_[last.piece].output == pieces_[piece].output) {
      const BatchRecord& before = batches_[last.source];
      const BatchRecord& now = batches_[source];
      if (record_.order[before.first + before.count - 1] == last.node &&
          record_.order[now.first] == read.node) {
        pieces_[last.piece].spanning = pieces_[piece].spanning = true;
      }
    }
    last = {b, source, read.node, piece};
  }

  Fate fate_of(const Piece& piece) const {
    if (needs_.keep_all || piece.last_saver != kNone) return Fate::kSaved;
    return piece.held ? Fate::kHeld : Fate::kBrief;
  }

  static int64_t bytes(const Output& output, int64_t length) {
    return length * static_cast<int64_t>(c10::elementSize(output.first->dtype));
  }

  // Whether results go to memory of their own, rather than to where the last ones like them are.
  // What a batch reads as one range stays together.
  bool goes_apart(const Output& output, const Piece& piece, Fate fate, uint32_t last) const {
    if (last == kNone) return true;
    if (piece.spanning) return false;
    if (fate == Fate::kBrief) return bytes(output, piece.length) >= kLeastPiece;
    return fate == Fate::kSaved && bytes(output, record_.store.lengths[last]) >= kLeastSaved;
  }

  bool has_large_pieces(const Output& output) const {
    return bytes(output, output.length) >= kLeastPiece * output.batches;
  }

  void place() {
    Store& store = record_.store;
    first_slab_ = static_cast<uint32_t>(store.lengths.size());
    store.places.resize(tape_.values.size());
    store.last_use.assign(batches_.size(), {});
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      const BatchRecord& batch = batches_[b];
      const Node& node = first_node(batch);
      for (uint32_t k = 0; k < node.num_values; ++k) {
        Piece& piece = pieces_[first_piece_[b] + k];
        Output& output = outputs_[piece.output];
        choose_slab(output, piece);
        // Elsewhere than on a CPU a call for each piece costs more than it saves.
        const bool apart = output.first->device.is_cpu() && has_large_pieces(output);
        if (apart || output.grad == kNone) output.grad = add_gradient();
        place_piece(batch, k, piece.slab, output.grad);
      }
    }
    for (const auto& [slab, last] : slab_last_use_) {
      if (last != kNone) store.last_use[last].push_back(slab);
    }
    store.slabs.resize(store.lengths.size());
    note_savers();
    note_held_only();
  }

  void choose_slab(Output& output, Piece& piece) {
    const Fate fate = fate_of(piece);
    uint32_t& slab = output.slabs[static_cast<size_t>(fate)][piece.spanning ? 1 : 0];
    if (goes_apart(output, piece, fate, slab)) slab = add_slab(piece.last_use);
    piece.slab = slab;
    uint32_t& last = slab_last_use_[slab - first_slab_].second;
    last = fate == Fate::kBrief ? std::max(last, piece.last_use) : kNone;
  }

  void note_savers() {
    Store& store = record_.store;
    store.savers.resize(store.lengths.size(), 0);
    std::vector<uint32_t> last_saver(store.lengths.size(), kNone);
    for (const auto& [b, number] : saved_) {
      const uint32_t slab = pieces_[number].slab;
      if (std::exchange(last_saver[slab], b) == b) continue;
      batches_[b].saved.push_back(slab);
      ++store.savers[slab];
    }
  }

  void note_held_only() {
    Store& store = record_.store;
    std::erase_if(store.held_only, [&](const auto& held) { return store.savers[held.slab] != 0; });
    std::vector<uint32_t> index(store.lengths.size(), kNone);  // by slab
    for (const auto& [number, id] : held_) {
      const Piece& piece = pieces_[number];
      if (fate_of(piece) != Fate::kHeld) continue;
      if (index[piece.slab] == kNone) {
        index[piece.slab] = static_cast<uint32_t>(store.held_only.size());
        store.held_only.push_back({piece.slab, {}});
      }
      store.held_only[index[piece.slab]].values.push_back(id);
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

  // In the order of the schedule.
  void place_piece(const BatchRecord& batch, uint32_t k, uint32_t slab, uint32_t grad) {
    Store& store = record_.store;
    int64_t& length = store.lengths[slab];
    int64_t& grad_length = store.grad_lengths[grad];
    for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
      const ValueId value = needs_.reads.first_value(record_.order[i]) + k;
      const int64_t extent = needs_.reads.extent(record_.order[i], k);
      store.places[value] = {slab, grad, length, grad_length};
      length += extent;
      grad_length += extent;
    }
  }

  FlushRecord& record_;
  const Tape& tape_;
  const PlacementNeeds& needs_;
  std::span<BatchRecord> batches_;      // to be run
  std::vector<uint32_t> first_output_;  // by signature
  std::vector<Output> outputs_;
  std::vector<uint32_t> batch_of_;     // by node
  std::vector<uint32_t> first_piece_;  // by batch
  std::vector<uint32_t> next_batch_;   // by batch: the next one of its signature
  std::vector<Piece> pieces_;
  std::array<LastRead, 8> last_reads_;                // by operand; the ninth shares with the first
  std::vector<std::pair<uint32_t, uint32_t>> saved_;  // by a batch, a piece
  std::vector<std::pair<uint32_t, ValueId>> held_;    // of a piece, a result
  std::vector<uint32_t>
      saver_of_earlier_;  // by earlier slab: the last batch whose backward reads it
  uint32_t first_slab_ = 0;
  std::vector<std::pair<uint32_t, uint32_t>> slab_last_use_;  // of new slabs; kNone: kept
};

}  // namespace

void place_values(FlushRecord& record, const PlacementNeeds& needs) { Placer(record, needs).run(); }

}  // namespace autobatch
