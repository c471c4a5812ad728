#include "autobatch/report.h"

#include "autobatch/schedule.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

namespace autobatch {
namespace {

// When kMaxKept graphs are stored, their bounds are computed and the graphs are freed. This limits
// the memory of a long-lived scope with many flushes.
constexpr size_t kMaxKept = 16;

// Maximum number of rows of a report. The maximum limits the memory of a long-lived scope.
constexpr size_t kMaxRows = 10000;

// The first kMaxFlushes flushes have one row each. A later flush is added to the first row with the
// same reason and site, if there is such a row.
constexpr size_t kMaxFlushes = 200;

uint64_t bound_of(const BoundInput& input) {
  const std::vector<uint8_t> heavy(input.batchable.size(), 0);
  ScheduleInput s;
  s.signature = input.signature;
  s.input_begin = input.input_begin;
  s.inputs = input.inputs;
  s.num_signatures = static_cast<uint32_t>(input.batchable.size());
  s.batchable = input.batchable;
  s.heavy = heavy;
  return autobatch::lower_bound(s);
}

std::string at(const std::string& site) { return site.empty() ? "" : " at " + site; }

}  // namespace

uint64_t Report::lower_bound() const {
  for (const BoundInput& input : bound_inputs_) bound_ += bound_of(input);
  bound_inputs_.clear();
  return bound_;
}

void Report::add_pause(const std::string& site, bool measured) {
  constexpr size_t kMost = 16;
  const auto is_same = [&](const PauseReport& p) {
    return p.site == site && p.measured == measured;
  };
  const auto found = std::ranges::find_if(pauses, is_same);
  last_pause_ = static_cast<size_t>(found - pauses.begin());
  if (last_pause_ == kMost) --last_pause_;
  if (last_pause_ == pauses.size()) pauses.push_back({site, 0, 0, measured});
  ++pauses[last_pause_].count;
}

void Report::add_paused_calls(uint64_t calls) {
  if (!pauses.empty()) pauses[last_pause_].calls += calls;
}

void Report::add_bound_input(BoundInput input) {
  if (bound_inputs_.size() >= kMaxKept) lower_bound();
  bound_inputs_.push_back(std::move(input));
}

SignatureReport* Report::find(uint64_t serial, std::string_view rule) {
  const auto found = index_.find({serial, std::string(rule)});
  if (found != index_.end()) return &signatures[found->second];
  return signatures.size() > kMaxRows ? &signatures.back() : nullptr;
}

SignatureReport& Report::add(uint64_t serial, SignatureReport row) {
  if (signatures.size() == kMaxRows)
    return signatures.emplace_back(SignatureReport{"(others)", "", "", "", ""});
  index_.emplace(std::pair(serial, row.rule), signatures.size());
  return signatures.emplace_back(std::move(row));
}

void Report::add_flush(FlushReport flush) {
  ++num_flushes;
  const auto [entry, is_new] =
      flush_index_.try_emplace(flush.reason + '\n' + flush.site, flushes.size());
  if (flushes.size() < kMaxFlushes || (is_new && flushes.size() < kMaxRows)) {
    flushes.push_back(std::move(flush));
    return;
  }
  FlushReport& like = flushes[std::min(entry->second, flushes.size() - 1)];
  like.nodes += flush.nodes;
  like.batches += flush.batches;
  like.count += flush.count;
}

void Report::keep(const std::shared_ptr<const void>& tables) {
  if (tables_ == tables) return;
  for (SignatureReport& row : signatures) row.kind = nullptr;
  tables_ = tables;
}

bool Report::knows_at_once(const std::string& op, const char* reason) {
  const auto found = at_once_index_.find({&op, reason});
  if (found == at_once_index_.end()) return false;
  ++at_once[found->second].count;
  return true;
}

void Report::add_at_once(const std::string& op, const char* reason, AtOnceReport row) {
  at_once_index_.emplace(std::pair(&op, reason), at_once.size());
  at_once.push_back(std::move(row));
}

std::string Report::to_string() const {
  std::ostringstream out;
  const uint64_t bound = lower_bound();
  out << "torch_autobatch report\n"
      << "  ops captured    " << ops << " (and " << views << " views)\n"
      << "  ops run         " << nodes << " in " << batches << " batches, " << launches
      << " launches (" << launches_saved() << " saved)\n"
      << "  lower bound     " << bound << " batches";
  if (bound > 0) {
    out << " (ratio " << std::fixed << std::setprecision(2)
        << static_cast<double>(batches) / static_cast<double>(bound) << ")";
  }
  out << "\n";
  if (checks > 0) out << "  checks          " << checks << " waited for a flush\n";
  std::vector<const SignatureReport*> rows;
  for (const SignatureReport& s : signatures) rows.push_back(&s);
  std::stable_sort(rows.begin(), rows.end(),
                   [](const auto* a, const auto* b) { return a->launches > b->launches; });
  out << "  " << std::left << std::setw(26) << "op" << std::right << std::setw(9) << "ops"
      << std::setw(9) << "batches" << std::setw(9) << "largest" << "  " << std::left
      << std::setw(10) << "rule" << "shapes, first captured at\n";
  for (const SignatureReport* s : rows) {
    out << "  " << std::left << std::setw(26) << s->op << std::right << std::setw(9) << s->instances
        << std::setw(9) << s->batches << std::setw(9) << s->largest << "  " << std::left
        << std::setw(10) << s->rule << s->shapes << (s->site.empty() ? "" : "  " + s->site)
        << (s->note.empty() ? "" : "  [" + s->note + "]") << "\n";
  }
  for (const FlushReport& f : flushes) {
    if (f.count > 1) out << "  " << f.count << " flushes of ";
    out << (f.count > 1 ? "" : "  flush of ") << f.nodes << " ops: " << f.reason << at(f.site)
        << "\n";
  }
  for (const AtOnceReport& a : at_once) {
    out << "  not batched: " << a.op << " x" << a.count << ": " << a.reason << at(a.site) << "\n";
  }
  for (const PauseReport& p : pauses) {
    out << "  paused x" << p.count << ": "
        << (p.measured ? "eager was measured to be faster" : "few ops could be batched")
        << at(p.site) << ", so about " << p.calls
        << " later calls ran eagerly (batch(adaptive=False) always defers ops)\n";
  }
  if (!pauses.empty()) {
    out << "  hint: if the code reads values, use autobatch.map(function, instances): instances "
           "that read a value wait for each other, and their ops share batches\n";
  }
  if (backward_calls > 1) {
    out << "  hint: backward() ran " << backward_calls
        << " times inside the block, each on one instance; scope.backward(loss) collects the "
           "roots and runs them as one batched backward\n";
  }
  return out.str();
}

}  // namespace autobatch
