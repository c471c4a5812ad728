#include "autobatch/report.h"

#include "autobatch/schedule.h"

#include <algorithm>
#include <cctype>
#include <iomanip>
#include <set>
#include <sstream>

namespace autobatch {
namespace {

// Inputs kept before their bounds are computed on the spot, so that a long-lived scope that
// flushes often does not grow.
constexpr size_t kMaxKept = 16;

// Rows of a report, so that it stays bounded however long a block is open.
constexpr size_t kMaxRows = 10000;

// Flushes that are listed one by one; later ones are added to the first of their line.
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

// --- source lines whose ops run apart ---

using Rows = std::vector<const SignatureReport*>;

// Signatures of an op at a line from which on it is worth a word, where each has few ops.
constexpr size_t kManySignatures = 4;
constexpr uint64_t kFewOps = 4;

std::map<std::pair<std::string, std::string>, Rows> by_line(
    const std::vector<SignatureReport>& signatures) {
  std::map<std::pair<std::string, std::string>, Rows> lines;
  for (const SignatureReport& s : signatures) lines[{s.op, s.site}].push_back(&s);
  return lines;
}

// The sizes in "(Float[3, 8], Long[4])", operand by operand.
std::vector<std::vector<int64_t>> sizes_in(const std::string& shapes) {
  std::vector<std::vector<int64_t>> operands;
  bool inside = false;
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (shapes[i] == '[') operands.emplace_back();
    if (shapes[i] == '[' || shapes[i] == ']') inside = shapes[i] == '[';
    if (!inside || std::isdigit(static_cast<unsigned char>(shapes[i])) == 0) continue;
    size_t length = 0;
    operands.back().push_back(std::stoll(shapes.substr(i), &length));
    i += length - 1;
  }
  return operands;
}

// "dimension 0 of operand 0 and dimension 1 of operand 2": where the sizes of these rows differ.
std::string differing_dimensions(const Rows& rows) {
  const auto first = sizes_in(rows[0]->shapes);
  std::set<std::pair<size_t, size_t>> places;
  for (const SignatureReport* row : rows) {
    const auto sizes = sizes_in(row->shapes);
    if (sizes.size() != first.size()) return "the number of operands";
    for (size_t o = 0; o < first.size(); ++o) {
      if (sizes[o].size() != first[o].size()) return "the rank of operand " + std::to_string(o);
      for (size_t d = 0; d < first[o].size(); ++d) {
        if (sizes[o][d] != first[o][d]) places.emplace(o, d);
      }
    }
  }
  std::string out;
  for (const auto& [operand, dim] : places) {
    out += (out.empty() ? "dimension " : " and dimension ") + std::to_string(dim) + " of operand " +
           std::to_string(operand);
  }
  return out;
}

// Why an op of one line has many signatures with few ops each; empty if it has not.
std::string why_apart(const Rows& rows) {
  uint64_t ops = 0;
  std::set<std::string> shapes;
  for (const SignatureReport* row : rows) {
    ops += row->instances;
    shapes.insert(row->shapes);
  }
  if (rows.size() < kManySignatures || ops >= kFewOps * rows.size()) return "";
  if (2 * shapes.size() <= rows.size()) {
    return "weights or constants differ, so each has a call of its own; calls with the same ones "
           "join";
  }
  return "sizes differ in " + differing_dimensions(rows) +
         ", and this op has a batch for each; few different sizes (padding, where that is exact) "
         "join";
}

}  // namespace

uint64_t Report::lower_bound() const {
  for (const BoundInput& input : bound_inputs_) bound_ += bound_of(input);
  bound_inputs_.clear();
  return bound_;
}

void Report::add_pause(const std::string& site) {
  constexpr size_t kMost = 16;
  for (PauseReport& pause : pauses) {
    if (pause.site == site || pauses.size() == kMost) {
      ++pause.count;
      return;
    }
  }
  pauses.push_back({site, 1});
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

void Report::add_flush(const std::string& reason, const std::string& site, uint64_t nodes) {
  ++num_flushes;
  const auto [entry, is_new] = flush_index_.try_emplace(reason + '\n' + site, flushes.size());
  if (flushes.size() < kMaxFlushes || (is_new && flushes.size() < kMaxRows)) {
    flushes.push_back({reason, site, nodes, 1});
    return;
  }
  FlushReport& flush = flushes[std::min(entry->second, flushes.size() - 1)];
  flush.nodes += nodes;
  ++flush.count;
}

bool Report::knows_at_once(const std::string& op, const char* reason) {
  const auto found = at_once_index_.find({&op, reason});
  if (found == at_once_index_.end()) return false;
  ++at_once[found->second].count;
  return true;
}

void Report::add_at_once(const std::string& op, const char* reason, const std::string& site) {
  at_once_index_.emplace(std::pair(&op, reason), at_once.size());
  at_once.push_back({op, reason, site, 1});
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
  const auto lines = by_line(signatures);
  out << "  ops by line     " << lines.size()
      << " (about a batch for each, if no sizes, weights or "
         "constants differed)\n";
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
  for (const auto& [line, of_line] : lines) {
    const std::string reason = why_apart(of_line);
    if (reason.empty()) continue;
    out << "  apart: " << line.first << at(line.second) << " has " << of_line.size()
        << " signatures: " << reason << "\n";
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
    out << "  paused x" << p.count << ": few ops had others to join" << at(p.site)
        << ", so the next ones ran at once (batch(adaptive=False) defers always)\n";
  }
  if (!pauses.empty()) {
    out << "  hint: where code reads values, autobatch.map(function, instances) lets instances "
           "wait "
           "for each other, and batches across them\n";
  }
  if (backward_calls > 1) {
    out << "  hint: backward() ran " << backward_calls
        << " times inside the block, each on one instance; scope.backward(loss) collects the "
           "roots and runs them as one batched backward\n";
  }
  return out.str();
}

}  // namespace autobatch
