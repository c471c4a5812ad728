// Functions that the host provides; the host is the program that embeds the library. The functions
// find the line of the user's code, recognise interruptions, and take the interpreter's lock. If
// the host sets no hooks, no line is known, no error is an interruption, and no lock is taken.
#pragma once

#include "autobatch/export.h"

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

namespace autobatch {

// The place in the user's code that is running, as the host reports it.
struct Place {
  std::string site;       // the line, such as "model.py:12"; empty if unknown
  uint64_t position = 0;  // position within the line, as the host encodes it; 0: unknown
};
Place current_place();
AUTOBATCH_INTERNAL std::string current_site();
std::string current_caller();
// While a guard exists, current_site() returns `site`. An empty `site` has no effect.
class SiteGuard {
 public:
  explicit SiteGuard(std::string site);
  ~SiteGuard();
  SiteGuard(const SiteGuard&) = delete;
  SiteGuard& operator=(const SiteGuard&) = delete;

 private:
  std::string before_;
};

// Functions that depend on the host's language.
struct HostHooks {
  // Returns the place that the user's code has reached.
  std::function<Place()> place;
  // Describes the call stack around current_site(), in a format that the host chooses.
  std::function<std::string()> caller;
  // Whether the error must end the flush immediately (Ctrl-C). After other errors the batch runs
  // again with fewer members.
  std::function<bool(const std::exception&)> interrupts;
  // Adds a line to the error that the user will see.
  std::function<void(const std::exception&, const std::string&)> annotate;
  // Releases the interpreter's lock, and runs a function that may wait for another thread.
  std::function<void(const std::function<void()>&)> wait;
  // Takes the interpreter's lock and holds it until the returned object is destroyed. While the
  // object exists, no other thread of the interpreter can destroy a tensor.
  std::function<std::shared_ptr<void>()> hold;
  // Whether Meta kernels that are written in the interpreter's language can run without importing
  // modules. (In Python, importing torch._dynamo takes a second or more.)
  std::function<bool()> may_ask_meta;
  // Whether the user's code in the block may catch an error that is raised now.
  std::function<bool()> may_catch;
};
AUTOBATCH_INTERNAL void set_host_hooks(HostHooks hooks);
AUTOBATCH_INTERNAL bool host_interrupts(const std::exception& error);
AUTOBATCH_INTERNAL void host_wait(const std::function<void()>& wait);
std::shared_ptr<void> host_hold();
bool host_may_ask_meta();
bool host_may_catch();
void host_annotate(const std::exception& error, const std::string& note);

}  // namespace autobatch
